"""What all locks of a table add up to: for the metrics, the check of the command line, and the Locks page."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from airflow_dynamo_lock.core.model.state import LockState


@dataclass(frozen=True)
class Totals:
    """What all locks of a table add up to. All times are milliseconds.

    :ivar locks: number of locks that have a record.
    :ivar held: number of locks that are held.
    :ivar holders: number of leases: a semaphore has several.
    :ivar waiting: number of waiters.
    :ivar held_ms: how long the lock that has been held for longest has been held; 0 if none is held.
    :ivar waited_ms: how long the waiter that has waited for longest has waited; 0 if there is none.
    :ivar silent_ms: age of the oldest last heartbeat of a holder; 0 if there is none.
    :ivar last_loss_at_ms: when a lease was last lost, epoch milliseconds; None if no record has a loss.
    """

    locks: int
    held: int
    holders: int
    waiting: int
    held_ms: int
    waited_ms: int
    silent_ms: int
    last_loss_at_ms: int | None

    @classmethod
    def of(cls, states: Collection[LockState]) -> Totals:
        """The totals of these locks."""
        losses = (each.record.last_loss for each in states)
        return cls(
            locks=len(states),
            held=sum(bool(each.record.holders) for each in states),
            holders=sum(len(each.record.holders) for each in states),
            waiting=sum(len(each.waiters) for each in states),
            held_ms=max((each.held_ms for each in states), default=0),
            waited_ms=max((each.waited_ms for each in states), default=0),
            silent_ms=max((each.silent_ms for each in states), default=0),
            last_loss_at_ms=max((each.at_ms for each in losses if each is not None), default=None),
        )
