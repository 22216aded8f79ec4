"""What an operation asks of the world, and what it is told.

An operation is a generator: ``reply = yield request``. A driver (`client/sync.py`, `client/aio.py`, or a simulator)
carries the effect out and sends the matching answer in; if that fails it throws a typed error in instead.
All times called ``…_at`` are seconds on the driver's monotonic clock, which keeps counting while the machine sleeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from zlib import crc32

if TYPE_CHECKING:
    from airflow_dynamo_lock.core.model.record import QueuePosition

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """One call of the DynamoDB API, in the SDK's own words. Answered by `Reply`.

    :ivar action: the API action, e.g. ``UpdateItem``.
    :ivar params: its parameters, attribute values in DynamoDB's typed form.
    :ivar within: seconds after which the caller stops waiting for the answer; None leaves it to the SDK's timeouts.
    """

    action: str
    params: Mapping[str, Any]
    within: float | None = None


def with_timeout(request: Request, seconds: float | None) -> Request:
    """The request, with so much time to be answered in."""
    return request if seconds is None else Request(request.action, request.params, seconds)


@dataclass(frozen=True)
class Reply:
    """The answer to a `Request`.

    :ivar output: what the SDK returned. For a refused write, ``{"Item": …}`` where the engine showed the item.
    :ivar refused: the write's condition did not hold; nothing was changed *by the last attempt*.
    :ivar retried: the SDK sent the request more than once, so an attempt before the refused one may have been applied.
    :ivar server_ms: the ``Date`` header of this very response, epoch milliseconds; None where there was none.
    """

    output: Mapping[str, Any]
    sent_at: float
    received_at: float
    server_ms: int | None = None
    refused: bool = False
    retried: bool = False


@dataclass(frozen=True)
class Sleep:
    """Do nothing for so many seconds. Answered by the time (monotonic seconds) when it was over."""

    seconds: float


@dataclass(frozen=True)
class WaitForSlots:
    """Wait until the lock seems to have room, as the shared poller sees it (`watch.py`), or the time is up.

    Answered by the time (monotonic seconds). A woken waiter has to try: only a write decides.

    :ivar slots: how many slots the waiter needs.
    :ivar capacity: of how many; None for one who does not take them and goes by what the lock has.
    :ivar takes: it is about to take them, so those behind it are not woken for the same slots.
    :ivar place: where it stands in line (`line.py`); None if it does not.
    :ivar on_position: called with the position in the queue each time that it may have changed.
    """

    key: str
    slots: int
    takes: bool
    poll_interval: float
    seconds: float | None
    capacity: int | None = None
    place: str | None = None
    on_position: Callable[[QueuePosition], None] | None = None


@dataclass(frozen=True)
class Callback:
    """Call a user of this package back, outside of whatever guards the operation. What he raises is thrown in."""

    call: Callable[[], None]


@dataclass(frozen=True)
class Stamp:
    """What each single write attempt has of its own. A resend under the *same* version would not show observers that
    the holder was alive the second time (rule R3), so every attempt gets a new one.

    :ivar version: a fresh random id.
    :ivar server_ms: DynamoDB's time as this process estimates it, epoch milliseconds; None if it has seen no ``Date``.
    :ivar host_ms: the host's wall clock, epoch milliseconds. Good enough for people to read; never for deciding who is
        dead.
    :ivar at: when it was made, monotonic seconds. The lease counts from then, not from when the write was sent: a
        process may be stopped in between, and others go by what the record says (rule R4).
    :ivar answered: this process has had an answer before. If it still knows no server time, then no answer tells it.
    :ivar age: seconds since the server's time was told; the host's clock has drifted since.
    """

    version: str
    server_ms: int | None
    host_ms: int
    at: float
    answered: bool = True
    age: float = 0.0

    def is_fresh(self, most_ms: int) -> bool:
        """Whether the server's time was told no longer ago than that; or cannot be known, since no answer tells it."""
        return self.answered and (self.server_ms is None or self.age * 1000 <= most_ms)

    @property
    def best_ms(self) -> int:
        """Server time where known, else the host's clock."""
        return self.host_ms if self.server_ms is None else self.server_ms

    @property
    def undated(self) -> bool:
        """Whether this process has had answers, and none of them had a ``Date``."""
        return self.answered and self.server_ms is None

    @property
    def jitter(self) -> float:
        """A number from 0…1, as random as the version: so that the pauses of many processes do not fall into step."""
        return crc32(self.version.encode()) / 2**32


Effect = Request | Sleep | WaitForSlots | Callback
Operation = Generator[Effect, Any, T]


@dataclass
class ServerClock:
    """DynamoDB's time: the last ``Date`` header seen plus the monotonic time since (rule R3).

    Counted from when the request was *sent*: however long its answer took, the estimate is then behind by no more than
    the second to which the header is exact. An early stamp would make a live holder look dead, a late one would not.
    """

    _ahead_ms: float | None = field(default=None)
    answered: bool = field(default=False)
    told_at: float = field(default=-math.inf)

    def note(self, reply: Reply) -> None:
        """Take in the ``Date`` of a response."""
        self.answered = True
        if reply.server_ms is not None:
            self._ahead_ms = reply.server_ms - reply.sent_at * 1000
            self.told_at = reply.sent_at

    def at(self, now: float) -> int | None:
        """Server time at monotonic `now`, epoch milliseconds; None if no ``Date`` was ever seen."""
        ahead_ms = self._ahead_ms  # read once: other threads write it
        return None if ahead_ms is None else int(ahead_ms + now * 1000)
