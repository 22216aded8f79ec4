"""How many of those who come for a lock may ask DynamoDB at the same time.

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


@dataclass
class Crowd:
    """Those of one process who ask."""

    _asking: set[object] = field(default_factory=set)
    _room: float = math.inf

    def may_ask(self, who: object) -> bool:
        """Whether `who` may ask now; then he has to say what came of it."""
        if who not in self._asking and len(self._asking) >= self._room:
            return False
        self._asking.add(who)
        return True

    def answered(self, who: object) -> None:
        """He has been answered."""
        if who in self._asking:
            self._room = self._room + 1 if self._room < _MANY else math.inf
            self._asking.discard(who)

    def unanswered(self, who: object) -> None:
        """He has not."""
        if who in self._asking:
            self._room = max(1, min(self._room, len(self._asking)) // 2)
            self._asking.discard(who)

    def gone(self, who: object) -> None:
        """He does not ask any more, whatever came of it."""
        self._asking.discard(who)
