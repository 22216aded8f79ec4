"""The queue of a lock's waiters: tickets, entries, and leaving.

Each waiter has an entry of its own next to the lock's record, sorted by priority and then by a ticket. Tickets are
numbers that the lock's record gives out, so entries sort in arrival order. The record itself stores only the *head*: no
waiter has a place before it. While there is a head, the record refuses the write of a newcomer, so no newcomer
overtakes. While there is none, acquiring costs one request as without a queue.

A waiter is dead when a holder would be (R3). Its entry counts as a heartbeat for 15 s. A waiter that waits longer is
alive while its process renews a lease of its own: one write every few seconds, however many waiters the process has.
Only dead waiters are skipped. So of two living waiters, the one that came first is granted first, with one exception: a
waiter that is overtaken between taking its ticket and writing its entry is granted next.

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
from airflow_dynamo_lock.core.table.position import next_ticket, place_of
from airflow_dynamo_lock.log import log

# A write may still arrive this long after it was sent, in seconds.
_LATE = 65.0
# Attempts to take tickets in several queues at once, and the pause after the first one, in seconds.
_ATTEMPTS, _PAUSE = 6, 0.05


@dataclass
class Leftover:
    """An entry that this process has to remove. All times are monotonic seconds.

    :ivar until: the write that made the entry may arrive as late as this.
    :ivar due: when to try the removal next.
    :ivar resumable: leave the entry to another process, which may continue in it.
    :ivar failed_at: when its removal last failed.
    :ivar given_up: stop trying at this time; other processes skip a dead entry anyway.
    """

    until: float = -math.inf
    due: float = -math.inf
    resumable: bool = False
    failed_at: float = -math.inf
    given_up: float = math.inf


@dataclass
class WaitQueue:
    """The entries of one process in the queues of one table.

    :ivar own: the entries of this process's waiters.
    :ivar reader: reads the queues.
    :ivar leftovers: entries that this process has to remove.
    """

    format: Format
    own: OwnEntries
    reader: QueueReader
    leftovers: dict[EntryId, Leftover] = field(default_factory=dict)
    # Own entries whose write was not answered, and until when it may still arrive (monotonic seconds).
    _uncertain: dict[EntryId, float] = field(default_factory=dict)

    @classmethod
    def of(cls, table_format: Format, stamp: Callable[[], Stamp], observer: Observer) -> WaitQueue:
        """The queues of the format's table, for one process."""
        own = OwnEntries(stamp)
        return cls(table_format, own, QueueReader(table_format, observer, own))

    def __bool__(self) -> bool:
        return bool(self.own.ids or self.leftovers)

    def take_tickets(
        self,
        claims: Sequence[Claim],
        record: LockRecord,
        timeout: float | None,
        within: float | None,
        *,
        resume: bool,
    ) -> Operation[list[Waiter]]:
        """Take a ticket in the queue of each claim's lock. Returns the waiters that the claims become.

        Returns none if the lock of a single claim was forgotten in the meantime (the claim may be granted then), or if
        other writes came first each time.

        :param record: the lock as it was last read; only for a single claim.
        :param timeout: how long the claims will wait, in seconds, for people to read; None for no limit.
        :param within: timeout of each request.
        :param resume: continue in the entries with the same lease ids, if another process has made them.
        """
        if resume:
            former: list[Waiter] = []
            for claim in claims:
                entries = yield from self.reader.entries(claim.key, within)
                former += [each for each in entries if each.lease_id == claim.lease_id][:1]
            if len(former) == len(claims):
                return former
        if len(claims) == 1:
            stamp, ticket = yield from self._take_one(claims[0], record, within)
            tickets = {claims[0].key: ticket}
        else:
            stamp, tickets = yield from self._take_together(claims, within)
        return [
            self._waiter(each, tickets[each.key], stamp, timeout, len(claims))
            for each in claims
            if tickets.get(each.key)
        ]

    def _take_one(
        self, claim: Claim, record: LockRecord, within: float | None
    ) -> Operation[tuple[Stamp, int]]:
        """A ticket, or 0 if the lock has no record any more."""
        while True:
            stamp = self.own.stamp()
            reply: Reply = yield with_timeout(
                self.format.take_ticket(claim.key, claim.priority, record, stamp), within
            )
            if not reply.refused:
                break
            item = reply.output.get("Item")
            if not item:
                reply = yield with_timeout(self.format.get(claim.key), within)
                item = reply.output.get("Item")
            if not item:
                return stamp, 0
            record = self.format.record(item, reply.server_ms)
        return stamp, self.format.record(reply.output["Attributes"], reply.server_ms).last_ticket

    def _take_together(
        self, claims: Sequence[Claim], within: float | None
    ) -> Operation[tuple[Stamp, dict[str, int]]]:
        """Tickets of all queues, taken in one transaction. So of two waiters for some of the same locks, one comes
        first in every queue, and they never wait for each other. No tickets if other writes came first each time."""
        for attempt in range(_ATTEMPTS):
            seen: dict[str, LockRecord] = {}
            for request in self.format.batch_get([each.key for each in claims], consistent=True):
                reply: Reply = yield with_timeout(request, within)
                seen |= {each.key: each for each in self.format.batch_records(reply.output, reply.server_ms)}
            for claim in claims:
                if claim.only_existing and claim.key not in seen:
                    raise LockNotFoundError.of(claim.key)
            stamp = self.own.stamp()
            writes = [self.format.take_exact_ticket(each, seen.get(each.key), stamp) for each in claims]
            try:
                reply = yield with_timeout(self.format.transaction(writes), within)
                if not reply.refused:
                    return stamp, {each.key: next_ticket(seen.get(each.key), stamp) for each in claims}
            except LockUnavailableError as conflict:
                if conflict.maybe_applied:
                    raise
            yield Sleep(_PAUSE * 2**attempt)
        return stamp, {}

    def _waiter(
        self, claim: Claim, ticket: int, stamp: Stamp, timeout: float | None, set_size: int
    ) -> Waiter:
        return Waiter(
            key=claim.key,
            place=place_of(claim.priority, ticket, stamp.version),
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
            set_size=set_size,
        )

    def enqueue(self, waiters: Sequence[Waiter], within: float | None) -> Operation[None]:
        """Write the entries: new ones, own ones that others have removed, or those of another process.

        :raises LockUnavailableError: DynamoDB did not serve the write, which may arrive later.
        """
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
                self._all([self.format.put_entry(each) for each in fresh]), within
            )
            late = reply.retried
        except LockUnavailableError as unknown:
            late = unknown.maybe_applied
            raise
        finally:
            if late:
                self._uncertain |= {entry_id(each): stamp.at + _LATE for each in waiters}

    def dequeue(
        self, waiters: Sequence[Waiter], within: float | None, *, granted: bool = True
    ) -> Operation[None]:
        """Remove the entries. If that fails, the maintenance of this process repeats it.

        :param granted: the waiters were granted the locks, and the grants moved the heads. Otherwise the heads are
            moved here, or the waiters behind would wait for a first one that has gone.
        """
        try:
            yield with_timeout(
                self._all([self.format.delete_entry(each.key, each.place) for each in waiters]), within
            )
            for waiter in () if granted else waiters:
                reply: Reply = yield with_timeout(self.format.clear_head(waiter.key, waiter.place), within)
                if reply.refused:
                    yield with_timeout(self.format.advance_head(waiter.key, waiter.place), within)
        except BaseException as failure:
            self.dequeue_later(waiters)
            if not isinstance(failure, LockError):
                raise
            log.debug(
                "Could not remove the queue entry of the lock %r, trying again: %s", waiters[0].key, failure
            )
        else:
            for waiter in waiters:
                self.own.ids.discard(entry_id(waiter))
            self.dequeue_later([each for each in waiters if entry_id(each) in self._uncertain])

    def dequeue_later(self, waiters: Iterable[Waiter], *, resumable: bool = False) -> None:
        """Have the maintenance of this process remove the entries.

        :param resumable: leave them to another process, which may continue in them.
        """
        for waiter in waiters:
            entry = entry_id(waiter)
            self.own.ids.discard(entry)
            until = self._uncertain.pop(entry, -math.inf)
            self.leftovers[entry] = Leftover(until, resumable=resumable)

    def _all(self, writes: list[Request]) -> Request:
        return writes[0] if len(writes) == 1 else self.format.transaction(writes)

    def dequeue_attempt(self, key: str, lease_id: str) -> Operation[None]:
        """Have the maintenance remove the entry of a claim in which no process will continue."""
        for waiter in (yield from self.reader.entries_of(key, lease_id, None)):
            left = self.leftovers.get(entry_id(waiter))
            self.leftovers[entry_id(waiter)] = Leftover(left.until if left else -math.inf)

    def discard(self, key: str, places: Iterable[str]) -> None:
        """Have the maintenance remove the entries of dead waiters."""
        for each in places:
            if (key, each) not in self.own.ids:
                self.leftovers.setdefault((key, each), Leftover())
