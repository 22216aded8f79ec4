"""Carries out reads and edits of a lock's object as requests of S3, which can only replace a whole object."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple

from airflow_dynamo_lock.core.effects import Effect, Operation, Reply, Request, Sleep, T, with_timeout
from airflow_dynamo_lock.core.foreign.values import checked_ms, their_holder
from airflow_dynamo_lock.core.model.errors import (
    LockAccessError,
    LockError,
    LockRecordError,
    LockUnavailableError,
    LockValueError,
)
from airflow_dynamo_lock.core.model.record import Holder, LockRecord
from airflow_dynamo_lock.core.model.text import readable
from airflow_dynamo_lock.core.table.items import read_holder

#: How long after the write of a grant the object is read again, in seconds. Clients of aws_s3_lock pause as
#: long by default.
SETTLE = 1.0
#: Name of this package's entry in the metadata of the object.
OURS = "airflow-dynamo-lock"
# Actions of this format's own requests, which `S3Requests.carry_out` replaces by requests of S3.
READ, EDIT, LIST = "read", "edit", "list"
# Maximum number of attempts to write an object that other clients change at the same time.
_ATTEMPTS = 8
# Space for the metadata in bytes: S3's limit, less the name of the entry.
_METADATA_BYTES = 2048 - len(OURS)
# Maximum size of a lock's object in bytes; locks have a few hundred. A listing skips larger objects.
_MAX_OBJECT_BYTES = 8192
# The fields of a lock's object. aws_s3_lock refuses objects with other fields.
_FIELDS = {"expire", "lock_time", "release_time", "owner"}


class _NotALockError(LockRecordError):
    """The object does not have the fields of a lock. A listing skips it, as any other file in the bucket."""


@dataclass(frozen=True)
class Object:
    """The content of a lock's object.

    :ivar lock: the fields of aws_s3_lock.
    :ivar ours: the lease from the metadata, if a client of this package holds the lock; else None.
    """

    lock: Mapping[str, Any]
    ours: Mapping[str, Any] | None = None


#: Given the object as it is (None if there is none), returns the object to write; None refuses the edit.
ObjectEdit = Callable[[Object | None], Object | None]


class _Found(NamedTuple):
    """An object as S3 returned it.

    :ivar content: the lock; or the error to raise, if the object is not a lock.
    :ivar etag: version of the object, for the condition of a write.
    """

    content: Object | LockRecordError
    etag: str


class S3Requests:
    """Carries out this format's requests as requests of S3.

    :ivar table: name of the bucket.
    """

    table: str

    def carry_out(self, operation: Operation[T]) -> Operation[T]:
        """Run an operation, and send the requests of S3 that its `READ`, `EDIT` and `LIST` requests need.

        All other effects go to the driver as they are.
        """
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
                answer = yield from self._replace(effect)
            except BaseException as raised:
                failure = raised

    def _replace(self, effect: Effect) -> Operation[Any]:
        """Carry out one effect, and return the answer to it."""
        match effect:
            case Request(action="edit"):
                return (yield from self._edit_object(effect))
            case Request(action="read"):
                return (yield from self._read_object(effect))
            case Request(action="list"):
                return (yield from self._list_objects(effect))
            case _:
                return (yield effect)

    def _read_object(self, read: Request) -> Operation[Reply]:
        """Read one lock: ``Item`` in the output, if there is an object."""
        key = read.params["Key"]
        found, reply = yield from self._get(key, read.within)
        return replace(reply, output=_output(key, found), refused=False)

    def _edit_object(self, edit: Request) -> Operation[Reply]:
        """Read an object and write the changed object, on condition that it is still the one that was read.
        If another client has written in between, try again.

        The reply is that of an `UpdateItem`: ``Attributes`` has the new object; a refusal has the present one
        as ``Item``.

        :raises LockRecordError: the object is not a lock.
        :raises LockUnavailableError: the timeout of the edit is over, or other writes came first each time.
        :raises LockValueError: the lease is too large for the metadata.
        """
        key, timeout = edit.params["Key"], _Timeout(edit)
        written = retried = False
        for _ in range(_ATTEMPTS):
            found, reply = yield from self._get(key, timeout.left)
            wanted = edit.params["change"](_valid(found))
            if wanted is None:
                return replace(reply, output=_output(key, found), refused=True, retried=retried)
            timeout.spend(reply, maybe_applied=written)
            written = True
            put: Reply = yield with_timeout(
                self._put(key, wanted, found, edit.params["version"]), timeout.left
            )
            retried |= put.retried
            if put.refused:  # another client has written in between
                timeout.spend(put, maybe_applied=True)
                continue
            if edit.params["settles"]:
                overtaken = yield from self._settle(edit, put.output["ETag"])
                if overtaken is not None:
                    return replace(overtaken, retried=retried)
            return replace(put, output={"Attributes": {"key": key, "lock": wanted}})
        raise LockUnavailableError(
            f"The lock {key!r} was not written, because other writes came first each time.",
            maybe_applied=retried,
        )

    def _settle(self, edit: Request, etag: str) -> Operation[Reply | None]:
        """Read the object again after `SETTLE` seconds, as aws_s3_lock does. A client of that library that
        read the free lock before this write may have written after it.

        :param etag: version of the object that was written.
        :returns: None if the object is unchanged; else a refusal that shows the present object.
        :raises LockUnavailableError: the object could not be read, so the result is unknown.
        """
        key = edit.params["Key"]
        yield Sleep(SETTLE)
        try:
            found, reply = yield from self._get(key, edit.within)
        except LockError as failure:
            raise LockUnavailableError(
                f"It is unknown whether the lock {key!r} was acquired: {failure}", maybe_applied=True
            ) from failure
        if found is not None and found.etag == etag:
            return None
        return replace(reply, output=_output(key, found), refused=True)

    def _put(self, key: str, wanted: Object, found: _Found | None, version: str) -> Request:
        """Write an object, on condition that the object is still `found`, or that there is still none.

        :param version: version of the edit's stamp.
        :raises LockValueError: the lease is too large for the metadata.
        """
        ours = {} if wanted.ours is None else {OURS: json.dumps(wanted.ours)}
        if len(ours.get(OURS, "")) > _METADATA_BYTES:
            raise LockValueError(
                f"The metadata of the object {key!r} would be too large: use a shorter owner and lease id, "
                "or fewer tasks at a time under one lock."
            )
        return Request(
            "PutObject",
            {
                "Bucket": self.table,
                "Key": key,
                # The ETag depends on the body and not on the metadata. So each edit writes other white space.
                "Body": json.dumps(dict(wanted.lock)).encode() + _white_space(version),
                "ContentType": "application/json",
                "Metadata": ours,
                **({"IfNoneMatch": "*"} if found is None else {"IfMatch": found.etag}),
            },
        )

    def _get(self, key: str, within: float | None) -> Operation[tuple[_Found | None, Reply]]:
        """Read an object.

        :param within: timeout in seconds; None leaves it to the SDK's timeouts.
        :returns: the object, or None if there is none; and S3's reply.
        """
        reply: Reply = yield with_timeout(Request("GetObject", {"Bucket": self.table, "Key": key}), within)
        if reply.refused:
            return None, reply
        return _Found(_parse_object(key, self.table, reply.output), reply.output["ETag"]), reply

    def _list_objects(self, page: Request) -> Operation[Reply]:
        """List one page of the bucket, and read each object that may be a lock.

        The output is that of a `Scan`. If a lock is damaged or may not be read, its item contains the error.
        """
        reply: Reply = yield Request("ListObjectsV2", page.params)
        items = []
        for each in reply.output.get("Contents", ()):
            key = each["Key"]
            if each["Size"] > _MAX_OBJECT_BYTES:
                continue
            content: Object | LockRecordError
            try:
                found, _ = yield from self._get(key, page.within)
                if found is None:  # deleted since the listing
                    continue
                content = found.content
            except LockAccessError as denied:
                content = LockRecordError(f"The object {key!r} cannot be read: {denied}")
            if not isinstance(content, _NotALockError):
                items.append({"key": key, "lock": content})
        token = reply.output.get("NextContinuationToken")
        after = {"LastEvaluatedKey": {"ContinuationToken": token}} if token else {}
        return replace(reply, output={"Items": items, **after})

    def record(self, item: Mapping[str, Any], server_ms: int | None) -> LockRecord:
        """The lock that an item shows, with one slot and without a token.

        :param item: as `carry_out` has built it: the name in ``key``; the object, or an error, in ``lock``.
        :raises LockRecordError: the object is not a lock.
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


class _Timeout:
    """The timeout of an edit, which its requests share.

    :ivar left: seconds that are left; None if the edit has no timeout.
    """

    def __init__(self, edit: Request) -> None:
        self.left = edit.within
        self._edit = edit
        self._began: float | None = None

    def spend(self, reply: Reply, *, maybe_applied: bool) -> None:
        """Subtract the time until a reply was received. The timeout begins when the first request was sent.

        :param maybe_applied: a write was sent before.
        :raises LockUnavailableError: no time is left.
        """
        if self._began is None:
            self._began = reply.sent_at
        if self._edit.within is None:
            return
        self.left = self._edit.within - (reply.received_at - self._began)
        if self.left <= 0:
            raise LockUnavailableError(
                f"S3 did not complete the write of the lock {self._edit.params['Key']!r} "
                f"within {self._edit.within:.1f} s.",
                maybe_applied=maybe_applied,
            )


def _valid(found: _Found | None) -> Object | None:
    """The lock that was read; None if there is no object.

    :raises LockRecordError: the object is not a lock.
    """
    content = None if found is None else found.content
    if isinstance(content, LockRecordError):
        raise content
    return content


def _output(key: str, found: _Found | None) -> Mapping[str, Any]:
    """The output of a read, in the form of DynamoDB's."""
    return {} if found is None else {"Item": {"key": key, "lock": found.content}}


def _white_space(text: str) -> bytes:
    """A text as blanks and tabs, one per bit, which JSON parsers ignore at the end."""
    return bytes(b" \t"[byte >> bit & 1] for byte in text.encode() for bit in range(8))


def _parse_object(key: str, bucket: str, output: Mapping[str, Any]) -> Object | LockRecordError:
    """The lock in the output of a `GetObject`; or the error to raise, if the object is not a lock."""
    try:
        lock = _parse_json(output["Body"])
        if not isinstance(lock, dict) or lock.keys() != _FIELDS:
            fields = ", ".join(sorted(_FIELDS))
            return _NotALockError(
                _not_a_lock(key, bucket, f"it is not a JSON object with the fields {fields}")
            )
        ours = json.loads(output.get("Metadata", {}).get(OURS, "null"))
        # A client of another kind may have overwritten the object and kept its metadata.
        found = Object(lock, ours if ours and ours["mark"] == lock["owner"] else None)
        holder_of(found)
    except (TypeError, ValueError, KeyError, OverflowError, RecursionError) as wrong:
        why = f"its attribute {wrong} is missing" if isinstance(wrong, KeyError) else str(wrong)
        return LockRecordError(_not_a_lock(key, bucket, why))
    return found


def _parse_json(text: bytes) -> Any:
    """The value of a JSON text; None if the text is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _not_a_lock(key: str, bucket: str, why: str) -> str:
    """The text of the error for an object that is not a lock."""
    return (
        f"The object {key!r} in the bucket {bucket!r} is not a lock ({readable(why)}); it was not changed: "
        "check the names of the bucket and the lock, or check the object before you delete it."
    )


def holder_of(found: Object) -> Holder | None:
    """The holder of the lock that an object shows; None if the lock is free.

    :raises KeyError, TypeError, ValueError, OverflowError: the object is damaged.
    """
    owner = found.lock["owner"]
    if owner is None:
        return None
    if found.ours is not None:
        return read_holder(found.ours["lease_id"], found.ours)
    if not isinstance(owner, str):
        raise TypeError("its owner is not text")
    lease_ms = max(1, checked_ms("expire", found.lock["expire"], 1000))
    try:
        acquired = datetime.fromisoformat(found.lock["lock_time"])
    except ValueError:
        raise ValueError("its lock_time is not a time") from None
    if acquired.tzinfo is None:
        raise ValueError("its lock_time has no time zone")
    acquired_ms = int(acquired.timestamp() * 1000)
    return their_holder(
        owner,
        lease_ms,
        # There are no heartbeats. The lock has changed if one of these has.
        f"{found.lock['lock_time']} {found.lock['expire']} {owner}",
        acquired_at_ms=max(0, acquired_ms),
        expires_at_ms=checked_ms("lock_time and expire", acquired_ms + lease_ms),
    )
