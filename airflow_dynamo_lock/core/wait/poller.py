"""Many waiters, one poller (rule R11): who waits for what, what to read, and whom to wake.

Each process has one `Poller` per table. Its poller reads all the keys that anybody here waits for, 100 in a request,
and wakes only waiters whose lock came free, in the order in which they stand in line, and no more of them than there is
room for. Those who are far from the head of their line are looked after less often.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from airflow_dynamo_lock.core.effects import Callback, Operation, Reply, Sleep, WaitForSlots
from airflow_dynamo_lock.core.liveness import Observer
from airflow_dynamo_lock.core.model.capacity import can_grant, effective_capacity, free_slots
from airflow_dynamo_lock.core.model.errors import LockError, LockUnavailableError
from airflow_dynamo_lock.core.model.record import LockRecord
from airflow_dynamo_lock.core.queue.view import QueueReader, queue_positions
from airflow_dynamo_lock.core.table.format import Format
from airflow_dynamo_lock.core.table.position import class_of, ticket_of
from airflow_dynamo_lock.log import log

# Who stands so many places from the head of a line, or more, is looked after only every so many polls.
_NEAR, _SELDOM = 3, 4
# For so many polls those further back leave it to the first in line to take what is free. He may have gone.
_PATIENT = 2
# How much longer the poller waits while the table's stream tells it what has changed: times its interval, and seconds
# at most. It goes on, for what a stream may have lost.
_STREAM_SLOWDOWN = 10
_STREAM_SLOWEST = 30.0
# How often a queue is read again although the record of its lock has not changed, in seconds: a waiter behind the first
# one that gives up changes only the queue.
_QUEUE_EVERY = 10.0


@dataclass(eq=False)
class WaiterHandle:
    """One waiter's place.

    :ivar wake: called when there seems to be room; with an error when the poller cannot go on.
    """

    wants: WaitForSlots
    wake: Callable[[Exception | None], None]

    def is_for(self, wants: WaitForSlots) -> bool:
        """Whether that is waited for in this place: the same lock, and the same place in its line."""
        return (self.wants.key, self.wants.place) == (wants.key, wants.place)


@dataclass(eq=False)
class EndListener:
    """Somebody who is notified when a lease ends, such as the heartbeat task when another process releases the lease.

    :ivar gone: called each time that the lease seems to be gone or draining: with True if that is certain, with False
        if a read showed it that may be older than the lease.
    """

    key: str
    lease_id: str
    poll_interval: float
    gone: Callable[[bool], None]


@dataclass
class Poller:
    """The waiters of one process on one table. The driver guards it against concurrent use.

    :ivar wake_up: wakes the poller; the driver sets it.
    """

    format: Format
    observer: Observer
    reader: QueueReader
    tickets: dict[str, list[WaiterHandle]] = field(default_factory=dict)
    listeners: dict[str, list[EndListener]] = field(default_factory=dict)
    wake_up: Callable[[], None] = field(default=lambda: None)
    _pace: float = field(default=0.0, init=False)
    # Of each key: polls since it was read, polls between two reads, what was seen of its line when last told, and how
    # many numbers had been drawn then.
    _rounds: dict[str, int] = field(default_factory=dict, init=False)
    _pause: dict[str, int] = field(default_factory=dict, init=False)
    _reported: dict[str, object] = field(default_factory=dict, init=False)
    _drawn: dict[str, int] = field(default_factory=dict, init=False)
    # When each queue was last read in which a waiter of this process has others ahead of it, and when the poller last
    # considered reading them again.
    _behind: dict[str, float] = field(default_factory=dict, init=False)
    _reread_at: float = field(default=0.0, init=False)
    # What was free when it was last read, and for how many polls nobody has taken it.
    _unused: dict[str, tuple[object, int]] = field(default_factory=dict, init=False)
    # What the stream has told, and up to when it has told all; when each lock should be looked at for a dead holder.
    _changed: set[str] = field(default_factory=set, init=False)
    _confirmed_until: float = field(default=-math.inf, init=False)
    _due: dict[str, float] = field(default_factory=dict, init=False)
    _now: float = field(default=0.0, init=False)
    _polled_at: float = field(default=-math.inf, init=False)

    def add(self, place: WaiterHandle | EndListener) -> bool:
        """Take a place at the end of the key's queue. True if the poller, should it be asleep, sleeps too long."""
        if isinstance(place, WaiterHandle):
            self.tickets.setdefault(place.wants.key, []).append(place)
            if place.wants.on_position and place.wants.place:
                # He may have come to stand after his number was seen, so that nothing changes any more that would tell.
                self._reported.pop(place.wants.key, None)
            return self._look_again({place.wants.key}) or place.wants.poll_interval < self._pace
        self.listeners.setdefault(place.key, []).append(place)
        return self._look_again({place.key}) or place.poll_interval < self._pace

    def remove(self, place: WaiterHandle | EndListener) -> None:
        """Give the place up; a key that nobody looks at is no longer read."""
        if isinstance(place, WaiterHandle):
            _drop(self.tickets, place.wants.key, place)
            self._reported.pop(place.wants.key, None)  # those behind it move up
            if place.wants.key not in self.tickets:
                for each in (self._rounds, self._pause, self._drawn, self._behind, self._unused):
                    each.pop(place.wants.key, None)
        else:
            _drop(self.listeners, place.key, place)

    def __bool__(self) -> bool:
        return bool(self.tickets or self.listeners)

    @property
    def interval(self) -> float:
        """Seconds between polls: that of the most impatient."""
        intervals = [ticket.wants.poll_interval for queue in self.tickets.values() for ticket in queue]
        intervals += [sight.poll_interval for seen in self.listeners.values() for sight in seen]
        return min(intervals, default=1.0)

    def poll(self) -> Operation[None]:
        """Read and wake for as long as anybody waits."""
        while self:
            wanted, consistent = yield from self._next()
            for request in self.format.batch_get(wanted, consistent=consistent):
                keys = self.format.asked_for(request)
                try:
                    reply: Reply = yield request
                except LockUnavailableError as unavailable:
                    log.warning("Cannot see the locks that are waited for, trying again: %s", unavailable)
                    self._look_again(keys)
                    continue
                except Exception as failure:  # also one that nobody has thought of: none may wait for ever
                    self.fail(failure)
                    continue
                self._now = reply.received_at
                records = {
                    each.key: each for each in self.format.batch_records(reply.output, reply.server_ms)
                }
                unprocessed = self.format.unprocessed_keys(reply.output)
                self._look_again(unprocessed)
                for key in keys - unprocessed:
                    self._seen(key, records.get(key), reply)
                    yield from self._tell_places(key, records.get(key))
            yield from self._tell_again()

    def _near(self) -> set[str]:
        """The keys to read in a poll. Where nobody here is near the head of the line, not in each."""
        near = set(self.listeners)
        for key in self.tickets:
            self._rounds[key] = self._rounds.get(key, 0) + 1
            if self._rounds[key] >= self._pause.get(key, 1):
                self._rounds[key] = 0
                near.add(key)
        return near

    def _tell_places(self, key: str, record: LockRecord | None) -> Operation[None]:
        """Report the positions in a queue if the record shows that they may have changed."""
        drawn = 0 if record is None else record.last_ticket
        now = None if record is None else (record.token, drawn, record.queue_head)
        if self._reported.get(key) != now and (yield from self._tell(key)):
            if drawn == self._drawn.get(key):
                self._reported[key] = now
            self._drawn[key] = drawn  # who has just drawn one may not stand there yet: look once more

    def _tell_again(self) -> Operation[None]:
        """Report the positions in queues that were not read for a while: one a second, the longest unread first."""
        affordable = int(self._now - self._reread_at)
        if not affordable:
            return
        self._reread_at = self._now
        for key in sorted(self._behind, key=self._behind.__getitem__)[:affordable]:
            if self._now - self._behind.get(key, self._now) >= _QUEUE_EVERY:
                yield from self._tell(key)

    def _tell(self, key: str) -> Operation[bool]:
        """Read a queue and report their positions to the waiters that asked for them. False if nothing was read."""
        told = [each for each in self.tickets.get(key, ()) if each.wants.on_position and each.wants.place]
        self._behind.pop(key, None)
        if not told:
            return False
        self._behind[key] = self._now
        try:
            waiters = yield from self.reader.waiters(key)
        except LockError as failure:
            log.debug("Cannot see who waits for the lock %r: %s", key, failure)
            return False
        where_is = queue_positions(waiters)
        found = [(each, where_is.get(each.wants.place or "")) for each in told]
        if not any(where is not None and where.number > 1 for _, where in found):
            self._behind.pop(key, None)
        for ticket, where in found:
            if where is not None and ticket.wants.on_position:
                try:
                    yield Callback(partial(ticket.wants.on_position, where))
                except Exception:  # his own, and nobody else's
                    log.exception("The on_position of one who waits for the lock %r has failed.", key)
        return True

    # -- the table's stream, where one is read (`streams.py`) ---------------------------------------------------

    def changed(self, keys: Iterable[str] | None = None) -> None:
        """Read these keys now, as far as anybody here looks at them; all of them by default."""
        watched = self.tickets.keys() | self.listeners.keys()
        self._changed |= watched if keys is None else watched & set(keys)
        if self._changed:
            self.wake_up()

    def confirmed(self, until: float | None) -> None:
        """All changes up to then, monotonic seconds, have been told. None: the stream tells nothing any more."""
        if until is None and self._confirmed_until > -math.inf:
            self.wake_up()
        self._confirmed_until = -math.inf if until is None else until

    def _look_again(self, keys: set[str]) -> bool:
        """Have keys read of whose last change nobody will tell: it may have been told before anybody wanted to know, or
        could not be read then. False if they are read anyway, because there is no stream."""
        if self._confirmed_until == -math.inf:
            return False
        self._changed |= keys
        return True

    def stretched(self, seconds: float) -> float:
        """A pause, longer by up to a quarter, so that the pollers of many processes do not fall into step."""
        return seconds * (1 + self.reader.own.stamp().jitter / 4)

    def _next(self) -> Operation[tuple[set[str], bool]]:
        """Sleep until there is something to read: the keys, and whether an old answer will not do."""
        while True:
            self._pace = self.interval
            due = min(self._due.values(), default=math.inf) - self._now
            now = yield Sleep(max(0.0, min(self.stretched(self._pace), due)))
            watched = self.tickets.keys() | self.listeners.keys()
            # Nobody writes to say that a holder has died.
            changed = self._changed | {key for key, at in self._due.items() if at <= now}
            self._due = {key: at for key, at in self._due.items() if at > now and key in self.tickets}
            self._changed, self._now = set(), now
            hears = now - self._confirmed_until <= self._pace
            calm = max(self._pace, min(self._pace * _STREAM_SLOWDOWN, _STREAM_SLOWEST))
            if not (watched and hears and now - self._polled_at < calm):
                self._polled_at = now
                return self._near() | (changed & watched), bool(changed)
            if changed & watched:
                return changed & watched, True

    def ended(self, key: str, lease_id: str) -> None:
        """This process has just ended a lease: who keeps it here need not wait for a poll to know. Nor need the first
        of those here who stand in line: if he is the next, nobody may be quicker.

        The others here do wait for it. Woken at once, they would always be quicker than those in other processes, and
        a busy deployment would never let another have its turn.
        """
        for sight in self.listeners.get(key, ()):
            if sight.lease_id == lease_id:
                sight.gone(True)
        in_line = [ticket for ticket in self.tickets.get(key, ()) if ticket.wants.place is not None]
        if in_line:
            min(in_line, key=lambda each: each.wants.place or "").wake(None)

    def fail(self, failure: Exception) -> None:
        """Nobody here can go on waiting."""
        for queue in list(self.tickets.values()):
            for ticket in queue:
                ticket.wake(failure)

    def _seen(self, key: str, record: LockRecord | None, reply: Reply) -> None:
        for sight in self.listeners.get(key, ()):
            holder = record.holders.get(sight.lease_id) if record else None
            if holder is None or holder.draining:
                sight.gone(False)
        queue = self.tickets.get(key, [])
        if record is not None:
            dead = self.observer.see(record, reply)
            left = free_slots(record, dead)
            self._pause[key] = _pause(record, queue, left)
            patient = self._is_patient(key, record, left)
            if self._confirmed_until > -math.inf:
                # What is free, and is taken by nobody, changes nothing that the stream could tell.
                soon = self._now + self.interval if left > 0 and queue else math.inf
                self._due[key] = min(soon, self.observer.next_death(record, reply))
            for ticket in queue:
                place = ticket.wants.place
                if place is not None and (record.queue_head is None or record.queue_head > place):
                    ticket.wake(None)  # others have taken him for gone: he is to say that he is there
        taken = False
        for ticket in sorted(queue, key=lambda each: each.wants.place or ""):
            wants = ticket.wants
            if record is None:
                enough = not (taken and wants.takes)
            elif wants.capacity is None or effective_capacity(wants.capacity, record) == record.capacity:
                # Somebody who wants more than there is at all is woken too: to be told so.
                needs = min(wants.slots, max(1, record.capacity))
                enough = left >= needs
                if enough and wants.place is not None and patient:
                    enough = _may_be_next(wants.place, needs, record, left)
                if enough and wants.takes:
                    left -= needs
            else:
                enough = not taken and can_grant(record, dead, wants.slots, wants.capacity, takes=wants.takes)
            if enough:
                ticket.wake(None)
                taken = taken or wants.takes
            elif wants.place is not None:
                break  # nobody overtakes him

    def _is_patient(self, key: str, record: LockRecord, left: int) -> bool:
        """Whether those behind others in line still leave it to them to take what is free. After a few polls in which
        nobody has, they look for themselves who is alive."""
        now = (record.token, record.queue_head, left)
        before, polls = self._unused.get(key, (None, 0))
        polls = polls + 1 if before == now and left > 0 else 0
        self._unused[key] = (now, polls % _PATIENT)
        return polls < _PATIENT


def _may_be_next(place: str, needs: int, record: LockRecord, left: int) -> bool:
    """Whether there may be room for one in that place, and for all who stand before it."""
    if record.queue_head is None or class_of(place) < class_of(record.queue_head):
        return True
    if class_of(place) > class_of(record.queue_head):
        return False
    return left >= max(0, ticket_of(place) - ticket_of(record.queue_head)) + needs


def _pause(record: LockRecord, queue: list[WaiterHandle], left: int) -> int:
    """How many polls it takes until the key is read again. Not each one, if all who wait here stand far from the head
    of the line, and there is nothing to take."""
    places = [each.wants.place for each in queue]
    if left > 0 or record.queue_head is None or not places or not all(places):
        return 1
    # Some of those between may have gone: then the lock is seen to be free a few polls later.
    return (
        _SELDOM
        if min(ticket_of(place or "") for place in places) > ticket_of(record.queue_head) + _NEAR
        else 1
    )


def _drop(places: dict[str, list], key: str, place: object) -> None:  # type: ignore[type-arg]
    queue = places.get(key, [])
    if place in queue:
        queue.remove(place)
    if not queue:
        places.pop(key, None)
