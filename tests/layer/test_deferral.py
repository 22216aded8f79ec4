"""The requests for task states that triggers send to Airflow before they start."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.execution_time import task_runner

from airflow_dynamo_lock.airflow import task_states


class Airflow:
    """Answers one request at a time, as the supervisor of a triggerer does.

    :ivar asked: number of runs in each request.
    """

    def __init__(self) -> None:
        self.states: dict[str, str] = {}
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
    return SimpleNamespace(dag_id="many", run_id=run_id, task_id="acquire", map_index=-1)


async def test_two_hundred_triggers_that_start_together_send_two_requests(airflow: Airflow) -> None:
    airflow.states = {f"run {number}": "deferred" for number in range(200)}
    async with asyncio.timeout(30):
        await asyncio.gather(*(task_states.until_deferred(task_instance(run)) for run in airflow.states))
    assert [airflow.asked.get_nowait() for _ in range(airflow.asked.qsize())] == [100, 100]


async def test_each_trigger_gets_the_state_of_its_own_task_and_may_be_cancelled(
    airflow: Airflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_states, "EVERY", 0.01)
    airflow.states = {"deferred": "deferred", "cleared": "scheduled", "cancelled": "scheduled"}
    starting = {
        run: asyncio.ensure_future(task_states.until_deferred(task_instance(run))) for run in airflow.states
    }
    async with asyncio.timeout(30):
        await starting["deferred"]
        starting["cancelled"].cancel()
        assert [await airflow.asked.get() for _ in range(4)] == [3, 1, 1, 1], (
            "a cancelled trigger sends no more requests"
        )
        assert not starting["cleared"].done()
        airflow.states["cleared"] = "deferred"
        await starting["cleared"]
