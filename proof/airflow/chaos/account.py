"""What came of it: how long hand-overs took after which trouble, how the runs ended, and what must not have been."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median

from deployments.airflow_client import FINISHED
from proof.airflow.chaos.scene import Started, Trouble
from proof.airflow.stays import Excuses, Stay, owed_until

#: A run that was triggered or cleared so long before a hand-over surely waited for it, in seconds.
WAITING_AFTER = 10.0
SEVERAL = "several of these"


@dataclass(frozen=True)
class HandOver:
    """From the last sign of one lease's processes to the first of the next one's.

    :ivar left: up to when the former was inside.
    :ivar why: what became of the former, and what happened to all meanwhile.
    """

    why: tuple[str, ...]
    left: float
    former: Stay
    next: Stay

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.next.first - self.left

    @property
    def after(self) -> str:
        """Under which kind it counts."""
        return self.why[0] if len(self.why) == 1 else SEVERAL

    def __str__(self) -> str:
        return f"{self.seconds:.1f} s after {' and '.join(self.why)}\n    {self.former}\n    {self.next}"


def hand_overs(
    stays: Iterable[Stay],
    runs: Mapping[tuple[str, str, str], Started],
    troubles: Collection[Trouble],
    excuses: Excuses,
) -> list[HandOver]:
    """Those between runs of which the later one surely waited already, in all locks."""
    found = []
    in_order = sorted(stays, key=lambda stay: (stay.key, stay.first))
    for _, of_key in groupby(in_order, key=lambda stay: stay.key):
        by_lease: dict[str, list[Stay]] = defaultdict(list)
        for stay in of_key:
            by_lease[stay.lease_id].append(stay)
        for former, later in pairwise(by_lease.values()):
            last = max(former, key=lambda stay: owed_until(stay, excuses))
            left = owed_until(last, excuses)
            run, next_run = runs.get(_run(last)), runs.get(_run(later[0]))
            if run and next_run and _wanted(next_run, later[0]) + WAITING_AFTER <= left:
                why = _why(last, later[0], left, run, troubles)
                found.append(HandOver(why, left, last, later[0]))
    return found


def _wanted(run: Started, stay: Stay) -> float:
    """Since when it wanted the lock, when it got in."""
    return max((since for since in run.wants if since <= stay.first), default=stay.first)


def _run(stay: Stay) -> tuple[str, str, str]:
    return stay.deployment, stay.dag_id, stay.run_id


def _why(
    former: Stay, later: Stay, left: float, run: Started, troubles: Collection[Trouble]
) -> tuple[str, ...]:
    """What happened to the former, or to what both need, until the later one entered."""
    places = (None, former.deployment, later.deployment)
    kinds = {
        trouble.kind
        for trouble in troubles
        if trouble.lease_id == former.lease_id
        or (
            trouble.lease_id is None
            and trouble.until > trouble.at
            and trouble.at < later.first
            and trouble.until > left
            and trouble.deployment in places
        )
    }
    return tuple(sorted(kinds)) or (run.ending,)


def unfinished(states: Mapping[str, str]) -> list[str]:
    """The runs without a final state, by name."""
    return [name for name, state in states.items() if state not in FINISHED]


@dataclass
class Account:
    """The figures of one play."""

    seed: int
    minutes: float
    deployments: int
    locks: int
    airflow: str
    runs: Counter[str] = field(default_factory=Counter)
    stays: int = 0
    leases: int = 0
    troubles: Counter[str] = field(default_factory=Counter)
    hand_overs: Sequence[HandOver] = ()
    overtime: float = 0.0
    """The longest that a process went on after its lease was lost, other than by being paused."""
    settled: float = 0.0
    """Seconds from the end of all trouble to the end of the last run."""
    violations: list[str] = field(default_factory=list)

    def by_kind(self) -> dict[str, list[float]]:
        """Seconds of the hand-overs after each kind of trouble, the most frequent first."""
        seconds: dict[str, list[float]] = defaultdict(list)
        for each in self.hand_overs:
            seconds[each.after].append(each.seconds)
        return dict(sorted(seconds.items(), key=lambda item: -len(item[1])))

    def table(self) -> str:
        """For people."""
        states = ", ".join(f"{count} {state}" for state, count in sorted(self.runs.items()))
        lines = [
            "",
            f"{self.minutes:g} minutes of trouble, seed {self.seed}: {self.deployments} deployment(s) of Airflow "
            f"{self.airflow}, {self.locks} locks",
            f"  runs           {self.runs.total()}: {states}",
            f"  settled        {self.settled:.0f} s after the trouble, when the last run ended",
            f"  stays inside   {self.stays}, under {self.leases} leases",
            f"  overtime       {self.overtime:.2f} s at most, from the loss of a lease to a process's last sign",
            "",
            f"  {'hand-overs after':50} {'times':>6} {'median':>8} {'longest':>8}",
        ]
        lines += [
            f"  {kind:50} {len(took):6} {median(took):6.1f} s {max(took):6.1f} s"
            for kind, took in self.by_kind().items()
        ]
        lines += [f"  {'all':50} {len(self.hand_overs):6}", "", f"  {'troubles':50} {'times':>6}"]
        lines += [f"  {kind:50} {count:6}" for kind, count in self.troubles.most_common()]
        lines += [f"  {'all':50} {self.troubles.total():6}", ""]
        lines.append(f"  violations     {len(self.violations) or 'none'}")
        return "\n".join(lines)

    def longest(self, count: int = 5) -> str:
        """The longest hand-overs, in detail."""
        longest = sorted(self.hand_overs, key=lambda each: -each.seconds)[:count]
        return "\n".join(["", "The longest hand-overs:", *(f"  {each}" for each in longest)])

    def write(self, file: Path) -> None:
        """The same for programs, as JSON."""
        figures = {
            "seed": self.seed,
            "minutes": self.minutes,
            "deployments": self.deployments,
            "locks": self.locks,
            "airflow": self.airflow,
            "runs": dict(self.runs),
            "settled_seconds": round(self.settled, 1),
            "stays": self.stays,
            "leases": self.leases,
            "overtime_seconds": round(self.overtime, 2),
            "hand_overs": {
                kind: {
                    "times": len(took),
                    "median_seconds": round(median(took), 1),
                    "longest_seconds": round(max(took), 1),
                }
                for kind, took in self.by_kind().items()
            },
            "troubles": dict(self.troubles.most_common()),
            "violations": self.violations,
        }
        file.write_text(json.dumps(figures, indent=2) + "\n")
