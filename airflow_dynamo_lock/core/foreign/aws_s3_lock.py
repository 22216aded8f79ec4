"""The format of aws_s3_lock (read at its version 0.1.1), which ships in aws-ops-alpha: a lock is an object in a bucket
of S3, a JSON text with an owner, when he took the lock and for how many seconds.

It is read, and then written without any condition, and read again a second later to see who came last. That is a race,
which its users lose from time to time. We write with conditions (``If-None-Match``, ``If-Match``), so that among
ourselves there is none; and we read again after the same second before we count on a lock, so that one of theirs who
read before we wrote, and wrote after it, does not fool us. What remains is theirs: who has read a free lock and takes
longer than that second to write, writes over whoever holds it then. Our holder learns of it with its next heartbeat.

It goes by clocks, as dyndbmutex and awsflock do: what we write there lasts `max_clock_skew` longer than we count on,
and a holder of theirs is dead for us when S3's own time has passed his by as much, or when he has stayed as he was for
as long as his lease under our eyes. It has no fencing token and keeps no data.

Their objects must have no other fields, or their clients fail. So what the format has no place for stands in the
object's metadata, which they drop when they write. S3 has no updates: what changes an object reads it first, so that a
heartbeat and a release are two requests, and an acquire is three.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from airflow_dynamo_lock.core.model.arguments import checked_key
from airflow_dynamo_lock.core.model.claim import Claim
from airflow_dynamo_lock.core.model.edits import Change, CoolDown, Drain, Edit, Enter, Heartbeat
from airflow_dynamo_lock.core.model.errors import (
    LockRecordError,
    LockValueError,
)
from airflow_dynamo_lock.core.model.record import Holder, LockRecord
from airflow_dynamo_lock.core.model.text import utc
from airflow_dynamo_lock.core.table.expressions import OVERTAKEN_MS, took_over
from airflow_dynamo_lock.core.table.features import Feature
from airflow_dynamo_lock.core.table.format import QUEUE_EMPTY, HeadUpdate
from airflow_dynamo_lock.core.table.items import holder_values

_KEY_BYTES = 1024
_PAGE = 100


@dataclass(frozen=True)
class S3Objects(S3Requests, OneHolder):
    """See above.

    :ivar table: the bucket.
    """

    table: str
    max_clock_skew_ms: int
    service: str = field(default="s3", init=False)

    name: ClassVar[str] = "s3"
    keys: ClassVar[Sequence[tuple[str, str, str]]] = ()
    ttl_attribute: ClassVar[str | None] = None
    # Clients of that library create an object without a condition, so deleting one could free a held lock.
    features: ClassVar[frozenset[Feature]] = frozenset()

    def checked_key(self, key: str) -> str:
        """See `Format`."""
        if len(checked_key(key).encode()) > _KEY_BYTES:
            raise LockValueError(
                f"The lock key {key[:40]!r}… is longer than the name of an object in S3 may be, {_KEY_BYTES} bytes: "
                "use a shorter name."
            )
        return key

    def acquire_idle(
        self, claim: Claim, stamp: Stamp, seen: LockRecord | None = None, turn: HeadUpdate = QUEUE_EMPTY
    ) -> Request:
        """Take a lock that nobody holds, or that never was."""

        def change(now: Object | None) -> Object | None:
            free = not claim.only_existing if now is None else now.lock["owner"] is None
            return self._taken(claim, stamp) if free else None

        return self._edit(claim.key, change, stamp, takes=True)

    def reclaim(
        self,
        claim: Claim,
        record: LockRecord,
        dead: Sequence[Holder],
        stamp: Stamp,
        turn: HeadUpdate = QUEUE_EMPTY,
        leave: int = 0,
    ) -> Request:
        """Take the place of a dead holder who is still as he was seen."""
        (one,) = dead

        def change(now: Object | None) -> Object | None:
            same = now is not None and self._is(now, one)
            return self._taken(claim, stamp, took_over=took_over(dead)) if same else None

        return self._edit(claim.key, change, stamp, takes=True)

    def _is(self, now: Object, holder: Holder) -> bool:
        found = holder_of(now)
        return found is not None and (found.lease_id, found.version) == (holder.lease_id, holder.version)

    def _taken(self, claim: Claim, stamp: Stamp, *, took_over: bool = False) -> Object:
        owner = f"{claim.owner} {claim.lease_id}"
        about = {"attempt_of": claim.attempt_of} if claim.attempt_of else {}
        values = holder_values(claim, stamp, took_over=took_over) | {"about": about}
        return Object(
            self._lasting(owner, claim.lease_ms, stamp), {**values, "lease_id": claim.lease_id, "mark": owner}
        )

    def _lasting(self, owner: str, lease_ms: int, stamp: Stamp) -> Mapping[str, Any]:
        return {
            # A whole second more: nobody's clock shows less than one in our lock's last.
            "expire": -(-(lease_ms + self.max_clock_skew_ms) // 1000),
            "lock_time": utc(stamp.best_ms).isoformat(),
            "release_time": None,
            "owner": owner,
        }

    def reacquire(self, claim: Claim, mine: Holder, stamp: Stamp) -> Request:
        """Go on holding what an earlier write of ours took (rule R5)."""
        return self._renewal(
            claim.key, claim.lease_id, stamp, mine.version, takes=True, acquired_at=stamp.best_ms
        )

    def correct_grant(self, claim: Claim, seen: LockRecord, token: int, stamp: Stamp) -> Request:
        """Replace the times of a grant whose clock turned out to be wrong (rule R3)."""
        version = seen.holders[claim.lease_id].version
        return self._renewal(claim.key, claim.lease_id, stamp, version, takes=True, acquired_at=stamp.best_ms)

    def renew(
        self, key: str, lease_id: str, lease_ms: int, stamp: Stamp, edit: Edit, seen: str | None = None
    ) -> Request:
        """Write a heartbeat, and make an edit. `min_hold` does not exist here, so no lease cools down."""
        match edit:
            case Heartbeat():
                return self._renewal(key, lease_id, stamp, seen)
            case Change():
                return self._renewal(
                    key, lease_id, stamp, seen, unless_draining=True, new_lease_ms=edit.lease_ms
                )
            case Enter():
                return self._renewal(key, lease_id, stamp, seen, unless_draining=True, enters=edit.process)
            case Drain():
                return self._renewal(
                    key, lease_id, stamp, seen, unless_draining=True, draining=True, lease_ms=lease_ms
                )
            case CoolDown():
                self._unsupported()
            case _:
                assert_never(edit)

    def _renewal(
        self,
        key: str,
        lease_id: str,
        stamp: Stamp,
        seen: str | None,
        *,
        unless_draining: bool = False,
        new_lease_ms: int | None = None,
        enters: str | None = None,
        takes: bool = False,
        **values: Any,
    ) -> Request:
        """A write that gives the lease a new version; `native` tells what it must not do when it arrives late.

        :param new_lease_ms: it is refused if that would make the lease shorter.
        :param values: what else it changes of our own.
        """

        def change(now: Object | None) -> Object | None:
            ours = None if now is None else now.ours
            if now is None or ours is None or ours["lease_id"] != lease_id:
                return None
            newer = stamp.server_ms is not None and ours.get("renewed_at", 0) > stamp.best_ms + OVERTAKEN_MS
            if ours["version"] != seen if seen is not None else newer:
                return None
            if unless_draining and "draining" in ours:
                return None
            if new_lease_ms is not None and new_lease_ms < ours["lease_ms"]:
                return None
            after = {**ours, "version": stamp.version, "renewed_at": stamp.server_ms, **values}
            after["lease_ms"] = new_lease_ms or after["lease_ms"]
            if stamp.server_ms is None:
                del after["renewed_at"]
            if enters is not None:
                after["processes"] = {**ours["processes"], enters: stamp.best_ms}
            return Object(self._lasting(ours["mark"], after["lease_ms"], stamp), after)

        return self._edit(key, change, stamp, takes=takes)

    def leave(self, key: str, lease_id: str, process: str, lease_ms: int, stamp: Stamp) -> Request:
        """Note that a guarded process has left."""

        def change(now: Object | None) -> Object | None:
            if now is None or now.ours is None or now.ours["lease_id"] != lease_id:
                return None
            inside = {name: at for name, at in now.ours["processes"].items() if name != process}
            return replace(now, ours={**now.ours, "processes": inside})

        return self._edit(key, change, stamp)

    def release(self, key: str, lease_id: str, slots: int, stamp: Stamp, *, confirmed: bool) -> Request:
        """Give the lock back, if nobody is inside any more (rule R8)."""

        def change(now: Object | None) -> Object | None:
            mine = now is not None and now.ours is not None and now.ours["lease_id"] == lease_id
            return _freed(now, stamp) if now and mine and not (now.ours or {})["processes"] else None

        return self._edit(key, change, stamp)

    def forget(self, key: str, latest_token: int | None) -> Request:
        """Never asked for, because the format does not have `Feature.FORGET`."""
        self._unsupported()

    def break_(self, key: str, holder: Holder, stamp: Stamp) -> Request:
        """Take the lock away from its holder, whoever is inside. For people."""

        def change(now: Object | None) -> Object | None:
            return _freed(now, stamp) if now is not None and self._is(now, holder) else None

        return self._edit(key, change, stamp)

    def get(self, key: str) -> Request:
        """Read one lock."""
        return Request(READ, {"Bucket": self.table, "Key": key})

    def batch_get(self, keys: Iterable[str], *, consistent: bool = False) -> list[Request]:
        """Read many locks: one request for each, for S3 has no other."""
        return [self.get(key) for key in keys]

    def asked_for(self, request: Request) -> set[str]:
        """The locks that a `batch_get` reads."""
        return {request.params["Key"]}

    def batch_records(self, output: Mapping[str, Any], server_ms: int | None) -> list[LockRecord]:
        """The lock in the answer to a `batch_get`."""
        try:
            return [self.record(output["Item"], server_ms)] if "Item" in output else []
        except LockRecordError:
            return []

    def unprocessed_keys(self, output: Mapping[str, Any]) -> set[str]:
        """None is ever left."""
        return set()

    def scan(self, cursor: Mapping[str, Any] | None, prefix: str = "") -> Request:
        """Read some of the bucket's objects whose names begin like that."""
        return Request(LIST, {"Bucket": self.table, "Prefix": prefix, "MaxKeys": _PAGE, **(cursor or {})})

    def _edit(self, key: str, change: ObjectEdit, stamp: Stamp, *, takes: bool = False) -> Request:
        """
        :param takes: it is to be read again before it counts.
        """
        what = {"change": change, "version": stamp.version, "takes": takes}
        return Request(EDIT, {"Bucket": self.table, "Key": key, **what})


def _freed(now: Object, stamp: Stamp) -> Object:
    return Object({**now.lock, "owner": None, "release_time": utc(stamp.best_ms).isoformat()})
