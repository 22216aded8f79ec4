"""Release a lease: at once, when the last process has left, or when its minimum time is over (R5, R8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from airflow_dynamo_lock.core.effects import (
    Operation,
    Reply,
)
from airflow_dynamo_lock.core.lock.renew import Renewing
from airflow_dynamo_lock.core.lock.requests import Requests
from airflow_dynamo_lock.core.model.errors import (
    LockRecordError,
    LockUnavailableError,
)
from airflow_dynamo_lock.core.model.lease import Lease, LeaseSet
from airflow_dynamo_lock.core.model.outcomes import (
    Draining,
    Lost,
    Released,
    Renewed,
)
from airflow_dynamo_lock.log import log


@dataclass(frozen=True)
class Releasing:
    """Releases leases. An uncontended release is one request."""

    requests: Requests
    renewing: Renewing

    def leave(
        self, key: str, lease_id: str, process: str, slots: int, lease_ms: int, grace_ms: int
    ) -> Operation[Released | Renewed | Lost]:
        """Note that a guarded process has left; the last one to leave an abandoned lease releases it (rule R8)."""
        reply = yield from self.requests.write(
            partial(self.requests.format.leave, key, lease_id, process, lease_ms)
        )
        if reply.refused:
            record, _ = yield from self.requests.record_after(key, reply, None)
            return Lost(record)
        holder = self.requests.format.record(reply.output["Attributes"], reply.server_ms).holders[lease_id]
        if holder.draining and not holder.processes:
            outcome = yield from self.release(key, lease_id, slots, grace_ms, confirmed=True)
            if not isinstance(outcome, Draining):
                return outcome
        return Renewed(holder, reply.sent_at)

    def release(
        self, key: str, lease_id: str, slots: int, grace_ms: int, *, confirmed: bool
    ) -> Operation[Released | Draining | Lost]:
        """Give the slots back; while processes are inside, abandon the lease instead (rule R8).

        :param confirmed: somebody was told of the grant.
        """
        release = partial(self.requests.format.release, key, lease_id, slots, confirmed=confirmed)
        retried = False
        try:
            reply = yield from self.requests.write(release)
        except LockUnavailableError as unknown:
            if not unknown.maybe_applied:
                raise
            retried = True
            reply = yield from self.requests.write(release)
        if not reply.refused:
            return Released()
        retried |= reply.retried
        record, _ = yield from self.requests.record_after(key, reply, None)
        holder = record.holders.get(lease_id) if record is not None else None
        if holder is not None and holder.ours:
            slots = holder.slots  # a lease that came from elsewhere may say another number
            if holder.cooling_down:
                return Released(holder.hold_until_ms)
            stamp = self.requests.stamp()
            # Not longer than was asked for, should the time have been a wrong clock's.
            until_ms = holder.hold_until_ms or 0
            rest_ms = min(until_ms - stamp.best_ms, until_ms - (holder.acquired_at_ms or 0))
            if not holder.processes and rest_ms > 0:
                reply = yield from self.requests.write(
                    partial(self.requests.format.cool_down, key, holder, rest_ms)
                )
                if reply.refused:
                    return (yield from self.release(key, lease_id, slots, grace_ms, confirmed=confirmed))
                return Released(holder.hold_until_ms)
            if not holder.processes and 0 < until_ms <= stamp.best_ms:
                # The time is over; the first write was refused because its sender did not know the server's time.
                return (yield from self.release(key, lease_id, slots, grace_ms, confirmed=confirmed))
            abandon = partial(self.requests.format.drain, key, lease_id, grace_ms)
            outcome = yield from self.renewing.renew(
                key, lease_id, grace_ms, abandon, None, unless_draining=True
            )
            if isinstance(outcome, Draining) or (isinstance(outcome, Renewed) and outcome.holder.processes):
                return Draining(outcome.holder)
            if isinstance(outcome, Renewed):
                # The last process left between the two writes and could not know that it was to release.
                return (yield from self.release(key, lease_id, slots, grace_ms, confirmed=confirmed))
            record = outcome.record
        # Not there: the attempt before the refused one has removed it, or it was gone already (rule R5).
        return Released() if retried else Lost(record)

    def release_all(
        self, leases: Sequence[Lease], *, confirmed: bool
    ) -> Operation[list[Released | Draining | Lost]]:
        """Give all of them back, in one request if that is possible for all of them."""
        unsure = False
        if len(leases) > 1:
            releases = [
                self.requests.format.release(
                    each.key, each.lease_id, each.slots, self.requests.stamp(), confirmed=confirmed
                )
                for each in leases
            ]
            try:
                reply: Reply = yield self.requests.format.transaction(releases)
                if not reply.refused:
                    return [Released() for _ in leases]
                unsure = reply.retried
            except LockUnavailableError as unknown:
                unsure = unknown.maybe_applied
            except LockRecordError as damaged:
                log.debug("Giving %s back one by one: %s", LeaseSet(tuple(leases)), damaged)
        outcomes: list[Released | Draining | Lost] = []
        broken: LockRecordError | None = None
        for lease in leases:
            try:
                outcome = yield from self.release(
                    lease.key, lease.lease_id, lease.slots, lease.grace_ms, confirmed=confirmed
                )
            except LockRecordError as damaged:
                broken = damaged  # no reason to leave the others
                continue
            # Not there: the transaction has removed it (rule R5).
            outcomes.append(Released() if unsure and isinstance(outcome, Lost) else outcome)
        if broken is not None:
            raise broken
        return outcomes
