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

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, ClassVar

from airflow_dynamo_lock.core.effects import Operation, Reply, Request, Sleep, Stamp, T, with_timeout
from airflow_dynamo_lock.core.foreign.one_holder import OneHolder
from airflow_dynamo_lock.core.foreign.values import checked_ms
from airflow_dynamo_lock.core.model.arguments import checked_key
from airflow_dynamo_lock.core.model.claim import Change, Claim
from airflow_dynamo_lock.core.model.errors import (
    LockAccessError,
    LockError,
    LockRecordError,
    LockUnavailableError,
    LockValueError,
)
from airflow_dynamo_lock.core.model.record import Holder, LockRecord
from airflow_dynamo_lock.core.model.text import shown, utc
from airflow_dynamo_lock.core.table.expressions import OVERTAKEN_MS, took_over
from airflow_dynamo_lock.core.table.format import QUEUE_EMPTY, HeadUpdate
from airflow_dynamo_lock.core.table.items import holder_values, read_holder

#: How long after it was written a lock is looked at once more before it counts as taken, seconds: what their clients
#: wait unless they are told otherwise.
SETTLE = 1.0

#: The name of our metadata.
OURS = "airflow-dynamo-lock"

# Requests of our own, which `carry_out` puts into those of S3.
_READ, _EDIT, _LIST = "read", "edit", "list"
# How often an object that others change at the same time is read and written again.
_ROUNDS = 8
# What S3 takes as metadata, in bytes, less its name; and the longest key.
_METADATA_BYTES = 2048 - len(OURS)
_KEY_BYTES = 1024
# A lock's object has some hundred bytes. What is larger than this is none.
_LARGEST = 8192
_PAGE = 100

_FIELDS = {"expire", "lock_time", "release_time", "owner"}
_NONE = Change()


class _NotALockError(LockRecordError):
    """The object does not look like one of the format: other things may be kept in the bucket, too."""


@dataclass(frozen=True)
class _Object:
    """A lock's object.

    :ivar lock: its fields.
    :ivar ours: what stands in its metadata, if we are the holder.
    """

    lock: Mapping[str, Any]
    ours: Mapping[str, Any] | None = None


#: What an object is to become, given what it is; None if it is to stay.
_Change = Callable[[_Object | None], _Object | None]


@dataclass(frozen=True)
class S3Objects(OneHolder):
    """See above.

    :ivar table: the bucket.
    """

    table: str
    max_clock_skew_ms: int
    service: str = field(default="s3", init=False)

    name: ClassVar[str] = "s3"
    keys: ClassVar[Sequence[tuple[str, str, str]]] = ()
    ttl_attribute: ClassVar[str | None] = None

    def checked_key(self, key: str) -> str:
        """See `Format`."""
        if len(checked_key(key).encode()) > _KEY_BYTES:
            raise LockValueError(
                f"The lock key {key[:40]!r}… is longer than the name of an object in S3 may be, {_KEY_BYTES} bytes: "
                "use a shorter name."
            )
        return key

    def checked_claim(self, claim: Claim) -> Claim:
        """See `Format`."""
        if claim.data:
            self._cannot("keep data")
        return super().checked_claim(claim)

    # -- take ---------------------------------------------------------------------------------------------------

    def acquire_idle(
        self, claim: Claim, stamp: Stamp, seen: LockRecord | None = None, turn: HeadUpdate = QUEUE_EMPTY
    ) -> Request:
        """Take a lock that nobody holds, or that never was."""

        def change(now: _Object | None) -> _Object | None:
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

        def change(now: _Object | None) -> _Object | None:
            same = now is not None and self._is(now, one)
            return self._taken(claim, stamp, took_over=took_over(dead)) if same else None

        return self._edit(claim.key, change, stamp, takes=True)

    def _is(self, now: _Object, holder: Holder) -> bool:
        found = _holder(now)
        return found is not None and (found.lease_id, found.version) == (holder.lease_id, holder.version)

    def _taken(self, claim: Claim, stamp: Stamp, *, took_over: bool = False) -> _Object:
        owner = f"{claim.owner} {claim.lease_id}"
        about = {"attempt_of": claim.attempt_of} if claim.attempt_of else {}
        values = holder_values(claim, stamp, took_over=took_over) | {"about": about}
        return _Object(
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

    # -- keep ---------------------------------------------------------------------------------------------------

    def heartbeat(
        self, key: str, lease_id: str, lease_ms: int, stamp: Stamp, seen: str | None = None
    ) -> Request:
        """Show that the holder lives."""
        return self._renewal(key, lease_id, stamp, seen)

    def heartbeat_unless_draining(
        self,
        key: str,
        lease_id: str,
        lease_ms: int,
        stamp: Stamp,
        seen: str | None = None,
        change: Change = _NONE,
    ) -> Request:
        """Show that the holder lives, while the lease has not been abandoned."""
        if change.data:
            self._cannot("keep data")
        return self._renewal(key, lease_id, stamp, seen, unless_draining=True, new_lease_ms=change.lease_ms)

    def enter(
        self, key: str, lease_id: str, process: str, lease_ms: int, stamp: Stamp, seen: str | None = None
    ) -> Request:
        """Note that a guarded process is inside, and beat."""
        return self._renewal(key, lease_id, stamp, seen, unless_draining=True, enters=process)

    def drain(self, key: str, lease_id: str, grace_ms: int, stamp: Stamp, seen: str | None = None) -> Request:
        """Shorten a lease to a grace and let nobody enter any more (rule R8)."""
        return self._renewal(
            key, lease_id, stamp, seen, unless_draining=True, draining=True, lease_ms=grace_ms
        )

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

        def change(now: _Object | None) -> _Object | None:
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
            return _Object(self._lasting(ours["mark"], after["lease_ms"], stamp), after)

        return self._edit(key, change, stamp, takes=takes)

    # -- give back ----------------------------------------------------------------------------------------------

    def leave(self, key: str, lease_id: str, process: str, lease_ms: int, stamp: Stamp) -> Request:
        """Note that a guarded process has left."""

        def change(now: _Object | None) -> _Object | None:
            if now is None or now.ours is None or now.ours["lease_id"] != lease_id:
                return None
            inside = {name: at for name, at in now.ours["processes"].items() if name != process}
            return replace(now, ours={**now.ours, "processes": inside})

        return self._edit(key, change, stamp)

    def release(self, key: str, lease_id: str, slots: int, stamp: Stamp, *, confirmed: bool) -> Request:
        """Give the lock back, if nobody is inside any more (rule R8)."""

        def change(now: _Object | None) -> _Object | None:
            mine = now is not None and now.ours is not None and now.ours["lease_id"] == lease_id
            return _freed(now, stamp) if now and mine and not (now.ours or {})["processes"] else None

        return self._edit(key, change, stamp)

    def forget(self, key: str, latest_token: int | None) -> Request:
        """Their clients make it anew without any condition, so that it had better stay."""
        self._cannot("be forgotten")

    def break_(self, key: str, holder: Holder, stamp: Stamp) -> Request:
        """Take the lock away from its holder, whoever is inside. For people."""

        def change(now: _Object | None) -> _Object | None:
            return _freed(now, stamp) if now is not None and self._is(now, holder) else None

        return self._edit(key, change, stamp)

    # -- reads --------------------------------------------------------------------------------------------------

    def get(self, key: str) -> Request:
        """Read one lock."""
        return Request(_READ, {"Bucket": self.table, "Key": key})

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
        return Request(_LIST, {"Bucket": self.table, "Prefix": prefix, "MaxKeys": _PAGE, **(cursor or {})})

    def record(self, item: Mapping[str, Any], server_ms: int | None) -> LockRecord:
        """The lock that an object shows, which `carry_out` has read.

        :raises LockRecordError: it shows none.
        """
        if isinstance(item["lock"], LockRecordError):
            raise item["lock"]
        holder = _holder(item["lock"])
        return LockRecord(
            item["key"],
            capacity=1,
            available=0 if holder else 1,
            holders={holder.lease_id: holder} if holder else {},
            token=0,
            read_at_ms=server_ms,
        )

    # -- how S3 carries them out --------------------------------------------------------------------------------

    def _edit(self, key: str, change: _Change, stamp: Stamp, *, takes: bool = False) -> Request:
        """
        :param takes: it is to be read again before it counts.
        """
        what = {"change": change, "version": stamp.version, "takes": takes}
        return Request(_EDIT, {"Bucket": self.table, "Key": key, **what})

    def carry_out(self, operation: Operation[T]) -> Operation[T]:
        """See `Format`."""
        answer: Any = None
        failure: BaseException | None = None
        while True:
            try:
                effect = operation.send(answer) if failure is None else operation.throw(failure)
            except StopIteration as end:
                result: T = end.value
                return result
            answer = failure = None
            try:
                match effect:
                    case Request(action="edit"):
                        answer = yield from self._change(effect)
                    case Request(action="read"):
                        found, reply = yield from self._read(effect.params["Key"], effect.within)
                        answer = replace(reply, output=_shown(effect.params["Key"], found), refused=False)
                    case Request(action="list"):
                        answer = yield from self._list(effect)
                    case _:
                        answer = yield effect
            except BaseException as raised:
                failure = raised

    def _change(self, edit: Request) -> Operation[Reply]:
        """Read an object, and write what it becomes if it is still the same then. All of it in the time that the edit
        has."""
        key, version, retried, wrote = edit.params["Key"], edit.params["version"], False, False
        began: float | None = None
        left = edit.within

        def passed(reply: Reply) -> float | None:
            nonlocal began
            began = reply.sent_at if began is None else began
            if edit.within is None:
                return None
            rest = edit.within - (reply.received_at - began)
            if rest <= 0:
                raise LockUnavailableError(
                    f"S3 has not answered for the lock {key!r} within {edit.within:.1f} s.",
                    maybe_applied=wrote,
                )
            return rest

        for _ in range(_ROUNDS):
            found, reply = yield from self._read(key, left)
            if found is not None and isinstance(found[0], LockRecordError):
                raise found[0]
            now = None if found is None else found[0]
            assert not isinstance(now, LockRecordError)
            wanted = edit.params["change"](now)
            if wanted is None:
                return replace(reply, output=_shown(key, found), refused=True, retried=retried)
            left = passed(reply)
            wrote = True
            put: Reply = yield with_timeout(self._put(key, wanted, found, version), left)
            retried |= put.retried
            if put.refused:
                left = passed(put)
                continue  # somebody has written in the meantime
            if edit.params["takes"]:
                yield Sleep(SETTLE)
                try:
                    found, reply = yield from self._read(key, edit.within)
                except LockError as failure:
                    raise LockUnavailableError(
                        f"It cannot be seen whether the lock {key!r} was taken: {failure}", maybe_applied=True
                    ) from failure
                if found is None or found[1] != put.output["ETag"]:
                    return replace(reply, output=_shown(key, found), refused=True, retried=retried)
            return replace(put, output={"Attributes": {"key": key, "lock": wanted}})
        raise LockUnavailableError(
            f"The lock {key!r} was written to by others each time that it was tried here.",
            maybe_applied=retried,
        )

    def _put(self, key: str, wanted: _Object, found: _Found, version: str) -> Request:
        ours = {} if wanted.ours is None else {OURS: json.dumps(wanted.ours)}
        if len(ours.get(OURS, "")) > _METADATA_BYTES:
            raise LockValueError(
                f"There is no room for this in the metadata of the object {key!r}: use a shorter owner and lease id, "
                "or fewer tasks at a time under one lock."
            )
        return Request(
            "PutObject",
            {
                "Bucket": self.table,
                "Key": key,
                # `IfMatch` goes by the contents, and not by the metadata: so there is something in them that is new
                # each time, and that no reader minds.
                "Body": json.dumps(dict(wanted.lock)).encode() + _blank(version),
                "ContentType": "application/json",
                "Metadata": ours,
                **({"IfNoneMatch": "*"} if found is None else {"IfMatch": found[1]}),
            },
        )

    def _read(self, key: str, within: float | None) -> Operation[tuple[_Found, Reply]]:
        reply: Reply = yield with_timeout(Request("GetObject", {"Bucket": self.table, "Key": key}), within)
        if reply.refused:
            return None, reply  # there is none
        return (_object(key, self.table, reply.output), reply.output["ETag"]), reply

    def _list(self, page: Request) -> Operation[Reply]:
        reply: Reply = yield Request("ListObjectsV2", page.params)
        items = []
        for each in reply.output.get("Contents", ()):
            if each["Size"] > _LARGEST:
                continue  # something else that is kept in the bucket
            found: _Found
            try:
                found, _ = yield from self._read(each["Key"], page.within)
            except LockAccessError as denied:
                found = LockRecordError(f"The object {each['Key']!r} cannot be read: {denied}"), ""
            if found is not None and not isinstance(found[0], _NotALockError):
                items.append({"key": each["Key"], "lock": found[0]})
        token = reply.output.get("NextContinuationToken")
        after = {"LastEvaluatedKey": {"ContinuationToken": token}} if token else {}
        return replace(reply, output={"Items": items, **after})


# An object as it was read, or what is wrong with it; and its version.
_Found = tuple[_Object | LockRecordError, str] | None


def _shown(key: str, found: _Found) -> Mapping[str, Any]:
    return {} if found is None else {"Item": {"key": key, "lock": found[0]}}


def _blank(version: str) -> bytes:
    """A text as blanks, which may stand behind any JSON."""
    return bytes(b" \t"[byte >> bit & 1] for byte in version.encode() for bit in range(8))


def _freed(now: _Object, stamp: Stamp) -> _Object:
    return _Object({**now.lock, "owner": None, "release_time": utc(stamp.best_ms).isoformat()})


def _object(key: str, bucket: str, output: Mapping[str, Any]) -> _Object | LockRecordError:
    try:
        lock = _json(output["Body"])
        if not isinstance(lock, dict) or lock.keys() != _FIELDS:
            return _NotALockError(
                _why(key, bucket, f"it is no JSON object with {', '.join(sorted(_FIELDS))}")
            )
        ours = json.loads(output.get("Metadata", {}).get(OURS, "null"))
        found = _Object(lock, ours if ours and ours["mark"] == lock["owner"] else None)
        _holder(found)
    except (TypeError, ValueError, KeyError, OverflowError, RecursionError) as wrong:
        return LockRecordError(_why(key, bucket, str(wrong)))
    return found


def _json(text: bytes) -> Any:
    """What a JSON text says; None if it is not one."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _why(key: str, bucket: str, wrong: str) -> str:
    return (
        f"The object {key!r} in the bucket {bucket!r} is not a lock ({shown(wrong)}); it was left as it is: check the "
        "bucket and the name, or look at the object before you delete it."
    )


def _holder(found: _Object) -> Holder | None:
    """Who holds the lock that an object shows."""
    owner = found.lock["owner"]
    if owner is None:
        return None
    if found.ours is not None:
        return read_holder(found.ours["lease_id"], found.ours)
    if not isinstance(owner, str):
        raise TypeError("its owner is not text")
    expire_ms = max(1, checked_ms("expire", found.lock["expire"], 1000))
    try:
        taken = datetime.fromisoformat(found.lock["lock_time"])
    except ValueError:
        raise ValueError("its lock_time is no time") from None
    if taken.tzinfo is None:
        raise ValueError("its lock_time has no time zone")
    taken_ms = int(taken.timestamp() * 1000)
    return Holder(
        owner,
        owner,
        1,
        expire_ms,
        expire_ms,
        f"{found.lock['lock_time']} {found.lock['expire']} {owner}",
        acquired_at_ms=max(0, taken_ms),
        expires_at_ms=checked_ms("lock_time and expire", taken_ms + expire_ms),
        ours=False,
    )
