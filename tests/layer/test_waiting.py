"""What a task says of the lock that it wants, and what it is told while it waits: in the triggerer and on a worker."""

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
from airflow_dynamo_lock.airflow.versions import AirflowFailException
from deployments.hold_times import make_usual
from deployments.patience import PATIENCE, wait_until

pytestmark = pytest.mark.usefixtures("connection")

#: The task that a line is logged for, as Airflow's triggerer knows it.
TASK: ContextVar[str] = ContextVar("TASK", default="nobody's")


class Told(logging.Handler):
    """Collects who is told what of waiting."""

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

    def until(self, what: str, task: str | None = None) -> None:
        """Wait until a line with that in it was told, to that task if one is named."""
        with self._more:
            assert self._more.wait_for(
                lambda: any(what in text and task in (None, who) for who, text in self.lines), 30
            ), self.lines

    def to(self, task: str) -> list[str]:
        """What it was told of its place."""
        return [text.partition(": ")[2] for who, text in self.lines if who == task and ": " in text]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """What tasks log, on a worker and in the triggerer."""
    log, told = logging.Logger("tasks", logging.INFO), Told()
    log.addHandler(told)
    for kind in (DynamoLockAcquireOperator, LockTrigger):
        monkeypatch.setattr(kind, "log", log, raising=False)
    return told


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
    """The `execute` of an acquire that waits on its worker."""
    with DAG("dag"):
        operator = DynamoLockAcquireOperator(task_id=task_id, key=key, deferrable=False, **arguments)
    context: Any = {"ti": task_instance(task_id)}
    # Airflow warns of an execute that it has not called itself.
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


# -- what it wants ----------------------------------------------------------------------------------------------------


def test_what_templates_render_to_is_understood() -> None:
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


def test_a_trigger_that_an_earlier_version_has_stored_waits_as_it_did() -> None:
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


def test_those_who_share_hold_it_together_and_exclude_the_others(locks: LockClient, key: str) -> None:
    first, second = on_a_worker(key, "first", mode="shared")(), on_a_worker(key, "second", mode="shared")()

    assert {first.lease_id, second.lease_id} == {each.lease_id for each in holders(locks, key)}
    assert locks.try_acquire(key) is None
    locks.release(first)
    locks.release(second)
    assert locks.try_acquire(key)


async def test_what_it_wants_reaches_the_record_and_the_line(locks: LockClient, key: str, told: Told) -> None:
    blocker = await asyncio.to_thread(locks.try_acquire, key)
    assert blocker
    trigger = in_the_triggerer(key, priority="7", min_hold=60, timeout=30)
    waiting = asyncio.ensure_future(result_of(trigger))
    await asyncio.to_thread(told.until, "1st of 1")
    (waiter,) = await asyncio.to_thread(locks.waiters, key)
    await asyncio.to_thread(locks.release, blocker)
    await waiting
    (holder,) = await asyncio.to_thread(holders, locks, key)

    assert (waiter.priority, waiter.owner) == (7, "airflow/dag/run/waits")
    assert holder.hold_until_ms == pytest.approx(holder.acquired_at_ms + 60_000, abs=5000)


async def test_who_is_not_fair_overtakes(locks: LockClient, key: str, told: Told) -> None:
    blocker = await asyncio.to_thread(locks.try_acquire, key)
    assert blocker
    waiting = asyncio.ensure_future(result_of(in_the_triggerer(key)))
    await asyncio.to_thread(told.until, "1st of 1")
    # In the triggerer's loop itself, so that who waits there cannot look between the two.
    locks.release(blocker)
    overtaking = on_a_worker(key, "overtakes", fair=False, timeout=0)()
    await asyncio.to_thread(locks.release, overtaking)

    assert (await asyncio.wait_for(waiting, PATIENCE))["token"] > overtaking.token


@pytest.mark.parametrize("lock_mode", ["shared", "exclusive"])
async def test_a_sensor_waits_for_the_mode_that_it_is_told(
    locks: LockClient, key: str, lock_mode: Any
) -> None:
    assert await asyncio.to_thread(lambda: locks.try_acquire(key, mode="shared"))
    with DAG("dag"):
        sensor = DynamoLockSensor(task_id="sees", key=key, lock_mode=lock_mode, timeout=0.1)
    context: Any = {}
    assert await asyncio.to_thread(sensor.poke, context) is (lock_mode == "shared")
    event = await DynamoLockSensorTrigger(**sensor._trigger_arguments()).work()
    assert type(event).__name__ == ("TaskSuccessEvent" if lock_mode == "shared" else "TaskFailedEvent")


# -- what it is told --------------------------------------------------------------------------------------------------


async def test_each_waiting_task_is_told_its_place_in_its_own_log(
    locks: LockClient, key: str, told: Told
) -> None:
    """In one triggerer all share one poller, which belongs to the task that came first."""
    await asyncio.to_thread(make_usual, locks, key, hold=timedelta(hours=8))
    blocker = await asyncio.to_thread(locks.try_acquire, key)
    assert blocker
    first = asyncio.ensure_future(result_of(in_the_triggerer(key, "first"), "first"))
    await asyncio.to_thread(told.until, "1st of 1", "first")
    second = asyncio.ensure_future(result_of(in_the_triggerer(key, "second"), "second"))
    await asyncio.to_thread(told.until, "2nd of 2", "second")
    await asyncio.to_thread(locks.release, blocker)
    lease = await asyncio.wait_for(first, PATIENCE)
    await asyncio.to_thread(told.until, "1st of 1", "second")
    await asyncio.to_thread(locks.release, Lease.from_dict(lease))
    await asyncio.wait_for(second, PATIENCE)

    assert told.to("first") == ["1st of 1, about 8 h."]
    # The blocker's lease of a few seconds has made the mean an eighth smaller.
    assert told.to("second") == [
        "2nd of 2, about 16 h, behind airflow/dag/run/first.",
        "1st of 1, about 7 h.",
    ]
    assert told.to("nobody's") == []


def test_on_a_worker_too(locks: LockClient, key: str, told: Told) -> None:
    blocker = locks.try_acquire(key)
    assert blocker
    got: list[Lease] = []
    waiting = threading.Thread(target=lambda: got.append(on_a_worker(key)()), daemon=True)
    waiting.start()
    told.until(f"Waiting for the lock {key!r}: 1st of 1.")  # and no time, because none is known
    locks.release(blocker)
    waiting.join(30)

    assert [lease.key for lease in got] == [key]


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "its triggerer ends"])
async def test_who_is_marked_while_it_waits_is_out_of_the_line(
    locks: LockClient, key: str, told: Told, monkeypatch: pytest.MonkeyPatch, marked: bool
) -> None:
    async def at_once(_: Any) -> None: ...

    monkeypatch.setattr(task_states, "until_deferred", at_once)
    blocker = await asyncio.to_thread(locks.try_acquire, key)
    assert blocker
    trigger = in_the_triggerer(key, "first")
    first = asyncio.ensure_future(anext(aiter(trigger.run())))
    await asyncio.to_thread(told.until, "1st of 1")
    second = asyncio.ensure_future(result_of(in_the_triggerer(key, "second"), "second"))
    await asyncio.to_thread(told.until, "2nd of 2")
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    if marked:
        await trigger.on_kill()
    await asyncio.to_thread(locks.release, blocker)
    await asyncio.wait_for(second, PATIENCE)
    left = [each.owner for each in await asyncio.to_thread(locks.waiters, key)]
    assert left == ([] if marked else ["airflow/dag/run/first"]), "the next triggerer may go on in its place"


# -- what it takes over -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dies", [True, False])
async def test_a_task_learns_that_it_took_over_from_the_dead(locks: LockClient, key: str, dies: bool) -> None:
    former = await asyncio.to_thread(lambda: locks.try_acquire(key, lease=1))
    assert former
    if not dies:
        await asyncio.to_thread(locks.release, former)
    result = json.loads(json.dumps(await result_of(in_the_triggerer(key))))
    learnt: list[Any] = []
    with DAG("dag"):
        operator = DynamoLockOperator(
            task_id="works",
            key=key,
            python_callable=lambda dynamo_lock=None: learnt.append(dynamo_lock.took_over),
        )
    context: Any = {"ti": task_instance("works"), "outlet_events": {}}
    await asyncio.to_thread(operator.execute_locked, context, result)

    assert learnt == [dies]


async def test_of_two_groups_that_nest_in_opposite_orders_one_ends(
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


def test_a_task_on_a_worker_finds_what_the_groups_around_it_hold() -> None:
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


# -- a person removes it ----------------------------------------------------------------------------------------------


def test_a_removed_waiter_fails_without_a_retry_on_a_worker(locks: LockClient, key: str) -> None:
    locks.acquire(key)
    removing = threading.Thread(target=remove_the_waiter, args=[locks, key])
    removing.start()
    with pytest.raises(AirflowFailException, match=r"was ended by anna \(a drill\): ask there"):
        on_a_worker(key)()
    removing.join()
    assert locks.waiters(key) == []


def test_a_removed_waiter_fails_without_a_retry_in_the_triggerer(
    locks: LockClient, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`TaskFailedEvent` fails a task for good, whatever retries it has left."""

    async def at_once(_: Any) -> None: ...

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
        return [each async for each in in_the_triggerer(key).run()]

    assert [type(each).__name__ for each in asyncio.run(events())] == ["TaskFailedEvent"]
    removing.join()
    assert written.getvalue() == (
        f"This wait for the lock '{key}' was ended by anna (a drill): ask there before you run it again.\n"
    )
    assert locks.waiters(key) == []


def remove_the_waiter(locks: LockClient, key: str) -> None:
    """Remove the waiter as soon as there is one."""
    wait_until(lambda: locks.waiters(key))
    locks.remove_waiter(key, locks.waiters(key)[0].lease_id, by="anna", reason="a drill")
