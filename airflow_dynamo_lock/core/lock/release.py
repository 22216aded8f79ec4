"""Release leases: at once, when the last process leaves, or when the minimum time is over (R5, R8)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from airflow_dynamo_lock.core.effects import Operation, Reply, Request, Stamp
from airflow_dynamo_lock.core.lock.renew import Renewing
from airflow_dynamo_lock.core.lock.requests import Requests
from airflow_dynamo_lock.core.model.edits import Drain
from airflow_dynamo_lock.core.model.ending import Ending
from airflow_dynamo_lock.core.model.errors import LockRecordError, LockUnavailableError
from airflow_dynamo_lock.core.model.lease import Lease, LeaseSet
from airflow_dynamo_lock.core.model.outcomes import Draining, Lost, Released, Renewed
from airflow_dynamo_lock.core.model.record import Holder, LockRecord
from airflow_dynamo_lock.log import log


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
                ending=_ending(lease),
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
                ending=_ending_of(record, holder),
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
            return (yield from self.requests.write(write)), True
        return reply, reply.retried

    def release(
        self,
        key: str,
        lease_id: str,
        slots: int,
        grace_ms: int,
        *,
        confirmed: bool,
        ending: Ending | None = None,
    ) -> Operation[Released | Draining | Lost]:
        """Free the slots. While processes are inside, drain the lease instead (R8).

        :param confirmed: the caller received the grant.
        :param ending: what the release leaves in the record; None leaves nothing.
        """
        release = partial(
            self.requests.format.release, key, lease_id, slots, confirmed=confirmed, ending=ending
        )
        reply, retried = yield from self._write_again(release)
        if not reply.refused:
            return Released()
        record, _ = yield from self.requests.record_after(key, reply, None)
        holder = record.holders.get(lease_id) if record is not None else None
        if record is not None and holder is not None and holder.ours:
            slots = holder.slots  # a lease from an XCom may have another number
            ending = ending and _ending_of(record, holder)
            again = partial(self.release, key, lease_id, slots, grace_ms, confirmed=confirmed, ending=ending)
            if holder.cooling_down:
                return Released(holder.hold_until_ms)
            now_ms = self.requests.stamp().best_ms
            # At most `min_hold`, even if the clock that wrote these times was wrong.
            until_ms = holder.hold_until_ms or 0
            rest_ms = min(until_ms - now_ms, until_ms - (holder.acquired_at_ms or 0))
            if not holder.processes and rest_ms > 0:
                usual_ms = ending.mean(until_ms) if ending else None
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
        self, leases: Sequence[Lease], *, confirmed: bool
    ) -> Operation[list[Released | Draining | Lost]]:
        """Release several leases, in one request if that is possible.

        :param confirmed: the caller received the grants.
        :raises LockRecordError: a record is damaged; the other leases are released.
        """
        maybe_released = False
        if len(leases) > 1:
            releases = [
                self.requests.format.release(
                    each.key,
                    each.lease_id,
                    each.slots,
                    self.requests.stamp(),
                    confirmed=confirmed,
                    ending=_ending(each),
                )
                for each in leases
            ]
            try:
                reply: Reply = yield self.requests.format.transaction(releases)
                if not reply.refused:
                    return [Released() for _ in leases]
                maybe_released = reply.retried
            except LockUnavailableError as unknown:
                maybe_released = unknown.maybe_applied
            except LockRecordError as damaged:
                log.debug("Releasing %s one by one: %s", LeaseSet(tuple(leases)), damaged)
        outcomes: list[Released | Draining | Lost] = []
        broken: LockRecordError | None = None
        for lease in leases:
            try:
                outcome = yield from self.release(
                    lease.key,
                    lease.lease_id,
                    lease.slots,
                    lease.grace_ms,
                    confirmed=confirmed,
                    ending=_ending(lease),
                )
            except LockRecordError as damaged:
                broken = damaged  # release the other leases first
                continue
            # The transaction may have removed the lease (R5).
            outcomes.append(Released() if maybe_released and isinstance(outcome, Lost) else outcome)
        if broken is not None:
            raise broken
        return outcomes


def _ending(lease: Lease) -> Ending:
    """What the release of a lease leaves in the record, as its holder knows it."""
    return Ending(lease.owner, lease.acquired_at_ms, lease.usual_ms)


def _ending_of(record: LockRecord, holder: Holder) -> Ending | None:
    """What the release of a holder's lease leaves in the record, as the record shows it."""
    return (
        None
        if holder.acquired_at_ms is None
        else Ending(holder.owner, holder.acquired_at_ms, record.usual_ms)
    )
