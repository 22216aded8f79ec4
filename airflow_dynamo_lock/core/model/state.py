"""A lock with its queue at one moment, and how long everything has lasted."""

from __future__ import annotations

from dataclasses import dataclass

from airflow_dynamo_lock.core.model.record import Holder, LockRecord, Waiter


@dataclass(frozen=True)
class LockState:
    """A lock with its queue at one moment.

    :ivar record: the lock.
    :ivar waiters: its queue, the next one first.
    :ivar now_ms: server time when the lock was read, epoch milliseconds; this host's clock if that is unknown.
    """

    record: LockRecord
    waiters: tuple[Waiter, ...]
    now_ms: int

    def longest_holder(self) -> Holder | None:
        """The holder that has held the lock for longest; None if the lock is free, or no time is known."""
        known = [each for each in self.record.holders.values() if each.acquired_at_ms is not None]
        return min(known, key=lambda each: each.acquired_at_ms or 0, default=None)

    def longest_waiter(self) -> Waiter | None:
        """The waiter that began to wait first; None if there is none."""
        return min(self.waiters, key=lambda each: each.since_ms, default=None)

    @property
    def held_ms(self) -> int:
        """How long the lock has been held by the same holder, milliseconds; 0 if it is free, or not known."""
        holder = self.longest_holder()
        return 0 if holder is None or holder.acquired_at_ms is None else self._age(holder.acquired_at_ms)

    @property
    def waited_ms(self) -> int:
        """How long the longest waiter has waited, milliseconds; 0 if there is none."""
        waiter = self.longest_waiter()
        return 0 if waiter is None else self._age(waiter.since_ms)

    @property
    def silent_ms(self) -> int:
        """The age of the oldest last heartbeat of a holder, milliseconds; 0 if none is known."""
        heartbeats = [
            each.renewed_at_ms for each in self.record.holders.values() if each.renewed_at_ms is not None
        ]
        return max(map(self._age, heartbeats), default=0)

    def _age(self, then_ms: int) -> int:
        return max(0, self.now_ms - then_ms)
