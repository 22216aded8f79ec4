"""Where the time of a run under `DynamoLock` goes: which component takes how long, from one moment to the next.

The moments come from Airflow's database, from the logs of the run's tasks, and from the ledger of their work. A step
lasts from one moment to the next. If a moment is missing or out of order, its step is left out, and the next step
includes its time.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from bench.measure.spread import spread
from deployments.airflow_client import AirflowClient, Run, TaskInstance

#: Configuration of a deployment whose triggers log their time lines.
ENVIRONMENT = {"AIRFLOW__LOGGING__NAMESPACE_LEVELS": "airflow_dynamo_lock.airflow=DEBUG"}
FIRST, LAST = "lock.extract", "lock.load"
_TRIGGER = re.compile(r"Time line of this trigger: (.*)\.")
_PART = re.compile(r"([a-z ]+) (\d+) ms")

#: (who, step) → seconds, in order.
Steps = dict[tuple[str, str], float]

# Who takes the time of a step.
SCHEDULER = "scheduler"
TRIGGERER = "triggerer"
WORKER = "executor and worker"
OURS = "this package"
WORK = "tasks"


@dataclass(frozen=True)
class Moment:
    """The end of a step.

    :ivar who: the component that takes the time of the step.
    :ivar step: what it does.
    :ivar at: when the step ends, in epoch seconds; None if that is unknown.
    """

    who: str
    step: str
    at: float | None


@dataclass(frozen=True, eq=False)
class RunTimes:
    """The times of one run.

    :ivar run: the run.
    :ivar tasks: its task instances, by task id.
    :ivar logs: the messages of each of its tasks, each with its time in epoch seconds.
    :ivar work: the starts and ends of its working tasks in the ledger, in epoch seconds.
    """

    run: Run
    tasks: dict[str, TaskInstance]
    logs: dict[str, list[tuple[float, str]]]
    work: list[float]

    @classmethod
    def of(cls, airflow: AirflowClient, run: Run, work: Iterable[float]) -> RunTimes:
        """Read the times of a run from its deployment.

        :param work: the times in the ledger, in any order.
        """
        tasks = {ti.task_id: ti for ti in airflow.task_instances(run.dag_id, run.run_id)}
        logs = {
            task: [(at.timestamp(), text) for at, text in airflow.timed_log(run.dag_id, run.run_id, task)]
            for task in tasks
        }
        return cls(run, tasks, logs, sorted(work))

    def logged(self, text: str, task: str | None = None) -> float | None:
        """Return the time of the last message that contains `text`, of one task or of all; None if there is none."""
        return max(
            (
                at
                for name, messages in self.logs.items()
                if task in (None, name)
                for at, message in messages
                if text in message
            ),
            default=None,
        )

    def trigger(self, task: str) -> dict[str, float]:
        """Milliseconds of each part of a task's trigger, as it has logged them; empty if it has not."""
        for _, message in self.logs.get(task, ()):
            if found := _TRIGGER.search(message):
                return {name.strip(): float(ms) for name, ms in _PART.findall(found[1])}
        return {}


def uncontended(times: RunTimes) -> Steps:
    """The steps of a run that need not wait for the lock, as (who, step) → seconds."""
    run, acquire = times.run, times.tasks["lock.acquire"]
    return _steps(
        run.queued_at,
        Moment(SCHEDULER, "starts the run", _seconds(run.start)),
        Moment(SCHEDULER, "defers `acquire`", _seconds(acquire.start)),
        Moment(TRIGGERER, "starts the trigger of `acquire`", times.logged(" starting", "lock.acquire")),
        Moment(
            OURS,
            "acquires: from the trigger's start to its event",
            times.logged("fired event", "lock.acquire"),
        ),
        Moment(TRIGGERER, "ends `acquire`", _seconds(acquire.end)),
        *_start_of_work(times),
        Moment(WORK, "work, with Airflow's step from one task to the next", times.work[-1]),
        *_end_of_work(times),
        *_release(times),
        Moment(SCHEDULER, "ends the run, after `heartbeat`", _seconds(run.end)),
    )


def handed_over(earlier: RunTimes, later: RunTimes) -> Steps:
    """The steps from the end of one run's work to the start of the next run's, as (who, step) → seconds."""
    freed = earlier.logged("Released the lock")
    before = [each for each in _end_of_work(earlier) if freed is not None and (each.at or 0.0) <= freed]
    return _steps(
        earlier.work[-1],
        *before,
        Moment(OURS, "frees the lock", freed),
        Moment(OURS, "grants it to the next waiter", later.logged("Acquired the lock", "lock.acquire")),
        Moment(OURS, "stores the lease, and sends the event", later.logged("fired event", "lock.acquire")),
        Moment(TRIGGERER, "ends `acquire`", _seconds(later.tasks["lock.acquire"].end)),
        *_start_of_work(later),
    )


def table(measured: Sequence[Steps]) -> list[dict[str, Any]]:
    """The rows of a time line: each step, in order, with the spread of its seconds."""
    seconds = defaultdict(list)
    order: list[tuple[str, str]] = []
    for steps in measured:
        place = 0
        for step, taken in steps.items():
            if step not in seconds:
                order.insert(place, step)  # after the step before it
            place = order.index(step) + 1
            seconds[step].append(taken)
    return [{"who": who, "step": step, "seconds": spread(seconds[who, step])} for who, step in order]


def triggers(measured: Sequence[dict[str, float]]) -> dict[str, Any]:
    """The parts of the first trigger of a process, and the spread of the later ones', in milliseconds."""
    first, later = measured[0], measured[1:]
    return {
        "first": first,
        "later": {part: spread([each[part] for each in later if part in each]) for part in later[0]},
    }


def _start_of_work(times: RunTimes) -> list[Moment]:
    first = times.tasks[FIRST]
    return [
        Moment(SCHEDULER, "queues the first task", _seconds(first.queued)),
        Moment(WORKER, "starts its process", _seconds(first.start)),
        Moment(WORKER, "loads the DAG; the guard loads the SDK and enters the lease", times.work[0]),
    ]


def _end_of_work(times: RunTimes) -> list[Moment]:
    release = times.tasks["lock.release"]
    ended = Moment(WORKER, "reports the end of the last task", _seconds(times.tasks[LAST].end))
    if release.state == "skipped":
        return [ended, Moment(OURS, "sets `release` to skipped", _seconds(release.end))]
    return [
        ended,
        Moment(SCHEDULER, "defers `release`", _seconds(release.start)),
        Moment(TRIGGERER, "starts the trigger of `release`", times.logged(" starting", "lock.release")),
    ]


def _release(times: RunTimes) -> list[Moment]:
    release = times.tasks["lock.release"]
    if release.state == "skipped":
        return [Moment(OURS, "frees the lock", times.logged("Released the lock"))]
    event = times.logged("fired event", "lock.release")
    return [
        Moment(OURS, "releases: from the trigger's start to its event", event),
        Moment(TRIGGERER, "ends `release`", _seconds(release.end)),
    ]


def _steps(begun: datetime | float | None, *moments: Moment) -> Steps:
    """The seconds of each step, up to a moment that is known and not before the one before it."""
    steps: Steps = {}
    last = begun.timestamp() if isinstance(begun, datetime) else begun
    assert last is not None
    for each in moments:
        if each.at is not None and each.at >= last:
            steps[each.who, each.step] = each.at - last
            last = each.at
    return steps


def _seconds(moment: datetime | None) -> float | None:
    return None if moment is None else moment.timestamp()
