"""The items of a lock table, encoded and decoded: a lock's record and the entries of waiters.

A damaged item is a `LockRecordError` that names the attribute and what is wrong with it, and never shows its value
(R12).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from airflow_dynamo_lock.core.effects import Stamp, T
from airflow_dynamo_lock.core.model.claim import Claim
from airflow_dynamo_lock.core.model.decisions import Decision, Loss, Removal
from airflow_dynamo_lock.core.model.errors import LockRecordError
from airflow_dynamo_lock.core.model.limits import LAST_MS, LONGEST_TIME, MAX_PRIORITY, MAX_SLOTS
from airflow_dynamo_lock.core.model.record import Holder, LockRecord, Waiter
from airflow_dynamo_lock.core.model.text import shown
from airflow_dynamo_lock.core.model.waits import Wait
from airflow_dynamo_lock.core.table import version
from airflow_dynamo_lock.core.table.codec import decode

# Values of `token_base`: whether the time from which the first token counts has been compared with the server's time.
# It may come from a host's clock and be wrong. No caller ever receives an unverified token (R10).
UNVERIFIED, VERIFIED = "unverified", "verified"

#: Prefix of the sort keys of waiters' entries. They sort after the lock's own item.
WAITER_ENTRY = "waiter/"

#: Prefix of the attributes of a holder that note what it waits for; the rest is the id of the wait (R14).
WAIT_PREFIX = "waiting:"

#: Prefix of the attributes of a lock's item that note a removed waiter; the rest is the waiter's lease id (R15).
REMOVED_PREFIX = "removed:"

#: The names that expressions use, and the attributes of a lock's item that `read_lock` decodes.
ATTRIBUTES = [
    "key",
    "entry",
    "format_version",
    "capacity",
    "available",
    "holders",
    "token",
    "token_base",
    "last_freed_at",
    "data",
    "expires_at",
    "slots",
    "version",
    "acquired_at",
    "renewed_at",
    "lease_ms",
    "processes",
    "draining",
    "hold_until",
    "cooling_down",
    "took_over",
    "capacity_pinned",
    "last_ticket",
    "queue_head",
    "usual_ms",
    "previous_owner",
    "last_loss",
    "process",
]

# The longest lease that an argument may ask for.
_LONGEST_MS = round(LONGEST_TIME * 1000)


def holder_values(claim: Claim, stamp: Stamp, *, took_over: bool = False) -> dict[str, Any]:
    """The attributes of a new holder."""
    about = dict(claim.about) | ({"attempt_of": claim.attempt_of} if claim.attempt_of else {})
    return {
        "owner": claim.owner,
        "slots": claim.slots,
        "lease_ms": claim.lease_ms,
        "grace_ms": claim.grace_ms,
        "version": stamp.version,
        "acquired_at": stamp.best_ms,
        "processes": {},
        # In the first write of a process this is its host's clock; `Confirming` confirms, corrects or removes it. A
        # process whose responses have no `Date` has no time that others may rely on.
        **({} if stamp.undated else {"renewed_at": stamp.best_ms}),
        **({"hold_until": stamp.best_ms + claim.min_hold_ms} if claim.min_hold_ms else {}),
        **({"took_over": True} if took_over else {}),
        **({"about": about} if about else {}),
    }


def waiter_values(waiter: Waiter) -> dict[str, Any]:
    """The attributes of a waiter, without its key. An attribute without a value is left out."""
    values = {
        "lease_id": waiter.lease_id,
        "owner": waiter.owner,
        "slots": waiter.slots,
        "capacity": waiter.capacity,
        "priority": waiter.priority,
        "version": waiter.version,
        "since": waiter.since_ms,
    }
    optional = {
        "until": waiter.until_ms,
        "process": waiter.process,
        "renewed_at": waiter.renewed_at_ms,
        "about": dict(waiter.about),
        "set_size": waiter.set_size if waiter.set_size > 1 else None,
    }
    return values | {name: value for name, value in optional.items() if value}


def wait_values(wait: Wait) -> dict[str, Any]:
    """The note of a wait, without its id."""
    return {
        "since": wait.since_ms,
        "keys": list(wait.keys),
        "slots": wait.slots,
        "capacity": wait.capacity,
        **({"seen": sorted(wait.seen)} if wait.seen else {}),
    }


def loss_values(loss: Loss) -> dict[str, Any]:
    """The note of a loss."""
    return {
        "lease_id": loss.lease_id,
        "owner": loss.owner,
        "at": loss.at_ms,
        "broken": loss.broken,
        **_decision_values(loss.decision),
    }


def removal_values(removal: Removal) -> dict[str, Any]:
    """The note of a removed waiter, without its lease id."""
    return {"at": removal.at_ms, **_decision_values(removal.decision)}


def _decision_values(decision: Decision) -> dict[str, str]:
    values = {"by": decision.by, "reason": decision.reason}
    return {name: value for name, value in values.items() if value}


def read_lock(item: Mapping[str, Any], table: str, server_ms: int | None) -> LockRecord:
    """The lock that an item shows. Unknown attributes are ignored.

    :raises LockRecordError: the item is damaged.
    :raises LockVersionError: a newer version of this package wrote it.
    """
    try:
        values = {
            name: decode(attribute)
            for name, attribute in item.items()
            if name in ATTRIBUTES or name.startswith(REMOVED_PREFIX)
        }
        version.check(values, str(values.get("key", "?")), table)
        if "format_version" in values:
            _whole(values, "format_version", 1, version.KNOWN)
        record = LockRecord(
            key=_typed(values, "key", str),
            capacity=_typed(values, "capacity", int),
            available=_typed(values, "available", int),
            holders={name: read_holder(name, each) for name, each in _typed(values, "holders", dict).items()},
            token=_typed(values, "token", int),
            token_base=_typed(values, "token_base", str) if "token_base" in values else None,
            last_freed_at_ms=_whole(values, "last_freed_at", 0, LAST_MS)
            if "last_freed_at" in values
            else None,
            data=_typed(values, "data", dict) if "data" in values else None,
            capacity_pinned=_typed(values, "capacity_pinned", bool) if "capacity_pinned" in values else False,
            last_ticket=_typed(values, "last_ticket", int) if "last_ticket" in values else 0,
            queue_head=_typed(values, "queue_head", str) if "queue_head" in values else None,
            # A damaged value does no harm: the next write replaces it.
            expires_at=values["expires_at"] if isinstance(values.get("expires_at"), int) else None,
            usual_ms=_usual(values.get("usual_ms")),
            previous_owner=owner if isinstance(owner := values.get("previous_owner"), str) else None,
            last_loss=_read_loss(values.get("last_loss")),
            removals=_read_removals(values),
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
            "it was not changed: correct it, or delete the item when no holder of this lock is at work."
        ) from wrong
    return record


def read_waiter(item: Mapping[str, Any], table: str) -> Waiter:
    """The waiter that an item shows.

    :raises TypeError, ValueError, RecursionError: the item is damaged.
    :raises LockVersionError: a newer version of this package wrote it.
    """
    values = {name: decode(attribute) for name, attribute in item.items()}
    version.check(values, str(values.get("key", "?")), table)
    optional = {
        name: _whole(values, name, 0, LAST_MS) if name in values else None for name in ("until", "renewed_at")
    }
    return Waiter(
        key=_typed(values, "key", str),
        place=_typed(values, "entry", str).removeprefix(WAITER_ENTRY),
        lease_id=_typed(values, "lease_id", str),
        owner=_typed(values, "owner", str),
        slots=_whole(values, "slots", 1, MAX_SLOTS),
        capacity=_whole(values, "capacity", 1, MAX_SLOTS),
        priority=_whole(values, "priority", -MAX_PRIORITY, MAX_PRIORITY),
        since_ms=_whole(values, "since", 0, LAST_MS),
        until_ms=optional["until"],
        process=_typed(values, "process", str) if "process" in values else None,
        version=_typed(values, "version", str),
        renewed_at_ms=optional["renewed_at"],
        about=_typed(values, "about", dict) if "about" in values else {},
        set_size=_whole(values, "set_size", 2, MAX_SLOTS) if "set_size" in values else 1,
    )


def read_holder(lease_id: str, values: Any) -> Holder:
    """The holder that its attributes show.

    :raises TypeError, ValueError: an attribute is missing or damaged.
    """
    if not isinstance(values, dict):
        raise TypeError(f"the holder {shown(lease_id)} is {_kind(values)}, not a map")
    lease_ms = _whole(values, "lease_ms", 1, _LONGEST_MS)
    if values.get("draining", True) is not True:
        # The conditions of writes test whether the attribute exists, not its value.
        raise ValueError("its attribute 'draining' is neither true nor missing")
    inside = _typed(values, "processes", dict)
    return Holder(
        lease_id=lease_id,
        owner=_typed(values, "owner", str),
        slots=_whole(values, "slots", 1, MAX_SLOTS),
        lease_ms=lease_ms,
        grace_ms=_whole(values, "grace_ms", 1, _LONGEST_MS) if "grace_ms" in values else lease_ms,
        version=_typed(values, "version", str),
        acquired_at_ms=_whole(values, "acquired_at", 0, LAST_MS),
        renewed_at_ms=None if values.get("renewed_at") is None else _whole(values, "renewed_at", 0, LAST_MS),
        processes={process: _whole(inside, process, 0, LAST_MS) for process in inside},
        draining="draining" in values,
        hold_until_ms=_whole(values, "hold_until", 0, LAST_MS) if "hold_until" in values else None,
        cooling_down=values.get("cooling_down") is True,
        took_over=values.get("took_over") is True,
        about=_typed(values, "about", dict) if "about" in values else {},
        waits=_read_waits(values),
    )


def _usual(value: Any) -> int | None:
    """The usual hold time. A damaged value does no harm: it counts as unknown, and the next release replaces it."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return value if is_whole and 0 <= value <= LAST_MS else None


def _read_loss(note: Any) -> Loss | None:
    """How a lease was lost. A damaged note counts as none: people read it, and nothing depends on it."""
    try:
        return Loss(
            _typed(note, "lease_id", str),
            _typed(note, "owner", str),
            _whole(note, "at", 0, LAST_MS),
            _typed(note, "broken", bool),
            _read_decision(note),
        )
    except (TypeError, ValueError):
        return None


def _read_removals(values: Mapping[str, Any]) -> dict[str, Removal]:
    """The removed waiters. A damaged note is still a removal: conditions test only whether it exists."""
    removals = {}
    for name, note in values.items():
        if name.startswith(REMOVED_PREFIX):
            try:
                removal = Removal(_whole(note, "at", 0, LAST_MS), _read_decision(note))
            except (TypeError, ValueError):
                removal = Removal(0)
            removals[name.removeprefix(REMOVED_PREFIX)] = removal
    return removals


def _read_decision(note: Mapping[str, Any]) -> Decision:
    found = {name: _typed(note, name, str) if name in note else None for name in ("by", "reason")}
    return Decision(**found)


def _read_waits(values: Mapping[str, Any]) -> dict[str, Wait]:
    """What a holder waits for. A damaged note is ignored: without it a deadlock is not found, and nothing else."""
    waits: dict[str, Wait] = {}
    for name, note in values.items():
        if name.startswith(WAIT_PREFIX) and isinstance(note, dict):
            with suppress(TypeError, ValueError):
                wait_id = name.removeprefix(WAIT_PREFIX)
                waits[wait_id] = Wait(
                    wait_id,
                    since_ms=_whole(note, "since", 0, LAST_MS),
                    keys=_texts(note, "keys"),
                    slots=_whole(note, "slots", 1, MAX_SLOTS),
                    capacity=_whole(note, "capacity", 1, MAX_SLOTS),
                    seen=frozenset(_texts(note, "seen")) if "seen" in note else frozenset(),
                )
    return waits


def _texts(values: Mapping[str, Any], name: str) -> tuple[str, ...]:
    texts = _typed(values, name, list)
    if not all(isinstance(each, str) for each in texts):
        raise TypeError(f"its attribute {shown(name)} does not consist of text")
    return tuple(texts)


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
        # Without the value: it may be the user's data (R12).
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
