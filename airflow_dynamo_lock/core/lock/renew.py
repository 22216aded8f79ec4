"""Renew a lease: heartbeats, background heartbeats, processes that enter (R4, R8, R9)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from airflow_dynamo_lock.core.effects import (
    Operation,
    Reply,
    Request,
    Sleep,
    Stamp,
    with_timeout,
)
from airflow_dynamo_lock.core.lock.requests import CONFLICT_PAUSE, ROUNDS, Requests, time_left
from airflow_dynamo_lock.core.model.claim import Change
from airflow_dynamo_lock.core.model.errors import (
    LockAccessError,
    LockConflictError,
    LockError,
    LockRecordError,
    LockUnavailableError,
    LockValueError,
)
from airflow_dynamo_lock.core.model.lease import Lease, LeaseSet, Term
from airflow_dynamo_lock.core.model.outcomes import (
    Draining,
    Lost,
    Renewed,
)
from airflow_dynamo_lock.core.model.record import Holder
from airflow_dynamo_lock.log import log


@dataclass(frozen=True)
class Renewing:
    """Renews leases. Every renewal is one conditional write; it is repeated only after a refusal that allows that."""

    requests: Requests

    def heartbeat(
        self, key: str, lease_id: str, lease_ms: int, *, until: float | None = None
    ) -> Operation[Renewed | Lost]:
        """Show that the holder lives."""
        outcome = yield from self.renew(
            key, lease_id, lease_ms, partial(self.requests.format.heartbeat, key, lease_id, lease_ms), until
        )
        assert not isinstance(outcome, Draining)  # it does not mind
        return outcome

    def renew(
        self,
        key: str,
        lease_id: str,
        lease_ms: int,
        write: Callable[[Stamp, str | None], Request],
        until: float | None,
        *,
        unless_draining: bool = False,
        change: Change | None = None,
    ) -> Operation[Renewed | Draining | Lost]:
        """Carry a sign of life out. Where it is refused because the record has a newer stamp than its own, or none to
        compare with, it is written again with a fresh stamp, against the version that the refusal showed.

        A process that has had no answer yet asks before it writes, to learn the server's time: a write without a stamp
        could not be told from one that arrives late, which would bring an old version back. So does one whose last
        answer is older than the lease.

        :param lease_ms: how long the lease lasts after it.
        :param write: makes it, given a stamp and the version that was seen.
        :param until: when the caller stops waiting for it, monotonic seconds; None if never.
        :param unless_draining: it is refused once the lease was abandoned, too.
        :param change: what else it writes.
        :raises LockValueError: that would shorten the lease.
        """
        seen: str | None = None
        stamp = yield from self.requests.fresh_stamp(key, lease_ms, until)
        for attempt in range(1, ROUNDS + 1):
            left = time_left(until, stamp.at)
            try:
                reply: Reply = yield with_timeout(write(stamp, seen), left)
            except LockConflictError as conflict:
                pause = CONFLICT_PAUSE * attempt
                if conflict.maybe_applied or attempt == ROUNDS or (left is not None and left <= pause):
                    raise
                yield Sleep(pause)
                stamp = yield from self.requests.fresh_stamp(key, lease_ms, until)
                continue
            if not reply.refused:
                record = self.requests.format.record(reply.output["Attributes"], reply.server_ms)
                return Renewed(record.holders[lease_id], stamp.at)
            found, _ = yield from self.requests.record_after(key, reply, time_left(until, reply.received_at))
            holder = found.holders.get(lease_id) if found is not None else None
            if holder is None or not holder.ours:
                return Lost(found)
            if holder.version == stamp.version:
                return Renewed(holder, stamp.at)  # by the attempt before the refused one (rule R5)
            if unless_draining and holder.draining:
                return Draining(holder)
            if change is not None and change.lease_ms is not None and change.lease_ms < holder.lease_ms:
                raise LockValueError(
                    f"The lease {lease_id} of the lock {key!r} lasts {holder.lease_ms / 1000:g} s and cannot be made "
                    f"shorter ({change.lease_ms / 1000:g} s), since somebody may count on it."
                )
            seen = holder.version
            stamp = yield from self.requests.fresh_stamp(key, lease_ms, until)
            if until is not None and stamp.at >= until:
                break
        raise LockUnavailableError(
            f"The lease {lease_id} of the lock {key!r} is there, but was written to by others each time that it was "
            "tried here.",
            maybe_applied=False,
        )

    def heartbeat_all(
        self, leases: Sequence[Lease], *, until: float | None = None, change: Change | None = None
    ) -> Operation[Renewed | Draining | Lost]:
        """Show that the holder of some leases lives, in one request: `Lost` if one of them is, else `Renewed`, with the
        one that runs out first.

        :param leases: as they are to be afterwards.
        :param change: what else is written to each of them; only to one that is not `Draining`.
        """
        if len(leases) > 1:
            sent_at = yield from self._renew_all(leases, until, change)
            if sent_at is not None:
                return Renewed(_as_renewed(min(leases, key=lambda each: each.lease_ms)), sent_at)
        renewed: list[Renewed] = []
        for lease in leases:
            outcome = yield from self._renew_one(lease, until, change)
            if not isinstance(outcome, Renewed):
                return outcome
            renewed.append(outcome)
        first = min(renewed, key=lambda each: each.holder.lease_ms)
        return Renewed(first.holder, min(each.sent_at for each in renewed))

    def _renew_one(
        self, lease: Lease, until: float | None, change: Change | None
    ) -> Operation[Renewed | Draining | Lost]:
        named = lease.key, lease.lease_id, lease.lease_ms
        if change is None:
            return (yield from self.heartbeat(*named, until=until))
        write = partial(self.requests.format.heartbeat_unless_draining, *named, change=change)
        return (yield from self.renew(*named, write, until, unless_draining=True, change=change))

    def _renew_all(
        self, leases: Sequence[Lease], until: float | None, change: Change | None = None
    ) -> Operation[float | None]:
        """Beat for leases of which none is draining, in one transaction. When it was sent; None if it is refused."""
        most_ms = min(each.lease_ms for each in leases)
        while True:
            yield from self.requests.fresh_stamp(leases[0].key, most_ms, until)
            stamps = [self.requests.stamp() for _ in leases]
            if all(each.is_fresh(most_ms) for each in stamps):
                break
        writes = [
            self.requests.format.heartbeat_unless_draining(
                lease.key, lease.lease_id, lease.lease_ms, stamp, change=change or Change()
            )
            for lease, stamp in zip(leases, stamps, strict=True)
        ]
        try:
            reply: Reply = yield with_timeout(
                self.requests.format.transaction(writes), time_left(until, stamps[0].at)
            )
        except LockRecordError:
            return None  # one of the records is damaged
        return None if reply.refused else stamps[0].at

    def keep_alive(self, leases: Sequence[Lease], interval: float, term: Term) -> Operation[None]:
        """Beat every `interval` seconds until one of the leases is lost, which `term` then tells.

        A beat that fails is tried again until the lease's own deadline, and none may take longer than that: its
        holder gives up in time even if the network never answers (rule R4).

        :param leases: their `lease_ms` is for how long this holder counts on a beat: at most the lease that the record
            shows.
        """
        pause = interval
        lease_ms = min(each.lease_ms for each in leases)
        while True:
            yield Sleep(min(pause, term.remaining()))
            if term.remaining() <= 0:
                term.lose("no heartbeat has succeeded in time")
                return
            try:
                outcome = yield from self.heartbeat_all(leases, until=term.until)
            except LockError as failure:
                log.warning("Heartbeat of %s failed, trying again: %s", LeaseSet(tuple(leases)), failure)
                pause = min(interval, 1.0)
                continue
            assert not isinstance(outcome, Draining)  # it does not mind
            if isinstance(outcome, Lost):
                term.lose(outcome.describe())
                return
            log.debug("Heartbeat of %s.", LeaseSet(tuple(leases)))
            # An abandoned lease is the shorter one that the record shows now.
            term.renewed(outcome.sent_at, min(lease_ms, outcome.holder.lease_ms))
            pause = interval

    def keep(self, leases: Sequence[Lease], interval: float) -> Operation[Draining | Lost]:
        """The keeper's work (rule R9): beat for those who are or will be inside, until the leases are gone or
        abandoned. Returns what has become of the last one.

        Nobody relies on the keeper's own view of the lease. So it has no deadline: it goes on after a failure of any
        length, for as long as the record shows the lease. A beat that the abandoning has overtaken changes nothing, or
        a keeper that Airflow starts once more would keep the lease of a dead process alive.
        """
        denied = 0.0  # seconds for which access has been denied
        kept = list(leases)
        ended: Draining | Lost | LockError | None = None
        while True:
            try:
                if len(kept) == 1 or (yield from self._renew_all(kept, None)) is None:
                    for lease in list(kept):
                        outcome = yield from self._keep_one(lease)
                        if not isinstance(outcome, Renewed):
                            kept.remove(lease)
                            # What fails for one is no reason to leave the others, but has to be told at the end.
                            ended = ended if isinstance(ended, LockError) else outcome
            except LockAccessError as failure:
                # Credentials are replaced now and then. But for ever it would only hide what is wrong.
                if denied * 1000 >= kept[0].lease_ms:
                    raise
                pause = min(interval, 1.0)
                denied += pause
                log.warning("Heartbeat of %s failed, trying again: %s", LeaseSet(tuple(kept)), failure)
            except LockUnavailableError as failure:
                pause, denied = min(interval, 1.0), 0.0
                log.warning("Heartbeat of %s failed, trying again: %s", LeaseSet(tuple(kept)), failure)
            else:
                if ended is not None and not kept:
                    if isinstance(ended, LockError):
                        raise ended
                    return ended
                log.debug("Heartbeat of %s.", LeaseSet(tuple(kept)))
                pause, denied = interval, 0.0
            yield Sleep(pause)

    def _keep_one(self, lease: Lease) -> Operation[Renewed | Draining | Lost | LockError]:
        try:
            return (yield from self._renew_one(lease, None, Change()))
        except (LockAccessError, LockUnavailableError):
            raise
        except LockError as failure:
            return failure

    def enter(
        self, key: str, lease_id: str, process: str, lease_ms: int, *, until: float | None = None
    ) -> Operation[Renewed | Draining | Lost]:
        """Note that a guarded process is inside (rule R8)."""
        write = partial(self.requests.format.enter, key, lease_id, process, lease_ms)
        return (yield from self.renew(key, lease_id, lease_ms, write, until, unless_draining=True))


def _as_renewed(lease: Lease) -> Holder:
    """A holder as a transaction leaves it, which does not show it."""
    return Holder(
        lease.lease_id, lease.owner, lease.slots, lease.lease_ms, lease.grace_ms, "", lease.acquired_at_ms
    )
