"""Take, keep and give back: the operations on a lock.

What holds, if a table's clocks and the hosts' rates are within the bounds that `staleness` names: at no time do
holders that still believe in their lease (`Term`) have more slots than the lock's capacity. What does not: nobody can
stop a process that is paused between looking at its lease and writing to the resource; for that each grant carries a
fencing token.

Each write is repeated only where its refusal shows that the world has moved in our favour, so an uncontended acquire,
heartbeat and release are one request each, and a refused acquire is one as well (rule R2).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from airflow_dynamo_lock.protocol.effects import Operation, Reply, Request, Sleep, Stamp, WaitForRoom
from airflow_dynamo_lock.protocol.errors import (
    CapacityMismatchError,
    LockAccessError,
    LockError,
    LockNotHeldError,
    LockRecordError,
    LockTimeoutError,
    LockUnavailableError,
    LockValueError,
)
from airflow_dynamo_lock.protocol.model import (
    Abandoned,
    Broken,
    Busy,
    Claim,
    Ending,
    Granted,
    Holder,
    LockRecord,
    Lost,
    Released,
    Renewed,
    Term,
)
from airflow_dynamo_lock.protocol.native import NativeFormat
from airflow_dynamo_lock.protocol.staleness import Observer

log = logging.getLogger("airflow_dynamo_lock")

# How often an acquire that is refused, but sees room in the refusal, tries again before it counts as busy.
_ROUNDS = 8
# By how much the time in a grant may be behind, or ahead of, the `Date` of the answer to it. That header has whole
# seconds, and so has what a stamp is estimated from.
_BEHIND_MS = 2000
_AHEAD_MS = 2000
# What a request is given to be answered, however little of the caller's time is left, in seconds.
_ANSWER_WITHIN = 3.0
# What a caller that gives up still spends on undoing an acquire whose fate it does not know, in seconds.
_UNDO_WITHIN = 3.0


@dataclass(frozen=True)
class Operations:
    """The operations on the locks of one table, as one process performs them.

    :ivar format: builds the requests and reads the records.
    :ivar stamp: makes what each write attempt has of its own, anew for each.
    :ivar observer: what this process has seen of holders.
    """

    format: NativeFormat
    stamp: Callable[[], Stamp]
    observer: Observer

    # -- take ---------------------------------------------------------------------------------------------------

    def try_acquire(
        self, claim: Claim, *, within: float | None = None, undo: bool
    ) -> Operation[Granted | Busy]:
        """Take the lock if it is free or its holder is dead.

        :param within: seconds that the caller has for each request.
        :param undo: on a failure that leaves it open whether the write was applied, give the lease back (rule R5).
            Only for a lease id that nobody else can be using: two processes of Airflow may run the same attempt.
        :raises CapacityMismatchError: it is in use with another capacity.
        """
        try:
            return (yield from self._take(claim, within))
        except BaseException as failure:
            if undo and _maybe_applied(failure):
                try:
                    yield _within(
                        self.format.release(
                            claim.key, claim.lease_id, claim.slots, self.stamp(), heard=False
                        ),
                        _UNDO_WITHIN,
                    )
                except Exception as also:
                    log.debug(
                        "Could not undo the acquire of %r (lease %s): %s", claim.key, claim.lease_id, also
                    )
            raise

    def _take(self, claim: Claim, within: float | None) -> Operation[Granted | Busy]:
        record: LockRecord | None = None
        stamp = self.stamp()
        request = self.format.take_idle(claim, stamp)
        reclaimed: tuple[Holder, ...] = ()
        for _ in range(_ROUNDS):
            reply: Reply = yield _within(request, within)
            if not reply.refused:
                granted = yield from self._granted(claim, reply, stamp, reclaimed, within)
                if granted is not None:
                    return granted
                stamp = self.stamp()
                request = self.format.take_idle(claim, stamp, record)
                continue
            record, reply = yield from self._record_after(claim.key, reply, within)
            stamp, reclaimed = self.stamp(), ()
            if record is None or not record.holders:
                request = self.format.take_idle(claim, stamp, record)
                continue
            mine = record.holders.get(claim.lease_id)
            if mine is not None:
                if mine.ending:
                    return Busy(record)
                if (mine.slots, record.capacity) != (claim.slots, claim.capacity):
                    raise LockValueError(
                        f"The lease {claim.lease_id} of the lock {claim.key!r} has {mine.slots} of {record.capacity} "
                        f"slots already, not {claim.slots} of {claim.capacity}: use another lease id for another claim."
                    )
                request = self.format.take_again(claim, mine, stamp)
                continue
            earlier = [each for each in record.holders.values() if claim.supersedes(each) and not each.ending]
            if earlier:
                for holder in earlier:
                    log.info(
                        "Lease %s of %r ends: a later attempt acquires.",
                        holder.lease_id,
                        claim.key,
                    )
                    yield from self.release(
                        claim.key, holder.lease_id, holder.slots, holder.grace_ms, heard=False
                    )
                request = self.format.take_idle(claim, stamp, record)
                continue
            dead = self.observer.see(record, reply)
            if record.capacity != claim.capacity and len(dead) < len(record.holders):
                raise CapacityMismatchError(
                    f"The lock {claim.key!r} is in use with a capacity of {record.capacity}, not {claim.capacity}: "
                    f"use the same capacity everywhere, or wait until it is free. {record.describe()}."
                )
            if record.capacity == claim.capacity and record.available >= claim.slots:
                request = self.format.take_room(claim, stamp, record)
            elif victims := _enough(claim, record, dead):
                reclaimed = victims
                request = self.format.reclaim(claim, record, victims, stamp)
            else:
                return Busy(record)
        # Others were quicker each time. That is contention, and waiting is the answer to it.
        return Busy(record or LockRecord(claim.key, claim.capacity, claim.capacity, {}, token=0))

    def _granted(
        self,
        claim: Claim,
        reply: Reply,
        stamp: Stamp,
        reclaimed: tuple[Holder, ...],
        within: float | None,
    ) -> Operation[Granted | None]:
        """What a write that took the lock has brought; None if it did not last until it could be relied on.

        A process's first write has only the host's clock to stamp and to seed a token with, and a machine that was
        paused an old estimate of the server's. Nobody is told of a grant before the `Date` of the answer has confirmed
        what the record shows, or it has been put right: until then it does no harm if somebody takes the holder for
        dead. An engine that does not date its answers dates nobody's, so that nobody can draw a conclusion from the
        stamp either.

        :param stamp: what the write carried.
        """
        record = self.format.record(reply.output["Attributes"], reply.server_ms)
        token, acquired_at_ms = record.token, record.holders[claim.lease_id].acquired_at_ms
        # Of a token that is far from where a good clock would have seeded it, nobody has been told.
        seed_is_wrong = record.unproven and not self._close(reply, token)
        if seed_is_wrong or not self._close(reply, record.holders[claim.lease_id].renewed_at_ms, stamp):
            stamp = self.stamp()
            acquired_at_ms = stamp.best_ms
            if (
                record.unproven
                and not 0 <= token - acquired_at_ms <= _AHEAD_MS + self.observer.max_clock_skew_ms
            ):
                token = acquired_at_ms
            reply = yield _within(self.format.put_right(claim, record, token, stamp), within)
            if reply.refused:
                return None
        return Granted(claim, token, acquired_at_ms, stamp.at, reclaimed)

    def _close(self, reply: Reply, time_ms: int | None, stamp: Stamp | None = None) -> bool:
        """Whether a time in the record is about that of the answer which shows it. One from a host's clock has not
        lost what an estimate of the server's may have, so that less is allowed for it."""
        if reply.server_ms is None or time_ms is None:
            return True
        by_host = stamp is None or stamp.server_ms is None
        behind = min(_BEHIND_MS, self.observer.max_clock_skew_ms / 2) if by_host else _BEHIND_MS
        return -_AHEAD_MS <= reply.server_ms - time_ms <= behind

    def acquire(
        self,
        claim: Claim,
        *,
        now: float,
        timeout: float | None,
        poll_interval: float,
        undo: bool,
        on_busy: Callable[[LockRecord], None] | None = None,
    ) -> Operation[Granted]:
        """Take the lock as soon as it is free or its holder is dead.

        :param now: the present monotonic time.
        :param timeout: seconds to wait at most; 0 tries once, None waits without end.
        :param on_busy: told each time that a try found the lock taken.
        :raises LockTimeoutError: it was not free in time; the message names the holders.
        :raises LockUnavailableError: DynamoDB could not be reached, up to the last moment.
        """
        deadline = None if timeout is None else now + timeout
        record: LockRecord | None = None
        while True:
            left = None if deadline is None else max(0.0, deadline - now)
            try:
                within = None if left is None else max(left, _ANSWER_WITHIN)
                outcome = yield from self.try_acquire(claim, within=within, undo=undo)
            except LockUnavailableError as unavailable:
                if left is not None and left <= poll_interval:
                    raise
                if undo:
                    # A grant attempt of its own (rule R7): what undoes the last one may arrive late, and must not
                    # take away what the next one is given.
                    former = claim.former | {claim.lease_id}
                    claim = replace(claim, lease_id=self.stamp().version, former=former)
                log.warning("Waiting for the lock %r: %s", claim.key, unavailable)
                now = yield Sleep(poll_interval)
                continue
            if isinstance(outcome, Granted):
                return outcome
            record = outcome.record
            if on_busy is not None:
                on_busy(record)
            if deadline is not None and now >= deadline:
                raise LockTimeoutError(_not_in_time(claim.key, timeout or 0.0, record), record)
            now = yield WaitForRoom(
                claim.key,
                claim.slots,
                takes=True,
                poll_interval=poll_interval,
                seconds=None if deadline is None else max(0.0, deadline - now),
            )

    def wait(
        self, key: str, slots: int, *, now: float, timeout: float | None, poll_interval: float
    ) -> Operation[LockRecord | None]:
        """Wait until so many slots could be taken, without taking them. Returns the lock as it is then.

        :raises LockTimeoutError: they were not free in time.
        """
        deadline = None if timeout is None else now + timeout
        while True:
            try:
                record, room = yield from self.room(key, slots)
            except LockUnavailableError as unavailable:
                if deadline is not None and deadline - now <= poll_interval:
                    raise
                log.warning("Waiting for room in the lock %r: %s", key, unavailable)
                now = yield Sleep(poll_interval)
                continue
            if room:
                return record
            if deadline is not None and now >= deadline:
                raise LockTimeoutError(_not_in_time(key, timeout or 0.0, record), record)
            left = None if deadline is None else max(0.0, deadline - now)
            now = yield WaitForRoom(key, slots, takes=False, poll_interval=poll_interval, seconds=left)

    # -- keep ---------------------------------------------------------------------------------------------------

    def heartbeat(
        self, key: str, lease_id: str, lease_ms: int, *, within: float | None = None
    ) -> Operation[Renewed | Lost]:
        """Show that the holder lives."""
        outcome = yield from self._beat(
            key, lease_id, partial(self.format.heartbeat, key, lease_id, lease_ms), within
        )
        assert not isinstance(outcome, Ending)  # it does not mind
        return outcome

    def _beat(
        self,
        key: str,
        lease_id: str,
        write: Callable[[Stamp, str | None], Request],
        within: float | None,
        *,
        unless_ending: bool = False,
    ) -> Operation[Renewed | Ending | Lost]:
        """Carry a sign of life out. Where it is refused because the record has a newer stamp than its own, or none to
        compare with, it is written again with a fresh stamp, against the version that the refusal showed.

        A process that has had no answer yet asks before it writes, to learn the server's time: a write without a stamp
        could not be told from one that arrives late, which would bring an old version back.

        :param write: makes it, given a stamp and the version that was seen.
        :param unless_ending: it is refused once the lease was abandoned, too.
        """
        seen: str | None = None
        first = stamp = self.stamp()
        if not stamp.answered:
            yield _within(self.format.get(key), within)
            stamp = self.stamp()
        for _ in range(_ROUNDS):
            left = None if within is None else within - (stamp.at - first.at)
            reply: Reply = yield _within(write(stamp, seen), left)
            if not reply.refused:
                record = self.format.record(reply.output["Attributes"], reply.server_ms)
                return Renewed(record.holders[lease_id], stamp.at)
            if within is not None:
                left = max(0.0, within - (reply.received_at - first.at))
            found, _ = yield from self._record_after(key, reply, left)
            holder = found.holders.get(lease_id) if found is not None else None
            if holder is None:
                return Lost(found)
            if holder.version == stamp.version:
                return Renewed(holder, stamp.at)  # by the attempt before the refused one (rule R5)
            if unless_ending and holder.ending:
                return Ending(holder)
            seen, stamp = holder.version, self.stamp()
            if within is not None and stamp.at - first.at >= within:
                break
        raise LockUnavailableError(
            f"The lease {lease_id} of the lock {key!r} is there, but was written to by others each time that it was "
            "tried here.",
            maybe_applied=False,
        )

    def keep_alive(
        self,
        key: str,
        lease_id: str,
        lease_ms: int,
        interval: float,
        term: Term,
    ) -> Operation[None]:
        """Beat every `interval` seconds until the lease is lost, which `term` then tells.

        A beat that fails is tried again until the lease's own deadline, and none may take longer than that: its
        holder gives up in time even if the network never answers (rule R4).

        :param lease_ms: for how long this holder counts on a beat; at most the lease that the record shows.
        """
        pause = interval
        while True:
            yield Sleep(min(pause, term.remaining()))
            remaining = term.remaining()
            if remaining <= 0:
                term.lose("no heartbeat has succeeded in time")
                return
            try:
                outcome = yield from self.heartbeat(key, lease_id, lease_ms, within=remaining)
            except LockError as failure:
                log.warning("Heartbeat of %r (lease %s) failed, trying again: %s", key, lease_id, failure)
                pause = min(interval, 1.0)
                continue
            if isinstance(outcome, Lost):
                term.lose(outcome.describe())
                return
            log.debug("Heartbeat of %r (lease %s).", key, lease_id)
            # An abandoned lease is the shorter one that the record shows now.
            term.renewed(outcome.sent_at, min(lease_ms, outcome.holder.lease_ms))
            pause = interval

    def keep(self, key: str, lease_id: str, lease_ms: int, interval: float) -> Operation[Ending | Lost]:
        """The keeper's work (rule R9): beat for those who are or will be inside, until the lease is gone or abandoned.

        Nobody relies on the keeper's own view of the lease. So it has no deadline: it goes on after a failure of any
        length, for as long as the record shows the lease. A beat that the abandoning has overtaken changes nothing, or
        a keeper that Airflow starts once more would keep the lease of a dead process alive.
        """
        write = partial(self.format.heartbeat_unless_ending, key, lease_id, lease_ms)
        denied = 0.0  # seconds for which access has been denied
        while True:
            try:
                outcome = yield from self._beat(key, lease_id, write, None, unless_ending=True)
            except LockAccessError as failure:
                # Credentials are replaced now and then. But for ever it would only hide what is wrong.
                if denied * 1000 >= lease_ms:
                    raise
                pause = min(interval, 1.0)
                denied += pause
                log.warning("Heartbeat of %r (lease %s) failed, trying again: %s", key, lease_id, failure)
            except LockUnavailableError as failure:
                pause, denied = min(interval, 1.0), 0.0
                log.warning("Heartbeat of %r (lease %s) failed, trying again: %s", key, lease_id, failure)
            else:
                if not isinstance(outcome, Renewed):
                    return outcome
                log.debug("Heartbeat of %r (lease %s).", key, lease_id)
                pause, denied = interval, 0.0
            yield Sleep(pause)

    def enter(
        self, key: str, lease_id: str, process: str, lease_ms: int, *, within: float | None = None
    ) -> Operation[Renewed | Ending | Lost]:
        """Note that a guarded process is inside (rule R8)."""
        write = partial(self.format.enter, key, lease_id, process, lease_ms)
        return (yield from self._beat(key, lease_id, write, within, unless_ending=True))

    # -- give back ----------------------------------------------------------------------------------------------

    def leave(
        self, key: str, lease_id: str, process: str, slots: int, lease_ms: int, grace_ms: int
    ) -> Operation[Released | Renewed | Lost]:
        """Note that a guarded process has left; the last one to leave an abandoned lease releases it (rule R8)."""
        reply: Reply = yield self.format.leave(key, lease_id, process, lease_ms, self.stamp())
        if reply.refused:
            record, _ = yield from self._record_after(key, reply, None)
            return Lost(record)
        holder = self.format.record(reply.output["Attributes"], reply.server_ms).holders[lease_id]
        if holder.ending and not holder.inside:
            outcome = yield from self.release(key, lease_id, slots, grace_ms, heard=True)
            if not isinstance(outcome, Abandoned):
                return outcome
        return Renewed(holder, reply.sent_at)

    def release(
        self, key: str, lease_id: str, slots: int, grace_ms: int, *, heard: bool
    ) -> Operation[Released | Abandoned | Lost]:
        """Give the slots back; while processes are inside, abandon the lease instead (rule R8).

        :param heard: somebody was told of the grant.
        """
        reply: Reply
        retried = False
        try:
            reply = yield self.format.release(key, lease_id, slots, self.stamp(), heard=heard)
        except LockUnavailableError as unknown:
            if not unknown.maybe_applied:
                raise
            retried = True
            reply = yield self.format.release(key, lease_id, slots, self.stamp(), heard=heard)
        if not reply.refused:
            return Released()
        retried |= reply.retried
        record, _ = yield from self._record_after(key, reply, None)
        if record is not None and lease_id in record.holders:
            slots = record.holders[lease_id].slots  # a lease that came from elsewhere may say another number
            abandon = partial(self.format.abandon, key, lease_id, grace_ms)
            outcome = yield from self._beat(key, lease_id, abandon, None, unless_ending=True)
            if isinstance(outcome, Ending) or (isinstance(outcome, Renewed) and outcome.holder.inside):
                return Abandoned(outcome.holder)
            if isinstance(outcome, Renewed):
                # The last process left between the two writes and could not know that it was to release.
                return (yield from self.release(key, lease_id, slots, grace_ms, heard=heard))
            record = outcome.record
        # Not there: the attempt before the refused one has removed it, or it was gone already (rule R5).
        return Released() if retried else Lost(record)

    def break_(self, key: str, lease_id: str) -> Operation[Broken]:
        """Take a lease away from whoever holds it.

        :raises LockNotHeldError: it is not among the holders.
        """
        record = yield from self.get(key)
        holder = record.holders.get(lease_id) if record else None
        if holder is not None:
            reply: Reply = yield self.format.break_(key, lease_id, holder.slots, self.stamp())
            if not reply.refused:
                return Broken(holder)
            record, _ = yield from self._record_after(key, reply, None)
            if reply.retried and (record is None or lease_id not in record.holders):
                return Broken(holder)  # by the attempt before the refused one (rule R5)
        raise LockNotHeldError(
            f"The lease {lease_id} does not hold the lock {key!r}, so there is nothing to break. "
            f"{record.describe() if record else 'Not locked'}."
        )

    # -- look ---------------------------------------------------------------------------------------------------

    def get(self, key: str) -> Operation[LockRecord | None]:
        """The lock as it is now, None if it has never been used or is long forgotten."""
        reply: Reply = yield self.format.get(key)
        item = reply.output.get("Item")
        return self.format.record(item, reply.server_ms) if item else None

    def room(self, key: str, slots: int) -> Operation[tuple[LockRecord | None, bool]]:
        """The lock as it is now, and whether so many slots could be taken from it."""
        reply: Reply = yield self.format.get(key)
        item = reply.output.get("Item")
        if not item:
            return None, True
        record = self.format.record(item, reply.server_ms)
        dead = self.observer.see(record, reply)
        return record, room(record, dead) >= slots

    def page(
        self, cursor: Mapping[str, Any] | None
    ) -> Operation[tuple[list[LockRecord], Mapping[str, Any] | None]]:
        """One page of all locks, and where the next one starts (None after the last)."""
        reply: Reply = yield self.format.scan(cursor)
        records = []
        for item in reply.output.get("Items", ()):
            try:
                records.append(self.format.record(item, reply.server_ms))
            except LockRecordError as damaged:
                log.warning("%s", damaged)  # and the others are listed all the same
        return records, reply.output.get("LastEvaluatedKey")

    def _record_after(
        self, key: str, reply: Reply, within: float | None
    ) -> Operation[tuple[LockRecord | None, Reply]]:
        """The lock as the refusal showed it, or, where the engine does not show it, as a read finds it (rule R2)."""
        item = reply.output.get("Item")
        if not item:
            reply = yield _within(self.format.get(key), within)
            item = reply.output.get("Item")
        return (self.format.record(item, reply.server_ms) if item else None), reply


def room(record: LockRecord, dead: list[Holder]) -> int:
    """The slots that somebody could take: the free ones and those of the dead."""
    return record.available + sum(holder.slots for holder in dead)


def _enough(claim: Claim, record: LockRecord, dead: list[Holder]) -> tuple[Holder, ...]:
    """As many of the dead as must make place for the claim, none if all of them are not enough.

    All of them where the capacity changes: only an otherwise empty lock may do that.
    """
    if record.capacity != claim.capacity:
        return tuple(dead)
    chosen: list[Holder] = []
    free = record.available
    for holder in dead:
        chosen.append(holder)
        free += holder.slots
        if free >= claim.slots:
            return tuple(chosen)
    return ()


def _maybe_applied(failure: BaseException) -> bool:
    """Whether a write that ended like this may have taken effect: no answer came, or nobody waited for it."""
    if isinstance(failure, LockUnavailableError):
        return failure.maybe_applied
    return not isinstance(failure, (Exception, GeneratorExit))


def _within(request: Request, within: float | None) -> Request:
    return request if within is None else Request(request.action, request.params, within)


def _not_in_time(key: str, timeout: float, record: LockRecord | None) -> str:
    who = record.describe() if record else "Nobody holds it, but others were quicker"
    return f"The lock {key!r} was not free within {timeout:g} s. {who}."
