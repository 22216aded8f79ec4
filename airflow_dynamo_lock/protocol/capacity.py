"""Whether a lock has room for a claim, by its capacity, and by who is dead.

A plain lock is one with a capacity of 1. A shared one has as many slots as there will ever be (`limits.SHARED`), of
which each who shares takes one, and who excludes the others takes it as a plain one.
"""

from __future__ import annotations

from dataclasses import replace

from airflow_dynamo_lock.protocol.errors import CapacityMismatchError, LockValueError
from airflow_dynamo_lock.protocol.limits import SHARED
from airflow_dynamo_lock.protocol.model import ONE_OR_ALL, Claim, Holder, LockRecord


def room(record: LockRecord, dead: list[Holder]) -> int:
    """The slots that somebody could take: the free ones and those of the dead."""
    return record.available + sum(holder.slots for holder in dead)


def fits(record: LockRecord, dead: list[Holder], slots: int, capacity: int) -> bool:
    """Whether there is room for a claim of so many slots.

    :raises CapacityMismatchError: the lock is in use with another capacity, or has one that was set.
    """
    if record.capacity == capacity:
        return room(record, dead) >= slots
    idle = len(dead) == len(record.holders)
    if record.fixed or not (idle or {record.capacity, capacity} <= ONE_OR_ALL):
        raise CapacityMismatchError(_mismatch(record, capacity))
    # Who shares and who excludes take turns; and only an otherwise empty lock may change its capacity.
    return idle and slots <= capacity


def could_take(
    record: LockRecord, dead: list[Holder], slots: int, capacity: int | None, *, takes: bool
) -> bool:
    """Whether somebody who wants so many slots has reason to try. Without a capacity, whatever is not shared will do.

    :param takes: he would take them: if the lock is in use with another capacity, he is to be told so.
    """
    if capacity is None:
        capacity = 1 if record.capacity == SHARED and not record.fixed else record.capacity
    elif record.fixed and capacity in ONE_OR_ALL:
        return takes
    try:
        counts = that_counts(capacity, record)
        return fits(record, dead, min(slots, max(1, counts)), counts)
    except CapacityMismatchError:
        return takes


def that_counts(capacity: int, record: LockRecord | None) -> int:
    """The capacity that a claim is for: the one that somebody has set, if it is for a semaphore."""
    return record.capacity if record is not None and record.fixed and capacity not in ONE_OR_ALL else capacity


def as_fixed(claim: Claim, record: LockRecord) -> Claim:
    """The claim, with the capacity that somebody has set, if there is one.

    :raises LockValueError: it wants more than that.
    :raises CapacityMismatchError: it is not one for a semaphore.
    """
    if not record.fixed:
        return claim
    if claim.capacity in ONE_OR_ALL:
        # Also where it is the same: its holder would not count on others, for whom more slots may be made.
        raise CapacityMismatchError(_mismatch(record, claim.capacity))
    check_fixed(record, claim.slots)
    return replace(claim, capacity=record.capacity)


def check_fixed(record: LockRecord, slots: int) -> None:
    """Whether there will ever be so many.

    :raises LockValueError: there will not.
    """
    if record.fixed and slots > record.capacity:
        raise LockValueError(
            f"{slots} slots can never be free in the lock {record.key!r}: its capacity was set to {record.capacity}."
        )


def _mismatch(record: LockRecord, capacity: int) -> str:
    if record.fixed:
        return (
            f"The lock {record.key!r} has a capacity of {record.capacity}, which was set, and cannot be taken as "
            f"{kind(capacity)}: use it as a semaphore, or take the setting back with set_capacity(key, None)."
        )
    used = f"as {kind(record.capacity)}, not as {kind(capacity)}"
    if not ONE_OR_ALL & {record.capacity, capacity}:
        used = f"with a capacity of {record.capacity}, not {capacity}"
    return (
        f"The lock {record.key!r} is in use {used}: use the same capacity and mode everywhere, or wait until it is "
        f"free. {record.describe()}."
    )


def kind(capacity: int) -> str:
    kinds = {1: "a plain lock", SHARED: "a shared lock"}
    return kinds.get(capacity, f"a semaphore with a capacity of {capacity}")


def enough(claim: Claim, record: LockRecord, dead: list[Holder], leave: int) -> tuple[Holder, ...]:
    """As many of the dead as must make place for the claim, and for those who are to have the lock first.

    All of them where the capacity changes: only an otherwise empty lock may do that. All of them where the lock is
    shared as well: readers never run out of slots, so nothing else would remove dead readers. Holders that may have
    died at work come first.
    """
    dead = sorted(dead, key=lambda holder: holder.resting)
    if record.capacity != claim.capacity or claim.capacity == SHARED:
        return tuple(dead)
    chosen: list[Holder] = []
    free = record.available
    for holder in dead:
        if free >= claim.slots + leave:
            break
        chosen.append(holder)
        free += holder.slots
    return tuple(chosen)
