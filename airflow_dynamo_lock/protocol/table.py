"""The DynamoDB table that the locks live in: make it, wait for it, check it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from airflow_dynamo_lock.protocol.effects import Operation, Reply, Request, Sleep
from airflow_dynamo_lock.protocol.errors import LockError, LockTableError
from airflow_dynamo_lock.protocol.native import PARTITION_KEY, SORT_KEY, TTL_ATTRIBUTE

_WANTED = [(PARTITION_KEY, "HASH", "S"), (SORT_KEY, "RANGE", "S")]
_PAUSE = 0.5


class TableMissingError(LockTableError):
    """There is no table of that name in the account and region."""


class TableExistsError(LockTableError):
    """There is one already, or somebody else is just making it."""


class TtlOffError(LockTableError):
    """The table keeps the records of forgotten locks for ever."""


def create(table: str, *, now: float, timeout: float) -> Operation[None]:
    """Make the lock table (on-demand, TTL on), wait until it can be used, and check it. One that exists is let be.

    :raises LockTableError: it is not active within `timeout` seconds, or there is one with other keys.
    """
    with suppress(TableExistsError):
        now = (yield _create_request(table)).received_at
    yield from _active(table, now=now, timeout=timeout)
    try:
        yield from check(table)
    except TtlOffError:
        specification = {"Enabled": True, "AttributeName": TTL_ATTRIBUTE}
        try:
            yield Request("UpdateTimeToLive", {"TableName": table, "TimeToLiveSpecification": specification})
        except LockError as failure:
            try:
                yield from check(table)  # somebody else, who makes the table just now, was quicker
            except TtlOffError:
                raise failure from None


def check(table: str) -> Operation[Mapping[str, Any]]:
    """Make sure that the table can hold locks; return what `DescribeTable` says of it.

    :raises LockTableError: it is missing, not active, has other keys, or expires records by another attribute.
    """
    described = yield from describe(table)
    if described["TableStatus"] not in ("ACTIVE", "UPDATING"):
        raise LockTableError(
            f"The lock table {table!r} is {described['TableStatus']}, not ACTIVE: wait until it is."
        )
    found = _keys(described)
    if found != _WANTED:
        raise LockTableError(
            f"The table {table!r} is not a lock table: its keys should be {_show(_WANTED)}, but they are "
            f"{_show(found)}. Choose another name, or create the table with client.create_table()."
        )
    reply: Reply = yield Request("DescribeTimeToLive", {"TableName": table})
    ttl = reply.output["TimeToLiveDescription"]
    if ttl.get("TimeToLiveStatus") not in ("ENABLED", "ENABLING"):
        raise TtlOffError(
            f"The lock table {table!r} never removes the records of locks that nobody uses any more: "
            f"enable time to live on the attribute {TTL_ATTRIBUTE!r}, as client.create_table() does."
        )
    if ttl.get("AttributeName") != TTL_ATTRIBUTE:
        raise LockTableError(
            f"The table {table!r} expires records by the attribute {ttl.get('AttributeName')!r}, "
            f"where a lock table uses {TTL_ATTRIBUTE!r}: choose another table."
        )
    return described


def describe(table: str) -> Operation[Mapping[str, Any]]:
    """What `DescribeTable` says of the table."""
    reply: Reply = yield Request("DescribeTable", {"TableName": table})
    described: Mapping[str, Any] = reply.output["Table"]
    return described


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


def _create_request(table: str) -> Request:
    return Request(
        "CreateTable",
        {
            "TableName": table,
            "AttributeDefinitions": [
                {"AttributeName": name, "AttributeType": kind} for name, _, kind in _WANTED
            ],
            "KeySchema": [{"AttributeName": name, "KeyType": role} for name, role, _ in _WANTED],
            "BillingMode": "PAY_PER_REQUEST",
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


def _show(keys: list[tuple[str, str, str]]) -> str:
    roles = {"HASH": "partition key", "RANGE": "sort key"}
    return " and ".join(f"{roles.get(role, role)} {name!r} ({kind})" for name, role, kind in keys)
