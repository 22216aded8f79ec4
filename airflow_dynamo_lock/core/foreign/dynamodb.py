"""What the DynamoDB tables of other lock libraries have in common.

In their tables a lock is one item with one holder. Our holder keeps what the format has no place for in one more
attribute of that item, a map named `OURS`: lease id, version, stamps, processes inside. Other libraries carry unknown
attributes along and lose them when they take the lock, so that map counts only while the format's own attributes are
those that were written together with it.

The rules hold here as far as a format allows: every change is one conditional write, each grant has a lease id of its
own, a lost reply loses nothing, a release waits for the processes inside. There are no fencing tokens, no queue and no
slots.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from airflow_dynamo_lock.core.effects import Operation, Request, Stamp, T
from airflow_dynamo_lock.core.foreign.one_holder import OneHolder
from airflow_dynamo_lock.core.model.arguments import checked_key
from airflow_dynamo_lock.core.model.claim import Change, Claim
from airflow_dynamo_lock.core.model.errors import LockRecordError, LockValueError
from airflow_dynamo_lock.core.model.record import Holder, LockRecord
from airflow_dynamo_lock.core.table.codec import decode, encode
from airflow_dynamo_lock.core.table.expressions import OVERTAKEN_MS, placeholders, took_over
from airflow_dynamo_lock.core.table.format import QUEUE_EMPTY, HeadUpdate
from airflow_dynamo_lock.core.table.items import holder_values, read_holder
from airflow_dynamo_lock.core.table.reads import TableReads

#: The attribute of an item in a foreign table that only we write.
OURS = "airflow_dynamo_lock"


_NONE = Change()


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

    def acquire_idle(
        self, claim: Claim, stamp: Stamp, seen: LockRecord | None = None, turn: HeadUpdate = QUEUE_EMPTY
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
        turn: HeadUpdate = QUEUE_EMPTY,
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

    def reacquire(self, claim: Claim, mine: Holder, stamp: Stamp) -> Request:
        """Go on holding what an earlier write of ours took (rule R5)."""
        return self._renewal(
            claim.key, claim.lease_id, stamp, mine.version, sets={"acquired_at": stamp.best_ms}
        )

    def correct_grant(self, claim: Claim, seen: LockRecord, token: int, stamp: Stamp) -> Request:
        """Replace the times of a grant whose clock turned out to be wrong (rule R3)."""
        version = seen.holders[claim.lease_id].version
        return self._renewal(claim.key, claim.lease_id, stamp, version, sets={"acquired_at": stamp.best_ms})

    # -- keep ---------------------------------------------------------------------------------------------------

    def heartbeat(
        self, key: str, lease_id: str, lease_ms: int, stamp: Stamp, seen: str | None = None
    ) -> Request:
        """Show that the holder lives."""
        return self._renewal(key, lease_id, stamp, seen)

    def heartbeat_unless_draining(
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
        return self._renewal(
            key,
            lease_id,
            stamp,
            seen,
            " AND attribute_not_exists(#ours.#draining)"
            + (" AND #ours.#lease_ms <= :new_lease_ms" if longer else ""),
            lease_ms=change.lease_ms,
            data=change.data,
        )

    def enter(
        self, key: str, lease_id: str, process: str, lease_ms: int, stamp: Stamp, seen: str | None = None
    ) -> Request:
        """Note that a guarded process is inside, and beat."""
        return self._renewal(
            key,
            lease_id,
            stamp,
            seen,
            " AND attribute_not_exists(#ours.#draining)",
            sets={"processes.#process": stamp.best_ms},
            process=process,
        )

    def drain(self, key: str, lease_id: str, grace_ms: int, stamp: Stamp, seen: str | None = None) -> Request:
        """Shorten a lease to a grace and let nobody enter any more (rule R8)."""
        return self._renewal(
            key,
            lease_id,
            stamp,
            seen,
            " AND attribute_not_exists(#ours.#draining)",
            sets={"draining": True},
            lease_ms=grace_ms,
        )

    def _renewal(
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
        remove = ["#ours.#processes.#process"]
        return self._write(key, {}, self._mine, {":me": lease_id}, remove=remove, process=process)

    def release(self, key: str, lease_id: str, slots: int, stamp: Stamp, *, confirmed: bool) -> Request:
        """Give the lock back, if nobody is inside any more (rule R8)."""
        condition = f"{self._mine} AND size(#ours.#processes) = :none"
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
        used = placeholders(f"{update} {condition}")
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
