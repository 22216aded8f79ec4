"""Release leases: at once, when the last process leaves, or when the minimum time is over (R5, R8)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from airflow_dynamo_lock.core.effects import Operation, Reply, Request, Stamp
from airflow_dynamo_lock.core.lock.renew import Renewing
from airflow_dynamo_lock.core.lock.requests import Requests
from airflow_dynamo_lock.core.model.edits import Drain
from airflow_dynamo_lock.core.model.errors import LockAccessError, LockRecordError, LockUnavailableError
from airflow_dynamo_lock.core.model.hold import Hold
from airflow_dynamo_lock.core.model.lease import Lease, LeaseSet
from airflow_dynamo_lock.core.model.outcomes import Draining, Lost, Released, Renewed
from airflow_dynamo_lock.core.model.record import Holder, LockRecord
from airflow_dynamo_lock.log import log


@dataclass
class ReleaseProgress:
    """What the attempts to release a set of leases have done so far.

    :ivar outcomes: what became of each lease, by key, as far as that is known.
    :ivar unclear: keys of the locks that an attempt without an answer may have released.
    """

    outcomes: dict[str, Released | Draining | Lost] = field(default_factory=dict)
    unclear: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Releasing:
    """Releases leases. A release takes one request if no process is inside and no `min_hold` is left."""

    requests: Requests
    renewing: Renewing

    def leave(
        self, lease: Lease, process: str, *, release: bool = False
    ) -> Operation[Released | Renewed | Draining | Lost]:
        """Remove a guarded process that has left. The last one to leave a draining lease releases it (R8).

        :param release: release the lease too: in the same write if no other process is inside. If others are, the
            lease drains.
        """
        key, lease_id = lease.key, lease.lease_id
        if release:
            removal = partial(
                self.requests.format.release,
                key,
                lease_id,
                lease.slots,
                confirmed=True,
                hold=_hold(lease),
                leaving=process,
            )
            reply, maybe_applied = yield from self._write_again(removal)
            if not reply.refused:
                return Released()
            record, _ = yield from self.requests.record_after(key, reply, None)
            if record is None or lease_id not in record.holders:
                return Released() if maybe_applied else Lost(record, lease_id)
        reply = yield from self.requests.write(
            partial(self.requests.format.leave, key, lease_id, process, lease.lease_ms)
        )
        if reply.refused:
            record, _ = yield from self.requests.record_after(key, reply, None)
            return Lost(record, lease_id)
        record = self.requests.format.record(reply.output["Attributes"], reply.server_ms)
        holder = record.holders[lease_id]
        if release or (holder.draining and not holder.processes):
            outcome = yield from self.release(
                key,
                lease_id,
                lease.slots,
                lease.grace_ms,
                confirmed=True,
                hold=_hold_of(record, holder),
            )
            if release or not isinstance(outcome, Draining):
                return outcome
        return Renewed(holder, reply.sent_at)

    def _write_again(self, write: Callable[[Stamp], Request]) -> Operation[tuple[Reply, bool]]:
        """Send a removal, and once more if its answer is lost.

        :returns: the answer, and whether an earlier attempt may have been applied.
        """
        try:
            reply = yield from self.requests.write(write)
        except LockUnavailableError as unknown:
            if not unknown.maybe_applied:
                raise
            try:
                return (yield from self.requests.write(write)), True
            except (LockAccessError, LockUnavailableError) as again:
                raise unknown from again  # which may have been applied, whatever became of the second attempt
        return reply, reply.retried

    def release(
        self,
        key: str,
        lease_id: str,
        slots: int,
        grace_ms: int,
        *,
        confirmed: bool,
        hold: Hold | None = None,
    ) -> Operation[Released | Draining | Lost]:
        """Free the slots. While processes are inside, drain the lease instead (R8).

        :param confirmed: the caller received the grant.
        :param hold: what the release leaves in the record; None leaves nothing.
        """
        release = partial(self.requests.format.release, key, lease_id, slots, confirmed=confirmed, hold=hold)
        reply, retried = yield from self._write_again(release)
        if not reply.refused:
            return Released()
        record, _ = yield from self.requests.record_after(key, reply, None)
        holder = record.holders.get(lease_id) if record is not None else None
        if record is not None and holder is not None and holder.ours:
            slots = holder.slots  # a lease from an XCom may have another number
            hold = hold and _hold_of(record, holder)
            again = partial(self.release, key, lease_id, slots, grace_ms, confirmed=confirmed, hold=hold)
            if holder.cooling_down:
                return Released(holder.hold_until_ms)
            now_ms = self.requests.stamp().best_ms
            # At most `min_hold`, even if the clock that wrote these times was wrong.
            until_ms = holder.hold_until_ms or 0
            rest_ms = min(until_ms - now_ms, until_ms - (holder.acquired_at_ms or 0))
            if not holder.processes and rest_ms > 0:
                usual_ms = hold.mean(until_ms) if hold else None
                reply = yield from self.renewing.cool_down(key, holder, rest_ms, usual_ms)
                if reply.refused:
                    return (yield from again())
                return Released(holder.hold_until_ms)
            if not holder.processes and 0 < until_ms <= now_ms:
                # `min_hold` is over; the first write was refused because its sender did not know the server's time.
                return (yield from again())
            outcome = yield from self.renewing.renew(key, lease_id, grace_ms, Drain())
            if isinstance(outcome, Draining) or (isinstance(outcome, Renewed) and outcome.holder.processes):
                return Draining(outcome.holder)
            if isinstance(outcome, Renewed):
                # The last process left between the two writes, and did not know that it was to release.
                return (yield from again())
            record = outcome.record
        # The lease is gone: by an earlier attempt of this release (R5), or it was lost before.
        return Released() if retried else Lost(record, lease_id)

    def release_all(
        self, leases: Sequence[Lease], *, confirmed: bool, progress: ReleaseProgress | None = None
    ) -> Operation[list[Released | Draining | Lost]]:
        """Release several leases, in one request if that is possible.

        :param confirmed: the caller received the grants.
        :param progress: what earlier attempts have done; receives what this one does.
        :raises LockRecordError: a record is damaged; the other leases are released.
        """
        progress = progress or ReleaseProgress()
        outcomes, unclear = progress.outcomes, progress.unclear
        left = [each for each in leases if each.key not in outcomes]
        if len(left) > 1:
            releases = [
                self.requests.format.release(
                    each.key,
                    each.lease_id,
                    each.slots,
                    self.requests.stamp(),
                    confirmed=confirmed,
                    hold=_hold(each),
                )
                for each in left
            ]
            maybe_released = False
            try:
                reply: Reply = yield self.requests.format.transaction(releases)
                if not reply.refused:
                    outcomes.update({each.key: Released() for each in left})
                    left = []
                maybe_released = reply.retried
            except LockUnavailableError as unknown:
                maybe_released = unknown.maybe_applied
            except LockRecordError as damaged:
                log.debug("Releasing %s one by one: %s", LeaseSet(tuple(leases)), damaged)
            if maybe_released:
                unclear.update(each.key for each in left)
        failure: LockRecordError | None = None
        for lease in left:
            try:
                outcome = yield from self.release(
                    lease.key,
                    lease.lease_id,
                    lease.slots,
                    lease.grace_ms,
                    confirmed=confirmed,
                    hold=_hold(lease),
                )
            except LockUnavailableError as unknown:
                if unknown.maybe_applied:
                    unclear.add(lease.key)
                raise
            except LockRecordError as damaged:
                failure = damaged  # release the other leases first
                continue
            # An attempt without an answer has released it (R5).
            released = lease.key in unclear and isinstance(outcome, Lost)
            outcomes[lease.key] = Released() if released else outcome
        if failure is not None:
            raise failure
        return [outcomes[each.key] for each in leases]


def _hold(lease: Lease) -> Hold:
    """What the release of a lease leaves in the record, as its holder knows it."""
    return Hold(lease.owner, lease.acquired_at_ms, lease.usual_ms)


def _hold_of(record: LockRecord, holder: Holder) -> Hold | None:
    """What the release of a holder's lease leaves in the record, as the record shows it."""
    return (
        None if holder.acquired_at_ms is None else Hold(holder.owner, holder.acquired_at_ms, record.usual_ms)
    )
