"""Effects: the requests, sleeps and waits that an operation asks its driver for.

An operation is a generator: ``reply = yield request``. A driver (`client/threads.py`, `client/tasks.py`, or a
simulator) carries out each effect and sends the answer in; if the effect fails, the driver throws a typed error in.
In effects and replies, ``…_at`` is a time in seconds on the driver's monotonic clock, which keeps counting while the
machine sleeps. ``…_ms`` is in milliseconds: a duration, such as ``lease_ms``, or a time since the epoch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from zlib import crc32

from airflow_dynamo_lock.core.model.limits import MARGIN

if TYPE_CHECKING:
    from airflow_dynamo_lock.core.model.record import QueuePosition

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """One call of the DynamoDB API, in the SDK's own terms. Answered by `Reply`.

    :ivar action: API action, for example ``UpdateItem``.
    :ivar params: parameters of the action; attribute values are in DynamoDB's typed form.
    :ivar within: timeout in seconds; None leaves it to the SDK's timeouts.
    """

    action: str
    params: Mapping[str, Any]
    within: float | None = None


def with_timeout(request: Request, within: float | None) -> Request:
    """The request with this timeout; unchanged if `within` is None."""
    return request if within is None else Request(request.action, request.params, within)


@dataclass(frozen=True)
class Reply:
    """The answer to a `Request`.

    :ivar output: the SDK's response. For a refused write, ``{"Item": …}`` if DynamoDB returned the item.
    :ivar server_ms: ``Date`` header of this response, epoch milliseconds; None if it had none.
    :ivar refused: the write's condition did not hold, so *the last attempt* changed nothing.
    :ivar retried: the SDK sent the request more than once, so an earlier attempt may have been applied.
    """

    output: Mapping[str, Any]
    sent_at: float
    received_at: float
    server_ms: int | None = None
    refused: bool = False
    retried: bool = False


@dataclass(frozen=True)
class Sleep:
    """Pause for this number of seconds. Answered by the time at its end (monotonic seconds)."""

    seconds: float


@dataclass(frozen=True)
class WaitForSlots:
    """Wait until the shared poller (`core/wait/poller.py`) sees enough free slots, or until the timeout.

    Answered by the time at its end (monotonic seconds). A woken waiter still has to try: only a write decides.

    :ivar slots: number of slots that the waiter needs.
    :ivar takes: the waiter acquires the slots when woken, so waiters behind it are not woken for the same slots.
    :ivar seconds: timeout; None waits without a limit.
    :ivar capacity: capacity that the waiter claims; None for a waiter that acquires nothing and accepts any capacity.
    :ivar place: the waiter's place in the queue, as in `core.table.position`; None if it has none.
    :ivar lease_id: lease id in the waiter's entry in the queue; None if it has none.
    :ivar on_position: called with the position in the queue whenever it may have changed.
    """

    key: str
    slots: int
    takes: bool
    poll_interval: float
    seconds: float | None
    capacity: int | None = None
    place: str | None = None
    lease_id: str | None = None
    on_position: Callable[[QueuePosition], None] | None = None


@dataclass(frozen=True)
class Callback:
    """Run a caller's function outside of the operation's error handling. The driver throws in what it raises."""

    call: Callable[[], None]


@dataclass(frozen=True)
class Stamp:
    """The id and the time of one write attempt.

    Every attempt gets a new stamp: a second attempt under the *same* version would not prove to observers that the
    holder was alive at that time (R3, proof of death).

    :ivar version: fresh random id.
    :ivar server_ms: DynamoDB's time as this process estimates it, epoch milliseconds; None before the first ``Date``.
    :ivar host_ms: the host's wall clock, epoch milliseconds. For people to read, never to decide whether a holder died.
    :ivar at: when the stamp was made, monotonic seconds. The lease counts from then, not from when the write was sent:
        the process may be stopped in between, and other processes judge by the record (R4, the holder gives up first).
    :ivar answered: this process has received a response before. If it still knows no server time, responses have none.
    :ivar age: seconds since the estimate was last corrected; the host's clock has drifted since.
    """

    version: str
    server_ms: int | None
    host_ms: int
    at: float
    answered: bool = True
    age: float = 0.0

    def is_fresh(self, most_ms: int) -> bool:
        """Whether the estimate is at most `most_ms` old, or no response ever has a ``Date``."""
        return self.answered and (self.server_ms is None or self.age * 1000 <= most_ms)

    @property
    def best_ms(self) -> int:
        """Server time where known, else the host's clock."""
        return self.host_ms if self.server_ms is None else self.server_ms

    @property
    def undated(self) -> bool:
        """Whether this process has received responses, and none of them had a ``Date``."""
        return self.answered and self.server_ms is None

    @property
    def jitter(self) -> float:
        """A number from 0 to 1, as random as the version. It keeps the pauses of many processes out of step."""
        return crc32(self.version.encode()) / 2**32


Effect = Request | Sleep | WaitForSlots | Callback
Operation = Generator[Effect, Any, T]


@dataclass
class ServerClock:
    """Estimate of DynamoDB's time: the last ``Date`` header plus the monotonic time since (R3, proof of death).

    The header's time counts from when the request was *sent*. So a slow response puts the estimate ahead of DynamoDB's
    time, and none puts it behind by more than a second, to which the header is exact. A stamp that is behind would make
    a live holder look dead.

    An estimate that is ahead ends `min_hold` too early, and a response is slow if the process was stopped before it
    sent the request. So a slow response moves the estimate no further ahead than the clocks may have drifted since the
    last one, unless its ``Date`` shows that the last one was wrong.
    """

    _ahead_ms: float | None = field(default=None)
    answered: bool = field(default=False)
    told_at: float = field(default=-math.inf)

    def note(self, reply: Reply) -> None:
        """Correct the estimate by the ``Date`` of a response."""
        self.answered = True
        if reply.server_ms is not None:
            latest_ms = reply.server_ms - reply.sent_at * 1000
            earliest_ms = reply.server_ms - reply.received_at * 1000
            if self._ahead_ms is not None:
                drift_ms = MARGIN * max(0.0, reply.received_at - self.told_at) * 1000
                latest_ms = max(earliest_ms, min(latest_ms, self._ahead_ms + drift_ms))
            self._ahead_ms = latest_ms
            self.told_at = max(self.told_at, reply.sent_at)

    def at(self, now: float) -> int | None:
        """Server time at monotonic `now`, epoch milliseconds; None before the first ``Date``."""
        ahead_ms = self._ahead_ms  # read once: other threads write it
        return None if ahead_ms is None else int(ahead_ms + now * 1000)
