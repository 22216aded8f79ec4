"""Checks of arguments, before any request is sent. Each function checks one kind of argument and has one error."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from inspect import iscoroutinefunction
from typing import Any

from airflow_dynamo_lock.core.model.errors import LockValueError
from airflow_dynamo_lock.core.model.limits import (
    LAST_MS,
    LONGEST_TIME,
    MARGIN,
    MAX_ID_BYTES,
    MAX_KEY_BYTES,
    MAX_KEYS,
    MAX_NOTE_BYTES,
    MAX_PRIORITY,
    MAX_SLOTS,
    MIN_CLOCK_SKEW,
    RETENTION,
    SHARED,
    WAITING_PREFIX,
)
from airflow_dynamo_lock.core.model.text import shown

Seconds = float | int | timedelta


# The record enforces these times, and DynamoDB may delete an idle record after `RETENTION`.
_LONGEST = dict.fromkeys(("release_grace", "min_hold"), RETENTION)

# A heartbeat and its answer must fit into these times several times.
_SHORTEST = dict.fromkeys(("lease", "release_grace"), 0.1)


def seconds(name: str, value: Seconds, *, zero: bool = False) -> float:
    """A duration in seconds from a number or a timedelta.

    :param zero: zero is allowed.
    :raises LockValueError: it is no number or timedelta, not finite, negative, zero although that is not allowed, too
        short or too long.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise LockValueError(f"{name} must be a number of seconds or a timedelta, not {shown(value)}.")
    longest = _LONGEST.get(name, LONGEST_TIME)
    if not (0 < value <= longest or (zero and value == 0)):
        least = "zero or more" if zero else "more than zero"
        raise LockValueError(
            f"{name} must be a finite time, {least} and at most {longest:.10g} s, not {shown(value)} s."
        )
    if value < (shortest := _SHORTEST.get(name, 0.0)):
        raise LockValueError(f"{name} must be at least {shortest:g} s, not {shown(value)} s.")
    return float(value)


def milliseconds(value: float) -> int:
    """Seconds as whole milliseconds, at least one."""
    return max(1, round(value * 1000))


def checked_lease(name: str, value: Seconds, capacity: int) -> float:
    """The length of a lease in seconds, at most `RETENTION` if the lock may have several holders.

    Each write sets the time at which DynamoDB may delete the record, without knowing the leases of other holders. A
    holder of all slots may get others as well, because `set_capacity` may add slots.
    """
    lease = seconds(name, value)
    if capacity > 1 and lease > RETENTION:
        raise LockValueError(
            f"{name} must be at most {RETENTION} s for a lock with several holders, not {shown(lease)} s, because "
            "DynamoDB may delete the record before: choose a shorter lease."
        )
    return lease


def checked_clock_skew(value: Seconds) -> float:
    """`max_clock_skew` in seconds: at least `MIN_CLOCK_SKEW`."""
    skew = seconds("max_clock_skew", value, zero=True)
    if skew < MIN_CLOCK_SKEW:
        raise LockValueError(
            f"max_clock_skew must be at least {MIN_CLOCK_SKEW:g} s, not {skew:g} s: with less, a stamp that is a few "
            "seconds old makes a living holder look dead."
        )
    return skew


def checked_key(key: str) -> str:
    """The name of a lock: text that is not empty and has at most 2,048 bytes."""
    if not isinstance(key, str):
        raise LockValueError(f"A lock's key must be text, not {shown(key)}.")
    if not key:
        raise LockValueError("A lock's key must not be empty: give the locked resource a name.")
    size = len(checked_text("The lock key", key).encode())
    if size > MAX_KEY_BYTES:
        raise LockValueError(
            f"The lock key {key[:40]!r}… has {size} bytes; DynamoDB takes at most {MAX_KEY_BYTES}: "
            "use a shorter name or a hash."
        )
    if key.startswith(WAITING_PREFIX):
        raise LockValueError(
            f"A lock's key must not begin with {WAITING_PREFIX!r}, as {shown(key)} does: waiting processes use such "
            "keys."
        )
    return key


def checked_keys(keys: Sequence[str]) -> tuple[str, ...]:
    """The keys of locks to acquire together: each valid and given once, at most 100."""
    if isinstance(keys, str) or not isinstance(keys, (list, tuple)) or not keys:
        raise LockValueError(f"A lock needs a key, which must be text or a list of texts, not {shown(keys)}.")
    for key in keys:
        checked_key(key)
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise LockValueError(f"The lock keys name {shown(twice)} twice: name each key once.")
    if len(keys) > MAX_KEYS:
        raise LockValueError(
            f"{len(keys)} locks cannot be acquired together: a transaction of DynamoDB has at most {MAX_KEYS} writes."
        )
    return tuple(keys)


def checked_id(name: str, text: str) -> str:
    """The id of a lease or a process, or the name of an owner: text that is not empty and has at most 1,024 bytes."""
    size = len(checked_text(name, text).encode())
    if not 0 < size <= MAX_ID_BYTES:
        raise LockValueError(f"{name} has 1 to {MAX_ID_BYTES} bytes, and {shown(text)} has {size}.")
    return text


def checked_note(name: str, text: str) -> str:
    """A short text for people to read, which becomes part of the record."""
    size = len(checked_text(name, text).encode())
    if size > MAX_NOTE_BYTES:
        raise LockValueError(f"{name} has at most {MAX_NOTE_BYTES} bytes, and {shown(text)} has {size}.")
    return text


def checked_table(name: str) -> str:
    """The name of a table as DynamoDB allows it, or its ARN."""
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]{3,255}|arn:[!-~]+", name, re.ASCII):
        raise LockValueError(
            f"{shown(name)} cannot be the name of the lock table: that has 3 to 255 letters, digits, '_', '-' or '.'."
        )
    return name


def checked_text(name: str, text: str) -> str:
    """Text that DynamoDB can store."""
    if not isinstance(text, str):
        raise LockValueError(f"{name} must be text, not {shown(text)}.")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise LockValueError(
            f"{name} {shown(text)} is not valid Unicode: it contains a lone surrogate."
        ) from None
    return text


def checked_slots(slots: int, capacity: int) -> None:
    """Return if slots and capacity are whole numbers, and the lock has at least that many slots."""
    for name, value in (("slots", slots), ("capacity", capacity)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_SLOTS:
            raise LockValueError(
                f"{name} must be a whole number of at least 1 and at most {MAX_SLOTS}, not {shown(value)}."
            )
    if slots > capacity:
        raise LockValueError(f"{slots} slots can never be free in a lock with a capacity of {capacity}.")


def checked_mode(mode: str, slots: int, capacity: int) -> tuple[int, int]:
    """Slots and capacity of a claim in a mode. A shared claim takes one slot of `SHARED`."""
    if mode not in ("shared", "exclusive"):
        raise LockValueError(f"mode must be 'shared' or 'exclusive', not {shown(mode)}.")
    checked_slots(slots, capacity)
    if mode == "exclusive":
        return slots, capacity
    if (slots, capacity) != (1, 1):
        raise LockValueError(
            f"A shared lock has no slots to count, so {slots} of {capacity} cannot be acquired in shared mode: "
            "leave slots and capacity out, or the mode."
        )
    return 1, SHARED


def checked_priority(priority: int) -> int:
    """A priority: a whole number from -999 to 999."""
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > MAX_PRIORITY:
        raise LockValueError(
            f"priority must be a whole number from {-MAX_PRIORITY} to {MAX_PRIORITY}, not {shown(priority)}."
        )
    return priority


def checked_flag(name: str, value: bool) -> bool:
    """True or False; no other value that Python counts as such."""
    if not isinstance(value, bool):
        raise LockValueError(f"{name} must be True or False, not {shown(value)}.")
    return value


def checked_map(name: str, value: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """A map, or None."""
    if value is not None and not isinstance(value, Mapping):
        # Without the value: it may be a secret (R12).
        raise LockValueError(f"{name} must be a map, not of type {type(value).__name__}.")
    return value


def checked_callbacks(**callbacks: object) -> None:
    """Return if each of the arguments is a function, or None. Nothing would await a coroutine."""
    for name, value in callbacks.items():
        if value is not None and not callable(value):
            raise LockValueError(f"{name} must be a function, not {shown(value)}.")
        if iscoroutinefunction(value):
            raise LockValueError(f"{name} must be a plain function, not the `async def` {shown(value)}.")


def checked_whole(name: str, value: int, least: int | None) -> int:
    """A whole number; with a `least`, from there to `LAST_MS`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise LockValueError(f"{name} must be a whole number, not {shown(value)}.")
    if least is not None and not least <= value <= LAST_MS:
        raise LockValueError(f"{name} must be from {least} to {LAST_MS}, not {shown(value)}.")
    return value


def checked_heartbeat(heartbeat: float, lease: float) -> float:
    """The interval of heartbeats in seconds: at most half a lease, so that the lease survives one lost heartbeat."""
    if lease < 2 * heartbeat:
        raise LockValueError(
            f"A lease of {lease:g} s is shorter than two heartbeats of {heartbeat:g} s: "
            "choose a longer lease or a shorter interval, because one lost heartbeat would lose the lock."
        )
    return heartbeat


def checked_safe_time(safe: float, lease: float) -> float:
    """`safe_time` in seconds: less than what remains right after a heartbeat, or the lease is always in danger."""
    longest = lease * (1 - MARGIN)
    if safe >= longest:
        raise LockValueError(
            f"A safe_time of {safe:g} s is not less than the {longest:g} s for which a lease of {lease:g} s is good: "
            "choose a shorter one."
        )
    return safe
