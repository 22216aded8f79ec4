"""The logs of all processes put together, with what happened to them and what the records looked like.

What a process's log says (`actors` writes it):

| | |
|---|---|
| ``wants`` | an attempt begins: `stay` names it; `key`, `slots`, `capacity` |
| ``granted``, ``entered`` | a belief begins: `stay`, the `lease`, and `until` when it counts on it |
| ``counts`` | it was renewed: `until` |
| ``gives_back``, ``hands_over``, ``leaves``, ``lost``, ``failed`` | it counts on nothing any more |
| ``breaks``, ``broke`` | it takes away `lease_id` |
| ``error`` | something that is no typed error of the package |
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

from proof.chaos.log import Event
from proof.chaos.records import Record

_ENDS = ("gives_back", "hands_over", "leaves", "lost", "failed")


@dataclass(frozen=True)
class Incident:
    """A disaster that happened: to a process, a link, or everywhere."""

    kind: str
    begin: float
    end: float
    process: int = 0
    link: str = ""
    everywhere: bool = False


@dataclass(frozen=True)
class Belief:
    """For so long a process counted on a lease, and would have told its task to go on.

    :ivar asked: when the write that granted it was about to be sent.
    """

    who: str
    process: int
    key: str
    lease_id: str
    slots: int
    capacity: int
    token: int
    inside: bool
    asked: float
    begin: float
    end: float
    reclaimed: Sequence[str] = ()


@dataclass(frozen=True)
class Attempt:
    """For so long somebody waited, until it was granted or given up."""

    who: str
    process: int
    key: str
    slots: int
    capacity: int
    begin: float
    end: float
    granted: bool


@dataclass
class Evidence:
    """Of one run.

    :ivar calm: when nothing went wrong any more.
    :ivar dated: the engine sends ``Date`` headers.
    :ivar links: each process's way to the engine.
    :ivar complaints: what the processes wrote to their standard error.
    :ivar failures: what the arena has found to be wrong.
    """

    engine: str
    began: float
    calm: float
    ended: float
    dated: bool
    events: Sequence[Event]
    incidents: Sequence[Incident]
    histories: Mapping[str, Sequence[Record]]
    links: Mapping[str, str]
    complaints: Mapping[str, str] = field(default_factory=dict)
    failures: Sequence[str] = ()

    @cached_property
    def deaths(self) -> dict[int, float]:
        """Killed processes, and when they were dead."""
        return {incident.process: incident.end for incident in self.incidents if incident.kind == "SIGKILL"}

    @cached_property
    def ends(self) -> dict[int, float]:
        """When each process was over: killed, or ended by itself."""
        return {event.process: event.at for event in self.events if event.what == "ends"} | self.deaths

    @cached_property
    def beliefs(self) -> list[Belief]:
        """All beliefs, in the order in which they began."""
        open_: dict[tuple[int, str], list[Event]] = {}
        beliefs = []
        for event in self.events:
            stay = (event.process, str(event.more.get("stay")))
            if event.what in ("granted", "entered"):
                open_[stay] = [event]
            elif event.what == "counts" and stay in open_:
                open_[stay].append(event)
            elif event.what in _ENDS and stay in open_:
                beliefs.append(self._belief(open_.pop(stay), event.at))
        beliefs += [self._belief(events, float("inf")) for events in open_.values()]
        return sorted(beliefs, key=lambda belief: belief.begin)

    def _belief(self, events: list[Event], end: float) -> Belief:
        first = events[0]
        lease: Mapping[str, Any] = first.more["lease"]
        until = max(event.more["until"] for event in events)
        return Belief(
            who=first.who,
            process=first.process,
            key=lease["key"],
            lease_id=lease["lease_id"],
            slots=lease["slots"],
            capacity=lease["capacity"],
            token=lease["token"],
            inside=first.what == "entered",
            asked=first.more["until"] - 0.9 * lease["lease_ms"] / 1000,
            begin=first.at,
            end=min(until, end, self.ends.get(first.process, float("inf"))),
            reclaimed=first.more["reclaimed"],
        )

    @cached_property
    def attempts(self) -> list[Attempt]:
        """All attempts to acquire."""
        open_: dict[tuple[int, str], Event] = {}
        attempts = []
        for event in self.events:
            stay = (event.process, str(event.more.get("stay")))
            if event.what == "wants":
                open_[stay] = event
            elif event.what in ("granted", *_ENDS) and stay in open_:
                attempts.append(self._attempt(open_.pop(stay), event.at, event.what == "granted"))
        attempts += [
            self._attempt(event, self.ends.get(event.process, self.ended), granted=False)
            for event in open_.values()
        ]
        return attempts

    def _attempt(self, wants: Event, end: float, granted: bool) -> Attempt:
        more = wants.more
        return Attempt(
            wants.who, wants.process, more["key"], more["slots"], more["capacity"], wants.at, end, granted
        )

    def keep(self, folder: Path) -> None:
        """Write all of it there: what the processes say, what happened and what the records were in one file, by time,
        and each process's complaints in one of its own."""
        folder.mkdir(parents=True, exist_ok=True)
        lines = [(event.at, vars(event)) for event in self.events]
        lines += [(incident.begin, {"incident": vars(incident)}) for incident in self.incidents]
        for history in self.histories.values():
            lines += [(record.at, {"record": asdict(record)}) for record in history]
        lines.sort(key=itemgetter(0))
        (folder / "all.jsonl").write_text(
            "".join(f"{json.dumps({'at': round(at, 3)} | line)}\n" for at, line in lines)
        )
        for name, text in self.complaints.items():
            (folder / name).write_text(text)

    def calm_stretches(self, who: str, process: int, begin: float, end: float) -> list[tuple[float, float]]:
        """The parts of a time in which nothing happened to this process, its link or the engine."""
        link = self.links[who]
        stretches = []
        for incident in sorted(self.incidents, key=lambda incident: incident.begin):
            if not (incident.everywhere or incident.link == link or incident.process == process):
                continue
            if incident.begin > begin:
                stretches.append((begin, min(end, incident.begin)))
            begin = max(begin, incident.end)
            if begin >= end:
                break
        if begin < end:
            stretches.append((begin, end))
        return [stretch for stretch in stretches if stretch[0] < stretch[1]]
