"""The structure that `DynamoLock` gives to the tasks in its block when the DAG is parsed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import pytest
from airflow.providers.standard.operators.bash import BashOperator
from airflow.providers.standard.operators.python import BranchPythonOperator
from airflow.sdk import DAG, TaskGroup, task, task_group

from airflow_dynamo_lock import (
    DynamoLock,
    DynamoLockAcquireOperator,
    DynamoLockHeartbeatOperator,
    DynamoLockOperator,
    DynamoLockReleaseOperator,
    DynamoLockSensor,
    LockDeadlockError,
    LockValueError,
)
from airflow_dynamo_lock.airflow import lock_options
from airflow_dynamo_lock.airflow.guard import EnterLease
from airflow_dynamo_lock.airflow.triggers import DynamoLockAcquireTrigger
from airflow_dynamo_lock.airflow.versions import RENDERS_IN_TRIGGERER, STARTS_IN_TRIGGERER


def step(task_id: str, **arguments: Any) -> BashOperator:
    return BashOperator(task_id=task_id, bash_command="true", **arguments)


def guard_of(dag: DAG, task_id: str) -> EnterLease:
    """Return the guard that runs before a task's code."""
    guarded: Any = dag.get_task(task_id)
    hook = guarded.partial_kwargs["pre_execute"] if guarded.is_mapped else guarded._pre_execute_hook
    assert isinstance(hook, EnterLease)
    return hook


@task
def work(table: str = "") -> str:
    return table


def test_the_tasks_run_between_acquire_and_release() -> None:
    with DAG("dag") as dag:
        with DynamoLock("k") as lock:
            step("a") >> [step("b"), step("c")]
        step("before") >> lock >> step("after")
    upstream = {task.task_id: task.upstream_task_ids for task in dag.tasks}
    assert upstream == {
        "before": set(),
        "lock.acquire": {"before"},
        "lock.heartbeat": {"lock.acquire"},
        "lock.a": {"lock.acquire"},
        "lock.b": {"lock.a"},
        "lock.c": {"lock.a"},
        "lock.release": {"lock.acquire", "lock.b", "lock.c"},
        "after": {"lock.b", "lock.c"},
    }
    assert dag.get_task("lock.acquire").is_setup
    assert dag.get_task("lock.heartbeat").is_teardown
    assert dag.get_task("lock.release").is_teardown


def test_every_task_is_guarded_before_its_own_pre_execute() -> None:
    def own(context: Any) -> None: ...

    with DAG("dag") as dag, DynamoLock("k"):
        step("plain")
        step("with_its_own", pre_execute=own)
        work.override(task_id="mapped").expand(table=["x", "y"])
        with TaskGroup("inner"):
            step("nested")
    assert {
        name: guard_of(dag, f"lock.{name}").then
        for name in ("plain", "with_its_own", "mapped", "inner.nested")
    } == {
        "plain": None,
        "with_its_own": own,
        "mapped": None,
        "inner.nested": None,
    }


def test_a_nested_lock_is_entered_after_the_outer_one_and_its_own_tasks_are_not_guarded() -> None:
    with DAG("dag") as dag, DynamoLock("k", group_id="outer"), DynamoLock("l", group_id="inner"):
        step("a")
    outer = guard_of(dag, "outer.inner.a")
    inner = outer.then
    assert isinstance(inner, EnterLease)
    assert (outer.acquire_task_id, inner.acquire_task_id) == ("outer.acquire", "outer.inner.acquire")
    for name in ("acquire", "heartbeat", "release"):
        plumbing: Any = dag.get_task(f"outer.inner.{name}")
        assert plumbing._pre_execute_hook is None
    assert dag.get_task("outer.inner.acquire").upstream_task_ids == {"outer.acquire"}
    assert "outer.inner.release" in dag.get_task("outer.release").upstream_task_ids


INNER: dict[str, Any] = {
    "group": lambda **lock: DynamoLock(group_id="inner", **lock),
    "operator": lambda **lock: DynamoLockOperator(task_id="inner", python_callable=print, **lock),
    "acquire": lambda **lock: DynamoLockAcquireOperator(task_id="inner", **lock),
}


@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
@pytest.mark.parametrize("key", ["k", ["other", "k"]], ids=str)
def test_a_lock_in_a_group_that_holds_it_is_an_error_when_the_dag_is_parsed(inner: Any, key: Any) -> None:
    refused = pytest.raises(
        LockDeadlockError, match="'k', because the group 'outer' around it holds that lock"
    )
    with DAG("dag"), DynamoLock("k", group_id="outer"):
        step("a")
        with TaskGroup("between"), refused:
            inner(key=key)


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        ({"capacity": 2}, {"capacity": 2}),
        ({"mode": "shared"}, {"mode": "shared"}),
        ({}, {"dynamo_lock_conn_id": "another_table"}),
        ({}, {"key": "another"}),
        ({}, {"key": "{{ params.key }}"}),
        ({}, {"slots": "{{ params.slots }}", "capacity": 5}),
    ],
    ids=str,
)
def test_a_lock_in_a_group_that_may_become_free_is_no_error(
    outer: dict[str, Any], inner: dict[str, Any]
) -> None:
    with DAG("dag"), DynamoLock("k", group_id="outer", **outer), DynamoLock(**{"key": "k", **inner}):
        step("a")


@pytest.mark.parametrize(
    ("outer", "inner"),
    [({"slots": 2, "capacity": 2}, {"capacity": 2}), ({"mode": "shared"}, {}), ({}, {"mode": "shared"})],
    ids=str,
)
def test_slots_that_the_run_itself_holds_never_become_free(
    outer: dict[str, Any], inner: dict[str, Any]
) -> None:
    with DAG("dag"), DynamoLock("k", group_id="outer", **outer):
        step("a")
        with pytest.raises(LockDeadlockError):
            DynamoLock("k", group_id="inner", **inner)


def test_a_lock_passes_on_the_groups_around_it() -> None:
    with DAG("dag") as dag, DynamoLock("k", group_id="outer"):
        step("a")
        with TaskGroup("between"), DynamoLock("l", group_id="inner"):
            step("b")
            DynamoLockOperator(task_id="c", key="m", python_callable=print)

    def inside(name: str) -> Any:
        task: Any = dag.get_task(name)
        return task._trigger_arguments().get("outer_acquires")

    found = {
        name: inside(name)
        for name in ("outer.acquire", "outer.between.inner.acquire", "outer.between.inner.c")
    }
    assert found == {
        "outer.acquire": None,
        "outer.between.inner.acquire": [["outer.acquire", False]],
        "outer.between.inner.c": [["outer.between.inner.acquire", False], ["outer.acquire", False]],
    }


def test_two_locks_of_one_dag_have_names_of_their_own() -> None:
    with DAG("dag") as dag:
        for key in ("k", "l"):
            with DynamoLock(key):
                step("a")
    assert {"lock.acquire", "lock__1.acquire", "lock.a", "lock__1.a"} <= set(dag.task_dict)


def test_a_lock_in_a_mapped_group_enters_the_lease_of_its_own_map_index() -> None:
    with DAG("dag") as dag:

        @task_group
        def per(table: str) -> None:
            with DynamoLock(table):
                work(table)

        per.expand(table=["x", "y"])
    assert guard_of(dag, "per.lock.work").mapped
    # Its key is unknown until the group is expanded, which the triggerer cannot do.
    assert not dag.get_task("per.lock.acquire").start_from_trigger


def test_the_instances_of_a_mapped_task_in_a_lock_share_its_lease() -> None:
    with DAG("dag") as dag, DynamoLock("k"):
        work.expand(table=["x", "y"])
    assert not guard_of(dag, "lock.work").mapped


@pytest.mark.parametrize(
    ("key", "starts"),
    [
        ("k", STARTS_IN_TRIGGERER),
        ("{{ params.table }}", RENDERS_IN_TRIGGERER),
        (["k", "{{ run_id }}"], RENDERS_IN_TRIGGERER),
        ("{{ ti.xcom_pull(task_ids='t') }}", False),
    ],
)
def test_acquire_starts_in_the_triggerer_unless_its_key_needs_an_xcom(key: Any, starts: bool) -> None:
    with DAG("dag") as dag, DynamoLock(key):
        step("a")
    assert dag.get_task("lock.acquire").start_from_trigger is starts
    assert dag.get_task("lock.heartbeat").start_from_trigger is STARTS_IN_TRIGGERER
    assert dag.get_task("lock.release").start_from_trigger is STARTS_IN_TRIGGERER


def test_a_dag_with_macros_of_its_own_renders_on_a_worker() -> None:
    with DAG("dag", user_defined_macros={"table": "x"}) as dag, DynamoLock("{{ table }}"):
        step("a")
    assert not dag.get_task("lock.acquire").start_from_trigger


@pytest.mark.parametrize(
    "settings",
    [
        {"render_template_as_native_obj": True},
        {"template_undefined": jinja2.Undefined},
        {"jinja_environment_kwargs": {"extensions": ["jinja2.ext.do"]}},
    ],
    ids=lambda settings: next(iter(settings)),
)
@pytest.mark.parametrize("key", ["k", "{{ params.tables }}"])
def test_a_dag_with_settings_of_jinja_renders_on_a_worker(settings: dict[str, Any], key: str) -> None:
    with DAG("dag", **settings) as dag, DynamoLock(key):
        step("a")
    assert dag.get_task("lock.acquire").start_from_trigger is (STARTS_IN_TRIGGERER and key == "k")


def test_an_undefined_name_in_a_key_is_an_error_in_the_triggerer_too() -> None:
    key = "warehouse/{{ tabel }}"
    with DAG("dag"):
        operator = DynamoLockAcquireOperator(task_id="a", key=key)
    assert operator.start_from_trigger is RENDERS_IN_TRIGGERER
    if not RENDERS_IN_TRIGGERER:
        return
    trigger = DynamoLockAcquireTrigger(key=key)
    trigger.template_fields = ("key",)
    context: Any = {}
    with pytest.raises(jinja2.UndefinedError, match="'tabel' is undefined"):
        trigger.render_template_fields(context)


def branch(task_id: str) -> BranchPythonOperator:
    return BranchPythonOperator(task_id=task_id, python_callable=lambda: "a")


def a_branch_beside_another_task() -> None:
    with DynamoLock("k"):
        step("first")
        branch("choose")


def a_stub() -> None:
    with DynamoLock("k"):

        @task.stub(queue="native")
        def native() -> None: ...

        native()


def test_a_branch_at_the_end_of_a_group_may_not_skip_release_while_others_run() -> None:
    with (
        DAG("dag"),
        pytest.raises(LockValueError, match=r"'lock.choose' would skip .* while 'lock.first' may"),
    ):
        a_branch_beside_another_task()
    with DAG("dag") as dag:
        with DynamoLock("y", group_id="after_all"):
            step("first") >> branch("choose")
        with DynamoLock("z", group_id="inside"):
            step("first")
            branch("choose") >> step("last")
    assert dag.get_task("after_all.choose").downstream_task_ids == {"after_all.release"}


def test_a_stub_task_cannot_be_guarded() -> None:
    # Airflow 3.0 has no such tasks.
    expected = LockValueError if hasattr(task, "stub") else AttributeError
    with (
        DAG("dag"),
        pytest.raises(expected, match=r"The stub task 'lock.native' cannot be in a lock group|stub"),
    ):
        a_stub()


def test_an_object_in_the_text_of_a_key_is_an_error() -> None:
    def mapped() -> None:
        @task_group
        def per(table: str) -> None:
            with DynamoLock(f"warehouse/{table}"):
                step("a")

        per.expand(table=["x", "y"])

    with DAG("dag", params={"table": "x"}) as dag:
        with pytest.raises(LockValueError, match="contains the text of an object of Airflow"):
            mapped()
        with pytest.raises(LockValueError, match="pass the argument itself as the key"):
            DynamoLockSensor(task_id="s", key=f"warehouse/{dag.param('table')}")
        with pytest.raises(LockValueError, match="must be text"):
            DynamoLockAcquireOperator(task_id="p", key=Path("/data/x"))


def test_a_sensor_in_reschedule_mode_looks_once_a_minute() -> None:
    with DAG("dag", default_args={"mode": "reschedule"}):
        assert DynamoLockSensor(task_id="a", key="k", deferrable=False).poke_interval == 60.0
        assert DynamoLockSensor(task_id="b", key="k", mode="poke", deferrable=False).poke_interval == 5.0
        assert DynamoLockSensor(task_id="c", key="k", poke_interval=7, deferrable=False).poke_interval == 7.0


def test_a_mapped_acquire_starts_on_a_worker() -> None:
    with DAG("dag") as dag:
        DynamoLockAcquireOperator.partial(task_id="a").expand(key=["x", "y"])
    assert not dag.get_task("a").start_from_trigger


def test_a_default_execution_timeout_does_not_stop_the_heartbeat_task() -> None:
    with DAG("dag", default_args={"execution_timeout": timedelta(minutes=5)}) as dag, DynamoLock("k"):
        step("a")
    tasks: list[Any] = dag.tasks
    timeouts = {task.label: task.execution_timeout for task in tasks}
    assert timeouts == {"acquire": None, "heartbeat": None, "release": None, "a": timedelta(minutes=5)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"key": ""}, "must not be empty"),
        ({"key": " "}, "names no resource"),
        ({"key": []}, "needs a key"),
        ({"key": 5}, "needs a key"),
        ({"key": ["a", "a"]}, "name 'a' twice"),
        ({"key": "k" * 2049}, "has 2049 bytes"),
        (
            {"key": [f"k{number}" for number in range(101)]},
            "101 locks cannot be acquired together.*at most 100",
        ),
        ({"key": "k", "lease": 0}, "lease must be a finite time, more than zero"),
        ({"key": "k", "lease": float("nan")}, "lease must be a finite time"),
        ({"key": "k", "lease": 60, "heartbeat": 40}, "shorter than two heartbeats"),
        ({"key": "k", "heartbeat": 0}, "heartbeat must be a finite time, more than zero"),
        ({"key": "{{ params.table }}", "lease": 60, "heartbeat": 40}, "shorter than two heartbeats"),
        ({"key": "k", "timeout": -1}, "timeout must be a finite time, zero or more"),
        ({"key": "k", "slots": 3, "capacity": 2}, "3 slots can never be free in a lock with a capacity of 2"),
        ({"key": "k", "release_grace": timedelta(0)}, "release_grace must be a finite time, more than zero"),
        ({"key": "k", "on_timeout": "wait"}, "on_timeout must be 'fail' or 'skip'"),
        ({"key": "k", "mode": "both"}, "mode must be 'shared' or 'exclusive', not 'both'"),
        (
            {"key": "k", "mode": "shared", "slots": 2, "capacity": 3},
            "2 of 3 cannot be acquired in shared mode",
        ),
        ({"key": "k", "priority": "high"}, "priority must be a whole number, not 'high'"),
        ({"key": "k", "priority": 1000}, "priority must be a whole number from -999 to 999, not 1000"),
        ({"key": "k", "fair": "yes"}, "fair must be True or False, not 'yes'"),
        ({"key": "k", "min_hold": -1}, "min_hold must be a finite time, more than zero"),
        # Known values are checked even if other values come from templates.
        ({"key": "{{ params.table }}", "mode": "both"}, "mode must be 'shared' or 'exclusive'"),
        ({"key": ["a", "a"], "slots": "{{ params.slots }}"}, "name 'a' twice"),
    ],
)
def test_invalid_arguments_fail_when_the_dag_is_parsed(arguments: dict[str, Any], message: str) -> None:
    with DAG("dag"), pytest.raises(LockValueError, match=message), DynamoLock(**arguments):
        step("a")


@pytest.mark.parametrize("character", ["9", "x"])
@pytest.mark.parametrize(
    "name", ["slots", "priority", "lease", "timeout", "fair", "mode", "on_timeout", "on_wait"]
)
def test_an_error_shows_the_beginning_of_a_long_value(name: str, character: str) -> None:
    with DAG("dag"), pytest.raises(LockValueError, match=f"{name} must be ") as refused:
        DynamoLock("k", **{name: character * 5000})  # type: ignore[arg-type]
    assert len(str(refused.value)) < 200


def test_values_that_depend_on_a_template_are_not_compared() -> None:
    with DAG("dag"), DynamoLock("k", slots=3, capacity="{{ params.capacity }}", mode="{{ params.mode }}"):
        step("a")


@pytest.mark.parametrize("lease", [None, "{{ params.lease }}"])
def test_a_heartbeat_is_not_compared_with_a_lease_of_the_connection_or_a_template(
    lease: Any,
) -> None:
    with DAG("dag"), DynamoLock("k", heartbeat=timedelta(minutes=5), lease=lease):
        step("a")


def test_group_and_operator_have_the_same_parameters() -> None:
    for kind in (DynamoLock, DynamoLockAcquireOperator):
        parameters = inspect.signature(kind).parameters
        defaults = {name: parameters[name].default for name in lock_options.PARAMETERS if name != "key"}
        assert {**defaults, "key": None} == lock_options.PARAMETERS


def test_a_lock_without_tasks_fails_when_the_dag_is_parsed() -> None:
    with DAG("dag"), pytest.raises(LockValueError, match="guards nothing"), DynamoLock("k"):
        pass


def test_a_group_that_is_entered_twice_fails_when_the_dag_is_parsed() -> None:
    with DAG("dag"), DynamoLock("k") as lock:
        work()
    with pytest.raises(LockValueError, match="'lock' was entered twice"), lock:
        work()


def test_an_operator_refuses_an_invalid_key_too() -> None:
    with DAG("dag"), pytest.raises(LockValueError, match="must not be empty"):
        DynamoLockOperator(task_id="a", key="", python_callable=print)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"slots": "many"}, "slots must be a whole number, not 'many'"),
        ({"slots": 0, "lock_mode": "{{ ds }}"}, "slots must be a whole number of at least 1"),
        ({"slots": "9" * 5000}, "slots must be a whole number"),
        ({"lock_mode": "both"}, "^lock_mode must be 'shared' or 'exclusive', not 'both'"),
        ({"lock_mode": "both", "slots": "{{ ds }}"}, "^lock_mode must be 'shared' or 'exclusive'"),
        (
            {"lock_mode": "shared", "slots": 2},
            "cannot wait for 2 of them in shared mode: leave slots or lock_mode",
        ),
        ({"poke_interval": 0}, "poke_interval must be a finite time, more than zero"),
        ({"poke_interval": timedelta(seconds=-1)}, "poke_interval must be a finite time, more than zero"),
        ({"poke_interval": "5"}, "poke_interval must be a number of seconds or a timedelta, not '5'"),
    ],
)
def test_a_sensor_refuses_invalid_arguments_too(arguments: dict[str, Any], message: str) -> None:
    with DAG("dag"), pytest.raises(LockValueError, match=message) as refused:
        DynamoLockSensor(task_id="a", key="k", **arguments)
    assert "capacity" not in str(refused.value)
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("conn_id", [None, "", " ", 5])
def test_each_operator_refuses_an_invalid_connection_id(conn_id: Any) -> None:
    create: list[Callable[..., Any]] = [
        partial(DynamoLock, "k"),
        partial(DynamoLockAcquireOperator, task_id="a", key="k"),
        partial(DynamoLockHeartbeatOperator, task_id="b", acquire_task_id="a"),
        partial(DynamoLockReleaseOperator, task_id="c", acquire_task_id="a"),
        partial(DynamoLockOperator, task_id="d", key="k", python_callable=print),
        partial(DynamoLockSensor, task_id="e", key="k"),
    ]
    message = "dynamo_lock_conn_id must be the id of a connection, not "
    with DAG("dag"):
        for each in create:
            with pytest.raises(LockValueError, match=message):
                each(dynamo_lock_conn_id=conn_id)
    with DAG("dag"):
        for each in create:
            each(dynamo_lock_conn_id="{{ params.connection }}")


@pytest.mark.parametrize("create", [DynamoLockHeartbeatOperator, DynamoLockReleaseOperator])
def test_operators_refuse_what_is_not_the_id_of_an_acquire_task(create: Callable[..., Any]) -> None:
    message = (
        "acquire_task_id must be the id of the task that acquires the lock, such as acquire.task_id, not "
    )
    with DAG("dag"):
        for task_id, wrong in {"a": None, "b": "", "c": step("acquire")}.items():
            with pytest.raises(LockValueError, match=message):
                create(task_id=task_id, acquire_task_id=wrong)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"heartbeat": -1}, "heartbeat must be a finite time, more than zero"),
        ({"heartbeat": "abc"}, "heartbeat must be a number of seconds, not 'abc'"),
        ({"release_task_id": ""}, "release_task_id must be the id of the task that releases the lock"),
        ({"release_task_id": 5}, "release_task_id must be the id of the task that releases the lock"),
    ],
)
def test_a_heartbeat_task_refuses_invalid_arguments_too(arguments: dict[str, Any], message: str) -> None:
    with DAG("dag"), pytest.raises(LockValueError, match=message):
        DynamoLockHeartbeatOperator(task_id="a", acquire_task_id="acquire", **arguments)


def test_a_heartbeat_may_be_a_template() -> None:
    with DAG("dag"):
        DynamoLockHeartbeatOperator(task_id="a", acquire_task_id="acquire", heartbeat="{{ params.every }}")
