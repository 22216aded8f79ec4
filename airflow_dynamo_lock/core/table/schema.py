"""The DynamoDB table of the locks: create it, wait for it, check it. A bucket of S3 is only checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from airflow_dynamo_lock.core.effects import Operation, Reply, Request, Sleep
from airflow_dynamo_lock.core.model.errors import LockError, LockTableError, LockValueError
from airflow_dynamo_lock.core.table.format import Format

# Seconds between two looks at a table that is being created.
_PAUSE = 0.5


class TableMissingError(LockTableError):
    """The account and region have no table of that name."""


class TableExistsError(LockTableError):
    """The table exists already, or another process is creating it."""


class TtlOffError(LockTableError):
    """DynamoDB never deletes the records of locks that are no longer used."""


def create(table_format: Format, *, now: float, timeout: float, streams: bool = False) -> Operation[None]:
    """Create the lock table (on demand, with TTL if the format uses it), wait until it is active, and check it. An
    existing table is checked, and its TTL turned on if it is off.

    :param now: monotonic seconds.
    :param timeout: maximum time to wait until the table is active, in seconds.
    :param streams: create the table with a stream, for fast hand-over.
    :raises LockTableError: the table is not active in time, or exists with other keys or without the stream.
    :raises LockValueError: the locks of this format are in a bucket.
    """
    table = table_format.table
    if not table_format.keys:
        raise LockValueError(
            f"The locks are objects in the bucket {table!r}: create it as you create your other buckets."
        )
    with suppress(TableExistsError):
        now = (yield _create_request(table_format, streams)).received_at
    yield from _active(table, now=now, timeout=timeout)
    try:
        yield from check(table_format)
    except TtlOffError:
        specification = {"Enabled": True, "AttributeName": table_format.ttl_attribute}
        try:
            yield Request("UpdateTimeToLive", {"TableName": table, "TimeToLiveSpecification": specification})
        except LockError as failure:
            try:
                yield from check(table_format)  # another process that creates the table may have been faster
            except TtlOffError:
                raise failure from None
    if streams and stream_arn((yield from describe(table))) is None:
        raise LockTableError(
            f"The lock table {table!r} exists already, without a stream: enable one with the view type KEYS_ONLY "
            "(aws dynamodb update-table --stream-specification)."
        )


def check(table_format: Format) -> Operation[Mapping[str, Any]]:
    """Return the description of the table (`DescribeTable`, or `ListObjectsV2` of a bucket) if it can hold locks.

    :raises LockTableError: it is missing, not active, has other keys, or expires records by another attribute.
    """
    table = table_format.table
    if not table_format.keys:
        listed: Reply = yield Request("ListObjectsV2", {"Bucket": table, "MaxKeys": 1})
        return listed.output
    described = yield from describe(table)
    if described["TableStatus"] not in ("ACTIVE", "UPDATING"):
        raise LockTableError(
            f"The lock table {table!r} is {described['TableStatus']}, not ACTIVE: wait until it is."
        )
    found = _keys(described)
    if found != list(table_format.keys):
        raise LockTableError(
            f"The table {table!r} is not a lock table: its keys should be {_show(table_format.keys)}, but they are "
            f"{_show(found)}. Choose another name, or create the table with client.create_table()."
        )
    reply: Reply = yield Request("DescribeTimeToLive", {"TableName": table})
    ttl = reply.output["TimeToLiveDescription"]
    on = ttl.get("TimeToLiveStatus") in ("ENABLED", "ENABLING")
    if table_format.ttl_attribute is None:
        if on:
            raise LockTableError(
                f"The table {table!r} expires records by the attribute {ttl.get('AttributeName')!r}, which this "
                "package does not renew, so DynamoDB could delete a lock that is held: disable its time to live, or "
                "choose another table."
            )
        return described
    if not on:
        raise TtlOffError(
            f"The lock table {table!r} keeps the records of unused locks for ever: "
            f"enable time to live on the attribute {table_format.ttl_attribute!r}, as client.create_table() does. "
            "A table that was restored from a backup must not be used: its fencing tokens repeat."
        )
    if ttl.get("AttributeName") != table_format.ttl_attribute:
        raise LockTableError(
            f"The table {table!r} expires records by the attribute {ttl.get('AttributeName')!r}, "
            f"where a lock table uses {table_format.ttl_attribute!r}: choose another table."
        )
    return described


def describe(table: str) -> Operation[Mapping[str, Any]]:
    """The description of the table by `DescribeTable`."""
    reply: Reply = yield Request("DescribeTable", {"TableName": table})
    described: Mapping[str, Any] = reply.output["Table"]
    return described


def stream_arn(described: Mapping[str, Any]) -> str | None:
    """The ARN of the table's stream; None if no stream is enabled.

    :param described: result of `describe`.
    """
    enabled = described.get("StreamSpecification", {}).get("StreamEnabled")
    arn: str | None = described.get("LatestStreamArn") if enabled else None
    return arn


def _active(table: str, *, now: float, timeout: float) -> Operation[None]:
    deadline = now + timeout
    while True:
        try:
            status = (yield from describe(table))["TableStatus"]
        except TableMissingError:
            status = "not visible yet"  # DescribeTable is eventually consistent
        if status in ("ACTIVE", "UPDATING"):
            return
        if now >= deadline:
            raise LockTableError(
                f"The lock table {table!r} is {status} after {timeout:g} s: try again later."
            )
        now = yield Sleep(_PAUSE)


def _create_request(table_format: Format, streams: bool) -> Request:
    stream = {"StreamSpecification": {"StreamEnabled": True, "StreamViewType": "KEYS_ONLY"}}
    return Request(
        "CreateTable",
        {
            "TableName": table_format.table,
            "AttributeDefinitions": [
                {"AttributeName": name, "AttributeType": kind} for name, _, kind in table_format.keys
            ],
            "KeySchema": [{"AttributeName": name, "KeyType": role} for name, role, _ in table_format.keys],
            "BillingMode": "PAY_PER_REQUEST",
            **(stream if streams else {}),
        },
    )


def _keys(described: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    kinds = {
        each["AttributeName"]: each["AttributeType"] for each in described.get("AttributeDefinitions", ())
    }
    return [
        (each["AttributeName"], each["KeyType"], kinds.get(each["AttributeName"], "?"))
        for each in described["KeySchema"]
    ]


def _show(keys: Sequence[tuple[str, str, str]]) -> str:
    roles = {"HASH": "partition key", "RANGE": "sort key"}
    return " and ".join(f"{roles.get(role, role)} {name!r} ({kind})" for name, role, kind in keys)
