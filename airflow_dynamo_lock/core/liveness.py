"""R3 (proof of death): when a holder counts as dead.

There are two proofs, each with an assumption of its own:

- *Observation*: this process saw the same version for a whole lease. The monotonic clocks of observer and holder must
  run at the same rate to within `limits.MARGIN`.
- *Server time*: DynamoDB's time has passed the end of the lease. The clocks of DynamoDB's servers must agree to within
  `max_clock_skew` less 5 s: a stamp may be 3 s early, and 2 s are to spare. A holder whose responses have no ``Date``
  writes no time of its heartbeats, so only observation proves that it is dead.

Both rely on the order of heartbeats: none restores an earlier version, or lowers the time
(`core/table/renewal_writes.py`).

No wall clock of a host decides. A process has only that clock for the stamp of its first write, so the grant counts
only after the response has confirmed the time, or after the time was corrected (`core/lock/confirm.py`). A wrong
verdict is caught once more: a reclaim is conditional on the dead holder's version, so a heartbeat in the meantime wins.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import NamedTuple

from airflow_dynamo_lock.core.effects import Reply
from airflow_dynamo_lock.core.model.record import Holder, LockRecord

#: Default of `max_clock_skew`, in seconds: 5 s more than the ``Date`` headers of two DynamoDB servers may differ.
MAX_CLOCK_SKEW = 10.0

# Number of locks whose holders are remembered. Forgetting one costs a longer wait where responses have no `Date`,
# never safety.
_REMEMBERED = 20_000


class _Sighting(NamedTuple):
    """What this process knows of a holder's present version. Times are monotonic seconds.

    :ivar since: when the version was first seen.
    :ivar renewed_after: a moment before the heartbeat that wrote the version.
    :ivar read_at: when the last read was sent.
    """

    version: str
    since: float
    renewed_after: float
    read_at: float


class Observer:
    """Remembers when each holder's present version was first seen by this process."""

    def __init__(self, max_clock_skew: float = MAX_CLOCK_SKEW) -> None:
        self.max_clock_skew_ms = int(max_clock_skew * 1000)
        self._sightings: OrderedDict[str, dict[str, _Sighting]] = OrderedDict()

    def see(self, record: LockRecord, reply: Reply) -> list[Holder]:
        """Remember the holders of a record that `reply` delivered. Returns the dead ones.

        To call it again with the same response changes nothing.
        """
        before = self._sightings.pop(record.key, {})
        present: dict[str, _Sighting] = {}
        dead = []
        for lease_id, holder in record.holders.items():
            last = before.get(lease_id)
            if last is not None and last.version == holder.version:
                sighting = last._replace(read_at=reply.sent_at)
            else:
                # The silence begins when the response *arrived*: the heartbeat was sent before.
                renewed_after = -math.inf if last is None else last.read_at
                sighting = _Sighting(holder.version, reply.received_at, renewed_after, reply.sent_at)
            present[lease_id] = sighting
            # It lasts until the next read was *sent*: its response is no older than that.
            silent = holder.lease_ms > 0 and (reply.sent_at - sighting.since) * 1000 >= holder.lease_ms
            # A holder that this process saw change within the last lease is alive, whatever a `Date` says.
            may_be_silent = (reply.received_at - sighting.renewed_after) * 1000 >= holder.lease_ms
            if silent or (may_be_silent and self._has_expired(holder, reply.server_ms)):
                dead.append(holder)
        if present:
            self._sightings[record.key] = present
            if len(self._sightings) > _REMEMBERED:
                self._sightings.popitem(last=False)
        return dead

    def next_death(self, record: LockRecord, reply: Reply) -> float:
        """When the first of the live holders would be dead without a further heartbeat: monotonic seconds."""
        deaths = [math.inf]
        for lease_id, sighting in self._sightings.get(record.key, {}).items():
            holder = record.holders.get(lease_id)
            if holder is None:
                continue  # another thread has seen a newer record since
            if holder.lease_ms > 0:
                deaths.append(sighting.since + holder.lease_ms / 1000)
            if reply.server_ms is not None and (end_ms := self._end_ms(holder)) is not None:
                left_ms = end_ms - reply.server_ms
                deaths.append(reply.received_at + left_ms / 1000 + 1)  # a `Date` has whole seconds
        return min(death for death in deaths if death > reply.sent_at)

    def _has_expired(self, holder: Holder, server_ms: int | None) -> bool:
        end_ms = self._end_ms(holder)
        return server_ms is not None and end_ms is not None and server_ms > end_ms

    def _end_ms(self, holder: Holder) -> int | None:
        """Server time after which a holder is dead, epoch milliseconds; None if the record does not show it."""
        if holder.expires_at_ms is not None:  # by the clock of the holder's host, which may be behind
            return holder.expires_at_ms + self.max_clock_skew_ms
        if holder.renewed_at_ms is None:
            return None
        # No process works under a lease that is cooling down, so no margin is needed.
        skew_ms = 0 if holder.cooling_down else self.max_clock_skew_ms
        return holder.renewed_at_ms + holder.lease_ms + skew_ms
