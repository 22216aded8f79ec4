"""The process of a group's last task releases the lock when it exits; in all other cases the `release` task does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.providers.standard.operators.python import PythonOperator
from airflow.sdk import DAG, TaskGroup, task, task_group
from airflow.sdk.bases.xcom import BaseXCom
from airflow.sdk.execution_time import task_runner
from airflow.sdk.execution_time.comms import SkipDownstreamTasks

from airflow_dynamo_lock import (
    AsyncLockClient,
    DynamoLock,
    DynamoLockAcquireOperator,
    Lease,
    LockAccessError,
    LockClient,
    LockError,
    LockUnavailableError,
)
from airflow_dynamo_lock.airflow import task_states
from airflow_dynamo_lock.airflow.guard import Guard
from airflow_dynamo_lock.airflow.last_task import RELEASED_KEY, ReleaseIfLast
from airflow_dynamo_lock.airflow.operators import DynamoLockReleaseOperator
from airflow_dynamo_lock.airflow.triggers import DynamoLockReleaseTrigger
from deployments.patience import PATIENCE
from tests.layer.test_guard import Task, holder

States = Mapping[str, str | None]

ACQUIRE, HEARTBEAT, RELEASE = "lock.acquire", "lock.heartbeat", "lock.release"
NOT_BEGUN: States = {RELEASE: None}


class TaskInstance(SimpleNamespace):
    """The part of a task instance that a callback needs."""

    states: States | Exception

    def get_task_states(self, *, dag_id: str, task_ids: list[str], run_ids: list[str]) -> Any:
        if isinstance(self.states, Exception):
            raise self.states
        assert (dag_id, run_ids) == ("dag", ["run"])
        return {"run": dict(self.states)}


def a_dag() -> DAG:
    with DAG("dag") as dag, DynamoLock("k"):
        work.override(task_id="a")()
    return dag


def an_instance(states: States | Exception, map_index: int = -1, dag: DAG | None = None) -> TaskInstance:
    task = (dag or a_dag()).get_task("lock.a")
    return TaskInstance(
        dag_id="dag", run_id="run", task_id="lock.a", map_index=map_index, states=states, task=task
    )


@pytest.fixture(autouse=True)
def xcoms(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str, int], Any]:
    """The XComs of the run, by task id, key and map index."""
    stored: dict[tuple[str, str, int], Any] = {}

    def put(key: str, value: Any, *, dag_id: str, task_id: str, run_id: str, map_index: int = -1) -> None:
        stored[task_id, key, map_index] = value

    def get(*, key: str, dag_id: str, task_id: str, run_id: str, map_index: int = -1) -> Any:
        return stored.get((task_id, key, map_index))

    monkeypatch.setattr(BaseXCom, "set", put)
    monkeypatch.setattr(BaseXCom, "get_one", get)
    return stored


@pytest.fixture
def lease(request: pytest.FixtureRequest, locks: LockClient, xcoms: dict[Any, Any]) -> Lease:
    lease = locks.acquire(request.node.name, lease=30, release_grace=6.0)
    xcoms[ACQUIRE, "return_value", -1] = lease.as_dict()
    return Lease.from_dict(lease.as_dict())


@pytest.fixture
def inside(locks: LockClient, lease: Lease) -> Iterator[Guard]:
    guard = Guard(locks, [lease], Task(), ACQUIRE)
    guard.enter()
    yield guard
    guard.leave()


class Supervisor:
    """The supervisor of the last task's process, which receives the tasks to skip.

    :ivar skipped: the tasks to skip.
    :ivar failure: the exception that it raises, if any.
    """

    def __init__(self) -> None:
        self.skipped: list[Any] = []
        self.failure: Exception | None = None

    def send(self, message: Any) -> None:
        if isinstance(message, SkipDownstreamTasks):
            self.skipped += message.tasks
            if self.failure:
                raise self.failure


@pytest.fixture(autouse=True)
def supervisor(monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    supervisor = Supervisor()
    monkeypatch.setattr(task_runner, "SUPERVISOR_COMMS", supervisor, raising=False)
    return supervisor


def succeed(
    states: States | Exception,
    *task_ids: str,
    mapped: bool = False,
    map_index: int = -1,
    dag: DAG | None = None,
) -> None:
    """Call the callback of a task, as Airflow does after the task has succeeded."""
    task_ids = task_ids or ("lock.a",)
    callback = ReleaseIfLast(ACQUIRE, RELEASE, task_ids, frozenset({ACQUIRE, *task_ids}), mapped)
    callback({"ti": an_instance(states, map_index, dag)})


# -- in the process of the last task --------------------------------------------------------------------------------


def test_the_last_task_releases_as_its_process_exits(
    locks: LockClient, lease: Lease, inside: Guard, xcoms: dict[Any, Any]
) -> None:
    succeed({"lock.a": "success", "lock.b": "skipped"}, "lock.a", "lock.b")
    assert holder(locks, lease), "the process has not exited yet"
    assert xcoms[ACQUIRE, RELEASED_KEY, -1] == lease.lease_id

    inside.leave()

    assert holder(locks, lease) is None


@pytest.mark.parametrize(
    "state",
    [None, "scheduled", "queued", "running", "deferred", "up_for_retry", "up_for_reschedule", "restarting"],
)
def test_a_task_that_is_not_the_last_only_leaves(
    locks: LockClient, lease: Lease, inside: Guard, xcoms: dict[Any, Any], state: str | None
) -> None:
    succeed({"lock.a": "success", "lock.b": state}, "lock.a", "lock.b")
    inside.leave()
    assert holder(locks, lease)
    assert (ACQUIRE, RELEASED_KEY, -1) not in xcoms


@pytest.mark.parametrize("states", [{}, {"lock.a": "success"}, ConnectionError("no answer")])
def test_without_the_states_of_all_tasks_the_process_only_leaves(
    locks: LockClient, lease: Lease, inside: Guard, states: States | Exception
) -> None:
    succeed(states, "lock.a", "lock.b")
    inside.leave()
    assert holder(locks, lease)


def test_a_success_that_airflow_has_refused_does_not_count(
    locks: LockClient, lease: Lease, inside: Guard
) -> None:
    """Airflow calls the callback nevertheless."""
    succeed({"lock.a": "running"})
    inside.leave()
    assert holder(locks, lease)


def test_a_process_that_is_still_inside_keeps_the_lock(
    locks: LockClient, lease: Lease, inside: Guard
) -> None:
    """Its task was marked as successful while it runs."""
    marked = Guard(locks, [lease], Task(), ACQUIRE)
    marked.enter()
    succeed({"lock.a": "success", "lock.b": "success"}, "lock.a", "lock.b")
    inside.leave()
    assert locks.try_acquire(lease.key) is None
    marked.leave()
    assert locks.try_acquire(lease.key)


def test_all_instances_of_a_mapped_task_must_have_ended(
    locks: LockClient, lease: Lease, inside: Guard
) -> None:
    succeed({"lock.a_0": "success", "lock.a_1": "running"})
    assert not inside._releases
    succeed({"lock.a_0": "success", "lock.a_1": "success", "lock.ab_2": "running"})
    assert inside._releases


def test_in_a_mapped_group_the_tasks_of_the_same_index_must_have_ended(
    locks: LockClient, lease: Lease, inside: Guard, xcoms: dict[Any, Any]
) -> None:
    tasks = ("lock.a", "lock.b")
    states = {"lock.a_1": "success", "lock.b_1": "running", "lock.a_11": "running", "lock.b_11": "success"}
    succeed(states, *tasks, mapped=True, map_index=1)
    assert not inside._releases
    succeed({**states, "lock.b_1": "failed"}, *tasks, mapped=True, map_index=1)
    assert inside._releases
    assert xcoms[ACQUIRE, RELEASED_KEY, 1] == lease.lease_id


def test_only_the_leases_of_its_own_group_are_released(
    locks: LockClient, lease: Lease, inside: Guard
) -> None:
    tasks = ("lock.a",)
    callback = ReleaseIfLast("outer.acquire", RELEASE, tasks, frozenset({ACQUIRE, *tasks}), False)
    callback({"ti": an_instance({"lock.a": "success"})})
    inside.leave()
    assert holder(locks, lease)


def test_a_task_from_outside_the_block_before_the_release_task_keeps_the_lock(
    locks: LockClient, lease: Lease, inside: Guard
) -> None:
    with DAG("dag") as dag:
        with DynamoLock("k") as lock:
            work.override(task_id="a")()
        lock >> work.override(task_id="after")()
    succeed({"lock.a": "success"}, dag=dag)
    assert inside._releases
    inside._releases = False

    dag.get_task("after") >> dag.get_task(RELEASE)
    succeed({"lock.a": "success"}, dag=dag)
    assert not inside._releases


def test_in_dag_test_the_release_task_releases_the_lock(
    locks: LockClient, lease: Lease, inside: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run in one process, which does not exit between two tasks."""
    monkeypatch.setattr("airflow_dynamo_lock.airflow.last_task.runs_in_dag_test", lambda: True)
    succeed({"lock.a": "success"})
    assert not inside._releases


# -- the last task skips the release task ---------------------------------------------------------------------------


def test_the_last_task_skips_the_release_task(inside: Guard, supervisor: Supervisor) -> None:
    succeed({"lock.a": "success", **NOT_BEGUN})
    assert supervisor.skipped == [(RELEASE, -1)]
    assert inside._releases


def test_in_a_mapped_group_it_skips_the_release_task_of_its_own_index(
    inside: Guard, supervisor: Supervisor
) -> None:
    succeed({"lock.a_2": "success", "lock.release_2": None}, mapped=True, map_index=2)
    assert supervisor.skipped == [(RELEASE, 2)]


@pytest.mark.parametrize("state", ["scheduled", "queued", "running", "deferred", "success", "unknown"])
def test_a_release_task_that_has_begun_is_not_skipped(
    inside: Guard, supervisor: Supervisor, state: str
) -> None:
    release = {} if state == "unknown" else {RELEASE: state}
    succeed({"lock.a": "success", **release})
    assert supervisor.skipped == []
    assert inside._releases


def test_a_task_that_is_not_the_last_skips_nothing(inside: Guard, supervisor: Supervisor) -> None:
    succeed({"lock.a": "success", "lock.b": "queued", **NOT_BEGUN}, "lock.a", "lock.b")
    assert supervisor.skipped == []


def test_a_release_task_is_not_skipped_if_a_task_waits_for_it(inside: Guard, supervisor: Supervisor) -> None:
    dag = a_dag()
    dag.get_task(RELEASE) >> EmptyOperator(task_id="report", dag=dag)
    succeed({"lock.a": "success", **NOT_BEGUN}, dag=dag)
    assert supervisor.skipped == []
    assert inside._releases


def test_a_release_task_with_only_a_teardown_behind_it_is_skipped(
    inside: Guard, supervisor: Supervisor
) -> None:
    dag = a_dag()
    dag.get_task(RELEASE) >> EmptyOperator(task_id="outer_release", dag=dag).as_teardown()
    succeed({"lock.a": "success", **NOT_BEGUN}, dag=dag)
    assert supervisor.skipped == [(RELEASE, -1)]


def test_if_airflow_does_not_skip_the_task_the_lock_is_still_released(
    locks: LockClient, lease: Lease, inside: Guard, supervisor: Supervisor
) -> None:
    supervisor.failure = ConnectionError("no answer")
    succeed({"lock.a": "success", **NOT_BEGUN})
    inside.leave()
    assert holder(locks, lease) is None


# -- the release task -----------------------------------------------------------------------------------------------


class Airflow:
    async def asend(self, request: Any) -> Any:
        return SimpleNamespace(task_states={"run": {"lock.release": "deferred"}})

    def send(self, message: Any) -> None:
        """Receive the names of secret values, which Airflow 3.0 sends."""


@pytest.fixture(params=["on a worker", "in the triggerer"])
def release(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, connection: None, xcoms: dict[Any, Any]
) -> Callable[[], None]:
    """Return a function that runs the `release` task."""

    def on_a_worker() -> None:
        ti = SimpleNamespace(
            map_index=-1,
            xcom_pull=lambda task_ids, key="return_value", map_indexes=-1: xcoms.get(
                (task_ids, key, map_indexes)
            ),
        )
        DynamoLockReleaseOperator.execute.__wrapped__(operator, {"ti": ti})  # type: ignore[attr-defined]

    async def in_the_triggerer() -> None:
        monkeypatch.setattr(task_runner, "SUPERVISOR_COMMS", Airflow(), raising=False)
        trigger = DynamoLockReleaseTrigger(ACQUIRE)
        trigger.task_instance = SimpleNamespace(  # type: ignore[assignment]
            dag_id="dag", run_id="run", task_id="lock.release", map_index=-1
        )
        events = [type(event).__name__ async for event in trigger.run()]
        assert events == ["TaskSuccessEvent"]

    operator = DynamoLockReleaseOperator(task_id="release", acquire_task_id=ACQUIRE, deferrable=False)
    monkeypatch.setattr(task_states, "EVERY", 0.1)
    if request.param == "on a worker":
        return on_a_worker
    return lambda: asyncio.run(asyncio.wait_for(in_the_triggerer(), PATIENCE))


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """Return a function that returns what was logged.

    The logger of a trigger is one of the standard library on Airflow 3.0, and writes to stdout on later releases.
    """
    caplog.set_level(logging.INFO)
    return lambda: caplog.text + capfd.readouterr().out


def test_the_release_task_recognizes_a_lease_that_the_last_task_has_released(
    locks: LockClient,
    lease: Lease,
    inside: Guard,
    release: Callable[[], None],
    logged: Callable[[], str],
) -> None:
    succeed({"lock.a": "success"})
    inside.leave()
    successor = locks.acquire(lease.key, timeout=0)

    release()

    log = logged()
    assert "The process of the last guarded task has released the lock" in log
    assert "was not held any more" not in log
    assert holder(locks, successor)


def test_the_release_task_releases_a_lease_that_the_last_task_did_not(
    locks: LockClient, lease: Lease, inside: Guard, release: Callable[[], None]
) -> None:
    """Its process was killed after it stored that it would release. It is still inside, so the lease drains."""
    succeed({"lock.a": "success"})
    inside._releases = False
    inside.leave()

    release()

    assert holder(locks, lease) is None


def test_the_release_task_recognizes_a_lease_that_the_last_task_drains(
    locks: LockClient,
    lease: Lease,
    inside: Guard,
    release: Callable[[], None],
    logged: Callable[[], str],
) -> None:
    other = Guard(locks, [lease], Task(), ACQUIRE)
    other.enter()  # its task was marked as successful while it runs
    succeed({"lock.a": "success"})
    inside.leave()

    release()
    other.leave()

    assert "The process of the last guarded task has released the lock" in logged()


@pytest.mark.parametrize(
    "failure", [LockUnavailableError("No answer.", maybe_applied=False), LockAccessError("Not allowed.")]
)
def test_a_record_that_cannot_be_read_does_not_count_as_released(
    locks: LockClient,
    lease: Lease,
    inside: Guard,
    release: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    failure: LockError,
) -> None:
    succeed({"lock.a": "success"})  # but its process was killed before it left

    def fail(*_: Any) -> None:
        raise failure

    with monkeypatch.context() as patch:
        for kind in (LockClient, AsyncLockClient):
            patch.setattr(kind, "get", fail)
        release()

    found: Any = holder(locks, lease)
    assert found.draining


def test_a_lost_lease_is_not_mistaken_for_a_released_one(
    locks: LockClient,
    lease: Lease,
    xcoms: dict[Any, Any],
    release: Callable[[], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    xcoms[ACQUIRE, RELEASED_KEY, -1] = "the lease of an earlier attempt"
    locks.break_lock(lease.key, lease.lease_id)

    release()

    assert "was not held any more when it was released" in caplog.text


# -- when the DAG is parsed -----------------------------------------------------------------------------------------


@task
def work() -> None: ...


def callbacks(dag: DAG, task_id: str) -> list[Any]:
    guarded: Any = dag.get_task(task_id)
    return list(guarded.on_success_callback)


def releases(dag: DAG) -> set[str]:
    """Return the tasks that check whether they are the last."""
    return {
        each.task_id
        for each in dag.tasks
        if any(isinstance(callback, ReleaseIfLast) for callback in callbacks(dag, each.task_id))
    }


def test_tasks_without_a_guarded_task_behind_them_check_whether_they_are_the_last() -> None:
    with DAG("dag") as dag:
        with DynamoLock("k") as lock:
            first = work.override(task_id="first")()
            first >> [work.override(task_id="b")(), work.override(task_id="c")()]
        lock >> work.override(task_id="after")()
    assert releases(dag) == {"lock.b", "lock.c"}
    (callback,) = callbacks(dag, "lock.b")
    guarded = ("lock.first", "lock.b", "lock.c")
    members = frozenset({ACQUIRE, HEARTBEAT, RELEASE, *guarded})
    assert callback == ReleaseIfLast(ACQUIRE, RELEASE, guarded, members, False)


def test_callbacks_of_the_user_are_called_first_and_are_not_shared() -> None:
    def own(context: Any) -> None: ...

    with (
        DAG("dag", default_args={"on_success_callback": own}) as dag,
        DynamoLock("k"),
        TaskGroup("inner"),
    ):
        work()
        PythonOperator.partial(task_id="mapped", python_callable=print).expand(op_args=[["a"], ["b"]])
        work.override(task_id="expanded").expand_kwargs([{}])
    for task_id in ("work", "mapped", "expanded"):
        first, second = callbacks(dag, f"lock.inner.{task_id}")
        assert first is own
        assert isinstance(second, ReleaseIfLast)


def test_each_lock_of_nested_groups_has_its_own_last_task() -> None:
    with DAG("dag") as dag, DynamoLock("outer", group_id="outer"):
        with DynamoLock("inner", group_id="inner") as inner:
            work.override(task_id="a")()
        inner >> work.override(task_id="b")()
    assert [each.acquire_task_id for each in callbacks(dag, "outer.inner.a")] == ["outer.inner.acquire"]
    assert [each.acquire_task_id for each in callbacks(dag, "outer.b")] == ["outer.acquire"]
    assert set(callbacks(dag, "outer.b")[0].task_ids) == {"outer.inner.a", "outer.b"}


def test_the_last_task_of_an_inner_group_may_be_the_last_of_the_outer_one() -> None:
    with DAG("dag") as dag, DynamoLock("outer", group_id="outer"), DynamoLock("inner", group_id="inner"):
        work.override(task_id="a")()
    assert [each.acquire_task_id for each in callbacks(dag, "outer.inner.a")] == [
        "outer.inner.acquire",
        "outer.acquire",
    ]


def test_in_a_mapped_group_each_map_index_has_its_own_last_task() -> None:
    with DAG("dag") as dag:

        @task_group
        def per_table(table: str) -> None:
            with DynamoLock(table):
                work()

        per_table.expand(table=["a", "b"])
    (callback,) = callbacks(dag, "per_table.lock.work")
    assert callback.mapped


def test_an_empty_last_task_leaves_the_release_to_the_release_task() -> None:
    with DAG("dag") as dag, DynamoLock("k"):
        work() >> EmptyOperator(task_id="end")
    assert releases(dag) == set()


def test_ambiguous_task_ids_leave_the_release_to_the_release_task() -> None:
    with DAG("dag") as dag, DynamoLock("k"):
        work.override(task_id="a")()
        work.override(task_id="a_1")()
    assert releases(dag) == set()


def test_the_states_of_at_most_a_hundred_tasks_are_requested() -> None:
    assert task_states.can_tell_states([f"task{number}" for number in range(100)])
    assert not task_states.can_tell_states([f"task{number}" for number in range(101)])


def test_an_acquire_operator_by_itself_has_no_last_task() -> None:
    with DAG("dag") as dag:
        DynamoLockAcquireOperator(task_id="acquire", key="k") >> work()
    assert releases(dag) == set()
