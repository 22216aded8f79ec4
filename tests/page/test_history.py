"""The last hour of a lock, compiled from its record and from what the runs of this deployment have stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

from airflow_dynamo_lock.airflow.last_task import RELEASED_KEY
from airflow_dynamo_lock.airflow.lock_options import LEASES_KEY
from airflow_dynamo_lock.airflow.page.history import Turn, last_hour
from airflow_dynamo_lock.airflow.page.rows import Viewer
from airflow_dynamo_lock.core.model.text import utc
from proof.simulator.stepped import a_lease
from tests.monitoring.test_checks import MIN, NOW, a_state, a_waiter, held

VIEWER = Viewer("north", {"etl"})


def at(minutes: float) -> datetime:
    """Return the time this many minutes ago."""
    return utc(NOW) - timedelta(minutes=minutes)


class Task:
    """A task of a run that has acquired the lock `k`, with its rows of Airflow's database.

    :param release_task_ended: end of the group's release task.
    :param last_task_released: when the last guarded task has released the lock.
    """

    def __init__(
        self,
        lease_id: str,
        waited: float,
        held: float,
        dag_id: str = "etl",
        release_task_ended: float | None = None,
        last_task_released: float | None = None,
        function_ended: float | None = None,
        value: Any = None,
        task_id: str = "lock.acquire",
        release_task_ids: Sequence[str] = ("lock.release",),
        run_id: str | None = None,
    ) -> None:
        lease = replace(
            a_lease(lease_id), key="k", owner=f"north/{lease_id}", acquired_at_ms=NOW - round(held * MIN)
        )
        identity: Any = {"dag_id": dag_id, "run_id": run_id or lease_id, "map_index": -1, "try_number": 1}
        is_function = function_ended is not None
        self.ti = SimpleNamespace(
            task_id=task_id,
            start_date=at(waited),
            end_date=at(function_ended) if function_ended is not None else at(held),
            **identity,
        )
        stored = value if value is not None else [lease.as_dict()] if is_function else lease.as_dict()
        self.result = SimpleNamespace(key=LEASES_KEY if is_function else "return_value", value=stored)
        self.by_task, self.early = [], []
        if release_task_ended is not None:
            ended = at(release_task_ended)
            self.by_task += [(SimpleNamespace(task_id=each, **identity), ended) for each in release_task_ids]
        if last_task_released is not None:
            released = SimpleNamespace(task_id=task_id, key=RELEASED_KEY, **identity)
            self.early.append((released, at(last_task_released)))


def of_runs(*tasks: Task) -> Any:
    """Return a session of the database, which answers the three queries in their order."""
    answers = [
        [(each.result, each.ti) for each in tasks],
        [each for task in tasks for each in task.by_task],
        [each for task in tasks for each in task.early],
    ]
    return SimpleNamespace(execute=lambda _: answers.pop(0))


def link(run_id: str) -> str:
    return f"dags/etl/runs/{run_id}/tasks/lock.acquire"


def test_the_end_of_a_run_is_read_from_its_tasks() -> None:
    session = of_runs(
        Task("by release", 50, 40, release_task_ended=30),
        Task("by last task", 29, 28, last_task_released=20, release_task_ended=19),
        Task("function", 18, 17, function_ended=16),
        Task("nobody knows", 15, 14),
    )
    assert last_hour(session, a_state(), VIEWER) == [
        Turn("north/by release", link("by%20release"), at(50), at(40), at(30), has_ended=True),
        Turn("north/by last task", link("by%20last%20task"), at(29), at(28), at(20), has_ended=True),
        Turn("north/function", link("function"), at(18), at(17), at(16), has_ended=True),
        Turn("north/nobody knows", link("nobody%20knows"), at(15), at(14), None, has_ended=True),
    ]


def test_current_holders_and_waiters_are_read_from_the_record() -> None:
    state = a_state(a_waiter("south", NOW - 2 * MIN), holders=held(NOW - 5 * MIN))
    # The holder is a run of this deployment. Only the record shows that it still holds the lock.
    session = of_runs(Task("a", 6, 5, release_task_ended=4))
    holder, waiter = last_hour(session, state, VIEWER)
    assert holder == Turn("north/a", link("a"), at(6), at(5), None, has_ended=False)
    assert waiter == Turn("south", None, at(2), None, None, has_ended=False)


def test_the_previous_holder_is_shown_once() -> None:
    state = a_state(previous_owner="south/x", last_freed_at_ms=NOW - 3 * MIN)
    assert last_hour(of_runs(), state, VIEWER) == [Turn("south/x", ended=at(3), has_ended=True)]
    state = a_state(previous_owner="north/a", last_freed_at_ms=NOW - 3 * MIN)
    (turn,) = last_hour(of_runs(Task("a", 6, 5, release_task_ended=3)), state, VIEWER)
    assert turn.held_since == at(5)


def test_only_leases_that_ended_before_the_last_hour_are_omitted() -> None:
    session = of_runs(
        Task("before", 90, 80, release_task_ended=61), Task("until then", 90, 80, release_task_ended=59)
    )
    assert [each.owner for each in last_hour(session, a_state(), VIEWER)] == ["north/until then"]


def test_a_lease_with_an_unknown_end_is_omitted_after_an_hour() -> None:
    session = of_runs(Task("long ago", 80, 61), Task("lately", 80, 59))
    assert [each.owner for each in last_hour(session, a_state(), VIEWER)] == ["north/lately"]


def test_a_lease_without_a_group_ends_with_the_only_release_task() -> None:
    single = Task("single", 9, 8, release_task_ended=7, task_id="acquire", release_task_ids=["release"])
    one = Task("one", 6, 5, release_task_ended=4, task_id="one", release_task_ids=["release_one"], run_id="r")
    other = Task("other", 3, 2, release_task_ended=1, task_id="other", release_task_ids=["rest"], run_id="r")
    turns = last_hour(of_runs(single, one, other), a_state(), VIEWER)
    assert [(each.owner, each.ended) for each in turns] == [
        ("north/single", at(7)),
        ("north/one", None),
        ("north/other", None),
    ]


def test_the_last_task_of_a_group_ends_only_the_lease_of_the_group() -> None:
    of_group = Task("group", 9, 8, last_task_released=7, run_id="r")
    inner = Task("inner", 6, 5, task_id="lock.inner", run_id="r")
    turns = last_hour(of_runs(of_group, inner), a_state(), VIEWER)
    assert [(each.owner, each.ended) for each in turns] == [("north/group", at(7)), ("north/inner", None)]


def test_other_locks_other_results_and_unreadable_dags_are_omitted() -> None:
    other = replace(a_lease("other"), key="another lock").as_dict()
    session = of_runs(
        Task("secret", 9, 8, dag_id="payroll"),
        Task("other", 9, 8, value=other),
        Task("elsewhere", 9, 8, value="s3://results/1"),
        Task("damaged", 9, 8, value={"key": "k", "token": "none"}),
    )
    assert last_hour(session, a_state(), VIEWER) == []
