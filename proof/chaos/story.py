"""The story of a hand-over, for people to read: all that concerns the lock in that time, line by line."""

from __future__ import annotations

from collections.abc import Iterator

from proof.chaos.evidence import Evidence
from proof.chaos.exchanges import Exchange

# The story begins this many seconds before the hand-over.
_BEFORE = 1.5


def story(evidence: Evidence, key: str, begin: float, end: float, lost: float) -> Iterator[str]:
    """Yield the lines of the story. Times are in seconds since the hand-over began.

    :param begin: when the former holder ended.
    :param end: when the lock was granted.
    :param lost: for how many seconds the next holder waited for a processor.
    """
    yield f"the lock {key!r}, from {begin:.3f} for {end - begin:.3f} s, {lost:.2f} s of it without a processor"
    yield f"in the queue: {', '.join(waiters(evidence, key, begin).values()) or 'nobody'}"
    lines = [
        (each.at, f"{each.link}: {each.what}, sent {each.sent - begin:.3f}: {each.answer}")
        for each in evidence.exchanges
        if each.key == key
    ]
    lines += [
        (event.at, f"process {event.process}, {event.role}: {event.what}")
        for event in evidence.events
        if event.what != "renewed"
    ]
    for incident in evidence.incidents:
        who = "everybody" if incident.everywhere else incident.link or f"process {incident.process}"
        if incident.begin < end and incident.end > begin - _BEFORE:
            lines.append((max(incident.begin, begin - _BEFORE), f"{incident.kind} begins for {who}"))
            lines.append((incident.end, f"{incident.kind} ends for {who}"))
    for at, line in sorted(lines):
        if begin - _BEFORE <= at <= end + 0.1:
            yield f"{at - begin:8.3f}  {line}"


def waiters(evidence: Evidence, key: str, at: float) -> dict[str, str]:
    """Return the owners of the waiters whose items were in the queue at that time, by place, in queue order."""
    present: dict[str, Exchange] = {}
    for each in evidence.exchanges:
        if each.key != key or each.place is None or each.at > at:
            continue
        if each.what == "DeleteItem":
            present.pop(each.place, None)
        elif each.owner is not None:
            present[each.place] = each
    return {place: f"{present[place].owner} ({place})" for place in sorted(present)}
