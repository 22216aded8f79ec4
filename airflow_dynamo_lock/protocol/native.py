"""Our own table format: the record of a lock, and each conditional write on it.

The record of the lock `key` is the item ``{key, entry: "lock"}``; other entries may stand beside it under the same
key. Every write is one `UpdateItem` whose condition is the whole of its safety (rule R1): it names what must still be
true, never what was read some time before. Every acquire pushes ``expires_at`` ahead, and so does every other write
whose sender knows the server's time, so that DynamoDB's TTL never comes near a record in use.

A refused write asks for the item as it stands (``ALL_OLD``), so a loser learns in the same request who won (rule R2).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from airflow_dynamo_lock.protocol.attributes import decode, encode
from airflow_dynamo_lock.protocol.effects import Request, Stamp, T
from airflow_dynamo_lock.protocol.errors import LockRecordError
from airflow_dynamo_lock.protocol.limits import LONGEST, MOST_SLOTS, shown
from airflow_dynamo_lock.protocol.model import Claim, Holder, LockRecord

PARTITION_KEY = "key"
SORT_KEY = "entry"
TTL_ATTRIBUTE = "expires_at"
LOCK_ENTRY = "lock"

#: How long an idle record outlives its last write, so that its fencing token is remembered (rule R10).
RETENTION_MS = 7 * 24 * 3600 * 1000

# The end of the year 9999, epoch milliseconds: what a datetime can show.
_LAST_MOMENT_MS = 253_402_300_799_999
# The longest lease that an argument may ask for.
_LONGEST_MS = round(LONGEST * 1000)

# In `seed`: whether the time that the record's first token was taken from has been compared with the server's. It may
# come from a host's clock, or from an old estimate; until it is checked, it may be far off, but nobody has heard of a
# token that is.
GUESSED, CHECKED = "guessed", "checked"

# By how much the server's time, as two writers estimate it, may differ, milliseconds: the ``Date`` header has whole
# seconds, and one request more now and then does no harm.
_OVERTAKEN_MS = 2000

# A write that takes the lock may arrive after its sender has taken it, by a second attempt, and given it back, and must
# not take it once more then. So it succeeds only if no holder has gone since it was stamped, or none but the one that
# its sender has seen to be gone.
_NOT_OVERTAKEN = (
    "(attribute_not_exists(#vacated_at) OR #vacated_at <= :no_newer OR #vacated_at = :seen_vacated)"
)

_NOT_ENDING = " AND attribute_not_exists(#holders.#me.#ending)"

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
    "seed",
    "vacated_at",
    "data",
    "expires_at",
    "slots",
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

    def take_idle(self, claim: Claim, stamp: Stamp, seen: LockRecord | None = None) -> Request:
        """Take a lock that nobody holds, or that never was; `seen` if it was looked at."""
        # A record without `seed` was written by somebody else. It has to have been seen: then it has a token, and we do
        # not seed one.
        foreign = seen is not None and seen.seed is None
        return self._write(
            claim.key,
            "SET #holders = :holders, #available = :left, #capacity = :capacity, "
            "#token = if_not_exists(#token, :now) + :one, #seed = if_not_exists(#seed, :state), "
            "#expires_at = :expires_at" + _data(claim),
            # The size guards a record whose counter somebody damaged: held slots are never overwritten. The types keep
            # off what `record` could not read, so that a damaged record is left as it is.
            "attribute_not_exists(#key) OR (attribute_type(#holders, :map) AND attribute_type(#capacity, :number) AND "
            "attribute_type(#token, :number) AND (attribute_not_exists(#data) OR attribute_type(#data, :map)) AND "
            f"{'attribute_not_exists(#seed)' if foreign else 'attribute_type(#seed, :text)'} AND "
            f"#available = #capacity AND size(#holders) = :zero AND {_NOT_OVERTAKEN})",
            {
                **_vacated(stamp, seen),
                ":holders": {claim.lease_id: _holder(claim, stamp)},
                ":left": claim.capacity - claim.slots,
                ":capacity": claim.capacity,
                ":now": stamp.best_ms,
                ":state": CHECKED if foreign else GUESSED,
                ":one": 1,
                ":zero": 0,
                ":map": "M",
                ":number": "N",
                ":text": "S",
                ":expires_at": _expiry(stamp, claim.lease_ms),
                ":data": claim.data,
            },
        )

    def take_room(self, claim: Claim, stamp: Stamp, seen: LockRecord) -> Request:
        """Take free slots of a lock that others hold too."""
        return self._write(
            claim.key,
            "SET #holders.#me = :me, #available = #available - :slots, #token = #token + :one, "
            "#expires_at = :expires_at" + _data(claim),
            "#available >= :slots AND #capacity = :capacity AND attribute_not_exists(#holders.#me) AND "
            + _NOT_OVERTAKEN,
            {
                **_vacated(stamp, seen),
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
            ":vacated_at": stamp.best_ms,
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
            f"SET #holders.#me = :me, {counters}, #token = #token + :one, #vacated_at = :vacated_at, "
            f"#expires_at = :expires_at{_data(claim)} "
            f"REMOVE {', '.join(f'#holders.#{name}' for name in names)}",
            " AND ".join([*conditions, "attribute_not_exists(#holders.#me)"]),
            values,
            me=claim.lease_id,
            **names,
        )

    def heartbeat(
        self, key: str, lease_id: str, lease_ms: int, stamp: Stamp, seen: str | None = None
    ) -> Request:
        """Show that the holder lives."""
        return self._sign_of_life(key, lease_id, lease_ms, stamp, seen)

    def heartbeat_unless_ending(
        self, key: str, lease_id: str, lease_ms: int, stamp: Stamp, seen: str | None = None
    ) -> Request:
        """Show that the holder lives, while the lease has not been abandoned."""
        return self._sign_of_life(key, lease_id, lease_ms, stamp, seen, condition=_NOT_ENDING)

    def take_again(self, claim: Claim, mine: Holder, stamp: Stamp) -> Request:
        """Go on holding what an earlier write of ours took (rule R5). It gets a token of its own: what the earlier
        one was given cannot be told once others took slots as well, and nobody has heard of it."""
        return self._sign_of_life(
            claim.key,
            claim.lease_id,
            claim.lease_ms,
            stamp,
            mine.version,
            ", #token = #token + :one, #holders.#me.#acquired_at = :acquired_at",
            " AND #holders.#me.#slots = :slots AND #capacity = :capacity",
            values={
                ":one": 1,
                ":acquired_at": stamp.best_ms,
                ":slots": claim.slots,
                ":capacity": claim.capacity,
            },
        )

    def put_right(self, claim: Claim, seen: LockRecord, token: int, stamp: Stamp) -> Request:
        """Replace the times, and the token seeded from one, of a grant whose clock turned out to be wrong (R3, R10)."""
        return self._sign_of_life(
            claim.key,
            claim.lease_id,
            claim.lease_ms,
            stamp,
            seen.holders[claim.lease_id].version,
            ", #token = :token, #seed = :checked, #holders.#me.#acquired_at = :acquired_at",
            " AND #token = :seen_token",
            values={
                ":token": token,
                ":seen_token": seen.token,
                ":checked": CHECKED,
                ":acquired_at": stamp.best_ms,
            },
        )

    def enter(
        self, key: str, lease_id: str, process: str, lease_ms: int, stamp: Stamp, seen: str | None = None
    ) -> Request:
        """Note that a guarded process is inside, and beat."""
        return self._sign_of_life(
            key,
            lease_id,
            lease_ms,
            stamp,
            seen,
            ", #holders.#me.#inside.#process = :entered",
            _NOT_ENDING,
            values={":entered": stamp.best_ms},
            process=process,
        )

    def leave(self, key: str, lease_id: str, process: str, lease_ms: int, stamp: Stamp) -> Request:
        """Note that a guarded process has left."""
        expires_at = "SET #expires_at = :expires_at " if stamp.server_ms is not None else ""
        return self._write(
            key,
            f"{expires_at}REMOVE #holders.#me.#inside.#process",
            "attribute_exists(#holders.#me)",
            {":expires_at": _expiry(stamp, lease_ms)},
            me=lease_id,
            process=process,
        )

    def release(self, key: str, lease_id: str, slots: int, stamp: Stamp, *, heard: bool) -> Request:
        """Give the slots back, if nobody is inside any more (rule R8).

        :param heard: its holder was told of the grant, so its token has been compared with the server's time.
        """
        proven = ", #seed = :checked" if heard and stamp.server_ms is not None else ""
        return self._remove(
            key,
            lease_id,
            slots,
            stamp,
            proven,
            " AND size(#holders.#me.#inside) = :zero",
            {":zero": 0, ":checked": CHECKED},
        )

    def break_(self, key: str, lease_id: str, slots: int, stamp: Stamp) -> Request:
        """Take a lease away from its holder, whoever is inside. For people."""
        return self._remove(key, lease_id, slots, stamp)

    def abandon(
        self, key: str, lease_id: str, grace_ms: int, stamp: Stamp, seen: str | None = None
    ) -> Request:
        """Shorten a lease to a grace and let nobody enter any more (rule R8). Only once: a second write would
        lengthen what the first one has shortened."""
        return self._sign_of_life(
            key,
            lease_id,
            grace_ms,
            stamp,
            seen,
            ", #holders.#me.#ending = :ending, #holders.#me.#lease_ms = :lease_ms",
            _NOT_ENDING,
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
                key=_typed(values, "key", str),
                capacity=_typed(values, "capacity", int),
                available=_typed(values, "available", int),
                holders={
                    name: _read_holder(name, each) for name, each in _typed(values, "holders", dict).items()
                },
                token=_typed(values, "token", int),
                seed=_typed(values, "seed", str) if "seed" in values else None,
                vacated_at_ms=_whole(values, "vacated_at", 0, _LAST_MOMENT_MS)
                if "vacated_at" in values
                else None,
                data=_typed(values, "data", dict) if "data" in values else None,
                # Whatever stands there, the next write replaces it.
                expires_at=values["expires_at"] if isinstance(values.get("expires_at"), int) else None,
                read_at_ms=server_ms,
            )
            held = sum(holder.slots for holder in record.holders.values())
            if record.available + held != record.capacity:
                raise ValueError(
                    f"{record.available} slots available and {held} held do not make its capacity of {record.capacity}"
                )
        except (TypeError, ValueError, RecursionError) as wrong:
            name, why = item.get(PARTITION_KEY, {}).get("S", "?"), str(wrong)
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
        seen: str | None,
        update: str = "",
        condition: str = "",
        values: Mapping[str, Any] | None = None,
        **names: str,
    ) -> Request:
        """A write that gives the lease a new version.

        It may arrive long after its sender has given it up, when the lease has been renewed since. It must not put its
        old stamp in the place of a newer one, or a live holder would look dead: it succeeds only if the stamp there is
        no newer than its own, to within `_OVERTAKEN_MS`, by which two writers' estimates may differ; or, where that
        cannot be told, if the version is still the one `seen`.

        A writer that does not know the server's time, because no answer tells it, *removes* the stamp of the one
        before, which would make the new version look old; nor does it tell when the record expires.
        """
        stamped = stamp.server_ms is not None
        if seen is not None:
            order = " AND #holders.#me.#version = :seen"
        else:
            order = " AND #holders.#me.#renewed_at <= :no_newer" if stamped else ""
        return self._write(
            key,
            "SET #holders.#me.#version = :version"
            + (", #expires_at = :expires_at, #holders.#me.#renewed_at = :renewed_at" if stamped else "")
            + update
            + ("" if stamped else " REMOVE #holders.#me.#renewed_at"),
            "attribute_exists(#holders.#me)" + order + condition,
            {
                ":version": stamp.version,
                ":expires_at": _expiry(stamp, lease_ms),
                ":renewed_at": stamp.server_ms,
                ":no_newer": stamp.best_ms + _OVERTAKEN_MS,
                ":seen": seen,
                **(values or {}),
            },
            me=lease_id,
            **names,
        )

    def _remove(
        self,
        key: str,
        lease_id: str,
        slots: int,
        stamp: Stamp,
        update: str = "",
        condition: str = "",
        values: Mapping[str, Any] | None = None,
    ) -> Request:
        expires_at = ", #expires_at = :expires_at" if stamp.server_ms is not None else ""
        return self._write(
            key,
            f"SET #available = #available + :slots, #vacated_at = :vacated_at{update}{expires_at} REMOVE #holders.#me",
            # So many, and no other number: what is given back is what was taken.
            "attribute_exists(#holders.#me) AND #holders.#me.#slots = :slots" + condition,
            {
                ":slots": slots,
                ":vacated_at": stamp.best_ms,
                ":expires_at": _expiry(stamp, 0),
                **(values or {}),
            },
            me=lease_id,
        )

    def _write(
        self, key: str, update: str, condition: str, values: Mapping[str, Any], **names: str
    ) -> Request:
        # DynamoDB refuses names and values that the expressions do not use, so only those used are sent.
        used = _placeholders(f"{update} {condition}")
        paths = {f"#{name}": name for name in _ATTRIBUTES} | {
            f"#{alias}": name for alias, name in names.items()
        }
        sent = {alias: encode(value) for alias, value in values.items() if alias in used}
        return Request(
            "UpdateItem",
            {
                "TableName": self.table,
                "Key": _item_key(key),
                "UpdateExpression": update,
                "ConditionExpression": condition,
                "ExpressionAttributeNames": {alias: name for alias, name in paths.items() if alias in used},
                **({"ExpressionAttributeValues": sent} if sent else {}),
                "ReturnValues": "ALL_NEW",
                "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
            },
        )


@lru_cache(maxsize=256)
def _placeholders(expressions: str) -> frozenset[str]:
    return frozenset(re.findall(r"[#:]\w+", expressions))


def _item_key(key: str) -> dict[str, Any]:
    return {PARTITION_KEY: encode(key), SORT_KEY: encode(LOCK_ENTRY)}


def _data(claim: Claim) -> str:
    return "" if claim.data is None else ", #data = :data"


def _vacated(stamp: Stamp, seen: LockRecord | None) -> dict[str, int]:
    no_newer = stamp.best_ms + _OVERTAKEN_MS
    vacated_at_ms = None if seen is None else seen.vacated_at_ms
    return {":no_newer": no_newer, ":seen_vacated": no_newer if vacated_at_ms is None else vacated_at_ms}


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


def _read_holder(lease_id: str, values: Any) -> Holder:
    if not isinstance(values, dict):
        raise TypeError(f"the holder {shown(lease_id)} is {_kind(values)}, not a map")
    lease_ms = _whole(values, "lease_ms", 1, _LONGEST_MS)
    if values.get("ending", True) is not True:
        raise ValueError(
            "its attribute 'ending' is neither true nor missing"
        )  # conditions ask if it is there
    inside = _typed(values, "inside", dict)
    return Holder(
        lease_id=lease_id,
        owner=_typed(values, "owner", str),
        slots=_whole(values, "slots", 1, MOST_SLOTS),
        lease_ms=lease_ms,
        grace_ms=_whole(values, "grace_ms", 1, _LONGEST_MS) if "grace_ms" in values else lease_ms,
        version=_typed(values, "version", str),
        acquired_at_ms=_whole(values, "acquired_at", 0, _LAST_MOMENT_MS),
        renewed_at_ms=None
        if values.get("renewed_at") is None
        else _whole(values, "renewed_at", 0, _LAST_MOMENT_MS),
        inside={process: _whole(inside, process, 0, _LAST_MOMENT_MS) for process in inside},
        ending="ending" in values,
        about=_typed(values, "about", dict) if "about" in values else {},
    )


def _whole(values: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value = _typed(values, name, int)
    if not least <= value <= most:
        raise ValueError(f"its attribute {shown(name)} is {shown(value)}, not from {least} to {most}")
    return value


def _typed(values: Mapping[str, Any], name: str, kind: type[T]) -> T:
    if name not in values:
        raise ValueError(f"its attribute {shown(name)} is missing")
    value = values[name]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        # Not what it is: it may be somebody's data (rule R12).
        raise TypeError(f"its attribute {shown(name)} is {_kind(value)}, not {_KINDS[kind]}")
    return value


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), f"of type {type(value).__name__}")


_KINDS: Mapping[type, str] = {
    bool: "a truth value",
    bytes: "binary",
    dict: "a map",
    float: "a fraction",
    int: "a whole number",
    list: "a list or a set",
    str: "text",
    type(None): "null",
}
