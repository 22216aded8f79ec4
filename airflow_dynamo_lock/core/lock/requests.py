"""How operations send requests: reads, writes that a conflict delays, stamps by a fresh server time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from airflow_dynamo_lock.core.effects import (
    Operation,
    Reply,
    Request,
    Sleep,
    Stamp,
    with_timeout,
)
from airflow_dynamo_lock.core.model.errors import (
    LockConflictError,
    LockUnavailableError,
)
from airflow_dynamo_lock.core.model.record import LockRecord
from airflow_dynamo_lock.core.table.format import Format

#: How often a write that is refused, but sees a reason to in the refusal, is tried again.
ROUNDS = 8
#: Seconds to wait for another transaction on the same records, the first time.
CONFLICT_PAUSE = 0.05


@dataclass(frozen=True)
class Requests:
    """The requests of one process on one table.

    :ivar format: builds the requests and reads the items.
    :ivar stamp: makes the stamp of a write attempt, a new one for each.
    """

    format: Format
    stamp: Callable[[], Stamp]

    def get(self, key: str) -> Operation[LockRecord | None]:
        """The lock as it is now, None if it has never been used or is long forgotten."""
        reply: Reply = yield self.format.get(key)
        item = reply.output.get("Item")
        return self.format.record(item, reply.server_ms) if item else None

    def record_after(
        self, key: str, reply: Reply, within: float | None
    ) -> Operation[tuple[LockRecord | None, Reply]]:
        """The lock as the refusal showed it, or, where the engine does not show it, as a read finds it (rule R2)."""
        item = reply.output.get("Item")
        if not item:
            reply = yield with_timeout(self.format.get(key), within)
            item = reply.output.get("Item")
        return (self.format.record(item, reply.server_ms) if item else None), reply

    def write(self, write: Callable[[Stamp], Request]) -> Operation[Reply]:
        """Send a write, and again with a fresh stamp where a transaction on the record was in its way."""
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
        """A stamp by a server time that is not too old. If it is, as after a night's sleep of the machine, ask first:
        the host's clock may have drifted by a tenth of the time since, and an early stamp makes a living holder look
        dead.

        :param most_ms: how old it may be. A holder does without a tenth of its lease, so it may be as old as a lease.
        :raises LockUnavailableError: the answers came without a ``Date``, or took longer than that.
        """
        for _ in range(ROUNDS):
            if (stamp := self.stamp()).is_fresh(most_ms):
                return stamp
            yield with_timeout(self.format.get(key), time_left(until, stamp.at))
        raise LockUnavailableError(
            f"The server's time is needed to write to the lock {key!r}, but {ROUNDS} answers did not tell it within "
            f"{most_ms / 1000:g} s: see whether a proxy removes the header Date, or take a longer lease.",
            maybe_applied=False,
        )


def time_left(until: float | None, now: float) -> float | None:
    """The seconds until then, for a request."""
    return None if until is None else max(0.0, until - now)
