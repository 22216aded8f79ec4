"""Creating and checking the lock table. Errors say what is expected and what was found."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest

from airflow_dynamo_lock import LockAccessError, LockClient, LockError, LockTableError, LockUnavailableError
from deployments.patience import PATIENCE
from deployments.proxy import Proxy
from tests.client.conftest import MakeClient


@pytest.fixture
def table() -> str:
    """The name of a table that does not exist yet."""
    return f"table-{uuid4()}"


@pytest.fixture
def locks(make_client: MakeClient, table: str) -> LockClient:
    return make_client(table=table)


def _make(sdk_client: Any, table: str, *keys: str, kind: str = "S", ttl: str | None = None) -> None:
    """Create a table as another program would."""
    sdk_client.create_table(
        TableName=table,
        AttributeDefinitions=[{"AttributeName": key, "AttributeType": kind} for key in keys],
        KeySchema=[
            {"AttributeName": key, "KeyType": role}
            for key, role in zip(keys, ("HASH", "RANGE"), strict=False)
        ],
        BillingMode="PAY_PER_REQUEST",
    )
    if ttl:
        sdk_client.update_time_to_live(
            TableName=table, TimeToLiveSpecification={"Enabled": True, "AttributeName": ttl}
        )


def test_a_new_table_is_on_demand_and_expires_idle_records_and_can_be_used_at_once(
    locks: LockClient, sdk_client: Any, table: str
) -> None:
    locks.create_table()

    assert locks.try_acquire("k")
    described = locks.describe_table()
    assert described["TableStatus"] == "ACTIVE"
    assert described["BillingModeSummary"]["BillingMode"] == "PAY_PER_REQUEST"
    assert [(key["AttributeName"], key["KeyType"]) for key in described["KeySchema"]] == [
        ("key", "HASH"),
        ("entry", "RANGE"),
    ]
    ttl = sdk_client.describe_time_to_live(TableName=table)["TimeToLiveDescription"]
    assert (ttl["TimeToLiveStatus"], ttl["AttributeName"]) == ("ENABLED", "expires_at")
    locks.check_table()


def test_create_leaves_an_existing_lock_table_unchanged(locks: LockClient) -> None:
    locks.create_table()
    lease = locks.acquire("k")

    locks.create_table()

    record = locks.get("k")
    assert record
    assert list(record.holders) == [lease.lease_id]


def test_several_clients_can_create_the_table_at_once(
    make_client: MakeClient, threads: ThreadPoolExecutor, table: str
) -> None:
    clients = [make_client(table=table) for _ in range(4)]

    for made in [threads.submit(client.create_table) for client in clients]:
        made.result(PATIENCE)

    clients[0].check_table()


def test_a_table_without_time_to_live_is_an_error_that_create_corrects(
    locks: LockClient, sdk_client: Any, table: str
) -> None:
    _make(sdk_client, table, "key", "entry")
    with pytest.raises(LockTableError, match="enable time to live on the attribute 'expires_at'"):
        locks.check_table()

    locks.create_table()

    locks.check_table()


def test_a_table_that_expires_by_another_attribute_is_not_changed(
    locks: LockClient, sdk_client: Any, table: str
) -> None:
    _make(sdk_client, table, "key", "entry", ttl="ttl")
    for use in (locks.check_table, locks.create_table):
        with pytest.raises(
            LockTableError, match=r"expires records by the attribute 'ttl'.*uses 'expires_at'"
        ):
            use()


@pytest.mark.parametrize(
    ("keys", "kind", "found"),
    [
        (("key",), "S", r"partition key 'key' \(S\)"),
        (("LockID",), "S", r"partition key 'LockID' \(S\)"),
        (("key", "sort"), "S", r"partition key 'key' \(S\) and sort key 'sort' \(S\)"),
        (("key", "entry"), "N", r"partition key 'key' \(N\) and sort key 'entry' \(N\)"),
    ],
)
def test_a_table_with_other_keys_says_what_is_expected_and_what_was_found(
    locks: LockClient, sdk_client: Any, table: str, keys: tuple[str, ...], kind: str, found: str
) -> None:
    """Another library fails with an obscure error (test_peers.py, 4)."""
    _make(sdk_client, table, *keys, kind=kind)
    expected = r"should be partition key 'key' \(S\) and sort key 'entry' \(S\)"
    for use in (locks.check_table, locks.create_table):
        with pytest.raises(LockTableError, match=f"{expected}, but they are {found}"):
            use()
    for take in (locks.try_acquire, locks.acquire):
        with pytest.raises(LockTableError, match="is not a lock table, its keys differ"):
            take("k")


def test_a_missing_table_is_an_error_that_says_how_to_create_it(locks: LockClient, table: str) -> None:
    for use in (
        locks.check_table,
        locks.describe_table,
        lambda: list(locks.list_locks()),
        lambda: locks.get("k"),
        lambda: locks.try_acquire("k"),
        lambda: locks.acquire("k"),
        lambda: locks.wait("k"),
    ):
        with pytest.raises(LockTableError, match=f"'{table}' does not exist.*create_table"):
            use()


# -- refused requests -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (400, "AccessDeniedException", LockAccessError),
        (400, "ExpiredTokenException", LockAccessError),
        (400, "UnrecognizedClientException", LockAccessError),
        (400, "ThrottlingException", LockUnavailableError),
        (400, "ProvisionedThroughputExceededException", LockUnavailableError),
        (500, "InternalServerError", LockUnavailableError),
        (503, "ServiceUnavailable", LockUnavailableError),
        (400, "SomethingNewException", LockError),
    ],
)
def test_a_failed_request_never_counts_as_a_success(
    make_client: MakeClient,
    client: LockClient,
    proxy: Proxy,
    key: str,
    status: int,
    code: str,
    error: type[LockError],
) -> None:
    """In another library, a write that fails for any reason but its condition is a grant (test_peers.py, 1)."""
    refused = make_client(proxy)
    lease = client.acquire(f"{key}/held")
    with proxy.answering(lambda _: True, status, code, "because"):
        for use in (
            lambda: refused.try_acquire(key),
            lambda: refused.renew(lease),
            lambda: refused.release(lease),
            lambda: refused.get(key),
            lambda: refused.enter(replace(lease, lease_ms=1000), "pid-1"),  # tries again within that time
            lambda: refused.break_lock(key, "id"),
            refused.check_table,
        ):
            with pytest.raises(error, match="because"):
                use()

    assert client.get(key) is None
    record = client.get(f"{key}/held")
    assert record
    assert list(record.holders) == [lease.lease_id]
