"""Our own table format: the record of a lock, and each conditional write on it.

The record of the lock `key` is the item ``{key, entry: "lock"}``; other entries may stand beside it under the same
key. Every write is one `UpdateItem` whose condition is the whole of its safety (rule R1): it names what must still be
true, never what was read some time before. Every write also pushes ``expires_at`` ahead, so that DynamoDB's TTL never
comes near a record in use.

A refused write asks for the item as it stands (``ALL_OLD``), so a loser learns in the same request who won (rule R2).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from airflow_dynamo_lock.protocol.attributes import decode, encode
from airflow_dynamo_lock.protocol.effects import Request, Stamp, T
from airflow_dynamo_lock.protocol.errors import LockRecordError
from airflow_dynamo_lock.protocol.model import Claim, Holder, LockRecord

PARTITION_KEY = "key"
SORT_KEY = "entry"
TTL_ATTRIBUTE = "expires_at"
LOCK_ENTRY = "lock"

#: How long an idle record outlives its last write, so that its fencing token is remembered (rule R10).
RETENTION_MS = 7 * 24 * 3600 * 1000

# The end of the year 9999, epoch milliseconds: what a datetime can show.
_LAST_MOMENT_MS = 253_402_300_799_999

#: What BatchGetItem takes at most.
BATCH = 100

# Every attribute is written as a placeholder: several of the names are DynamoDB's reserved words, or may become so.
_ATTRIBUTES = [
    "key",
    "entry",
    "capacity",
    "available",
    "holders",
    "token",
    "data",
    "expires_at",
    "version",
    "acquired_at",
    "renewed_at",
    "lease_ms",
    "inside",
    "ending",
]


@dataclass(frozen=True)
class NativeFormat:
    """Builds requests for one lock table and reads its items."""

    table: str

    # -- writes -------------------------------------------------------------------------------------------------

    def take_idle(self, claim: Claim, stamp: Stamp) -> Request:
        """Take a lock that nobody holds, or that never was."""
        return self._write(
            claim.key,
            "SET #holders = :holders, #available = :left, #capacity = :capacity, "
            "#token = if_not_exists(#token, :seed) + :one, #expires_at = :expires_at" + _data(claim),
            # The size guards a record whose counter somebody damaged: held slots are never overwritten. The types keep
            # off what `record` could not read, so that a damaged record is left as it is.
            "attribute_not_exists(#key) OR (attribute_type(#holders, :map) AND attribute_type(#capacity, :number) AND "
            "attribute_type(#token, :number) AND (attribute_not_exists(#data) OR attribute_type(#data, :map)) AND "
            "#available = #capacity AND size(#holders) = :zero)",
            {
                ":holders": {claim.lease_id: _holder(claim, stamp)},
                ":left": claim.capacity - claim.slots,
                ":capacity": claim.capacity,
                ":seed": stamp.best_ms,
                ":one": 1,
                ":zero": 0,
                ":map": "M",
                ":number": "N",
                ":expires_at": _expiry(stamp, claim.lease_ms),
                ":data": claim.data,
            },
        )

    def take_room(self, claim: Claim, stamp: Stamp) -> Request:
        """Take free slots of a lock that others hold too."""
        return self._write(
            claim.key,
            "SET #holders.#me = :me, #available = #available - :slots, #token = #token + :one, "
            "#expires_at = :expires_at" + _data(claim),
            "#available >= :slots AND #capacity = :capacity AND attribute_not_exists(#holders.#me)",
            {
                ":me": _holder(claim, stamp),
                ":slots": claim.slots,
                ":capacity": claim.capacity,
                ":one": 1,
                ":expires_at": _expiry(stamp, claim.lease_ms),
                ":data": claim.data,
            },
            me=claim.lease_id,
        )

    def reclaim(self, claim: Claim, record: LockRecord, dead: Sequence[Holder], stamp: Stamp) -> Request:
        """Take the place of dead holders, in the same write. Conditional on each one's *version*: one that beat in
        the meantime is alive and wins (rule R3)."""
        names = {f"dead{i}": holder.lease_id for i, holder in enumerate(dead)}
        values: dict[str, Any] = {
            ":me": _holder(claim, stamp),
            ":one": 1,
            ":capacity": claim.capacity,
            ":expires_at": _expiry(stamp, claim.lease_ms),
            ":data": claim.data,
        }
        values |= {f":version{i}": holder.version for i, holder in enumerate(dead)}
        conditions = [f"#holders.#dead{i}.#version = :version{i}" for i in range(len(dead))]
        if len(dead) == len(record.holders):
            # Nobody is left, so the counters start afresh, and the capacity may be another.
            conditions.append("size(#holders) = :holders")
            counters = "#available = :left, #capacity = :capacity"
            values |= {":holders": len(dead), ":left": claim.capacity - claim.slots}
        else:
            conditions.append("#capacity = :capacity AND #available >= :need")
            counters = "#available = #available + :net"
            net = sum(holder.slots for holder in dead) - claim.slots
            values |= {":net": net, ":need": max(0, -net)}
        return self._write(
            claim.key,
            f"SET #holders.#me = :me, {counters}, #token = #token + :one, #expires_at = :expires_at{_data(claim)} "
            f"REMOVE {', '.join(f'#holders.#{name}' for name in names)}",
            " AND ".join([*conditions, "attribute_not_exists(#holders.#me)"]),
            values,
            me=claim.lease_id,
            **names,
        )

    def heartbeat(
        self, key: str, lease_id: str, lease_ms: int, stamp: Stamp, *, unless_ending: bool = False
    ) -> Request:
        """Show that the holder lives; `unless_ending`, only while the lease has not been abandoned."""
        condition = " AND attribute_not_exists(#holders.#me.#ending)" if unless_ending else ""
        return self._sign_of_life(key, lease_id, lease_ms, stamp, condition=condition)

    def take_again(self, claim: Claim, stamp: Stamp) -> Request:
        """Go on holding what an earlier write of ours took (rule R5). It gets a token of its own: what the earlier
        one was given cannot be told once others took slots as well, and nobody has heard of it."""
        return self._sign_of_life(
            claim.key, claim.lease_id, claim.lease_ms, stamp, ", #token = #token + :one", values={":one": 1}
        )

    def put_right(self, claim: Claim, seen: int, token: int, stamp: Stamp) -> Request:
        """Replace the times, and the token seeded from one, of a grant whose clock turned out to be wrong (R3, R10)."""
        return self._sign_of_life(
            claim.key,
            claim.lease_id,
            claim.lease_ms,
            stamp,
            ", #token = :token, #holders.#me.#acquired_at = :acquired_at",
            " AND #token = :seen",
            values={":token": token, ":seen": seen, ":acquired_at": stamp.best_ms},
        )

    def enter(self, key: str, lease_id: str, process: str, lease_ms: int, stamp: Stamp) -> Request:
        """Note that a guarded process is inside, and beat."""
        return self._sign_of_life(
            key,
            lease_id,
            lease_ms,
            stamp,
            ", #holders.#me.#inside.#process = :entered",
            " AND attribute_not_exists(#holders.#me.#ending)",
            values={":entered": stamp.best_ms},
            process=process,
        )

    def leave(self, key: str, lease_id: str, process: str, lease_ms: int, stamp: Stamp) -> Request:
        """Note that a guarded process has left."""
        return self._write(
            key,
            "SET #expires_at = :expires_at REMOVE #holders.#me.#inside.#process",
            "attribute_exists(#holders.#me)",
            {":expires_at": _expiry(stamp, lease_ms)},
            me=lease_id,
            process=process,
        )

    def release(self, key: str, lease_id: str, slots: int, stamp: Stamp) -> Request:
        """Give the slots back, if nobody is inside any more (rule R8)."""
        return self._remove(
            key, lease_id, slots, stamp, " AND size(#holders.#me.#inside) = :zero", {":zero": 0}
        )

    def break_(self, key: str, lease_id: str, slots: int, stamp: Stamp) -> Request:
        """Take a lease away from its holder, whoever is inside. For people."""
        return self._remove(key, lease_id, slots, stamp, "", {})

    def abandon(self, key: str, lease_id: str, grace_ms: int, stamp: Stamp) -> Request:
        """Shorten a lease to a grace and let nobody enter any more (rule R8). Only once: a second write would
        lengthen what the first one has shortened."""
        return self._sign_of_life(
            key,
            lease_id,
            grace_ms,
            stamp,
            ", #holders.#me.#ending = :ending, #holders.#me.#lease_ms = :lease_ms",
            " AND attribute_not_exists(#holders.#me.#ending)",
            values={":ending": True, ":lease_ms": grace_ms},
        )

    # -- reads --------------------------------------------------------------------------------------------------

    def get(self, key: str) -> Request:
        """Read one lock, consistently."""
        return Request("GetItem", {"TableName": self.table, "Key": _item_key(key), "ConsistentRead": True})

    def batch_get(self, keys: Iterable[str]) -> list[Request]:
        """Read many locks, 100 in a request, eventually consistent: half the price, and a stale answer only wakes a
        waiter for nothing or a poll later (rule R11)."""
        wanted = [_item_key(key) for key in keys]
        return [
            Request("BatchGetItem", {"RequestItems": {self.table: {"Keys": wanted[i : i + BATCH]}}})
            for i in range(0, len(wanted), BATCH)
        ]

    def batch_records(self, output: Mapping[str, Any], server_ms: int | None) -> list[LockRecord]:
        """The locks in the answer to a `batch_get`. Damaged ones are left out: whoever tries to take them is told."""
        records = []
        for item in output.get("Responses", {}).get(self.table, ()):
            try:
                records.append(self.record(item, server_ms))
            except LockRecordError:
                continue
        return records

    def unprocessed_keys(self, output: Mapping[str, Any]) -> set[str]:
        """The keys that a `batch_get` did not get to."""
        left = output.get("UnprocessedKeys", {}).get(self.table, {}).get("Keys", ())
        return {item[PARTITION_KEY]["S"] for item in left}

    def scan(self, cursor: Mapping[str, Any] | None) -> Request:
        """Read one page of all locks, from where `cursor` (the last page's ``LastEvaluatedKey``) points."""
        params: dict[str, Any] = {
            "TableName": self.table,
            "FilterExpression": "#entry = :lock",
            "ExpressionAttributeNames": {"#entry": SORT_KEY},
            "ExpressionAttributeValues": {":lock": encode(LOCK_ENTRY)},
            "ConsistentRead": True,
        }
        return Request("Scan", params | ({"ExclusiveStartKey": cursor} if cursor else {}))

    def record(self, item: Mapping[str, Any], server_ms: int | None) -> LockRecord:
        """The lock that an item describes. Attributes that we do not know are let be.

        :raises LockRecordError: it does not describe one.
        """
        try:
            values = {name: decode(attribute) for name, attribute in item.items() if name in _ATTRIBUTES}
            record = LockRecord(
                key=_typed(values["key"], str),
                capacity=_typed(values["capacity"], int),
                available=_typed(values["available"], int),
                holders={name: _read_holder(name, each) for name, each in values["holders"].items()},
                token=_typed(values["token"], int),
                data=None if values.get("data") is None else _typed(values["data"], dict),
                expires_at=values.get("expires_at"),
                read_at_ms=server_ms,
            )
            held = sum(holder.slots for holder in record.holders.values())
            if record.available + held != record.capacity:
                raise ValueError(
                    f"{record.available} slots available and {held} held do not make its capacity of {record.capacity}"
                )
        except (KeyError, TypeError, ValueError, AttributeError) as wrong:
            name = item.get(PARTITION_KEY, {}).get("S", "?")
            why = f"its attribute {wrong} is missing" if isinstance(wrong, KeyError) else str(wrong)
            raise LockRecordError(
                f"The record of the lock {name!r} in table {self.table!r} is damaged ({why}); "
                "it was left as it is: mend it, or delete the item once you know that nobody works under this lock."
            ) from wrong
        return record

    # -- how they are put together ------------------------------------------------------------------------------

    def _sign_of_life(
        self,
        key: str,
        lease_id: str,
        lease_ms: int,
        stamp: Stamp,
        update: str = "",
        condition: str = "",
        values: Mapping[str, Any] | None = None,
        **names: str,
    ) -> Request:
        """A write that gives the lease a new version. A writer that does not know the server's time *removes* the
        stamp of the one before: an old stamp beside a new version would make a live holder look dead."""
        stamped = stamp.server_ms is not None
        return self._write(
            key,
            "SET #holders.#me.#version = :version, #expires_at = :expires_at"
            + (", #holders.#me.#renewed_at = :renewed_at" if stamped else "")
            + update
            + ("" if stamped else " REMOVE #holders.#me.#renewed_at"),
            "attribute_exists(#holders.#me)" + condition,
            {
                ":version": stamp.version,
                ":expires_at": _expiry(stamp, lease_ms),
                ":renewed_at": stamp.server_ms,
                **(values or {}),
            },
            me=lease_id,
            **names,
        )

    def _remove(
        self, key: str, lease_id: str, slots: int, stamp: Stamp, condition: str, values: Mapping[str, Any]
    ) -> Request:
        return self._write(
            key,
            "SET #available = #available + :slots, #expires_at = :expires_at REMOVE #holders.#me",
            "attribute_exists(#holders.#me)" + condition,
            {":slots": slots, ":expires_at": _expiry(stamp, 0), **values},
            me=lease_id,
        )

    def _write(
        self, key: str, update: str, condition: str, values: Mapping[str, Any], **names: str
    ) -> Request:
        # DynamoDB refuses names and values that the expressions do not use, so only those used are sent.
        used = set(re.findall(r"[#:]\w+", f"{update} {condition}"))
        paths = {f"#{name}": name for name in _ATTRIBUTES} | {
            f"#{alias}": name for alias, name in names.items()
        }
        return Request(
            "UpdateItem",
            {
                "TableName": self.table,
                "Key": _item_key(key),
                "UpdateExpression": update,
                "ConditionExpression": condition,
                "ExpressionAttributeNames": {alias: name for alias, name in paths.items() if alias in used},
                "ExpressionAttributeValues": {
                    alias: encode(value) for alias, value in values.items() if alias in used
                },
                "ReturnValues": "ALL_NEW",
                "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
            },
        )


def _item_key(key: str) -> dict[str, Any]:
    return {PARTITION_KEY: encode(key), SORT_KEY: encode(LOCK_ENTRY)}


def _data(claim: Claim) -> str:
    return "" if claim.data is None else ", #data = :data"


def _expiry(stamp: Stamp, lease_ms: int) -> int:
    return (stamp.best_ms + lease_ms + RETENTION_MS) // 1000


def _holder(claim: Claim, stamp: Stamp) -> dict[str, Any]:
    about = dict(claim.about) | ({"attempt_of": claim.attempt_of} if claim.attempt_of else {})
    return {
        "owner": claim.owner,
        "slots": claim.slots,
        "lease_ms": claim.lease_ms,
        "grace_ms": claim.grace_ms,
        "version": stamp.version,
        "acquired_at": stamp.best_ms,
        "inside": {},
        # In a process's first write the host's clock: nobody hears of the grant before a `Date` has confirmed it.
        "renewed_at": stamp.best_ms,
        **({"about": about} if about else {}),
    }


def _read_holder(lease_id: str, values: Mapping[str, Any]) -> Holder:
    slots, lease_ms = _typed(values["slots"], int), _typed(values["lease_ms"], int)
    if slots < 1 or lease_ms < 1:
        raise ValueError(f"the holder {lease_id} has {slots} slots and a lease of {lease_ms} ms")
    acquired_at, renewed_at = values["acquired_at"], values.get("renewed_at")
    return Holder(
        lease_id=lease_id,
        owner=_typed(values["owner"], str),
        slots=slots,
        lease_ms=lease_ms,
        grace_ms=_typed(values.get("grace_ms", lease_ms), int),
        version=_typed(values["version"], str),
        acquired_at_ms=_moment(acquired_at),
        renewed_at_ms=None if renewed_at is None else _moment(renewed_at),
        inside=_typed(values["inside"], dict),
        ending=bool(values.get("ending", False)),
        about=_typed(values.get("about", {}), dict),
    )


def _moment(value: Any) -> int:
    if not 0 <= _typed(value, int) <= _LAST_MOMENT_MS:
        raise ValueError(f"{value!r} is no time")
    return int(value)


def _typed(value: Any, kind: type[T]) -> T:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value
