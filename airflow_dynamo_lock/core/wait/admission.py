"""Limits how many newcomers of one process send requests at the same time while DynamoDB does not serve them.

The window is unlimited until a request fails: it was not answered in time, throttled, or could not be sent. There may
be too many requests, and repeating them would make that worse. So each failure halves the window, to one request at
least, and each answer widens it by one, as TCP does after lost packets. Waiters in the queue are not limited: only the
first one sends requests.
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

    def admit(self) -> bool:
        """Admit the newcomer if the window is not full. Returns whether it may send a request now.

        An admitted newcomer stays admitted until it reports the result.
        """
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

    def failed(self) -> None:
        """Report that DynamoDB did not serve the request."""
        window = self.window
        self._failures = min(self._failures + 1, _MOST_FAILURES)
        if self in window._admitted:
            window._size = max(1, min(window._size, len(window._admitted)) // 2)
            window._admitted.discard(self)

    def close(self) -> None:
        """Report that the newcomer sends no more requests."""
        self.window._admitted.discard(self)

    def pause(self, poll_interval: float, jitter: float, left: float | None) -> float:
        """Seconds until the next attempt: longer after each failure, and different for each waiter.

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
