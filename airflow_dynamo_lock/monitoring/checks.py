"""Limits for locks, and the sentences that say which locks exceed them: for cron, Nagios and alerts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

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
            yield (
                f"The lock {key!r} has been held for {duration(state.held_ms)} by {holder.describe(state.now_ms)}."
            )
        if waiter is not None and limits.waited_ms is not None and state.waited_ms >= limits.waited_ms:
            yield (
                f"{readable(waiter.owner)} has waited for the lock {key!r} for {duration(state.waited_ms)}. "
                f"{record.describe()}."
            )
        if loss is not None and limits.lost_ms is not None and state.now_ms - loss.at_ms <= limits.lost_ms:
            yield f"{readable(loss.owner)} has lost the lock {key!r}: {loss.describe()}."
