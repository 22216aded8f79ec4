"""Reports to waiters which position they have in their queues (`on_position`).

Each report reads a whole queue. The poller makes reports in the pauses between its polls, so a lock that becomes free
does not wait for the reports of other locks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from airflow_dynamo_lock.core.effects import Callback, Operation, WaitForSlots
from airflow_dynamo_lock.core.model.errors import LockError
from airflow_dynamo_lock.core.model.record import LockRecord, QueuePosition
from airflow_dynamo_lock.core.queue.view import QueueReader, queue_positions
from airflow_dynamo_lock.log import log

# How often a queue is read again although the record of its lock has not changed, in seconds: a waiter behind the first
# one that gives up changes only the queue.
_QUEUE_EVERY = 10.0

#: What shows in a lock's record that its queue may have changed: the token, the last ticket, and the head.
_State = tuple[int, int, str | None]
_NO_RECORD: _State = (0, 0, None)


@dataclass
class PositionReports:
    """The reports to the waiters of one process and table. Times are monotonic seconds.

    :ivar reader: reads the queues.
    """

    reader: QueueReader
    # By key: the waiters that asked for reports and have a place in the queue.
    _asking: dict[str, list[WaitForSlots]] = field(default_factory=dict, init=False)
    # By key: the reports to make, the longest due first, with the state of a lock whose queue may have changed, or None
    # for a queue that was not read for a while.
    _due: dict[str, _State | None] = field(default_factory=dict, init=False)
    # By key: the state when positions were last reported, and the last ticket then.
    _reported: dict[str, _State] = field(default_factory=dict, init=False)
    _tickets: dict[str, int] = field(default_factory=dict, init=False)
    # When each queue was last read in which a waiter of this process has others ahead of it, and when reading them
    # again was last considered.
    _behind: dict[str, float] = field(default_factory=dict, init=False)
    _reread_at: float = field(default=0.0, init=False)

    def add(self, wants: WaitForSlots) -> None:
        """Report to this waiter, if it asks for reports and has a place in a queue."""
        if wants.on_position and wants.place:
            self._asking.setdefault(wants.key, []).append(wants)
            # Its entry may be newer than the last report, and the record does not change for it.
            self._reported.pop(wants.key, None)

    def remove(self, wants: WaitForSlots) -> None:
        """Report no more to this waiter."""
        self._reported.pop(wants.key, None)  # the waiters behind it move up
        asking = self._asking.get(wants.key, [])
        if wants in asking:
            asking.remove(wants)
        if not asking:
            for each in (self._asking, self._due, self._tickets, self._behind):
                each.pop(wants.key, None)

    def note(self, key: str, record: LockRecord | None) -> None:
        """Note a lock as it was just read: its queue may have changed since the last report."""
        if key in self._asking:
            state = _NO_RECORD if record is None else (record.token, record.last_ticket, record.queue_head)
            if self._reported.get(key) != state:
                self._due[key] = state

    def note_poll(self, now: float) -> None:
        """Note a poll: queues that were not read for a while are due, one a second, the longest unread first."""
        affordable = int(now - self._reread_at)
        if affordable:
            self._reread_at = now
            for key in sorted(self._behind, key=self._behind.__getitem__)[:affordable]:
                if now - self._behind[key] >= _QUEUE_EVERY:
                    self._due.setdefault(key, None)

    def __bool__(self) -> bool:
        """Whether a report is due."""
        return bool(self._due)

    def report(self, now: float) -> Operation[None]:
        """Make the report that is due for longest: read the queue, and call the waiters that asked for it."""
        key = next(iter(self._due))
        state = self._due.pop(key)
        self._behind[key] = now
        # Noted before the read: if a waiter is added or removed meanwhile, there is another report.
        if state is not None:
            if state[1] == self._tickets.get(key):
                self._reported[key] = state
            self._tickets[key] = state[1]  # the entry of a new ticket may not exist yet, so report once more
        try:
            entries = yield from self.reader.waiters(key)
        except LockError as failure:
            log.debug("Cannot read the queue of the lock %r: %s", key, failure)
            if state is not None:  # try again after the next poll
                self._reported.pop(key, None)
                self._tickets.pop(key, None)
            return
        asking = list(self._asking.get(key, ()))
        if not asking:  # the last one has been removed meanwhile
            return
        positions = queue_positions(entries)
        found = [(each, positions.get(each.place or "")) for each in asking]
        if not any(position is not None and position.number > 1 for _, position in found):
            self._behind.pop(key, None)
        for waiter, position in found:
            if position is not None and waiter.on_position:
                yield from _call(waiter.on_position, position)


def _call(on_position: Callable[[QueuePosition], None], position: QueuePosition) -> Operation[None]:
    try:
        yield Callback(partial(on_position, position))
    except Exception:  # the caller's own error, which must not end the other waiters
        log.exception("The on_position callback of a waiter for the lock %r failed.", position.key)
