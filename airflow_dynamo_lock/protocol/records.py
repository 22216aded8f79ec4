"""The items of a lock table, read: the record of a lock, and those who wait for it.

What somebody else has written there, or damaged, is an error that says what is wrong with it, and not what it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow_dynamo_lock.protocol.attributes import decode
from airflow_dynamo_lock.protocol.effects import T
from airflow_dynamo_lock.protocol.errors import LockRecordError
from airflow_dynamo_lock.protocol.limits import LONGEST, MOST_SLOTS, MOST_URGENT, shown
from airflow_dynamo_lock.protocol.model import Holder, LockRecord, Waiter

#: The sort keys of those who wait begin like this. They sort after the lock itself.
WAITER_ENTRY = "waiter/"

#: The names of all that is written to a lock.
ATTRIBUTES = [
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
    "hold_until",
    "resting",
    "took_over",
    "fixed",
    "tickets",
    "first",
    "process",
]

# The end of the year 9999, epoch milliseconds: what a datetime can show.
_LAST_MOMENT_MS = 253_402_300_799_999
# The longest lease that an argument may ask for.
_LONGEST_MS = round(LONGEST * 1000)


def lock_record(item: Mapping[str, Any], table: str, server_ms: int | None) -> LockRecord:
    """The lock that an item describes. Attributes that we do not know are let be.

    :raises LockRecordError: it does not describe one.
    """
    try:
        values = {name: decode(attribute) for name, attribute in item.items() if name in ATTRIBUTES}
        record = LockRecord(
            key=_typed(values, "key", str),
            capacity=_typed(values, "capacity", int),
            available=_typed(values, "available", int),
            holders={name: read_holder(name, each) for name, each in _typed(values, "holders", dict).items()},
            token=_typed(values, "token", int),
            seed=_typed(values, "seed", str) if "seed" in values else None,
            vacated_at_ms=_whole(values, "vacated_at", 0, _LAST_MOMENT_MS)
            if "vacated_at" in values
            else None,
            data=_typed(values, "data", dict) if "data" in values else None,
            fixed=_typed(values, "fixed", bool) if "fixed" in values else False,
            tickets=_typed(values, "tickets", int) if "tickets" in values else 0,
            first=_typed(values, "first", str) if "first" in values else None,
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
        name, why = item.get("key", {}).get("S", "?"), str(wrong)
        raise LockRecordError(
            f"The record of the lock {name!r} in table {table!r} is damaged ({why}); "
            "it was left as it is: mend it, or delete the item once you know that nobody works under this lock."
        ) from wrong
    return record


def waiter_record(item: Mapping[str, Any]) -> Waiter:
    """One who waits, as an item describes him.

    :raises TypeError, ValueError, RecursionError: it does not.
    """
    values = {name: decode(attribute) for name, attribute in item.items()}
    optional = {
        name: _whole(values, name, 0, _LAST_MOMENT_MS) if name in values else None
        for name in ("until", "renewed_at")
    }
    return Waiter(
        key=_typed(values, "key", str),
        place=_typed(values, "entry", str).removeprefix(WAITER_ENTRY),
        lease_id=_typed(values, "lease_id", str),
        owner=_typed(values, "owner", str),
        slots=_whole(values, "slots", 1, MOST_SLOTS),
        capacity=_whole(values, "capacity", 1, MOST_SLOTS),
        priority=_whole(values, "priority", -MOST_URGENT, MOST_URGENT),
        since_ms=_whole(values, "since", 0, _LAST_MOMENT_MS),
        until_ms=optional["until"],
        process=_typed(values, "process", str) if "process" in values else None,
        version=_typed(values, "version", str),
        renewed_at_ms=optional["renewed_at"],
        about=_typed(values, "about", dict) if "about" in values else {},
    )


def read_holder(lease_id: str, values: Any) -> Holder:
    """A holder, as his attributes describe him.

    :raises TypeError, ValueError: they do not.
    """
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
        hold_until_ms=_whole(values, "hold_until", 0, _LAST_MOMENT_MS) if "hold_until" in values else None,
        resting=values.get("resting") is True,
        took_over=values.get("took_over") is True,
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
