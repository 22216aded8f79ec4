"""What came out of the demo: the turns that the runs took, the times, and whether all that is promised was seen."""

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

LOCK_TASKS = ("lock.acquire", "lock.heartbeat", "lock.release")


@dataclass(frozen=True, slots=True)
class Turn:
    """One run's turn at the warehouse. Times are seconds since the epoch; None for what did not happen."""

    deployment: str
    run: str
    triggered: float
    acquired: float | None
    section: Section | None
    released: float | None

    @property
    def waited(self) -> float | None:
        """From the trigger of the run to the start of its first guarded task."""
        return self.section.start - self.triggered if self.section else None


@dataclass(frozen=True, slots=True)
class Handover:
    """One run's last task has ended, the next run's first has not started: the warehouse stands idle."""

    giver: Turn
    taker: Turn
    ended: float
    started: float

    @property
    def seconds(self) -> float:
        """How long that lasted."""
        return self.started - self.ended

    @property
    def steps(self) -> tuple[float, float, float] | None:
        """The parts of it: until the lock was released, until the next run had it, until that run's task started.

        The first and the last are Airflow's, to schedule `release` and the task.
        """
        if self.giver.released is None or self.taker.acquired is None:
            return None
        return (
            self.giver.released - self.ended,
            self.taker.acquired - self.giver.released,
            self.started - self.taker.acquired,
        )

    @property
    def crosses(self) -> bool:
        """Whether the lock went from one deployment to the other."""
        return self.giver.deployment != self.taker.deployment


@dataclass(frozen=True, slots=True)
class Spread:
    """How long something took, over all the times that it happened."""

    what: str
    median: float
    longest: float

    @classmethod
    def of(cls, what: str, seconds: Sequence[float]) -> Self:
        """From at least one duration."""
        return cls(what, median(seconds), max(seconds))


@dataclass(frozen=True, slots=True)
class Claim:
    """One sentence of the verdict: what is claimed, what was found, and whether that is it.

    `holds` is None for what is reported and not promised.
    """

    text: str
    found: str
    holds: bool | None

    @property
    def mark(self) -> str:
        """A sign to put before it."""
        return "·" if self.holds is None else "✓" if self.holds else "✗"


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that is known when the runs are done."""

    turns: Sequence[Turn]
    """In the order in which they came about; those that never did come last."""
    sections: Sequence[Section]
    runs: Sequence[Run]
    lock_tasks: Sequence[TaskInstance]
    needs_worker: bool = False
    """Whether this Airflow can start no task in the triggerer (3.1 and 3.2)."""
    slot_seconds: float = 0.0
    """How long the lock tasks have occupied worker slots, all of them together."""

    @property
    def handovers(self) -> list[Handover]:
        """From each turn to the next."""
        return [
            Handover(giver, taker, giver.section.end, taker.section.start)
            for giver, taker in pairwise(self.turns)
            if giver.section and taker.section and isfinite(giver.section.end)
        ]

    @property
    def spreads(self) -> list[Spread]:
        """How long the hand-overs took, as a whole and step by step."""
        handovers = self.handovers
        steps = [each.steps for each in handovers if each.steps]
        if not steps:
            return []
        releasing, passing, starting = zip(*steps, strict=True)
        return [
            Spread.of(
                "from one run's last task to the next run's first", [each.seconds for each in handovers]
            ),
            Spread.of("until Airflow has released the lock", releasing),
            Spread.of("until the next run has it", passing),
            Spread.of("until Airflow has started its first task", starting),
        ]

    @property
    def verdict(self) -> list[Claim]:
        """What the lock promises, against what was seen."""
        succeeded = sum(run.state == "success" for run in self.runs)
        complete = sum(isfinite(section.end) and len(section.work) == 2 for section in self.sections)
        overlaps = len(ledger.overlaps(self.sections))
        green = sum(ti.state == "success" for ti in self.lock_tasks)
        tokens = [token for section in self.sections for token in section.tokens]
        return [
            Claim("every run succeeded", f"{succeeded} of {len(self.runs)}", succeeded == len(self.runs)),
            Claim(
                "every run had its critical section",
                f"{complete} of {len(self.runs)}",
                complete == len(self.sections) == len(self.runs),
            ),
            Claim("no two critical sections overlapped", f"{overlaps} overlaps", overlaps == 0),
            Claim(
                "every task of the lock succeeded",
                f"{green} of {len(self.lock_tasks)}",
                bool(self.lock_tasks) and green == len(self.lock_tasks),
            ),
            self._worker_claim,
            Claim(
                "fencing tokens grew with every turn",
                f"{len(set(tokens))} tokens in {len(self.sections)} turns",
                bool(tokens) and ledger.tokens_grow(self.sections),
            ),
        ]

    @property
    def _worker_claim(self) -> Claim:
        """What the lock itself needed of the workers."""
        on_worker = [ti for ti in self.lock_tasks if ti.pid is not None]
        found = f"{len(on_worker)} of {len(self.lock_tasks)} tasks had a process"
        if not self.needs_worker:
            text = "waiting, heartbeats and releasing used no worker slot"
            return Claim(text, found, bool(self.lock_tasks) and not on_worker)
        per_run = self.slot_seconds / max(1, len(self.runs))
        text = "acquire, heartbeat and release start on a worker in this Airflow, and wait in the triggerer"
        return Claim(text, f"{per_run:.1f} s of a worker slot per run; {found}", None)

    @property
    def holds(self) -> bool:
        """Whether everything that is promised was seen."""
        return all(claim.holds is not False for claim in self.verdict)


def outcome(
    entries: Collection[ledger.Entry],
    runs: Mapping[str, Sequence[Run]],
    task_instances: Mapping[str, Sequence[TaskInstance]],
    *,
    needs_worker: bool = False,
    processes: Collection[tuple[str, float]] = (),
) -> Outcome:
    """Put together what the ledger says and what each deployment, by its name, says of its runs and tasks.

    :param needs_worker: see `Outcome`.
    :param processes: task instance id, and for how many seconds a process of it occupied a worker slot.
    """
    sections = ledger.sections(entries)
    section_of = {(section.deployment, section.run): section for section in sections}
    ended = {
        (deployment, ti.run_id, ti.task_id): ti.end.timestamp()
        for deployment, instances in task_instances.items()
        for ti in instances
        if ti.state == "success" and ti.end
    }
    turns = [
        Turn(
            deployment,
            run.run_id,
            triggered=run.queued_at.timestamp() if run.queued_at else 0.0,
            acquired=ended.get((deployment, run.run_id, "lock.acquire")),
            section=section_of.get((deployment, run.run_id)),
            released=ended.get((deployment, run.run_id, "lock.release")),
        )
        for deployment, its_runs in runs.items()
        for run in its_runs
    ]
    turns.sort(
        key=lambda turn: (turn.section is None, turn.section.start if turn.section else turn.triggered)
    )
    lock_tasks = [ti for its in task_instances.values() for ti in its if ti.task_id in LOCK_TASKS]
    return Outcome(
        turns=turns,
        sections=sections,
        runs=[run for its_runs in runs.values() for run in its_runs],
        lock_tasks=lock_tasks,
        needs_worker=needs_worker,
        slot_seconds=sum(seconds for ti, seconds in processes if ti in {each.id for each in lock_tasks}),
    )
