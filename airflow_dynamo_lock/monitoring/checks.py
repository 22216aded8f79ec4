"""Limits for locks, and the sentences that say which locks exceed them: for cron, Nagios and alerts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from airflow_dynamo_lock.core.model.record import Holder, LockRecord
from airflow_dynamo_lock.core.model.state import LockState
from airflow_dynamo_lock.core.model.text import duration, readable


@dataclass(frozen=True)
class Limits:
    """From when on something is reported. None sets no limit. All times are milliseconds.

    :ivar held_ms: how long a lock has been held by the same holder.
    :ivar waited_ms: how long a waiter has waited.
    :ivar lost_ms: for how long a lost lease is reported.
    """

    held_ms: float | None = None
    waited_ms: float | None = None
    lost_ms: float | None = None


def findings(states: Iterable[LockState], limits: Limits) -> Iterator[str]:
    """Say what exceeds the limits, a sentence for each lock and limit."""
    for state in states:
        key, record = state.record.key, state.record
        holder, waiter, loss = state.longest_holder(), state.longest_waiter(), record.last_loss
        if holder is not None and limits.held_ms is not None and state.held_ms >= limits.held_ms:
            yield long_hold(key, holder, state.held_ms, state.now_ms)
        if waiter is not None and limits.waited_ms is not None and state.waited_ms >= limits.waited_ms:
            yield long_wait(waiter.owner, state.waited_ms, record)
        if loss is not None and limits.lost_ms is not None and state.now_ms - loss.at_ms <= limits.lost_ms:
            yield f"{readable(loss.owner)} has lost the lock {key!r}: {loss.describe()}."


def long_wait(owner: str, waited_ms: int, record: LockRecord) -> str:
    """Say how long a waiter has waited for a lock, and who holds it.

    :param owner: name of the waiter.
    :param waited_ms: how long it has waited, milliseconds.
    :param record: the lock.
    """
    return f"{readable(owner)} has waited for the lock {record.key!r} for {duration(waited_ms)}. {record.describe()}."


def long_hold(key: str, holder: Holder, held_ms: int, now_ms: int | None) -> str:
    """Say how long a holder has held a lock.

    :param key: name of the lock.
    :param holder: the holder.
    :param held_ms: how long it has held the lock, milliseconds.
    :param now_ms: server time when the lock was read, epoch milliseconds; None if unknown.
    """
    return f"The lock {key!r} has been held for {duration(held_ms)} by {holder.describe(now_ms)}."
