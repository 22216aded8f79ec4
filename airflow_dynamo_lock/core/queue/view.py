"""What a process reads of a queue: the view of a claimant, all waiters, and which of them are dead."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from airflow_dynamo_lock.core.effects import Operation, Reply, Sleep, Stamp, with_timeout
from airflow_dynamo_lock.core.liveness import Observer
from airflow_dynamo_lock.core.model.capacity import compatible, effective_capacity
from airflow_dynamo_lock.core.model.claim import Claim
from airflow_dynamo_lock.core.model.limits import WAITING_PREFIX
from airflow_dynamo_lock.core.model.record import Holder, LockRecord, QueuePosition, Waiter
from airflow_dynamo_lock.core.table.format import QUEUE_EMPTY, Format, HeadUpdate
from airflow_dynamo_lock.core.table.position import in_class, mark_after, number_of

#: How long a heartbeat of a waiter's entry, or of its process, counts, in milliseconds. A living waiter that is taken
#: for dead loses its turn, and nothing else.
PRESENCE_MS = 15_000
# Queue page size.
_PAGE = 25
# Seconds for which a queue that was read serves other waiters that look for their entries; and the pause until an
# answer that is on its way may be there.
_RECENT, _ANSWER_PAUSE = 5.0, 0.2

#: An entry of a queue: the lock's key, and the position. Two queues may have given the same ticket.
EntryId = tuple[str, str]


@dataclass(frozen=True)
class View:
    """A lock and its queue, as a claimant sees them.

    :ivar reply: the answer that delivered the record.
    :ivar ahead: living waiters that go first; perhaps not all of them, if there is no capacity behind these.
    :ivar turn: what a write that takes the lock now requires and changes of the queue's head.
    :ivar standing: whether the claimant's own entry is there.
    :ivar dead: positions of dead waiters.
    """

    record: LockRecord | None
    reply: Reply
    ahead: tuple[Waiter, ...]
    turn: HeadUpdate
    standing: bool
    dead: tuple[str, ...]


@dataclass
class OwnEntries:
    """The entries of this process's waiters, and the lease that proves that the process lives.

    :ivar ids: the entries in which somebody waits here.
    """

    stamp: Callable[[], Stamp]
    ids: set[EntryId] = field(default_factory=set)
    _process: list[str] = field(default_factory=list)

    @property
    def process(self) -> str:
        """The key, and the lease id, of the lease by which this process shows that it lives."""
        if not self._process:
            self._process.append(WAITING_PREFIX + self.stamp().version)
        return self._process[0]  # of two threads at once, each adds one


@dataclass
class QueueReader:
    """Reads the queues of one table.

    :ivar own: the entries of this process: its own waiters are alive by definition.
    """

    format: Format
    observer: Observer
    own: OwnEntries
    # When a queue was last read as a whole, and its entries; None while the answer is on its way.
    _read: dict[str, tuple[float, list[Waiter] | None]] = field(default_factory=dict)

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
            reply: Reply = yield with_timeout(self.format.read_queue(claim.key, _PAGE, cursor), seconds)
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
            if not cursor or following is not None or not _has_capacity_behind(claim, ahead, record):
                break
        if not following and cursor is not None:
            standing = True  # not seen, since it was not looked for to the end
        return View(
            record, first, tuple(ahead), head_update(record, mine, ahead, following), standing, tuple(dead)
        )

    def waiters(self, key: str, seconds: float | None = None) -> Operation[list[Waiter]]:
        """All who wait for the lock and are not known to be dead, in their order."""
        found: list[Waiter] = []
        record: LockRecord | None = None
        cursor: Mapping[str, Any] | None = None
        while True:
            reply: Reply = yield with_timeout(self.format.read_queue(key, None, cursor), seconds)
            if cursor is None:
                record = self.format.lock_in(reply)
            page = self.format.waiters(reply.output)
            if record is not None:
                page = [each for each in page if each.lease_id not in record.holders]
            found += yield from self._living(page, reply, seconds)
            cursor = reply.output.get("LastEvaluatedKey")
            if not cursor:
                return found

    def entries(self, key: str, seconds: float | None) -> Operation[list[Waiter]]:
        """All who stand in the line, also the dead, as it was some seconds ago at most: where a process takes up the
        work of another, hundreds of waiters look for their places at the same moment."""
        while True:
            now = self.own.stamp().at
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

    def entered(self, key: str, lease_id: str, seconds: float | None) -> Operation[list[Waiter]]:
        """Where in the line that lease id stands, in whatever process; also if that is dead."""
        return [each for each in (yield from self._read_all(key, seconds)) if each.lease_id == lease_id]

    def _read_all(self, key: str, seconds: float | None) -> Operation[list[Waiter]]:
        found: list[Waiter] = []
        cursor: Mapping[str, Any] | None = None
        while True:
            reply: Reply = yield with_timeout(self.format.read_queue(key, None, cursor), seconds)
            found += self.format.waiters(reply.output)
            cursor = reply.output.get("LastEvaluatedKey")
            if not cursor:
                return found

    def _living(self, waiters: list[Waiter], reply: Reply, seconds: float | None) -> Operation[list[Waiter]]:
        """Those of them whose silence is not proven."""
        silent = {
            each.place: each.process
            for each in waiters
            if each.process != self.own.process and self._is_dead(f"{each.key}/{each.place}", each, reply)
        }
        asked = sorted({process for process in silent.values() if process is not None})
        alive: set[str | None] = set()
        for request in self.format.batch_get(asked, consistent=True):
            answer: Reply = yield with_timeout(request, seconds)
            for record in self.format.batch_records(answer.output, answer.server_ms):
                # Nobody works under these leases: no allowance has to be made for clocks.
                signs = {name: replace(each, cooling_down=True) for name, each in record.holders.items()}
                if len(self.observer.see(replace(record, holders=signs), answer)) < len(signs):
                    alive.add(record.key)
            alive |= self.format.unprocessed_keys(answer.output)
        return [
            each
            for each in waiters
            if (
                entry_id(each) in self.own.ids
                if each.process == self.own.process
                else each.place not in silent or each.process in alive
            )
        ]

    def _is_dead(self, name: str, waiter: Waiter, reply: Reply) -> bool:
        sign = Holder(
            name,
            waiter.owner,
            slots=1,
            lease_ms=PRESENCE_MS,
            grace_ms=PRESENCE_MS,
            version=waiter.version,
            acquired_at_ms=waiter.since_ms,
            renewed_at_ms=waiter.renewed_at_ms,
            cooling_down=True,
        )
        return bool(self.observer.see(LockRecord(name, 1, 0, {name: sign}, 0), reply))

    def forget_old_reads(self, now: float) -> None:
        """Drop the queues that were read too long ago to serve anybody."""
        self._read = {key: read for key, read in self._read.items() if now - read[0] < _RECENT}


def entry_id(waiter: Waiter) -> EntryId:
    return waiter.key, waiter.place


def queue_positions(waiters: list[Waiter]) -> dict[str, QueuePosition]:
    """Where in the line each place is."""
    return {
        waiter.place: QueuePosition(
            waiter.key, number + 1, len(waiters), waiters[number - 1] if number else None
        )
        for number, waiter in enumerate(waiters)
    }


def on_change(tell: Callable[[QueuePosition], None]) -> Callable[[QueuePosition], None]:
    """Tells where somebody stands if that is not what he was told last."""
    last: QueuePosition | None = None

    def tell_if_new(standing: QueuePosition) -> None:
        nonlocal last
        if standing != last:
            last = standing
            tell(standing)

    return tell_if_new


def _has_capacity_behind(claim: Claim, ahead: list[Waiter], record: LockRecord | None) -> bool:
    """Whether a lock that nobody holds would have room for all of them, and for the claim."""
    return all(compatible(each.capacity, claim.capacity) for each in ahead) and (
        sum(each.slots for each in ahead) + claim.slots <= effective_capacity(claim.capacity, record)
    )


def head_update(
    record: LockRecord | None, mine: Waiter | None, ahead: list[Waiter], following: str | None
) -> HeadUpdate:
    """What a write that takes the lock says of the line, as it was just seen.

    That nobody has come to stand before those who were seen: who does so lowers the mark first.
    """
    if record is None or (record.queue_head is None and following is None):
        return QUEUE_EMPTY
    if record.queue_head is None:
        condition, values = QUEUE_EMPTY.condition, dict[str, Any]()
    else:
        condition = "(attribute_not_exists(#queue_head) OR #queue_head >= :seen_head)"
        values = {":seen_head": record.queue_head}
    if ahead:
        return HeadUpdate(condition, "", values)
    # Who has drawn the next number may be on the way to the place, so the head goes no further than behind this one.
    late = mine is not None and record.last_ticket > number_of(mine.place)
    head = following or (mark_after(mine.place) if mine is not None and late else None)
    if head is None or (record.queue_head is not None and in_class(head) > in_class(record.queue_head)):
        # The claimant was the last in the queue, or the head moves past places of more urgent waiters. Both are right
        # only if no number was drawn since the look. A record that was deleted and made again shows no drawn numbers.
        drawn = "#last_ticket = :tickets" if record.last_ticket else "attribute_not_exists(#last_ticket)"
        condition, values = f"{condition} AND {drawn}", {**values, ":tickets": record.last_ticket}
    return HeadUpdate(condition, head, values)
