"""How operations send requests: reads, writes that are repeated after a conflict, stamps with a recent server time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from airflow_dynamo_lock.core.effects import Operation, Reply, Request, Sleep, Stamp, with_timeout
from airflow_dynamo_lock.core.model.errors import LockConflictError, LockRecordError, LockUnavailableError
from airflow_dynamo_lock.core.model.limits import WAITING_PREFIX
from airflow_dynamo_lock.core.model.record import Holder, LockRecord
from airflow_dynamo_lock.core.table.features import Feature
from airflow_dynamo_lock.core.table.format import Format
from airflow_dynamo_lock.log import log

#: Maximum number of attempts of a write that may succeed after a refusal.
ROUNDS = 8
# Number of written holders that are remembered. Forgetting one costs a request, never safety.
_REMEMBERED = 10_000
#: First pause while another transaction writes to the same records, in seconds.
CONFLICT_PAUSE = 0.05


@dataclass(frozen=True)
class Requests:
    """The requests of one process on one table.

    :ivar format: builds the requests and reads the items.
    :ivar stamp: makes a new stamp for each write attempt.
    """

    format: Format
    stamp: Callable[[], Stamp]
    # The holders that this process has written, by key and lease id.
    _written: OrderedDict[tuple[str, str], Holder] = field(default_factory=OrderedDict)

    def written(self, key: str, lease_id: str) -> Holder | None:
        """The holder as this process last wrote it; None if it has not, or has forgotten it."""
        return self._written.get((key, lease_id))

    def note_written(self, key: str, holder: Holder) -> None:
        """Remember a holder that this process has written: its next renewal may require that version."""
        self._written.pop((key, holder.lease_id), None)
        self._written[key, holder.lease_id] = holder
        if len(self._written) > _REMEMBERED:
            self._written.popitem(last=False)

    def get(self, key: str) -> Operation[LockRecord | None]:
        """The lock as it is now; None if it has no record."""
        reply: Reply = yield self.format.get(key)
        item = reply.output.get("Item")
        return self.format.record(item, reply.server_ms) if item else None

    def record_after(
        self, key: str, reply: Reply, within: float | None
    ) -> Operation[tuple[LockRecord | None, Reply]]:
        """The lock as the refused write returned it (R2). If DynamoDB did not return it, read the lock."""
        item = reply.output.get("Item")
        if not item:
            reply = yield with_timeout(self.format.get(key), within)
            item = reply.output.get("Item")
        return (self.format.record(item, reply.server_ms) if item else None), reply

    def scanned(self, reply: Reply, on_damaged: Callable[[LockRecordError], None] | None) -> list[LockRecord]:
        """The records in the response to `Format.scan`.

        :param on_damaged: called with the error of each damaged record, which is left out; None logs it.
        """
        records = []
        for item in self.format.lock_items(reply.output):
            try:
                records.append(self.format.record(item, reply.server_ms))
            except LockRecordError as damaged:
                (on_damaged or partial(log.warning, "%s"))(damaged)
        return records

    def is_lock(self, record: LockRecord) -> bool:
        """Whether the record is that of a lock, and not of the lease of a waiting process."""
        return not (Feature.QUEUE in self.format.features and record.key.startswith(WAITING_PREFIX))

    def write(self, write: Callable[[Stamp], Request]) -> Operation[Reply]:
        """Send a write, and repeat it with a new stamp while a transaction on the record is in progress."""
        for attempt in range(1, ROUNDS):
            try:
                reply: Reply = yield write(self.stamp())
                return reply
            except LockConflictError as conflict:
                if conflict.maybe_applied:
                    raise
            yield Sleep(CONFLICT_PAUSE * attempt)
        reply = yield write(self.stamp())
        return reply

    def fresh_stamp(self, key: str, most_ms: int, until: float | None) -> Operation[Stamp]:
        """A stamp whose server time is recent; or one without it, if no response ever had a ``Date``.

        If the estimate is too old, as after the machine was suspended, read the lock first: the host's clock may have
        drifted, and an early stamp makes a live holder look dead.

        :param most_ms: maximum age of the estimate, milliseconds. The length of the lease is safe, because a holder
            does not use the last tenth of it (`limits.MARGIN`), and clocks drift by no more than that.
        :raises LockUnavailableError: an old estimate could not be replaced: the responses had no ``Date``, or took
            longer than `most_ms`.
        """
        for _ in range(ROUNDS):
            if (stamp := self.stamp()).is_fresh(most_ms):
                return stamp
            yield with_timeout(self.format.get(key), time_left(until, stamp.at))
        raise LockUnavailableError(
            f"The server's time is needed to write to the lock {key!r}, but none of {ROUNDS} responses had it within "
            f"{most_ms / 1000:g} s: check whether a proxy removes the header Date, or choose a longer lease.",
            maybe_applied=False,
        )


def time_left(until: float | None, now: float) -> float | None:
    """Seconds until that time, as the timeout of a request; None for no limit."""
    return None if until is None else max(0.0, until - now)
