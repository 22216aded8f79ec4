"""The format of aws_s3_lock 0.1.1, which is part of aws-ops-alpha: a lock is a JSON object in an S3 bucket.

An object has an owner, the time at which the owner acquired the lock, and the length of the lease in seconds.
There is neither a fencing token nor data, and other fields make the library's clients fail. So this package
stores the rest of a lease in the object's metadata, which those clients drop when they write.

**Races.** A client of aws_s3_lock reads the object, writes it without a condition, and reads it again a
second later to see which write came last. Clients of this package write with conditions (``If-None-Match``,
``If-Match``), so there are no races among them. They also read again after a second before they rely on a
grant, which detects a client of aws_s3_lock that read before their write and wrote after it. Two races
remain, in which a client of aws_s3_lock takes the lock from any holder: it needs longer than that second
between its read and its write, or it releases a lock after its own lease has ended. A holder of this package
detects both at its next heartbeat.

**Clocks.** A client of aws_s3_lock compares the end of a lease with its own clock.

- **Holders of this package** write a lease that is `max_clock_skew` longer than they rely on.
- **Holders of aws_s3_lock** are dead when server time is `max_clock_skew` past the end of their lease, or
  when this process has seen the same object for the length of the lease (R3).

**Requests.** S3 has no updates, so each edit first reads the object: a heartbeat and a release are two
requests, an acquire is three.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, assert_never

from airflow_dynamo_lock.core.effects import Request, Stamp
from airflow_dynamo_lock.core.foreign.one_holder import OneHolder
from airflow_dynamo_lock.core.foreign.s3_requests import (
    EDIT,
    LIST,
    READ,
    Object,
    ObjectEdit,
    S3Requests,
    holder_of,
)
from airflow_dynamo_lock.core.foreign.values import rounded_up
from airflow_dynamo_lock.core.model.arguments import checked_key
from airflow_dynamo_lock.core.model.claim import Claim
from airflow_dynamo_lock.core.model.decisions import Decision
from airflow_dynamo_lock.core.model.edits import Change, CoolDown, Drain, Edit, Enter, Heartbeat
from airflow_dynamo_lock.core.model.errors import LockRecordError, LockValueError
from airflow_dynamo_lock.core.model.hold import Hold
from airflow_dynamo_lock.core.model.record import Holder, LockRecord
from airflow_dynamo_lock.core.model.text import utc
from airflow_dynamo_lock.core.table.expressions import took_over
from airflow_dynamo_lock.core.table.features import Feature
from airflow_dynamo_lock.core.table.format import QUEUE_EMPTY, HeadUpdate
from airflow_dynamo_lock.core.table.items import holder_values
from airflow_dynamo_lock.core.table.renewal_writes import renewed_at

# Maximum length of an object's key, in bytes.
_KEY_BYTES = 1024
# Number of objects on a page of a listing.
_PAGE = 100


@dataclass(frozen=True)
class S3Objects(S3Requests, OneHolder):
    """Builds the requests on the objects of a bucket.

    :ivar table: name of the bucket.
    :ivar max_clock_skew_ms: the object shows a lease that is this much longer than its holder relies on,
        milliseconds.
    """

    table: str
    max_clock_skew_ms: int
    service: str = field(default="s3", init=False)

    name: ClassVar[str] = "s3"
    keys: ClassVar[Sequence[tuple[str, str, str]]] = ()
    ttl_attribute: ClassVar[str | None] = None
    # Without `Feature.FORGET`: clients of aws_s3_lock create an object without a condition, so deleting one
    # could free a held lock.
    features: ClassVar[frozenset[Feature]] = frozenset()
    note_wait = erase_wait = OneHolder._unsupported

    def checked_key(self, key: str) -> str:
        """Return the name of a lock if it can be the key of an object.

        :raises LockValueError: it cannot.
        """
        if len(checked_key(key).encode()) > _KEY_BYTES:
            raise LockValueError(
                f"The lock key {key[:40]!r}… is longer than the key of an object in S3 may be, {_KEY_BYTES} "
                "bytes: use a shorter one."
            )
        return key

    def acquire_idle(
        self,
        claim: Claim,
        stamp: Stamp,
        seen: LockRecord | None = None,
        head_update: HeadUpdate = QUEUE_EMPTY,
    ) -> Request:
        """Acquire a lock that is free or has no object."""

        def change(now: Object | None) -> Object | None:
            if now is None:
                return None if claim.only_existing else self._granted(claim, stamp)
            return self._granted(claim, stamp) if now.lock["owner"] is None else None

        return self._edit(claim.key, change, stamp, settles=True)

    def reclaim(
        self,
        claim: Claim,
        record: LockRecord,
        dead: Sequence[Holder],
        stamp: Stamp,
        head_update: HeadUpdate = QUEUE_EMPTY,
        reserved: int = 0,
    ) -> Request:
        """Replace a dead holder, on condition that it has not changed since it was found dead (R3).

        :param dead: the one holder of the lock.
        """
        (holder,) = dead

        def change(now: Object | None) -> Object | None:
            if now is None or not _is_held_by(now, holder):
                return None
            return self._granted(claim, stamp, took_over=took_over(dead))

        return self._edit(claim.key, change, stamp, settles=True)

    def _granted(self, claim: Claim, stamp: Stamp, *, took_over: bool = False) -> Object:
        """The object of a lock that the claim holds."""
        # Unique to the lease, so that the metadata of another lease of the same owner do not count.
        owner = f"{claim.owner} {claim.lease_id}"
        # No other details: the metadata have little space.
        about = {"attempt_of": claim.attempt_of} if claim.attempt_of else {}
        ours = {
            **holder_values(claim, stamp, took_over=took_over),
            "about": about,
            "lease_id": claim.lease_id,
            "mark": owner,
        }
        return Object(self._lock_fields(owner, claim.lease_ms, stamp), ours)

    def _lock_fields(self, owner: str, lease_ms: int, stamp: Stamp) -> Mapping[str, Any]:
        """The fields of the object of a held lock."""
        return {
            # Rounded up, so that no clock with less than the allowed skew sees the lease end early.
            "expire": rounded_up(lease_ms + self.max_clock_skew_ms),
            "lock_time": utc(stamp.best_ms).isoformat(),
            "release_time": None,
            "owner": owner,
        }

    def reacquire(self, claim: Claim, mine: Holder, stamp: Stamp, last: Holder | None) -> Request:
        """Continue to hold what an earlier write of the same claim acquired (R5)."""
        return self._renewal(
            claim.key,
            claim.lease_id,
            stamp,
            renewed_at(stamp, last),
            mine,
            settles=True,
            sets={"acquired_at": stamp.best_ms},
            only_seen=True,
        )

    def correct_grant(
        self, claim: Claim, seen: LockRecord, token: int, stamp: Stamp, last: Holder | None
    ) -> Request:
        """Correct the times of a grant that was stamped by a wrong clock (R3). There is no token, so `token`
        is not used."""
        return self.reacquire(claim, seen.holders[claim.lease_id], stamp, last)

    def renew(
        self, key: str, lease_id: str, lease_ms: int, stamp: Stamp, edit: Edit, seen: Holder | None = None
    ) -> Request:
        """Write a heartbeat: it proves that the holder is alive, and makes an edit.

        :param lease_ms: length of the lease if the edit changes it, milliseconds.
        :param seen: the holder as the sender last saw it; None if it has not.
        :raises NotImplementedError: the edit is `CoolDown`, which needs `min_hold`.
        """
        renewal = partial(self._renewal, key, lease_id, stamp, renewed_at(stamp, seen), seen)
        match edit:
            case Heartbeat():
                return renewal()
            case Change():
                length = lease_ms if edit.longer else None
                return renewal(unless_draining=True, longer_lease_ms=length)
            case Enter():
                return renewal(unless_draining=True, enters=edit.process)
            case Drain():
                # Once only: a second drain would lengthen the lease that the first one has shortened.
                sets = {"draining": True, "lease_ms": lease_ms}
                return renewal(unless_draining=True, sets=sets)
            case CoolDown():
                self._unsupported()
            case _:
                assert_never(edit)

    def _renewal(
        self,
        key: str,
        lease_id: str,
        stamp: Stamp,
        renewed_at_ms: int | None,
        seen: Holder | None,
        *,
        unless_draining: bool = False,
        longer_lease_ms: int | None = None,
        enters: str | None = None,
        settles: bool = False,
        sets: Mapping[str, Any] | None = None,
        only_seen: bool = False,
    ) -> Request:
        """Give the lease a new version, and make further changes.

        A renewal that arrives late must not undo a newer one (`core.table.renewal_writes` explains this).

        :param renewed_at_ms: the time that it writes, epoch milliseconds; None removes it.
        :param seen: the holder as the sender last saw it; None if it has not.
        :param unless_draining: refuse the renewal if the lease is draining.
        :param longer_lease_ms: new length of the lease, milliseconds; refused if it is shorter. None keeps
            the length.
        :param enters: id of a process that enters.
        :param settles: read the object again before the renewal counts.
        :param only_seen: the holder must not have changed since, not even by earlier heartbeats.
        :param sets: further values in the metadata.
        """

        def change(now: Object | None) -> Object | None:
            ours = _lease_in(now, lease_id)
            if ours is None:
                return None
            is_seen = seen is not None and ours["version"] == seen.version
            is_earlier = renewed_at_ms is not None and ours.get("renewed_at", renewed_at_ms) < renewed_at_ms
            if not is_seen and (only_seen or not is_earlier):
                return None
            if unless_draining and "draining" in ours:
                return None
            if longer_lease_ms is not None and longer_lease_ms < ours["lease_ms"]:
                return None
            renewed = {**ours, "version": stamp.version, "renewed_at": renewed_at_ms, **(sets or {})}
            if renewed_at_ms is None:
                del renewed["renewed_at"]
            if longer_lease_ms is not None:
                renewed["lease_ms"] = longer_lease_ms
            if enters is not None:
                renewed["processes"] = {**ours["processes"], enters: stamp.best_ms}
            return Object(self._lock_fields(ours["mark"], renewed["lease_ms"], stamp), renewed)

        return self._edit(key, change, stamp, settles=settles)

    def leave(self, key: str, lease_id: str, process: str, lease_ms: int, stamp: Stamp) -> Request:
        """Remove a guarded process that has left."""

        def change(now: Object | None) -> Object | None:
            ours = _lease_in(now, lease_id)
            if now is None or ours is None:
                return None
            inside = {name: at for name, at in ours["processes"].items() if name != process}
            return replace(now, ours={**ours, "processes": inside})

        return self._edit(key, change, stamp)

    def release(
        self,
        key: str,
        lease_id: str,
        slots: int,
        stamp: Stamp,
        *,
        confirmed: bool,
        hold: Hold | None = None,
        leaving: str | None = None,
    ) -> Request:
        """Free the lock, if no process but `leaving` is inside (R8). There is no token and no queue, so `confirmed` and
        `hold` are not used."""
        inside = set() if leaving is None else {leaving}

        def change(now: Object | None) -> Object | None:
            ours = _lease_in(now, lease_id)
            if now is None or ours is None or ours["processes"].keys() != inside:
                return None
            return _freed(now, stamp)

        return self._edit(key, change, stamp)

    def forget(self, key: str, latest_token: int | None) -> Request:
        """Not supported, because the format does not have `Feature.FORGET`.

        :raises NotImplementedError: always.
        """
        self._unsupported()

    def break_(self, key: str, holder: Holder, stamp: Stamp, decision: Decision | None = None) -> Request:
        """Remove a lease, even with processes inside. Only people decide that."""

        def change(now: Object | None) -> Object | None:
            return _freed(now, stamp) if now is not None and _is_held_by(now, holder) else None

        return self._edit(key, change, stamp)

    def get(self, key: str) -> Request:
        """Read one lock."""
        return Request(READ, {"Bucket": self.table, "Key": key})

    def batch_get(self, keys: Iterable[str], *, consistent: bool = False) -> list[Request]:
        """Read many locks, one per request. S3's reads are always consistent, so `consistent` is not used."""
        return [self.get(key) for key in keys]

    def asked_for(self, request: Request) -> set[str]:
        """The lock that a request of `batch_get` reads."""
        return {request.params["Key"]}

    def batch_records(self, output: Mapping[str, Any], server_ms: int | None) -> list[LockRecord]:
        """The lock in the response to a request of `batch_get`. A damaged one is left out; an attempt to
        acquire reports it."""
        try:
            return [self.record(output["Item"], server_ms)] if "Item" in output else []
        except LockRecordError:
            return []

    def unprocessed_keys(self, output: Mapping[str, Any]) -> set[str]:
        """Always empty, because each lock is read by a request of its own."""
        return set()

    def scan(self, cursor: Mapping[str, Any] | None, prefix: str = "", *, waiters: bool = False) -> Request:
        """Read one page of the bucket's objects whose keys begin with the prefix.

        :param cursor: ``LastEvaluatedKey`` of the page before; None for the first.
        """
        return Request(LIST, {"Bucket": self.table, "Prefix": prefix, "MaxKeys": _PAGE, **(cursor or {})})

    def _edit(self, key: str, change: ObjectEdit, stamp: Stamp, *, settles: bool = False) -> Request:
        """A request to read the object and write the changed one, which `S3Requests` carries out.

        :param settles: read the object again before the write counts, as for each grant.
        """
        how = {"change": change, "version": stamp.version, "settles": settles}
        return Request(EDIT, {"Bucket": self.table, "Key": key, **how})


def _is_held_by(now: Object, holder: Holder) -> bool:
    """Whether a holder has not changed since it was read."""
    present = holder_of(now)
    return present is not None and (present.lease_id, present.version) == (holder.lease_id, holder.version)


def _lease_in(now: Object | None, lease_id: str) -> Mapping[str, Any] | None:
    """The metadata of the object if this lease holds the lock, else None."""
    if now is None or now.ours is None or now.ours["lease_id"] != lease_id:
        return None
    return now.ours


def _freed(now: Object, stamp: Stamp) -> Object:
    """The object of the same lock without a holder."""
    return Object({**now.lock, "owner": None, "release_time": utc(stamp.best_ms).isoformat()})
