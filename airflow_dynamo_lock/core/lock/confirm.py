"""Confirm a grant: it counts when its time and its token have been compared with the server's (R3, R10)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from airflow_dynamo_lock.core.effects import (
    Operation,
    Reply,
    Request,
    Stamp,
    with_timeout,
)
from airflow_dynamo_lock.core.liveness import Observer
from airflow_dynamo_lock.core.lock.requests import Requests
from airflow_dynamo_lock.core.model.claim import Claim
from airflow_dynamo_lock.core.model.outcomes import (
    Granted,
)
from airflow_dynamo_lock.core.model.record import Holder, LockRecord

# By how much the time in a grant may be behind, or ahead of, the `Date` of the answer to it. That header has whole
# seconds, and so has what a stamp is estimated from.
_BEHIND_MS = 2000
_AHEAD_MS = 2000
# How old the answer may be by which a grant is put right, milliseconds. It is the answer to the grant, as a rule.
_FRESH_MS = 10_000


@dataclass(frozen=True)
class Take:
    """A write that takes the lock.

    :ivar claim: with the capacity that the lock has.
    :ivar stamp: what the write carries.
    :ivar victims: the dead holders whose place it takes.
    """

    claim: Claim
    stamp: Stamp
    request: Request
    victims: tuple[Holder, ...] = ()


#: A lock, and the answer that has shown it.
Seen = tuple[LockRecord | None, Reply]


@dataclass(frozen=True)
class Confirming:
    """Confirms grants, and corrects those that a wrong clock has stamped."""

    requests: Requests
    observer: Observer

    def records(self, claims: Sequence[Claim], within: float | None) -> Operation[dict[str, Seen]]:
        """The locks as they are now, in one request if it is answered to the full."""
        seen: dict[str, Seen] = {}
        for request in self.requests.format.batch_get([each.key for each in claims], consistent=True):
            reply: Reply = yield with_timeout(request, within)
            for record in self.requests.format.batch_records(reply.output, reply.server_ms):
                seen[record.key] = record, reply
        for claim in claims:
            if claim.key not in seen:
                reply = yield with_timeout(self.requests.format.get(claim.key), within)
                seen[claim.key] = yield from self.requests.record_after(claim.key, reply, within)
        return seen

    def granted(
        self,
        write: Take,
        record: LockRecord,
        reply: Reply,
        within: float | None,
    ) -> Operation[Granted | None]:
        """What a write that took the lock has brought; None if it did not last until it could be relied on.

        A process's first write has only the host's clock to stamp and to seed a token with, and a machine that was
        paused an old estimate of the server's. Nobody is told of a grant before the `Date` of the answer has confirmed
        what the record shows, or it has been put right: until then it does no harm if somebody takes the holder for
        dead. If the answer has no `Date`, other processes may still get one: the times are removed, so that no process
        compares them with its own `Date`, and the token counts as it is.
        """
        claim, stamp = write.claim, write.stamp
        token, acquired_at_ms = record.token, record.holders[claim.lease_id].acquired_at_ms or stamp.best_ms
        # Of a token that is far from where a good clock would have seeded it, nobody has been told.
        seed_is_wrong = record.unverified and not _close(reply, token)
        by_host = stamp.server_ms is None and reply.server_ms is None
        undated = by_host and (record.unverified or record.holders[claim.lease_id].renewed_at_ms is not None)
        time_is_wrong = not _close(reply, record.holders[claim.lease_id].renewed_at_ms)
        if undated or seed_is_wrong or time_is_wrong:
            stamp = yield from self.requests.fresh_stamp(claim.key, min(claim.lease_ms, _FRESH_MS), None)
            acquired_at_ms = stamp.best_ms
            if (
                record.unverified
                and not undated
                and not 0 <= token - acquired_at_ms <= _AHEAD_MS + self.observer.max_clock_skew_ms
            ):
                token = acquired_at_ms
            reply = yield with_timeout(
                self.requests.format.correct_grant(claim, record, token, stamp), within
            )
            if reply.refused:
                return None
        return Granted(
            claim,
            token,
            acquired_at_ms,
            stamp.at,
            # Also of an earlier write of ours, whose answer was lost.
            took_over=record.holders[claim.lease_id].took_over,
            reclaimed=tuple(each for each in write.victims if not each.cooling_down),
        )

    def granted_all(
        self, writes: Mapping[str, Take], seen: Mapping[str, Seen], within: float | None
    ) -> Operation[tuple[Granted, ...] | None]:
        """What a transaction that took the locks has brought; None if it did not last."""
        granted = []
        for key, write in writes.items():
            record, reply = seen[key]
            claim = write.claim
            if record is None or claim.lease_id not in record.holders:
                return None
            if claim.capacity > 1:
                # Others may have been granted slots since, so it cannot be told whose token is there.
                stamp = self.requests.stamp()
                again = self.requests.format.reacquire(claim, record.holders[claim.lease_id], stamp)
                write = replace(write, stamp=stamp, request=again)
                reply = yield with_timeout(again, within)
                if reply.refused:
                    return None
                record = self.requests.format.record(reply.output["Attributes"], reply.server_ms)
            one = yield from self.granted(write, record, reply, within)
            if one is None:
                return None
            granted.append(one)
        return tuple(granted)


def _close(reply: Reply, time_ms: int | None) -> bool:
    """Whether a time in the record is about that of the answer which shows it, or cannot be compared with it."""
    return reply.server_ms is None or time_ms is None or -_AHEAD_MS <= reply.server_ms - time_ms <= _BEHIND_MS
