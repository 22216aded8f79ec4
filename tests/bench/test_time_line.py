"""The time line of a run: each step lasts from one known moment to the next."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from airflow_dynamo_lock.airflow.time_line import TimeLine
from bench import page
from bench.__main__ import RESULTS
from bench.measure import time_line
from bench.measure.time_line import RunTimes
from deployments.airflow_client import Run, TaskInstance

TRIGGER = ("trigger dag/run/task/-1/1 (ID 1) starting", "Trigger fired event")


def at(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def task(task_id: str, queued: float | None, start: float, end: float) -> TaskInstance:
    nothing: dict[str, Any] = dict.fromkeys(TaskInstance.__dataclass_fields__)
    times = {"queued": queued and at(queued), "start": at(start), "end": at(end)}
    return TaskInstance(**nothing | {"task_id": task_id} | times)


def a_run(begun: float, released: float | None = None) -> RunTimes:
    """A run that is queued at `begun`, with one moment per second."""
    tasks = (
        task("lock.acquire", None, begun + 2, begun + 5),
        task("lock.extract", begun + 6, begun + 7, begun + 9),
        task("lock.load", begun + 10, begun + 11, begun + 13),
        task("lock.release", None, begun + 14, begun + 17),
    )
    logs = {
        "lock.acquire": [
            (begun + 3, TRIGGER[0]),
            (begun + 3.5, "Acquired the lock 'k' as x (lease 1, token 1)."),
            (begun + 3.9, "Time line of this trigger: total 900 ms, task state 400 ms, result 500 ms."),
            (begun + 4, TRIGGER[1]),
        ],
        "lock.release": [
            (begun + 15, TRIGGER[0]),
            (begun + 15.5 if released is None else released, "Released the lock 'k' (lease 1, token 1)."),
            (begun + 16, TRIGGER[1]),
        ],
    }
    run = Run("dag", "run", "success", {}, at(begun), at(begun + 1), at(begun + 18))
    return RunTimes(run, {each.task_id: each for each in tasks}, logs, [begun + 8, begun + 12])


def test_the_steps_of_a_run_add_up_to_it() -> None:
    steps = time_line.uncontended(a_run(100.0))

    assert len(steps) == 15
    assert set(steps.values()) == {1.0, 4.0}, "a second each, and the work"
    assert sum(steps.values()) == 18


def test_the_steps_of_a_hand_over_go_from_the_end_of_the_work_to_the_start_of_the_next() -> None:
    steps = time_line.handed_over(a_run(100.0), a_run(200.0))

    assert sum(steps.values()) == 208 - 112
    by_step = {step: seconds for (_, step), seconds in steps.items()}
    assert by_step["frees the lock"] == 0.5
    assert by_step["grants it to the next waiter"] == 203.5 - 115.5
    assert by_step["stores the lease, and sends the event"] == 0.5


def test_a_lock_that_is_free_before_the_release_task_starts_has_no_steps_of_that() -> None:
    steps = time_line.handed_over(a_run(100.0, released=113.5), a_run(200.0))

    assert [step for _, step in steps][:2] == ["reports the end of the last task", "frees the lock"]
    assert sum(steps.values()) == 208 - 112


def test_a_release_task_that_was_skipped_has_no_steps_of_its_own() -> None:
    times = a_run(100.0, released=114.5)
    times.tasks["lock.release"] = replace(times.tasks["lock.release"], state="skipped", end=at(114))

    steps = time_line.uncontended(times)

    assert [(who, step, seconds) for (who, step), seconds in steps.items()][-4:] == [
        ("executor and worker", "reports the end of the last task", 1.0),
        ("this package", "sets `release` to skipped", 1.0),
        ("this package", "frees the lock", 0.5),
        ("scheduler", "ends the run, after `heartbeat`", 3.5),
    ]


def test_a_moment_that_is_not_known_leaves_its_time_to_the_next_step() -> None:
    unknown = a_run(100.0)
    del unknown.logs["lock.release"]
    steps = time_line.uncontended(unknown)

    assert len(steps) == 13
    assert sum(steps.values()) == 18


def test_a_table_has_each_step_once_in_order() -> None:
    unknown = a_run(100.0)
    del unknown.logs["lock.release"]
    rows = time_line.table([time_line.uncontended(each) for each in (unknown, a_run(200.0))])

    assert [row["step"] for row in rows] == [step for _, step in time_line.uncontended(a_run(0.0))]
    assert [row["seconds"]["of"] for row in rows] == [2] * 11 + [1, 1] + [2, 2]


def test_a_step_that_only_one_run_has_comes_after_the_step_before_it() -> None:
    skipped = a_run(100.0, released=114.5)
    skipped.tasks["lock.release"] = replace(skipped.tasks["lock.release"], state="skipped", end=at(114))
    rows = time_line.table([time_line.uncontended(each) for each in (skipped, skipped, a_run(200.0))])

    assert [row["step"] for row in rows][-7:] == [
        "defers `release`",
        "starts the trigger of `release`",
        "releases: from the trigger's start to its event",
        "ends `release`",
        "sets `release` to skipped",
        "frees the lock",
        "ends the run, after `heartbeat`",
    ]


def test_the_parts_of_a_trigger_are_those_that_it_logs() -> None:
    line = TimeLine()
    line.end("task state")
    line.end("result")
    run = a_run(100.0)

    assert run.trigger("lock.acquire") == {"total": 900.0, "task state": 400.0, "result": 500.0}
    run.logs["lock.acquire"] = [(0.0, f"Time line of this trigger: {line}.")]
    assert run.trigger("lock.acquire").keys() == {"total", "task state", "result"}
    assert run.trigger("lock.release") == {}


def test_the_page_shows_each_step_and_each_part() -> None:
    results = json.loads(RESULTS.read_text())
    first = {"total": 900.0, "task state": 500.0, "client": 400.0}
    later = [{"total": total, "task state": 40.0, "client": 0.0} for total in (70.0, 80.0, 120.0)]
    results["airflow"]["time_line"] = {
        "alone": time_line.table([time_line.uncontended(a_run(100.0))]),
        "between": time_line.table([time_line.handed_over(a_run(100.0), a_run(200.0))]),
        "within": [],
        "trigger": time_line.triggers([first, *later]),
    }

    text = page.text(results)

    assert "| triggerer | ends `acquire` | 1.00 (1.00–1.00) |" in text
    assert "A hand-over between two deployments" in text
    assert "A hand-over within one deployment" not in text
    assert "| **the whole trigger** | 900 | 80 (70–120) |" in text
    assert "median at most 100 ms | 80 ms | met |" in text
