"""Starts the processes of a group in the order in which Airflow does, run after run.

If a triggerer dies, Airflow starts `acquire` and the heartbeat task once more, with the same lease id.
Airflow may also release the lock while a process is inside or was just killed, or start the next attempt
without a release.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from proof.chaos.settings import LEASE, group_role

if TYPE_CHECKING:
    from proof.chaos.run import ChaosRun

# How a run of the group ends, with the weight of each choice.
_ENDINGS = {
    "in order": 4,
    "released early": 3,  # with processes inside
    "process killed": 3,  # released when a guarded process has just been killed
    "cleared": 1,  # not released: the next attempt begins while this lease is valid
    "all killed": 1,  # not released: all processes of the run are killed
}
# How long to wait for the end of a process, in seconds. No disaster delays it for that long.
_WITHIN = 60.0


class Group:
    """A deployment with one DAG, whose runs follow one another."""

    def __init__(self, chaos: ChaosRun, name: str, rng: random.Random) -> None:
        self._chaos, self._name, self._rng = chaos, name, rng
        self._attempts = 0

    def run(self) -> None:
        """Run the DAG until the disasters are over, and then until one more run has ended in order."""
        done = False
        while not done:
            calm = self._chaos.is_calm
            ending = "in order" if calm else self._rng.choices(list(_ENDINGS), list(_ENDINGS.values()))[0]
            acquired = self._run_once(ending)
            done = calm and acquired

    def _run_once(self, ending: str) -> bool:
        """Start the processes of one run. Returns whether it acquired the lock."""
        lease = self._acquire()
        if lease is None:
            return False
        heartbeat = self._start("heartbeat", lease=lease)
        for _ in range(self._rng.randint(0, 1)):
            self._wait(self._start("guarded", lease=lease))
            if self._chaos.has_ended(heartbeat):
                heartbeat = self._start("heartbeat", lease=lease)
        inside = [self._start("guarded", lease=lease) for _ in range(self._rng.randint(1, 3))]
        if ending == "in order":
            self._wait(*inside)
        else:
            self._chaos.pause(self._rng.uniform(0.3, 2.0))
        for process in {"process killed": inside[:1], "all killed": [heartbeat, *inside]}.get(ending, []):
            self._chaos.kill(process)
        if ending in ("in order", "released early", "process killed"):
            self._wait(self._start("release", lease=lease))
            self._wait(*inside)
        # Otherwise the lease runs out, or the next attempt supersedes it.
        return True

    def _acquire(self) -> dict[str, Any] | None:
        """Make one attempt, and restart it if its process dies. Returns its lease, or None if it failed."""
        self._attempts += 1
        for again in range(100):
            process = self._start("acquire", lease_id=f"{self._name}-{self._attempts:06}")
            self._wait(process)
            events = self._chaos.log_of(process)
            if any(event.what == "handed_over" for event in events):
                return next(dict(event.more["lease"]) for event in events if event.what == "granted")
            if any(event.what in ("failed", "lost", "error") for event in events):
                return None
            self._chaos.pause(self._rng.uniform(0.1, 0.5 if again else LEASE))
        return None

    def _start(self, program: str, **more: Any) -> int:
        return self._chaos.start(group_role(self._name, program, **more))

    def _wait(self, *processes: int) -> None:
        for process in processes:
            self._chaos.wait_until_ended(process, within=_WITHIN)
