"""No output of the package contains a secret or a payload (rule R12): no log line at any level, no error or its cause,
no `repr` of an object, and nothing that Airflow stores.

The SDK has its own log. docs/security.md says what it shows at DEBUG, and `test_what_botocore_shows_at_debug` checks
that.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
from aiobotocore.session import get_session
from airflow.providers.common.compat.sdk import XCom
from airflow.sdk import DAG
from airflow.sdk.exceptions import TaskDeferred
from airflow.triggers.base import BaseTrigger

from airflow_dynamo_lock import (
    AsyncLockClient,
    DynamoLockHook,
    DynamoLockOperator,
    LockAccessError,
    LockClient,
    LockError,
    sdk_config,
)
from airflow_dynamo_lock.airflow.triggers import (
    DynamoLockAcquireTrigger,
    DynamoLockHeartbeatTrigger,
    DynamoLockReleaseTrigger,
    DynamoLockSensorTrigger,
)
from airflow_dynamo_lock.core.model.errors import CapacityMismatchError, LockLostError, LockRecordError
from airflow_dynamo_lock.core.model.record import QueuePosition
from deployments.engines import MotoServer
from deployments.patience import PATIENCE
from tests.security.policies import Guarded

TABLE = "locks"
REGION = "eu-central-1"

#: The secrets to search for in all output.
SECRET = "hunter2-"  # the beginning of each
PAYLOAD, KEY_OF_AWS, SESSION, PASSWORD, EXTRA, PROXY = (
    f"{SECRET}{what}" for what in ("payload", "aws-key", "session", "password", "extra", "proxy")
)
DATA = {"note": PAYLOAD, "deep": {PAYLOAD: [PAYLOAD]}}
CREDENTIALS: dict[str, Any] = {
    "aws_access_key_id": "AKIATEST",
    "aws_secret_access_key": KEY_OF_AWS,
    "aws_session_token": SESSION,
}
#: Loggers of other programs.
OTHERS = ("botocore", "boto3", "aiobotocore", "urllib3", "aiohttp", "asyncio", "s3transfer")


class Output:
    """All output of the package, to be searched for secrets."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, *things: object) -> None:
        """Add the texts of objects, and the traceback of an error with its causes."""
        for thing in things:
            self.texts += [str(thing), repr(thing)]
            if isinstance(thing, BaseException):
                self.texts.append("".join(traceback.format_exception(thing)))

    def note_error(self, call: Callable[[], object], kind: type[BaseException] = LockError) -> None:
        """Add the error of a call that must fail."""
        with pytest.raises(kind) as raised:
            call()
        self.note(raised.value)

    def check(self) -> None:
        """Fail if any text contains a secret."""
        for text in self.texts:
            assert SECRET not in text, text


@pytest.fixture
def output(capfd: pytest.CaptureFixture[str]) -> Iterator[Output]:
    """Collect all output, with all loggers at DEBUG except those of the SDK."""
    output, written = Output(), io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(logging.Formatter("%(name)s %(levelname)s %(message)s %(args)s"))
    root = logging.getLogger()
    # The SDK's loggers first: a poller of an earlier test may still read, and its requests must not be logged at DEBUG.
    levels = {name: logging.getLogger(name).level for name in (*OTHERS, "airflow_dynamo_lock", "")}
    for name in levels:
        logging.getLogger(name).setLevel(logging.INFO if name in OTHERS else logging.DEBUG)
    root.addHandler(handler)
    try:
        yield output
    finally:
        root.removeHandler(handler)
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
    output.note(written.getvalue(), *capfd.readouterr())
    assert any(text.strip() for text in output.texts)
    output.check()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A DynamoDB with a lock table."""
    with MotoServer() as engine:
        LockClient(sdk(engine.endpoint_url), table=TABLE).create_table()
        yield engine.endpoint_url


def sdk(url: str) -> Any:
    return boto3.client("dynamodb", endpoint_url=url, region_name=REGION, config=sdk_config(), **CREDENTIALS)


def store(url: str, key: str, **attributes: Any) -> None:
    item = {"key": {"S": key}, "entry": {"S": "lock"}, **attributes}
    sdk(url).put_item(TableName=TABLE, Item=item)


# -- the clients --------------------------------------------------------------------------------------------------


def test_the_lifecycle_of_a_lock(output: Output, url: str) -> None:
    locks, others = (LockClient(sdk(url), table=TABLE, owner=owner) for owner in ("me", "somebody else"))
    lease = locks.try_acquire("life", data=DATA)
    assert lease
    record = locks.get("life")
    assert record
    assert record.data == DATA
    output.note(locks, lease, record, record.holders, lease.as_dict(), lease.term, locks.look("life"))
    with locks.keep_alive(lease, interval=0.05) as heartbeats:
        output.note(heartbeats)
        output.note_error(lambda: others.acquire("life", timeout=0.2, poll_interval=0.05))
        output.note_error(lambda: others.try_acquire("life", capacity=2))
        entered = locks.enter(lease, "p")
        output.note(entered, locks.release(lease), locks.leave(entered, "p"))
    lost = locks.try_acquire("life", data=DATA)
    assert lost
    output.note(others.break_lock("life", lost.lease_id))
    output.note_error(lambda: locks.renew(lost), LockLostError)
    output.note_error(lambda: locks.enter(lost, "p"), LockLostError)
    output.note_error(lambda: locks.break_lock("life", "nobody's"))
    output.note(locks.release(lost), *locks.list_locks())
    with pytest.raises(LockLostError) as raised, locks.lock("life", data=DATA) as held:
        others.break_lock("life", held.lease_id)
    output.note(raised.value)


async def test_the_lifecycle_of_a_lock_with_asyncio(output: Output, url: str) -> None:
    session: Any = get_session()
    options = {"endpoint_url": url, "region_name": REGION, "config": sdk_config(), **CREDENTIALS}
    async with session.create_client("dynamodb", **options) as aws:
        locks, others = (AsyncLockClient(aws, table=TABLE, owner=owner) for owner in ("me", "somebody else"))
        async with locks.lock("async", data=DATA) as lease:
            output.note(locks, lease, await locks.get("async"))
            with pytest.raises(TimeoutError) as late:
                await others.acquire("async", timeout=0.2, poll_interval=0.05)
            output.note(late.value)
        with pytest.raises(LockLostError) as lost:
            await locks.renew(lease)
        store(url, "damaged async", data={"S": PAYLOAD})
        with pytest.raises(LockRecordError) as damaged:
            await locks.get("damaged async")
        sdk(url).delete_item(TableName=TABLE, Key={"key": {"S": "damaged async"}, "entry": {"S": "lock"}})
        output.note(lost.value, damaged.value)


def test_a_queued_waiter(output: Output, url: str) -> None:
    locks, others = (LockClient(sdk(url), table=TABLE, owner=owner) for owner in ("me", "somebody else"))
    blocker = locks.try_acquire("line", data=DATA, min_hold=3600)
    assert blocker
    queued, positions = threading.Event(), list[QueuePosition]()

    def wait() -> None:
        def note(position: QueuePosition) -> None:
            positions.append(position)
            queued.set()

        lease = others.acquire(
            "line", data=DATA, on_position=note, poll_interval=0.05, priority=3, timeout=PATIENCE
        )
        output.note(lease, lease.reclaimed, others.release(lease))

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert queued.wait(PATIENCE)
    output.note(*positions, *(each.describe() for each in positions), *locks.waiters("line"))
    output.note_error(lambda: locks.set_capacity("line", 2), CapacityMismatchError)
    output.note(locks.release(blocker), locks.get("line"), locks.break_lock("line", blocker.lease_id))
    waiting.join(PATIENCE)
    output.note(locks.set_capacity("line", 2), locks.set_capacity("line", None), locks.get("line"))


def test_a_damaged_waiter_item(output: Output, url: str) -> None:
    locks = LockClient(sdk(url), table=TABLE, owner="me")
    assert locks.try_acquire("odd line", data=DATA)
    odd = {"key": {"S": "odd line"}, "entry": {"S": "waiter/0999/1/x"}, "owner": {"L": [{"S": PAYLOAD}]}}
    sdk(url).put_item(TableName=TABLE, Item=odd)
    output.note(locks.waiters("odd line"))
    output.note_error(lambda: locks.acquire("odd line", timeout=0.2, poll_interval=0.05))


@pytest.mark.parametrize(
    "attributes",
    [
        {"queue_head": {"M": {"note": {"S": PAYLOAD}}}},
        {"last_ticket": {"S": PAYLOAD}},
        {"capacity_pinned": {"S": PAYLOAD}},
        {"holders": {"M": {"a": {"M": {"hold_until": {"S": PAYLOAD}}}}}},
        {"data": {"M": {"note": {"S": PAYLOAD}}}},
        {"data": {"S": PAYLOAD}},
        {"data": {"SS": [PAYLOAD]}},
        {"capacity": {"S": PAYLOAD}},
        {"holders": {"S": PAYLOAD}},
        {"holders": {"M": {"a": {"S": PAYLOAD}}}},
        {"holders": {"M": {"a": {"M": {"lease_ms": {"S": PAYLOAD}}}}}},
    ],
    ids=str,
)
def test_a_damaged_record_with_a_payload(output: Output, url: str, attributes: dict[str, Any]) -> None:
    locks = LockClient(sdk(url), table=TABLE)
    good = {"capacity": {"N": "1"}, "available": {"N": "1"}, "holders": {"M": {}}, "token": {"S": "x"}}
    store(url, "damaged", **(good | attributes))
    try:
        output.note_error(lambda: locks.get("damaged"), LockRecordError)
        output.note_error(lambda: locks.try_acquire("damaged", data=DATA), LockRecordError)
        output.note_error(lambda: locks.acquire("damaged", timeout=0.1), LockRecordError)
        list(locks.list_locks())  # it is omitted and logged
    finally:
        sdk(url).delete_item(TableName=TABLE, Key={"key": {"S": "damaged"}, "entry": {"S": "lock"}})


@pytest.mark.parametrize(
    "data",
    [
        PAYLOAD,
        [PAYLOAD],
        {"a": {PAYLOAD}},
        {"a": f"{PAYLOAD}\ud800"},
        {f"{PAYLOAD}\ud800": 1},
        {"a": PAYLOAD * 50_000},
        {"a": SimpleNamespace(secret=PAYLOAD)},
    ],
    ids=lambda data: type(data).__name__,
)
def test_data_that_cannot_be_stored(output: Output, url: str, data: Any) -> None:
    output.note_error(lambda: LockClient(sdk(url), table=TABLE).try_acquire("unstorable", data=data))


def test_errors_of_each_kind(output: Output, url: str) -> None:
    nobody = Guarded(sdk(url), {"Statement": []})
    for client in (
        LockClient(nobody, table=TABLE),
        LockClient(sdk("http://127.0.0.1:1"), table=TABLE),
        LockClient(sdk(url), table="missing"),
    ):
        output.note(client)
        output.note_error(lambda locks=client: locks.try_acquire("errors", data=DATA))  # type: ignore[misc]
        output.note_error(lambda locks=client: locks.get("errors"))  # type: ignore[misc]
        output.note_error(lambda locks=client: list(locks.list_locks()))  # type: ignore[misc]
        output.note_error(lambda locks=client: locks.check_table())  # type: ignore[misc]


@pytest.mark.parametrize("name", ["aws_access_key_id", "aws_session_token"])
def test_credentials_that_http_does_not_allow(output: Output, url: str, name: str) -> None:
    credentials = CREDENTIALS | {name: f"{SESSION}\nx"}
    client = boto3.client(
        "dynamodb", endpoint_url=url, region_name=REGION, config=sdk_config(), **credentials
    )
    output.note_error(lambda: LockClient(client, table=TABLE).get("anything"), LockAccessError)


async def test_credentials_that_http_does_not_allow_with_asyncio(output: Output, url: str) -> None:
    session: Any = get_session()
    credentials = CREDENTIALS | {"aws_session_token": f"{SESSION}\nx"}
    async with session.create_client(
        "dynamodb", endpoint_url=url, region_name=REGION, config=sdk_config(), **credentials
    ) as client:
        with pytest.raises(LockAccessError) as raised:
            await AsyncLockClient(client, table=TABLE).get("anything")
    output.note(raised.value)


# -- Airflow ------------------------------------------------------------------------------------------------------


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch, url: str) -> Callable[..., DynamoLockHook]:
    """Creates the hook's connection, with a secret in each field that may have one."""
    monkeypatch.setenv("_AIRFLOW_PROCESS_CONTEXT", "client")
    aws = {
        "conn_type": "aws",
        "login": "AKIATEST",
        "password": KEY_OF_AWS,
        "extra": {"aws_session_token": SESSION, "region_name": REGION},
    }
    monkeypatch.setenv("AIRFLOW_CONN_AWS_DEFAULT", json.dumps(aws))

    def connect(**extra: Any) -> DynamoLockHook:
        values = {"table": TABLE, "endpoint_url": url, "region_name": REGION} | extra
        connection = {"conn_type": "dynamo_lock", "login": "user", "password": PASSWORD, "extra": values}
        monkeypatch.setenv("AIRFLOW_CONN_DYNAMO_LOCK_DEFAULT", json.dumps(connection))
        return DynamoLockHook()

    connect()
    return connect


async def test_the_hook(output: Output, connections: Callable[..., DynamoLockHook]) -> None:
    hook = connections(botocore_config={"proxies": {"ftp": f"http://user:{PROXY}@127.0.0.1:1"}})
    client = hook.get_conn()
    output.note(hook, vars(hook), hook.settings, client, hook.test_connection())
    async with DynamoLockHook().async_client() as (locks, settings):
        output.note(locks, settings, await locks.get("never used"))


@pytest.mark.parametrize(
    "extra",
    [
        {"secret": EXTRA},
        {"lease": PASSWORD},
        {"lease": [PASSWORD]},
        {"table": "no such table", "botocore_config": PASSWORD},
        {"botocore_config": [PASSWORD]},
        {"botocore_config": {"no_such_option": PASSWORD}},
        {"botocore_config": {"retries": PASSWORD}},
        {"endpoint_url": f"http://user:{PASSWORD}@127.0.0.1:1"},
        {
            "endpoint_url": "http://127.0.0.1:1",
            "botocore_config": {"proxies": {"http": f"http://user:{PROXY}@127.0.0.1:1"}},
        },
    ],
    ids=lambda extra: "-".join(extra),
)
def test_an_invalid_connection(
    output: Output, connections: Callable[..., DynamoLockHook], extra: dict[str, Any]
) -> None:
    hook = connections(**extra)
    output.note(hook)
    output.note_error(lambda: hook.get_conn().get("anything"))
    with suppress(LockError):
        output.note(hook.settings)


def test_an_aws_connection_whose_extra_is_not_json(
    output: Output, connections: Callable[..., DynamoLockHook], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Airflow logs the error, and uses the connection without its extra."""
    monkeypatch.setenv("AIRFLOW_CONN_OTHER", f"aws://AKIA:{PASSWORD}@/?__extra__=%7B%22region")
    output.note(connections(aws_conn_id="other").get_conn().get("anything"))


def test_an_aws_connection_that_does_not_exist(
    output: Output, connections: Callable[..., DynamoLockHook]
) -> None:
    """The Amazon provider logs a warning, and looks for credentials as boto3 does."""
    output.note(connections(aws_conn_id="missing").get_conn().get("anything"))


TI = SimpleNamespace(
    id="01a1fb25",
    dag_id="dag",
    run_id="run",
    task_id="locked",
    map_index=-1,
    try_number=1,
    dag_version_id="v",
    xcom_push=lambda **_: None,
)


def test_the_triggers_and_what_they_store(
    output: Output, connections: Callable[..., DynamoLockHook], monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    results: dict[str, Any] = {}

    def keep(value: Any, key: str, **_: Any) -> None:
        results[key] = value

    def load(**_: Any) -> Any:
        return results["return_value"]

    monkeypatch.setattr(XCom, "set", keep)
    monkeypatch.setattr(XCom, "get_one", load)
    triggers: list[BaseTrigger] = [
        DynamoLockAcquireTrigger("triggered"),
        DynamoLockSensorTrigger("triggered", timeout=0.1, poke_interval=0.05),
        DynamoLockReleaseTrigger("locked"),
        DynamoLockHeartbeatTrigger("locked", heartbeat=1),
    ]
    for trigger in triggers:
        trigger.task_instance = TI  # type: ignore[assignment]
        output.note(trigger, vars(trigger), trigger.serialize())
        output.note(asyncio.run(trigger._event()))  # type: ignore[attr-defined]
    output.note(results)
    assert results["return_value"]["key"] == "triggered"


def test_the_operator(output: Output, connections: Callable[..., DynamoLockHook], url: str) -> None:
    locks = LockClient(sdk(url), table=TABLE)
    assert locks.try_acquire("operated", data=DATA)

    def operator(key: str, function: Callable[[], object]) -> DynamoLockOperator:
        with DAG("dag"):
            return DynamoLockOperator(task_id="locked", key=key, python_callable=function)

    context: Any = {"ti": TI, "outlet_events": {}}
    busy = operator("operated", print)
    output.note(busy, vars(busy))
    with pytest.raises(TaskDeferred) as deferred:
        busy.execute(context)
    output.note(deferred.value, vars(deferred.value.trigger))
    lease = locks.try_acquire("operated again", data=DATA)
    assert lease
    again = operator("operated again", lambda: 17)
    output.note(again.execute_locked(context, lease.as_dict()), lease.as_dict())


# -- the log of the SDK -------------------------------------------------------------------------------------------


def test_what_botocore_shows_at_debug(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Session token, signature and payload, but not the secret key: docs/security.md says so."""
    with caplog.at_level(logging.DEBUG, "botocore"):
        locks = LockClient(sdk(url), table=TABLE)
        assert locks.try_acquire("debug", data=DATA)
    ours = [record for record in caplog.records if record.name == "airflow_dynamo_lock"]
    text = "\n".join(record.getMessage() for record in caplog.records if record not in ours)
    assert SESSION in text
    assert PAYLOAD in text
    assert "Signature=" in text
    assert KEY_OF_AWS not in text
