"""How operations on a lock's object are carried out by S3, which has no updates and no partial reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from airflow_dynamo_lock.core.effects import Operation, Reply, Request, Sleep, T, with_timeout
from airflow_dynamo_lock.core.foreign.values import checked_ms
from airflow_dynamo_lock.core.model.errors import (
    LockAccessError,
    LockError,
    LockRecordError,
    LockUnavailableError,
    LockValueError,
)
from airflow_dynamo_lock.core.model.record import Holder, LockRecord
from airflow_dynamo_lock.core.model.text import shown
from airflow_dynamo_lock.core.table.items import read_holder

#: How long after it was written a lock is looked at once more before it counts as taken, seconds: what their clients
#: wait unless they are told otherwise.
SETTLE = 1.0
#: The name of our metadata.
OURS = "airflow-dynamo-lock"
# Requests of our own, which `carry_out` puts into those of S3.
READ, EDIT, LIST = "read", "edit", "list"
# How often an object that others change at the same time is read and written again.
_ROUNDS = 8
# What S3 takes as metadata, in bytes, less its name; and the longest key.
_METADATA_BYTES = 2048 - len(OURS)
# A lock's object has some hundred bytes. What is larger than this is none.
_LARGEST = 8192
_FIELDS = {"expire", "lock_time", "release_time", "owner"}


class _NotALockError(LockRecordError):
    """The object does not look like one of the format: other things may be kept in the bucket, too."""


@dataclass(frozen=True)
class Object:
    """A lock's object.

    :ivar lock: its fields.
    :ivar ours: what stands in its metadata, if we are the holder.
    """

    lock: Mapping[str, Any]
    ours: Mapping[str, Any] | None = None


#: What an object is to become, given what it is; None if it is to stay.
ObjectEdit = Callable[[Object | None], Object | None]

# An object as it was read, or what is wrong with it; and its version.
Found = tuple[Object | LockRecordError, str] | None


class S3Requests:
    """Carries requests of this format out as requests of S3.

    :ivar table: the bucket.
    """

    table: str

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

    def _put(self, key: str, wanted: Object, found: Found, version: str) -> Request:
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

    def _read(self, key: str, within: float | None) -> Operation[tuple[Found, Reply]]:
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
            found: Found
            try:
                found, _ = yield from self._read(each["Key"], page.within)
            except LockAccessError as denied:
                found = LockRecordError(f"The object {each['Key']!r} cannot be read: {denied}"), ""
            if found is not None and not isinstance(found[0], _NotALockError):
                items.append({"key": each["Key"], "lock": found[0]})
        token = reply.output.get("NextContinuationToken")
        after = {"LastEvaluatedKey": {"ContinuationToken": token}} if token else {}
        return replace(reply, output={"Items": items, **after})

    def record(self, item: Mapping[str, Any], server_ms: int | None) -> LockRecord:
        """The lock that an object shows, which `carry_out` has read.

        :raises LockRecordError: it shows none.
        """
        if isinstance(item["lock"], LockRecordError):
            raise item["lock"]
        holder = holder_of(item["lock"])
        return LockRecord(
            item["key"],
            capacity=1,
            available=0 if holder else 1,
            holders={holder.lease_id: holder} if holder else {},
            token=0,
            read_at_ms=server_ms,
        )


def _shown(key: str, found: Found) -> Mapping[str, Any]:
    return {} if found is None else {"Item": {"key": key, "lock": found[0]}}


def _blank(version: str) -> bytes:
    """A text as blanks, which may stand behind any JSON."""
    return bytes(b" \t"[byte >> bit & 1] for byte in version.encode() for bit in range(8))


def _object(key: str, bucket: str, output: Mapping[str, Any]) -> Object | LockRecordError:
    try:
        lock = _json(output["Body"])
        if not isinstance(lock, dict) or lock.keys() != _FIELDS:
            return _NotALockError(
                _why(key, bucket, f"it is no JSON object with {', '.join(sorted(_FIELDS))}")
            )
        ours = json.loads(output.get("Metadata", {}).get(OURS, "null"))
        found = Object(lock, ours if ours and ours["mark"] == lock["owner"] else None)
        holder_of(found)
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


def holder_of(found: Object) -> Holder | None:
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
