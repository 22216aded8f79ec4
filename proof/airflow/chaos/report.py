"""The figures of a chaos run: hand-overs, counts and violations, as text and as JSON."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median

from deployments.airflow_client import FINISHED
from proof.airflow.chaos.state import StartedRun, Trouble
from proof.airflow.lease_uses import Exemptions, LeaseUse, exclusive_until

#: If a DAG run was started or cleared this many seconds before a hand-over, it certainly waited for the lock.
WAITING_AFTER = 10.0
SEVERAL = "several of these"


@dataclass(frozen=True)
class HandOver:
    """The time from the end of one lease's processes to the start of the next lease's.

    :ivar causes: kinds of the troubles of the previous lease, and of those that affected both runs meanwhile.
        If there were none, how the previous run ended.
    :ivar begin: until when the previous lease excluded others, in seconds since the epoch.
    :ivar previous: the last use of the previous lease.
    :ivar following: the first use of the following lease.
    """

    causes: tuple[str, ...]
    begin: float
    previous: LeaseUse
    following: LeaseUse

    @property
    def seconds(self) -> float:
        """Duration of the hand-over."""
        return self.following.first - self.begin

    @property
    def after(self) -> str:
        """The kind under which the hand-over counts."""
        return self.causes[0] if len(self.causes) == 1 else SEVERAL

    def __str__(self) -> str:
        causes = " and ".join(self.causes)
        return f"{self.seconds:.1f} s after {causes}\n    {self.previous}\n    {self.following}"


def hand_overs(
    uses: Iterable[LeaseUse],
    runs: Mapping[tuple[str, str, str], StartedRun],
    troubles: Collection[Trouble],
    exemptions: Exemptions,
) -> list[HandOver]:
    """Return the hand-overs of all locks in which the following run certainly waited already."""
    found = []
    in_order = sorted(uses, key=lambda use: (use.key, use.first))
    for _, of_key in groupby(in_order, key=lambda use: use.key):
        by_lease: dict[str, list[LeaseUse]] = defaultdict(list)
        for use in of_key:
            by_lease[use.lease_id].append(use)
        for of_previous, of_following in pairwise(by_lease.values()):
            previous = max(of_previous, key=lambda use: exclusive_until(use, exemptions))
            following = of_following[0]
            begin = exclusive_until(previous, exemptions)
            run, following_run = runs.get(_run_of(previous)), runs.get(_run_of(following))
            if run is None or following_run is None:
                continue
            if _wanted_at(following_run, following) + WAITING_AFTER <= begin:
                causes = _causes(previous, following, begin, run, troubles)
                found.append(HandOver(causes, begin, previous, following))
    return found


def _wanted_at(run: StartedRun, use: LeaseUse) -> float:
    """Return when the run began to wait for the lease of this use."""
    return max((at for at in run.wanted_at if at <= use.first), default=use.first)


def _run_of(use: LeaseUse) -> tuple[str, str, str]:
    return use.deployment, use.dag_id, use.run_id


def _causes(
    previous: LeaseUse,
    following: LeaseUse,
    begin: float,
    run: StartedRun,
    troubles: Collection[Trouble],
) -> tuple[str, ...]:
    """Return the `HandOver.causes` of a hand-over. `run` is the run of the previous lease."""
    deployments = (None, previous.deployment, following.deployment)
    kinds = {
        trouble.kind
        for trouble in troubles
        if trouble.lease_id == previous.lease_id
        or (
            trouble.lease_id is None
            and trouble.until > trouble.at
            and trouble.at < following.first
            and trouble.until > begin
            and trouble.deployment in deployments
        )
    }
    return tuple(sorted(kinds)) or (run.ending,)


def unfinished(states: Mapping[str, str]) -> list[str]:
    """Return the names of the DAG runs whose state is not final.

    :param states: the state of each DAG run, by name.
    """
    return [name for name, state in states.items() if state not in FINISHED]


@dataclass
class Report:
    """The figures of one chaos run.

    :ivar locks: number of locks.
    :ivar airflow: version of Airflow.
    :ivar runs: number of DAG runs in each final state.
    :ivar uses: number of lease uses.
    :ivar leases: number of leases that were used.
    :ivar troubles: number of troubles of each kind.
    :ivar overtime: longest time for which a process worked after its lease was lost, without pauses, in
        seconds.
    :ivar settled: seconds from the end of the last trouble to the end of the last DAG run.
    """

    seed: int
    minutes: float
    deployments: int
    locks: int
    airflow: str
    runs: Counter[str] = field(default_factory=Counter)
    uses: int = 0
    leases: int = 0
    troubles: Counter[str] = field(default_factory=Counter)
    hand_overs: Sequence[HandOver] = ()
    overtime: float = 0.0
    settled: float = 0.0
    violations: list[str] = field(default_factory=list)

    def seconds_by_kind(self) -> dict[str, list[float]]:
        """Return the durations of the hand-overs after each kind of trouble, the most frequent kind first."""
        seconds: dict[str, list[float]] = defaultdict(list)
        for each in self.hand_overs:
            seconds[each.after].append(each.seconds)
        return dict(sorted(seconds.items(), key=lambda item: -len(item[1])))

    def as_text(self) -> str:
        """Return the figures as a table for people to read."""
        states = ", ".join(f"{count} {state}" for state, count in sorted(self.runs.items()))
        lines = [
            "",
            f"{self.minutes:g} minutes of trouble, seed {self.seed}: "
            f"{self.deployments} deployment(s) of Airflow {self.airflow}, {self.locks} locks",
            f"  runs           {self.runs.total()}: {states}",
            f"  settled        {self.settled:.0f} s after the last trouble, when the last run ended",
            f"  inside         {self.uses} processes, under {self.leases} leases",
            f"  overtime       {self.overtime:.2f} s at most, from the loss of a lease to the last line",
            "",
            f"  {'hand-overs after':50} {'times':>6} {'median':>8} {'longest':>8}",
        ]
        lines += [
            f"  {kind:50} {len(took):6} {median(took):6.1f} s {max(took):6.1f} s"
            for kind, took in self.seconds_by_kind().items()
        ]
        lines += [f"  {'all':50} {len(self.hand_overs):6}", "", f"  {'troubles':50} {'times':>6}"]
        lines += [f"  {kind:50} {count:6}" for kind, count in self.troubles.most_common()]
        lines += [f"  {'all':50} {self.troubles.total():6}", ""]
        lines.append(f"  violations     {len(self.violations) or 'none'}")
        return "\n".join(lines)

    def longest_as_text(self, count: int = 5) -> str:
        """Return details of the longest hand-overs."""
        longest = sorted(self.hand_overs, key=lambda each: -each.seconds)[:count]
        return "\n".join(["", "The longest hand-overs:", *(f"  {each}" for each in longest)])

    def write(self, file: Path) -> None:
        """Write the figures into a file, as JSON."""
        figures = {
            "seed": self.seed,
            "minutes": self.minutes,
            "deployments": self.deployments,
            "locks": self.locks,
            "airflow": self.airflow,
            "runs": dict(self.runs),
            "settled_seconds": round(self.settled, 1),
            "stays": self.uses,
            "leases": self.leases,
            "overtime_seconds": round(self.overtime, 2),
            "hand_overs": {
                kind: {
                    "times": len(took),
                    "median_seconds": round(median(took), 1),
                    "longest_seconds": round(max(took), 1),
                }
                for kind, took in self.seconds_by_kind().items()
            },
            "troubles": dict(self.troubles.most_common()),
            "violations": self.violations,
        }
        file.write_text(json.dumps(figures, indent=2) + "\n")
