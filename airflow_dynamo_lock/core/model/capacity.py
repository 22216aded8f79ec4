"""Whether a lock can grant a claim: free slots, dead holders, and the kind of the lock."""

from __future__ import annotations

from dataclasses import replace

from airflow_dynamo_lock.core.model.claim import Claim
from airflow_dynamo_lock.core.model.errors import CapacityMismatchError, LockValueError
from airflow_dynamo_lock.core.model.kind import Kind
from airflow_dynamo_lock.core.model.record import Holder, LockRecord


def free_slots(record: LockRecord, dead: list[Holder]) -> int:
    """The free slots, and those of the dead holders."""
    return record.available + sum(holder.slots for holder in dead)


def has_free_slots(record: LockRecord, dead: list[Holder], slots: int, capacity: int) -> bool:
    """Whether the lock can grant `slots` of `capacity` now.

    :raises CapacityMismatchError: the lock is in use with another capacity, or its capacity is pinned to another one.
    """
    if record.capacity == capacity:
        return free_slots(record, dead) >= slots
    idle = len(dead) == len(record.holders)
    takes_turns = Kind.SEMAPHORE not in (record.kind, Kind.of(capacity))
    if record.capacity_pinned or not (idle or takes_turns):
        raise CapacityMismatchError(_mismatch(record, capacity))
    # The capacity of a lock may change only while no live holder counts on it.
    return idle and slots <= capacity


def should_wake(
    record: LockRecord, dead: list[Holder], slots: int, capacity: int | None, *, takes: bool
) -> bool:
    """Whether a waiter for `slots` has a reason to try now.

    :param capacity: capacity of its claim; None accepts any lock that is not shared.
    :param takes: the waiter acquires the slots. It is also woken for a lock of another capacity, so that its attempt
        raises the error.
    """
    if capacity is None:
        capacity = 1 if record.kind is Kind.SHARED and not record.capacity_pinned else record.capacity
    elif record.capacity_pinned and Kind.of(capacity) is not Kind.SEMAPHORE:
        return takes
    try:
        counts = effective_capacity(capacity, record)
        return has_free_slots(record, dead, min(slots, max(1, counts)), counts)
    except CapacityMismatchError:
        return takes


def effective_capacity(capacity: int, record: LockRecord | None) -> int:
    """The capacity that counts for a claim: the pinned one, if the claim is for a semaphore, else its own."""
    pinned = record is not None and record.capacity_pinned and Kind.of(capacity) is Kind.SEMAPHORE
    return record.capacity if record is not None and pinned else capacity


def with_pinned_capacity(claim: Claim, record: LockRecord) -> Claim:
    """The claim with the lock's pinned capacity; the claim itself if the lock has none.

    :raises LockValueError: the claim needs more slots than the pinned capacity.
    :raises CapacityMismatchError: the claim is not for a semaphore.
    """
    if not record.capacity_pinned:
        return claim
    if claim.kind is not Kind.SEMAPHORE:
        # Even with an equal capacity: the holder would not expect others, and the capacity may be raised.
        raise CapacityMismatchError(_mismatch(record, claim.capacity))
    check_pinned(record, claim.slots)
    return replace(claim, capacity=record.capacity)


def check_pinned(record: LockRecord, slots: int) -> None:
    """Return if the pinned capacity is large enough for `slots`, or the capacity is not pinned.

    :raises LockValueError: it is too small.
    """
    if record.capacity_pinned and slots > record.capacity:
        raise LockValueError(
            f"{slots} slots can never be free in the lock {record.key!r}: its capacity was set to {record.capacity}."
        )


def _mismatch(record: LockRecord, capacity: int) -> str:
    described = Kind.of(capacity).describe(capacity)
    if record.capacity_pinned:
        return (
            f"The lock {record.key!r} has a capacity of {record.capacity}, which was set, and cannot be taken as "
            f"{described}: use it as a semaphore, or take the setting back with set_capacity(key, None)."
        )
    used = f"as {record.kind.describe(record.capacity)}, not as {described}"
    if record.kind is Kind.of(capacity) is Kind.SEMAPHORE:
        used = f"with a capacity of {record.capacity}, not {capacity}"
    return (
        f"The lock {record.key!r} is in use {used}: use the same capacity and mode everywhere, or wait until it is "
        f"free. {record.describe()}."
    )


def choose_dead(claim: Claim, record: LockRecord, dead: list[Holder], reserved: int) -> tuple[Holder, ...]:
    """The dead holders to remove so that the claim finds free slots, and `reserved` slots remain for earlier waiters.

    All of them if the capacity changes, because only a lock without other holders may change it. All of them if the
    claim is shared: readers never run out of slots, so nothing else would remove dead readers. Holders that may have
    died at work come before those that are cooling down.
    """
    dead = sorted(dead, key=lambda holder: holder.cooling_down)
    if record.capacity != claim.capacity or claim.kind is Kind.SHARED:
        return tuple(dead)
    chosen: list[Holder] = []
    free = record.available
    for holder in dead:
        if free >= claim.slots + reserved:
            break
        chosen.append(holder)
        free += holder.slots
    return tuple(chosen)
