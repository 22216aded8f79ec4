"""When a holder is dead (rule R3): its silence is proven, by what was observed or by the server's own time.

What this rests on: (a) *observation* needs that the observer's monotonic clock and the holder's run at the same rate
to within `limits.MARGIN`; (b) *server time* needs that the clocks of DynamoDB's servers agree to within
`max_clock_skew`, less 5 s: the 3 s by which a stamp may be early, and the 2 s by which one that arrives late may be
older than the one whose place it takes. A process whose answers have no ``Date`` shows no stamp, so its holders are
judged by observation alone. No host's wall clock is ever relied on: a process's first write has nothing else to stamp
with, but counts as a grant only after the answer has shown the clock to be right, or it has been put right
(`Operations._granted`). Being wrong here is caught once more: a reclaim is conditional on the dead holder's version, so
one that beat in the meantime wins.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import NamedTuple

from airflow_dynamo_lock.core.effects import Reply
from airflow_dynamo_lock.core.model.record import Holder, LockRecord

#: By how much the ``Date`` headers of two DynamoDB servers may differ, in seconds.
MAX_CLOCK_SKEW = 10.0

# Enough for every lock that a process waits for; beyond it the longest unseen are forgotten, which costs a newcomer
# without server time one more lease of watching, never safety.
_REMEMBERED = 20_000


class _Seen(NamedTuple):
    """A holder, as this process has seen it. Times are monotonic seconds.

    :ivar since: when its present version was first seen.
    :ivar beaten_after: a moment before the heartbeat that wrote this version.
    :ivar looked_at: when the last look was sent.
    """

    version: str
    since: float
    beaten_after: float
    looked_at: float


class Observer:
    """Remembers when each holder's present version was first seen by this process."""

    def __init__(self, max_clock_skew: float = MAX_CLOCK_SKEW) -> None:
        self.max_clock_skew_ms = int(max_clock_skew * 1000)
        self._seen: OrderedDict[str, dict[str, _Seen]] = OrderedDict()

    def see(self, record: LockRecord, reply: Reply) -> list[Holder]:
        """Take in a record as `reply` delivered it, and say which of its holders are dead."""
        before = self._seen.pop(record.key, {})
        now: dict[str, _Seen] = {}
        dead = []
        for lease_id, holder in record.holders.items():
            last = before.get(lease_id)
            if last is not None and last.version == holder.version:
                seen = last._replace(looked_at=reply.sent_at)
            else:
                # Counted from when the answer *arrived*: the beat was sent before that.
                beaten_after = -math.inf if last is None else last.looked_at
                seen = _Seen(holder.version, reply.received_at, beaten_after, reply.sent_at)
            now[lease_id] = seen
            # … up to when the question that found it unchanged was *sent*: the answer is no older than that.
            silent = holder.lease_ms > 0 and (reply.sent_at - seen.since) * 1000 >= holder.lease_ms
            # Who has beaten within a lease is alive, whatever time an answer gives.
            may_be_silent = (reply.received_at - seen.beaten_after) * 1000 >= holder.lease_ms
            if silent or (may_be_silent and self._outlived(holder, reply.server_ms)):
                dead.append(holder)
        if now:
            self._seen[record.key] = now
            if len(self._seen) > _REMEMBERED:
                self._seen.popitem(last=False)
        return dead

    def next_death(self, record: LockRecord, reply: Reply) -> float:
        """When the first of those that `see` has just found alive is dead, if it stays silent: monotonic seconds."""
        deaths = [math.inf]
        for lease_id, seen in self._seen.get(record.key, {}).items():
            holder = record.holders.get(lease_id)
            if holder is None:
                continue  # another thread has seen a newer record since
            if holder.lease_ms > 0:
                deaths.append(seen.since + holder.lease_ms / 1000)
            if reply.server_ms is not None and (end_ms := self._end_ms(holder)) is not None:
                left_ms = end_ms - reply.server_ms
                deaths.append(reply.received_at + left_ms / 1000 + 1)  # a `Date` has whole seconds
        return min(death for death in deaths if death > reply.sent_at)

    def _outlived(self, holder: Holder, server_ms: int | None) -> bool:
        end_ms = self._end_ms(holder)
        return server_ms is not None and end_ms is not None and server_ms > end_ms

    def _end_ms(self, holder: Holder) -> int | None:
        """After which time of the server's a holder is dead; None if that cannot be told."""
        if holder.expires_at_ms is not None:  # by his own clock, which may be behind
            return holder.expires_at_ms + self.max_clock_skew_ms
        if holder.renewed_at_ms is None:
            return None
        # Nobody works any more under a lease that only rests.
        skew_ms = 0 if holder.cooling_down else self.max_clock_skew_ms
        return holder.renewed_at_ms + holder.lease_ms + skew_ms
