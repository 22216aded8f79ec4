"""The cast: who plays what on which lock, and the times that they use. Short ones, so that much happens in a minute."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

#: How long a lease lasts after its last heartbeat, and one that was given back with processes inside; seconds.
LEASE = 6.0
GRACE = 3.0
#: How often those who wait look, at most (docs/protocol.md, R11), seconds.
LOOK = 1.25
#: How long somebody who died while he stood in line holds up those behind him (docs/protocol.md), seconds.
IN_LINE = 21.0
#: By how much the clocks of two DynamoDB servers may differ (the package's default), and a `Date`'s whole second.
SKEW = 11.0

#: Keys and their capacities. Each is contended for by processes of several kinds.
CAPACITIES = {"mutex": 1, "semaphore": 3, "groups": 1}


@dataclass(frozen=True)
class Role:
    """What one process is to do.

    :ivar who: its place in the cast. A process that was killed is replaced by another one in the same place.
    :ivar does: the function of `actors` that it runs.
    :ivar link: the name of its way to the engine: its machine's, as it were.
    :ivar slots: it takes as many each time; 0 for a random number.
    :ivar members: how many threads or coroutines of it contend.
    :ivar clock_off: by how much its machine's wall clock is wrong, seconds.
    :ivar lease_id: names the grant, for a process of a group; elsewhere each has a name of its own.
    :ivar lease: the lease to work under, for a process of a group.
    :ivar careless: it ignores the end of its lease, so that the checker has something to find.
    """

    who: str
    does: str
    link: str
    key: str
    slots: int = 1
    members: int = 1
    clock_off: float = 0.0
    lease_id: str | None = None
    lease: dict[str, Any] | None = None
    careless: bool = False

    @property
    def capacity(self) -> int:
        return CAPACITIES[self.key]


#: The groups, each a deployment with a triggerer and a worker.
GROUPS = ("north", "south")


def group_role(group: str, does: str, **more: Any) -> Role:
    """A process of a group: a guarded one runs on its worker, the others in its triggerer."""
    machine = "worker" if does == "guarded" else "triggerer"
    return Role(f"{group}/{does}", does, f"{group}/{machine}", "groups", **more)


def cast(rng: random.Random, *, careless: bool) -> list[Role]:
    """Those who take turns by themselves. Half of the machines have a clock that is wrong by hours."""
    return [replace(role, clock_off=rng.choice([0.0, rng.uniform(-9e3, 9e3)])) for role in _cast(careless)]


def _cast(careless: bool) -> Iterator[Role]:
    if careless:  # the first to come, so that it certainly has a turn
        yield Role("careless", "take_turns", "careless", "mutex", careless=True)
    yield Role("plain-1", "take_turns", "plain-1", "mutex", members=2)
    yield Role("plain-2", "take_turns", "plain-2", "mutex")
    yield Role("coroutines-1", "take_turns_async", "coroutines-1", "mutex", members=3)
    yield Role("permits-1", "take_turns", "permits-1", "semaphore", slots=0)
    yield Role("permits-2", "take_turns", "permits-2", "semaphore", slots=0, members=2)
    yield Role("permits-3", "take_turns_async", "permits-3", "semaphore", slots=0, members=2)
    yield Role("plain-3", "take_turns", "plain-3", "groups")
    yield Role("breaker", "break_now_and_then", "breaker", "mutex")
