"""R11 (shared poller): all waiters of one process and table share one poller.

The poller reads the keys of all waiters, 100 per request. It wakes waiters in the order of their queue, and no more of
them than the lock has free slots. It reads a lock more often if a waiter here is the first in its queue, or if its free
slots are not taken, and less often if all waiters here are far from the head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import thread_time

from airflow_dynamo_lock.core.effects import Operation, Reply, Sleep, WaitForSlots
from airflow_dynamo_lock.core.liveness import Observer
from airflow_dynamo_lock.core.model.capacity import effective_capacity, free_slots, should_wake
from airflow_dynamo_lock.core.model.errors import LockUnavailableError
from airflow_dynamo_lock.core.model.record import LockRecord
from airflow_dynamo_lock.core.queue.view import QueueReader
from airflow_dynamo_lock.core.table.format import Format
from airflow_dynamo_lock.core.table.position import class_of, head_at, ticket_of
from airflow_dynamo_lock.core.wait.positions import PositionReports
from airflow_dynamo_lock.events import notify
from airflow_dynamo_lock.log import log

# A lock is read only in every second poll if all its waiters are more than three tickets from the head.
_NEAR, _SELDOM = 3, 2
# While the first waiter of a queue is here, or free slots are not taken, the lock is read at least this many times in
# an interval of at least this many seconds, and at least once a second, unless the process has more such locks than
# this.
_QUICK, _QUICK_FROM, _MAX_QUICK = 4, 1.0, 25
# While the table's stream reports changes, the poller reads all keys at this multiple of its interval, and at least
# once in `_STREAM_SLOWEST` seconds, in case the stream lost something.
_STREAM_SLOWDOWN = 10
_STREAM_SLOWEST = 30.0


@dataclass(eq=False)
class WaiterHandle:
    """One waiter.

    :ivar wants: what it waits for.
    :ivar wake: called when the lock seems to have enough free slots; with an error if the poller fails.
    """

    wants: WaitForSlots
    wake: Callable[[Exception | None], None]

    def is_for(self, wants: WaitForSlots) -> bool:
        """Whether this waiter waits for the same lock in the same place of its queue."""
        return (self.wants.key, self.wants.place) == (wants.key, wants.place)


@dataclass(eq=False)
class EndListener:
    """A caller to notify when a lease ends, such as the heartbeat task when another process releases the lease.

    :ivar gone: called each time that the lease seems to be gone or draining: with True if that is certain, with False
        if a read showed it that may be older than the lease.
    """

    key: str
    lease_id: str
    poll_interval: float
    gone: Callable[[bool], None]


@dataclass
class Poller:
    """The poller of one process and table. The driver guards it against concurrent use.

    :ivar waiters: the waiters for each key.
    :ivar listeners: the callers to notify of the end of a lease, for each key.
    :ivar wake_up: wakes the sleeping poller; the driver sets it.
    :ivar positions: the reports of positions to the waiters.
    """

    format: Format
    observer: Observer
    reader: QueueReader
    waiters: dict[str, list[WaiterHandle]] = field(default_factory=dict)
    listeners: dict[str, list[EndListener]] = field(default_factory=dict)
    wake_up: Callable[[], None] = field(default=lambda: None)
    positions: PositionReports = field(init=False)
    _pace: float = field(default=0.0, init=False)
    # By key: number of polls since the lock was last read, and the pause between two reads, in polls.
    _rounds: dict[str, int] = field(default_factory=dict, init=False)
    _pause: dict[str, int] = field(default_factory=dict, init=False)
    # The keys that are read more often, and the number of quick polls since the last poll of all keys.
    _quick: set[str] = field(default_factory=set, init=False)
    _quick_polls: int = field(default=0, init=False)
    # The keys that the stream reported, the time up to which it reported all changes, and when to read each lock again
    # because a holder may have died.
    _changed: set[str] = field(default_factory=set, init=False)
    _reported_until: float = field(default=-math.inf, init=False)
    _due: dict[str, float] = field(default_factory=dict, init=False)
    _now: float = field(default=0.0, init=False)
    _polled_at: float = field(default=-math.inf, init=False)

    def __post_init__(self) -> None:
        self.positions = PositionReports(self.reader)

    def add(self, added: WaiterHandle | EndListener) -> bool:
        """Add a waiter or a listener. True if a sleeping poller must be woken for it."""
        if isinstance(added, WaiterHandle):
            self.waiters.setdefault(added.wants.key, []).append(added)
            self.positions.add(added.wants)
            return self._read_soon({added.wants.key}) or added.wants.poll_interval < self._pace
        self.listeners.setdefault(added.key, []).append(added)
        return self._read_soon({added.key}) or added.poll_interval < self._pace

    def remove(self, removed: WaiterHandle | EndListener) -> None:
        """Remove a waiter or a listener. A key without any is not read any more."""
        if isinstance(removed, WaiterHandle):
            _drop(self.waiters, removed.wants.key, removed)
            self.positions.remove(removed.wants)
            if removed.wants.key not in self.waiters:
                self._quick.discard(removed.wants.key)
                for each in (self._rounds, self._pause):
                    each.pop(removed.wants.key, None)
        else:
            _drop(self.listeners, removed.key, removed)

    def __bool__(self) -> bool:
        return bool(self.waiters or self.listeners)

    @property
    def interval(self) -> float:
        """Seconds between polls: the shortest interval that a waiter or a listener asks for."""
        intervals = [waiter.wants.poll_interval for queue in self.waiters.values() for waiter in queue]
        intervals += [each.poll_interval for listeners in self.listeners.values() for each in listeners]
        return min(intervals, default=1.0)

    def poll(self) -> Operation[None]:
        """Read the locks and wake waiters, while there are any waiters or listeners."""
        while self:
            wanted, consistent = yield from self._next()
            for request in self.format.batch_get(sorted(wanted), consistent=consistent):
                keys = self.format.asked_for(request)
                try:
                    reply: Reply = yield request
                except LockUnavailableError as unavailable:
                    log.warning("Cannot read the locks that tasks wait for, trying again: %s", unavailable)
                    self._read_soon(keys)
                    continue
                except Exception as failure:  # also an unexpected one: no waiter may wait for ever
                    self.fail(failure)
                    if keys & self.listeners.keys():
                        log.warning("Cannot read whether leases have ended, trying again: %s", failure)
                    continue
                self._now, begun = reply.received_at, thread_time()
                records = {
                    each.key: each for each in self.format.batch_records(reply.output, reply.server_ms)
                }
                unprocessed = self.format.unprocessed_keys(reply.output)
                self._read_soon(unprocessed)
                spent = thread_time() - begun
                for key in sorted(keys - unprocessed):
                    begun = thread_time()
                    self._notify(key, records.get(key), reply)
                    spent += thread_time() - begun
                    self.positions.note(key, records.get(key))
                notify("waiting", value=lambda: sum(map(len, self.waiters.values())))
                notify("poll_cpu", value=spent)
            self.positions.note_poll(self._now)
        notify("waiting", value=0)

    def _near(self) -> set[str]:
        """The keys to read in this poll: all but those whose waiters are all far from the head of the queue."""
        near = set(self.listeners)
        for key in self.waiters:
            self._rounds[key] = self._rounds.get(key, 0) + 1
            if self._rounds[key] >= self._pause.get(key, 1):
                self._rounds[key] = 0
                near.add(key)
        return near

    def _report_positions(self, pause: float) -> Operation[float]:
        """Report positions in a pause between two polls: one at least, and as many as there is time for.

        :param pause: how long the pause is, in seconds.
        :returns: how much of the pause is left.
        """
        if not self.positions:
            return pause
        begun = now = self.reader.own.stamp().at
        while self.positions:
            yield from self.positions.report(now)
            now = self.reader.own.stamp().at
            if now - begun >= pause or self._changed:
                break
        return max(0.0, pause - (now - begun))

    # -- changes that the table's stream reports (`stream.py`) ---------------------------------------------------

    def changed(self, keys: Iterable[str] | None = None) -> None:
        """Read these keys now, if they have waiters or listeners. None reads all keys."""
        watched = self.waiters.keys() | self.listeners.keys()
        self._changed |= watched if keys is None else watched & set(keys)
        if self._changed:
            self.wake_up()

    def reported_until(self, until: float | None) -> None:
        """All changes up to this time (monotonic seconds) have been reported. None: the stream cannot be read."""
        if until is None and self._reported_until > -math.inf:
            self.wake_up()
        self._reported_until = -math.inf if until is None else until

    def _read_soon(self, keys: set[str]) -> bool:
        """Read keys whose last change may have been missed: it was reported before they had waiters, or a read failed.
        False without a stream, since the next poll reads them anyway."""
        if not self._has_stream:
            return False
        self._changed |= keys
        return True

    def stretched(self, seconds: float) -> float:
        """A pause, longer by up to a quarter, so that the pollers of many processes do not fall into step."""
        return seconds * (1 + self.reader.own.stamp().jitter / 4)

    def _next(self) -> Operation[tuple[set[str], bool]]:
        """Report positions and sleep until there is something to read. Returns the keys, and whether to read
        consistently."""
        while True:
            self._pace = self.interval
            polls = self._polls_per_interval()
            pause = self.stretched(self._pace) / polls
            due = min(self._due.values() if self._has_stream else (), default=math.inf) - self._now
            now = yield Sleep((yield from self._report_positions(max(0.0, min(pause, due)))))
            self._quick_polls = (self._quick_polls + 1) % polls
            if self._quick_polls and self._quick:
                self._now = now
                return set(self._quick), False
            watched = self.waiters.keys() | self.listeners.keys()
            # The death of a holder is no change that a stream could report.
            due_now = {key for key, at in self._due.items() if at <= now} if self._has_stream else set()
            changed = self._changed | due_now
            self._due = {
                key: at for key, at in self._due.items() if key in self.waiters and key not in due_now
            }
            self._changed, self._now = set(), now
            follows_stream = now - self._reported_until <= self._pace
            calm = max(self._pace, min(self._pace * _STREAM_SLOWDOWN, _STREAM_SLOWEST))
            if not (watched and follows_stream and now - self._polled_at < calm):
                self._polled_at = now
                return self._near() | (changed & watched), bool(changed)
            if changed & watched:
                return changed & watched, True

    @property
    def _has_stream(self) -> bool:
        """Whether the stream reports changes, as far as the poller knows."""
        return self._reported_until > -math.inf

    def _polls_per_interval(self) -> int:
        """How often to read the locks in `_quick` in an interval. The stream is faster."""
        quickly = 0 < len(self._quick) <= _MAX_QUICK and self._pace >= _QUICK_FROM and not self._has_stream
        return max(_QUICK, math.ceil(self._pace)) if quickly else 1

    def ended(self, key: str, lease_id: str) -> None:
        """This process has ended a lease. Notify its listeners at once, and wake the first waiter here that has a place
        in the queue: if it is the next one, no other waiter may be granted first.

        The other waiters wait for the poll. Woken at once, they would always be faster than those of other processes,
        and a busy deployment would never let another one have its turn.
        """
        for listener in self.listeners.get(key, ()):
            if listener.lease_id == lease_id:
                listener.gone(True)
        queued = [waiter for waiter in self.waiters.get(key, ()) if waiter.wants.place is not None]
        if queued:
            min(queued, key=lambda each: each.wants.place or "").wake(None)

    def fail(self, failure: Exception) -> None:
        """Wake all waiters with an error."""
        for queue in list(self.waiters.values()):
            for waiter in queue:
                waiter.wake(failure)

    def _notify(self, key: str, record: LockRecord | None, reply: Reply) -> None:
        """Notify the listeners and wake the waiters that a lock, as it was just read, concerns."""
        for listener in self.listeners.get(key, ()):
            if record is None or not record.is_held(listener.lease_id):
                listener.gone(False)
        queue = self.waiters.get(key, [])
        if record is not None:
            for waiter in queue:
                if waiter.wants.lease_id in record.removals:
                    waiter.wake(None)  # its attempt ends with the reason
            dead = self.observer.see(record, reply)
            left = free_slots(record, dead)
            self._pause[key] = _pause(record, queue, left)
            untaken = left > 0 and any(each.wants.place is not None for each in queue)
            (self._quick.add if untaken or _has_first(record, queue) else self._quick.discard)(key)
            unused = self.reader.unused.see(record, left, reply)
            leaves_to_first = not (unused and self.reader.unused.claims(key, self._now))
            if queue:
                # Slots that stay free are no change that the stream could report. Noted without a stream as well,
                # because it may begin to report changes before the next poll.
                soon = self._now + self.interval if left > 0 else math.inf
                self._due[key] = min(soon, self.observer.next_death(record, reply))
            for waiter in queue:
                place = waiter.wants.place
                if place is not None and (record.queue_head is None or record.queue_head > place):
                    waiter.wake(None)  # others have skipped it as dead, so it must lower the head
        taken = False
        for waiter in sorted(queue, key=lambda each: each.wants.place or ""):
            wants = waiter.wants
            if record is None:
                enough = not (taken and wants.takes)
            elif wants.capacity is None or effective_capacity(wants.capacity, record) == record.capacity:
                # A waiter for more slots than the lock has is woken too, and gets an error.
                needs = min(wants.slots, max(1, record.capacity))
                enough = left >= needs
                if enough and wants.place is not None and leaves_to_first:
                    enough = _may_be_next(wants.place, needs, record, left)
                if enough and wants.takes:
                    left -= needs
            else:
                enough = not taken and should_wake(
                    record, dead, wants.slots, wants.capacity, takes=wants.takes
                )
            if enough:
                waiter.wake(None)
                taken = taken or wants.takes
            elif wants.place is not None:
                break  # no waiter overtakes it


def _may_be_next(place: str, needs: int, record: LockRecord, left: int) -> bool:
    """Whether the free slots may suffice for the waiter in this place and one slot for each waiter before it."""
    if record.queue_head is None or class_of(place) < class_of(record.queue_head):
        return True
    if class_of(place) > class_of(record.queue_head):
        return False
    return left >= max(0, ticket_of(place) - ticket_of(record.queue_head)) + needs


def _has_first(record: LockRecord, queue: list[WaiterHandle]) -> bool:
    """Whether one of these waiters is the first in the queue of the lock."""
    head = record.queue_head
    return head is not None and any(
        each.wants.place is not None and head_at(each.wants.place) <= head_at(head) for each in queue
    )


def _pause(record: LockRecord, queue: list[WaiterHandle], left: int) -> int:
    """Number of polls until the key is read again: more than one if no slot is free and all waiters here are far from
    the head of the queue. Some waiters between may have gone, so the lock may be seen to be free a few polls late."""
    places = [each.wants.place for each in queue]
    if left > 0 or record.queue_head is None or not places or not all(places):
        return 1
    first = min(ticket_of(place or "") for place in places)
    return _SELDOM if first > ticket_of(record.queue_head) + _NEAR else 1


def _drop(places: dict[str, list], key: str, place: object) -> None:  # type: ignore[type-arg]
    """Remove a waiter or a listener, and the key with the last one."""
    queue = places.get(key, [])
    if place in queue:
        queue.remove(place)
    if not queue:
        places.pop(key, None)
