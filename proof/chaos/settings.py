"""The roles of the processes, the locks that they use, and the times of a run.

The times are short, so that many leases are acquired and lost in a minute.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

#: Duration of a lease after its last heartbeat, and of a draining lease; seconds.
LEASE = 6.0
GRACE = 3.0
#: Longest interval between two polls of a waiting process (docs/protocol.md, R11), seconds.
POLL = 1.25
#: For how long a dead waiter that needs more slots delays the waiters behind it (docs/protocol.md), seconds.
DEAD_WAITER_DELAY = 21.0
#: For how long a waiter ahead that does not take free slots delays the waiters behind it, seconds: two polls until
#: these see the slots if they are far from the head, 2 s, and the pause between two quick polls.
PASSING_OVER = 2 * POLL + 2.0 + POLL / 4
#: The package's default `max_clock_skew`, plus the resolution of a `Date` header, seconds.
SKEW = 11.0

#: Keys and their capacities. Processes of several kinds compete for each lock.
CAPACITIES = {"mutex": 1, "semaphore": 3, "groups": 1}


@dataclass(frozen=True)
class Role:
    """What one process does, and with which settings.

    :ivar name: identifies the role. If its process is killed, another process takes over the role.
    :ivar program: the program of `actors` that the process runs.
    :ivar link: name of the proxy by which the process reaches the engine. One per machine.
    :ivar slots: number of slots of each claim; 0 for a random number.
    :ivar members: number of threads or coroutines of the process that compete for the lock.
    :ivar clock_error: by how many seconds the machine's wall clock is wrong.
    :ivar lease_id: lease id of the attempt, for the acquire process of a group. Others are generated.
    :ivar lease: the lease to work under, for the other processes of a group.
    :ivar careless: the process ignores the end of its lease, so that the checker must find a violation.
    """

    name: str
    program: str
    link: str
    key: str
    slots: int = 1
    members: int = 1
    clock_error: float = 0.0
    lease_id: str | None = None
    lease: dict[str, Any] | None = None
    careless: bool = False

    @property
    def capacity(self) -> int:
        return CAPACITIES[self.key]


#: The groups. Each stands for a deployment with a triggerer and a worker.
GROUPS = ("north", "south")


def group_role(group: str, program: str, **more: Any) -> Role:
    """Return the role of a process of a group: on its worker if it is guarded, else in its triggerer."""
    machine = "worker" if program == "guarded" else "triggerer"
    return Role(f"{group}/{program}", program, f"{group}/{machine}", "groups", **more)


def standing_roles(rng: random.Random, *, careless: bool) -> list[Role]:
    """Return the roles outside the groups. About half of their wall clocks are wrong, by up to 2.5 hours."""
    return [
        replace(role, clock_error=rng.choice([0.0, rng.uniform(-9e3, 9e3)]))
        for role in _standing_roles(careless)
    ]


def _standing_roles(careless: bool) -> Iterator[Role]:
    if careless:  # starts first, so that it is granted the lock early
        yield Role("careless", "client", "careless", "mutex", careless=True)
    yield Role("plain-1", "client", "plain-1", "mutex", members=2)
    yield Role("plain-2", "client", "plain-2", "mutex")
    yield Role("coroutines-1", "async_client", "coroutines-1", "mutex", members=3)
    yield Role("permits-1", "client", "permits-1", "semaphore", slots=0)
    yield Role("permits-2", "client", "permits-2", "semaphore", slots=0, members=2)
    yield Role("permits-3", "async_client", "permits-3", "semaphore", slots=0, members=2)
    yield Role("plain-3", "client", "plain-3", "groups")
    yield Role("breaker", "breaker", "breaker", "mutex")
