"""Limits how many newcomers of one process send requests at the same time while DynamoDB does not answer in time.

The window is unlimited until a request times out. The requests may have timed out because there are too many of them,
and repeating them would make that worse. So each time-out halves the window, to one request at least, and each answer
widens it by one, as TCP does after lost packets. Waiters in the queue are not limited: only the first one sends
requests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

# A window of this size becomes unlimited again.
_MANY = 100
# Longest pause between two attempts, in seconds, unless the poll interval is longer. Jitter may double it.
_LONGEST_PAUSE = 5.0
# Number of failures after which the pause no longer doubles.
_MOST_FAILURES = 10


@dataclass
class AdmissionWindow:
    """The newcomers of one process that may send requests now."""

    _admitted: set[Admission] = field(default_factory=set)
    _size: float = math.inf


@dataclass(eq=False)
class Admission:
    """One newcomer. It reports the result of each attempt, and when it sends no more."""

    window: AdmissionWindow
    _failures: int = field(default=0, init=False)

    def is_admitted(self) -> bool:
        """Whether the newcomer may send a request now. Once admitted, it stays so until the result is reported."""
        window = self.window
        if self not in window._admitted and len(window._admitted) >= window._size:
            return False
        window._admitted.add(self)
        return True

    def answered(self) -> None:
        """Report an answer."""
        window = self.window
        self._failures = 0
        if self in window._admitted:
            window._size = window._size + 1 if window._size < _MANY else math.inf
            window._admitted.discard(self)

    def timed_out(self) -> None:
        """Report a time-out."""
        window = self.window
        self._failures = min(self._failures + 1, _MOST_FAILURES)
        if self in window._admitted:
            window._size = max(1, min(window._size, len(window._admitted)) // 2)
            window._admitted.discard(self)

    def close(self) -> None:
        """Report that the newcomer sends no more requests."""
        self.window._admitted.discard(self)

    def pause(self, poll_interval: float, jitter: float, left: float | None) -> float:
        """Seconds until the next attempt: longer after each time-out, and different for each waiter.

        :param jitter: random number from 0 to 1.
        :param left: remaining time in seconds; None for no limit.
        """
        if not self._failures:  # not admitted
            pause = min(poll_interval, _LONGEST_PAUSE)
        else:
            times: int = 2 ** (self._failures - 1)
            pause = min(poll_interval * times, max(poll_interval, _LONGEST_PAUSE))
        pause *= 1 + jitter
        return pause if left is None else min(pause, left)
