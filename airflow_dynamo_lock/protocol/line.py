"""The line of those who wait for a lock: who is next, and how nobody is overtaken.

Who waits stands in the table beside the lock: an entry for each, sorted by urgency and then by a number that is drawn
from the lock's record, so that the order is the one in which they came. The record itself says only that nobody stands
before a certain place (`LockRecord.first`). That keeps out who comes new: the write is refused while there is such a
mark, and costs what it always did while there is none.

A waiter is dead as a holder is (rule R3). Its entry counts as a sign of life for a while; who waits longer is as alive
as its process, which shows that by a lease of its own: one write now and then, however many wait in it. The dead are
passed over, and nobody else. What is promised is this: of two who wait, the one who came first is granted first, if it
is alive and seen to be so. The window in which that can fail is the one between drawing a number and standing in line,
two requests; who is passed over in it is the next.

What it costs: two writes to join; when the lock comes free one read of the line, the write that takes it, and one to
leave. In between there are only the shared poller's reads and the process's sign of life.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from airflow_dynamo_lock.protocol.capacity import that_counts
from airflow_dynamo_lock.protocol.effects import Operation, Reply, Request, Sleep, Stamp, in_time
from airflow_dynamo_lock.protocol.errors import LockError, LockNotFoundError, LockUnavailableError
from airflow_dynamo_lock.protocol.formats.base import Format
from airflow_dynamo_lock.protocol.limits import WAITING
from airflow_dynamo_lock.protocol.model import (
    Claim,
    Granted,
    Holder,
    LockRecord,
    Lost,
    Standing,
    Waiter,
    alike,
)
from airflow_dynamo_lock.protocol.native import NO_LINE, Turn
from airflow_dynamo_lock.protocol.places import in_class, mark_after, next_number, number_of, place_of
from airflow_dynamo_lock.protocol.staleness import Observer

if TYPE_CHECKING:
    from airflow_dynamo_lock.protocol.operations import Operations

log = logging.getLogger("airflow_dynamo_lock")

# For how long a sign of life counts, an entry's own and that of its process, milliseconds. Who is taken for dead and is
# not loses his turn, and nothing else.
_SIGN_MS = 15_000
# The seconds between two signs of life of a process, and after how many seconds of waiting it begins with them.
_PROCESS_BEATS = 4.0
_PROCESS_FROM = 5.0
# Seconds between two rounds of what is to be done for those who wait.
_ROUND = 1.0
# How long after it was sent a write may still arrive, and how long one that has may hold the others up, in seconds.
_LATE, _LATE_PAUSE = 65.0, 10.0
# For so many seconds it is tried again to leave a line, where that fails.
_PATIENCE = 300.0
# How often it is tried to draw numbers in several lines at once, and seconds after the first failure.
_DRAWS, _DRAW_PAUSE = 6, 0.05
# For so many seconds a line that was read is good enough to look for one's place in; the pause until it may be there.
_RECENT, _ANSWER_PAUSE = 5.0, 0.2
# So many of a line are read at once.
_PAGE = 25


@dataclass(frozen=True)
class View:
    """A lock and its line, as one sees them who wants to take it.

    :ivar reply: the answer that delivered the record.
    :ivar ahead: those alive who are to have it first; perhaps not all, if there is no room behind these.
    :ivar turn: what a write that takes the lock now has to say of the line.
    :ivar standing: whether the place of the one who looks is there.
    :ivar dead: places of the dead.
    """

    record: LockRecord | None
    reply: Reply
    ahead: tuple[Waiter, ...]
    turn: Turn
    standing: bool
    dead: tuple[str, ...]


@dataclass
class _Leftover:
    """What is to be cleared away.

    :ivar until: what made the entry may arrive as late as that, in monotonic seconds.
    :ivar due: it is to be done from then on.
    :ivar resumable: it is left for another process, which may go on in this place.
    :ivar given_up: from when on nothing more is tried, should it fail until then: the dead are passed over.
    """

    until: float = -math.inf
    due: float = -math.inf
    resumable: bool = False
    given_up: float = math.inf


# A place in the line of a lock: its key, and the place. (The same number may have been drawn in the lines of two.)
_Spot = tuple[str, str]


@dataclass
class Line:
    """The lines of one table, as one process stands in them.

    :ivar spots: where it waits.
    """

    format: Format
    stamp: Callable[[], Stamp]
    observer: Observer
    spots: set[_Spot] = field(default_factory=set)
    _process: list[str] = field(default_factory=list)
    _uncertain: dict[_Spot, float] = field(default_factory=dict)
    _leftovers: dict[_Spot, _Leftover] = field(default_factory=dict)
    # When a line was last read as a whole, and what was found; None while the answer has not come.
    _read: dict[str, tuple[float, list[Waiter] | None]] = field(default_factory=dict)

    @property
    def process(self) -> str:
        """The key, and the lease id, of the lease by which this process shows that it lives."""
        if not self._process:
            self._process.append(WAITING + self.stamp().version)
        return self._process[0]  # of two threads at once, each adds one

    def __bool__(self) -> bool:
        return bool(self.spots or self._leftovers)

    # -- standing in it ---------------------------------------------------------------------------------------------

    def draw(
        self,
        claims: Sequence[Claim],
        record: LockRecord,
        timeout: float | None,
        seconds: float | None,
        *,
        resume: bool,
    ) -> Operation[list[Waiter]]:
        """Draw a number in the line of each claim's lock. None at all if a lock was forgotten meanwhile, so that it can
        be taken, or if others drew numbers each time that it was tried.

        :param record: the lock, as it was last seen, if there is only one.
        :param timeout: how long it is going to wait, for people to read.
        :param seconds: that the caller has for each request.
        :param resume: go on in the places of the same lease id, if there are any: another process has waited for it.
        """
        if resume:
            former: list[Waiter] = []
            for claim in claims:
                entries = yield from self._entries(claim.key, seconds)
                former += [each for each in entries if each.lease_id == claim.lease_id][:1]
            if len(former) == len(claims):
                return former
        if len(claims) == 1:
            stamp, number = yield from self._draw_one(claims[0], record, seconds)
            numbers = {claims[0].key: number}
        else:
            stamp, numbers = yield from self._draw_all(claims, seconds)
        return [
            self._place(each, numbers[each.key], stamp, timeout) for each in claims if numbers.get(each.key)
        ]

    def _draw_one(
        self, claim: Claim, record: LockRecord, seconds: float | None
    ) -> Operation[tuple[Stamp, int]]:
        while True:
            stamp = self.stamp()
            reply: Reply = yield in_time(self.format.draw(claim.key, claim.priority, record, stamp), seconds)
            if not reply.refused:
                break
            item = reply.output.get("Item")
            if not item:
                reply = yield in_time(self.format.get(claim.key), seconds)
                item = reply.output.get("Item")
            if not item:
                return stamp, 0
            record = self.format.record(item, reply.server_ms)
        return stamp, self.format.record(reply.output["Attributes"], reply.server_ms).tickets

    def _draw_all(
        self, claims: Sequence[Claim], seconds: float | None
    ) -> Operation[tuple[Stamp, dict[str, int]]]:
        """In all lines at the same moment: of two who wait for some of the same locks, one comes before the other in
        every line, so that they do not wait for each other."""
        for attempt in range(_DRAWS):
            seen: dict[str, LockRecord] = {}
            for request in self.format.batch_get([each.key for each in claims], consistent=True):
                reply: Reply = yield in_time(request, seconds)
                seen |= {each.key: each for each in self.format.batch_records(reply.output, reply.server_ms)}
            for claim in claims:
                if claim.only_existing and claim.key not in seen:
                    raise LockNotFoundError.of(claim.key)
            stamp = self.stamp()
            draws = [self.format.draw_exactly(each, seen.get(each.key), stamp) for each in claims]
            try:
                reply = yield in_time(self.format.transaction(draws), seconds)
                if not reply.refused:
                    return stamp, {each.key: next_number(seen.get(each.key), stamp) for each in claims}
            except LockUnavailableError as conflict:
                if conflict.maybe_applied:
                    raise
            yield Sleep(_DRAW_PAUSE * 2**attempt)
        return stamp, {}

    def _place(self, claim: Claim, number: int, stamp: Stamp, timeout: float | None) -> Waiter:
        return Waiter(
            key=claim.key,
            place=place_of(claim.priority, number, stamp.version),
            lease_id=claim.lease_id,
            owner=claim.owner,
            slots=claim.slots,
            capacity=claim.capacity,
            priority=claim.priority,
            since_ms=stamp.best_ms,
            until_ms=None if timeout is None else stamp.best_ms + round(timeout * 1000),
            process=self.process,
            version=stamp.version,
            renewed_at_ms=stamp.server_ms,
            about=dict(claim.about) | ({"attempt_of": claim.attempt_of} if claim.attempt_of else {}),
        )

    def stand(self, waiters: Sequence[Waiter], seconds: float | None) -> Operation[None]:
        """Take the places, or take them again; or go on in them, where another process has stood."""
        stamp = self.stamp()
        for waiter in waiters:
            self.spots.add(_spot(waiter))
            self._leftovers.pop(_spot(waiter), None)
        fresh = [
            replace(each, process=self.process, version=stamp.version, renewed_at_ms=stamp.server_ms)
            for each in waiters
        ]
        late = True
        try:
            reply: Reply = yield in_time(self._all([self.format.stand(each) for each in fresh]), seconds)
            late = reply.retried
        except LockUnavailableError as unknown:
            late = unknown.maybe_applied
            raise
        finally:
            if late:
                self._uncertain |= {_spot(each): stamp.at + _LATE for each in waiters}

    def leave(
        self, waiters: Sequence[Waiter], seconds: float | None, *, with_lock: bool = True
    ) -> Operation[None]:
        """Leave the lines.

        :param with_lock: having been granted what one has waited for. Else those behind would go on leaving it to the
            first in line to take the lock, and he has just gone.
        """
        try:
            yield in_time(
                self._all([self.format.step_out(each.key, each.place) for each in waiters]), seconds
            )
            for waiter in () if with_lock else waiters:
                reply: Reply = yield in_time(self.format.unmark(waiter.key, waiter.place), seconds)
                if reply.refused:
                    yield in_time(self.format.move_mark(waiter.key, waiter.place), seconds)
        except BaseException as failure:
            self.drop(waiters)
            if not isinstance(failure, LockError):
                raise
            log.debug("Could not leave the line of the lock %r yet: %s", waiters[0].key, failure)
        else:
            for waiter in waiters:
                self.spots.discard(_spot(waiter))
            self.drop([each for each in waiters if _spot(each) in self._uncertain])

    def drop(self, waiters: Iterable[Waiter], *, resumable: bool = False) -> None:
        """Leave the lines, as soon as there is time for it.

        :param resumable: another process may soon go on in these places.
        """
        for waiter in waiters:
            spot = _spot(waiter)
            self.spots.discard(spot)
            until = self._uncertain.pop(spot, -math.inf)
            self._leftovers[spot] = _Leftover(until, resumable=resumable)

    def _all(self, writes: list[Request]) -> Request:
        return writes[0] if len(writes) == 1 else self.format.transaction(writes)

    def resign(self, key: str, lease_id: str) -> Operation[None]:
        """Leave the line for one who was to go on in it, in whatever process, and will not."""
        for waiter in (yield from self._entered(key, lease_id, None)):
            left = self._leftovers.get(_spot(waiter))
            self._leftovers[_spot(waiter)] = _Leftover(left.until if left else -math.inf)

    def sweep(self, key: str, places: Iterable[str]) -> None:
        """Clear away, as soon as there is time for it, what the dead have left."""
        for each in places:
            if (key, each) not in self.spots:
                self._leftovers.setdefault((key, each), _Leftover())

    def tend(self, operations: Operations) -> Operation[None]:
        """What is done in the background while somebody waits here: show that this process lives, and clear away."""
        alive = False
        beat_at: float | None = None
        while self:
            now: float = yield Sleep(_ROUND)
            yield from self._clear_away(now)
            self._read = {key: read for key, read in self._read.items() if now - read[0] < _RECENT}
            if not self.spots:
                beat_at = None
            elif beat_at is None:
                beat_at = now + (0.0 if alive else _PROCESS_FROM)
            if beat_at is None or now < beat_at:
                continue
            try:
                alive = alive and not isinstance(
                    (yield from operations.heartbeat(self.process, self.process, _SIGN_MS)), Lost
                )
                if not alive:
                    claim = Claim(self.process, self.process, "waiting", _SIGN_MS, _SIGN_MS, fair=False)
                    alive = isinstance((yield from operations.try_acquire(claim, undo=False)), Granted)
                beat_at = now + _PROCESS_BEATS
            except LockError as failure:
                log.warning("Could not show that those who wait here are alive, trying again: %s", failure)
        if alive:
            try:
                yield from operations.release(self.process, self.process, 1, _SIGN_MS, heard=False)
            except LockError as failure:
                log.debug("The lease %s runs out by itself: %s", self.process, failure)

    def _clear_away(self, now: float) -> Operation[None]:
        for spot, leftover in list(self._leftovers.items()):
            if now < leftover.due or self._leftovers.get(spot) is not leftover:
                continue
            key, place = spot
            try:
                if leftover.resumable:
                    yield self.format.hand_place(key, place, self.process, self.stamp())
                else:
                    yield self.format.step_out(key, place)
            except LockError as failure:
                leftover.given_up = min(leftover.given_up, max(now, leftover.until) + _PATIENCE)
                if now < leftover.given_up:
                    log.debug("Could not leave the line of the lock %r, trying again: %s", key, failure)
                    return
                log.debug("Could not leave the line of the lock %r: %s", key, failure)
            if now >= min(leftover.until, leftover.given_up):
                if self._leftovers.get(spot) is leftover:
                    del self._leftovers[spot]
            else:
                leftover.due = min(leftover.until, now + _LATE_PAUSE)

    # -- looking at it ----------------------------------------------------------------------------------------------

    def look(self, claim: Claim, mine: Waiter | None, seconds: float | None) -> Operation[View]:
        """Read the lock, and its line as far as it matters to the one who wants to take it.

        :param mine: where he stands; None if he comes new, so that all are ahead of him.
        """
        record: LockRecord | None = None
        ahead: list[Waiter] = []
        dead: list[str] = []
        standing, following = mine is None, None
        first: Reply | None = None
        cursor: Mapping[str, Any] | None = None
        while True:
            reply: Reply = yield in_time(self.format.line(claim.key, _PAGE, cursor), seconds)
            if first is None:
                first, record = reply, self.format.lock_in(reply)
            before = []
            for waiter in self.format.waiters(reply.output):
                if mine is not None and waiter.place >= mine.place:
                    standing = standing or waiter.place == mine.place
                    following = following or (waiter.place if waiter.place != mine.place else None)
                elif record is None or waiter.lease_id not in record.holders:
                    before.append(waiter)
            living = yield from self._living(before, reply, seconds)
            alive = {each.place for each in living}
            dead += [each.place for each in before if each.place not in alive]
            ahead += [each for each in living if not claim.supersedes(each)]
            cursor = reply.output.get("LastEvaluatedKey")
            if not cursor or following is not None or not _fits_behind(claim, ahead, record):
                break
        if not following and cursor is not None:
            standing = True  # not seen, since it was not looked for to the end
        return View(record, first, tuple(ahead), _turn(record, mine, ahead, following), standing, tuple(dead))

    def everybody(self, key: str, seconds: float | None = None) -> Operation[list[Waiter]]:
        """All who wait for the lock and are not known to be dead, in their order."""
        found: list[Waiter] = []
        record: LockRecord | None = None
        cursor: Mapping[str, Any] | None = None
        while True:
            reply: Reply = yield in_time(self.format.line(key, None, cursor), seconds)
            if cursor is None:
                record = self.format.lock_in(reply)
            page = self.format.waiters(reply.output)
            if record is not None:
                page = [each for each in page if each.lease_id not in record.holders]
            found += yield from self._living(page, reply, seconds)
            cursor = reply.output.get("LastEvaluatedKey")
            if not cursor:
                return found

    def _entries(self, key: str, seconds: float | None) -> Operation[list[Waiter]]:
        """All who stand in the line, also the dead, as it was some seconds ago at most: where a process takes up the
        work of another, hundreds of waiters look for their places at the same moment."""
        while True:
            now = self.stamp().at
            at, entries = self._read.get(key, (-math.inf, None))
            if now - at >= _RECENT:
                self._read[key] = now, None  # so that the others wait for this answer
                try:
                    entries = yield from self._read_all(key, seconds)
                except BaseException:
                    self._read.pop(key, None)  # not longer than there is one
                    raise
                self._read[key] = now, entries
            if entries is not None:
                return entries
            yield Sleep(_ANSWER_PAUSE)

    def _entered(self, key: str, lease_id: str, seconds: float | None) -> Operation[list[Waiter]]:
        """Where in the line that lease id stands, in whatever process; also if that is dead."""
        return [each for each in (yield from self._read_all(key, seconds)) if each.lease_id == lease_id]

    def _read_all(self, key: str, seconds: float | None) -> Operation[list[Waiter]]:
        found: list[Waiter] = []
        cursor: Mapping[str, Any] | None = None
        while True:
            reply: Reply = yield in_time(self.format.line(key, None, cursor), seconds)
            found += self.format.waiters(reply.output)
            cursor = reply.output.get("LastEvaluatedKey")
            if not cursor:
                return found

    def _living(self, waiters: list[Waiter], reply: Reply, seconds: float | None) -> Operation[list[Waiter]]:
        """Those of them whose silence is not proven."""
        silent = {
            each.place: each.process
            for each in waiters
            if each.process != self.process and self._is_dead(f"{each.key}/{each.place}", each, reply)
        }
        asked = sorted({process for process in silent.values() if process is not None})
        alive: set[str | None] = set()
        for request in self.format.batch_get(asked, consistent=True):
            answer: Reply = yield in_time(request, seconds)
            for record in self.format.batch_records(answer.output, answer.server_ms):
                # Nobody works under these leases: no allowance has to be made for clocks.
                signs = {name: replace(each, resting=True) for name, each in record.holders.items()}
                if len(self.observer.see(replace(record, holders=signs), answer)) < len(signs):
                    alive.add(record.key)
            alive |= self.format.unprocessed_keys(answer.output)
        return [
            each
            for each in waiters
            if (
                _spot(each) in self.spots
                if each.process == self.process
                else each.place not in silent or each.process in alive
            )
        ]

    def _is_dead(self, name: str, waiter: Waiter, reply: Reply) -> bool:
        sign = Holder(
            name,
            waiter.owner,
            slots=1,
            lease_ms=_SIGN_MS,
            grace_ms=_SIGN_MS,
            version=waiter.version,
            acquired_at_ms=waiter.since_ms,
            renewed_at_ms=waiter.renewed_at_ms,
            resting=True,
        )
        return bool(self.observer.see(LockRecord(name, 1, 0, {name: sign}, 0), reply))


def _spot(waiter: Waiter) -> _Spot:
    return waiter.key, waiter.place


def standings(waiters: list[Waiter]) -> dict[str, Standing]:
    """Where in the line each place is."""
    return {
        waiter.place: Standing(waiter.key, number + 1, len(waiters), waiters[number - 1] if number else None)
        for number, waiter in enumerate(waiters)
    }


def news(tell: Callable[[Standing], None]) -> Callable[[Standing], None]:
    """Tells where somebody stands if that is not what he was told last."""
    last: Standing | None = None

    def tell_if_new(standing: Standing) -> None:
        nonlocal last
        if standing != last:
            last = standing
            tell(standing)

    return tell_if_new


def _fits_behind(claim: Claim, ahead: list[Waiter], record: LockRecord | None) -> bool:
    """Whether a lock that nobody holds would have room for all of them, and for the claim."""
    return all(alike(each.capacity, claim.capacity) for each in ahead) and (
        sum(each.slots for each in ahead) + claim.slots <= that_counts(claim.capacity, record)
    )


def _turn(record: LockRecord | None, mine: Waiter | None, ahead: list[Waiter], following: str | None) -> Turn:
    """What a write that takes the lock says of the line, as it was just seen.

    That nobody has come to stand before those who were seen: who does so lowers the mark first.
    """
    if record is None or (record.first is None and following is None):
        return NO_LINE
    if record.first is None:
        condition, values = NO_LINE.condition, dict[str, Any]()
    else:
        condition = "(attribute_not_exists(#first) OR #first >= :seen_first)"
        values = {":seen_first": record.first}
    if ahead:
        return Turn(condition, "", values)
    # Who has drawn the next number may be on the way to the place, so the head goes no further than behind this one.
    late = mine is not None and record.tickets > number_of(mine.place)
    head = following or (mark_after(mine.place) if mine is not None and late else None)
    if head is None or (record.first is not None and in_class(head) > in_class(record.first)):
        # The claimant was the last in the queue, or the head moves past places of more urgent waiters. Both are right
        # only if no number was drawn since the look. A record that was deleted and made again shows no drawn numbers.
        drawn = "#tickets = :tickets" if record.tickets else "attribute_not_exists(#tickets)"
        condition, values = f"{condition} AND {drawn}", {**values, ":tickets": record.tickets}
    return Turn(condition, head, values)
