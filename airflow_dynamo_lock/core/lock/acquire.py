"""Take a lock, or several at once; and wait for it.

Each write is repeated only where its refusal shows that the world has moved in our favour, so an uncontended acquire is
one request, and a refused one is one as well (rule R2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from airflow_dynamo_lock.core.effects import (
    Operation,
    Reply,
    Request,
    Sleep,
    Stamp,
    WaitForSlots,
    with_timeout,
)
from airflow_dynamo_lock.core.lock.renew import CONFLICT_PAUSE, ROUNDS, Renewing
from airflow_dynamo_lock.core.model.capacity import (
    can_grant,
    check_pinned,
    choose_dead,
    compatible,
    has_capacity,
    with_pinned_capacity,
)
from airflow_dynamo_lock.core.model.claim import Claim
from airflow_dynamo_lock.core.model.errors import (
    LockError,
    LockNotFoundError,
    LockTimeoutError,
    LockUnavailableError,
    LockValueError,
)
from airflow_dynamo_lock.core.model.limits import SHARED
from airflow_dynamo_lock.core.model.outcomes import Busy, Granted
from airflow_dynamo_lock.core.model.record import Holder, LockRecord, QueuePosition, Waiter
from airflow_dynamo_lock.core.queue.view import View, on_change
from airflow_dynamo_lock.core.table.format import QUEUE_EMPTY, QUEUE_IGNORED
from airflow_dynamo_lock.core.table.grant_writes import MAX_REMOVED
from airflow_dynamo_lock.core.wait.admission import AdmissionWindow, RequestSlot
from airflow_dynamo_lock.log import log

# By how much the time in a grant may be behind, or ahead of, the `Date` of the answer to it. That header has whole
# seconds, and so has what a stamp is estimated from.
_BEHIND_MS = 2000
_AHEAD_MS = 2000
# How old the answer may be by which a grant is put right, milliseconds. It is the answer to the grant, as a rule.
_FRESH_MS = 10_000
# What a request is given to be answered, however little of the caller's time is left, in seconds.
_ANSWER_WITHIN = 3.0
# What a caller that gives up still spends on undoing an acquire whose fate it does not know, in seconds.
_UNDO_WITHIN = 3.0


@dataclass(frozen=True)
class Acquiring(Renewing):
    """What they do who want a lock.

    :ivar crowd: those of this process who wait, and are not in line yet.
    """

    crowd: AdmissionWindow = field(default_factory=AdmissionWindow)

    def try_acquire(
        self, claim: Claim, *, within: float | None = None, undo: bool
    ) -> Operation[Granted | Busy]:
        """`try_acquire_all` of one lock."""
        outcome = yield from self.try_acquire_all((claim,), within=within, undo=undo)
        return outcome if isinstance(outcome, Busy) else outcome[0]

    def try_acquire_all(
        self,
        claims: Sequence[Claim],
        *,
        within: float | None = None,
        undo: bool,
        mine: Mapping[str, Waiter] | None = None,
    ) -> Operation[tuple[Granted, ...] | Busy]:
        """Take the locks, all or none, if they are free or their holders are dead, and nobody is to have them first.

        :param claims: of different keys, with the same lease id.
        :param within: seconds that the caller has for each request.
        :param undo: on a failure that leaves it open whether the write was applied, give the lease back (rule R5).
            Only for a lease id that nobody else can be using: two processes of Airflow may run the same attempt.
        :param mine: where in each key's line the caller stands, if it does.
        :raises CapacityMismatchError: one is in use with another capacity, or in another mode.
        """
        try:
            if len(claims) > 1:
                return (yield from self._take_all(claims, within, mine or {}, undo=undo))
            outcome = yield from self._take(claims[0], within, (mine or {}).get(claims[0].key))
            return outcome if isinstance(outcome, Busy) else (outcome,)
        except BaseException as failure:
            if undo and _maybe_applied(failure):
                yield from self._undo(claims)
            raise

    def _undo(self, claims: Sequence[Claim]) -> Operation[None]:
        """Give back what may have been taken, and what nobody was told of (rule R5)."""
        releases = [self._undo_one(each) for each in claims]
        try:
            if len(claims) > 1:
                reply: Reply = yield with_timeout(self.format.transaction(releases), _UNDO_WITHIN)
                if not reply.refused:
                    return
            for release in releases:
                yield with_timeout(release, _UNDO_WITHIN)
        except Exception as failure:
            names = ", ".join(repr(each.key) for each in claims)
            log.debug("Could not undo the acquire of %s (lease %s): %s", names, claims[0].lease_id, failure)

    def _undo_one(self, claim: Claim) -> Request:
        """Give back what nobody was told of. It need not be held for a while, as what was granted has to be."""
        if not claim.min_hold_ms:
            return self.format.release(claim.key, claim.lease_id, claim.slots, self.stamp(), confirmed=False)
        holder = Holder(
            claim.lease_id, claim.owner, claim.slots, claim.lease_ms, claim.grace_ms, "", acquired_at_ms=None
        )
        return self.format.break_(claim.key, holder, self.stamp())

    def _take(self, claim: Claim, within: float | None, mine: Waiter | None) -> Operation[Granted | Busy]:
        """Write, and learn from each refusal what to write next. Who stands in line looks first."""
        busy: Busy | None = None
        write = None if mine is not None else self._first_take(claim)
        for _ in range(ROUNDS):
            seen: _Seen | None = None
            if write is not None:
                reply: Reply = yield with_timeout(write.request, within)
                if not reply.refused:
                    record = self.format.record(reply.output["Attributes"], reply.server_ms)
                    granted = yield from self._granted(write, record, reply, within)
                    if granted is not None:
                        return granted
                seen = yield from self._record_after(claim.key, reply, within)
                busy = None if seen[0] is None else Busy(seen[0])
            choice = yield from self._consider(claim, seen, mine, within)
            if isinstance(choice, Busy):
                return choice
            write = choice
        # Others were quicker each time. That is contention, and waiting is the answer to it.
        return busy or _contended(claim)

    def _take_all(
        self, claims: Sequence[Claim], within: float | None, mine: Mapping[str, Waiter], *, undo: bool
    ) -> Operation[tuple[Granted, ...] | Busy]:
        """As `_take`, in one transaction. It tells no tokens, so they are read afterwards."""
        taken = False
        writes: dict[str, _Take] = {}
        seen: dict[str, _Seen] = {}
        unclear = [] if not mine else list(claims)
        if not mine:
            writes = {each.key: self._first_take(each) for each in claims}
        for attempt in range(ROUNDS):
            for claim in unclear:
                choice = yield from self._consider(claim, seen.get(claim.key), mine.get(claim.key), within)
                if isinstance(choice, Busy):
                    if taken and undo:
                        yield from self._undo(claims)  # some were lost before it could be told of any
                    return choice
                writes[claim.key] = choice
            try:
                request = self.format.transaction([writes[each.key].request for each in claims])
                reply: Reply = yield with_timeout(request, within)
            except LockUnavailableError as conflict:
                if conflict.maybe_applied or attempt + 1 == ROUNDS:
                    raise
                # Another transaction is at work on one of the keys.
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
                    seen[claim.key] = yield from self._record_after(claim.key, shown, within)
                continue
            unclear, taken = list(claims), True
            seen = yield from self._records(claims, within)
            granted = yield from self._granted_all(writes, seen, within)
            if granted is not None:
                return granted
        return _contended(claims[0])

    def _first_take(self, claim: Claim) -> _Take:
        """Of a lock of which nothing is known: most are free."""
        stamp = self.stamp()
        turn = QUEUE_EMPTY if claim.fair else QUEUE_IGNORED
        return _Take(claim, stamp, self.format.acquire_idle(claim, stamp, None, turn))

    def _records(self, claims: Sequence[Claim], within: float | None) -> Operation[dict[str, _Seen]]:
        """The locks as they are now, in one request if it is answered to the full."""
        seen: dict[str, _Seen] = {}
        for request in self.format.batch_get([each.key for each in claims], consistent=True):
            reply: Reply = yield with_timeout(request, within)
            for record in self.format.batch_records(reply.output, reply.server_ms):
                seen[record.key] = record, reply
        for claim in claims:
            if claim.key not in seen:
                reply = yield with_timeout(self.format.get(claim.key), within)
                seen[claim.key] = yield from self._record_after(claim.key, reply, within)
        return seen

    def _granted_all(
        self, writes: Mapping[str, _Take], seen: Mapping[str, _Seen], within: float | None
    ) -> Operation[tuple[Granted, ...] | None]:
        """What a transaction that took the locks has brought; None if it did not last."""
        granted = []
        for key, write in writes.items():
            record, reply = seen[key]
            claim = write.claim
            if record is None or claim.lease_id not in record.holders:
                return None
            if claim.capacity > 1:
                # Others may have been granted slots since, so it cannot be told whose token is there.
                stamp = self.stamp()
                again = self.format.reacquire(claim, record.holders[claim.lease_id], stamp)
                write = replace(write, stamp=stamp, request=again)
                reply = yield with_timeout(again, within)
                if reply.refused:
                    return None
                record = self.format.record(reply.output["Attributes"], reply.server_ms)
            one = yield from self._granted(write, record, reply, within)
            if one is None:
                return None
            granted.append(one)
        return tuple(granted)

    def _consider(
        self, claim: Claim, seen: _Seen | None, mine: Waiter | None, within: float | None
    ) -> Operation[_Take | Busy]:
        """What to write next for a claim, or nothing, since the lock is busy.

        :param seen: the lock as an answer has just shown it; None if it is not known.
        :param mine: where the caller stands in line.
        """
        if seen is not None and (seen[0] is None or seen[0].queue_head is None or not claim.fair):
            return (yield from self._choose(claim, *seen, None, within))
        view = yield from self.queue.reader.look(claim, mine, within)
        self.queue.discard(claim.key, view.dead)
        if not view.standing and mine is not None:
            yield from self.queue.enqueue([mine], within)
        return (yield from self._choose(claim, view.record, view.reply, view, within))

    def _choose(
        self,
        claim: Claim,
        record: LockRecord | None,
        reply: Reply,
        view: View | None,
        within: float | None,
    ) -> Operation[_Take | Busy]:
        """What to write for a claim, given the lock as an answer has just shown it; or nothing, since it is busy.

        :param view: the line, if it matters.
        """
        turn = view.turn if view is not None else QUEUE_EMPTY if claim.fair else QUEUE_IGNORED
        ahead = view.ahead if view is not None and claim.fair else ()
        stamp = self.stamp()
        if record is None and claim.only_existing:
            raise LockNotFoundError.of(claim.key)
        if record is None:
            return _Take(claim, stamp, self.format.acquire_idle(claim, stamp, None, turn))
        claim = with_pinned_capacity(claim, record)
        mine = record.holders.get(claim.lease_id)
        if mine is not None:
            if mine.draining:
                return Busy(record)
            if (mine.slots, record.capacity) != (claim.slots, claim.capacity):
                raise LockValueError(
                    f"The lease {claim.lease_id} of the lock {claim.key!r} has {mine.slots} of {record.capacity} "
                    f"slots already, not {claim.slots} of {claim.capacity}: use another lease id for another claim."
                )
            return _Take(claim, stamp, self.format.reacquire(claim, mine, stamp))
        earlier = [each for each in record.holders.values() if claim.supersedes(each) and not each.draining]
        if earlier:
            for holder in earlier:
                log.info(
                    "Lease %s of %r ends: a later attempt acquires.",
                    holder.lease_id,
                    claim.key,
                )
                yield from self.release(
                    claim.key, holder.lease_id, holder.slots, holder.grace_ms, confirmed=False
                )
            if ahead:
                return Busy(record, ahead)
            return _Take(claim, stamp, self.format.acquire_idle(claim, stamp, record, turn))
        dead = self.observer.see(record, reply)
        if not has_capacity(record, dead, claim.slots, claim.capacity):
            return Busy(record, ahead)
        leave = sum(each.slots for each in ahead)
        if ahead and (
            not all(compatible(each.capacity, claim.capacity) for each in ahead)
            or not has_capacity(record, dead, claim.slots + leave, claim.capacity)
        ):
            return Busy(record, ahead)
        if not record.holders:
            return _Take(claim, stamp, self.format.acquire_idle(claim, stamp, record, turn))
        has_room = record.capacity == claim.capacity and record.available >= claim.slots + leave
        clears = claim.capacity == SHARED and dead
        if has_room and not clears:
            return _Take(claim, stamp, self.format.acquire_slots(claim, stamp, record, turn, leave))
        victims = choose_dead(claim, record, dead, leave)
        if len(victims) > MAX_REMOVED and not has_room:
            return (yield from self._clear(claim, record, victims, view, within))
        victims = victims[:MAX_REMOVED]
        write = self.format.reclaim(claim, record, victims, stamp, turn, leave)
        return _Take(claim, stamp, write, () if has_room else victims)

    def _clear(
        self,
        claim: Claim,
        record: LockRecord,
        dead: Sequence[Holder],
        view: View | None,
        within: float | None,
    ) -> Operation[_Take | Busy]:
        """Remove some of the dead holders, of whom there are too many for one write, and choose again."""
        some = dead[-MAX_REMOVED:]
        reply: Reply = yield with_timeout(self.format.remove_dead(claim.key, some, self.stamp()), within)
        if reply.refused:
            # One of them lives, or somebody else removes them.
            return Busy(record)
        log.info("Removed %d dead holders of the lock %r.", len(some), claim.key)
        record = self.format.record(reply.output["Attributes"], reply.server_ms)
        return (yield from self._choose(claim, record, reply, view, within))

    def _granted(
        self,
        write: _Take,
        record: LockRecord,
        reply: Reply,
        within: float | None,
    ) -> Operation[Granted | None]:
        """What a write that took the lock has brought; None if it did not last until it could be relied on.

        A process's first write has only the host's clock to stamp and to seed a token with, and a machine that was
        paused an old estimate of the server's. Nobody is told of a grant before the `Date` of the answer has confirmed
        what the record shows, or it has been put right: until then it does no harm if somebody takes the holder for
        dead. If the answer has no `Date`, other processes may still get one: the times are removed, so that no process
        compares them with its own `Date`, and the token counts as it is.
        """
        claim, stamp = write.claim, write.stamp
        token, acquired_at_ms = record.token, record.holders[claim.lease_id].acquired_at_ms or stamp.best_ms
        # Of a token that is far from where a good clock would have seeded it, nobody has been told.
        seed_is_wrong = record.unproven and not _close(reply, token)
        by_host = stamp.server_ms is None and reply.server_ms is None
        undated = by_host and (record.unproven or record.holders[claim.lease_id].renewed_at_ms is not None)
        time_is_wrong = not _close(reply, record.holders[claim.lease_id].renewed_at_ms)
        if undated or seed_is_wrong or time_is_wrong:
            stamp = yield from self._fresh_stamp(claim.key, min(claim.lease_ms, _FRESH_MS), None)
            acquired_at_ms = stamp.best_ms
            if (
                record.unproven
                and not undated
                and not 0 <= token - acquired_at_ms <= _AHEAD_MS + self.observer.max_clock_skew_ms
            ):
                token = acquired_at_ms
            reply = yield with_timeout(self.format.correct_grant(claim, record, token, stamp), within)
            if reply.refused:
                return None
        return Granted(
            claim,
            token,
            acquired_at_ms,
            stamp.at,
            # Also of an earlier write of ours, whose answer was lost.
            took_over=record.holders[claim.lease_id].took_over,
            reclaimed=tuple(each for each in write.victims if not each.cooling_down),
        )

    def acquire(self, claim: Claim, **options: Any) -> Operation[Granted]:
        """`acquire_all` of one lock."""
        return (yield from self.acquire_all((claim,), **options))[0]

    def acquire_all(
        self,
        claims: Sequence[Claim],
        *,
        now: float,
        timeout: float | None,
        poll_interval: float,
        undo: bool,
        on_busy: Callable[[LockRecord], None] | None = None,
        on_position: Callable[[QueuePosition], None] | None = None,
    ) -> Operation[tuple[Granted, ...]]:
        """Take the locks, all at once, as soon as they are free or their holders are dead; in turn, if the claims are
        fair.

        :param claims: of different keys, with the same lease id.
        :param now: the present monotonic time.
        :param timeout: seconds to wait at most; 0 tries once, None waits without end.
        :param on_busy: told each time that a try found the lock taken.
        :param on_position: called with the position in the queue each time that it has changed.
        :raises LockTimeoutError: it was not free in time; the message names the holders.
        :raises LockUnavailableError: DynamoDB could not be reached, up to the last moment.
        """
        deadline = None if timeout is None else now + timeout
        claim = claims[0]  # the one that was last found busy
        mine: dict[str, Waiter] = {}
        standing = False
        tell_position = on_change(on_position) if on_position else None
        asker = RequestSlot(self.crowd)
        try:
            while True:
                left = None if deadline is None else max(0.0, deadline - now)
                within = None if left is None else max(left, _ANSWER_WITHIN)
                if not standing and left != 0 and not asker.may_ask():
                    now = yield Sleep(asker.pause(poll_interval, self.stamp().jitter, left))
                    continue
                try:
                    if not mine or standing:
                        outcome = yield from self.try_acquire_all(claims, within=within, undo=undo, mine=mine)
                        if not isinstance(outcome, Busy):
                            asker.answered()
                            if mine:
                                yield from self._leave_with(outcome, mine, undo=undo)
                            return outcome
                        record = outcome.record
                        claim = next(each for each in claims if each.key == record.key)
                        place = mine.get(claim.key)
                        if on_busy is not None:
                            on_busy(record)
                        if deadline is not None and now >= deadline:
                            raise LockTimeoutError(_not_in_time(claim.key, timeout or 0.0, outcome), record)
                        if place is not None and (
                            record.queue_head is None or record.queue_head > place.place
                        ):
                            # Others have taken it for dead.
                            yield with_timeout(self.format.lower_head(claim.key, place.place), within)
                        elif not mine and claim.fair:
                            drawn = yield from self.queue.take_tickets(
                                claims, record, left, within, resume=not undo
                            )
                            if not drawn and len(claims) == 1:
                                continue
                            mine = {each.key: each for each in drawn}
                    if mine and not standing:
                        yield from self.queue.enqueue(list(mine.values()), within)
                        standing = True
                    asker.answered()
                except LockUnavailableError as unavailable:
                    asker.unanswered()
                    stamp = self.stamp()
                    left = None if deadline is None else max(0.0, deadline - stamp.at)
                    if left == 0:
                        raise
                    if undo:
                        # A grant attempt of its own (rule R7): what undoes the last one may arrive late, and must not
                        # take away what the next one is given.
                        lease_id, former = self.stamp().version, claim.former | {claim.lease_id}
                        claims = [replace(each, lease_id=lease_id, former=former) for each in claims]
                        claim = next(each for each in claims if each.key == claim.key)
                    log.warning("Waiting for the lock %r: %s", claim.key, unavailable)
                    now = yield Sleep(asker.pause(poll_interval, stamp.jitter, left))
                    continue
                now = yield WaitForSlots(
                    claim.key,
                    claim.slots,
                    capacity=claim.capacity,
                    takes=True,
                    poll_interval=poll_interval,
                    seconds=None if deadline is None else max(0.0, deadline - now),
                    place=mine[claim.key].place if claim.key in mine else None,
                    on_position=tell_position,
                )
        except BaseException as failure:
            # Who is interrupted by a person has time to leave; who is cancelled, or has no network, may not.
            interrupted = undo and isinstance(failure, (KeyboardInterrupt, SystemExit))
            if mine and (interrupted or isinstance(failure, LockTimeoutError)):
                yield from self.queue.dequeue(list(mine.values()), _UNDO_WITHIN, with_lock=False)
            else:
                self.queue.dequeue_later(
                    mine.values(), resumable=not undo and not isinstance(failure, LockError)
                )
            raise
        finally:
            asker.gone()

    def _leave_with(
        self, granted: tuple[Granted, ...], mine: Mapping[str, Waiter], *, undo: bool
    ) -> Operation[None]:
        """Leave the line with what one has waited for."""
        try:
            yield from self.queue.dequeue(list(mine.values()), _UNDO_WITHIN)
        except BaseException as failure:
            if undo and not isinstance(failure, GeneratorExit):
                yield from self._undo([each.claim for each in granted])
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
        """Wait until so many slots could be taken, without taking them. Returns the lock as it is then.

        :param capacity: of how many; None goes by what the lock has.
        :raises LockTimeoutError: they were not free in time.
        """
        deadline = None if timeout is None else now + timeout
        asker = RequestSlot(self.crowd)
        try:
            while True:
                left = None if deadline is None else max(0.0, deadline - now)
                if left != 0 and not asker.may_ask():
                    now = yield Sleep(asker.pause(poll_interval, self.stamp().jitter, left))
                    continue
                try:
                    within = None if left is None else max(left, _ANSWER_WITHIN)
                    record, room = yield from self.look(key, slots, capacity, within)
                except LockUnavailableError as unavailable:
                    asker.unanswered()
                    stamp = self.stamp()
                    left = None if deadline is None else max(0.0, deadline - stamp.at)
                    if left == 0:
                        raise
                    log.warning("Waiting for room in the lock %r: %s", key, unavailable)
                    now = yield Sleep(asker.pause(poll_interval, stamp.jitter, left))
                    continue
                asker.answered()
                if room or record is None:
                    return record
                if left == 0:
                    raise LockTimeoutError(_not_in_time(key, timeout or 0.0, Busy(record)), record)
                now = yield WaitForSlots(
                    key, slots, takes=False, poll_interval=poll_interval, seconds=left, capacity=capacity
                )
        finally:
            asker.gone()

    def look(
        self, key: str, slots: int, capacity: int | None, within: float | None = None
    ) -> Operation[tuple[LockRecord | None, bool]]:
        """The lock as it is now, and whether so many slots could be taken from it.

        :raises LockValueError: they never can, by a capacity that was set.
        """
        reply: Reply = yield with_timeout(self.format.get(key), within)
        item = reply.output.get("Item")
        if not item:
            return None, True
        record = self.format.record(item, reply.server_ms)
        check_pinned(record, slots)
        dead = self.observer.see(record, reply)
        return record, can_grant(record, dead, slots, capacity, takes=False)


@dataclass(frozen=True)
class _Take:
    """A write that takes the lock.

    :ivar claim: with the capacity that the lock has.
    :ivar stamp: what the write carries.
    :ivar victims: the dead holders whose place it takes.
    """

    claim: Claim
    stamp: Stamp
    request: Request
    victims: tuple[Holder, ...] = ()


# A lock, and the answer that has shown it.
_Seen = tuple[LockRecord | None, Reply]


def _contended(claim: Claim) -> Busy:
    return Busy(LockRecord(claim.key, claim.capacity, claim.capacity, {}, token=0))


def _close(reply: Reply, time_ms: int | None) -> bool:
    """Whether a time in the record is about that of the answer which shows it, or cannot be compared with it."""
    return reply.server_ms is None or time_ms is None or -_AHEAD_MS <= reply.server_ms - time_ms <= _BEHIND_MS


def _maybe_applied(failure: BaseException) -> bool:
    """Whether a write that ended like this may have taken effect: no answer came, or nobody waited for it."""
    if isinstance(failure, LockUnavailableError):
        return failure.maybe_applied
    return not isinstance(failure, (Exception, GeneratorExit))


def _not_in_time(key: str, timeout: float, busy: Busy) -> str:
    quicker = not busy.record.holders and not busy.ahead
    who = "Nobody holds it, but others were quicker" if quicker else busy.describe()
    return f"The lock {key!r} was not free within {timeout:g} s. {who}."
