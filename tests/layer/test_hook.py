"""The connection: its settings, where they come from, and how errors in it are reported."""

from __future__ import annotations

import asyncio
import json
import math
import traceback
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import ErrorType
from airflow.sdk.execution_time import comms, supervisor, task_runner

from airflow_dynamo_lock import DynamoLockHook, LockClient, LockError, LockUnavailableError, LockValueError
from airflow_dynamo_lock.airflow import hooks, sharing
from airflow_dynamo_lock.airflow.links import record_url
from airflow_dynamo_lock.airflow.provider_info import FIELDS
from airflow_dynamo_lock.airflow.settings import LockSettings, check_is_unset
from airflow_dynamo_lock.core.foreign.registry import FORMATS
from deployments.engines import REGION, Engine
from deployments.patience import PATIENCE, until
from tests.formats.conftest import make_place


@pytest.fixture(autouse=True)
def no_database(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read connections from the environment only."""
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


def test_a_connection_has_the_settings_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    connect(
        monkeypatch, "other", table="t", aws_conn_id="mine", lease="30", deployment="north", region_name=""
    )
    assert DynamoLockHook("other").settings == LockSettings(
        table="t", aws_conn_id="mine", lease=30.0, deployment="north", region_name=None
    )


def test_without_a_connection_the_configuration_has_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__DYNAMO_LOCK__TABLE", "configured")
    monkeypatch.setenv("AIRFLOW__DYNAMO_LOCK__LEASE", "45")
    assert DynamoLockHook().settings.table == "configured"
    assert DynamoLockHook().settings.lease == 45.0
    assert asyncio.run(DynamoLockHook().aget_settings()).table == "configured"


def test_a_connection_named_in_a_dag_must_exist() -> None:
    with pytest.raises(LockValueError, match="There is no connection 'missing': create it with the type"):
        _ = DynamoLockHook("missing").settings


class Vault:
    """A secrets backend that does not answer."""

    def get_connection(self, conn_id: str) -> None:
        raise ConnectionError("https://vault.internal?token=hunter2")


@pytest.mark.parametrize("conn_id", ["dynamo_lock_default", "other"])
def test_a_connection_that_a_secrets_backend_could_not_look_up_selects_no_other_table(
    monkeypatch: pytest.MonkeyPatch, conn_id: str
) -> None:
    def backends() -> list[Any]:
        return [Vault()]

    monkeypatch.setattr(supervisor, "ensure_secrets_backend_loaded", backends)
    with pytest.raises(
        LockUnavailableError, match=rf"look up the connection '{conn_id}' \(Vault: Conn"
    ) as raised:
        check_is_unset(conn_id)
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("error", ["CONNECTION_NOT_FOUND", "API_SERVER_ERROR", "GENERIC_ERROR"])
def test_a_connection_that_the_api_server_could_not_look_up_selects_no_other_table(
    monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    def send(_: Any) -> comms.ErrorResponse:
        return comms.ErrorResponse(error=ErrorType[error], detail={"status_code": 503})

    monkeypatch.setattr(task_runner, "SUPERVISOR_COMMS", SimpleNamespace(send=send), raising=False)
    if error == "CONNECTION_NOT_FOUND":
        check_is_unset("dynamo_lock_default")
        return
    with pytest.raises(LockUnavailableError, match=rf"could not look up .* \(API server: {error}\)"):
        check_is_unset("dynamo_lock_default")


# Airflow refuses such an extra itself where it reads connections as those of its database, as in Airflow 3.0.
_NO_OBJECT = "extra of {connection} must be a JSON object|cannot read a connection from .* {variable}: "


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        (
            '{"conn_type": "dynamo_lock", "extra": {"table": "t"}',
            "cannot read a connection from .* {variable}: ",
        ),
        ('{"conn_type": "dynamo_lock", "table": "t"}', "cannot read a connection from .* {variable}: "),
        ('{"conn_type": "dynamo_lock", "extra": "{"}', _NO_OBJECT),
        ('{"conn_type": "dynamo_lock", "extra": ["t"]}', _NO_OBJECT),
        ('{"conn_type": "dynamo_lock", "extra": "\\"t\\""}', _NO_OBJECT),
        ('{"conn_type": "aws", "extra": {"table": "t"}}', "type of {connection} must be 'dynamo_lock'"),
        ('{"extra": {"table": "t"}}', "type of {connection} must be 'dynamo_lock'"),
        (
            "dynamo_lock://?table=t",
            "type of {connection} must be 'dynamo_lock': as a URI, write dynamo-lock://",
        ),
        (
            "dynamo-lock://t",
            "The host of {connection} would not be used: remove it, and give .* in the extra",
        ),
        ('{"conn_type": "dynamo_lock", "schema": "t"}', "The schema of {connection} would not be used"),
        # Airflow takes what does not begin with a brace for a URL.
        (
            '"conn_type": "dynamo_lock", "extra": {"table": "t"}}',
            "type of {connection} must be 'dynamo_lock'",
        ),
        (
            '{"conn_type": "dynamo_lock", "extra": {"tabel": "t", "region_name": "eu-west-1"}}',
            r"The field 'tabel' of {connection} is unknown: .* one of table, aws_conn_id, region_name, ",
        ),
    ],
)
@pytest.mark.parametrize("conn_id", ["dynamo_lock_default", "other"])
def test_a_malformed_connection_never_selects_another_table(
    monkeypatch: pytest.MonkeyPatch, conn_id: str, variable: str, message: str
) -> None:
    name = f"AIRFLOW_CONN_{conn_id.upper()}"
    monkeypatch.setenv(name, variable)
    expected = message.format(variable=name, connection=f"the connection '{conn_id}'")
    with pytest.raises(LockValueError, match=expected) as refused:
        _ = DynamoLockHook(conn_id).settings
    assert '"t"' not in str(refused.value)


def test_empty_fields_of_a_connection_are_those_that_the_form_left_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    empty: dict[str, Any] = dict.fromkeys(FIELDS)
    connect(monkeypatch, "dynamo_lock_default", **empty)
    assert DynamoLockHook().settings == LockSettings()
    monkeypatch.setenv("AIRFLOW_CONN_DYNAMO_LOCK_DEFAULT", "dynamo-lock://?table=from_url&lease=30")
    assert DynamoLockHook().settings == LockSettings(table="from_url", lease=30.0)


@pytest.mark.parametrize(
    "extra",
    [
        {"streams": "perhaps"},
        {"streams": 1},
        {"lease": "long"},
        {"lease": -1},
        {"lease": True},
        {"lease": 0.01},
        {"lease": 10**400},
        {"endpoint_url": "http://[::1"},
        {"endpoint_url": 8000},
        {"botocore_config": "{"},
        {"format": "redis"},
        {"format": ["native"]},
        {"format": "awsflock", "streams": True},
        {"botocore_config": "[]"},
    ],
)
def test_the_error_of_an_invalid_connection_names_it(
    monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any]
) -> None:
    connect(monkeypatch, **extra)
    with pytest.raises(LockValueError, match="'dynamo_lock_default'"):
        _ = DynamoLockHook().settings


@pytest.mark.parametrize(
    "url", ["admin:hunter2@proxy:8000", "http:/u:hunter2@proxy", "http://u:hunter2@proxy"]
)
def test_a_password_in_an_endpoint_url_is_refused_without_it(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    connect(monkeypatch, endpoint_url=url)
    with pytest.raises(LockValueError, match="contains a user name") as refused:
        DynamoLockHook().get_conn()
    aws = {"conn_type": "aws", "extra": {"endpoint_url": url}}
    monkeypatch.setenv("AIRFLOW_CONN_AWS_DEFAULT", json.dumps(aws))
    connect(monkeypatch, region_name="eu-central-1")
    with pytest.raises(LockError) as failed:
        DynamoLockHook().get_conn().get("k")
    for each in (refused, failed):
        assert "hunter2" not in "".join(traceback.format_exception(each.value))


def test_the_test_button_checks_the_table(monkeypatch: pytest.MonkeyPatch, locks: LockClient) -> None:
    assert of_table(monkeypatch, locks).test_connection() == (True, "The lock table 'locks' is ready.")
    connect(
        monkeypatch, table="none", endpoint_url=locks._client.meta.endpoint_url, region_name="eu-central-1"
    )
    ready, message = DynamoLockHook().test_connection()
    assert not ready
    assert "The lock table 'none' does not exist" in message


def test_a_connection_overrides_the_configuration_of_the_sdk(
    monkeypatch: pytest.MonkeyPatch, locks: LockClient
) -> None:
    hook = of_table(monkeypatch, locks, botocore_config={"read_timeout": 5})
    config = hook.get_conn()._client.meta.config
    assert (config.connect_timeout, config.read_timeout, config.tcp_keepalive) == (1, 5, True)


@pytest.mark.parametrize("format", [name for name in FORMATS if name != "native"])
async def test_a_connection_may_name_a_table_of_another_library(
    monkeypatch: pytest.MonkeyPatch, moto: Engine, format: str
) -> None:
    place = make_place(format, moto)
    connect(
        monkeypatch,
        table=place.table,
        format=format,
        endpoint_url=moto.endpoint_url,
        region_name=REGION,
    )
    hook = DynamoLockHook()
    assert hook.test_connection()[0]
    lease = hook.get_conn().acquire("foreign", timeout=0)
    async with hook.async_client() as (client, _):
        assert await client.try_acquire("foreign") is None
        assert await client.release(lease)


async def test_all_triggers_of_a_process_share_one_client(
    monkeypatch: pytest.MonkeyPatch, locks: LockClient
) -> None:
    hook = of_table(monkeypatch, locks)
    monkeypatch.setattr(sharing, "IDLE_SECONDS", 0.0)
    async with hook.async_client() as (one, settings), hook.async_client() as (other, _):
        assert one is other
        assert settings.table == "locks"
        lease = await one.try_acquire("shared")
        assert lease
        assert await other.release(lease)
    while hooks._shared_clients:  # noqa: ASYNC110 - another task closes it in one of the next turns of the loop
        await asyncio.sleep(0)
    async with hook.async_client() as (later, _):
        assert later is not one


@pytest.mark.parametrize(
    ("extra", "streams"),
    [({}, False), ({"streams": True}, True), ({"streams": "true"}, True), ({"streams": "False"}, False)],
)
async def test_triggers_read_the_stream_if_the_connection_enables_it(
    monkeypatch: pytest.MonkeyPatch, locks: LockClient, extra: dict[str, Any], streams: bool
) -> None:
    hook = of_table(monkeypatch, locks, **extra)
    monkeypatch.setattr(sharing, "IDLE_SECONDS", 0.0)
    async with hook.async_client() as (client, _):
        assert (client._streams is not None) is streams
        if streams:
            made = client._streams.meta
            assert made.service_model.service_name == "dynamodbstreams"
            assert made.endpoint_url == client._client.meta.endpoint_url
            assert made.config.read_timeout == 2
            assert (await client._streams.list_streams(TableName="locks"))["Streams"] == []
            (connections,) = client._streams._endpoint.http_session._sessions.values()
    async with asyncio.timeout(10):
        while streams and not connections.closed:  # noqa: ASYNC110 - another task closes it
            await asyncio.sleep(0)
    assert hook.get_conn()._streams is None, "tasks do not read the stream, because there may be many"


async def test_a_stream_wakes_a_trigger(monkeypatch: pytest.MonkeyPatch, locks: LockClient) -> None:
    streamed = LockClient(locks._client, table="streamed")
    streamed.create_table(streams=True)
    held = streamed.acquire("k")
    url = locks._client.meta.endpoint_url
    connect(monkeypatch, table="streamed", endpoint_url=url, region_name="eu-central-1", streams=True)
    async with DynamoLockHook().async_client() as (client, _):
        waiting = asyncio.create_task(client.acquire("k", poll_interval=600))
        await until(lambda: client._core.poller._reported_until != -math.inf)
        await asyncio.to_thread(streamed.release, held)
        assert await asyncio.wait_for(waiting, PATIENCE)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"endpoint_url": "not a url"}, "No client can be created for the connection 'dynamo_lock_default' "),
        (
            {"botocore_config": {"proxy_password": "secret"}},
            "The SDK rejects the botocore_config of the connection 'dynamo_lock_default': one of ",
        ),
    ],
)
async def test_an_error_of_the_sdk_names_the_connection_and_no_value(
    monkeypatch: pytest.MonkeyPatch, connection: None, extra: dict[str, Any], message: str
) -> None:
    connect(monkeypatch, region_name="eu-central-1", **extra)
    with pytest.raises(LockError, match=message) as by_worker:
        DynamoLockHook().get_conn()
    with pytest.raises(LockError, match=message) as by_triggerer:
        async with DynamoLockHook().async_client():
            pass
    assert "secret" not in f"{by_worker.value} {by_triggerer.value}"


async def test_a_failed_creation_of_a_client_is_repeated_next_time(
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
