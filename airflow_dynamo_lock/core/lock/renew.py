"""Renew leases: single heartbeats, background heartbeats, and the edits that a heartbeat may carry (R4, R8, R9)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from airflow_dynamo_lock.core.effects import Operation, Reply, Sleep, with_timeout
from airflow_dynamo_lock.core.lock.requests import CONFLICT_PAUSE, ROUNDS, Requests, time_left
from airflow_dynamo_lock.core.model.edits import Change, CoolDown, Drain, Edit, Enter, Heartbeat
from airflow_dynamo_lock.core.model.errors import (
    LockAccessError,
    LockConflictError,
    LockError,
    LockRecordError,
    LockUnavailableError,
    LockValueError,
)
from airflow_dynamo_lock.core.model.lease import Lease, LeaseSet, Term
from airflow_dynamo_lock.core.model.outcomes import Draining, Lost, Renewed
from airflow_dynamo_lock.core.model.record import Holder
from airflow_dynamo_lock.core.table.renewal_writes import renewed_at
from airflow_dynamo_lock.events import notify
from airflow_dynamo_lock.log import log

# Longest pause before a failed heartbeat or enter is repeated, in seconds.
_RETRY_PAUSE = 1.0


@dataclass(frozen=True)
class Renewing:
    """Renews leases. Every renewal is one conditional write, repeated only if the refusal shows that it may succeed."""

    requests: Requests

    def renew(
        self, key: str, lease_id: str, lease_ms: int, edit: Edit, *, until: float | None = None
    ) -> Operation[Renewed | Draining | Lost]:
        """Send one heartbeat with an edit. The edit `Heartbeat` is never answered by `Draining`.

        DynamoDB refuses a heartbeat if another process has written one with a later time, or one without a time. Then
        the heartbeat is repeated with a fresh stamp, after the one that the refusal showed.

        A process that knows no recent server time reads the lock first. If there is no server time at all, it reads
        the lock unless it wrote the last heartbeat itself: without a time, only the version tells a heartbeat from
        one that arrives late and would bring an old version back.

        :param lease_ms: how long the lease lasts after the heartbeat, milliseconds.
        :param until: when the caller stops waiting, monotonic seconds; None if never.
        :raises LockValueError: the edit would shorten the lease.
        :raises LockUnavailableError: DynamoDB did not serve the heartbeat, or other writes came first each time.
        """
        seen = self.requests.written(key, lease_id)
        stamp = yield from self.requests.fresh_stamp(key, lease_ms, until)
        for attempt in range(1, ROUNDS + 1):
            left = time_left(until, stamp.at)
            reads = seen is None and stamp.undated
            request = (
                self.requests.format.get(key)
                if reads
                else self.requests.format.renew(key, lease_id, lease_ms, stamp, edit, seen)
            )
            try:
                reply: Reply = yield with_timeout(request, left)
            except LockConflictError as conflict:
                pause = CONFLICT_PAUSE * attempt
                if conflict.maybe_applied or attempt == ROUNDS or (left is not None and left <= pause):
                    raise
                yield Sleep(pause)
                stamp = yield from self.requests.fresh_stamp(key, lease_ms, until)
                continue
            if not reads and not reply.refused:
                record = self.requests.format.record(reply.output["Attributes"], reply.server_ms)
                self.requests.note_written(key, record.holders[lease_id])
                return Renewed(record.holders[lease_id], stamp.at)
            found, _ = yield from self.requests.record_after(key, reply, time_left(until, reply.received_at))
            holder = found.holders.get(lease_id) if found is not None else None
            if holder is None or not holder.ours:
                return Lost(found, lease_id)
            if holder.version == stamp.version:
                self.requests.note_written(key, holder)
                return Renewed(holder, stamp.at)  # an earlier attempt of the SDK was applied (R5)
            if holder.draining and isinstance(edit, Change | Enter | Drain):
                return Draining(holder)
            if holder.cooling_down:
                return Lost(found, lease_id)  # it was released
            if isinstance(edit, Change) and edit.longer and lease_ms < holder.lease_ms:
                raise LockValueError(
                    f"The lease {lease_id} of the lock {key!r} lasts {holder.lease_ms / 1000:g} s and cannot be made "
                    f"shorter ({lease_ms / 1000:g} s), because its holder may rely on it."
                )
            seen = holder
            stamp = yield from self.requests.fresh_stamp(key, lease_ms, until)
            if until is not None and stamp.at >= until:
                break
        raise LockUnavailableError(
            f"The heartbeat of the lease {lease_id} of the lock {key!r} was not written, because other writes to the "
            "lease came first each time.",
            maybe_applied=False,
        )

    def enter(
        self, key: str, lease_id: str, lease_ms: int, process: str, until: float
    ) -> Operation[Renewed | Draining | Lost]:
        """Add a process to those inside. Try again while DynamoDB does not answer: the record shows whether the lease
        is still held, so it is never too late to enter.

        :param lease_ms: how long the process may rely on the lease, milliseconds.
        :param until: time of the last attempt at the latest, monotonic seconds.
        :raises LockUnavailableError: DynamoDB has not answered until then.
        """
        while True:
            try:
                return (yield from self.renew(key, lease_id, lease_ms, Enter(process)))
            except LockUnavailableError as failure:
                if self.requests.stamp().at + _RETRY_PAUSE >= until:
                    raise
                log.warning(
                    "Entering the lock %r (lease %s) failed, trying again: %s", key, lease_id, failure
                )
            yield Sleep(_RETRY_PAUSE)

    def cool_down(self, key: str, holder: Holder, rest_ms: int, usual_ms: int | None) -> Operation[Reply]:
        """End a lease that `min_hold` keeps for another `rest_ms` milliseconds; it expires by itself then.

        :param usual_ms: how long leases are usually held, milliseconds; None keeps what the record says.
        """
        return (
            yield from self.requests.write(
                lambda stamp: self.requests.format.renew(
                    key, holder.lease_id, rest_ms, stamp, CoolDown(usual_ms), holder
                )
            )
        )

    def renew_all(
        self, leases: Sequence[Lease], edit: Heartbeat | Change, *, until: float | None = None
    ) -> Operation[Renewed | Draining | Lost]:
        """Send the heartbeats of several leases, in one request if that is possible.

        Returns `Lost` or `Draining` if that is true of one lease, else `Renewed` with the lease that expires first.

        :param leases: the leases as they are to be afterwards.
        """
        if len(leases) > 1:
            sent_at = yield from self._renew_together(leases, edit, until)
            if sent_at is not None:
                return Renewed(_as_renewed(min(leases, key=lambda each: each.lease_ms)), sent_at)
        renewed: list[Renewed] = []
        for lease in leases:
            outcome = yield from self.renew(lease.key, lease.lease_id, lease.lease_ms, edit, until=until)
            if not isinstance(outcome, Renewed):
                return outcome
            renewed.append(outcome)
        first = min(renewed, key=lambda each: each.holder.lease_ms)
        return Renewed(first.holder, min(each.stamped_at for each in renewed))

    def _renew_together(
        self, leases: Sequence[Lease], edit: Heartbeat | Change, until: float | None
    ) -> Operation[float | None]:
        """Send the heartbeats in one transaction. Returns the time of the first stamp (monotonic seconds), or None if
        only `renew` can send them: after a refusal, as of a draining lease, or without server time for a lease that
        another process has written."""
        most_ms = min(each.lease_ms for each in leases)
        while True:
            yield from self.requests.fresh_stamp(leases[0].key, most_ms, until)
            stamps = [self.requests.stamp() for _ in leases]
            if all(each.is_fresh(most_ms) for each in stamps):
                break
        seen = [self.requests.written(each.key, each.lease_id) for each in leases]
        if any(stamp.undated and last is None for stamp, last in zip(stamps, seen, strict=True)):
            return None
        change = edit if isinstance(edit, Change) else Change()
        writes = [
            self.requests.format.renew(lease.key, lease.lease_id, lease.lease_ms, stamp, change, last)
            for lease, stamp, last in zip(leases, stamps, seen, strict=True)
        ]
        try:
            reply: Reply = yield with_timeout(
                self.requests.format.transaction(writes), time_left(until, stamps[0].at)
            )
        except LockRecordError:
            return None  # one of the records is damaged
        if reply.refused:
            return None
        for lease, stamp, last in zip(leases, stamps, seen, strict=True):
            written = replace(
                _as_renewed(lease), version=stamp.version, renewed_at_ms=renewed_at(stamp, last)
            )
            self.requests.note_written(lease.key, written)
        return stamps[0].at

    def keep_alive(self, leases: Sequence[Lease], interval: float, term: Term) -> Operation[None]:
        """Send heartbeats for a holder every `interval` seconds, until a lease is lost; `term` has the reason then.

        The term must be valid. Otherwise the lease is lost at once, without a request.

        A failed heartbeat is repeated until the end of the lease, and none may take longer than that. So the holder
        gives up in time even if the network never answers (R4).

        :param leases: their `lease_ms` is how long this holder relies on a heartbeat: at most the lease in the record.
        """
        pause = interval
        lease_ms = min(each.lease_ms for each in leases)
        while True:
            yield Sleep(min(pause, term.remaining()))
            if term.remaining() <= 0:
                term.lose("no heartbeat has succeeded in time")
                return
            try:
                outcome = yield from self.renew_all(leases, Heartbeat(), until=term.until)
            except LockError as failure:
                _log_failure(leases, failure)
                pause = min(interval, _RETRY_PAUSE)
                continue
            assert not isinstance(outcome, Draining)  # `Heartbeat` renews a draining lease
            if isinstance(outcome, Lost):
                term.lose(outcome.describe())
                return
            log.debug("Heartbeat of %s.", LeaseSet(tuple(leases)))
            # A draining lease is the shorter one that the record shows now.
            term.renewed(outcome.stamped_at, min(lease_ms, outcome.holder.lease_ms))
            pause = interval

    def keep_for_processes(self, leases: Sequence[Lease], interval: float) -> Operation[Draining | Lost]:
        """Send the heartbeats of the heartbeat task, until every lease drains or is lost (R9). Processes inside send
        their own; these cover the time in which no process is inside.

        Returns the outcome of the lease that ended last.

        No process relies on the lease of this task, so it has no deadline: it continues after any failure while
        the record shows the lease. It does not renew a draining lease: Airflow may restart the task, which would keep
        the lease of dead processes alive.
        """
        denied = 0.0  # seconds for which DynamoDB has denied access
        kept = list(leases)
        ended: Draining | Lost | LockError | None = None
        while True:
            try:
                if len(kept) == 1 or (yield from self._renew_together(kept, Change(), None)) is None:
                    for lease in list(kept):
                        outcome = yield from self._renew_or_error(lease)
                        if not isinstance(outcome, Renewed):
                            kept.remove(lease)
                            # The other leases are kept; an error is raised when they have ended.
                            ended = ended if isinstance(ended, LockError) else outcome
            except LockAccessError as failure:
                # Credentials may be replaced at any time, but a lasting denial is an error.
                if denied * 1000 >= kept[0].lease_ms:
                    raise
                pause = min(interval, _RETRY_PAUSE)
                denied += pause
                _log_failure(kept, failure)
            except LockUnavailableError as failure:
                pause, denied = min(interval, _RETRY_PAUSE), 0.0
                _log_failure(kept, failure)
            else:
                if ended is not None and not kept:
                    if isinstance(ended, LockError):
                        raise ended
                    return ended
                log.debug("Heartbeat of %s.", LeaseSet(tuple(kept)))
                pause, denied = interval, 0.0
            yield Sleep(pause)

    def _renew_or_error(self, lease: Lease) -> Operation[Renewed | Draining | Lost | LockError]:
        """Renew one lease; an error that concerns only this lease is returned, not raised."""
        try:
            return (yield from self.renew(lease.key, lease.lease_id, lease.lease_ms, Change()))
        except (LockAccessError, LockUnavailableError):
            raise
        except LockError as failure:
            return failure


def _log_failure(leases: Sequence[Lease], failure: LockError) -> None:
    """Log that a heartbeat failed and is repeated."""
    log.warning("Heartbeat of %s failed, trying again: %s", LeaseSet(tuple(leases)), failure)
    for each in leases:
        notify("heartbeat_failed", each.key)


def _as_renewed(lease: Lease) -> Holder:
    """The holder after a transaction, which does not return the record."""
    return Holder(
        lease.lease_id, lease.owner, lease.slots, lease.lease_ms, lease.grace_ms, "", lease.acquired_at_ms
    )
