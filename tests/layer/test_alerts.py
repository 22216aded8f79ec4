"""Alerts of tasks that wait for a lock, or hold it, for too long: from the triggerer and from a worker."""

from __future__ import annotations

import asyncio
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from airflow.sdk import DAG, BaseNotifier
from airflow.sdk.bases.xcom import BaseXCom

from airflow_dynamo_lock import (
    DynamoLock,
    DynamoLockAcquireOperator,
    DynamoLockOperator,
    LockAlert,
    LockClient,
    LockValueError,
)
from airflow_dynamo_lock.airflow import lock_options
from airflow_dynamo_lock.airflow.decorators import dynamo_lock_task
from airflow_dynamo_lock.airflow.trigger_base import LockTrigger
from airflow_dynamo_lock.airflow.triggers import DynamoLockAcquireTrigger, DynamoLockHeartbeatTrigger
from airflow_dynamo_lock.airflow.versions import RENDERS_IN_TRIGGERER, STARTS_IN_TRIGGERER
from deployments.engines import Engine
from deployments.patience import until, wait_until
from tests.formats.conftest import make_place
from tests.layer import alert_notifiers
from tests.layer.alert_notifiers import AsyncMessenger, Messenger, Unreachable
from tests.layer.test_waiting import in_the_triggerer, key, result_of, task_instance

pytestmark = pytest.mark.usefixtures("connection")

__all__ = ["key"]

# Airflow 3.0 awaits no notifiers.
NOTIFIERS = [Messenger, *([AsyncMessenger] if hasattr(BaseNotifier, "async_notify") else [])]
SOON = timedelta(milliseconds=50)
TEXT = {"text": "{{ run_id }} of {{ dag_id }}: {{ lock_alert.text }}"}


@pytest.fixture(autouse=True)
def sent() -> list[str]:
    alert_notifiers.SENT.clear()
    return alert_notifiers.SENT


@pytest.fixture(autouse=True)
def xcoms(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The stored XComs of the task, by key."""
    values: dict[str, Any] = {}

    def store(*, key: str, value: Any, **_: Any) -> None:
        values[key] = value

    monkeypatch.setattr(BaseXCom, "set", store)
    monkeypatch.setattr(BaseXCom, "get_one", lambda *, key, **_: values.get(key))
    return values


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines that tasks log, on a worker and in the triggerer."""
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    log = logging.Logger("tasks", logging.INFO)
    log.addHandler(Handler())
    for kind in (DynamoLockAcquireOperator, LockTrigger):
        monkeypatch.setattr(kind, "log", log, raising=False)
    return lines


def alert(notifier: type[Any] = Messenger, after: timedelta = SOON) -> LockAlert:
    return LockAlert(after, notifier, TEXT)


# -- while a task waits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("notifier", NOTIFIERS)
def test_a_long_wait_in_the_triggerer_sends_one_alert_and_continues(
    locks: LockClient, key: str, sent: list[str], xcoms: dict[str, Any], notifier: type[Any]
) -> None:
    held = locks.acquire(key)

    async def wait() -> Any:
        waiting = asyncio.ensure_future(result_of(in_the_triggerer(key, on_wait=alert(notifier).as_json())))
        await until(lambda: "on_wait_sent" in xcoms)
        locks.release(held)
        return await waiting

    assert asyncio.run(wait())["key"] == key
    (text,) = sent
    assert text.removeprefix("awaited: ").startswith("run of dag: ")
    assert f"dag/run/waits has waited for the lock '{key}' for " in text
    assert "Locked by the tests since " in text
    assert text.startswith("awaited") == (notifier is AsyncMessenger)


def test_a_short_wait_sends_no_alert(locks: LockClient, key: str, sent: list[str]) -> None:
    asyncio.run(result_of(in_the_triggerer(key, on_wait=alert(after=timedelta(hours=1)).as_json())))
    assert sent == []


def test_the_next_triggerer_sends_an_alert_for_another_try_only(
    locks: LockClient, key: str, sent: list[str], xcoms: dict[str, Any]
) -> None:
    locks.acquire(key)

    async def run(trigger: DynamoLockAcquireTrigger, times: int) -> None:
        waiting = asyncio.ensure_future(result_of(trigger))
        await until(lambda: locks.waiters(key) and len(sent) >= times)
        waiting.cancel()
        await asyncio.wait((waiting,))

    first = in_the_triggerer(key, on_wait=alert().as_json())
    asyncio.run(run(first, 1))
    second = in_the_triggerer(key, on_wait=alert().as_json())
    second.task_instance = first.task_instance
    asyncio.run(run(second, 1))
    assert len(sent) == 1

    xcoms["on_wait_sent"] = 0
    asyncio.run(run(second, 2))
    assert len(sent) == 2


def test_an_alert_that_cannot_be_sent_is_logged_and_the_wait_continues(
    locks: LockClient, key: str, lines: list[str]
) -> None:
    held = locks.acquire(key)
    # The notifiers of Airflow 3.0 log a failure, but do not raise it.
    message = "The alert on_wait will not be sent, because of ConnectionError: no route to host"
    message = message if AsyncMessenger in NOTIFIERS else "Sent the alert on_wait"

    async def wait() -> Any:
        waiting = asyncio.ensure_future(
            result_of(in_the_triggerer(key, on_wait=alert(Unreachable).as_json()))
        )
        await until(lambda: any(line.startswith(message) for line in lines))
        locks.release(held)
        return await waiting

    assert asyncio.run(wait())["key"] == key


def test_a_wait_in_a_format_without_queues_counts_from_the_start_of_its_trigger(
    moto: Engine, monkeypatch: pytest.MonkeyPatch, key: str, sent: list[str]
) -> None:
    place = make_place("dyndbmutex", moto)
    extra = {"table": place.table, "format": place.format, "region_name": "eu-central-1"}
    connection = json.dumps({"conn_type": "dynamo_lock", "extra": extra})
    monkeypatch.setenv("AIRFLOW_CONN_WITHOUT_QUEUE", connection)
    trigger = in_the_triggerer(key, dynamo_lock_conn_id="without_queue", on_wait=alert().as_json())
    other = LockClient(place.sdk, table=place.table, table_format=place.format, owner="another program")
    held = other.acquire(key)

    async def wait() -> Any:
        waiting = asyncio.ensure_future(result_of(trigger))
        await until(lambda: sent)
        other.release(held)
        return await waiting

    assert asyncio.run(wait())["key"] == key
    (text,) = sent
    assert f"dag/run/waits has waited for the lock '{key}' for " in text


def test_a_long_wait_on_a_worker_sends_an_alert(locks: LockClient, key: str, sent: list[str]) -> None:
    held = locks.acquire(key)
    with DAG("dag"):
        operator = DynamoLockAcquireOperator(task_id="waits", key=key, deferrable=False, on_wait=alert())
    context: Any = {"ti": task_instance("waits"), "run_id": "run", "dag_id": "dag", "dag": None}
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(type(operator).execute.__wrapped__, operator, context)  # type: ignore[attr-defined]
        wait_until(lambda: sent)
        locks.release(held)
        assert waiting.result()["key"] == key
    (text,) = sent
    assert f"dag/run/waits has waited for the lock '{key}' for " in text


# -- while a task holds -----------------------------------------------------------------------------------------------


def test_the_heartbeat_task_of_a_group_that_holds_for_long_sends_an_alert(
    locks: LockClient, key: str, sent: list[str], xcoms: dict[str, Any]
) -> None:
    lease = locks.acquire(key)
    xcoms["return_value"] = lease.as_dict()
    trigger = DynamoLockHeartbeatTrigger("acquire", on_held=alert().as_json())
    trigger.task_instance = task_instance("heartbeat")

    async def run() -> None:
        heartbeats = asyncio.ensure_future(trigger.work())
        await until(lambda: "on_held_sent" in xcoms)
        locks.release(lease)
        await heartbeats

    asyncio.run(run())
    (text,) = sent
    assert f"The lock '{key}' has been held for " in text
    assert "by the tests since " in text


def test_a_lease_that_is_gone_sends_no_alert(
    locks: LockClient, key: str, sent: list[str], xcoms: dict[str, Any]
) -> None:
    lease = locks.acquire(key)
    xcoms["return_value"] = lease.as_dict()
    locks.release(lease)
    trigger = DynamoLockHeartbeatTrigger("acquire", on_held=alert().as_json())
    trigger.task_instance = task_instance("heartbeat")
    asyncio.run(trigger.work())
    assert sent == []


def test_the_process_of_a_function_that_holds_for_long_sends_an_alert(
    locks: LockClient, key: str, sent: list[str]
) -> None:
    with DAG("dag"):
        operator = DynamoLockOperator(
            task_id="works",
            key=key,
            deferrable=False,
            on_held=alert(),
            python_callable=lambda: wait_until(lambda: sent),
        )
    context: Any = {"ti": task_instance("works"), "run_id": "run", "dag_id": "dag", "dag": None}
    type(operator).execute.__wrapped__(operator, context)  # type: ignore[attr-defined]
    (text,) = sent
    assert f"The lock '{key}' has been held for " in text


# -- options in a DAG -------------------------------------------------------------------------------------------------


def test_group_operators_and_decorator_pass_on_their_alerts() -> None:
    wait, hold = alert(after=timedelta(minutes=5)), alert(after=timedelta(minutes=7))
    with DAG("dag"):
        group = DynamoLock("k", on_wait=wait, on_held=hold)
        with group:
            dynamo_lock_task(lambda: None, task_id="inner", key="inner", on_wait=wait, on_held=hold)()
        decorated: Any = group.children["lock.inner"]
    assert group.acquire._trigger_arguments()["on_wait"] == wait.as_json()
    assert group.heartbeat._trigger_arguments()["on_held"] == hold.as_json()
    assert (decorated.on_wait, decorated.on_held) == (wait, hold)
    assert decorated._trigger_arguments()["on_wait"] == wait.as_json()


@pytest.mark.skipif(not STARTS_IN_TRIGGERER, reason="this Airflow starts no task in the triggerer")
def test_templates_of_the_notifier_are_not_rendered_with_the_trigger() -> None:
    text = alert().as_json()
    assert "{{" not in text
    assert json.loads(text)["kwargs"] == TEXT
    assert json.loads(LockAlert(60, Messenger, {"text": "{% if a %}{{% b"}).as_json())["kwargs"] == {
        "text": "{% if a %}{{% b"
    }
    with DAG("dag"):
        with_alert = DynamoLockAcquireOperator(task_id="a", key="k", on_wait=alert())
        with_template = DynamoLockAcquireOperator(task_id="b", key="{{ ds }}")
    assert with_alert.start_from_trigger
    assert with_template.start_from_trigger == RENDERS_IN_TRIGGERER


def test_durations_are_seconds_or_timedeltas_and_the_class_may_be_a_path() -> None:
    path = "tests.layer.alert_notifiers.Messenger"
    by_path = LockAlert(90, path, {"text": "hello"})
    assert LockAlert.from_json(by_path.as_json()) == LockAlert(90.0, path, {"text": "hello"})
    assert isinstance(by_path.create_notifier(), Messenger)
    assert LockAlert(timedelta(seconds=90), path).as_json() == LockAlert(90, path).as_json()


def test_an_invalid_alert_is_refused_when_the_dag_is_parsed() -> None:
    class Local(Messenger): ...

    a_notifier = "The notifier of a LockAlert must be a notifier's class or its import path"
    for arguments, message in [
        ((0, Messenger, TEXT), "after must be"),
        ((60, Messenger, {"txt": "hello"}), "The kwargs of a LockAlert do not fit Messenger: "),
        ((60, Messenger, {"text": object()}), "must be values that JSON has: "),
        (
            (60, Local, TEXT),
            "'test_an_invalid_alert_.*Local' of a LockAlert is defined in a DAG file or a function",
        ),
        ((60, Messenger("hello")), f"{a_notifier}, not <tests.layer.alert_notifiers.Messenger object"),
        ((60, None), f"{a_notifier}, not None"),
        ((60, ""), f"{a_notifier}, not ''"),
        ((60, "Messenger"), f"{a_notifier}, not 'Messenger'"),
        ((60, "tests.layer.alert notifiers.Messenger"), f"{a_notifier}, not 'tests"),
        ((60, Messenger, None), "The kwargs of a LockAlert must be a dictionary .*, not of type NoneType"),
        ((60, Messenger, ["secret"]), "The kwargs of a LockAlert must be a dictionary .*, not of type list"),
        ((60, Messenger, {1: "one"}), "The kwargs of a LockAlert must be a dictionary"),
    ]:
        with pytest.raises(LockValueError, match=message):
            LockAlert(*arguments)  # type: ignore[arg-type]
    by_path = LockAlert(60, "no.such.Module", TEXT)
    assert LockAlert.from_json(by_path.as_json()) == by_path, "only the triggerer needs the notifier"
    not_an_alert: Any = Messenger("hello")
    with DAG("dag"):
        with pytest.raises(LockValueError, match=r"^on_wait must be a LockAlert, not <.*Messenger"):
            DynamoLock("k", on_wait=not_an_alert)
        with pytest.raises(LockValueError, match=r"^on_held must be a LockAlert, not <.*Messenger"):
            DynamoLockOperator(task_id="t", key="k", python_callable=print, on_held=not_an_alert)


def test_no_alert_adds_nothing_to_a_trigger() -> None:
    assert "on_wait" not in lock_options.PARAMETERS
    with DAG("dag"):
        group = DynamoLock("k")
        with group:
            DynamoLockOperator(task_id="t", key="other", python_callable=print)
    assert "on_wait" not in group.acquire._trigger_arguments()
    assert "on_held" not in group.heartbeat._trigger_arguments()
