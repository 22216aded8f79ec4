"""What a process reads of a queue: the view of a claimant, all waiters, and which of them are dead."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import dropwhile
from typing import Any

from airflow_dynamo_lock.core.effects import Operation, Reply, Sleep, Stamp, with_timeout
from airflow_dynamo_lock.core.liveness import Observer
from airflow_dynamo_lock.core.model.capacity import effective_capacity, free_slots
from airflow_dynamo_lock.core.model.claim import Claim
from airflow_dynamo_lock.core.model.kind import compatible
from airflow_dynamo_lock.core.model.limits import WAITING_PREFIX
from airflow_dynamo_lock.core.model.record import Holder, LockRecord, QueuePosition, Waiter
from airflow_dynamo_lock.core.queue.estimate import with_expected_waits
from airflow_dynamo_lock.core.queue.unused import UnusedSlots
from airflow_dynamo_lock.core.table.features import Feature, require
from airflow_dynamo_lock.core.table.format import QUEUE_EMPTY, Format, HeadUpdate
from airflow_dynamo_lock.core.table.position import class_of, head_after, ticket_of

#: How long a waiter's entry, or a heartbeat of its process, proves that it is alive, in milliseconds. A living waiter
#: that counts as dead loses its turn, and nothing else.
PRESENCE_MS = 15_000
# Queue page size.
_PAGE = 25
# Seconds for which one read of a queue serves all waiters of this process that look for their entries, and the pause
# while another waiter reads.
_RECENT, _READ_PAUSE = 5.0, 0.2

#: An entry of a queue: the key of the lock, and the place. Places of two queues may be equal.
EntryId = tuple[str, str]


@dataclass(frozen=True)
class View:
    """A lock and its queue, as one claim sees them.

    :ivar record: the lock; None if it has no record.
    :ivar reply: the response that delivered the record.
    :ivar ahead: living waiters that go first, without those that the claim may pass over. Further ones may be missing
        if these leave no capacity for the claim.
    :ivar head_update: what a grant requires of the head of the queue, and how it changes the head.
    :ivar enqueued: False if the claim has a place in the queue, and its entry there is missing.
    :ivar dead: places of dead waiters.
    """

    record: LockRecord | None
    reply: Reply
    ahead: tuple[Waiter, ...]
    head_update: HeadUpdate
    enqueued: bool
    dead: tuple[str, ...]


@dataclass
class OwnEntries:
    """The entries of this process's waiters, and the lease that proves that the process is alive.

    :ivar stamp: makes the stamp of a write attempt.
    :ivar ids: the entries in which this process waits.
    """

    stamp: Callable[[], Stamp]
    ids: set[EntryId] = field(default_factory=set)
    _process: list[str] = field(default_factory=list)

    @property
    def process(self) -> str:
        """The key, and the lease id, of the lease that proves that this process is alive."""
        if not self._process:
            self._process.append(WAITING_PREFIX + self.stamp().version)
        return self._process[0]  # two threads may each have added one


@dataclass
class QueueReader:
    """Reads the queues of one table.

    :ivar own: the entries of this process, whose waiters count as alive.
    :ivar unused: how long free slots have been unused.
    """

    format: Format
    observer: Observer
    own: OwnEntries
    unused: UnusedSlots = field(default_factory=UnusedSlots)
    # The time of the last complete read of a queue, and its entries; None while the read is in progress.
    _read: dict[str, tuple[float, list[Waiter] | None]] = field(default_factory=dict)

    def look(self, claim: Claim, mine: Waiter | None, within: float | None) -> Operation[View]:
        """Read the lock, and as much of its queue as matters to the claim.

        :param mine: the claim's own entry; None for a newcomer, which comes after all waiters.
        :param within: timeout of each request.
        """
        record: LockRecord | None = None
        ahead: list[Waiter] = []
        not_passed: list[Waiter] = []
        dead: list[str] = []
        enqueued, following = mine is None, None
        first_reply: Reply | None = None
        unused, idle = 0, False
        cursor: Mapping[str, Any] | None = None
        while True:
            reply: Reply = yield with_timeout(self.format.read_queue(claim.key, _PAGE, cursor), within)
            if first_reply is None:
                first_reply, record = reply, self.format.lock_in(reply)
                if record is not None:
                    dead_holders = self.observer.see(record, reply)
                    unused = self.unused.see(record, free_slots(record, dead_holders), reply)
                    idle = len(dead_holders) == len(record.holders)
            earlier = []
            for waiter in self.format.waiters(reply.output):
                if mine is not None and waiter.place >= mine.place:
                    enqueued = enqueued or waiter.place == mine.place
                    following = following or (waiter.place if waiter.place != mine.place else None)
                elif record is None or waiter.lease_id not in record.holders:
                    earlier.append(waiter)
            living = yield from self._living(earlier, reply, within)
            alive = {each.place for each in living}
            dead += [each.place for each in earlier if each.place not in alive]
            ahead += [each for each in living if not claim.supersedes(each)]
            not_passed = list(dropwhile(partial(_is_passed, record, unused, idle=idle), ahead))
            cursor = reply.output.get("LastEvaluatedKey")
            if not cursor or following is not None or not _fits_behind(claim, not_passed, record):
                break
        if not following and cursor is not None:
            enqueued = True  # unknown, because the queue was not read to its end
        head_update = replace(
            head_update_of(record, mine, ahead, following), waiter=mine.lease_id if mine else ""
        )
        if record is not None and len(not_passed) < len(ahead):
            head_update = _while_unused(head_update, record)
        return View(record, first_reply, tuple(not_passed), head_update, enqueued, tuple(dead))

    def waiters(self, key: str, within: float | None = None) -> Operation[list[Waiter]]:
        """The waiters of the lock in their order, with their expected waits, without those known to be dead.

        :raises LockValueError: the table format has no queues.
        """
        require(self.format, Feature.QUEUE)
        found: list[Waiter] = []
        record: LockRecord | None = None
        cursor: Mapping[str, Any] | None = None
        while True:
            reply: Reply = yield with_timeout(self.format.read_queue(key, None, cursor), within)
            if cursor is None:
                record = self.format.lock_in(reply)
            page = self.format.waiters(reply.output)
            if record is not None:
                page = [each for each in page if each.lease_id not in record.holders]
            found += yield from self._living(page, reply, within)
            cursor = reply.output.get("LastEvaluatedKey")
            if not cursor:
                return with_expected_waits(record, found, self.own.stamp().best_ms)

    def entries(self, key: str, within: float | None) -> Operation[list[Waiter]]:
        """All entries of the queue, those of dead waiters included, as they were up to 5 s ago.

        Where a process continues the work of another one, hundreds of waiters look for their entries at the same time;
        they share one read.
        """
        while True:
            now = self.own.stamp().at
            at, entries = self._read.get(key, (-math.inf, None))
            if now - at >= _RECENT:
                self._read[key] = now, None  # the others wait for this read
                try:
                    entries = yield from self._read_all(key, within)
                except BaseException:
                    self._read.pop(key, None)  # let another waiter read
                    raise
                self._read[key] = now, entries
            if entries is not None:
                return entries
            yield Sleep(_READ_PAUSE)

    def entries_of(self, key: str, lease_id: str, within: float | None) -> Operation[list[Waiter]]:
        """The entries with this lease id, of any process, dead or alive."""
        return [each for each in (yield from self._read_all(key, within)) if each.lease_id == lease_id]

    def _read_all(self, key: str, within: float | None) -> Operation[list[Waiter]]:
        found: list[Waiter] = []
        cursor: Mapping[str, Any] | None = None
        while True:
            reply: Reply = yield with_timeout(self.format.read_queue(key, None, cursor), within)
            found += self.format.waiters(reply.output)
            cursor = reply.output.get("LastEvaluatedKey")
            if not cursor:
                return found

    def _living(self, waiters: list[Waiter], reply: Reply, within: float | None) -> Operation[list[Waiter]]:
        """The waiters that are not proven to be dead (R3)."""
        silent = {
            each.place: each.process
            for each in waiters
            if each.process != self.own.process and self._is_dead(f"{each.key}/{each.place}", each, reply)
        }
        asked = sorted({process for process in silent.values() if process is not None})
        alive: set[str | None] = set()
        for request in self.format.batch_get(asked, consistent=True):
            answer: Reply = yield with_timeout(request, within)
            for record in self.format.batch_records(answer.output, answer.server_ms):
                # No process works under these leases, so no margin for clocks is needed.
                holders = {name: replace(each, cooling_down=True) for name, each in record.holders.items()}
                if len(self.observer.see(replace(record, holders=holders), answer)) < len(holders):
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
        """Whether the entry's own heartbeat has expired, judged as that of a holder.

        `cooling_down` leaves out the margin for clocks: a waiter that is skipped by mistake loses only its turn.
        """
        holder = Holder(
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
        return bool(self.observer.see(LockRecord(name, 1, 0, {name: holder}, 0), reply))

    def forget_old_reads(self, now: float) -> None:
        """Drop the reads that are too old to be used."""
        self._read = {key: read for key, read in list(self._read.items()) if now - read[0] < _RECENT}
        self.unused.forget_old(now)


def entry_id(waiter: Waiter) -> EntryId:
    """The entry of a waiter."""
    return waiter.key, waiter.place


def queue_positions(waiters: list[Waiter]) -> dict[str, QueuePosition]:
    """The position of each waiter in the queue, by its place."""
    return {
        waiter.place: QueuePosition(
            waiter.key,
            number + 1,
            len(waiters),
            waiters[number - 1] if number else None,
            waiter.expected_wait_ms,
        )
        for number, waiter in enumerate(waiters)
    }


def on_change(call: Callable[[QueuePosition], None]) -> Callable[[QueuePosition], None]:
    """A callback that passes on only positions that differ from the one before."""
    last: QueuePosition | None = None

    def call_if_new(position: QueuePosition) -> None:
        nonlocal last
        if position != last:
            last = position
            call(position)

    return call_if_new


def _is_passed(record: LockRecord | None, unused: int, waiter: Waiter, *, idle: bool) -> bool:
    """Whether waiters behind this one may pass over it: it could have taken slots, and has left them unused. A waiter
    for several locks may have to wait for another one of them.

    :param unused: slots that have been unused for a while.
    :param idle: the lock has no living holder, so it can have any capacity.
    """
    if record is None or not unused or waiter.set_size > 1:
        return False
    same_capacity = record.capacity == effective_capacity(waiter.capacity, record)
    return (same_capacity and waiter.slots <= unused) or (
        idle and unused >= min(waiter.slots, record.capacity)
    )


def _while_unused(head_update: HeadUpdate, record: LockRecord) -> HeadUpdate:
    """The head update of a grant that passes over waiters: no slot may have been granted since the lock was read.

    The write may arrive late, and the waiters ahead may have had no time to take the slots that are free then.
    """
    condition = f"{head_update.condition} AND #token = :unused_since"
    return replace(
        head_update, condition=condition, values={**head_update.values, ":unused_since": record.token}
    )


def _fits_behind(claim: Claim, ahead: list[Waiter], record: LockRecord | None) -> bool:
    """Whether the idle lock would have capacity for all these waiters and the claim."""
    return all(compatible(each.capacity, claim.capacity) for each in ahead) and (
        sum(each.slots for each in ahead) + claim.slots <= effective_capacity(claim.capacity, record)
    )


def head_update_of(
    record: LockRecord | None, mine: Waiter | None, ahead: list[Waiter], following: str | None
) -> HeadUpdate:
    """What a grant requires of the head, and how it changes the head, given the queue that was just read.

    The head must not be lower than the one that was read: a waiter that comes before those that were read lowers it.

    :param ahead: waiters of other claims that go first.
    :param following: the place after the claim's own; None if there is none.
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
    # A waiter may have taken the next ticket and not yet written its entry, so the head moves just behind this place.
    late = mine is not None and record.last_ticket > ticket_of(mine.place)
    head = following or (head_after(mine.place) if mine is not None and late else None)
    if head is None or (record.queue_head is not None and class_of(head) > class_of(record.queue_head)):
        # The claim was the last in the queue, or the head moves past places of higher priority. Both are right only if
        # no ticket was taken since the read. A record that was deleted and created again has no `last_ticket`.
        no_new_ticket = (
            "#last_ticket = :tickets" if record.last_ticket else "attribute_not_exists(#last_ticket)"
        )
        condition, values = f"{condition} AND {no_new_ticket}", {**values, ":tickets": record.last_ticket}
    return HeadUpdate(condition, head, values)
