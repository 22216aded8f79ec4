"""Waiting tasks, in the triggerer and on a worker: the options of their claims, and the positions that they log."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import threading
import uuid
from collections.abc import Callable
from contextvars import ContextVar
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import DAG
from airflow.sdk.bases.xcom import BaseXCom

from airflow_dynamo_lock import (
    DynamoLock,
    DynamoLockAcquireOperator,
    DynamoLockOperator,
    DynamoLockSensor,
    Lease,
    LockClient,
    LockDeadlockError,
)
from airflow_dynamo_lock.airflow import lock_options, nesting, task_states
from airflow_dynamo_lock.airflow.lock_options import Wanted
from airflow_dynamo_lock.airflow.trigger_base import LockTrigger
from airflow_dynamo_lock.airflow.triggers import DynamoLockAcquireTrigger, DynamoLockSensorTrigger
from airflow_dynamo_lock.airflow.versions import RETRIES_AFTER_TRIGGER, AirflowFailException
from deployments.hold_times import make_usual
from deployments.patience import PATIENCE, wait_until

pytestmark = pytest.mark.usefixtures("connection")

#: The task for which a line is logged, as in Airflow's triggerer.
TASK: ContextVar[str] = ContextVar("TASK", default="no task")


class WaitingLog(logging.Handler):
    """Collects the lines that waiting tasks log, with their tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []
        self._more = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message.startswith("Waiting for the lock"):
            with self._more:
                self.lines.append((TASK.get(), message))
                self._more.notify_all()

    def until(self, text: str, task: str | None = None) -> None:
        """Wait until a line with a text was logged, for a given task or any."""
        with self._more:
            assert self._more.wait_for(
                lambda: any(text in line and task in (None, of) for of, line in self.lines), 30
            ), self.lines

    def positions(self, task: str) -> list[str]:
        """Return the positions that were logged for a task."""
        return [line.partition(": ")[2] for of, line in self.lines if of == task and ": " in line]


@pytest.fixture
def waiting_log(monkeypatch: pytest.MonkeyPatch) -> WaitingLog:
    """Collect the lines that tasks log, on a worker and in the triggerer."""
    log, waiting_log = logging.Logger("tasks", logging.INFO), WaitingLog()
    log.addHandler(waiting_log)
    for kind in (DynamoLockAcquireOperator, LockTrigger):
        monkeypatch.setattr(kind, "log", log, raising=False)
    return waiting_log


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


@pytest.fixture(autouse=True)
def no_xcom(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(**_: Any) -> None: ...

    monkeypatch.setattr(BaseXCom, "set", forget)


def task_instance(task_id: str) -> Any:
    return SimpleNamespace(
        id=uuid.uuid4(),
        dag_id="dag",
        run_id="run",
        task_id=task_id,
        map_index=-1,
        try_number=1,
        dag_version_id="v",
        xcom_push=lambda **_: None,
    )


def on_a_worker(key: str, task_id: str = "waits", **arguments: Any) -> Callable[[], Lease]:
    """Return the `execute` of an acquire that waits on its worker."""
    with DAG("dag"):
        operator = DynamoLockAcquireOperator(task_id=task_id, key=key, deferrable=False, **arguments)
    context: Any = {"ti": task_instance(task_id)}
    # Airflow warns if it has not called an `execute` itself.
    return lambda: Lease.from_dict(type(operator).execute.__wrapped__(operator, context))  # type: ignore[attr-defined]


def in_the_triggerer(key: str, task_id: str = "waits", **arguments: Any) -> DynamoLockAcquireTrigger:
    trigger = DynamoLockAcquireTrigger(key=key, resume=True, **arguments)
    trigger.task_instance = task_instance(task_id)
    return trigger


async def result_of(trigger: DynamoLockAcquireTrigger, task_id: str = "") -> Any:
    TASK.set(task_id)
    return (await trigger.work()).payload


def holders(locks: LockClient, key: str) -> list[Any]:
    record = locks.get(key)
    assert record is not None
    return list(record.holders.values())


# -- options of a claim -----------------------------------------------------------------------------------------------


def test_rendered_templates_are_converted() -> None:
    rendered = {
        "key": "k",
        "slots": "2",
        "capacity": "3",
        "fair": "False",
        "priority": "-5",
        "min_hold": "1.5",
    }
    wanted = Wanted.of(SimpleNamespace(**{**lock_options.PARAMETERS, **rendered}))

    assert (wanted.spec.slots, wanted.spec.capacity, wanted.spec.priority, wanted.spec.min_hold) == (
        2,
        3,
        -5,
        1.5,
    )
    assert wanted.spec.fair is False


def test_a_trigger_that_an_earlier_version_has_stored_waits_as_before() -> None:
    stored: dict[str, Any] = {
        "key": "k",
        "lease": None,
        "timeout": 5,
        "on_timeout": "fail",
        "slots": 1,
        "capacity": 1,
    }

    trigger = DynamoLockAcquireTrigger(**stored, release_grace=15.0, dynamo_lock_conn_id="c", deadline=None)

    assert Wanted.of(trigger) == Wanted.of(
        SimpleNamespace(**{**lock_options.PARAMETERS, "key": "k", "timeout": 5})
    )
    _, arguments = trigger.serialize()
    assert DynamoLockAcquireTrigger(**arguments).serialize()[1] == arguments


def test_shared_holders_exclude_exclusive_ones(locks: LockClient, key: str) -> None:
    first, second = on_a_worker(key, "first", mode="shared")(), on_a_worker(key, "second", mode="shared")()

    assert {first.lease_id, second.lease_id} == {each.lease_id for each in holders(locks, key)}
    assert locks.try_acquire(key) is None
    locks.release(first)
    locks.release(second)
    assert locks.try_acquire(key)


async def test_options_of_a_claim_reach_the_record_and_the_queue(
    locks: LockClient, key: str, waiting_log: WaitingLog
) -> None:
    blocker = await asyncio.to_thread(locks.try_acquire, key)
    assert blocker
    trigger = in_the_triggerer(key, priority="7", min_hold=60, timeout=30)
    waiting = asyncio.ensure_future(result_of(trigger))
    await asyncio.to_thread(waiting_log.until, "1st of 1")
    (waiter,) = await asyncio.to_thread(locks.waiters, key)
    await asyncio.to_thread(locks.release, blocker)
    await waiting
    (holder,) = await asyncio.to_thread(holders, locks, key)

    assert (waiter.priority, waiter.owner) == (7, "airflow/dag/run/waits")
    assert holder.hold_until_ms == pytest.approx(holder.acquired_at_ms + 60_000, abs=5000)


async def test_an_unfair_task_overtakes(locks: LockClient, key: str, waiting_log: WaitingLog) -> None:
    blocker = await asyncio.to_thread(locks.try_acquire, key)
    assert blocker
    waiting = asyncio.ensure_future(result_of(in_the_triggerer(key)))
    await asyncio.to_thread(waiting_log.until, "1st of 1")
    # In the triggerer's own loop, so that the waiter there cannot read the lock between the two.
    locks.release(blocker)
    overtaking = on_a_worker(key, "overtakes", fair=False, timeout=0)()
    await asyncio.to_thread(locks.release, overtaking)

    assert (await asyncio.wait_for(waiting, PATIENCE))["token"] > overtaking.token


@pytest.mark.parametrize("lock_mode", ["shared", "exclusive"])
async def test_a_sensor_waits_for_its_lock_mode(locks: LockClient, key: str, lock_mode: Any) -> None:
    assert await asyncio.to_thread(lambda: locks.try_acquire(key, mode="shared"))
    with DAG("dag"):
        sensor = DynamoLockSensor(task_id="sees", key=key, lock_mode=lock_mode, timeout=0.1)
    context: Any = {}
    assert await asyncio.to_thread(sensor.poke, context) is (lock_mode == "shared")
    event = await DynamoLockSensorTrigger(**sensor._trigger_arguments())._event()
    assert type(event).__name__ == ("TaskSuccessEvent" if lock_mode == "shared" else "TaskFailedEvent")


# -- logged positions -------------------------------------------------------------------------------------------------


async def test_each_waiting_task_logs_its_position_in_its_own_log(
    locks: LockClient, key: str, waiting_log: WaitingLog
) -> None:
    """In a triggerer, all tasks share one poller, which the first task has started."""
    await asyncio.to_thread(make_usual, locks, key, hold=timedelta(hours=8))
    blocker = await asyncio.to_thread(locks.try_acquire, key)
    assert blocker
    first = asyncio.ensure_future(result_of(in_the_triggerer(key, "first"), "first"))
    await asyncio.to_thread(waiting_log.until, "1st of 1", "first")
    second = asyncio.ensure_future(result_of(in_the_triggerer(key, "second"), "second"))
    await asyncio.to_thread(waiting_log.until, "2nd of 2", "second")
    await asyncio.to_thread(locks.release, blocker)
    lease = await asyncio.wait_for(first, PATIENCE)
    await asyncio.to_thread(waiting_log.until, "1st of 1", "second")
    await asyncio.to_thread(locks.release, Lease.from_dict(lease))
    await asyncio.wait_for(second, PATIENCE)

    assert waiting_log.positions("first") == ["1st of 1, about 8 h."]
    # The short lease of the blocker has reduced the mean by an eighth.
    assert waiting_log.positions("second") == [
        "2nd of 2, about 16 h, behind airflow/dag/run/first.",
        "1st of 1, about 7 h.",
    ]
    assert waiting_log.positions("no task") == []


def test_a_task_on_a_worker_logs_its_position(locks: LockClient, key: str, waiting_log: WaitingLog) -> None:
    blocker = locks.try_acquire(key)
    assert blocker
    acquired: list[Lease] = []
    waiting = threading.Thread(target=lambda: acquired.append(on_a_worker(key)()), daemon=True)
    waiting.start()
    waiting_log.until(
        f"Waiting for the lock {key!r}: 1st of 1."
    )  # without a time, because no usual hold time is known
    locks.release(blocker)
    waiting.join(PATIENCE)

    assert [lease.key for lease in acquired] == [key]


async def at_once(_: Any) -> bool:
    """Stands for `until_deferred`: the task is deferred."""
    return True


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "its triggerer ends"])
async def test_a_task_that_is_marked_while_it_waits_leaves_the_queue(
    locks: LockClient, key: str, waiting_log: WaitingLog, monkeypatch: pytest.MonkeyPatch, marked: bool
) -> None:
    monkeypatch.setattr(task_states, "until_deferred", at_once)
    blocker = await asyncio.to_thread(locks.try_acquire, key)
    assert blocker
    trigger = in_the_triggerer(key, "first")
    first = asyncio.ensure_future(anext(aiter(trigger.run())))
    await asyncio.to_thread(waiting_log.until, "1st of 1")
    second = asyncio.ensure_future(result_of(in_the_triggerer(key, "second"), "second"))
    await asyncio.to_thread(waiting_log.until, "2nd of 2")
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    if marked:
        await trigger.on_kill()
    await asyncio.to_thread(locks.release, blocker)
    await asyncio.wait_for(second, PATIENCE)
    left = [each.owner for each in await asyncio.to_thread(locks.waiters, key)]
    assert left == ([] if marked else ["airflow/dag/run/first"]), "the next triggerer may continue the waiter"


# -- dead holders and deadlocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dies", [True, False])
async def test_the_lease_of_a_task_shows_that_it_took_over_from_a_dead_holder(
    locks: LockClient, key: str, dies: bool
) -> None:
    former = await asyncio.to_thread(lambda: locks.acquire(key, lease=1))
    if not dies:
        await asyncio.to_thread(locks.release, former)
    result = json.loads(json.dumps(await result_of(in_the_triggerer(key))))
    took_over: list[Any] = []
    with DAG("dag"):
        operator = DynamoLockOperator(
            task_id="works",
            key=key,
            python_callable=lambda dynamo_lock=None: took_over.append(dynamo_lock.took_over),
        )
    context: Any = {"ti": task_instance("works"), "outlet_events": {}}
    await asyncio.to_thread(operator.execute_locked, context, result)

    assert took_over == [dies]


async def test_of_two_groups_that_nest_in_opposite_orders_one_fails(
    locks: LockClient, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = {each: locks.acquire(f"{key}/{each}", owner=f"{each}/dag", lease=600) for each in ("a", "b")}

    def xcom_of(*, dag_id: str, task_id: str, map_index: int, **_: Any) -> Any:
        assert (dag_id, map_index) == ("dag", -1)
        return held[task_id].as_dict() if task_id in held else None

    monkeypatch.setattr(BaseXCom, "get_one", xcom_of)
    ends: dict[str, Any] = {}

    async def nest(outer: str, inner: str) -> None:
        trigger = in_the_triggerer(f"{key}/{inner}", outer_acquires=[[outer, False], ["left_out", True]])
        try:
            ends[outer] = await result_of(trigger)
        except LockDeadlockError as deadlock:
            ends[outer] = deadlock
            locks.release(held[outer])

    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(nest("a", "b"), nest("b", "a"))
    (failure,) = [each for each in ends.values() if isinstance(each, LockDeadlockError)]
    for outer, inner in (("a", "b"), ("b", "a")):
        assert f"{outer}/dag holds '{key}/{outer}' and waits for '{key}/{inner}'" in str(failure)


def test_a_task_on_a_worker_finds_the_leases_of_the_groups_around_it() -> None:
    lease = Lease("k", "mine", 1, "me", 1, 1, 30_000, 15_000, 0)
    task = SimpleNamespace(task_id="a", task_group=None)
    with DAG("dag"), DynamoLock("k", group_id="outer") as outer:
        task.task_group = outer
        DynamoLockOperator(task_id="inside", key="l", python_callable=print)

    def pull(*, task_ids: str, map_indexes: int) -> Any:
        assert (task_ids, map_indexes) == ("outer.acquire", -1)
        return lease.as_dict()

    ti: Any = SimpleNamespace(map_index=7, xcom_pull=pull)
    assert nesting.held_in_task(ti, task) == [lease]


# -- removed waiters --------------------------------------------------------------------------------------------------


def test_a_removed_waiter_fails_without_a_retry_on_a_worker(locks: LockClient, key: str) -> None:
    locks.acquire(key)
    removing = threading.Thread(target=remove_the_waiter, args=[locks, key])
    removing.start()
    with pytest.raises(AirflowFailException, match=r"was ended by anna \(a drill\): ask there"):
        on_a_worker(key)()
    removing.join()
    assert locks.waiters(key) == []


@pytest.mark.parametrize("retries", [0, 2])
def test_a_removed_waiter_fails_without_a_retry_in_the_triggerer(
    locks: LockClient, key: str, monkeypatch: pytest.MonkeyPatch, retries: int
) -> None:
    """Where Airflow retries a task after `TaskFailedEvent`, a task that has retries fails on a worker."""
    with DAG("dag"):
        operator = DynamoLockAcquireOperator(task_id="waits", key=key)
        operator.retries = retries  # as a cluster policy does

    async def never(_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(task_states, "until_deferred", at_once)
    monkeypatch.setattr(task_states, "until_orphaned", never)
    written = io.StringIO()
    log = logging.Logger("triggers", logging.ERROR)
    log.addHandler(logging.StreamHandler(written))
    monkeypatch.setattr(LockTrigger, "log", log, raising=False)
    locks.acquire(key)
    removing = threading.Thread(target=remove_the_waiter, args=[locks, key])
    removing.start()

    async def events() -> list[Any]:
        trigger = DynamoLockAcquireTrigger(**operator._trigger_arguments())
        trigger.task_instance = task_instance("waits")
        trigger.task_instance.task = operator
        return [each async for each in trigger.run()]

    (event,) = asyncio.run(events())
    removing.join()
    if RETRIES_AFTER_TRIGGER and retries:
        with pytest.raises(AirflowFailException, match=r"was ended by anna \(a drill\)"):
            operator.execute_complete({}, event.payload)
    else:
        assert type(event).__name__ == "TaskFailedEvent"
    assert written.getvalue() == (
        f"This wait for the lock '{key}' was ended by anna (a drill): ask there before you run it again.\n"
    )
    assert locks.waiters(key) == []


def remove_the_waiter(locks: LockClient, key: str) -> None:
    """Wait for a waiter, and remove it."""
    wait_until(lambda: locks.waiters(key))
    locks.remove_waiter(key, locks.waiters(key)[0].lease_id, by="anna", reason="a drill")
