"""One attempt to acquire a lock, or several together: which write to send, and which one after a refusal (R2).

An attempt for a free lock is one request, and so is one that is refused because the lock is held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from airflow_dynamo_lock.core.effects import Operation, Reply, Request, Sleep, Stamp, with_timeout
from airflow_dynamo_lock.core.liveness import Observer
from airflow_dynamo_lock.core.lock.confirm import Confirming, GrantWrite, Seen
from airflow_dynamo_lock.core.lock.release import Releasing
from airflow_dynamo_lock.core.lock.requests import CONFLICT_PAUSE, ROUNDS, Requests
from airflow_dynamo_lock.core.model.capacity import choose_dead, has_free_slots, with_pinned_capacity
from airflow_dynamo_lock.core.model.claim import Claim
from airflow_dynamo_lock.core.model.errors import (
    LockNotFoundError,
    LockRemovedError,
    LockUnavailableError,
    LockValueError,
)
from airflow_dynamo_lock.core.model.kind import Kind, compatible
from airflow_dynamo_lock.core.model.outcomes import Busy, Granted
from airflow_dynamo_lock.core.model.record import Holder, LockRecord, Waiter
from airflow_dynamo_lock.core.queue.queue import WaitQueue
from airflow_dynamo_lock.core.queue.view import View
from airflow_dynamo_lock.core.table.format import QUEUE_EMPTY, QUEUE_IGNORED
from airflow_dynamo_lock.core.table.grant_writes import MAX_REMOVED
from airflow_dynamo_lock.log import log

# Timeout of the requests that undo an acquire whose result is unknown, in seconds.
UNDO_WITHIN = 3.0


@dataclass(frozen=True)
class Attempting:
    """Attempts to acquire locks.

    :ivar observer: remembers the holders that this process has seen (R3).
    :ivar queue: the queues, and the entries of this process.
    """

    requests: Requests
    releasing: Releasing
    confirming: Confirming
    observer: Observer
    queue: WaitQueue

    def try_acquire(
        self, claim: Claim, *, within: float | None = None, owns_lease_id: bool
    ) -> Operation[Granted | Busy]:
        """Try to acquire one lock, as `try_acquire_all` does."""
        outcome = yield from self.try_acquire_all((claim,), within=within, owns_lease_id=owns_lease_id)
        return outcome if isinstance(outcome, Busy) else outcome[0]

    def try_acquire_all(
        self,
        claims: Sequence[Claim],
        *,
        within: float | None = None,
        owns_lease_id: bool,
        mine: Mapping[str, Waiter] | None = None,
        busy: str = "",
    ) -> Operation[tuple[Granted, ...] | Busy]:
        """Acquire all locks or none, if each has free slots (or dead holders) and no earlier waiters.

        :param claims: claims for different keys with the same lease id.
        :param within: timeout of each request.
        :param owns_lease_id: no other process uses this lease id. So if an attempt fails and its writes may have been
            applied, this process releases the leases (R5), and may continue with a new lease id. False if another
            process may run the same attempt, as two processes of Airflow may.
        :param mine: the caller's entries in the queues, by key.
        :param busy: key of the lock that was last found busy. A waiter looks at it first, which saves reads.
        :raises CapacityMismatchError: a lock is in use with another capacity or mode.
        :raises LockNotFoundError: a lock has no record, and the claim is for existing locks only.
        :raises LockRemovedError: a person removed the claim's entry from a queue.
        :raises LockUnavailableError: DynamoDB did not serve a request.
        """
        mine = mine or {}
        unconfirmed: set[str] = set()
        outcome: tuple[Granted, ...] | Busy
        try:
            if len(claims) > 1:
                outcome = yield from self._try_together(claims, within, mine, unconfirmed, busy)
            else:
                outcome = yield from self._try_one(claims[0], within, mine.get(claims[0].key), unconfirmed)
            if owns_lease_id and unconfirmed and isinstance(outcome, Busy):
                # A lease was lost before the grants were confirmed.
                yield from self.undo(claims)
                outcome = replace(outcome, undone=True)
            return outcome
        except BaseException as failure:
            if owns_lease_id and _maybe_applied(failure, unconfirmed):
                yield from self.undo(claims)
            raise

    def undo(self, claims: Sequence[Claim]) -> Operation[None]:
        """Release leases that may have been granted, and that no caller has received (R5)."""
        releases = [self._undo_one(each) for each in claims]
        try:
            if len(claims) > 1:
                reply: Reply = yield with_timeout(self.requests.format.transaction(releases), UNDO_WITHIN)
                if not reply.refused:
                    return
            for release in releases:
                yield with_timeout(release, UNDO_WITHIN)
        except Exception as failure:
            lease_id = claims[0].lease_id
            log.debug("Could not undo the acquire of %s (lease %s): %s", _names(claims), lease_id, failure)

    def _undo_one(self, claim: Claim) -> Request:
        """The release of a lease that no caller has received. `min_hold` does not apply to it."""
        if not claim.min_hold_ms:
            return self.requests.format.release(
                claim.key, claim.lease_id, claim.slots, self.requests.stamp(), confirmed=False
            )
        holder = Holder(
            claim.lease_id, claim.owner, claim.slots, claim.lease_ms, claim.grace_ms, "", acquired_at_ms=None
        )
        return self.requests.format.break_(claim.key, holder, self.requests.stamp())

    def _try_one(
        self, claim: Claim, within: float | None, mine: Waiter | None, unconfirmed: set[str]
    ) -> Operation[tuple[Granted] | Busy]:
        """Send a write, and choose the next one by what each refusal shows. A waiter reads its queue first.

        :param unconfirmed: receives the keys of locks whose records may have a lease that no caller has received.
        """
        busy: Busy | None = None
        write = None if mine is not None else self._first_write(claim)
        for _ in range(ROUNDS):
            seen: Seen | None = None
            if write is not None:
                reply: Reply = yield with_timeout(write.request, within)
                if not reply.refused or reply.retried:
                    unconfirmed.add(claim.key)
                if not reply.refused:
                    record = self.requests.format.record(reply.output["Attributes"], reply.server_ms)
                    granted = yield from self.confirming.granted(write, record, reply, within)
                    if granted is not None:
                        return (granted,)
                seen = yield from self.requests.record_after(claim.key, reply, within)
                if seen[0] is None or claim.lease_id not in seen[0].holders:
                    unconfirmed.discard(claim.key)
                busy = None if seen[0] is None else Busy(seen[0])
            choice = yield from self._next_write(claim, seen, mine, within)
            if isinstance(choice, Busy):
                return choice
            write = choice
        # Other writes came first each time, so the lock is busy.
        return busy or _contended(claim)

    def _try_together(
        self,
        claims: Sequence[Claim],
        within: float | None,
        mine: Mapping[str, Waiter],
        unconfirmed: set[str],
        busy: str,
    ) -> Operation[tuple[Granted, ...] | Busy]:
        """As `_try_one`, in one transaction. It returns no tokens, so the locks are read afterwards."""
        writes: dict[str, GrantWrite] = {}
        seen: dict[str, Seen] = {}
        unclear = [] if not mine else sorted(claims, key=lambda each: each.key != busy)
        if not mine:
            writes = {each.key: self._first_write(each) for each in claims}
        for attempt in range(ROUNDS):
            for claim in unclear:
                choice = yield from self._next_write(claim, seen.get(claim.key), mine.get(claim.key), within)
                if isinstance(choice, Busy):
                    if mine:
                        yield from self._check_not_removed_from_any(claims, mine, within)
                    return choice
                writes[claim.key] = choice
            try:
                request = self.requests.format.transaction([writes[each.key].request for each in claims])
                reply: Reply = yield with_timeout(request, within)
            except LockUnavailableError as conflict:
                if conflict.maybe_applied or attempt + 1 == ROUNDS:
                    raise
                # Another transaction writes to one of the locks.
                yield Sleep(CONFLICT_PAUSE * (attempt + 1))
                unclear = []
                continue
            if reply.refused:
                reasons = dict(
                    zip((each.key for each in claims), reply.output["CancellationReasons"], strict=True)
                )
                unclear = [
                    each for each in claims if reasons[each.key].get("Code") == "ConditionalCheckFailed"
                ]
                seen = {}
                for claim in unclear:
                    shown = replace(reply, output=reasons[claim.key])
                    seen[claim.key] = yield from self.requests.record_after(claim.key, shown, within)
                continue
            unclear = list(claims)
            unconfirmed.update(each.key for each in claims)
            seen = yield from self.confirming.records(claims, within)
            granted = yield from self.confirming.granted_all(writes, seen, within)
            if granted is not None:
                return granted
        return _contended(claims[0])

    def _check_not_removed_from_any(
        self, claims: Sequence[Claim], mine: Mapping[str, Waiter], within: float | None
    ) -> Operation[None]:
        """Return unless a person has removed the claims from the queue of one of their locks (R15).

        An attempt reads the queues only up to the first lock that is not free.
        """
        seen = yield from self.confirming.records(claims, within)
        for claim in claims:
            _check_not_removed(seen[claim.key][0], claim, mine[claim.key])

    def _first_write(self, claim: Claim) -> GrantWrite:
        """The write for a lock that was not read: most locks are free."""
        stamp = self.requests.stamp()
        head_update = QUEUE_EMPTY if claim.fair else QUEUE_IGNORED
        return GrantWrite(claim, stamp, self.requests.format.acquire_idle(claim, stamp, None, head_update))

    def _next_write(
        self, claim: Claim, seen: Seen | None, mine: Waiter | None, within: float | None
    ) -> Operation[GrantWrite | Busy]:
        """The next write for a claim, or `Busy`. Reads the queue if it matters.

        :param seen: the lock as a response has just shown it; None if it was not read.
        :param mine: the claim's entry in the queue; None for a newcomer.
        """
        if seen is not None:
            _check_not_removed(seen[0], claim, mine)
        if seen is not None and (seen[0] is None or seen[0].queue_head is None or not claim.fair):
            return (yield from self._write_for(claim, *seen, None, within))
        view = yield from self.queue.reader.look(claim, mine, within)
        self.queue.discard(claim.key, view.dead)
        _check_not_removed(view.record, claim, mine)
        if not view.enqueued and mine is not None:
            yield from self.queue.enqueue([mine], within)
        return (yield from self._write_for(claim, view.record, view.reply, view, within))

    def _write_for(
        self,
        claim: Claim,
        record: LockRecord | None,
        reply: Reply,
        view: View | None,
        within: float | None,
    ) -> Operation[GrantWrite | Busy]:
        """The write for a claim, given the lock as a response has just shown it; or `Busy`.

        :param view: the queue; None if it does not matter.
        """
        head_update = view.head_update if view is not None else QUEUE_EMPTY if claim.fair else QUEUE_IGNORED
        ahead = view.ahead if view is not None and claim.fair else ()
        stamp, writes = self.requests.stamp(), self.requests.format
        if record is None:
            if claim.only_existing:
                raise LockNotFoundError.of(claim.key)
            return GrantWrite(claim, stamp, writes.acquire_idle(claim, stamp, None, head_update))
        claim = with_pinned_capacity(claim, record)
        own = record.holders.get(claim.lease_id)
        if own is not None:
            if own.draining:
                return Busy(record)
            if (own.slots, record.capacity) != (claim.slots, claim.capacity):
                raise LockValueError(
                    f"The lease {claim.lease_id} of the lock {claim.key!r} has {own.slots} of {record.capacity} "
                    f"slots already, not {claim.slots} of {claim.capacity}: use another lease id for another claim."
                )
            last = _with_heartbeats(own, stamp, self.observer.max_clock_skew_ms)
            write = writes.reacquire(claim, own, stamp, last)
            return GrantWrite(claim, stamp, write, continued=last)
        earlier = [each for each in record.holders.values() if claim.supersedes(each) and not each.draining]
        if earlier:
            for holder in earlier:
                log.info(
                    "Ending the lease %s of %r: a later attempt at the same work acquires the lock.",
                    holder.lease_id,
                    claim.key,
                )
                yield from self.releasing.release(
                    claim.key, holder.lease_id, holder.slots, holder.grace_ms, confirmed=False
                )
            if ahead:
                return Busy(record, ahead)
            return GrantWrite(claim, stamp, writes.acquire_idle(claim, stamp, record, head_update))
        dead = self.observer.see(record, reply)
        if not has_free_slots(record, dead, claim.slots, claim.capacity):
            return Busy(record, ahead)
        reserved = sum(each.slots for each in ahead)
        if ahead and (
            not all(compatible(each.capacity, claim.capacity) for each in ahead)
            or not has_free_slots(record, dead, claim.slots + reserved, claim.capacity)
        ):
            return Busy(record, ahead)
        if not record.holders:
            return GrantWrite(claim, stamp, writes.acquire_idle(claim, stamp, record, head_update))
        enough_free = record.capacity == claim.capacity and record.available >= claim.slots + reserved
        clears = claim.kind is Kind.SHARED and dead
        if enough_free and not clears:
            return GrantWrite(claim, stamp, writes.acquire_slots(claim, stamp, record, head_update, reserved))
        removed = choose_dead(claim, record, dead, reserved)
        if len(removed) > MAX_REMOVED and not enough_free:
            return (yield from self._remove_some_dead(claim, record, removed, view, within))
        removed = removed[:MAX_REMOVED]
        write = writes.reclaim(claim, record, removed, stamp, head_update, reserved)
        # If enough slots were free, the grant did not need those of the dead holders.
        return GrantWrite(claim, stamp, write, () if enough_free else removed)

    def _remove_some_dead(
        self,
        claim: Claim,
        record: LockRecord,
        dead: Sequence[Holder],
        view: View | None,
        within: float | None,
    ) -> Operation[GrantWrite | Busy]:
        """Remove some of the dead holders, because one write cannot remove all, and choose the next write."""
        # The last ones, because the first ones died at work: the reclaim that follows sets `took_over` for them.
        some = dead[-MAX_REMOVED:]
        reply: Reply = yield with_timeout(
            self.requests.format.remove_dead(claim.key, some, self.requests.stamp()), within
        )
        if reply.refused:
            # One of them is alive, or another process removes them.
            return Busy(record)
        log.info("Removed %d dead holders of the lock %r.", len(some), claim.key)
        record = self.requests.format.record(reply.output["Attributes"], reply.server_ms)
        return (yield from self._write_for(claim, record, reply, view, within))


def _with_heartbeats(holder: Holder, stamp: Stamp, skew_ms: int) -> Holder | None:
    """The holder, or None if its time is so far ahead that it is that of a wrong clock, which the process that was
    granted the lock has not corrected: then there was no heartbeat since."""
    return holder if (holder.renewed_at_ms or 0) - stamp.best_ms <= skew_ms else None


def _check_not_removed(record: LockRecord | None, claim: Claim, mine: Waiter | None) -> None:
    """Return unless the record says that a person has removed the claim from the queue (R15)."""
    lease_id = claim.lease_id if mine is None else mine.lease_id
    removal = None if record is None else record.removals.get(lease_id)
    if removal is not None:
        raise LockRemovedError.of(claim.key, removal)


def _contended(claim: Claim) -> Busy:
    """Busy, with an invented record: other writes came first each time, and no response showed the lock."""
    return Busy(LockRecord(claim.key, claim.capacity, claim.capacity, {}, token=0))


def _names(claims: Sequence[Claim]) -> str:
    return ", ".join(repr(each.key) for each in claims)


def _maybe_applied(failure: BaseException, unconfirmed: set[str]) -> bool:
    """Whether an attempt that failed like this may have left a lease: an earlier write did, or the last one was not
    answered, or was cancelled."""
    if isinstance(failure, GeneratorExit):
        return False  # a closed generator cannot send a request
    if isinstance(failure, LockUnavailableError) and failure.maybe_applied:
        return True
    return bool(unconfirmed) or not isinstance(failure, Exception)
