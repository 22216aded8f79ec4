"""Who was inside, from what the guarded processes themselves wrote, and whether the lock kept them apart.

Every 50 ms a guarded process appends a line to the ledger: the time, who it is, under which lease and fencing token,
and for how many seconds it may still count on that lease (`dags/guarded.py`). Here the lines of a process under a lease
become a *stay*, and `faults` says what must not be in the stays of one lock.

All lines count, also those of a process that has just learned that its lease is lost. There are two exceptions, both of
them promised nowhere (`docs/protocol.md`, "What is not promised"): a lease that somebody has *broken* owes nothing from
the break to its holder's next heartbeat, and a process that was *paused* may write a line more before it notices.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

#: Seconds in which a process must have stopped that has learned, or could have, that its lease is lost: the 2 s that
#: `on_kill` is given, and what a busy machine needs to get from one thread to the other.
STOPPED_WITHIN = 4.0


@dataclass(frozen=True)
class Stay:
    """One process under one lease.

    :ivar first: the time of its first line, in seconds since the epoch.
    :ivar last: the time of its last line.
    :ivar believed: the last time that it could still count on the lease; before `first` if it never could.
    """

    key: str
    lease_id: str
    token: int
    pid: int
    run_id: str
    first: float
    last: float
    believed: float
    deployment: str = ""
    dag_id: str = ""
    task_id: str = ""

    def __str__(self) -> str:
        return (
            f"{self.deployment}/{self.dag_id}/{self.run_id}/{self.task_id}, pid {self.pid}, lease {self.lease_id}, "
            f"token {self.token}: {self.first:.2f} to {self.last:.2f}"
            + ("" if self.believed == self.last else f", counting on the lease until {self.believed:.2f}")
        )


class Ledger:
    """The stays in a file that is still being written, read on from where the last reading ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = 0
        self._stays: dict[tuple[str, int, str], Stay] = {}

    def stays(self, key: str | None = None) -> list[Stay]:
        """All stays, or those in one lock, in the order of their beginnings."""
        for line in self._new_lines():
            self._note(json.loads(line))
        stays = (stay for stay in self._stays.values() if key in (None, stay.key))
        return sorted(stays, key=lambda stay: stay.first)

    def lines(self, stay: Stay) -> list[str]:
        """What a process wrote."""
        lines = self.path.read_text().splitlines()
        return [line for line in lines if stay.lease_id in line and f'"pid": {stay.pid},' in line]

    def _new_lines(self) -> list[bytes]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._position)
            new, newline, _ = file.read().rpartition(b"\n")
        self._position += len(new) + len(newline)
        return new.splitlines()

    def _note(self, line: Mapping[str, Any]) -> None:
        at: float = line["at"]
        believes = line.get("remaining", 1.0) > 0
        name = line["key"], line["pid"], line["lease_id"]
        stay = self._stays.get(name)
        if stay is None:
            stay = Stay(
                key=line["key"],
                lease_id=line["lease_id"],
                token=line["token"],
                pid=line["pid"],
                run_id=line["run_id"],
                first=at,
                last=at,
                believed=at if believes else float("-inf"),
                deployment=line.get("deployment", ""),
                dag_id=line.get("dag_id", ""),
                task_id=line.get("task_id", ""),
            )
        self._stays[name] = replace(stay, last=at, believed=at if believes else stay.believed)


@dataclass
class Excuses:
    """When exclusion is not owed.

    :ivar broken: lease id → when it was taken away, and from when on its processes must know.
    :ivar resumed: process id → when it went on after pauses.
    """

    broken: dict[str, tuple[float, float]] = field(default_factory=dict)
    resumed: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def resumed_at(self, stay: Stay) -> float | None:
        """When the stay's process last went on after a pause, if that was after it could count on its lease."""
        times = [at for at in self.resumed.get(stay.pid, ()) if stay.believed <= at <= stay.last]
        return max(times, default=None)


@dataclass(frozen=True)
class Fault:
    """What must not be, and in whose stays it was seen."""

    what: str
    stays: tuple[Stay, ...]

    def __str__(self) -> str:
        return "\n".join([self.what, *(f"  {stay}" for stay in self.stays)])


def faults(stays: Sequence[Stay], excuses: Excuses | None = None) -> Iterator[Fault]:
    """What is wrong with the stays in one lock, given in the order of their beginnings."""
    excuses = excuses or Excuses()
    inside: list[tuple[float, Stay]] = []  # with the time up to which nobody else may be
    highest: Stay | None = None
    for stay in stays:
        yield from _overstayed(stay, excuses)
        end = owed_until(stay, excuses)
        if end < stay.first:  # it never believed in its lease, and is excused
            continue
        inside = [(until, other) for until, other in inside if until >= stay.first]
        for _, other in inside:
            if other.lease_id != stay.lease_id:
                yield Fault("two inside at once", (other, stay))
        inside.append((end, stay))
        if highest is not None and (
            stay.token < highest.token or (stay.token == highest.token and stay.lease_id != highest.lease_id)
        ):
            yield Fault("a fencing token that did not grow", (highest, stay))
        else:
            highest = stay


def owed_until(stay: Stay, excuses: Excuses) -> float:
    """Up to when nobody else may be inside."""
    if stay.lease_id in excuses.broken:
        return min(stay.last, excuses.broken[stay.lease_id][0])
    return stay.last if excuses.resumed_at(stay) is None else stay.believed


def _overstayed(stay: Stay, excuses: Excuses) -> Iterator[Fault]:
    """Whether it went on for too long after its lease was lost."""
    _, noticed = excuses.broken.get(stay.lease_id, (0.0, float("inf")))
    if stay.believed > noticed:
        yield Fault(
            f"still counted on its lease {stay.believed - noticed:.2f} s too long after a break", (stay,)
        )
    since = max(stay.believed, stay.first, excuses.resumed_at(stay) or 0.0)
    if stay.last - since > STOPPED_WITHIN:
        yield Fault(f"worked on for {stay.last - since:.2f} s after its lease was lost", (stay,))
