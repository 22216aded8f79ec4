"""What must never be, looked for in the evidence. docs/protocol.md says why it cannot be.

- **Exclusion**: never are more slots believed in than there are.
- **Fencing**: the tokens of a lock increase, in the order of its grants.
- **Progress**: whoever waits, with nothing happening to *him*, is let in within the documented bound.
- **Order**: no record damaged, no error without a type of its own, and everybody has a turn in the end.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from proof.chaos.evidence import Attempt, Belief, Evidence
from proof.chaos.records import Held, Record
from proof.chaos.settings import IN_LINE, LEASE, LOOK, SKEW

#: What a loaded machine may need beyond what is documented, seconds.
SLACK = 4.0
# What the SDK may still wait for when a disaster is over: its own timeout, and the pause before it tries again.
_RECOVERY = 2.0

# What may come of a lock in a network that fails.
_EXPECTED = {
    "LockUnavailableError",
    "LockConflictError",
    "LockLostError",
    "LockTimeoutError",
    "LockNotHeldError",
}


@dataclass(frozen=True)
class Violation:
    """Something that must never be."""

    what: str
    at: float
    details: str


def violations(evidence: Evidence) -> list[Violation]:
    """All that was found."""
    found = [*_exclusion(evidence), *_fencing(evidence), *_progress(evidence), *_order(evidence)]
    return sorted(found, key=lambda violation: violation.at)


# -- exclusion --------------------------------------------------------------------------------------------------


def _exclusion(evidence: Evidence) -> Iterator[Violation]:
    broken = _broken(evidence)
    by_key: dict[str, list[Belief]] = defaultdict(list)
    for belief in evidence.beliefs:
        # The lease of a holder that was broken is not its own any more; that it does not know it yet is not promised.
        end = min(belief.end, broken.get(belief.lease_id, belief.end))
        if belief.begin < end:
            by_key[belief.key].append(replace(belief, end=end))
    for key, beliefs in by_key.items():
        for at in [belief.begin for belief in beliefs]:
            present = [belief for belief in beliefs if belief.begin <= at < belief.end]
            slots = {belief.lease_id: belief.slots for belief in present}  # those inside share one lease
            capacity = max(belief.capacity for belief in present)
            if sum(slots.values()) > capacity:
                who = "; ".join(_describe(belief, at) for belief in present)
                yield Violation(
                    "exclusion", at, f"{sum(slots.values())} slots of {capacity} in {key!r}: {who}"
                )


def _broken(evidence: Evidence) -> dict[str, float]:
    """Leases that a person took away, and from when on."""
    broken: dict[str, float] = {}
    for event in evidence.events:
        if event.what == "breaks":
            broken.setdefault(event.more["lease_id"], event.at)
    return broken


def _describe(belief: Belief, at: float) -> str:
    return (
        f"{belief.who} (process {belief.process}, lease {belief.lease_id}, token {belief.token}) "
        f"since {at - belief.begin:.3f} s, for {belief.end - at:.3f} s more"
    )


# -- fencing ----------------------------------------------------------------------------------------------------


def _fencing(evidence: Evidence) -> Iterator[Violation]:
    grants: dict[str, list[Belief]] = defaultdict(list)
    for belief in evidence.beliefs:
        if not belief.inside:
            grants[belief.key].append(belief)
    for key, beliefs in grants.items():
        seen: dict[int, Belief] = {}
        for belief in beliefs:
            if (other := seen.setdefault(belief.token, belief)) is not belief:
                yield _wrong_token(key, other, belief, "the same token twice")
        # One grant comes before another for certain if it was known before the other was asked for.
        by_asking = sorted(beliefs, key=lambda belief: belief.asked)
        known = sorted(beliefs, key=lambda belief: belief.begin)
        largest: Belief | None = None
        for belief in by_asking:
            while known and known[0].begin < belief.asked:
                earlier = known.pop(0)
                if largest is None or earlier.token > largest.token:
                    largest = earlier
            if largest is not None and largest.token > belief.token:
                yield _wrong_token(key, largest, belief, "a smaller token after a larger one")


def _wrong_token(key: str, first: Belief, second: Belief, what: str) -> Violation:
    return Violation("fencing", second.begin, f"{what} in {key!r}: {_who(first)}, then {_who(second)}")


def _who(belief: Belief) -> str:
    return f"{belief.who} (lease {belief.lease_id}) got {belief.token}"


# -- progress ---------------------------------------------------------------------------------------------------


def _progress(evidence: Evidence) -> Iterator[Violation]:
    for wait in waits(evidence):
        attempt = wait.attempt
        # Who stands before him may have died, and the next one too. Of a semaphore, he may wait for more than is free.
        others = 2 * IN_LINE + (LEASE + 2 * LOOK if attempt.capacity > 1 else 0.0)
        if wait.room > 2 * LOOK + others + (_RECOVERY if wait.disturbed else 0.0) + SLACK:
            yield Violation(
                "progress",
                wait.end,
                f"{attempt.who} (process {attempt.process}) waited for {attempt.slots} of {attempt.key!r}, "
                f"undisturbed from {wait.begin:.3f} to {wait.end:.3f}; there was room for {wait.room:.1f} s",
            )


@dataclass(frozen=True)
class Wait:
    """A part of an attempt in which nothing happened to who waited.

    :ivar disturbed: something had happened to it before, in the same attempt.
    :ivar room: for how long there was room, seconds.
    """

    attempt: Attempt
    begin: float
    end: float
    disturbed: bool
    room: float


def waits(evidence: Evidence) -> Iterator[Wait]:
    """All of them."""
    for attempt in evidence.attempts:
        history = evidence.histories.get(attempt.key, ())
        for begin, end in evidence.calm_stretches(attempt.who, attempt.process, attempt.begin, attempt.end):
            room = longest_room(history, attempt, begin, end, dated=evidence.dated)
            yield Wait(attempt, begin, end, begin > attempt.begin, room)


def longest_room(
    history: Sequence[Record], attempt: Attempt, begin: float, end: float, *, dated: bool
) -> float:
    """For how long at most, between those moments, there was room without a pause for this waiter, as far as it can
    know: free slots, and those of holders whose lease has passed since their last sign of life, or, if that is later,
    since the waiter could first see it."""
    longest = 0.0
    since: float | None = None
    for i, record in enumerate(history):
        until = history[i + 1].at if i + 1 < len(history) else float("inf")
        if until <= begin or record.at >= end:
            continue
        room_at = max(begin, record.at, _room_at(record, attempt, begin, dated=dated))
        stop = min(until, end)
        if room_at >= stop:
            since = None
            continue
        if room_at > max(begin, record.at):
            since = room_at
        since = room_at if since is None else since
        longest = max(longest, stop - since)
    return longest


def _room_at(record: Record, attempt: Attempt, begin: float, *, dated: bool) -> float:
    """From when on the waiter can know of enough slots in this record."""
    free, at = record.available, 0.0
    holders = sorted((_dead_at(held, begin, dated=dated), held.slots) for held in record.holders.values())
    for dead_at, slots in holders:
        if free >= attempt.slots:
            break
        free, at = free + slots, dead_at
    return at


def _dead_at(held: Held, begin: float, *, dated: bool) -> float:
    observed = max(held.since, begin) + held.lease
    return min(observed, held.since + held.lease + SKEW) if dated else observed


# -- order ------------------------------------------------------------------------------------------------------


def _order(evidence: Evidence) -> Iterator[Violation]:
    for failure in evidence.failures:
        yield Violation("order", evidence.ended, failure)
    for history in evidence.histories.values():
        for record in history:
            if record.damaged:
                yield Violation("order", record.at, f"a damaged record: {record}")
    for event in evidence.events:
        if event.what == "error":
            yield Violation(
                "order",
                event.at,
                f"{event.who} (process {event.process}) ended with an error:\n{event.more['trace']}",
            )
        elif (error := event.more.get("error")) is not None and error not in _EXPECTED:
            yield Violation(
                "order", event.at, f"{event.who} (process {event.process}) got {error}: {event.more['why']}"
            )
    for name, text in evidence.complaints.items():
        if (trace := re.search(r"Traceback|never retrieved|never awaited", text)) is not None:
            part = text[max(0, trace.start() - 300) : trace.start() + 3000]
            yield Violation("order", evidence.ended, f"{name}:\n{part}")
