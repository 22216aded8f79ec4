"""The ledger: one file, to which the guarded tasks of both deployments append a line when they start and end.

The demo decides by these lines whether two runs worked at the same time. The processes of the tasks write
them, so the result depends neither on Airflow's records nor on the lock's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import inf
from operator import attrgetter
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the ledger: the start or the end of a task. `time` is in seconds since the epoch."""

    time: float
    event: Literal["start", "end"]
    deployment: str
    run: str
    task: str
    pid: int
    token: int


@dataclass(frozen=True, slots=True)
class Work:
    """One process of a guarded task, from start to end. `end` is infinite if the process recorded none."""

    task: str
    pid: int
    token: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Section:
    """The critical section of one run: its work under the lock, in the order of the ledger."""

    deployment: str
    run: str
    work: tuple[Work, ...]

    @property
    def start(self) -> float:
        """When the first task started."""
        return self.work[0].start

    @property
    def end(self) -> float:
        """When the last task ended."""
        return max(work.end for work in self.work)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The different fencing tokens of the tasks: more than one only if the run lost the lock."""
        return tuple(sorted({work.token for work in self.work}))


def read(ledger: Path) -> list[Entry]:
    """Read the lines of a ledger, in the order in which they were written. A missing file has no lines."""
    if not ledger.exists():
        return []
    return [Entry(**json.loads(line)) for line in ledger.read_text().splitlines()]


def sections(entries: Iterable[Entry]) -> list[Section]:
    """Group the entries into critical sections, one per run, sorted by their start."""
    by_run = attrgetter("deployment", "run")
    # sorted() is stable, so the lines of a run keep their order.
    runs = groupby(sorted(entries, key=by_run), key=by_run)
    found = [Section(deployment, run, _work(list(lines))) for (deployment, run), lines in runs]
    return sorted(found, key=attrgetter("start"))


def overlaps(of: Iterable[Section]) -> list[tuple[Section, Section]]:
    """Return each pair of sections that overlap in time."""
    in_order = sorted(of, key=attrgetter("start"))
    return [
        (one, other) for i, one in enumerate(in_order) for other in in_order[i + 1 :] if other.start < one.end
    ]


def tokens_grow(of: Iterable[Section]) -> bool:
    """Whether each section has exactly one fencing token, and a larger one than the section before it."""
    tokens = [section.tokens for section in of]
    return all(len(each) == 1 for each in tokens) and all(one < other for one, other in pairwise(tokens))


def _work(entries: list[Entry]) -> tuple[Work, ...]:
    """Pair the starts with the ends of one run's entries, by task and process."""
    ends = {(entry.task, entry.pid): entry.time for entry in entries if entry.event == "end"}
    return tuple(
        Work(entry.task, entry.pid, entry.token, entry.time, ends.get((entry.task, entry.pid), inf))
        for entry in entries
        if entry.event == "start"
    )
