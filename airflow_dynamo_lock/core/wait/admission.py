"""How many of those who come for a lock may ask DynamoDB at the same time, and how long each waits to ask again.

As many as like, until one gets no answer. It may be for all of them together that there is none: what they ask takes
longer than any of them waits for it, and to ask again makes that worse. Then only half as many may ask, at last one;
and with each answer one more, until the crowd has got through. (TCP does the same when packets are lost.)

It counts those of one process, and only those who are not in line yet: who stands there asks when it is his turn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

# Where so many may ask at once, there is no need to count them any longer.
_MANY = 100
# Seconds between two tries of one who gets no answer, at most, if he did not ask for more; up to twice as many.
_LONGEST_PAUSE = 5.0


@dataclass
class AdmissionWindow:
    """Those of one process who ask."""

    _asking: set[RequestSlot] = field(default_factory=set)
    _room: float = math.inf


@dataclass(eq=False)
class RequestSlot:
    """One of them. He has to say what came of it each time that he asked, and when he does so no more."""

    crowd: AdmissionWindow
    _failures: int = field(default=0, init=False)

    def may_ask(self) -> bool:
        """Whether he may ask now."""
        crowd = self.crowd
        if self not in crowd._asking and len(crowd._asking) >= crowd._room:
            return False
        crowd._asking.add(self)
        return True

    def answered(self) -> None:
        """He has been answered."""
        crowd = self.crowd
        self._failures = 0
        if self in crowd._asking:
            crowd._room = crowd._room + 1 if crowd._room < _MANY else math.inf
            crowd._asking.discard(self)

    def unanswered(self) -> None:
        """He has not."""
        crowd = self.crowd
        self._failures = min(self._failures + 1, 10)
        if self in crowd._asking:
            crowd._room = max(1, min(crowd._room, len(crowd._asking)) // 2)
            crowd._asking.discard(self)

    def gone(self) -> None:
        """He does not ask any more, whatever came of it."""
        self.crowd._asking.discard(self)

    def pause(self, poll_interval: float, jitter: float, left: float | None) -> float:
        """Seconds until his next try: more after each failure, and not in step with others.

        :param jitter: a number from 0…1, drawn for this pause.
        :param left: of how much time; None if there is no end to it.
        """
        if not self._failures:  # it is only not his turn
            pause = min(poll_interval, _LONGEST_PAUSE)
        else:
            times: int = 2 ** (self._failures - 1)
            pause = min(poll_interval * times, max(poll_interval, _LONGEST_PAUSE))
        pause *= 1 + jitter
        return pause if left is None else min(pause, left)
