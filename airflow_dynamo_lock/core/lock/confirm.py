"""Confirm grants: a grant counts once its times and its token have been compared with the server's time (R3, R10)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from airflow_dynamo_lock.core.effects import Operation, Reply, Request, Stamp, with_timeout
from airflow_dynamo_lock.core.liveness import Observer
from airflow_dynamo_lock.core.lock.requests import Requests
from airflow_dynamo_lock.core.model.claim import Claim
from airflow_dynamo_lock.core.model.outcomes import Granted
from airflow_dynamo_lock.core.model.record import Holder, LockRecord

# How far the time in a grant may be behind, or ahead of, the `Date` of its response, milliseconds. The header has whole
# seconds, and so has the one from which the stamp was estimated.
_BEHIND_MS = 2000
_AHEAD_MS = 2000
# Maximum age of the server time by which a grant is corrected, milliseconds.
_FRESH_MS = 10_000


@dataclass(frozen=True)
class GrantWrite:
    """A write that grants a claim.

    :ivar claim: the claim, with the capacity of the lock.
    :ivar stamp: the stamp of the write.
    :ivar removed: the dead holders that the write removes.
    :ivar continued: the holder that the write continues, with its heartbeats; None if it makes a new one.
    """

    claim: Claim
    stamp: Stamp
    request: Request
    removed: tuple[Holder, ...] = ()
    continued: Holder | None = None


#: A lock, and the response that delivered it.
Seen = tuple[LockRecord | None, Reply]


@dataclass(frozen=True)
class Confirming:
    """Confirms grants, and corrects those that were stamped by a wrong clock."""

    requests: Requests
    observer: Observer

    def records(self, claims: Sequence[Claim], within: float | None) -> Operation[dict[str, Seen]]:
        """The locks as they are now, by one request unless DynamoDB leaves some of them out."""
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
        self, write: GrantWrite, record: LockRecord, reply: Reply, within: float | None
    ) -> Operation[Granted | None]:
        """The grant of a successful write, or None if the lease was lost before it was confirmed.

        The first write of a process has only the host's clock for its stamp and its token, and a machine that was
        suspended has an old estimate. So the caller receives no grant before the `Date` of the response has confirmed
        the times in the record, or they were corrected. Until then it does no harm if others see the holder as dead. If
        the response has no `Date`, those of other processes may have one: the times are removed, so that they are not
        compared with a `Date`, and the token counts as it is.

        :param record: the lock as the write left it.
        :param reply: the response that delivered the record.
        :param within: timeout of each request.
        """
        claim, stamp = write.claim, write.stamp
        holder = record.holders[claim.lease_id]
        token, acquired_at_ms = record.token, holder.acquired_at_ms or stamp.best_ms
        # An unverified token that is far from the server's time was given to no caller, so it may be replaced.
        token_is_wrong = record.unverified and not _close(reply, token)
        # A time that the write has kept is that of a heartbeat.
        kept = write.continued is not None and holder.renewed_at_ms == write.continued.renewed_at_ms
        time_is_wrong = not kept and not _close(reply, holder.renewed_at_ms)
        by_host = stamp.server_ms is None and reply.server_ms is None
        undated = by_host and (record.unverified or holder.renewed_at_ms is not None)
        if undated or token_is_wrong or time_is_wrong:
            until = None if within is None else reply.received_at + within
            stamp = yield from self.requests.fresh_stamp(claim.key, min(claim.lease_ms, _FRESH_MS), until)
            acquired_at_ms = stamp.best_ms
            if (
                record.unverified
                and not undated
                and not 0 <= token - acquired_at_ms <= _AHEAD_MS + self.observer.max_clock_skew_ms
            ):
                token = acquired_at_ms
            reply = yield with_timeout(
                self.requests.format.correct_grant(claim, record, token, stamp, write.continued), within
            )
            if reply.refused:
                return None
            corrected = self.requests.format.record(reply.output["Attributes"], reply.server_ms)
            self.requests.note_written(claim.key, corrected.holders[claim.lease_id])
        else:
            self.requests.note_written(claim.key, holder)
        return Granted(
            claim,
            token,
            acquired_at_ms,
            stamp.at,
            # As the record says, because an earlier write of the same claim may have taken over (R5).
            took_over=holder.took_over,
            reclaimed=tuple(each for each in write.removed if not each.cooling_down),
            usual_ms=record.usual_ms,
        )

    def granted_all(
        self, writes: Mapping[str, GrantWrite], seen: Mapping[str, Seen], within: float | None
    ) -> Operation[tuple[Granted, ...] | None]:
        """The grants of a committed transaction, or None if a lease was lost before it was confirmed.

        :param seen: the locks after the transaction, which does not return them.
        """
        granted = []
        for key, write in writes.items():
            record, reply = seen[key]
            claim = write.claim
            if record is None or claim.lease_id not in record.holders:
                return None
            if claim.capacity > 1:
                # Others may have been granted slots since, so the token in the record may be theirs.
                stamp = self.requests.stamp()
                mine = record.holders[claim.lease_id]
                again = self.requests.format.reacquire(claim, mine, stamp, write.continued)
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
    """Whether a time in the record agrees with the `Date` of the response, or one of the two is missing."""
    return reply.server_ms is None or time_ms is None or -_AHEAD_MS <= reply.server_ms - time_ms <= _BEHIND_MS
