"""Estimates how long each waiter of a queue waits. Nothing depends on an estimate: people read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush

from airflow_dynamo_lock.core.model.capacity import effective_capacity
from airflow_dynamo_lock.core.model.record import Holder, LockRecord, Waiter


def with_expected_waits(record: LockRecord | None, waiters: Sequence[Waiter], now_ms: int) -> list[Waiter]:
    """The waiters with the times that they are expected to wait.

    The estimate plays the queue in its order. It assumes that each waiter holds its slots for the usual time of the
    lock, and each holder for what is left of that. A holder that has held for longer may end at any moment. A waiter
    that could be granted at any moment has no estimate: when it is granted is not known.

    :param record: the lock; None if it has no record.
    :param waiters: the whole queue in its order.
    :param now_ms: server time, epoch milliseconds.
    """
    if record is None or record.usual_ms is None:
        return list(waiters)
    usual_ms = record.usual_ms
    ends = [(_rest_ms(holder, usual_ms, now_ms), holder.slots) for holder in record.holders.values()]
    heapify(ends)
    capacity, available, at_ms = record.capacity, record.available, 0
    found = []
    for waiter in waiters:
        wanted = effective_capacity(waiter.capacity, record)
        slots = min(waiter.slots, wanted)
        # The capacity changes only while there is no holder, so readers and writers take turns.
        while ends and (capacity != wanted or available < slots):
            at_ms, freed = heappop(ends)
            available += freed
        if capacity != wanted:
            capacity = available = wanted
        available -= slots
        heappush(ends, (at_ms + usual_ms, slots))
        found.append(replace(waiter, expected_wait_ms=at_ms or None))
    return found


def _rest_ms(holder: Holder, usual_ms: int, now_ms: int) -> int:
    """How much longer the holder is expected to take its slots, milliseconds."""
    acquired_at_ms = now_ms if holder.acquired_at_ms is None else holder.acquired_at_ms
    # A grant that seems to lie in the future has just been made.
    end_ms = min(acquired_at_ms, now_ms) + usual_ms
    return max(0, end_ms - now_ms, (holder.hold_until_ms or 0) - now_ms)
