"""A client that writes the record directly can do no more than docs/security.md says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from moto import mock_aws

from airflow_dynamo_lock import LockClient, LockTimeoutError

TABLE = "locks"
KEY = "warehouse/orders"
TOMORROW = {"N": str(10**14)}


@pytest.fixture
def aws() -> Iterator[Any]:
    with mock_aws():
        client = boto3.client("dynamodb", region_name="eu-central-1")
        LockClient(client, table=TABLE).create_table()
        yield client


def forge(aws: Any, expression: str, names: dict[str, str], value: dict[str, Any]) -> None:
    """Write to the record without a condition."""
    aws.update_item(
        TableName=TABLE,
        Key={"key": {"S": KEY}, "entry": {"S": "lock"}},
        UpdateExpression=expression,
        ExpressionAttributeNames=names,
        ExpressionAttributeValues={":value": value},
    )


@pytest.mark.parametrize("name", ["lease_ms", "grace_ms", "renewed_at", "acquired_at"])
def test_a_forged_record_does_not_extend_a_lease(aws: Any, name: str) -> None:
    locks = LockClient(aws, table=TABLE, lease=30, release_grace=15)
    lease = locks.try_acquire(KEY)
    assert lease is not None
    value = {"N": str(10**11)} if name.endswith("_ms") else TOMORROW
    forge(aws, "SET holders.#me.#name = :value", {"#me": lease.lease_id, "#name": name}, value)
    assert locks.renew(lease).remaining() <= 27
    assert locks.enter(lease, "p").remaining() <= 13.5
    locks.leave(lease, "p")


def test_a_token_that_is_set_back_is_granted_again(aws: Any) -> None:
    """A resource must therefore refuse a token that is smaller than the largest that it has seen."""
    locks = LockClient(aws, table=TABLE)
    first = locks.try_acquire(KEY)
    assert first is not None
    locks.release(first)
    forge(aws, "SET #token = :value", {"#token": "token"}, {"N": str(first.token - 1)})
    second = locks.try_acquire(KEY)
    assert second is not None
    assert second.token <= first.token


def test_a_forged_owner_cannot_forge_a_log_line(aws: Any) -> None:
    locks = LockClient(aws, table=TABLE)
    lease = locks.try_acquire(KEY)
    assert lease is not None
    names = {"#me": lease.lease_id, "#owner": "owner"}
    forge(aws, "SET holders.#me.#owner = :value", names, {"S": "north\n2027-01-15 ERROR all is lost"})
    with pytest.raises(LockTimeoutError, match=r"Locked by north\\n2027-01-15 ERROR all is lost since"):
        locks.acquire(KEY, timeout=0)
