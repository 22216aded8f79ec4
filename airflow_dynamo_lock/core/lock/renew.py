"""Keep a lease, and give it back.

Each write is repeated only where its refusal shows that the world has moved in our favour, so an uncontended heartbeat
and release are one request each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from airflow_dynamo_lock.core.effects import Operation, Reply, Request, Sleep, Stamp, with_timeout
from airflow_dynamo_lock.core.liveness import Observer
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
from airflow_dynamo_lock.core.model.outcomes import Draining, Lost, Released, Renewed
from airflow_dynamo_lock.core.model.record import Holder, LockRecord
from airflow_dynamo_lock.core.queue.queue import WaitQueue
from airflow_dynamo_lock.core.table.format import Format
from airflow_dynamo_lock.log import log

#: How often a write that is refused, but sees a reason to in the refusal, is tried again.
ROUNDS = 8
#: Seconds to wait for another transaction on the same records, the first time.
CONFLICT_PAUSE = 0.05


@dataclass(frozen=True)
class Renewing:
    """What a holder does, and whoever acts for him.

    :ivar format: builds the requests and reads the records.
    :ivar stamp: makes what each write attempt has of its own, anew for each.
    :ivar observer: what this process has seen of holders.
    :ivar line: where this process stands in line.
    """

    format: Format
    stamp: Callable[[], Stamp]
    observer: Observer
    queue: WaitQueue

    def get(self, key: str) -> Operation[LockRecord | None]:
        """The lock as it is now, None if it has never been used or is long forgotten."""
        reply: Reply = yield self.format.get(key)
        item = reply.output.get("Item")
        return self.format.record(item, reply.server_ms) if item else None

    def _record_after(
        self, key: str, reply: Reply, within: float | None
    ) -> Operation[tuple[LockRecord | None, Reply]]:
        """The lock as the refusal showed it, or, where the engine does not show it, as a read finds it (rule R2)."""
        item = reply.output.get("Item")
        if not item:
            reply = yield with_timeout(self.format.get(key), within)
            item = reply.output.get("Item")
        return (self.format.record(item, reply.server_ms) if item else None), reply

    def _write(self, write: Callable[[Stamp], Request]) -> Operation[Reply]:
        """Send a write, and again with a fresh stamp where a transaction on the record was in its way."""
        for attempt in range(1, ROUNDS):
            try:
                reply: Reply = yield write(self.stamp())
                return reply
            except LockConflictError as conflict:
                if conflict.maybe_applied:
                    raise
            yield Sleep(CONFLICT_PAUSE * attempt)
        reply = yield write(self.stamp())
        return reply

    def _fresh_stamp(self, key: str, most_ms: int, until: float | None) -> Operation[Stamp]:
        """A stamp by a server time that is not too old. If it is, as after a night's sleep of the machine, ask first:
        the host's clock may have drifted by a tenth of the time since, and an early stamp makes a living holder look
        dead.

        :param most_ms: how old it may be. A holder does without a tenth of its lease, so it may be as old as a lease.
        :raises LockUnavailableError: the answers came without a ``Date``, or took longer than that.
        """
        for _ in range(ROUNDS):
            if (stamp := self.stamp()).is_fresh(most_ms):
                return stamp
            yield with_timeout(self.format.get(key), _left(until, stamp.at))
        raise LockUnavailableError(
            f"The server's time is needed to write to the lock {key!r}, but {ROUNDS} answers did not tell it within "
            f"{most_ms / 1000:g} s: see whether a proxy removes the header Date, or take a longer lease.",
            maybe_applied=False,
        )

    # -- keep ---------------------------------------------------------------------------------------------------

    def heartbeat(
        self, key: str, lease_id: str, lease_ms: int, *, until: float | None = None
    ) -> Operation[Renewed | Lost]:
        """Show that the holder lives."""
        outcome = yield from self._renew(
            key, lease_id, lease_ms, partial(self.format.heartbeat, key, lease_id, lease_ms), until
        )
        assert not isinstance(outcome, Draining)  # it does not mind
        return outcome

    def _renew(
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
        stamp = yield from self._fresh_stamp(key, lease_ms, until)
        for attempt in range(1, ROUNDS + 1):
            left = _left(until, stamp.at)
            try:
                reply: Reply = yield with_timeout(write(stamp, seen), left)
            except LockConflictError as conflict:
                pause = CONFLICT_PAUSE * attempt
                if conflict.maybe_applied or attempt == ROUNDS or (left is not None and left <= pause):
                    raise
                yield Sleep(pause)
                stamp = yield from self._fresh_stamp(key, lease_ms, until)
                continue
            if not reply.refused:
                record = self.format.record(reply.output["Attributes"], reply.server_ms)
                return Renewed(record.holders[lease_id], stamp.at)
            found, _ = yield from self._record_after(key, reply, _left(until, reply.received_at))
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
            stamp = yield from self._fresh_stamp(key, lease_ms, until)
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
        write = partial(self.format.heartbeat_unless_draining, *named, change=change)
        return (yield from self._renew(*named, write, until, unless_draining=True, change=change))

    def _renew_all(
        self, leases: Sequence[Lease], until: float | None, change: Change | None = None
    ) -> Operation[float | None]:
        """Beat for leases of which none is draining, in one transaction. When it was sent; None if it is refused."""
        most_ms = min(each.lease_ms for each in leases)
        while True:
            yield from self._fresh_stamp(leases[0].key, most_ms, until)
            stamps = [self.stamp() for _ in leases]
            if all(each.is_fresh(most_ms) for each in stamps):
                break
        writes = [
            self.format.heartbeat_unless_draining(
                lease.key, lease.lease_id, lease.lease_ms, stamp, change=change or Change()
            )
            for lease, stamp in zip(leases, stamps, strict=True)
        ]
        try:
            reply: Reply = yield with_timeout(self.format.transaction(writes), _left(until, stamps[0].at))
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
        write = partial(self.format.enter, key, lease_id, process, lease_ms)
        return (yield from self._renew(key, lease_id, lease_ms, write, until, unless_draining=True))

    # -- give back ----------------------------------------------------------------------------------------------

    def leave(
        self, key: str, lease_id: str, process: str, slots: int, lease_ms: int, grace_ms: int
    ) -> Operation[Released | Renewed | Lost]:
        """Note that a guarded process has left; the last one to leave an abandoned lease releases it (rule R8)."""
        reply = yield from self._write(partial(self.format.leave, key, lease_id, process, lease_ms))
        if reply.refused:
            record, _ = yield from self._record_after(key, reply, None)
            return Lost(record)
        holder = self.format.record(reply.output["Attributes"], reply.server_ms).holders[lease_id]
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
        release = partial(self.format.release, key, lease_id, slots, confirmed=confirmed)
        retried = False
        try:
            reply = yield from self._write(release)
        except LockUnavailableError as unknown:
            if not unknown.maybe_applied:
                raise
            retried = True
            reply = yield from self._write(release)
        if not reply.refused:
            return Released()
        retried |= reply.retried
        record, _ = yield from self._record_after(key, reply, None)
        holder = record.holders.get(lease_id) if record is not None else None
        if holder is not None and holder.ours:
            slots = holder.slots  # a lease that came from elsewhere may say another number
            if holder.cooling_down:
                return Released(holder.hold_until_ms)
            stamp = self.stamp()
            # Not longer than was asked for, should the time have been a wrong clock's.
            until_ms = holder.hold_until_ms or 0
            rest_ms = min(until_ms - stamp.best_ms, until_ms - (holder.acquired_at_ms or 0))
            if not holder.processes and rest_ms > 0:
                reply = yield from self._write(partial(self.format.cool_down, key, holder, rest_ms))
                if reply.refused:
                    return (yield from self.release(key, lease_id, slots, grace_ms, confirmed=confirmed))
                return Released(holder.hold_until_ms)
            if not holder.processes and 0 < until_ms <= stamp.best_ms:
                # The time is over; the first write was refused because its sender did not know the server's time.
                return (yield from self.release(key, lease_id, slots, grace_ms, confirmed=confirmed))
            abandon = partial(self.format.drain, key, lease_id, grace_ms)
            outcome = yield from self._renew(key, lease_id, grace_ms, abandon, None, unless_draining=True)
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
                self.format.release(each.key, each.lease_id, each.slots, self.stamp(), confirmed=confirmed)
                for each in leases
            ]
            try:
                reply: Reply = yield self.format.transaction(releases)
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


def _left(until: float | None, now: float) -> float | None:
    """The seconds until then, for a request."""
    return None if until is None else max(0.0, until - now)


def _as_renewed(lease: Lease) -> Holder:
    """A holder as a transaction leaves it, which does not show it."""
    return Holder(
        lease.lease_id, lease.owner, lease.slots, lease.lease_ms, lease.grace_ms, "", lease.acquired_at_ms
    )
