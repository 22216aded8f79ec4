"""The ledger: what the guarded tasks of both deployments have written down about themselves, in one file.

It is the witness of the demo. Whether two were at work at once is decided by these lines, which the tasks'
own processes wrote, and not by what Airflow or the lock believe.
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
    """One line: a task has started or ended, at this time (seconds since the epoch)."""

    time: float
    event: Literal["start", "end"]
    deployment: str
    run: str
    task: str
    pid: int
    token: int


@dataclass(frozen=True, slots=True)
class Work:
    """One process of a guarded task, from its start to its end; without an end it goes on for ever."""

    task: str
    pid: int
    token: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Section:
    """A critical section: all that one run did under the lock, in order."""

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
        """The fencing tokens that its tasks saw: a single one, unless it lost the lock on the way."""
        return tuple(sorted({work.token for work in self.work}))


def read(ledger: Path) -> list[Entry]:
    """The lines of a ledger, in the order of their writing. One that has not been begun is empty."""
    if not ledger.exists():
        return []
    return [Entry(**json.loads(line)) for line in ledger.read_text().splitlines()]


def sections(entries: Iterable[Entry]) -> list[Section]:
    """The critical sections, in the order of their start."""
    by_run = attrgetter("deployment", "run")
    # Sorting keeps the order of the lines within a run.
    runs = groupby(sorted(entries, key=by_run), key=by_run)
    found = [Section(deployment, run, _work(list(lines))) for (deployment, run), lines in runs]
    return sorted(found, key=attrgetter("start"))


def overlaps(of: Iterable[Section]) -> list[tuple[Section, Section]]:
    """The pairs of sections that were inside at the same moment."""
    in_order = sorted(of, key=attrgetter("start"))
    return [
        (one, other) for i, one in enumerate(in_order) for other in in_order[i + 1 :] if other.start < one.end
    ]


def tokens_grow(of: Iterable[Section]) -> bool:
    """Whether every section had one fencing token, and each a higher one than the section before it."""
    tokens = [section.tokens for section in of]
    return all(len(each) == 1 for each in tokens) and all(one < other for one, other in pairwise(tokens))


def _work(entries: list[Entry]) -> tuple[Work, ...]:
    ends = {(entry.task, entry.pid): entry.time for entry in entries if entry.event == "end"}
    return tuple(
        Work(entry.task, entry.pid, entry.token, entry.time, ends.get((entry.task, entry.pid), inf))
        for entry in entries
        if entry.event == "start"
    )
