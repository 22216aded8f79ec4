"""The checker of idle locks (invariant 4): a released lock is granted soon, if its waiters are alive."""

from __future__ import annotations

from dataclasses import dataclass, field

from airflow_dynamo_lock.core.table.position import ticket_of
from proof.simulator.expressions import Item
from proof.simulator.lease_use import NEVER
from proof.simulator.queue_checker import QueueChecker
from proof.simulator.world import World


@dataclass
class IdleChecker:
    """Checks how long a lock is idle until its next grant. Times are true times.

    :ivar begins: time from which on it is checked.
    :ivar longest: how long a lock may be idle, in seconds.
    :ivar longest_if_behind: the same, if its next holder was behind the head of its queue: it leaves the lock to
        waiters in between, which may have gone, and reads the lock less often while there are many of them.
    """

    world: World
    queue: QueueChecker
    begins: float = NEVER
    longest: float = NEVER
    longest_if_behind: float = NEVER
    # By key: when the lock became idle.
    _idle_since: dict[str, float] = field(default_factory=dict)

    def written(self, key: str, before: Item | None, after: Item) -> str | None:
        """Record a write of a lock record. Returns a message if it grants a lock that was idle for too long."""
        had_holders = bool(before and before["holders"]["M"])
        has_holders = bool(after["holders"]["M"])
        if had_holders and not has_holders:
            self._idle_since[key] = self.world.now
        elif before is not None and has_holders and not had_holders:
            since = max(self._idle_since.get(key, NEVER), self.begins)
            idle = self.world.now - since
            if "queue_head" in before and self.queue.undisturbed(key, after, since):
                head = ticket_of(before["queue_head"]["S"])
                behind = any(self.queue.ticket(key, each) > head for each in after["holders"]["M"])
                if idle > (self.longest_if_behind if behind else self.longest):
                    return f"{key} was idle from {since:.1f} on for {idle:.1f} s beside living waiters"
        return None
