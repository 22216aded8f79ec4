"""The heartbeat task, in the triggerer and on a worker: how long it renews a lease."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG
from airflow.sdk.bases.xcom import BaseXCom
from airflow.sdk.execution_time import task_runner

from airflow_dynamo_lock import (
    DynamoLock,
    DynamoLockHeartbeatOperator,
    Lease,
    LockAlert,
    LockClient,
    LockLostError,
    LockTableError,
    LockUnavailableError,
)
from airflow_dynamo_lock.airflow import task_states
from airflow_dynamo_lock.airflow.hooks import DynamoLockHook
from airflow_dynamo_lock.airflow.triggers import DynamoLockHeartbeatTrigger
from airflow_dynamo_lock.core.effects import Reply, Request
from airflow_dynamo_lock.core.model.lease import LeaseSet
from deployments.patience import PATIENCE, until, wait_until
from tests.layer import alert_notifiers


class Airflow:
    """Answers requests for task states, and counts them."""

    def __init__(self) -> None:
        self.states: dict[str, str | None] = {"lock.heartbeat": "deferred", "lock.release": None}
        self.asked = 0

    async def asend(self, request: Any) -> Any:
        self.asked += 1
        return SimpleNamespace(task_states={"run": {name: self.states[name] for name in request.task_ids}})

    def send(self, message: Any) -> None:
        """Receive the names of secret values, which Airflow 3.0 sends for each connection."""


@pytest.fixture
def airflow(monkeypatch: pytest.MonkeyPatch, connection: None) -> Airflow:
    monkeypatch.setattr(task_states, "EVERY", 0.1)
    monkeypatch.setattr(task_states, "RELEASE_DETECTION_SECONDS", 0.1)
    answers = Airflow()
    monkeypatch.setattr(task_runner, "SUPERVISOR_COMMS", answers, raising=False)
    return answers


@pytest.fixture
def lease(request: pytest.FixtureRequest, locks: LockClient, monkeypatch: pytest.MonkeyPatch) -> Lease:
    key: str = request.node.name
    lease = locks.try_acquire(key, lease=60)
    assert lease

    def result(**_: Any) -> Any:
        return lease.as_dict()

    monkeypatch.setattr(BaseXCom, "get_one", result)
    return lease


def trigger() -> DynamoLockHeartbeatTrigger:
    """Return the trigger of a heartbeat task as the group creates it."""
    with DAG("dag"):
        lock = DynamoLock("orders")
        with lock:
            EmptyOperator(task_id="work")
    trigger = DynamoLockHeartbeatTrigger(**lock.heartbeat._trigger_arguments())
    trigger.task_instance = SimpleNamespace(  # type: ignore[assignment]
        dag_id="dag", run_id="run", task_id="lock.heartbeat", map_index=-1
    )
    return trigger


async def events_of(trigger: DynamoLockHeartbeatTrigger) -> list[str]:
    return [type(event).__name__ async for event in trigger.run()]


async def test_it_renews_the_lease_until_it_is_released(
    airflow: Airflow, lease: Lease, locks: LockClient
) -> None:
    found = await asyncio.to_thread(locks.get, lease.key)
    keeping = asyncio.ensure_future(events_of(trigger()))
    await until(lambda: locks.get(lease.key) != found)
    await until(lambda: airflow.asked > 3)
    assert not keeping.done()
    assert await asyncio.to_thread(locks.release, lease)
    assert await asyncio.wait_for(keeping, PATIENCE) == ["TaskSuccessEvent"]


@pytest.mark.parametrize("state", ["failed", "success", "skipped"])
async def test_it_releases_a_lease_that_the_release_task_did_not(
    airflow: Airflow, lease: Lease, locks: LockClient, state: str
) -> None:
    airflow.states["lock.release"] = state
    assert await asyncio.wait_for(events_of(trigger()), PATIENCE) == ["TaskSuccessEvent"]
    record = await asyncio.to_thread(locks.get, lease.key)
    assert record
    assert not record.holders


async def test_it_continues_while_the_release_task_is_up_for_retry(airflow: Airflow, lease: Lease) -> None:
    airflow.states["lock.release"] = "up_for_retry"
    keeping = asyncio.ensure_future(events_of(trigger()))
    await until(lambda: airflow.asked > 3)
    assert not keeping.done()
    keeping.cancel()
    await asyncio.wait([keeping])


async def test_it_ends_when_its_task_is_no_longer_deferred(
    airflow: Airflow, lease: Lease, locks: LockClient
) -> None:
    keeping = asyncio.ensure_future(events_of(trigger()))
    await until(lambda: airflow.asked > 1)
    airflow.states["lock.heartbeat"] = None  # cleared
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(keeping, PATIENCE)
    record = await asyncio.to_thread(locks.get, lease.key)
    assert record
    assert record.holders


def on_a_worker(airflow: Airflow, states: Any, **arguments: Any) -> Callable[[], None]:
    """Return the `execute` of a heartbeat task that does not defer.

    :param states: state of the release task that Airflow returns, or an exception that it raises.
    """
    operator = DynamoLockHeartbeatOperator(
        task_id="heartbeat", acquire_task_id="acquire", deferrable=False, **arguments
    )

    def states_of(*, task_ids: list[str], **_: Any) -> Any:
        airflow.asked += 1
        if isinstance(states, Exception):
            raise states
        return {"run": dict.fromkeys(task_ids, states)}

    ti = SimpleNamespace(
        dag_id="dag",
        run_id="run",
        task_id="heartbeat",
        map_index=-1,
        xcom_pull=lambda **_: BaseXCom.get_one(),  # type: ignore[call-arg]
        get_task_states=states_of,
    )
    context = {"ti": ti, "dag": None}  # the notifiers of Airflow 3.0 read the DAG
    # Airflow warns if it has not called an `execute` itself.
    return lambda: type(operator).execute.__wrapped__(operator, context)  # type: ignore[attr-defined]


@pytest.mark.parametrize("state", ["failed", "success", "skipped"])
def test_on_a_worker_it_releases_a_lease_that_the_release_task_did_not(
    airflow: Airflow, lease: Lease, locks: LockClient, state: str
) -> None:
    on_a_worker(airflow, state, release_task_id="release")()
    record = locks.get(lease.key)
    assert record
    assert not record.holders


@pytest.mark.parametrize("state", ["up_for_retry", None, ConnectionError("no answer")])
def test_on_a_worker_it_continues_until_the_release(
    airflow: Airflow, lease: Lease, locks: LockClient, state: Any
) -> None:
    with ThreadPoolExecutor() as threads:
        keeping = threads.submit(on_a_worker(airflow, state, release_task_id="release"))
        wait_until(lambda: airflow.asked > 3)
        assert not keeping.done()
        locks.release(lease)
        keeping.result(PATIENCE)


class CutOffClient(LockClient):
    """A client whose requests fail while `is_cut_off`."""

    is_cut_off = False
    failures = 0

    def _call(self, request: Request) -> Reply:
        if self.is_cut_off:
            self.failures += 1
            raise LockUnavailableError("DynamoDB cannot be reached.", maybe_applied=False)
        return super()._call(request)


@pytest.fixture
def client(locks: LockClient, monkeypatch: pytest.MonkeyPatch) -> CutOffClient:
    """Return the client of the task."""
    client = CutOffClient(locks._client, table="locks")
    monkeypatch.setattr(DynamoLockHook, "get_conn", lambda _: client)
    return client


def test_on_a_worker_it_repeats_its_first_heartbeat_too(
    airflow: Airflow, lease: Lease, locks: LockClient, client: CutOffClient
) -> None:
    client.is_cut_off = True
    found = locks.get(lease.key)
    with ThreadPoolExecutor() as threads:
        keeping = threads.submit(on_a_worker(airflow, None, heartbeat=0.1))
        try:
            wait_until(lambda: client.failures > 3 or keeping.done())
            assert not keeping.done()
            client.is_cut_off = False
            wait_until(lambda: locks.get(lease.key) != found)
        finally:
            locks.release(lease)
        keeping.result(PATIENCE)


@pytest.mark.parametrize("keys", [["one"], ["one", "two"]])
def test_on_a_worker_it_renews_the_leases_again_after_an_outage_longer_than_they_last(
    airflow: Airflow,
    locks: LockClient,
    client: CutOffClient,
    monkeypatch: pytest.MonkeyPatch,
    keys: list[str],
) -> None:
    keys = [f"outage of {len(keys)}: {key}" for key in keys]
    held = locks.acquire(keys, lease=1)
    monkeypatch.setattr(BaseXCom, "get_one", lambda **_: [lease.as_dict() for lease in held])

    def stamps() -> list[Any]:
        records = [locks.get(key) for key in keys]
        return [record and record.holders for record in records]

    with ThreadPoolExecutor() as threads:
        before = stamps()
        keeping = threads.submit(on_a_worker(airflow, None, heartbeat=0.1))
        try:
            wait_until(lambda: stamps() != before)
            client.is_cut_off = True
            with suppress(LockLostError):  # the answer came when the lease had run out already
                locks.renew(held)  # later than the last heartbeat of the task
            wait_until(lambda: held.remaining() <= 0)
            before = stamps()
            client.is_cut_off = False
            wait_until(lambda: all(now != then for now, then in zip(stamps(), before, strict=True)))
            assert not keeping.done()
        finally:
            client.is_cut_off = False
            locks.release(held)
        keeping.result(PATIENCE)


def test_on_a_worker_it_renews_the_other_leases_of_a_set_when_one_is_broken(
    airflow: Airflow, locks: LockClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = locks.try_acquire(["broken of two", "kept of two"], lease=60)
    assert held
    broken, kept = held
    monkeypatch.setattr(BaseXCom, "get_one", lambda **_: [lease.as_dict() for lease in held])

    def stamp() -> Any:
        record = locks.get(kept.key)
        return record and record.holders

    with ThreadPoolExecutor() as threads:
        before = stamp()
        keeping = threads.submit(on_a_worker(airflow, None, heartbeat=0.1))
        try:
            wait_until(lambda: stamp() != before)
            locks.break_lock(broken.key, broken.lease_id)
            for _ in range(3):  # the first may have been sent before the break
                before = stamp()
                wait_until(lambda then=before: stamp() != then)  # type: ignore[misc]
            assert not keeping.done()
        finally:
            locks.release(kept)
        keeping.result(PATIENCE)


def test_on_a_worker_it_sends_alerts(airflow: Airflow, lease: Lease, locks: LockClient) -> None:
    alert_notifiers.SENT.clear()
    alert = LockAlert(0.05, alert_notifiers.Messenger, {"text": "{{ lock_alert.text }}"})
    with ThreadPoolExecutor() as threads:
        keeping = threads.submit(on_a_worker(airflow, None, on_held=alert))
        try:
            wait_until(lambda: alert_notifiers.SENT)
        finally:
            locks.release(lease)
        keeping.result(PATIENCE)
    (text,) = alert_notifiers.SENT
    assert text.startswith(f"The lock '{lease.key}' has been held for ")


class WatchingClient:
    """A client that renews and watches leases for ever. Watching the leases of some keys fails."""

    def __init__(self, *broken: str) -> None:
        self.broken = broken
        self.watched: set[str] = set()
        self.two_watched = asyncio.Event()

    async def keep_for_processes(self, held: LeaseSet, *, interval: float) -> None:
        await asyncio.Event().wait()

    async def until_gone(self, lease: Lease) -> None:
        if lease.key in self.broken:
            raise LockTableError("There is no such table any more.")
        self.watched.add(lease.key)
        if len(self.watched) == 2:
            self.two_watched.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.watched.remove(lease.key)


def a_set(*keys: str) -> LeaseSet:
    return LeaseSet(tuple(Lease(key, "a", 1, "me", 1, 1, 30_000, 15_000, 0) for key in keys))


async def test_a_lease_that_cannot_be_watched_does_not_count_as_gone(airflow: Airflow) -> None:
    client = WatchingClient("b")
    with pytest.raises(LockTableError):
        await asyncio.wait_for(trigger()._send_heartbeats(client, a_set("a", "b")), PATIENCE)  # type: ignore[arg-type]
    assert not client.watched


async def test_a_cancelled_heartbeat_task_watches_no_lease(airflow: Airflow) -> None:
    client = WatchingClient()
    keeping = asyncio.ensure_future(trigger()._send_heartbeats(client, a_set("a", "b")))  # type: ignore[arg-type]
    await asyncio.wait_for(client.two_watched.wait(), PATIENCE)
    keeping.cancel()
    await asyncio.wait([keeping])
    assert not client.watched
