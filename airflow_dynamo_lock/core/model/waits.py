"""A wait of a claimant that holds leases, as it notes it in the record of each of them (R14, deadlocks end)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wait:
    """One wait.

    :ivar id: unique id of the wait.
    :ivar since_ms: when it began, epoch milliseconds. It only orders waits, so a wrong clock does no harm.
    :ivar keys: the locks that it waits for: all of them.
    :ivar slots: number of slots that it needs of each lock.
    :ivar capacity: capacity that it claims.
    :ivar seen: ids of all waits of the cycle that the waiter has found around itself, with its own. The note shows the
        other waiters that this one was still waiting when it found the cycle.
    """

    id: str
    since_ms: int
    keys: tuple[str, ...]
    slots: int
    capacity: int
    seen: frozenset[str] = frozenset()

    @property
    def order(self) -> tuple[int, str]:
        """Waits of a cycle in the order in which they began. The last one ends."""
        return self.since_ms, self.id
