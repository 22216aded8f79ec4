"""Whether a trigger's task still waits for it.

Airflow leaves the trigger of a task that is cleared while deferred running, and starts it anew whenever it ends, until
the task is deferred once more, with another trigger. Such an orphan must not take a lock, or keep one alive, for a task
that may not run for days. So each trigger of ours asks before it starts, and all of a process ask together, from time
to time, while they run.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Collection
from typing import Any

log = logging.getLogger("airflow_dynamo_lock")

#: Seconds between questions.
EVERY = 20.0
# Runs in one question, which travels in a URL.
_RUNS = 100


async def until_deferred(ti: Any) -> None:
    """Wait while the task instance is not deferred."""
    while ti in await _not_deferred([ti]):  # noqa: ASYNC110 - Airflow has no event to wait for
        await asyncio.sleep(EVERY)


async def until_orphaned(ti: Any) -> None:
    """Wait while the task instance is deferred."""
    global _asking
    orphaned = _waiting[id(ti)] = (ti, asyncio.Event())
    try:
        if _asking is None or _asking.done():
            _asking = asyncio.create_task(_ask(), name="dynamo-lock deferrals")
        await orphaned[1].wait()
    finally:
        del _waiting[id(ti)]


_waiting: dict[int, tuple[Any, asyncio.Event]] = {}
_asking: asyncio.Task[None] | None = None


async def _ask() -> None:
    while _waiting:
        await asyncio.sleep(EVERY)
        for ti in await _not_deferred([ti for ti, _ in _waiting.values()]):
            if id(ti) in _waiting:
                _waiting[id(ti)][1].set()


async def _not_deferred(tis: Collection[Any]) -> list[Any]:
    """Those that Airflow's database does not show as deferred. Where it gives no answer, they are taken to be: nothing
    is given up for a question that was not answered."""
    from airflow.sdk.execution_time import comms, task_runner

    by_dag = defaultdict(list)
    for ti in tis:
        by_dag[ti.dag_id].append(ti)
    found = []
    for dag_id, of_dag in by_dag.items():
        for first in range(0, len(of_dag), _RUNS):
            some = of_dag[first : first + _RUNS]
            question = comms.GetTaskStates(
                dag_id=dag_id,
                task_ids=sorted({ti.task_id for ti in some}),
                run_ids=sorted({ti.run_id for ti in some}),
            )
            try:
                answer: Any = await task_runner.SUPERVISOR_COMMS.asend(question)
                states = answer.task_states
            except Exception:
                log.debug("Airflow does not say which tasks of %r are deferred.", dag_id, exc_info=True)
                continue
            found += [ti for ti in some if states.get(ti.run_id, {}).get(_name(ti)) != "deferred"]
    return found


def _name(ti: Any) -> str:
    """As Airflow's answer names it."""
    return str(ti.task_id) if ti.map_index < 0 else f"{ti.task_id}_{ti.map_index}"
