"""Presence: proves that the waiters of this process are alive, and removes their leftover queue entries (R3).

A waiter counts as alive while its entry is fresh, and after that while its process renews a lease of its own: one write
every few seconds, however many waiters the process has.
"""

from __future__ import annotations

from dataclasses import dataclass

from airflow_dynamo_lock.core.effects import Operation, Sleep
from airflow_dynamo_lock.core.lock.operations import Operations
from airflow_dynamo_lock.core.model.claim import Claim
from airflow_dynamo_lock.core.model.edits import Heartbeat
from airflow_dynamo_lock.core.model.errors import LockError
from airflow_dynamo_lock.core.model.outcomes import Granted, Lost
from airflow_dynamo_lock.core.queue.queue import WaitQueue
from airflow_dynamo_lock.core.queue.view import PRESENCE_MS
from airflow_dynamo_lock.log import log

# Seconds between two heartbeats of the process, and the seconds of waiting after which it sends the first.
_PRESENCE_INTERVAL = 4.0
_PRESENCE_AFTER = 5.0
# Seconds between two rounds of maintenance.
_ROUND = 1.0
# Seconds between two removals of an entry whose write may still arrive.
_REMOVE_AGAIN_AFTER = 10.0
# Stop retrying the removal of an entry after this many seconds: other processes skip a dead entry anyway.
_DEQUEUE_FOR = 300.0


@dataclass(frozen=True)
class Presence:
    """What runs in the background while this process has waiters, or entries to remove."""

    queue: WaitQueue
    operations: Operations

    def maintain(self) -> Operation[None]:
        """Send the heartbeats of this process and remove its leftover entries, until neither is needed."""
        alive = False
        heartbeat_due: float | None = None
        while self.queue:
            now: float = yield Sleep(_ROUND)
            yield from self._remove_leftovers(now)
            self.queue.reader.forget_old_reads(now)
            if not self.queue.own.ids:
                heartbeat_due = None
            elif heartbeat_due is None:
                heartbeat_due = now + (0.0 if alive else _PRESENCE_AFTER)
            if heartbeat_due is None or now < heartbeat_due:
                continue
            process = self.queue.own.process
            try:
                if alive:
                    renewing = self.operations.renewing
                    outcome = yield from renewing.renew(process, process, PRESENCE_MS, Heartbeat())
                    alive = not isinstance(outcome, Lost)
                if not alive:
                    claim = Claim(process, process, "waiting", PRESENCE_MS, PRESENCE_MS, fair=False)
                    alive = isinstance(
                        (yield from self.operations.attempting.try_acquire(claim, owns_lease_id=False)),
                        Granted,
                    )
                heartbeat_due = now + _PRESENCE_INTERVAL
            except LockError as failure:
                log.warning(
                    "Could not send the heartbeat of this process's waiters, trying again: %s", failure
                )
        if alive:
            process = self.queue.own.process
            try:
                yield from self.operations.releasing.release(
                    process, process, 1, PRESENCE_MS, confirmed=False
                )
            except LockError as failure:
                log.debug("The lease %s expires by itself: %s", process, failure)

    def _remove_leftovers(self, now: float) -> Operation[None]:
        # A failure ends the round, because an outage would fail each request. The next round begins with other entries.
        leftovers = sorted(self.queue.leftovers.items(), key=lambda each: each[1].failed_at)
        for entry, leftover in leftovers:
            if now < leftover.due or self.queue.leftovers.get(entry) is not leftover:
                continue
            key, place = entry
            try:
                if leftover.resumable:
                    yield self.queue.format.hand_over_entry(
                        key, place, self.queue.own.process, self.queue.own.stamp()
                    )
                else:
                    yield self.queue.format.delete_entry(key, place)
            except LockError as failure:
                leftover.failed_at = now
                leftover.given_up = min(leftover.given_up, max(now, leftover.until) + _DEQUEUE_FOR)
                if now < leftover.given_up:
                    log.debug("Could not remove a queue entry of the lock %r, trying again: %s", key, failure)
                    return
                log.debug("Could not remove a queue entry of the lock %r: %s", key, failure)
            if now >= min(leftover.until, leftover.given_up):
                if self.queue.leftovers.get(entry) is leftover:
                    del self.queue.leftovers[entry]
            else:
                leftover.due = min(leftover.until, now + _REMOVE_AGAIN_AFTER)
