"""The task states that triggers ask Airflow for, and how a trigger ends whose task is not deferred."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.jobs.triggerer_job_runner import TriggerRunner
from airflow.sdk.execution_time import task_runner
from airflow.triggers.base import TriggerEvent

from airflow_dynamo_lock.airflow import task_states
from airflow_dynamo_lock.airflow.trigger_base import LockTrigger
from deployments.patience import PATIENCE


class Airflow:
    """Answers one request at a time, as the supervisor of a triggerer does.

    :ivar asked: number of runs in each request.
    """

    def __init__(self) -> None:
        self.states: dict[str, str | None] = {}
        self.asked: asyncio.Queue[int] = asyncio.Queue()
        self._busy = asyncio.Lock()

    async def asend(self, request: Any) -> Any:
        async with self._busy:
            self.asked.put_nowait(len(request.run_ids))
            await asyncio.sleep(0)
            return SimpleNamespace(
                task_states={run: {"acquire": self.states[run]} for run in request.run_ids}
            )


@pytest.fixture
def airflow(monkeypatch: pytest.MonkeyPatch) -> Airflow:
    answers = Airflow()
    monkeypatch.setattr(task_runner, "SUPERVISOR_COMMS", answers, raising=False)
    return answers


def task_instance(run_id: str) -> Any:
    return SimpleNamespace(
        dag_id="many",
        run_id=run_id,
        task_id="acquire",
        map_index=-1,
        id="01a22a07-495a-73ca-9542-d94816512fbd",
        try_number=1,
        context_carrier=None,
    )


async def test_two_hundred_triggers_that_start_together_send_two_requests(airflow: Airflow) -> None:
    airflow.states = {f"run {number}": "deferred" for number in range(200)}
    async with asyncio.timeout(30):
        await asyncio.gather(*(task_states.until_deferred(task_instance(run)) for run in airflow.states))
    assert [airflow.asked.get_nowait() for _ in range(airflow.asked.qsize())] == [100, 100]


async def test_each_trigger_gets_the_state_of_its_own_task_and_may_be_cancelled(
    airflow: Airflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_states, "EVERY", 0.01)
    airflow.states = {"deferred": "deferred", "cleared": None, "cancelled": None}
    starting = {
        run: asyncio.ensure_future(task_states.until_deferred(task_instance(run))) for run in airflow.states
    }
    async with asyncio.timeout(30):
        assert await starting["deferred"]
        starting["cancelled"].cancel()
        assert [await airflow.asked.get() for _ in range(4)] == [3, 1, 1, 1], (
            "a cancelled trigger sends no more requests"
        )
        assert not starting["cleared"].done()
        airflow.states["cleared"] = "deferred"
        assert await starting["cleared"]


class WorksForEver(LockTrigger):
    """A trigger whose work does not end.

    :ivar working: set while it works.
    """

    arguments = ()

    def __init__(self) -> None:
        super().__init__()
        self.task_instance = task_instance("run")
        self.timeout_after = None  # as the triggerer sets it
        self.working = asyncio.Event()

    async def work(self) -> TriggerEvent:
        self.working.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.working.clear()
        raise AssertionError


@pytest.mark.parametrize("state", ["skipped", "success", "scheduled"])
@pytest.mark.parametrize("works", [False, True], ids=["before it works", "while it works"])
async def test_a_trigger_whose_task_has_another_state_ends_as_if_airflow_had_cancelled_it(
    airflow: Airflow, monkeypatch: pytest.MonkeyPatch, state: str, works: bool
) -> None:
    """On SQLite, its id may already be that of another task's trigger, which starts only after this end, and which an
    event or a failure would end."""
    monkeypatch.setattr(task_states, "EVERY", 0.01)
    airflow.states["run"] = "deferred" if works else state
    triggers = TriggerRunner()
    trigger = WorksForEver()
    running = asyncio.ensure_future(triggers.run_trigger(41, trigger))
    triggers.triggers[41] = {"task": running, "is_watcher": False, "name": "trigger 41", "events": 0}
    if works:
        working = asyncio.ensure_future(trigger.working.wait())
        await asyncio.wait((working, running), timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
        assert working.done()
        airflow.states["run"] = state

    await asyncio.wait((running,), timeout=PATIENCE)
    assert await triggers.cleanup_finished_triggers() == [41], "the trigger has ended"
    assert not triggers.triggers
    assert not triggers.failed_triggers
    assert not triggers.events
    assert not trigger.working.is_set()


async def test_a_trigger_whose_task_was_cleared_waits_until_airflow_cancels_it(
    airflow: Airflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_states, "EVERY", 0.01)
    airflow.states["run"] = None
    trigger = WorksForEver()
    running = asyncio.ensure_future(anext(aiter(trigger.run())))
    async with asyncio.timeout(PATIENCE):
        for _ in range(3):
            await airflow.asked.get()
    assert not running.done(), "Airflow would start it again at once"
    assert not trigger.working.is_set()
    running.cancel()
    await asyncio.wait((running,))
