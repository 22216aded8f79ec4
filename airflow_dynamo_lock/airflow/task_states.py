"""What a trigger asks Airflow: whether its task still waits for it, and whether another task of the run has ended.

Airflow leaves the trigger of a task that is cleared while deferred running, and starts it anew whenever it ends, until
the task is deferred once more, with another trigger. Such an orphan must not take a lock, or keep one alive, for a task
that may not run for days. So each trigger of ours asks before it starts, and all of a process ask together, from time
to time, while they run.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from airflow_dynamo_lock.log import log

#: Seconds between questions.
EVERY = 20.0
# Runs in one question, which travels in a URL.
_RUNS = 100
# The states in which a task stays.
_ENDED = frozenset({"success", "failed", "skipped", "upstream_failed", "removed"})


async def until_deferred(ti: Any) -> None:
    """Wait while the task instance is not deferred."""
    while await _matches(_Question(ti, ti.task_id, _is_not_deferred)):  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(EVERY)


async def until_orphaned(ti: Any) -> None:
    """Wait while the task instance is deferred."""
    await _until(_Question(ti, ti.task_id, _is_not_deferred))


async def until_ended(ti: Any, task_id: str) -> None:
    """Wait until another task of the same run, at the same map index, has ended, in whatever way."""
    await _until(_Question(ti, task_id, _ENDED.__contains__))


def _is_not_deferred(state: str | None) -> bool:
    return state != "deferred"


@dataclass(eq=False)
class _Question:
    """Whether a task beside `ti`, or that one itself, is in one of some states."""

    ti: Any
    task_id: str
    matches: Callable[[str | None], bool]
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    answer: bool = field(default=False, init=False)


# What is to be asked now, and once; and what is asked again and again until Airflow says yes.
_new: list[_Question] = []
_asking_new: asyncio.Task[None] | None = None
_waiting: set[_Question] = set()
_asking: asyncio.Task[None] | None = None


async def _matches(question: _Question) -> bool:
    """Ask now. Airflow answers a triggerer one question at a time, and hundreds may start at the same moment: those who
    come while it answers ask the next one together."""
    global _asking_new
    _new.append(question)
    if _asking_new is None or _asking_new.done():
        _asking_new = asyncio.create_task(_ask_new(), name="dynamo-lock new deferrals")
    await question.answered.wait()
    return question.answer


async def _ask_new() -> None:
    while _new:
        together = _new.copy()
        _new.clear()
        for question in await _answered(together):
            question.answer = True
        for question in together:
            question.answered.set()


async def _until(question: _Question) -> None:
    global _asking
    _waiting.add(question)
    try:
        if _asking is None or _asking.done():
            _asking = asyncio.create_task(_ask(), name="dynamo-lock deferrals")
        await question.answered.wait()
    finally:
        _waiting.discard(question)


async def _ask() -> None:
    while _waiting:
        await asyncio.sleep(EVERY)
        for question in await _answered(list(_waiting)):
            question.answered.set()


async def _answered(questions: Collection[_Question]) -> list[_Question]:
    """Those to which Airflow's database says yes. Where it gives no answer, that is no: nothing is given up for a
    question that was not answered."""
    from airflow.sdk.execution_time import comms, task_runner

    by_dag = defaultdict(list)
    for question in questions:
        by_dag[question.ti.dag_id].append(question)
    found = []
    for dag_id, of_dag in by_dag.items():
        for first in range(0, len(of_dag), _RUNS):
            some = of_dag[first : first + _RUNS]
            message = comms.GetTaskStates(
                dag_id=dag_id,
                task_ids=sorted({each.task_id for each in some}),
                run_ids=sorted({each.ti.run_id for each in some}),
            )
            try:
                answer: Any = await task_runner.SUPERVISOR_COMMS.asend(message)
                states = answer.task_states
            except Exception:
                log.debug("Airflow does not say in which state the tasks of %r are.", dag_id, exc_info=True)
                continue
            found += [each for each in some if each.matches(states.get(each.ti.run_id, {}).get(_name(each)))]
    return found


def _name(question: _Question) -> str:
    """As Airflow's answer names it."""
    map_index = question.ti.map_index
    return question.task_id if map_index < 0 else f"{question.task_id}_{map_index}"
