"""Triggers share connections and clients: they do not look up or create one that their process has."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.providers.amazon.aws.hooks.base_aws import AwsBaseHook
from airflow.sdk.bases.xcom import BaseXCom
from airflow.sdk.exceptions import ErrorType
from airflow.sdk.execution_time import task_runner
from airflow.sdk.execution_time.comms import ErrorResponse, GetConnection

from airflow_dynamo_lock import DynamoLockHook, LockAccessError, LockClient, LockValueError
from airflow_dynamo_lock.airflow import hooks, sharing, trigger_base
from airflow_dynamo_lock.airflow.links import LINK_KEY
from airflow_dynamo_lock.airflow.trigger_base import LockTrigger
from airflow_dynamo_lock.airflow.triggers import DynamoLockAcquireTrigger, DynamoLockReleaseTrigger
from airflow_dynamo_lock.airflow.versions import BaseHook
from deployments.patience import PATIENCE, until

pytestmark = pytest.mark.usefixtures("connection")

LOCK, AWS = "dynamo_lock_default", "aws_default"


class Airflow:
    """Answers the requests of triggers.

    :ivar requests: names of the requests: id of a connection that is looked up, type of a request, key of an XCom.
    :ivar created: number of SDK sessions that were created.
    :ivar now: time by which look-ups expire, in seconds.
    :ivar xcoms: the stored XComs, by key.
    """

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.created = 0
        self.now = 1000.0
        self.xcoms: dict[str, Any] = {}

    def take(self) -> list[str]:
        """Return the requests since the last call."""
        requests, self.requests = self.requests, []
        return sorted(requests)

    async def asend(self, request: Any) -> Any:
        if type(request).__name__ != "MaskSecret":
            self.requests.append(type(request).__name__)
        return SimpleNamespace(
            task_states={"run": dict.fromkeys(getattr(request, "task_ids", ()), "deferred")}
        )

    def send(self, request: Any) -> ErrorResponse | None:
        """Answer a synchronous request: there are no connections except those of the environment."""
        is_connection = isinstance(request, GetConnection)
        return ErrorResponse(error=ErrorType.CONNECTION_NOT_FOUND) if is_connection else None


@pytest.fixture
def airflow(monkeypatch: pytest.MonkeyPatch, connection: None) -> Airflow:
    airflow = Airflow()
    get_connection, get_session = BaseHook.get_connection, AwsBaseHook.get_session

    def look_up(conn_id: str) -> Any:
        airflow.requests.append(conn_id)
        return get_connection(conn_id)

    def create(*args: Any, **kwargs: Any) -> Any:
        airflow.created += 1
        return get_session(*args, **kwargs)

    def store(*, key: str, value: Any, **_: Any) -> None:
        airflow.requests.append(f"XCom {key}")
        airflow.xcoms[key] = value

    monkeypatch.setattr(BaseHook, "get_connection", staticmethod(look_up))
    monkeypatch.setattr(AwsBaseHook, "get_session", create)
    monkeypatch.setattr(BaseXCom, "set", store)
    monkeypatch.setattr(BaseXCom, "get_one", lambda **_: airflow.xcoms["return_value"])
    monkeypatch.setattr(sharing, "monotonic", lambda: airflow.now)
    monkeypatch.setattr(task_runner, "SUPERVISOR_COMMS", airflow, raising=False)
    return airflow


def connect(monkeypatch: pytest.MonkeyPatch, **extra: Any) -> None:
    extra = {"table": "locks", "region_name": "eu-central-1"} | extra
    connection = json.dumps({"conn_type": "dynamo_lock", "extra": extra})
    monkeypatch.setenv("AIRFLOW_CONN_DYNAMO_LOCK_DEFAULT", connection)


async def run(trigger: LockTrigger) -> list[str]:
    """Run a trigger as Airflow does, and return the types of its events."""
    trigger.task_instance = SimpleNamespace(  # type: ignore[assignment]
        id=uuid.uuid4(),
        dag_id="dag",
        run_id="run",
        task_id="acquire",
        map_index=-1,
        try_number=1,
        dag_version_id="v",
    )
    events = [type(event).__name__ async for event in trigger.run()]
    await asyncio.gather(*trigger_base._in_background)
    return events


async def client_of(conn_id: str = LOCK) -> Any:
    async with DynamoLockHook(conn_id).async_client() as (client, _):
        return client


async def test_a_trigger_requests_only_its_state_if_its_process_has_a_client(airflow: Airflow) -> None:
    assert await run(DynamoLockAcquireTrigger(key="first")) == ["TaskSuccessEvent"]
    assert {LOCK, AWS} < set(airflow.take())
    assert airflow.created == 1

    assert await run(DynamoLockAcquireTrigger(key="second")) == ["TaskSuccessEvent"]
    assert await run(DynamoLockReleaseTrigger("acquire")) == ["TaskSuccessEvent"]

    assert airflow.take() == ["GetTaskStates", "GetTaskStates", f"XCom {LINK_KEY}", "XCom return_value"]
    assert airflow.created == 1


async def test_triggers_that_start_together_look_up_the_connection_once(airflow: Airflow) -> None:
    clients = await asyncio.gather(*(client_of() for _ in range(100)))

    assert len(set(clients)) == 1
    assert airflow.requests.count(LOCK) == airflow.created == 1


async def test_a_cancelled_trigger_does_not_cancel_the_look_up_for_others(airflow: Airflow) -> None:
    cancelled, other = (asyncio.ensure_future(client_of()) for _ in range(2))
    await asyncio.sleep(0)
    cancelled.cancel()

    assert await asyncio.wait_for(other, PATIENCE)
    assert airflow.requests.count(LOCK) == 1


@pytest.mark.parametrize("change", ["table", "credentials", "nothing"])
async def test_a_changed_connection_takes_effect_within_a_minute(
    change: str, airflow: Airflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await client_of()
    if change == "table":
        connect(monkeypatch, table="other")
    elif change == "credentials":
        aws = '{"conn_type": "aws", "login": "test", "password": "rotated"}'
        monkeypatch.setenv("AIRFLOW_CONN_AWS_DEFAULT", aws)
    airflow.now += sharing.KEPT_SECONDS - 0.1
    assert await client_of() is before
    airflow.take()

    airflow.now += 0.1
    after = await client_of()

    assert {LOCK, AWS} <= set(airflow.take())
    assert (after is before) is (change == "nothing")
    assert after._core.table == ("other" if change == "table" else "locks")


async def test_an_aws_connection_may_be_missing(airflow: Airflow, monkeypatch: pytest.MonkeyPatch) -> None:
    connect(monkeypatch, aws_conn_id="missing")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")

    assert await (await client_of()).get("never used") is None


async def test_a_connection_that_was_not_valid_is_looked_up_again(
    airflow: Airflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect(monkeypatch, lease="-1")
    with pytest.raises(LockValueError, match="lease"):
        await client_of()

    connect(monkeypatch)
    assert await client_of()


async def test_a_client_that_is_denied_access_is_not_shared_any_further(airflow: Airflow) -> None:
    before = await client_of()
    async with DynamoLockHook().async_client() as (present, _):
        with pytest.raises(LockAccessError):
            async with DynamoLockHook().async_client():
                raise LockAccessError("The credentials have expired.")
        after = await client_of()
        assert await present.get("never used") is None, "triggers that use the client may continue to use it"

    assert present is before is not after
    assert await client_of() is after


async def test_a_retired_client_does_not_remove_its_successor(
    airflow: Airflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "IDLE_SECONDS", 0.0)
    async with DynamoLockHook().async_client() as (before, _):
        (retired,) = hooks._shared_clients.values()
        with pytest.raises(LockAccessError):
            async with DynamoLockHook().async_client():
                raise LockAccessError("The credentials have expired.")
        async with DynamoLockHook().async_client() as (after, _):
            retired._retire(retired)
            assert await client_of() is after is not before


async def test_a_link_that_cannot_be_stored_is_not_an_error(
    airflow: Airflow, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def store(*, key: str, **_: Any) -> None:
        if key == LINK_KEY:
            raise RuntimeError("the API server does not answer")

    monkeypatch.setattr(BaseXCom, "set", store)
    monkeypatch.setattr(LockTrigger, "log", logging.getLogger("test"))

    assert await run(DynamoLockAcquireTrigger(key="no link")) == ["TaskSuccessEvent"]
    assert "Could not store the link" in caplog.text


async def test_the_link_is_stored_before_the_wait_or_after_the_result(
    airflow: Airflow, locks: LockClient
) -> None:
    held = locks.acquire("waits")
    waiting = asyncio.ensure_future(run(DynamoLockAcquireTrigger(key="waits")))
    await until(lambda: LINK_KEY in airflow.xcoms)
    assert not waiting.done()
    await asyncio.to_thread(locks.release, held)
    await asyncio.wait_for(waiting, PATIENCE)
    assert [each for each in airflow.requests if "XCom" in each] == [f"XCom {LINK_KEY}", "XCom return_value"]
    airflow.take()

    await run(DynamoLockAcquireTrigger(key="waits not"))
    assert [each for each in airflow.requests if "XCom" in each] == ["XCom return_value", f"XCom {LINK_KEY}"]


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO])
async def test_a_trigger_logs_its_time_line_if_its_logger_is_enabled_for_that(
    level: int, airflow: Airflow, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(LockTrigger, "log", logging.getLogger("test"))
    with caplog.at_level(level, "test"):
        await run(DynamoLockAcquireTrigger(key=f"time line {level}"))

    lines = [each for each in caplog.records if each.message.startswith("Time line of this trigger: ")]
    assert len(lines) == (level == logging.DEBUG)
    for line in lines:
        assert line.levelno == logging.INFO
        parts = [part.rsplit(" ", 2)[0] for part in line.message.partition(": ")[2].split(", ")]
        assert parts == ["total", "task state", "connection", "client", "grant", "result", "end"]


async def test_a_release_wakes_the_next_waiter_of_its_process_without_a_poll(
    airflow: Airflow, locks: LockClient
) -> None:
    """The queue decides which waiter is next, so this is fair."""
    await run(DynamoLockAcquireTrigger(key="own waiter"))
    async with DynamoLockHook().async_client() as (client, _):
        waiting = asyncio.ensure_future(client.acquire("own waiter", poll_interval=10 * PATIENCE))
        await until(lambda: client._core.poller.waiters)

        await run(DynamoLockReleaseTrigger("acquire"))

        assert await asyncio.wait_for(waiting, PATIENCE)
