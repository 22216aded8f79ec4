"""How long the free slots of a lock have been unused.

Waiters leave free slots to those ahead of them. A waiter ahead that has died, or that cannot reach DynamoDB, would
leave the lock idle until its death is proven. So after a while the others pass over it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from airflow_dynamo_lock.core.effects import Reply
from airflow_dynamo_lock.core.model.record import LockRecord

#: How long a waiter leaves free slots to those ahead of it, in seconds. The first waiter of a queue reads the lock at
#: least every 1.25 s, so it loses its turn only if its process is stopped or cut off.
PASS_OVER_AFTER = 2.0
# A lock that was not read for this many seconds is forgotten.
_REMEMBERED = 120.0


class _Seen(NamedTuple):
    """A lock with free slots, as this process last read it. Times are monotonic seconds.

    :ivar free_since: pairs of a time and the number of slots that have been free since then, fewest slots first.
    :ivar claimed_at: when waiters were last told to claim unused slots.
    """

    token: int
    read_at: float
    free_since: tuple[tuple[float, int], ...] = ()
    claimed_at: float = -math.inf


@dataclass
class UnusedSlots:
    """Remembers since when this process has seen the free slots of each lock."""

    _seen: dict[str, _Seen] = field(default_factory=dict)

    def see(self, record: LockRecord, free: int, reply: Reply) -> int:
        """Note the free slots of a lock that was just read. Returns how many have been unused for `PASS_OVER_AFTER`.

        A grant begins the time anew for all slots of the lock.

        :param free: the free slots, and those of dead holders.
        """
        before = self._seen.pop(record.key, None)
        if free <= 0:
            return 0
        now = reply.received_at
        if before is None or before.token != record.token:
            before = _Seen(record.token, now)
        since = min((at for at, slots in before.free_since if slots >= free), default=now)
        fewer = [each for each in before.free_since if each[1] < free]
        self._seen[record.key] = seen = before._replace(read_at=now, free_since=(*fewer, (since, free)))
        return max(
            (slots for at, slots in seen.free_since if reply.sent_at - at >= PASS_OVER_AFTER), default=0
        )

    def claims(self, key: str, now: float) -> bool:
        """Whether a waiter should now claim the unused slots of a lock.

        Once in `PASS_OVER_AFTER`, because the waiter has to read the queue for that, and one ahead of it may be
        entitled to leave the slots unused.
        """
        seen = self._seen.get(key)
        if seen is None or now - seen.claimed_at < PASS_OVER_AFTER:
            return False
        self._seen[key] = seen._replace(claimed_at=now)
        return True

    def forget_old(self, now: float) -> None:
        """Forget the locks that were not read for a while."""
        self._seen = {key: seen for key, seen in list(self._seen.items()) if now - seen.read_at < _REMEMBERED}
