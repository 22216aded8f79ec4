"""When a holder is dead (rule R3): its silence is proven, by what was observed or by the server's own time.

What this rests on: (a) *observation* needs that the observer's monotonic clock and the holder's run at the same rate
to within `limits.MARGIN`; (b) *server time* needs that the clocks of DynamoDB's servers agree to within
`max_clock_skew`, less 5 s: the 3 s by which a stamp may be early, and the 2 s by which one that arrives late may be
older than the one whose place it takes. And it needs that an engine which dates its answers to anybody dates them to
everybody. No host's wall clock is ever relied on: a process's first write has nothing else to stamp with, but counts as
a grant only after the answer has shown the clock to be right, or it has been put right (`Operations._granted`). Being
wrong here is caught once more: a reclaim is conditional on the dead holder's version, so one that beat in the meantime
wins.
"""

from __future__ import annotations

from collections import OrderedDict

from airflow_dynamo_lock.protocol.effects import Reply
from airflow_dynamo_lock.protocol.model import Holder, LockRecord

#: By how much the ``Date`` headers of two DynamoDB servers may differ, in seconds.
MAX_CLOCK_SKEW = 10.0

# Enough for every lock that a process waits for; beyond it the longest unseen are forgotten, which costs a newcomer
# without server time one more lease of watching, never safety.
_REMEMBERED = 20_000


class Observer:
    """Remembers when each holder's present version was first seen by this process."""

    def __init__(self, max_clock_skew: float = MAX_CLOCK_SKEW) -> None:
        self.max_clock_skew_ms = int(max_clock_skew * 1000)
        self._first_seen: OrderedDict[str, dict[str, tuple[str, float]]] = OrderedDict()

    def see(self, record: LockRecord, reply: Reply) -> list[Holder]:
        """Take in a record as `reply` delivered it, and say which of its holders are dead."""
        before = self._first_seen.pop(record.key, {})
        now: dict[str, tuple[str, float]] = {}
        dead = []
        for lease_id, holder in record.holders.items():
            version, since = before.get(lease_id, (None, 0.0))
            if version != holder.version:
                # Counted from when the answer *arrived*: the beat was sent before that.
                since = reply.received_at
            now[lease_id] = (holder.version, since)
            # … up to when the question that found it unchanged was *sent*: the answer is no older than that.
            if (reply.sent_at - since) * 1000 >= holder.lease_ms or self._outlived(holder, reply.server_ms):
                dead.append(holder)
        if now:
            self._first_seen[record.key] = now
            if len(self._first_seen) > _REMEMBERED:
                self._first_seen.popitem(last=False)
        return dead

    def _outlived(self, holder: Holder, server_ms: int | None) -> bool:
        if server_ms is None or holder.renewed_at_ms is None:
            return False
        return server_ms > holder.renewed_at_ms + holder.lease_ms + self.max_clock_skew_ms
