"""Lets triggers, and the processes of guarded tasks, ask Airflow for the states of tasks.

If a task is cleared while it is deferred, Airflow leaves its trigger running, and restarts the trigger
whenever it ends, until the task is deferred again with another trigger. Such an orphaned trigger must not
acquire a lock, or renew a lease, for a task that may not run for days. So each trigger of this package asks
for the state of its own task before it starts to work, and every `EVERY` seconds while it works.

A task that was not cleared, but marked or skipped while it was deferred, has a state. Airflow deletes its trigger
from the database, and then cancels it. On SQLite, the next trigger may get the same id before that. Then Airflow
takes the old trigger for the new one, and starts the new one only when the old one has ended.

Airflow answers a triggerer one request at a time, and hundreds of triggers may run there. So the triggers of
a process share their requests.
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

from airflow_dynamo_lock.log import log

#: Interval between requests while triggers wait for a change of state, in seconds.
EVERY = 20.0
#: Longest time from a release until the heartbeat task detects it, while DynamoDB can be reached, in seconds.
RELEASE_DETECTION_SECONDS = 5.0
# Maximum number of tasks, and of runs, in one request. Airflow sends their ids in a URL.
_IDS_PER_REQUEST = 100
_ENDED = frozenset({"success", "failed", "skipped", "upstream_failed", "removed"})


def can_tell_states(task_ids: Sequence[str]) -> bool:
    """Whether `read_states` can ask for the states of these tasks: not too many, and no name is that of an instance of
    another one, as ``a_1`` beside ``a``."""
    return len(task_ids) <= _IDS_PER_REQUEST and not any(
        _is_instance(other, of=one) for one, other in permutations(task_ids, 2)
    )


def read_states(ti: Any, task_ids: Sequence[str], *, own_map_index_only: bool) -> dict[str, list[str | None]]:
    """Ask Airflow, from a task's process, for the states of tasks of the same run.

    :param ti: the task instance of the process.
    :param task_ids: ids of the tasks.
    :param own_map_index_only: whether only the instances with the map index of `ti` count; else all do.
    :returns: for each task, the states of its instances. The list is empty if Airflow does not know the task.
    """
    answer = ti.get_task_states(dag_id=ti.dag_id, task_ids=list(task_ids), run_ids=[ti.run_id])
    by_name: dict[str, str | None] = answer.get(ti.run_id, {})
    states = {}
    for task_id in task_ids:
        own = _name_in_answer(task_id, ti.map_index if own_map_index_only else -1)
        states[task_id] = [
            state
            for name, state in by_name.items()
            if name == own or (not own_map_index_only and _is_instance(name, of=task_id))
        ]
    return states


def have_ended(states: Collection[str | None]) -> bool:
    """Whether a task has ended, with or without success.

    :param states: the states of its instances; if there are none, it has not.
    """
    return bool(states) and _ENDED.issuperset(states)


def has_ended(ti: Any, task_id: str) -> bool:
    """Ask Airflow, from a task's process, whether another task of the same run and map index has ended, with or
    without success. False if Airflow does not answer."""
    try:
        return have_ended(read_states(ti, [task_id], own_map_index_only=True)[task_id])
    except Exception:
        log.debug("Could not read the state of the task %r from Airflow.", task_id, exc_info=True)
        return False


async def until_deferred(ti: Any) -> bool:
    """Wait until a task instance has a state. A cleared one has none.

    :returns: whether it is deferred. True if Airflow does not return its state.
    """
    while await _matches_now(query := _Query(ti, ti.task_id, _is_not_deferred)):
        if query.state is not None:
            return False
        await asyncio.sleep(EVERY)
    return True


async def until_orphaned(ti: Any) -> None:
    """Wait until a task instance is no longer deferred, so that its trigger is orphaned."""
    await _until_match(_Query(ti, ti.task_id, _is_not_deferred))


async def until_ended(ti: Any, task_id: str) -> None:
    """Wait until another task of the same run and map index has ended, with or without success.

    :param ti: the task instance of the trigger that waits.
    :param task_id: id of the other task.
    """
    await _until_match(_Query(ti, task_id, _ENDED.__contains__))


def _is_not_deferred(state: str | None) -> bool:
    return state != "deferred"


@dataclass(eq=False)
class _Query:
    """Asks whether the state of a task matches a condition.

    :ivar ti: a task instance of the same run and map index.
    :ivar task_id: id of the task.
    :ivar condition: whether a state matches. Airflow reports None for a task without a state.
    :ivar answered: set when `matches` is known.
    :ivar state: the state. None if the task has none, or Airflow did not return it.
    :ivar matches: whether the state matched. False if Airflow did not return the state.
    """

    ti: Any
    task_id: str
    condition: Callable[[str | None], bool]
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    state: str | None = field(default=None, init=False)
    matches: bool = field(default=False, init=False)


# Queries that wait for the next request, each of which is sent once, and the task that sends them.
_new: list[_Query] = []
_sending: asyncio.Task[None] | None = None
# Queries that are repeated every `EVERY` seconds until they match, and the task that repeats them.
_repeated: set[_Query] = set()
_repeating: asyncio.Task[None] | None = None


async def _matches_now(query: _Query) -> bool:
    """Send a query once, together with the others that were added while Airflow answered a request."""
    global _sending
    _new.append(query)
    if _sending is None or _sending.done():
        _sending = asyncio.create_task(_send_new(), name="dynamo-lock new task state queries")
    await query.answered.wait()
    return query.matches


async def _send_new() -> None:
    while _new:
        batch = _new.copy()
        _new.clear()
        await _ask(batch)
        for query in batch:
            query.answered.set()


async def _until_match(query: _Query) -> None:
    """Repeat a query until it matches, together with all others that are repeated."""
    global _repeating
    _repeated.add(query)
    try:
        if _repeating is None or _repeating.done():
            _repeating = asyncio.create_task(_repeat(), name="dynamo-lock repeated task state queries")
        await query.answered.wait()
    finally:
        _repeated.discard(query)


async def _repeat() -> None:
    while _repeated:
        await asyncio.sleep(EVERY)
        repeated = list(_repeated)
        await _ask(repeated)
        for query in repeated:
            if query.matches:
                query.answered.set()


async def _ask(queries: Collection[_Query]) -> None:
    """Ask Airflow for the states of these queries.

    If a request fails, its queries do not match, so that no trigger stops because of an unknown state.
    """
    from airflow.sdk.execution_time import comms, task_runner

    by_dag = defaultdict(list)
    for query in queries:
        by_dag[query.ti.dag_id].append(query)
    for dag_id, of_dag in by_dag.items():
        for start in range(0, len(of_dag), _IDS_PER_REQUEST):
            batch = of_dag[start : start + _IDS_PER_REQUEST]
            request = comms.GetTaskStates(
                dag_id=dag_id,
                task_ids=sorted({query.task_id for query in batch}),
                run_ids=sorted({query.ti.run_id for query in batch}),
            )
            try:
                answer: Any = await task_runner.SUPERVISOR_COMMS.asend(request)
                states = answer.task_states  # run id → name of the task → state
            except Exception:
                log.debug("Could not read the task states of the DAG %r from Airflow.", dag_id, exc_info=True)
                continue
            for query in batch:
                name = _name_in_answer(query.task_id, query.ti.map_index)
                query.state = states.get(query.ti.run_id, {}).get(name)
                query.matches = query.condition(query.state)


def _name_in_answer(task_id: str, map_index: int) -> str:
    """The name by which Airflow's answer lists a task: its id, followed by the map index if it has one."""
    return task_id if map_index < 0 else f"{task_id}_{map_index}"


def _is_instance(name: str, *, of: str) -> bool:
    """Whether Airflow's answer may list an instance of the mapped task `of` by this name."""
    return re.fullmatch(re.escape(of) + r"_\d+", name) is not None
