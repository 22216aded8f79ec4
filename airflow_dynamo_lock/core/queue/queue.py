"""The queue of a lock's waiters: tickets, entries, and leaving.

Each waiter has an entry of its own next to the lock's record, sorted by priority and then by a ticket. Tickets are
numbers that the lock's record gives out, so entries sort in arrival order. The record itself holds only the *head*: no
waiter stands before that position. A newcomer's write is refused while there is a head, so nobody overtakes; while
there is none, acquiring costs what it costs without a queue.

A waiter is dead when a holder would be (R3). Its entry counts as a heartbeat for 15 s; a waiter that waits longer is as
alive as its process, which renews a lease of its own: one write every few seconds, however many waiters it has. Dead
waiters are skipped, nobody else. Promise: of two living waiters, the one that came first is granted first. The promise
has one window, the two requests between taking a ticket and writing the entry; a waiter that is passed over in it is
next.

Requests: two writes to join; when the lock becomes free, one read of the queue, the granting write, and one write to
leave. In between only the shared poller reads, and the process sends its heartbeat (`core.lock.presence`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from airflow_dynamo_lock.core.effects import Operation, Reply, Request, Sleep, Stamp, with_timeout
from airflow_dynamo_lock.core.liveness import Observer
from airflow_dynamo_lock.core.model.claim import Claim
from airflow_dynamo_lock.core.model.errors import LockError, LockNotFoundError, LockUnavailableError
from airflow_dynamo_lock.core.model.record import LockRecord, Waiter
from airflow_dynamo_lock.core.queue.view import EntryId, OwnEntries, QueueReader, entry_id
from airflow_dynamo_lock.core.table.format import Format
from airflow_dynamo_lock.core.table.position import next_number, place_of
from airflow_dynamo_lock.log import log

# Seconds for which a write may still arrive after it was sent.
_LATE = 65.0
# Attempts to take tickets in several queues at once, and seconds after the first failure.
_DRAWS, _DRAW_PAUSE = 6, 0.05


@dataclass
class Leftover:
    """An entry that this process has to remove. All times are monotonic seconds.

    :ivar until: the write that made the entry may arrive as late as this.
    :ivar due: when to try the removal next.
    :ivar resumable: leave the entry to another process, which may continue in it.
    :ivar given_up: stop trying at this time; other processes skip a dead entry anyway.
    """

    until: float = -math.inf
    due: float = -math.inf
    resumable: bool = False
    given_up: float = math.inf


@dataclass
class WaitQueue:
    """The queues of one table, as one process stands in them.

    :ivar own: the entries of this process's waiters.
    :ivar reader: reads the queues.
    :ivar leftovers: entries that this process has to remove.
    """

    format: Format
    own: OwnEntries
    reader: QueueReader
    leftovers: dict[EntryId, Leftover] = field(default_factory=dict)
    _uncertain: dict[EntryId, float] = field(default_factory=dict)

    @classmethod
    def of(cls, format: Format, stamp: Callable[[], Stamp], observer: Observer) -> WaitQueue:
        """The queues of the format's table, for one process."""
        own = OwnEntries(stamp)
        return cls(format, own, QueueReader(format, observer, own))

    def __bool__(self) -> bool:
        return bool(self.own.ids or self.leftovers)

    def take_tickets(
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
                entries = yield from self.reader.entries(claim.key, seconds)
                former += [each for each in entries if each.lease_id == claim.lease_id][:1]
            if len(former) == len(claims):
                return former
        if len(claims) == 1:
            stamp, number = yield from self._take_one(claims[0], record, seconds)
            numbers = {claims[0].key: number}
        else:
            stamp, numbers = yield from self._take_together(claims, seconds)
        return [
            self._place(each, numbers[each.key], stamp, timeout) for each in claims if numbers.get(each.key)
        ]

    def _take_one(
        self, claim: Claim, record: LockRecord, seconds: float | None
    ) -> Operation[tuple[Stamp, int]]:
        while True:
            stamp = self.own.stamp()
            reply: Reply = yield with_timeout(
                self.format.take_ticket(claim.key, claim.priority, record, stamp), seconds
            )
            if not reply.refused:
                break
            item = reply.output.get("Item")
            if not item:
                reply = yield with_timeout(self.format.get(claim.key), seconds)
                item = reply.output.get("Item")
            if not item:
                return stamp, 0
            record = self.format.record(item, reply.server_ms)
        return stamp, self.format.record(reply.output["Attributes"], reply.server_ms).last_ticket

    def _take_together(
        self, claims: Sequence[Claim], seconds: float | None
    ) -> Operation[tuple[Stamp, dict[str, int]]]:
        """In all lines at the same moment: of two who wait for some of the same locks, one comes before the other in
        every line, so that they do not wait for each other."""
        for attempt in range(_DRAWS):
            seen: dict[str, LockRecord] = {}
            for request in self.format.batch_get([each.key for each in claims], consistent=True):
                reply: Reply = yield with_timeout(request, seconds)
                seen |= {each.key: each for each in self.format.batch_records(reply.output, reply.server_ms)}
            for claim in claims:
                if claim.only_existing and claim.key not in seen:
                    raise LockNotFoundError.of(claim.key)
            stamp = self.own.stamp()
            draws = [self.format.take_exact_ticket(each, seen.get(each.key), stamp) for each in claims]
            try:
                reply = yield with_timeout(self.format.transaction(draws), seconds)
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
            process=self.own.process,
            version=stamp.version,
            renewed_at_ms=stamp.server_ms,
            about=dict(claim.about) | ({"attempt_of": claim.attempt_of} if claim.attempt_of else {}),
        )

    def enqueue(self, waiters: Sequence[Waiter], seconds: float | None) -> Operation[None]:
        """Take the places, or take them again; or go on in them, where another process has stood."""
        stamp = self.own.stamp()
        for waiter in waiters:
            self.own.ids.add(entry_id(waiter))
            self.leftovers.pop(entry_id(waiter), None)
        fresh = [
            replace(each, process=self.own.process, version=stamp.version, renewed_at_ms=stamp.server_ms)
            for each in waiters
        ]
        late = True
        try:
            reply: Reply = yield with_timeout(
                self._all([self.format.put_entry(each) for each in fresh]), seconds
            )
            late = reply.retried
        except LockUnavailableError as unknown:
            late = unknown.maybe_applied
            raise
        finally:
            if late:
                self._uncertain |= {entry_id(each): stamp.at + _LATE for each in waiters}

    def dequeue(
        self, waiters: Sequence[Waiter], seconds: float | None, *, with_lock: bool = True
    ) -> Operation[None]:
        """Leave the lines.

        :param with_lock: having been granted what one has waited for. Else those behind would go on leaving it to the
            first in line to take the lock, and he has just gone.
        """
        try:
            yield with_timeout(
                self._all([self.format.delete_entry(each.key, each.place) for each in waiters]), seconds
            )
            for waiter in () if with_lock else waiters:
                reply: Reply = yield with_timeout(self.format.clear_head(waiter.key, waiter.place), seconds)
                if reply.refused:
                    yield with_timeout(self.format.advance_head(waiter.key, waiter.place), seconds)
        except BaseException as failure:
            self.dequeue_later(waiters)
            if not isinstance(failure, LockError):
                raise
            log.debug("Could not leave the line of the lock %r yet: %s", waiters[0].key, failure)
        else:
            for waiter in waiters:
                self.own.ids.discard(entry_id(waiter))
            self.dequeue_later([each for each in waiters if entry_id(each) in self._uncertain])

    def dequeue_later(self, waiters: Iterable[Waiter], *, resumable: bool = False) -> None:
        """Leave the lines, as soon as there is time for it.

        :param resumable: another process may soon go on in these places.
        """
        for waiter in waiters:
            spot = entry_id(waiter)
            self.own.ids.discard(spot)
            until = self._uncertain.pop(spot, -math.inf)
            self.leftovers[spot] = Leftover(until, resumable=resumable)

    def _all(self, writes: list[Request]) -> Request:
        return writes[0] if len(writes) == 1 else self.format.transaction(writes)

    def dequeue_attempt(self, key: str, lease_id: str) -> Operation[None]:
        """Leave the line for one who was to go on in it, in whatever process, and will not."""
        for waiter in (yield from self.reader.entered(key, lease_id, None)):
            left = self.leftovers.get(entry_id(waiter))
            self.leftovers[entry_id(waiter)] = Leftover(left.until if left else -math.inf)

    def discard(self, key: str, places: Iterable[str]) -> None:
        """Clear away, as soon as there is time for it, what the dead have left."""
        for each in places:
            if (key, each) not in self.own.ids:
                self.leftovers.setdefault((key, each), Leftover())
