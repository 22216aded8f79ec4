"""The figures of a run: hand-overs, counts and violations, as text and as JSON."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from airflow_dynamo_lock.core.table.position import head_at
from deployments.engines import MotoServer
from proof.chaos.checker import Violation, violations, waits
from proof.chaos.evidence import Attempt, Evidence, LeaseUse
from proof.chaos.records import Held, Record
from proof.chaos.settings import CAPACITIES, GRACE, LEASE, PASSING_OVER, POLL
from proof.chaos.starvation import seconds_lost
from proof.chaos.story import story

_IN_MEMORY = "(moto keeps its data in memory, so it is stopped and resumed, and never restarted)"
# The waiter came after the holder's last heartbeat. The time counts from when it came.
_LATE_WAITER = "holder dead before the waiter came"

#: Documented bound of each kind of hand-over to the first waiter, in seconds. It applies if that one already waited. It
#: does not include the requests' round trips. To a waiter behind others, add `PASSING_OVER`.
BOUNDS = {
    "released": POLL,
    "broken by hand": POLL,
    "holder killed": LEASE + 2 * POLL,
    "holder stopped": LEASE + 2 * POLL,
    "holder cut off": LEASE + 2 * POLL,
    "grant not received": LEASE + 2 * POLL,
    "group without heartbeats": LEASE + 2 * POLL,
    "released, process inside killed": GRACE + 2 * POLL,
    "released, process inside stopped or cut off": GRACE + 2 * POLL,
    _LATE_WAITER: LEASE + 2 * POLL,
}


_BEHIND = ", to a waiter behind others"
# Round trips of a hand-over, and the precision of its times, in seconds.
_ROUND_TRIPS = 1.0


@dataclass(frozen=True)
class HandOver:
    """The time from the end of one holder to the grant of the next.

    :ivar how: how the first holder ended; a key of `BOUNDS`.
    :ivar begin: when it ended, monotonic seconds.
    :ivar end: when the lock was granted.
    :ivar grant: the next holder's use of its lease; None if it did not receive the grant.
    :ivar behind: whether others were ahead of the next holder in the queue, dead or alive.
    :ivar undisturbed: whether the next holder already waited, and no incident affected it meanwhile.
        Otherwise no bound applies.
    """

    how: str
    key: str
    begin: float
    end: float
    grant: LeaseUse | None
    behind: bool
    undisturbed: bool

    @property
    def kind(self) -> str:
        return self.how + (_BEHIND if self.behind else "")

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def bound(self) -> float:
        """The documented bound, in seconds."""
        return BOUNDS[self.how] + (PASSING_OVER if self.behind else 0.0)


@dataclass(frozen=True)
class Report:
    """The figures of one engine.

    :ivar chaos_seconds: duration of the disasters.
    :ivar calm_seconds: time that the last uses of the locks took after that.
    :ivar entered: number of guarded processes that entered a lease.
    :ivar disasters: number of disasters of each kind.
    :ivar lost: number of leases whose loss a process noticed.
    :ivar longest_room: longest time for which an undisturbed waiter waited although the lock could have been
        granted, in seconds: for a plain lock, and for a semaphore.
    :ivar starved: longest time for which a process waited for a processor, in seconds.
    :ivar hand_overs: for each kind, the number of all and of undisturbed hand-overs, the median and the
        longest of the undisturbed ones, and the bound; in seconds.
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
    longest_room: Mapping[str, float]
    starved: float
    hand_overs: Mapping[str, Mapping[str, Any]]
    violations: Sequence[Violation]


def report(evidence: Evidence) -> Report:
    """Compute the figures of a run."""
    events = Counter(event.what for event in evidence.events)
    hand_overs: dict[str, list[HandOver]] = defaultdict(list)
    all_hand_overs = [*_after_release(evidence), *_after_death(evidence)]
    for each in all_hand_overs:
        hand_overs[each.kind].append(each)
    rooms = {"plain lock": 0.0, "semaphore": 0.0}
    for wait in waits(evidence):
        kind = "plain lock" if wait.attempt.capacity == 1 else "semaphore"
        rooms[kind] = max(rooms[kind], round(wait.grantable, 2))
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
        longest_room=rooms,
        starved=round(max((lag.seconds for lag in evidence.lags), default=0.0), 1),
        hand_overs={
            kind: _summary(hand_overs[kind])
            for how in BOUNDS
            for kind in (how, how + _BEHIND)
            if kind in hand_overs
        },
        violations=[*violations(evidence), *late(evidence, all_hand_overs)],
    )


def late(evidence: Evidence, hand_overs: Sequence[HandOver]) -> Iterator[Violation]:
    """Yield the undisturbed hand-overs that took longer than their bound, and than round trips and lack of
    processors explain, each with its whole story."""
    for each in hand_overs:
        if each.grant is None or not each.undisturbed:
            continue
        lost = seconds_lost(evidence.lags, each.grant.process, each.begin, each.end)
        asked = _seconds_asked(evidence, evidence.links[each.grant.role], each.begin, each.end)
        if each.seconds > each.bound + _ROUND_TRIPS + lost + asked:
            exchanges = "\n      ".join(story(evidence, each.key, each.begin, each.end, lost))
            yield Violation(
                "lateness",
                each.end,
                f"{each.kind}: {each.seconds:.2f} s, bound {each.bound:g} s: {exchanges}",
            )


def _seconds_asked(evidence: Evidence, link: str, begin: float, end: float) -> float:
    """Return for how long a link's requests waited for answers of the engine, which may lack a processor itself."""
    seconds, until = 0.0, begin
    for each in sorted(evidence.exchanges, key=lambda each: each.sent):
        answered = min(each.at, end)
        if each.link == link and answered > max(until, each.sent):
            seconds += answered - max(until, each.sent)
            until = answered
    return seconds


def _summary(hand_overs: Sequence[HandOver]) -> dict[str, Any]:
    undisturbed = [each.seconds for each in hand_overs if each.undisturbed]
    return {
        "count": len(hand_overs),
        "undisturbed": len(undisturbed),
        "median": round(median(undisturbed), 2) if undisturbed else None,
        "longest": round(max(undisturbed), 2) if undisturbed else None,
        "bound": round(hand_overs[0].bound, 2),
    }


def as_json(reports: Sequence[Report], seed: str) -> dict[str, Any]:
    """Return the content of the file that ``--report`` names."""
    return {
        "seed": seed,
        "lease": LEASE,
        "release_grace": GRACE,
        "engines": [asdict(each) for each in reports],
    }


def as_text(report: Report) -> str:
    """Return the figures as a table for people to read."""
    lines = [
        f"{report.engine}: {report.chaos_seconds:.0f} s of disasters, "
        f"{report.calm_seconds:.0f} s for the last turns",
        f"  {report.processes} processes, {report.grants} grants, "
        f"{report.entered} guarded processes entered, {report.lost} losses noticed, {report.writes} writes",
        "",
        "  disasters",
        *(f"    {count:5}  {kind}" for kind, count in report.disasters.items()),
        *([f"           {_IN_MEMORY}"] if report.engine == MotoServer.name else []),
        "",
        f"  {'hand-overs, seconds from the last heartbeat or release':<54}{'all':>6}{'undisturbed':>13}"
        f"{'median':>8}{'longest':>9}{'bound':>7}",
    ]
    for kind, row in report.hand_overs.items():
        times = [f"{row[name]:.2f}" if row[name] is not None else "–" for name in ("median", "longest")]
        lines.append(
            f"    {kind:<52}{row['count']:>6}{row['undisturbed']:>13}"
            f"{times[0]:>8}{times[1]:>9}{row['bound']:>7.2f}"
        )
    lines += [
        f"    {f'undisturbed wait for a {kind} that could have been granted':<79}{seconds:>9.2f}"
        for kind, seconds in report.longest_room.items()
    ]
    lines += [
        "",
        f"  a process waited for a processor for up to {report.starved:.1f} s",
        f"  violations: {len(report.violations)}",
    ]
    lines += [f"    {each.what} at {each.at:.3f}: {each.details}" for each in report.violations]
    return "\n".join(lines)


# -- hand-overs ----------------------------------------------------------------------------------------------
#
# Only those of plain locks: a waiter of a semaphore may wait for slots of several holders, and a dead holder
# need not delay anyone.


def _after_release(evidence: Evidence) -> Iterator[HandOver]:
    """Yield the hand-overs in which one write removed the only holder, and the next granted the lock."""
    broken = {event.more["lease_id"] for event in evidence.events if event.what == "breaking"}
    for key, history in evidence.histories.items():
        if CAPACITIES.get(key) != 1:
            continue
        for before, freed, granted in zip(history, history[1:], history[2:], strict=False):
            gone = next(iter(before.holders.keys() - freed.holders.keys()), None)
            if gone is None or freed.holders or not granted.holders:
                continue
            kind = "broken by hand" if gone in broken else "released"
            (lease_id,) = granted.holders
            grant = next((use for use in evidence.uses if use.lease_id == lease_id), None)
            yield HandOver(
                kind,
                key,
                freed.at,
                granted.at,
                grant,
                behind=_was_behind(evidence, key, lease_id, freed, grant),
                undisturbed=grant is not None and _undisturbed(evidence, grant, freed.at),
            )


def _was_behind(
    evidence: Evidence, key: str, lease_id: str, record: Record | None, grant: LeaseUse | None
) -> bool:
    """Return whether others were ahead of a waiter in the queue, as a record shows it.

    :param grant: the grant to the waiter; None if it was not received.
    """
    of_lock = [each for each in evidence.exchanges if each.key == key and each.place is not None]
    places = [each.place or "" for each in of_lock if each.lease_id == lease_id]
    if not places and grant is not None:
        # After an outage, a waiter acquires with another lease id than its entry has. It deletes the entry before the
        # caller receives the grant.
        link, since = evidence.links[grant.role], grant.begin - _ROUND_TRIPS
        places = [
            each.place or ""
            for each in of_lock
            if (each.what, each.link) == ("DeleteItem", link) and since <= each.sent <= grant.begin
        ][-1:]
    head = None if record is None else record.head
    return bool(places) and head is not None and head_at(max(places)) > head_at(head)


def _after_death(evidence: Evidence) -> Iterator[HandOver]:
    """Yield the hand-overs in which the next holder reclaimed the slots of a dead one."""
    last_seen: dict[str, Held] = {}  # each holder as the last version of its record shows it, by lease id
    for history in evidence.histories.values():
        for record in history:
            last_seen |= record.holders
    uses: dict[str, list[LeaseUse]] = defaultdict(list)
    for use in evidence.uses:
        uses[use.lease_id].append(use)
    for grant in evidence.uses:
        for lease_id in grant.reclaimed:
            if lease_id in last_seen and CAPACITIES.get(grant.key) == 1:
                kind = _cause_of_death(evidence, last_seen[lease_id], uses[lease_id])
                since, came = last_seen[lease_id].since, _attempt(evidence, grant).begin
                if came > since:
                    kind, since = _LATE_WAITER, came
                history = evidence.histories[grant.key]
                last = max(
                    (each for each in history if each.at < grant.begin and each.token < grant.token),
                    key=lambda each: each.at,
                    default=None,
                )
                yield HandOver(
                    kind,
                    grant.key,
                    since,
                    grant.begin,
                    grant,
                    behind=_was_behind(evidence, grant.key, grant.lease_id, last, grant),
                    undisturbed=_undisturbed(evidence, grant, since),
                )


def _cause_of_death(evidence: Evidence, last: Held, uses: Sequence[LeaseUse]) -> str:
    """Return the kind of hand-over after a dead holder.

    :param last: the holder after its last heartbeat.
    :param uses: all uses of its lease.
    """
    killed = any(use.process in evidence.deaths for use in uses)
    stopped = any(
        incident.kind == "SIGSTOP" and incident.process == use.process and incident.end > last.since
        for incident in evidence.incidents
        for use in uses
    )
    if last.draining:
        return "released, process inside killed" if killed else "released, process inside stopped or cut off"
    if not uses:
        return "grant not received"
    if "/" in uses[0].role:  # the role of a process of a group
        return "group without heartbeats"
    return "holder killed" if killed else "holder stopped" if stopped else "holder cut off"


def _undisturbed(evidence: Evidence, grant: LeaseUse, since: float) -> bool:
    """Return whether the grant's process waited from that time on, and no incident affected it."""
    spans = evidence.undisturbed(grant.role, grant.process, since, grant.begin)
    return _attempt(evidence, grant).begin <= since and spans == [(since, grant.begin)]


def _attempt(evidence: Evidence, grant: LeaseUse) -> Attempt:
    """Return the attempt that led to a grant."""
    return next(
        each
        for each in evidence.attempts
        if each.process == grant.process and each.granted and each.end == grant.begin
    )
