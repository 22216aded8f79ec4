"""Whether a lock has capacity for a claim: free slots, dead holders, and the kind of the lock.

A plain lock has a capacity of 1. A shared lock has `limits.SHARED` slots, of which each reader takes one; an exclusive
claim takes it as a plain lock. Every other capacity is a semaphore's.
"""

from __future__ import annotations

from dataclasses import replace

from airflow_dynamo_lock.core.model.claim import Claim
from airflow_dynamo_lock.core.model.errors import CapacityMismatchError, LockValueError
from airflow_dynamo_lock.core.model.limits import SHARED
from airflow_dynamo_lock.core.model.record import Holder, LockRecord

#: The capacities of a plain lock, and of one that is held in shared mode. All others are semaphores'.
PLAIN_OR_SHARED = frozenset({1, SHARED})


def compatible(capacity: int, other: int) -> bool:
    """Whether claims with these capacities can hold a lock together, if it has room."""
    return capacity == other or not PLAIN_OR_SHARED & {capacity, other}


def free_slots(record: LockRecord, dead: list[Holder]) -> int:
    """The slots that somebody could take: the free ones and those of the dead."""
    return record.available + sum(holder.slots for holder in dead)


def has_capacity(record: LockRecord, dead: list[Holder], slots: int, capacity: int) -> bool:
    """Whether there is room for a claim of so many slots.

    :raises CapacityMismatchError: the lock is in use with another capacity, or has one that was set.
    """
    if record.capacity == capacity:
        return free_slots(record, dead) >= slots
    idle = len(dead) == len(record.holders)
    if record.capacity_pinned or not (idle or {record.capacity, capacity} <= PLAIN_OR_SHARED):
        raise CapacityMismatchError(_mismatch(record, capacity))
    # Who shares and who excludes take turns; and only an otherwise empty lock may change its capacity.
    return idle and slots <= capacity


def can_grant(
    record: LockRecord, dead: list[Holder], slots: int, capacity: int | None, *, takes: bool
) -> bool:
    """Whether somebody who wants so many slots has reason to try. Without a capacity, whatever is not shared will do.

    :param takes: he would take them: if the lock is in use with another capacity, he is to be told so.
    """
    if capacity is None:
        capacity = 1 if record.capacity == SHARED and not record.capacity_pinned else record.capacity
    elif record.capacity_pinned and capacity in PLAIN_OR_SHARED:
        return takes
    try:
        counts = effective_capacity(capacity, record)
        return has_capacity(record, dead, min(slots, max(1, counts)), counts)
    except CapacityMismatchError:
        return takes


def effective_capacity(capacity: int, record: LockRecord | None) -> int:
    """The capacity that a claim is for: the one that somebody has set, if it is for a semaphore."""
    return (
        record.capacity
        if record is not None and record.capacity_pinned and capacity not in PLAIN_OR_SHARED
        else capacity
    )


def with_pinned_capacity(claim: Claim, record: LockRecord) -> Claim:
    """The claim, with the capacity that somebody has set, if there is one.

    :raises LockValueError: it wants more than that.
    :raises CapacityMismatchError: it is not one for a semaphore.
    """
    if not record.capacity_pinned:
        return claim
    if claim.capacity in PLAIN_OR_SHARED:
        # Also where it is the same: its holder would not count on others, for whom more slots may be made.
        raise CapacityMismatchError(_mismatch(record, claim.capacity))
    check_pinned(record, claim.slots)
    return replace(claim, capacity=record.capacity)


def check_pinned(record: LockRecord, slots: int) -> None:
    """Whether there will ever be so many.

    :raises LockValueError: there will not.
    """
    if record.capacity_pinned and slots > record.capacity:
        raise LockValueError(
            f"{slots} slots can never be free in the lock {record.key!r}: its capacity was set to {record.capacity}."
        )


def _mismatch(record: LockRecord, capacity: int) -> str:
    if record.capacity_pinned:
        return (
            f"The lock {record.key!r} has a capacity of {record.capacity}, which was set, and cannot be taken as "
            f"{describe_kind(capacity)}: use it as a semaphore, or take the setting back with set_capacity(key, None)."
        )
    used = f"as {describe_kind(record.capacity)}, not as {describe_kind(capacity)}"
    if not PLAIN_OR_SHARED & {record.capacity, capacity}:
        used = f"with a capacity of {record.capacity}, not {capacity}"
    return (
        f"The lock {record.key!r} is in use {used}: use the same capacity and mode everywhere, or wait until it is "
        f"free. {record.describe()}."
    )


def describe_kind(capacity: int) -> str:
    kinds = {1: "a plain lock", SHARED: "a shared lock"}
    return kinds.get(capacity, f"a semaphore with a capacity of {capacity}")


def choose_dead(claim: Claim, record: LockRecord, dead: list[Holder], leave: int) -> tuple[Holder, ...]:
    """As many of the dead as must make place for the claim, and for those who are to have the lock first.

    All of them where the capacity changes: only an otherwise empty lock may do that. All of them where the lock is
    shared as well: readers never run out of slots, so nothing else would remove dead readers. Holders that may have
    died at work come first.
    """
    dead = sorted(dead, key=lambda holder: holder.cooling_down)
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
