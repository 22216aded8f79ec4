"""One look at all locks of a table: each record with its queue, and how long everything has lasted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from airflow_dynamo_lock.client.sync_client import LockClient
from airflow_dynamo_lock.core.model.errors import LockRecordError
from airflow_dynamo_lock.core.model.record import Holder, LockRecord, Waiter


@dataclass(frozen=True)
class LockState:
    """A lock with its queue at one moment.

    :ivar record: the lock.
    :ivar waiters: its queue, the next one first.
    :ivar now_ms: server time when the record was read, epoch milliseconds; this host's clock if that is unknown.
    """

    record: LockRecord
    waiters: tuple[Waiter, ...]
    now_ms: int

    def longest_holder(self) -> Holder | None:
        """The holder that has held the lock for longest; None if the lock is free, or no time is known."""
        known = [each for each in self.record.holders.values() if each.acquired_at_ms is not None]
        return min(known, key=lambda each: each.acquired_at_ms or 0, default=None)

    def longest_waiter(self) -> Waiter | None:
        """The waiter that has waited for longest; None if nobody waits."""
        return min(self.waiters, key=lambda each: each.since_ms, default=None)

    @property
    def held_ms(self) -> int:
        """How long the lock has been held by the same holder, milliseconds; 0 if it is free, or not known."""
        holder = self.longest_holder()
        return 0 if holder is None or holder.acquired_at_ms is None else self._age(holder.acquired_at_ms)

    @property
    def waited_ms(self) -> int:
        """How long a waiter has waited, milliseconds: the one that has waited for longest; 0 if nobody waits."""
        waiter = self.longest_waiter()
        return 0 if waiter is None else self._age(waiter.since_ms)

    @property
    def silent_ms(self) -> int:
        """The age of the oldest last heartbeat of a holder, milliseconds; 0 if none is known."""
        beats = [
            each.renewed_at_ms for each in self.record.holders.values() if each.renewed_at_ms is not None
        ]
        return max(map(self._age, beats), default=0)

    def _age(self, then_ms: int) -> int:
        return max(0, self.now_ms - then_ms)


def survey(
    locks: LockClient, prefix: str = "", on_damaged: Callable[[LockRecordError], None] | None = None
) -> list[LockState]:
    """Look at all locks of a table. Reads the whole table, and the queue of each lock that has one.

    :param locks: client of the table.
    :param prefix: only locks whose names begin with this.
    :param on_damaged: called with the error of each record that cannot be read; by default it is logged.
    :returns: the locks, by name.
    """
    records = sorted(locks.list_locks(prefix, on_damaged=on_damaged), key=lambda each: each.key)
    return list(map(partial(_state, locks), records))


def _state(locks: LockClient, record: LockRecord) -> LockState:
    waiters = () if record.queue_head is None else tuple(locks.waiters(record.key))
    now_ms = round(time.time() * 1000) if record.read_at_ms is None else record.read_at_ms
    return LockState(record, waiters, now_ms)


def last_loss_ms(states: Iterable[LockState]) -> int | None:
    """When a lease was last lost, epoch milliseconds; None if no record tells of one."""
    losses = (each.record.last_loss for each in states)
    return max((each.at_ms for each in losses if each is not None), default=None)
