"""What a table's format is to the operations, and what the formats of other lock libraries have in common.

In their tables a lock is one item, with one holder. Ours, when it is the holder, keeps what the format has no place
for in one more attribute of that item, a map named `OURS`: the lease id, the version, the stamps, who is inside. The
other libraries carry attributes that they do not know along, and lose them when they take the lock: whatever stands in
that map counts only while the format's own attributes are those that were written together with it.

So the rules hold here as well, as far as a format allows: every change is one conditional write, each grant has a
lease id of its own, a lost reply loses nothing, a release waits for those who are inside. There are no fencing tokens,
no line, no slots: what cannot be had is a `LockValueError`.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar, NoReturn, Protocol

from airflow_dynamo_lock.protocol.attributes import decode, encode
from airflow_dynamo_lock.protocol.effects import Operation, Reply, Request, Stamp, T
from airflow_dynamo_lock.protocol.errors import LockRecordError, LockValueError
from airflow_dynamo_lock.protocol.limits import checked_key
from airflow_dynamo_lock.protocol.model import Change, Claim, Holder, LockRecord, Waiter
from airflow_dynamo_lock.protocol.native import NO_LINE, OVERTAKEN_MS, Turn, holder_values, took_over
from airflow_dynamo_lock.protocol.reading import TableReads
from airflow_dynamo_lock.protocol.records import read_holder

#: The attribute of an item in a foreign table that only we write.
OURS = "airflow_dynamo_lock"

_NONE = Change()


class Format(Protocol):
    """Builds the requests on one table, and reads its items. `native.NativeFormat` says what each of them is for."""

    @property
    def table(self) -> str: ...

    @property
    def service(self) -> str:
        """The AWS service that the requests are for, as the SDK names it."""
        ...

    @property
    def keys(self) -> Sequence[tuple[str, str, str]]:
        """The table's keys: name, role and type of each."""
        ...

    @property
    def ttl_attribute(self) -> str | None:
        """By which records expire; None if they do not."""
        ...

    @property
    def has_lines(self) -> bool:
        """Whether those who wait can stand in line."""
        ...

    def checked_key(self, key: str) -> str:
        """A lock's name, as this format can have one.

        :raises LockValueError: it cannot.
        """
        ...

    def checked_claim(self, claim: Claim) -> Claim:
        """The claim as this format can fulfil it.

        :raises LockValueError: it cannot.
        """
        ...

    def checked_set(self) -> None:
        """Whether several locks can be taken together.

        :raises LockValueError: they cannot.
        """
        ...

    def checked_capacity(self) -> None:
        """Whether a lock may have a capacity.

        :raises LockValueError: it has one slot.
        """
        ...

    def carry_out(self, operation: Operation[T]) -> Operation[T]:
        """The operation, with requests that only this format knows put into the service's own."""
        ...

    # A lock with one holder.
    def take_idle(
        self, claim: Claim, stamp: Stamp, seen: LockRecord | None = None, turn: Turn = NO_LINE
    ) -> Request: ...
    def take_again(self, claim: Claim, mine: Holder, stamp: Stamp) -> Request: ...
    def reclaim(
        self,
        claim: Claim,
        record: LockRecord,
        dead: Sequence[Holder],
        stamp: Stamp,
        turn: Turn = NO_LINE,
        leave: int = 0,
    ) -> Request: ...
    def put_right(self, claim: Claim, seen: LockRecord, token: int, stamp: Stamp) -> Request: ...
    def heartbeat(
        self, key: str, lease_id: str, lease_ms: int, stamp: Stamp, seen: str | None = None
    ) -> Request: ...
    def heartbeat_unless_ending(
        self,
        key: str,
        lease_id: str,
        lease_ms: int,
        stamp: Stamp,
        seen: str | None = None,
        change: Change = _NONE,
    ) -> Request: ...
    def enter(
        self, key: str, lease_id: str, process: str, lease_ms: int, stamp: Stamp, seen: str | None = None
    ) -> Request: ...
    def leave(self, key: str, lease_id: str, process: str, lease_ms: int, stamp: Stamp) -> Request: ...
    def release(self, key: str, lease_id: str, slots: int, stamp: Stamp, *, heard: bool) -> Request: ...
    def abandon(
        self, key: str, lease_id: str, grace_ms: int, stamp: Stamp, seen: str | None = None
    ) -> Request: ...
    def break_(self, key: str, holder: Holder, stamp: Stamp) -> Request: ...
    def forget(self, key: str, latest_token: int | None) -> Request: ...
    def get(self, key: str) -> Request: ...
    def batch_get(self, keys: Iterable[str], *, consistent: bool = False) -> list[Request]: ...
    def asked_for(self, request: Request) -> set[str]: ...
    def batch_records(self, output: Mapping[str, Any], server_ms: int | None) -> list[LockRecord]: ...
    def unprocessed_keys(self, output: Mapping[str, Any]) -> set[str]: ...
    def scan(self, cursor: Mapping[str, Any] | None, prefix: str = "") -> Request: ...
    def record(self, item: Mapping[str, Any], server_ms: int | None) -> LockRecord: ...

    # Several, sets of locks, and lines.
    def take_room(
        self, claim: Claim, stamp: Stamp, seen: LockRecord, turn: Turn = NO_LINE, leave: int = 0
    ) -> Request: ...
    def clear(self, key: str, dead: Sequence[Holder], stamp: Stamp) -> Request: ...
    def rest(self, key: str, holder: Holder, rest_ms: int, stamp: Stamp) -> Request: ...
    def set_capacity(self, key: str, capacity: int | None, seen: LockRecord, stamp: Stamp) -> Request: ...
    def found(self, key: str, capacity: int, stamp: Stamp) -> Request: ...
    def transaction(self, requests: Sequence[Request]) -> Request: ...
    def draw(self, key: str, priority: int, seen: LockRecord, stamp: Stamp) -> Request: ...
    def draw_exactly(self, claim: Claim, seen: LockRecord | None, stamp: Stamp) -> Request: ...
    def lower(self, key: str, place: str) -> Request: ...
    def unmark(self, key: str, place: str) -> Request: ...
    def move_mark(self, key: str, place: str) -> Request: ...
    def stand(self, waiter: Waiter) -> Request: ...
    def hand_place(self, key: str, place: str, process: str, stamp: Stamp) -> Request: ...
    def step_out(self, key: str, place: str) -> Request: ...
    def line(self, key: str, limit: int | None, cursor: Mapping[str, Any] | None) -> Request: ...
    def lock_in(self, reply: Reply) -> LockRecord | None: ...
    def waiters(self, output: Mapping[str, Any]) -> list[Waiter]: ...


class OneHolder:
    """A format without slots, sets or lines."""

    name: ClassVar[str]
    has_lines: ClassVar[bool] = False

    def checked_claim(self, claim: Claim) -> Claim:
        """See `Format`. Nobody waits in line here, so that nobody is asked to."""
        for wanted, what in (
            (claim.capacity != 1, "be shared, or have more than one slot"),
            (claim.min_hold_ms, "be held for a least time"),
            (claim.priority, "have a line for those who wait, nor priorities in it"),
        ):
            if wanted:
                self._cannot(what)
        return replace(claim, fair=False)

    def checked_set(self) -> None:
        """See `Format`."""
        self._no_sets()

    def checked_capacity(self) -> None:
        """See `Format`."""
        self._no_slots()

    def _cannot(self, what: str) -> NoReturn:
        raise LockValueError(
            f"In the format {self.name!r} a lock cannot {what}: use a table of the format 'native' for that."
        )

    def _no_slots(self, *_: Any, **__: Any) -> NoReturn:
        self._cannot("be shared, or have more than one slot")

    def _no_line(self, *_: Any, **__: Any) -> NoReturn:
        self._cannot("have a line for those who wait, nor priorities in it")

    def _no_sets(self, *_: Any, **__: Any) -> NoReturn:
        self._cannot("be taken together with others")

    def _no_rest(self, *_: Any, **__: Any) -> NoReturn:
        self._cannot("be held for a least time")

    take_room = clear = set_capacity = found = _no_slots
    draw = draw_exactly = lower = unmark = move_mark = _no_line
    stand = hand_place = step_out = line = lock_in = waiters = _no_line
    transaction = _no_sets
    rest = _no_rest


@dataclass(frozen=True)
class Expiry:
    """An attribute that says when a lease, or an item, runs out: a time, plus the lease.

    :ivar base: what is added to the lease.
    :ivar unit_ms: 1 if it is in milliseconds, 1000 if in seconds.
    """

    attribute: str
    base: int
    unit_ms: int

    def after(self, lease_ms: int) -> int:
        """For a lease of that length."""
        return self.base + -(-lease_ms // self.unit_ms)

    @property
    def lease(self) -> str:
        """The lease that the item shows, in that unit."""
        return "#ours.#lease_ms" if self.unit_ms == 1 else "#ours.#lease_s"


@dataclass(frozen=True)
class ForeignTable(TableReads, OneHolder):
    """The DynamoDB table of another lock library.

    :ivar max_clock_skew_ms: by how much longer than they are counted on leases are, where others go by the clock.
    :ivar partition_key: the name of that key.
    :ivar sort_key: the same; empty if the table has none. Then a lock's name is the partition key. Else it may be
        ``partition key::sort key``; without ``::`` its sort key is `plain_sort`.
    """

    table: str
    max_clock_skew_ms: int
    partition_key: str = ""
    sort_key: str = ""
    service: str = field(default="dynamodb", init=False)

    #: What the sort key of a lock is whose name has none.
    plain_sort: ClassVar[str] = "-"
    #: The attribute that another holder never leaves as it was.
    mark: ClassVar[str]
    #: Whether it is another one after each sign of life, too.
    renewed: ClassVar[bool] = True
    default_partition_key: ClassVar[str]
    default_sort_key: ClassVar[str] = ""
    ttl_attribute: ClassVar[str | None] = None
    #: In which a lock can be seen to be free: a condition, with its values.
    free: ClassVar[tuple[str, Mapping[str, Any]]] = ("attribute_not_exists(#pk)", {})
    #: The attributes that only a free lock has.
    cleared: ClassVar[Sequence[str]] = ()

    def __post_init__(self) -> None:
        if not self.partition_key:
            object.__setattr__(self, "partition_key", self.default_partition_key)
        if not self.sort_key:
            object.__setattr__(self, "sort_key", self.default_sort_key)

    # -- what the formats differ in -----------------------------------------------------------------------------

    @abstractmethod
    def foreign(self, values: Mapping[str, Any]) -> Holder | None:
        """Who holds the lock, if none of us does.

        :raises TypeError, ValueError: that cannot be told.
        """

    @abstractmethod
    def marked(self, owner: str, lease_id: str, stamp: Stamp) -> str:
        """The `mark` of a lease of ours."""

    def taken(self, owner: str, lease_ms: int) -> Mapping[str, Any]:
        """What a holder writes besides his mark."""
        return {}

    def lasting(self, lease_ms: int) -> Mapping[str, Any]:
        """What says how long the lease is."""
        return {}

    def expiries(self, stamp: Stamp) -> Sequence[Expiry]:
        """What says when it ends, and when DynamoDB may delete it."""
        return ()

    def unchanged(self, dead: Holder) -> tuple[str, Mapping[str, Any]]:
        """That a foreign holder is as he was seen: a condition, with its values."""
        return f"#{self.mark} = :seen_mark", {":seen_mark": dead.version}

    def emptied(self, stamp: Stamp) -> Mapping[str, Any] | None:
        """What stands in a free lock's item; None if there is none."""
        return None

    def kept(self, data: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """The attributes that the data of a lock are in."""
        if data:
            self._cannot("keep data")
        return {}

    def data_of(self, values: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The data of a lock."""
        return None

    # -- names --------------------------------------------------------------------------------------------------

    @property
    def keys(self) -> Sequence[tuple[str, str, str]]:
        """See `Format`."""
        sort = [(self.sort_key, "RANGE", "S")] if self.sort_key else []
        return [(self.partition_key, "HASH", "S"), *sort]

    def checked_key(self, key: str) -> str:
        """See `Format`."""
        partition, _, sort = checked_key(key).partition("::")
        if self.sort_key and (not partition or (sort == self.plain_sort) or key.endswith("::")):
            raise LockValueError(
                f"A lock in the table {self.table!r} is named 'partition key::sort key', or by the partition key alone "
                f"if the sort key is {self.plain_sort!r}; {key!r} is neither."
            )
        return key

    def checked_claim(self, claim: Claim) -> Claim:
        """See `Format`."""
        self.kept(claim.data)
        return super().checked_claim(claim)

    def carry_out(self, operation: Operation[T]) -> Operation[T]:
        """See `Format`."""
        return operation

    def item_key(self, key: str) -> Mapping[str, Any]:
        """See `TableReads`."""
        if not self.sort_key:
            return {self.partition_key: encode(key)}
        partition, _, sort = key.partition("::")
        return {self.partition_key: encode(partition), self.sort_key: encode(sort or self.plain_sort)}

    def name_of(self, item: Mapping[str, Any]) -> str:
        """See `TableReads`."""
        partition = str(item.get(self.partition_key, {}).get("S", "?"))
        sort = str(item.get(self.sort_key, {}).get("S", self.plain_sort))
        return partition if sort == self.plain_sort else f"{partition}::{sort}"

    # -- take ---------------------------------------------------------------------------------------------------

    def take_idle(
        self, claim: Claim, stamp: Stamp, seen: LockRecord | None = None, turn: Turn = NO_LINE
    ) -> Request:
        """Take a lock that nobody holds."""
        condition, values = self.free
        if claim.only_existing:
            condition = f"attribute_exists(#pk) AND ({condition})"
        return self._take(claim, stamp, condition, values, took_over=False)

    def reclaim(
        self,
        claim: Claim,
        record: LockRecord,
        dead: Sequence[Holder],
        stamp: Stamp,
        turn: Turn = NO_LINE,
        leave: int = 0,
    ) -> Request:
        """Take the place of a dead holder who is still as he was seen."""
        (one,) = dead
        condition, values = self._unchanged(one)
        return self._take(claim, stamp, condition, values, took_over=took_over(dead))

    def _take(
        self, claim: Claim, stamp: Stamp, condition: str, values: Mapping[str, Any], *, took_over: bool
    ) -> Request:
        mark = self.marked(claim.owner, claim.lease_id, stamp)
        sets = {
            self.mark: mark,
            **self.taken(claim.owner, claim.lease_ms),
            **self.lasting(claim.lease_ms),
            **{each.attribute: each.after(claim.lease_ms) for each in self.expiries(stamp)},
            **self.kept(claim.data),
            OURS: {
                **holder_values(claim, stamp, took_over=took_over),
                "lease_id": claim.lease_id,
                "mark": mark,
                "lease_s": -(-claim.lease_ms // 1000),
            },
        }
        remove = [*self.cleared, *self.no_data(claim.data)]
        return self._write(claim.key, sets, condition, values, remove=remove)

    def no_data(self, data: Mapping[str, Any] | None) -> list[str]:
        """What is to be removed for an empty map of data."""
        return []

    def _unchanged(self, holder: Holder) -> tuple[str, Mapping[str, Any]]:
        if not holder.ours:
            return self.unchanged(holder)
        return f"#ours.#version = :seen AND {self._mine}", {":seen": holder.version, ":me": holder.lease_id}

    @property
    def _mine(self) -> str:
        """That the lock is held by a lease of ours, `:me`."""
        return f"#ours.#lease_id = :me AND #{self.mark} = #ours.#mark"

    def take_again(self, claim: Claim, mine: Holder, stamp: Stamp) -> Request:
        """Go on holding what an earlier write of ours took (rule R5)."""
        return self._sign_of_life(
            claim.key, claim.lease_id, stamp, mine.version, sets={"acquired_at": stamp.best_ms}
        )

    def put_right(self, claim: Claim, seen: LockRecord, token: int, stamp: Stamp) -> Request:
        """Replace the times of a grant whose clock turned out to be wrong (rule R3)."""
        version = seen.holders[claim.lease_id].version
        return self._sign_of_life(
            claim.key, claim.lease_id, stamp, version, sets={"acquired_at": stamp.best_ms}
        )

    # -- keep ---------------------------------------------------------------------------------------------------

    def heartbeat(
        self, key: str, lease_id: str, lease_ms: int, stamp: Stamp, seen: str | None = None
    ) -> Request:
        """Show that the holder lives."""
        return self._sign_of_life(key, lease_id, stamp, seen)

    def heartbeat_unless_ending(
        self,
        key: str,
        lease_id: str,
        lease_ms: int,
        stamp: Stamp,
        seen: str | None = None,
        change: Change = _NONE,
    ) -> Request:
        """Show that the holder lives, while the lease has not been abandoned."""
        longer = change.lease_ms is not None
        return self._sign_of_life(
            key,
            lease_id,
            stamp,
            seen,
            " AND attribute_not_exists(#ours.#ending)"
            + (" AND #ours.#lease_ms <= :new_lease_ms" if longer else ""),
            lease_ms=change.lease_ms,
            data=change.data,
        )

    def enter(
        self, key: str, lease_id: str, process: str, lease_ms: int, stamp: Stamp, seen: str | None = None
    ) -> Request:
        """Note that a guarded process is inside, and beat."""
        return self._sign_of_life(
            key,
            lease_id,
            stamp,
            seen,
            " AND attribute_not_exists(#ours.#ending)",
            sets={"inside.#process": stamp.best_ms},
            process=process,
        )

    def abandon(
        self, key: str, lease_id: str, grace_ms: int, stamp: Stamp, seen: str | None = None
    ) -> Request:
        """Shorten a lease to a grace and let nobody enter any more (rule R8)."""
        return self._sign_of_life(
            key,
            lease_id,
            stamp,
            seen,
            " AND attribute_not_exists(#ours.#ending)",
            sets={"ending": True},
            lease_ms=grace_ms,
        )

    def _sign_of_life(
        self,
        key: str,
        lease_id: str,
        stamp: Stamp,
        seen: str | None,
        condition: str = "",
        *,
        sets: Mapping[str, Any] | None = None,
        lease_ms: int | None = None,
        data: Mapping[str, Any] | None = None,
        process: str = "",
    ) -> Request:
        """A write that gives the lease a new version; `native` tells what it must not do when it arrives late.

        :param sets: in our own attribute.
        :param lease_ms: how long the lease is from then on, if that changes.
        """
        stamped = stamp.server_ms is not None
        if seen is not None:
            order = " AND #ours.#version = :seen"
        else:
            order = " AND #ours.#renewed_at <= :no_newer" if stamped else ""
        ours = {
            "version": stamp.version,
            **({"renewed_at": stamp.server_ms} if stamped else {}),
            **(sets or {}),
        }
        theirs: dict[str, Any] = {**self.kept(data)}
        if self.renewed:
            theirs[self.mark] = ours["mark"] = self.marked("", lease_id, stamp)
        if lease_ms is not None:
            ours |= {"lease_ms": lease_ms, "lease_s": -(-lease_ms // 1000)}
            theirs |= self.lasting(lease_ms)
        values: dict[str, Any] = {
            ":me": lease_id,
            ":seen": seen,
            ":no_newer": stamp.best_ms + OVERTAKEN_MS,
            ":new_lease_ms": lease_ms,
        }
        update = []
        for index, (name, value) in enumerate(ours.items()):
            update.append(f"#ours.#{name} = :ours{index}")
            values[f":ours{index}"] = value
        for index, expiry in enumerate(self.expiries(stamp)):
            # A process that is inside counts on less than the lease, and must not shorten it for the others.
            lease = f":lease{index}" if lease_ms is not None else expiry.lease
            values |= {f":base{index}": expiry.base, f":lease{index}": -(-(lease_ms or 0) // expiry.unit_ms)}
            update.append(f"#{expiry.attribute} = :base{index} + {lease}")
        return self._write(
            key,
            theirs,
            self._mine + order + condition,
            values,
            more=update,
            remove=[*([] if stamped else ["#ours.#renewed_at"]), *self.no_data(data)],
            process=process,
        )

    # -- give back ----------------------------------------------------------------------------------------------

    def leave(self, key: str, lease_id: str, process: str, lease_ms: int, stamp: Stamp) -> Request:
        """Note that a guarded process has left."""
        remove = ["#ours.#inside.#process"]
        return self._write(key, {}, self._mine, {":me": lease_id}, remove=remove, process=process)

    def release(self, key: str, lease_id: str, slots: int, stamp: Stamp, *, heard: bool) -> Request:
        """Give the lock back, if nobody is inside any more (rule R8)."""
        condition = f"{self._mine} AND size(#ours.#inside) = :none"
        return self._free(key, condition, {":me": lease_id, ":none": 0}, stamp)

    def forget(self, key: str, latest_token: int | None) -> Request:
        """Delete the item of a lock without holder. It has no token, so `latest_token` is not used."""
        return self._request("DeleteItem", key, "", *self.free)

    def break_(self, key: str, holder: Holder, stamp: Stamp) -> Request:
        """Take the lock away from its holder, whoever is inside. For people."""
        return self._free(key, *self._unchanged(holder), stamp)

    def _free(self, key: str, condition: str, values: Mapping[str, Any], stamp: Stamp) -> Request:
        empty = self.emptied(stamp)
        if empty is not None:
            return self._write(key, empty, condition, values, remove=["#ours"])
        return self._request("DeleteItem", key, "", condition, values)

    # -- reads --------------------------------------------------------------------------------------------------

    def scan(self, cursor: Mapping[str, Any] | None, prefix: str = "") -> Request:
        """Read one page of all locks."""
        params: dict[str, Any] = {"TableName": self.table, "ConsistentRead": True}
        if prefix:
            params |= {
                "FilterExpression": "begins_with(#pk, :prefix)",
                "ExpressionAttributeNames": {"#pk": self.partition_key},
                "ExpressionAttributeValues": {":prefix": encode(prefix)},
            }
        return Request("Scan", params | ({"ExclusiveStartKey": cursor} if cursor else {}))

    def record(self, item: Mapping[str, Any], server_ms: int | None) -> LockRecord:
        """The lock that an item shows.

        :raises LockRecordError: it shows none.
        """
        try:
            values = {name: decode(attribute) for name, attribute in item.items()}
            holder = self._holder(values)
            if any(item[name] != value for name, value in self.item_key(self.name_of(item)).items()):
                raise ValueError("its keys have no name, for there is '::' in the partition key")
        except (TypeError, ValueError, KeyError, OverflowError, RecursionError) as wrong:
            why = f"{wrong} is missing" if isinstance(wrong, KeyError) else str(wrong)
            raise LockRecordError(
                f"The item of the lock {self.name_of(item)!r} in table {self.table!r} is not one of the format "
                f"{self.name!r} ({why}); it was left as it is: check the format, or look at the item before you delete "
                "it."
            ) from wrong
        return LockRecord(
            self.name_of(item),
            capacity=1,
            available=0 if holder else 1,
            holders={holder.lease_id: holder} if holder else {},
            token=0,
            data=self.data_of(values),
            read_at_ms=server_ms,
        )

    def _holder(self, values: Mapping[str, Any]) -> Holder | None:
        ours = values.get(OURS)
        if isinstance(ours, dict) and ours.get("mark") == values.get(self.mark) and ours.get("mark"):
            return read_holder(ours["lease_id"], ours)
        return self.foreign(values)

    # -- how they are put together ------------------------------------------------------------------------------

    def _write(
        self,
        key: str,
        sets: Mapping[str, Any],
        condition: str,
        values: Mapping[str, Any],
        *,
        more: Sequence[str] = (),
        remove: Sequence[str] = (),
        process: str = "",
    ) -> Request:
        """An `UpdateItem`.

        :param sets: attributes of the item, by name.
        :param more: further assignments.
        :param remove: paths, or names of attributes.
        """
        assigned = [f"#{name} = :{name}" for name in sets] + list(more)
        gone = [path if path.startswith("#") else f"#{path}" for path in remove]
        update = (f"SET {', '.join(assigned)} " if assigned else "") + (
            f"REMOVE {', '.join(gone)}" if gone else ""
        )
        return self._request(
            "UpdateItem", key, update, condition, {**values, **{f":{n}": v for n, v in sets.items()}}, process
        )

    def _request(
        self,
        action: str,
        key: str,
        update: str,
        condition: str,
        values: Mapping[str, Any],
        process: str = "",
    ) -> Request:
        used = _placeholders(f"{update} {condition}")
        named = {"#pk": self.partition_key, "#ours": OURS, "#process": process}
        sent = {alias: encode(value) for alias, value in values.items() if alias in used}
        return Request(
            action,
            {
                "TableName": self.table,
                "Key": self.item_key(key),
                **({"UpdateExpression": update, "ReturnValues": "ALL_NEW"} if update else {}),
                "ConditionExpression": condition,
                "ExpressionAttributeNames": {
                    alias: named.get(alias, alias[1:]) for alias in used if alias[0] == "#"
                },
                **({"ExpressionAttributeValues": sent} if sent else {}),
                "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
            },
        )


@lru_cache(maxsize=256)
def _placeholders(expressions: str) -> frozenset[str]:
    return frozenset(re.findall(r"[#:]\w+", expressions))


def text(values: Mapping[str, Any], name: str) -> str:
    """An attribute that is to be text."""
    if not isinstance(values[name], str):
        raise TypeError(f"its attribute {name!r} is not text")
    return str(values[name])


def milliseconds(values: Mapping[str, Any], name: str, unit_ms: int = 1) -> int:
    """An attribute that is to be a time or a duration, in milliseconds; the last time of all, if it is later.

    :param unit_ms: 1000 if it is in seconds.
    """
    return checked_ms(name, values[name], unit_ms)


def checked_ms(name: str, value: Any, unit_ms: int = 1) -> int:
    """See `milliseconds`.

    :raises TypeError, ValueError: it can be neither.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"its attribute {name!r} is not a number")
    if not value >= 0:
        raise ValueError(f"its attribute {name!r} is no time")
    # There are programs that hold a lock "for ever".
    return int(min(value * unit_ms, LAST_MS))


#: The end of the year 9999, epoch milliseconds: what a datetime can show.
LAST_MS = 253_402_300_799_999
