"""The outcome of the demo: the turns of the runs, their durations, and checks of what the lock promises."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from statistics import median
from typing import Self

from demo import ledger
from demo.ledger import Section
from deployments.airflow_client import Run, TaskInstance

#: The tasks of the lock, and the states in which each has done its work. `release` is skipped if the process of the
#: last guarded task has released the lock.
DONE = {"lock.acquire": {"success"}, "lock.heartbeat": {"success"}, "lock.release": {"success", "skipped"}}


@dataclass(frozen=True, slots=True)
class Turn:
    """One run, from its trigger to the release of the lock.

    Times are in seconds since the epoch. An attribute is None if that step has not happened.
    """

    deployment: str
    run: str
    triggered: float
    acquired: float | None
    section: Section | None
    released: float | None

    @property
    def waited(self) -> float | None:
        """Seconds from the trigger of the run to the start of its first guarded task."""
        return self.section.start - self.triggered if self.section else None


@dataclass(frozen=True, slots=True)
class Handover:
    """The time from the end of one run's last guarded task to the start of the next run's first."""

    previous: Turn
    following: Turn
    ended: float
    started: float

    @property
    def seconds(self) -> float:
        """Duration of the whole hand-over."""
        return self.started - self.ended

    @property
    def steps(self) -> tuple[float, float] | None:
        """Durations of the two steps: until the next run has acquired the lock, and until its first task starts."""
        if self.following.acquired is None:
            return None
        return self.following.acquired - self.ended, self.started - self.following.acquired

    @property
    def crosses(self) -> bool:
        """Whether the lock went from one deployment to the other."""
        return self.previous.deployment != self.following.deployment


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and maximum of the durations of one step, in seconds."""

    what: str
    median: float
    longest: float

    @classmethod
    def of(cls, what: str, seconds: Sequence[float]) -> Self:
        """Summarize the durations of the step `what`. `seconds` must not be empty."""
        return cls(what, median(seconds), max(seconds))


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the verdict: what was checked, what was found, and whether the check has passed.

    `passed` is None for a line that only reports a figure.
    """

    text: str
    found: str
    passed: bool | None

    @property
    def mark(self) -> str:
        """The symbol in front of the line."""
        return "·" if self.passed is None else "✓" if self.passed else "✗"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The turns, the critical sections, the runs and the lock's tasks, as they are at one moment."""

    turns: Sequence[Turn]
    """In the order of their critical sections. Turns without one come last."""
    sections: Sequence[Section]
    runs: Sequence[Run]
    lock_tasks: Sequence[TaskInstance]
    needs_worker: bool = False
    """Whether Airflow starts every task on a worker and none in the triggerer, as 3.1 and 3.2 do."""
    slot_seconds: float = 0.0
    """For how many seconds the lock's tasks have occupied worker slots, in total."""

    @property
    def handovers(self) -> list[Handover]:
        """The hand-over between each two consecutive turns, where the earlier one has ended."""
        return [
            Handover(previous, following, previous.section.end, following.section.start)
            for previous, following in pairwise(self.turns)
            if previous.section and following.section and isfinite(previous.section.end)
        ]

    @property
    def spreads(self) -> list[Spread]:
        """Durations of the hand-overs, in total and of each step, and of Airflow's own step from task to task.

        Empty if no step is known.
        """
        handovers = self.handovers
        steps = [each.steps for each in handovers if each.steps]
        if not steps:
            return []
        acquiring, starting = zip(*steps, strict=True)
        own = [
            later.start - earlier.end
            for section in self.sections
            for earlier, later in pairwise(section.work)
            if isfinite(earlier.end)
        ]
        spreads = [
            Spread.of(
                "from one run's last task to the next run's first", [each.seconds for each in handovers]
            ),
            Spread.of("step 1: the lock is released, and acquired by the next run", acquiring),
            Spread.of("step 2: Airflow starts its first task", starting),
        ]
        if own:
            spreads.append(Spread.of("for comparison: from one task to the next in a run", own))
        return spreads

    @property
    def verdict(self) -> list[Check]:
        """The checks of what the lock promises."""
        runs_ok = sum(run.state == "success" for run in self.runs)
        complete = sum(isfinite(section.end) and len(section.work) == 2 for section in self.sections)
        overlaps = len(ledger.overlaps(self.sections))
        lock_tasks_ok = sum(_is_done(ti) for ti in self.lock_tasks)
        tokens = [token for section in self.sections for token in section.tokens]
        return [
            Check("every run succeeded", f"{runs_ok} of {len(self.runs)}", runs_ok == len(self.runs)),
            Check(
                "every run had its critical section",
                f"{complete} of {len(self.runs)}",
                complete == len(self.sections) == len(self.runs),
            ),
            Check("no two critical sections overlapped", f"{overlaps} overlaps", overlaps == 0),
            Check(
                "every task of the lock has done its work",
                f"{lock_tasks_ok} of {len(self.lock_tasks)}",
                bool(self.lock_tasks) and lock_tasks_ok == len(self.lock_tasks),
            ),
            self._worker_check,
            Check(
                "fencing tokens grew with every turn",
                f"{len(set(tokens))} tokens in {len(self.sections)} turns",
                bool(tokens) and ledger.tokens_grow(self.sections),
            ),
        ]

    @property
    def _worker_check(self) -> Check:
        """How much the lock's own tasks have used the workers."""
        on_worker = [ti for ti in self.lock_tasks if ti.pid is not None]
        found = f"{len(on_worker)} of {len(self.lock_tasks)} tasks had a process"
        if not self.needs_worker:
            text = "waiting, heartbeats and releasing used no worker slot"
            return Check(text, found, bool(self.lock_tasks) and not on_worker)
        per_run = self.slot_seconds / max(1, len(self.runs))
        text = "the lock's tasks start on a worker in this version of Airflow, and wait in the triggerer"
        return Check(text, f"{per_run:.1f} s of a worker slot per run; {found}", None)

    @property
    def passed(self) -> bool:
        """Whether no check has failed."""
        return all(check.passed is not False for check in self.verdict)


def outcome(
    entries: Collection[ledger.Entry],
    runs: Mapping[str, Sequence[Run]],
    task_instances: Mapping[str, Sequence[TaskInstance]],
    *,
    needs_worker: bool = False,
    processes: Collection[tuple[str, float]] = (),
) -> Outcome:
    """Combine the entries of the ledger with the runs and task instances that Airflow reports.

    :param runs: runs by the name of their deployment.
    :param task_instances: task instances by the name of their deployment.
    :param needs_worker: whether Airflow starts every task on a worker.
    :param processes: for each ended process of a task, the task instance id and the seconds for which it
        occupied a worker slot.
    """
    sections = ledger.sections(entries)
    section_of = {(section.deployment, section.run): section for section in sections}
    ended_at = {
        (deployment, ti.run_id, ti.task_id): ti.end.timestamp()
        for deployment, instances in task_instances.items()
        for ti in instances
        if _is_done(ti) and ti.end
    }
    turns = [
        Turn(
            deployment,
            run.run_id,
            triggered=run.queued_at.timestamp() if run.queued_at else 0.0,
            acquired=ended_at.get((deployment, run.run_id, "lock.acquire")),
            section=section_of.get((deployment, run.run_id)),
            released=ended_at.get((deployment, run.run_id, "lock.release")),
        )
        for deployment, its_runs in runs.items()
        for run in its_runs
    ]
    turns.sort(
        key=lambda turn: (turn.section is None, turn.section.start if turn.section else turn.triggered)
    )
    lock_tasks = [ti for each in task_instances.values() for ti in each if ti.task_id in DONE]
    lock_task_ids = {ti.id for ti in lock_tasks}
    return Outcome(
        turns=turns,
        sections=sections,
        runs=[run for its_runs in runs.values() for run in its_runs],
        lock_tasks=lock_tasks,
        needs_worker=needs_worker,
        slot_seconds=sum(seconds for ti_id, seconds in processes if ti_id in lock_task_ids),
    )


def _is_done(ti: TaskInstance) -> bool:
    return ti.state in DONE.get(ti.task_id, {"success"})
