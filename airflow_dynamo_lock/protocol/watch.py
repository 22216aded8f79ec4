"""Many waiters, one poller (rule R11): who waits for what, what to read, and whom to wake.

Each process has one `Watch` per table. Its poller reads all the keys that anybody here waits for, 100 in a request,
and wakes only waiters whose lock came free, in the order they came, and no more of them than there is room for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from airflow_dynamo_lock.protocol.effects import Operation, Reply, Sleep, WaitForRoom
from airflow_dynamo_lock.protocol.errors import LockUnavailableError
from airflow_dynamo_lock.protocol.model import LockRecord
from airflow_dynamo_lock.protocol.native import NativeFormat
from airflow_dynamo_lock.protocol.operations import log, room
from airflow_dynamo_lock.protocol.staleness import Observer


@dataclass(eq=False)
class Ticket:
    """One waiter's place.

    :ivar wake: called when there seems to be room; with an error when the poller cannot go on.
    """

    wants: WaitForRoom
    wake: Callable[[Exception | None], None]


@dataclass(eq=False)
class Sight:
    """One who wants to know when a lease ends, such as its keeper when another process releases it.

    :ivar gone: called each time that the lease is not among the holders, or is ending, as far as can be seen; with True
        if that is certain, with False if a read showed it that may be older than the lease.
    """

    key: str
    lease_id: str
    poll_interval: float
    gone: Callable[[bool], None]


@dataclass
class Watch:
    """The waiters of one process on one table. The driver guards it against concurrent use."""

    format: NativeFormat
    observer: Observer
    tickets: dict[str, list[Ticket]] = field(default_factory=dict)
    sights: dict[str, list[Sight]] = field(default_factory=dict)
    _pace: float = field(default=0.0, init=False)

    def add(self, place: Ticket | Sight) -> bool:
        """Take a place at the end of the key's queue. True if the poller, should it be asleep, sleeps too long."""
        if isinstance(place, Ticket):
            self.tickets.setdefault(place.wants.key, []).append(place)
            return place.wants.poll_interval < self._pace
        self.sights.setdefault(place.key, []).append(place)
        return place.poll_interval < self._pace

    def remove(self, place: Ticket | Sight) -> None:
        """Give the place up; a key that nobody looks at is no longer read."""
        if isinstance(place, Ticket):
            _drop(self.tickets, place.wants.key, place)
        else:
            _drop(self.sights, place.key, place)

    def __bool__(self) -> bool:
        return bool(self.tickets or self.sights)

    @property
    def interval(self) -> float:
        """Seconds between polls: that of the most impatient."""
        intervals = [ticket.wants.poll_interval for queue in self.tickets.values() for ticket in queue]
        intervals += [sight.poll_interval for seen in self.sights.values() for sight in seen]
        return min(intervals, default=1.0)

    def poll(self, jitter: Callable[[], float]) -> Operation[None]:
        """Read and wake for as long as anybody waits.

        :param jitter: draws from 0…1. Intervals are stretched by up to a quarter of it, so that the pollers of many
            processes do not fall into step.
        """
        while self:
            self._pace = self.interval
            yield Sleep(self._pace * (1 + jitter() / 4))
            for request in self.format.batch_get(self.tickets.keys() | self.sights.keys()):
                keys = {
                    each["key"]["S"] for each in request.params["RequestItems"][self.format.table]["Keys"]
                }
                try:
                    reply: Reply = yield request
                except LockUnavailableError as unavailable:
                    log.warning("Cannot see the locks that are waited for, trying again: %s", unavailable)
                    continue
                except Exception as failure:  # also one that nobody has thought of: none may wait for ever
                    self.fail(failure)
                    continue
                records = {
                    each.key: each for each in self.format.batch_records(reply.output, reply.server_ms)
                }
                for key in keys - self.format.unprocessed_keys(reply.output):
                    self._seen(key, records.get(key), reply)

    def ended(self, key: str, lease_id: str) -> None:
        """This process has just ended a lease: who keeps it here need not wait for a poll to know.

        The waiters here do wait for it. Woken at once, they would always be quicker than those in other processes, and
        a busy deployment would never let another have its turn.
        """
        for sight in self.sights.get(key, ()):
            if sight.lease_id == lease_id:
                sight.gone(True)

    def fail(self, failure: Exception) -> None:
        """Nobody here can go on waiting."""
        for queue in list(self.tickets.values()):
            for ticket in queue:
                ticket.wake(failure)

    def _seen(self, key: str, record: LockRecord | None, reply: Reply) -> None:
        for sight in self.sights.get(key, ()):
            holder = record.holders.get(sight.lease_id) if record else None
            if holder is None or holder.ending:
                sight.gone(False)
        left: float = float("inf")
        most: float = float("inf")
        if record is not None:
            left, most = room(record, self.observer.see(record, reply)), record.capacity
        taken = False
        for ticket in self.tickets.get(key, ()):
            # Somebody who wants more than there is at all is woken too: to be told so.
            needs = min(ticket.wants.slots, most)
            if left < needs or (record is None and taken and ticket.wants.takes):
                continue
            ticket.wake(None)
            if ticket.wants.takes:
                left, taken = left - needs, True


def _drop(places: dict[str, list], key: str, place: object) -> None:  # type: ignore[type-arg]
    queue = places.get(key, [])
    if place in queue:
        queue.remove(place)
    if not queue:
        places.pop(key, None)
