"""Finds violations in the evidence of a run. docs/protocol.md explains why the lock excludes them.

- **Exclusion**: the leases on which processes count never have more slots than the lock's capacity.
- **Fencing**: the tokens of a lock increase, in the order of its grants.
- **Progress**: a waiter that no incident affects is granted the lock within the documented bound.
- **Order**: no record is damaged, every error is a typed error of the package, and no check at the end has
  failed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from proof.chaos.evidence import Attempt, Evidence, LeaseUse
from proof.chaos.records import Held, Record
from proof.chaos.settings import DEAD_WAITER_DELAY, LEASE, PASSING_OVER, POLL, SKEW
from proof.chaos.starvation import seconds_lost

#: Seconds that a loaded machine may need in addition to the documented bound.
SLACK = 4.0
# Seconds that the SDK may still wait after an incident: its timeout, and the pause before it retries.
_RECOVERY = 2.0

# Typed errors that a network failure may cause.
_EXPECTED = {
    "LockUnavailableError",
    "LockConflictError",
    "LockLostError",
    "LockTimeoutError",
    "LockNotHeldError",
}


@dataclass(frozen=True)
class Violation:
    """A violation.

    :ivar what: the property that is violated: ``exclusion``, ``fencing``, ``progress`` or ``order``.
    :ivar at: when, monotonic seconds.
    """

    what: str
    at: float
    details: str


def violations(evidence: Evidence) -> list[Violation]:
    """Return all violations, in the order of their times."""
    found = [*_exclusion(evidence), *_fencing(evidence), *_progress(evidence), *_order(evidence)]
    return sorted(found, key=lambda violation: violation.at)


# -- exclusion -----------------------------------------------------------------------------------------------


def _exclusion(evidence: Evidence) -> Iterator[Violation]:
    broken_at = _broken_at(evidence)
    by_key: dict[str, list[LeaseUse]] = defaultdict(list)
    for use in evidence.uses:
        # A broken lease excludes no other holder from then on, although its holder may be unaware of it.
        end = min(use.end, broken_at.get(use.lease_id, use.end))
        if use.begin < end:
            by_key[use.key].append(replace(use, end=end))
    for key, uses in by_key.items():
        for at in [use.begin for use in uses]:
            present = [use for use in uses if use.begin <= at < use.end]
            slots = {use.lease_id: use.slots for use in present}  # processes inside share one lease
            capacity = max(use.capacity for use in present)
            if sum(slots.values()) > capacity:
                who = "; ".join(_describe_use(use, at) for use in present)
                yield Violation(
                    "exclusion", at, f"{sum(slots.values())} slots of {capacity} in {key!r}: {who}"
                )


def _broken_at(evidence: Evidence) -> dict[str, float]:
    """Return when the first attempt to break each broken lease began, by lease id."""
    broken_at: dict[str, float] = {}
    for event in evidence.events:
        if event.what == "breaking":
            broken_at.setdefault(event.more["lease_id"], event.at)
    return broken_at


def _describe_use(use: LeaseUse, at: float) -> str:
    return (
        f"{use.role} (process {use.process}, lease {use.lease_id}, token {use.token}) "
        f"since {at - use.begin:.3f} s, for {use.end - at:.3f} s more"
    )


# -- fencing -------------------------------------------------------------------------------------------------


def _fencing(evidence: Evidence) -> Iterator[Violation]:
    grants: dict[str, list[LeaseUse]] = defaultdict(list)
    for use in evidence.uses:
        if not use.inside:
            grants[use.key].append(use)
    for key, uses in grants.items():
        seen: dict[int, LeaseUse] = {}
        for use in uses:
            if (other := seen.setdefault(use.token, use)) is not use:
                yield _wrong_token(key, other, use, "the same token twice")
        # The order of two grants is certain if one was known to its caller before the other was requested.
        known = sorted(uses, key=lambda use: use.begin)
        largest: LeaseUse | None = None
        for use in sorted(uses, key=lambda use: use.asked):
            while known and known[0].begin < use.asked:
                earlier = known.pop(0)
                if largest is None or earlier.token > largest.token:
                    largest = earlier
            if largest is not None and largest.token > use.token:
                yield _wrong_token(key, largest, use, "a smaller token after a larger one")


def _wrong_token(key: str, first: LeaseUse, second: LeaseUse, problem: str) -> Violation:
    details = f"{problem} in {key!r}: {_describe_token(first)}, then {_describe_token(second)}"
    return Violation("fencing", second.begin, details)


def _describe_token(use: LeaseUse) -> str:
    return f"{use.role} (lease {use.lease_id}) received {use.token}"


# -- progress ------------------------------------------------------------------------------------------------


def _progress(evidence: Evidence) -> Iterator[Violation]:
    for wait in waits(evidence):
        attempt = wait.attempt
        lost = seconds_lost(evidence.lags, attempt.process, wait.begin, wait.end)
        if wait.grantable > longest_wait(attempt) + (_RECOVERY if wait.disturbed else 0.0) + SLACK + lost:
            yield Violation(
                "progress",
                wait.end,
                f"{attempt.role} (process {attempt.process}) waited for {attempt.slots} of {attempt.key!r}, "
                f"undisturbed from {wait.begin:.3f} to {wait.end:.3f}, "
                f"and enough slots were free or reclaimable for {wait.grantable:.1f} s",
            )


def longest_wait(attempt: Attempt) -> float:
    """Return the documented bound, in seconds, of the time for which an undisturbed waiter waits beside free slots."""
    if attempt.capacity == 1:
        return POLL + PASSING_OVER
    # A waiter ahead may need more slots than this one, and wait for the end of one more lease. Two such waiters may
    # have died, one after the other.
    return 2 * POLL + 2 * DEAD_WAITER_DELAY + LEASE + 2 * POLL


@dataclass(frozen=True)
class Wait:
    """A part of an attempt in which no incident affected the waiter.

    :ivar disturbed: whether an incident affected it earlier in the same attempt.
    :ivar grantable: for how many seconds at most, without interruption, it could have been granted the lock.
    """

    attempt: Attempt
    begin: float
    end: float
    disturbed: bool
    grantable: float


def waits(evidence: Evidence) -> Iterator[Wait]:
    """Yield the undisturbed parts of all attempts."""
    for attempt in evidence.attempts:
        history = evidence.histories.get(attempt.key, ())
        for begin, end in evidence.undisturbed(attempt.role, attempt.process, attempt.begin, attempt.end):
            seconds = longest_grantable(history, attempt, begin, end, dated=evidence.dated)
            yield Wait(attempt, begin, end, begin > attempt.begin, seconds)


def longest_grantable(
    history: Sequence[Record], attempt: Attempt, begin: float, end: float, *, dated: bool
) -> float:
    """Return for how many seconds at most, without interruption, a waiter could have been granted the lock.

    The slots that count are the free ones, and those of holders whose death the waiter could prove.

    :param history: versions of the lock's record.
    :param begin: begin of the time span that is examined.
    :param end: end of that time span.
    :param dated: whether the engine sends ``Date`` headers.
    """
    longest = 0.0
    since: float | None = None  # when the present interval, of one or more versions, began
    for i, record in enumerate(history):
        until = history[i + 1].at if i + 1 < len(history) else float("inf")
        if until <= begin or record.at >= end:
            continue
        visible = max(begin, record.at)
        grantable_at = max(visible, _grantable_at(record, attempt, begin, dated=dated))
        stop = min(until, end)
        if grantable_at >= stop:
            since = None
            continue
        if since is None or grantable_at > visible:
            since = grantable_at
        longest = max(longest, stop - since)
    return longest


def _grantable_at(record: Record, attempt: Attempt, begin: float, *, dated: bool) -> float:
    """Return when enough slots of this record are free or reclaimable, as far as the waiter can prove it."""
    slots, at = record.available, 0.0
    deaths = sorted((_dead_at(held, begin, dated=dated), held.slots) for held in record.holders.values())
    for dead_at, held_slots in deaths:
        if slots >= attempt.slots:
            break
        slots, at = slots + held_slots, dead_at
    return at


def _dead_at(held: Held, begin: float, *, dated: bool) -> float:
    """Return when a waiter that polls since `begin` can prove the death of a holder without heartbeats."""
    by_observation = max(held.since, begin) + held.lease
    by_server_time = held.since + held.lease + SKEW
    return min(by_observation, by_server_time) if dated else by_observation


# -- order ---------------------------------------------------------------------------------------------------


def _order(evidence: Evidence) -> Iterator[Violation]:
    for failure in evidence.failures:
        yield Violation("order", evidence.ended, failure)
    for history in evidence.histories.values():
        for record in history:
            if record.damaged:
                yield Violation("order", record.at, f"a damaged record: {record}")
    for event in evidence.events:
        process = f"{event.role} (process {event.process})"
        error = event.more.get("error")
        if event.what == "error":
            yield Violation("order", event.at, f"{process} ended with an error:\n{event.more['trace']}")
        elif error is not None and error not in _EXPECTED:
            yield Violation("order", event.at, f"{process} received {error}: {event.more['why']}")
    for name, text in evidence.stderr.items():
        if (found := re.search(r"Traceback|never retrieved|never awaited", text)) is not None:
            part = text[max(0, found.start() - 300) : found.start() + 3000]
            yield Violation("order", evidence.ended, f"{name}:\n{part}")
