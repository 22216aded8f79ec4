"""The evidence of a run: the logs of all processes, the disasters, and the versions of the lock records.

Events in the logs, with their attributes (`actors` writes them):

| | |
|---|---|
| ``requested`` | an attempt to acquire begins: `use` is its id; `key`, `slots`, `capacity` |
| ``granted``, ``entered`` | the process counts on a `lease` from now on, until `until`; `use`, `reclaimed` |
| ``renewed`` | it counts on the lease until the new time `until` |
| ``releasing``, ``handed_over``, ``leaving``, ``lost``, ``failed`` | it no longer counts on the lease |
| ``breaking``, ``broken`` | it breaks the lease `lease_id`; it has broken it |
| ``error`` | it raised an exception that is no typed error of the package: `trace` |
| ``exits`` | it ends by itself |

``released`` and ``release_outcome`` are only for people who read the logs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

from proof.chaos.exchanges import Exchange
from proof.chaos.log import Event
from proof.chaos.records import Record
from proof.chaos.starvation import Lag

# Events after which a process no longer counts on its lease.
_ENDS = ("releasing", "handed_over", "leaving", "lost", "failed")


@dataclass(frozen=True)
class Incident:
    """A disaster as it happened to a process, a link, or everywhere. Times are monotonic seconds."""

    kind: str
    begin: float
    end: float
    process: int = 0
    link: str = ""
    everywhere: bool = False


@dataclass(frozen=True)
class LeaseUse:
    """The time in which one process counted on a lease. Times are monotonic seconds.

    :ivar role: name of the process's role.
    :ivar inside: whether the process entered the lease of another process.
    :ivar asked: when the write that granted the lease was about to be sent.
    :ivar reclaimed: ids of the leases that the grant reclaimed.
    """

    role: str
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
    """One attempt to acquire a lock, from its begin to its end. Times are monotonic seconds."""

    role: str
    process: int
    key: str
    slots: int
    capacity: int
    begin: float
    end: float
    granted: bool


@dataclass
class Evidence:
    """The evidence of one run. Times are monotonic seconds.

    :ivar engine: name of the engine.
    :ivar calm: when the last disaster was over.
    :ivar dated: whether the engine sends ``Date`` headers.
    :ivar events: the events of all processes, in the order of their times.
    :ivar histories: the versions of each lock's record, by key.
    :ivar links: the link of each role.
    :ivar stderr: what the processes wrote to their standard error, by file name.
    :ivar failures: checks at the end of the run that have failed.
    :ivar exchanges: the requests for the locks and their queues, in the order of the answers.
    :ivar lags: the waits of processes for a processor.
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
    stderr: Mapping[str, str] = field(default_factory=dict)
    failures: Sequence[str] = ()
    exchanges: Sequence[Exchange] = ()
    lags: Sequence[Lag] = ()

    @cached_property
    def deaths(self) -> dict[int, float]:
        """When each killed process was dead, by its number."""
        return {incident.process: incident.end for incident in self.incidents if incident.kind == "SIGKILL"}

    @cached_property
    def ends(self) -> dict[int, float]:
        """When each process ended, by itself or killed, by its number."""
        return {event.process: event.at for event in self.events if event.what == "exits"} | self.deaths

    @cached_property
    def uses(self) -> list[LeaseUse]:
        """All uses of leases, in the order of their begins."""
        open_: dict[tuple[int, str], list[Event]] = {}
        uses = []
        for event in self.events:
            use = (event.process, str(event.more.get("use")))
            if event.what in ("granted", "entered"):
                open_[use] = [event]
            elif event.what == "renewed" and use in open_:
                open_[use].append(event)
            elif event.what in _ENDS and use in open_:
                uses.append(self._use(open_.pop(use), event.at))
        uses += [self._use(events, float("inf")) for events in open_.values()]
        return sorted(uses, key=lambda use: use.begin)

    def _use(self, events: list[Event], end: float) -> LeaseUse:
        """Build a use from the event with which it began, and the renewals that followed."""
        first = events[0]
        lease: Mapping[str, Any] = first.more["lease"]
        until = max(event.more["until"] for event in events)
        return LeaseUse(
            role=first.role,
            process=first.process,
            key=lease["key"],
            lease_id=lease["lease_id"],
            slots=lease["slots"],
            capacity=lease["capacity"],
            token=lease["token"],
            inside=first.what == "entered",
            # A holder counts on its lease for 90 % of the duration, from the time of the stamp.
            asked=first.more["until"] - 0.9 * lease["lease_ms"] / 1000,
            begin=first.at,
            end=min(until, end, self.ends.get(first.process, float("inf"))),
            reclaimed=first.more["reclaimed"],
        )

    @cached_property
    def attempts(self) -> list[Attempt]:
        """All attempts to acquire. One without an end in the log ended with its process, or with the run."""
        open_: dict[tuple[int, str], Event] = {}
        attempts = []
        for event in self.events:
            use = (event.process, str(event.more.get("use")))
            if event.what == "requested":
                open_[use] = event
            elif event.what in ("granted", *_ENDS) and use in open_:
                attempts.append(self._attempt(open_.pop(use), event.at, event.what == "granted"))
        attempts += [
            self._attempt(event, self.ends.get(event.process, self.ended), granted=False)
            for event in open_.values()
        ]
        return attempts

    def _attempt(self, request: Event, end: float, granted: bool) -> Attempt:
        more = request.more
        return Attempt(
            request.role,
            request.process,
            more["key"],
            more["slots"],
            more["capacity"],
            request.at,
            end,
            granted,
        )

    def save(self, folder: Path) -> None:
        """Write the evidence into a folder.

        ``all.jsonl`` contains the events, incidents and records in the order of their times. Each process's
        standard error is in a file of its own.
        """
        folder.mkdir(parents=True, exist_ok=True)
        lines = [(event.at, vars(event)) for event in self.events]
        lines += [(incident.begin, {"incident": vars(incident)}) for incident in self.incidents]
        for history in self.histories.values():
            lines += [(record.at, {"record": asdict(record)}) for record in history]
        lines += [(each.at, {"exchange": asdict(each)}) for each in self.exchanges]
        lines.sort(key=itemgetter(0))
        (folder / "all.jsonl").write_text(
            "".join(f"{json.dumps({'at': round(at, 3)} | line)}\n" for at, line in lines)
        )
        for name, text in self.stderr.items():
            (folder / name).write_text(text)

    def undisturbed(self, role: str, process: int, begin: float, end: float) -> list[tuple[float, float]]:
        """Return the parts of a time span in which no incident affected the process, its link, the engine."""
        link = self.links[role]
        spans = []
        for incident in sorted(self.incidents, key=lambda incident: incident.begin):
            if not (incident.everywhere or incident.link == link or incident.process == process):
                continue
            if incident.begin > begin:
                spans.append((begin, min(end, incident.begin)))
            begin = max(begin, incident.end)
            if begin >= end:
                break
        if begin < end:
            spans.append((begin, end))
        return [span for span in spans if span[0] < span[1]]
