"""Takes a group's processes through its runs, as Airflow does: acquire, guarded tasks beside a keeper, release.

Airflow starts `acquire` and the keeper once more, under the same name, when their triggerer died; and it may release
while a process is inside, or was just killed, or start the next attempt without any release.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from proof.chaos.settings import LEASE, group_role

if TYPE_CHECKING:
    from proof.chaos.arena import Arena

# What a run comes to, and how often.
_ENDINGS = {
    "in order": 4,
    "marked": 3,  # released while a process is inside
    "killed": 3,  # released when a guarded process was just killed
    "cleared": 1,  # not released: the next attempt finds the lease of this one
    "vanished": 1,  # all its processes are killed, and nobody releases
}
# How long a process of a group is waited for, seconds: no fault lasts that long.
_WITHIN = 60.0


class Group:
    """A deployment with one DAG, whose runs come one after the other."""

    def __init__(self, arena: Arena, name: str, rng: random.Random) -> None:
        self._arena, self._name, self._rng = arena, name, rng
        self._attempts = 0

    def run(self) -> None:
        """Have runs, and a last one when nothing goes wrong any more, which comes to its end in order."""
        calm = False
        while not calm:
            calm = self._arena.calm
            ending = "in order" if calm else self._rng.choices(list(_ENDINGS), list(_ENDINGS.values()))[0]
            done = self._one_run(ending)
            calm = calm and done

    def _one_run(self, ending: str) -> bool:
        lease = self._acquire()
        if lease is None:
            return False
        keeper = self._start("keep", lease=lease)
        for _ in range(self._rng.randint(0, 1)):
            self._until_ended(self._start("guarded", lease=lease))
            if self._arena.ended(keeper):
                keeper = self._start("keep", lease=lease)
        inside = [self._start("guarded", lease=lease) for _ in range(self._rng.randint(1, 3))]
        if ending == "in order":
            self._until_ended(*inside)
        else:
            self._arena.pause(self._rng.uniform(0.3, 2.0))
        for process in {"killed": inside[:1], "vanished": [keeper, *inside]}.get(ending, []):
            self._arena.kill(process)
        if ending in ("in order", "marked", "killed"):
            self._until_ended(self._start("release", lease=lease))
            self._until_ended(*inside)
        # Else the lease runs out, or the next attempt ends it: that does not wait for it.
        return True

    def _acquire(self) -> dict[str, Any] | None:
        """One attempt: its lease, or None if it failed. When its process dies, another one goes on with it."""
        self._attempts += 1
        for again in range(100):
            process = self._start("acquire", lease_id=f"{self._name}-{self._attempts:06}")
            self._until_ended(process)
            events = self._arena.log_of(process)
            if any(event.what == "hands_over" for event in events):
                return next(dict(event.more["lease"]) for event in events if event.what == "granted")
            if any(event.what in ("failed", "lost", "error") for event in events):
                return None
            self._arena.pause(self._rng.uniform(0.1, 0.5 if again else LEASE))
        return None

    def _start(self, does: str, **more: Any) -> int:
        return self._arena.start(group_role(self._name, does, **more))

    def _until_ended(self, *processes: int) -> None:
        for process in processes:
            self._arena.until_ended(process, within=_WITHIN)
