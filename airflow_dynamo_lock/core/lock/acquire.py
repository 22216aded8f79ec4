"""Acquire locks, waiting for them: attempt, enqueue, sleep until woken, attempt again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from airflow_dynamo_lock.core.effects import Operation, Reply, Sleep, WaitForSlots, with_timeout
from airflow_dynamo_lock.core.liveness import Observer
from airflow_dynamo_lock.core.lock.attempt import UNDO_WITHIN, Attempting
from airflow_dynamo_lock.core.lock.nested import NestedWait
from airflow_dynamo_lock.core.lock.requests import Requests
from airflow_dynamo_lock.core.model.capacity import check_pinned, should_wake
from airflow_dynamo_lock.core.model.claim import Claim
from airflow_dynamo_lock.core.model.errors import LockError, LockTimeoutError, LockUnavailableError
from airflow_dynamo_lock.core.model.lease import Lease
from airflow_dynamo_lock.core.model.outcomes import Busy, Granted
from airflow_dynamo_lock.core.model.record import LockRecord, QueuePosition, Waiter
from airflow_dynamo_lock.core.queue.queue import WaitQueue
from airflow_dynamo_lock.core.queue.view import on_change
from airflow_dynamo_lock.core.wait.admission import Admission, AdmissionWindow
from airflow_dynamo_lock.log import log

# Shortest timeout of a request, in seconds, even if the caller has less time left.
_ANSWER_WITHIN = 3.0

# Seconds after which a waiter for several locks tries again, although it was not woken: the poller reads only the lock
# that it waits for, and a person may have removed it from the queue of another one.
_LOOK_AT_SET_EVERY = 10.0

# Longest time in seconds for which a waiter in the queue is not woken after a request that DynamoDB did not serve.
_UNWOKEN_FOR = 1.0


@dataclass(frozen=True)
class Acquiring:
    """Acquires locks, waiting for them.

    :ivar window: limits the newcomers of this process that send requests at the same time.
    """

    requests: Requests
    attempting: Attempting
    observer: Observer
    queue: WaitQueue
    window: AdmissionWindow = field(default_factory=AdmissionWindow)

    def acquire(self, claim: Claim, **options: Any) -> Operation[Granted]:
        """Acquire one lock, with the options of `acquire_all`."""
        return (yield from self.acquire_all((claim,), **options))[0]

    def acquire_all(
        self,
        claims: Sequence[Claim],
        *,
        now: float,
        timeout: float | None,
        poll_interval: float,
        owns_lease_id: bool,
        on_busy: Callable[[LockRecord], None] | None = None,
        on_position: Callable[[QueuePosition], None] | None = None,
        holding: Sequence[Lease] = (),
    ) -> Operation[tuple[Granted, ...]]:
        """Acquire all locks in one step, as soon as each has free slots or dead holders. Fair claims queue.

        :param claims: claims for different keys with the same lease id.
        :param now: monotonic seconds.
        :param timeout: maximum time to wait, in seconds; 0 tries once, None waits without a limit.
        :param poll_interval: seconds between reads of the table.
        :param owns_lease_id: no other process uses the lease id (`Attempting.try_acquire_all`).
        :param on_busy: called with the lock after each attempt that found it busy.
        :param on_position: called with the position in the queue whenever it has changed.
        :param holding: leases that the caller does not release before this acquire ends (R14).
        :raises LockTimeoutError: a lock was not free in time; the message names its holders.
        :raises LockDeadlockError: the wait would never end.
        :raises LockRemovedError: a person removed the waiter from a queue.
        :raises LockUnavailableError: DynamoDB could not be reached until the timeout.
        """
        deadline = None if timeout is None else now + timeout
        claim = claims[0]  # the one that was last found busy
        # A claimant without waiters in `mine` is a newcomer. With them it has tickets; it is queued once its entries
        # are written (`enqueued`). If that write failed, only the entries are written again.
        mine: dict[str, Waiter] = {}
        enqueued = False
        report_position = on_change(on_position) if on_position else None
        wants: WaitForSlots | None = None
        admission = Admission(self.window)
        nested = NestedWait(self.requests, self.observer, claims, holding) if holding else None
        try:
            while True:
                left = None if deadline is None else max(0.0, deadline - now)
                within = None if left is None else max(left, _ANSWER_WITHIN)
                if not enqueued and left != 0 and not admission.admit():
                    now = yield Sleep(admission.pause(poll_interval, self.requests.stamp().jitter, left))
                    continue
                try:
                    if not mine or enqueued:
                        outcome = yield from self.attempting.try_acquire_all(
                            claims, within=within, owns_lease_id=owns_lease_id, mine=mine, busy=claim.key
                        )
                        if not isinstance(outcome, Busy):
                            admission.answered()
                            if mine or nested is not None:
                                yield from self._end_waiting(
                                    outcome, mine, nested, owns_lease_id=owns_lease_id
                                )
                            return outcome
                        record = outcome.record
                        if outcome.undone:
                            claims = self._with_new_lease_id(claims)
                        claim = next(each for each in claims if each.key == record.key)
                        waiter = mine.get(claim.key)
                        if on_busy is not None:
                            on_busy(record)
                        if deadline is not None and now >= deadline:
                            raise LockTimeoutError(_not_in_time(claim.key, timeout or 0.0, outcome), record)
                        if nested is not None:
                            nested.check_own(record)
                        if waiter is not None and (
                            record.queue_head is None or record.queue_head > waiter.place
                        ):
                            # Others have skipped the waiter as dead.
                            yield with_timeout(
                                self.requests.format.lower_head(claim.key, waiter.place), within
                            )
                        elif not mine and claim.fair:
                            waiters = yield from self.queue.take_tickets(
                                claims, record, left, within, resume=not owns_lease_id
                            )
                            if not waiters and len(claims) == 1:
                                continue
                            mine = {each.key: each for each in waiters}
                    if mine and not enqueued:
                        yield from self.queue.enqueue(list(mine.values()), within)
                        enqueued = True
                    admission.answered()
                except LockUnavailableError as unavailable:
                    admission.failed()
                    stamp = self.requests.stamp()
                    left = None if deadline is None else max(0.0, deadline - stamp.at)
                    if left == 0:
                        raise
                    if owns_lease_id:
                        claims = self._with_new_lease_id(claims)
                        claim = next(each for each in claims if each.key == claim.key)
                    log.warning("Waiting for the lock %r: %s", claim.key, unavailable)
                    pause = admission.pause(poll_interval, stamp.jitter, left)
                    if wants is None or not enqueued:
                        now = yield Sleep(pause)
                        continue
                    # The poller leaves free slots to a waiter in the queue, so it wakes that one also from this pause,
                    # but not at once: DynamoDB may be refusing writes because there are too many.
                    unwoken = min(pause / 2, _UNWOKEN_FOR)
                    yield Sleep(unwoken)
                    now = yield replace(wants, seconds=pause - unwoken)
                    continue
                seconds = None if deadline is None else max(0.0, deadline - now)
                if len(claims) > 1 and mine:
                    seconds = _LOOK_AT_SET_EVERY if seconds is None else min(seconds, _LOOK_AT_SET_EVERY)
                wants = WaitForSlots(
                    claim.key,
                    claim.slots,
                    capacity=claim.capacity,
                    takes=True,
                    poll_interval=poll_interval,
                    seconds=seconds,
                    place=mine[claim.key].place if claim.key in mine else None,
                    lease_id=mine[claim.key].lease_id if claim.key in mine else None,
                    on_position=report_position,
                )
                now = (yield wants) if nested is None else (yield from nested.wait(wants, now))
        except BaseException as failure:
            # After an error or an interrupt, the waiter does not come back, and there is time to dequeue. In an outage
            # there may be none.
            stopped = owns_lease_id and not isinstance(failure, GeneratorExit)
            outage = isinstance(failure, LockUnavailableError)
            gave_up = not outage and (stopped or isinstance(failure, LockError))
            # The notes come last, because there may be another interrupt: a note that stays does no harm, but an entry
            # that stays counts as a living waiter while this process lives.
            if mine and gave_up:
                yield from self.queue.dequeue(list(mine.values()), UNDO_WITHIN, granted=False)
            else:
                self.queue.dequeue_later(
                    mine.values(), resumable=not owns_lease_id and not isinstance(failure, LockError)
                )
            if nested is not None and gave_up:
                yield from nested.end()
            raise
        finally:
            admission.close()

    def _with_new_lease_id(self, claims: Sequence[Claim]) -> list[Claim]:
        """The claims for the next attempt. The undo of the last one may arrive late, and must not release the leases of
        the next one (R7, one lease id per attempt)."""
        lease_id, former = self.requests.stamp().version, claims[0].former | {claims[0].lease_id}
        return [replace(each, lease_id=lease_id, former=former) for each in claims]

    def _end_waiting(
        self,
        granted: tuple[Granted, ...],
        mine: Mapping[str, Waiter],
        nested: NestedWait | None,
        *,
        owns_lease_id: bool,
    ) -> Operation[None]:
        """Remove the entries and notes of granted claims. If the caller is interrupted meanwhile, undo the grants."""
        try:
            if mine:
                yield from self.queue.dequeue(list(mine.values()), UNDO_WITHIN)
            if nested is not None:
                yield from nested.end()
        except BaseException as failure:
            if owns_lease_id and not isinstance(failure, GeneratorExit):
                yield from self.attempting.undo([each.claim for each in granted])
            raise

    def wait(
        self,
        key: str,
        slots: int,
        capacity: int | None = None,
        *,
        now: float,
        timeout: float | None,
        poll_interval: float,
    ) -> Operation[LockRecord | None]:
        """Wait until a lock has enough free slots, without acquiring them. Returns the lock as it is then.

        :param slots: number of slots.
        :param capacity: capacity that a claim would have; None accepts any lock that is not shared.
        :param now: monotonic seconds.
        :param timeout: maximum time to wait, in seconds; None waits without a limit.
        :param poll_interval: seconds between reads of the table.
        :raises LockTimeoutError: the slots were not free in time.
        :raises LockValueError: the pinned capacity of the lock is too small for the slots.
        """
        deadline = None if timeout is None else now + timeout
        admission = Admission(self.window)
        try:
            while True:
                left = None if deadline is None else max(0.0, deadline - now)
                if left != 0 and not admission.admit():
                    now = yield Sleep(admission.pause(poll_interval, self.requests.stamp().jitter, left))
                    continue
                try:
                    within = None if left is None else max(left, _ANSWER_WITHIN)
                    record, has_free_slots = yield from self.look(key, slots, capacity, within)
                except LockUnavailableError as unavailable:
                    admission.failed()
                    stamp = self.requests.stamp()
                    left = None if deadline is None else max(0.0, deadline - stamp.at)
                    if left == 0:
                        raise
                    log.warning("Waiting for free slots of the lock %r: %s", key, unavailable)
                    now = yield Sleep(admission.pause(poll_interval, stamp.jitter, left))
                    continue
                admission.answered()
                if has_free_slots or record is None:
                    return record
                if left == 0:
                    raise LockTimeoutError(_not_in_time(key, timeout or 0.0, Busy(record)), record)
                now = yield WaitForSlots(
                    key, slots, takes=False, poll_interval=poll_interval, seconds=left, capacity=capacity
                )
        finally:
            admission.close()

    def look(
        self, key: str, slots: int, capacity: int | None, within: float | None = None
    ) -> Operation[tuple[LockRecord | None, bool]]:
        """The lock as it is now, and whether it has enough free slots.

        :raises LockValueError: the pinned capacity of the lock is too small for the slots.
        """
        reply: Reply = yield with_timeout(self.requests.format.get(key), within)
        item = reply.output.get("Item")
        if not item:
            return None, True
        record = self.requests.format.record(item, reply.server_ms)
        check_pinned(record, slots)
        dead = self.observer.see(record, reply)
        return record, should_wake(record, dead, slots, capacity, takes=False)


def _not_in_time(key: str, timeout: float, busy: Busy) -> str:
    quicker = not busy.record.holders and not busy.ahead
    who = "Not locked, but other claims came first" if quicker else busy.describe()
    return f"The lock {key!r} was not free within {timeout:g} s. {who}."
