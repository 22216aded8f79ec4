"""The connection: what it says, where it comes from, and what is wrong with it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from airflow_dynamo_lock import DynamoLockHook, LockClient, LockValueError, hooks
from airflow_dynamo_lock.hooks import LockSettings
from airflow_dynamo_lock.links import record_url


@pytest.fixture(autouse=True)
def no_database(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections come from the environment alone."""
    monkeypatch.setenv("_AIRFLOW_PROCESS_CONTEXT", "client")
    monkeypatch.setenv(
        "AIRFLOW_CONN_AWS_DEFAULT", '{"conn_type": "aws", "login": "test", "password": "test-secret"}'
    )


def connect(monkeypatch: pytest.MonkeyPatch, conn_id: str = "dynamo_lock_default", **extra: Any) -> None:
    connection = json.dumps({"conn_type": "dynamo_lock", "extra": extra})
    monkeypatch.setenv(f"AIRFLOW_CONN_{conn_id.upper()}", connection)


def of_table(monkeypatch: pytest.MonkeyPatch, locks: LockClient, **extra: Any) -> DynamoLockHook:
    url = locks._client.meta.endpoint_url
    connect(monkeypatch, table="locks", endpoint_url=url, region_name="eu-central-1", **extra)
    return DynamoLockHook()


def test_a_connection_says_where_the_table_is(monkeypatch: pytest.MonkeyPatch) -> None:
    connect(
        monkeypatch, "other", table="t", aws_conn_id="mine", lease="30", deployment="north", region_name=""
    )
    assert DynamoLockHook("other").settings == LockSettings(
        table="t", aws_conn_id="mine", lease=30.0, deployment="north", region_name=None
    )


def test_without_a_connection_the_configuration_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__DYNAMO_LOCK__TABLE", "configured")
    monkeypatch.setenv("AIRFLOW__DYNAMO_LOCK__LEASE", "45")
    assert DynamoLockHook().settings.table == "configured"
    assert DynamoLockHook().settings.lease == 45.0
    assert asyncio.run(DynamoLockHook().aget_settings()).table == "configured"


def test_a_connection_that_a_dag_names_must_exist() -> None:
    with pytest.raises(LockValueError, match="There is no connection 'missing': create it with the type"):
        _ = DynamoLockHook("missing").settings


@pytest.mark.parametrize(
    "extra", [{"lease": "long"}, {"lease": -1}, {"botocore_config": "{"}, {"botocore_config": "[]"}]
)
def test_a_connection_of_no_use_is_named(monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any]) -> None:
    connect(monkeypatch, **extra)
    with pytest.raises(LockValueError, match="'dynamo_lock_default'"):
        _ = DynamoLockHook().settings


def test_the_test_button_looks_at_the_table(monkeypatch: pytest.MonkeyPatch, locks: LockClient) -> None:
    assert of_table(monkeypatch, locks).test_connection() == (True, "The lock table 'locks' is ready.")
    connect(
        monkeypatch, table="none", endpoint_url=locks._client.meta.endpoint_url, region_name="eu-central-1"
    )
    ready, says = DynamoLockHook().test_connection()
    assert not ready
    assert "The lock table 'none' does not exist" in says


def test_the_sdk_is_set_up_for_a_lock_and_the_connection_overrides_it(
    monkeypatch: pytest.MonkeyPatch, locks: LockClient
) -> None:
    hook = of_table(monkeypatch, locks, botocore_config={"read_timeout": 5})
    config = hook.get_conn()._client.meta.config
    assert (config.connect_timeout, config.read_timeout, config.tcp_keepalive) == (1, 5, True)


async def test_all_triggers_of_a_process_share_one_client(
    monkeypatch: pytest.MonkeyPatch, locks: LockClient
) -> None:
    hook = of_table(monkeypatch, locks)
    monkeypatch.setattr(hooks, "_LINGER", 0.0)
    async with hook.async_client() as (one, settings), hook.async_client() as (other, _):
        assert one is other
        assert settings.table == "locks"
        lease = await one.try_acquire("shared")
        assert lease
        assert await other.release(lease)
    while hooks._shared:  # noqa: ASYNC110 - it is closed by a task of its own, a turn or two of the loop later
        await asyncio.sleep(0)
    async with hook.async_client() as (later, _):
        assert later is not one


async def test_a_client_that_cannot_be_made_is_made_anew_next_time(
    monkeypatch: pytest.MonkeyPatch, locks: LockClient
) -> None:
    connect(monkeypatch, table="locks", endpoint_url="not a url", region_name="eu-central-1")
    with pytest.raises(Exception, match="not a url"):
        async with DynamoLockHook().async_client():
            pass
    async with of_table(monkeypatch, locks).async_client() as (client, _):
        assert await client.get("never used") is None


def test_a_lock_record_in_aws_has_a_link() -> None:
    url = record_url(LockSettings(table="locks"), "eu-central-1", "warehouse/orders & more")
    assert url is not None
    assert url.startswith("https://eu-central-1.console.aws.amazon.com/dynamodbv2/")
    assert "pk=warehouse%2Forders+%26+more&sk=lock" in url
    assert record_url(LockSettings(endpoint_url="http://127.0.0.1:8000"), "eu-central-1", "k") is None
