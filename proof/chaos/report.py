"""The figures of a run, for people and as JSON."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from deployments.engines import MotoServer
from proof.chaos.checker import Violation, violations, waits
from proof.chaos.evidence import Attempt, Belief, Evidence
from proof.chaos.records import Held, Record
from proof.chaos.settings import CAPACITIES, GRACE, IN_LINE, LEASE, LOOK

_IN_MEMORY = "(moto has all in memory: it is only ever stopped and continued, never restarted)"
# Whoever comes when the holder is dead already: counted from then, not from the holder's last sign of life.
_NEWCOMER = "dead before the next one came"

#: How the lock came free → the bound in docs/airflow.md for somebody who is waiting already, without round trips; if
#: nobody has died who stood before him in line.
BOUNDS = {
    "given back": LOOK,
    "broken by hand": LOOK,
    "holder killed": LEASE + 2 * LOOK,
    "holder stopped": LEASE + 2 * LOOK,
    "holder cut off": LEASE + 2 * LOOK,
    "granted unheard": LEASE + 2 * LOOK,
    "group vanished": LEASE + 2 * LOOK,
    "released, killed inside": GRACE + 2 * LOOK,
    "released, stopped or cut off inside": GRACE + 2 * LOOK,
    _NEWCOMER: LEASE + 2 * LOOK,
}


@dataclass(frozen=True)
class HandOver:
    """From the last sign of one holder to the grant of the next.

    :ivar undisturbed: the next one was waiting already, and nothing happened to it meanwhile. Else there is no bound.
    """

    how: str
    seconds: float
    undisturbed: bool


@dataclass(frozen=True)
class Report:
    """Of one engine.

    :ivar longest_room: for how long somebody undisturbed waited at most while there was room, seconds.
    :ivar hand_overs: how → count; median and longest of the undisturbed ones, seconds; the documented bound.
    """

    engine: str
    chaos_seconds: float
    calm_seconds: float
    processes: int
    grants: int
    entered: int
    writes: int
    disasters: Mapping[str, int]
    lost: int
    longest_room: float
    hand_overs: Mapping[str, Mapping[str, Any]]
    violations: Sequence[Violation]


def report(evidence: Evidence) -> Report:
    """The figures."""
    events = Counter(event.what for event in evidence.events)
    hand_overs: dict[str, list[HandOver]] = defaultdict(list)
    for each in [*_given_back(evidence), *_reclaimed(evidence)]:
        hand_overs[each.how].append(each)
    return Report(
        engine=evidence.engine,
        chaos_seconds=round(evidence.calm - evidence.began, 1),
        calm_seconds=round(evidence.ended - evidence.calm, 1),
        processes=len({event.process for event in evidence.events}),
        grants=events["granted"],
        entered=events["entered"],
        writes=sum(len(history) for history in evidence.histories.values()),
        disasters=dict(sorted(Counter(incident.kind for incident in evidence.incidents).items())),
        lost=events["lost"],
        longest_room=round(max((wait.room for wait in waits(evidence)), default=0.0), 2),
        hand_overs={how: _summary(how, hand_overs[how]) for how in BOUNDS if how in hand_overs},
        violations=violations(evidence),
    )


def _summary(how: str, hand_overs: Sequence[HandOver]) -> dict[str, Any]:
    undisturbed = [each.seconds for each in hand_overs if each.undisturbed]
    return {
        "count": len(hand_overs),
        "undisturbed": len(undisturbed),
        "median": round(median(undisturbed), 2) if undisturbed else None,
        "longest": round(max(undisturbed), 2) if undisturbed else None,
        "bound": BOUNDS[how],
    }


def as_json(reports: Sequence[Report], seed: str) -> dict[str, Any]:
    """What ``--report`` writes."""
    return {
        "seed": seed,
        "lease": LEASE,
        "release_grace": GRACE,
        "engines": [asdict(each) for each in reports],
    }


def as_text(report: Report) -> str:
    """A table to read."""
    lines = [
        f"{report.engine}: {report.chaos_seconds:.0f} s of disasters, {report.calm_seconds:.0f} s for the last turns",
        f"  {report.processes} processes, {report.grants} grants, {report.entered} guarded processes entered, "
        f"{report.lost} losses noticed, {report.writes} writes",
        "",
        "  disasters",
        *(f"    {count:5}  {kind}" for kind, count in report.disasters.items()),
        *([f"           {_IN_MEMORY}"] if report.engine == MotoServer.name else []),
        "",
        f"  {'hand-overs, seconds since the last sign of life':<50}{'all':>6}{'undisturbed':>13}{'median':>8}"
        f"{'longest':>9}{'bound':>7}",
    ]
    for how, row in report.hand_overs.items():
        times = [f"{row[name]:.2f}" if row[name] is not None else "–" for name in ("median", "longest")]
        lines.append(
            f"    {how:<48}{row['count']:>6}{row['undisturbed']:>13}{times[0]:>8}{times[1]:>9}{row['bound']:>7.2f}"
        )
    lines += [
        f"    {'somebody undisturbed waits while there is room':<75}{report.longest_room:>9.2f}"
        f"{IN_LINE + 2 * LOOK:>7.2f}",
        "",
        f"  violations: {len(report.violations)}",
    ]
    lines += [f"    {each.what} at {each.at:.3f}: {each.details}" for each in report.violations]
    return "\n".join(lines)


# -- hand-overs ---------------------------------------------------------------------------------------------------


# Of mutexes alone: who waits for several slots waits for several holders, and a dead one may be in nobody's way.


def _given_back(evidence: Evidence) -> Iterator[HandOver]:
    """One holder is gone, and the next one has it."""
    broken = {event.more["lease_id"] for event in evidence.events if event.what == "breaks"}
    for key, history in evidence.histories.items():
        if CAPACITIES.get(key) != 1:
            continue
        for before, after, granted in zip(history, history[1:], history[2:], strict=False):
            (gone,) = [*(before.holders.keys() - after.holders.keys()), None][:1]
            if gone is None or after.holders or not granted.holders:
                continue
            how = "broken by hand" if gone in broken else "given back"
            yield HandOver(how, granted.at - after.at, _waited(evidence, granted, after.at))


def _waited(evidence: Evidence, granted: Record, since: float) -> bool:
    (lease_id,) = granted.holders
    grant = next((each for each in evidence.beliefs if each.lease_id == lease_id), None)
    return grant is not None and _undisturbed(evidence, grant, since)


def _reclaimed(evidence: Evidence) -> Iterator[HandOver]:
    held: dict[str, Held] = {}
    for history in evidence.histories.values():
        for record in history:
            held |= record.holders  # each as it was at its last sign of life
    of_lease: dict[str, list[Belief]] = defaultdict(list)
    for belief in evidence.beliefs:
        of_lease[belief.lease_id].append(belief)
    for grant in evidence.beliefs:
        for lease_id in grant.reclaimed:
            if lease_id in held and CAPACITIES.get(grant.key) == 1:
                how = _how_it_died(evidence, held[lease_id], of_lease[lease_id])
                since, came = held[lease_id].since, _attempt(evidence, grant).begin
                if came > since:
                    how, since = _NEWCOMER, came
                yield HandOver(how, grant.begin - since, _undisturbed(evidence, grant, since))


def _how_it_died(evidence: Evidence, last: Held, beliefs: Sequence[Belief]) -> str:
    killed = any(belief.process in evidence.deaths for belief in beliefs)
    stopped = any(
        incident.kind == "SIGSTOP" and incident.process == belief.process and incident.end > last.since
        for incident in evidence.incidents
        for belief in beliefs
    )
    if last.draining:
        return "released, killed inside" if killed else "released, stopped or cut off inside"
    if not beliefs:
        return "granted unheard"
    if "/" in beliefs[0].who:
        return "group vanished"
    return "holder killed" if killed else "holder stopped" if stopped else "holder cut off"


def _undisturbed(evidence: Evidence, grant: Belief, since: float) -> bool:
    calm = evidence.calm_stretches(grant.who, grant.process, since, grant.begin)
    return _attempt(evidence, grant).begin <= since and calm == [(since, grant.begin)]


def _attempt(evidence: Evidence, grant: Belief) -> Attempt:
    """What led to a grant."""
    return next(
        each
        for each in evidence.attempts
        if each.process == grant.process and each.granted and each.end == grant.begin
    )
