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


def could_take(record: LockRecord, dead: list[Holder], slots: int, capacity: int | None) -> bool:
    """Whether somebody who wants so many slots has reason to try: there is room, or there never will be, which he is to
    be told. Without a capacity, whatever is not shared will do."""
    if capacity is None:
        capacity = 1 if record.capacity == SHARED else record.capacity
    try:
        return fits(record, dead, min(slots, max(1, record.capacity)), capacity)
    except CapacityMismatchError:
        return True


def as_fixed(claim: Claim, record: LockRecord) -> Claim:
    """The claim, with the capacity that somebody has set, if it is one for a semaphore.

    :raises LockValueError: it wants more than that.
    """
    if not record.fixed or claim.capacity in ONE_OR_ALL:
        return claim
    if claim.slots > record.capacity:
        raise LockValueError(
            f"{claim.slots} slots can never be free in the lock {claim.key!r}: its capacity was set to "
            f"{record.capacity}."
        )
    return replace(claim, capacity=record.capacity)


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

    All of them where the capacity changes: only an otherwise empty lock may do that.
    """
    if record.capacity != claim.capacity:
        return tuple(dead)
    chosen: list[Holder] = []
    free = record.available
    for holder in dead:
        if free >= claim.slots + leave:
            break
        chosen.append(holder)
        free += holder.slots
    return tuple(chosen)
