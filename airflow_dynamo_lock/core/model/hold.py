"""What a release leaves in the record: who held the lock, and how long leases are usually held."""

from __future__ import annotations

from dataclasses import dataclass

from airflow_dynamo_lock.core.model.limits import ESTIMATES_DIFFER_MS

# Weight of the newest lease in the mean: one part in eight.
_PARTS = 8


@dataclass(frozen=True)
class Hold:
    """How long a lease that is about to be released has held the lock, and the mean so far.

    :ivar owner: name of the holder.
    :ivar acquired_at_ms: time of the grant, epoch milliseconds.
    :ivar usual_ms: the mean as the releasing process last read it, milliseconds; None if there was none.
    """

    owner: str
    acquired_at_ms: int
    usual_ms: int | None

    def mean(self, until_ms: int) -> int | None:
        """The mean with this lease, in milliseconds; None if the two times cannot both be right.

        A short lease may seem to end before its grant, because both times are estimates. It counts as 0 ms.

        :param until_ms: time until which the slots are taken, epoch milliseconds.
        """
        held_ms = until_ms - self.acquired_at_ms
        if held_ms < -ESTIMATES_DIFFER_MS:
            return None
        held_ms = max(held_ms, 0)
        return held_ms if self.usual_ms is None else self.usual_ms + round((held_ms - self.usual_ms) / _PARTS)
