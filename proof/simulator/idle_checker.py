"""The checker of idle locks (invariant 4): a released lock is granted soon, sooner if all of its waiters are alive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from airflow_dynamo_lock.core.table.position import head_at
from proof.simulator.expressions import Item
from proof.simulator.lease_use import NEVER
from proof.simulator.queue_checker import QueueChecker
from proof.simulator.world import World


@dataclass
class IdleChecker:
    """Checks how long a lock is idle until its next grant. Times are true times.

    :ivar begins: time from which on it is checked.
    :ivar longest: how long a lock may be idle, in seconds, if all waiters are alive and the first one is granted.
    :ivar longest_beside_dead: the same, while anybody waits.
    :ivar on_idle: called with the key when a lock becomes idle in the time that is checked.
    """

    world: World
    queue: QueueChecker
    begins: float = NEVER
    longest: float = NEVER
    longest_beside_dead: float = NEVER
    on_idle: Callable[[str], None] = lambda key: None
    # By key: when the lock became idle.
    _idle_since: dict[str, float] = field(default_factory=dict)

    def written(self, key: str, before: Item | None, after: Item) -> str | None:
        """Record a write of a lock record. Returns a message if it grants a lock that was idle for too long."""
        had_holders = bool(before and before["holders"]["M"])
        has_holders = bool(after["holders"]["M"])
        if had_holders and not has_holders:
            self._idle_since[key] = self.world.now
            if self.world.now > self.begins:
                self.on_idle(key)
        elif before is not None and has_holders and not had_holders:
            since = max(self._idle_since.get(key, NEVER), self.begins)
            idle = self.world.now - since
            if idle > self.longest_beside_dead and self.queue.has_waited_since(key, since):
                return f"{key} was idle from {since:.1f} on for {idle:.1f} s beside a living waiter"
            if idle > self.longest and "queue_head" in before and self.queue.undisturbed(key, after, since):
                head = before["queue_head"]["S"]
                # A head before the one that was granted names a waiter that has gone.
                if not any(head_at(self.queue.position(key, each)) > head for each in after["holders"]["M"]):
                    return f"{key} was idle from {since:.1f} on for {idle:.1f} s beside living waiters"
        return None
