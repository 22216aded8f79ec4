"""Where the trouble happens: the runs that were started, who is inside or waits just now, and what was done to whom."""

from __future__ import annotations

import heapq
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count

import psutil

from deployments.airflow_client import FINISHED, Run
from deployments.deployment import Component, Deployment
from proof.airflow.room import Room, T
from proof.airflow.stays import Excuses, Stay

# After something that hits all of a deployment, it is given so long to get on with its work, in seconds. Else there
# would soon be nobody inside any more to have troubles.
_REST = (25.0, 60.0)
# Somebody whose last line is no older than this is inside, in seconds.
_FRESH = 0.4


class NotNow(Exception):
    """A trouble finds nobody to trouble."""


@dataclass(frozen=True)
class Started:
    """A run that was triggered here.

    :ivar ending: how it is to end if nobody troubles it.
    :ivar wants: since when it has wanted the lock, once more after each time that it was cleared.
    """

    deployment: Deployment
    dag_id: str
    run_id: str
    key: str
    ending: str
    wants: list[float] = field(default_factory=lambda: [time.time()], compare=False)

    @property
    def acquire(self) -> str:
        """The task that waits for the lock."""
        return "locked" if self.dag_id == "operator" else "lock.acquire"

    def __str__(self) -> str:
        return f"{self.deployment.name}/{self.dag_id}/{self.run_id}"


@dataclass
class Trouble:
    """Something that was done.

    :ivar until: when its effects should be over, as far as it has effects on others than the one it is aimed at.
    :ivar lease_id: whom it is aimed at; None for all of a deployment, or of all.
    """

    kind: str
    at: float
    until: float
    lease_id: str | None = None
    deployment: str | None = None


@dataclass
class Scene:
    """All that troubles need."""

    room: Room
    dice: random.Random
    runs: dict[tuple[str, str, str], Started] = field(default_factory=dict)
    live: list[Started] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)
    excuses: Excuses = field(default_factory=Excuses)
    disturbed: set[str] = field(default_factory=set)
    """What is dead or paused just now, by name."""
    begun: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._rests_until: dict[str, float] = defaultdict(lambda: self.begun + _REST[1])

    # -- telling ------------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """One line, with the time since the beginning."""
        print(f"{time.time() - self.begun:7.1f}  {text}", flush=True)

    def note(
        self,
        kind: str,
        whom: Stay | Started | str,
        *,
        deployment: Deployment | None = None,
        lasts: float = 0.0,
    ) -> None:
        """Say and keep in mind that a trouble has begun.

        :param lasts: for how many seconds those may feel it whom it is not aimed at.
        """
        lease_id = None
        if isinstance(whom, Stay):
            lease_id = whom.lease_id
            whom = f"{self.run_of(whom)}/{whom.task_id}, pid {whom.pid}, token {whom.token} of {whom.key}"
        self.say(f"{kind}: {whom}")
        now = time.time()
        self.troubles.append(
            Trouble(kind, now, now + lasts, lease_id, deployment.name if deployment else None)
        )

    # -- who is there -------------------------------------------------------------------------------------------

    def run_of(self, stay: Stay) -> Started | None:
        """The run that a guarded process belongs to."""
        return self.runs.get((stay.deployment, stay.dag_id, stay.run_id))

    def inside(self) -> tuple[Stay, Started]:
        """Somebody who is inside; rather one that has had no trouble yet.

        :raises NotNow: nobody is.
        """
        now = time.time()
        stays = [stay for stay in self.room.ledger.stays() if now - stay.last < _FRESH and self.run_of(stay)]
        troubled = {trouble.lease_id for trouble in self.troubles}
        stay = self.one_of([stay for stay in stays if stay.lease_id not in troubled] or stays)
        run = self.run_of(stay)
        assert run
        return stay, run

    def clear(self, run: Started, task_id: str) -> None:
        """Clear a task of a run with all that comes after it, and with its acquire."""
        run.deployment.clear(run.dag_id, run.run_id, [task_id])
        run.wants.append(time.time())

    def waiting(self) -> Started:
        """A run whose acquire waits in the triggerer.

        :raises NotNow: none does.
        """
        been = {(stay.deployment, stay.dag_id, stay.run_id) for stay in self.room.ledger.stays()}
        candidates = [run for name, run in self.runs.items() if run in self.live and name not in been]
        run = self.one_of(candidates)
        if run.deployment.task_instance(run.dag_id, run.run_id, run.acquire).state != "deferred":
            raise NotNow
        return run

    def process(self, stay: Stay) -> tuple[psutil.Process, psutil.Process]:
        """The process of a stay, and the one that supervises it. Both are surely ours.

        :raises NotNow: one of them is gone.
        """
        for deployment in self.room.deployments:
            ours = {process.pid: process for process in deployment.processes()}
            if stay.pid in ours and (supervisor := ours.get(ours[stay.pid].ppid())):
                return ours[stay.pid], supervisor
        raise NotNow

    def one_of(self, candidates: Iterable[T]) -> T:
        """Any of them.

        :raises NotNow: there are none.
        """
        choice = list(candidates)
        if not choice:
            raise NotNow
        return self.dice.choice(choice)

    def component(self, name: str) -> tuple[Deployment, Component]:
        """A component of this name, in a deployment that has had its rest.

        :raises NotNow: there is none.
        """
        components = [
            (deployment, component)
            for deployment in self.room.deployments
            for component in deployment.components
            if component.name == name and self._rests_until[deployment.name] < time.time()
        ]
        return self.one_of(components)

    # -- what comes later ---------------------------------------------------------------------------------------

    def disturb(
        self,
        kind: str,
        deployment: Deployment,
        component: Component,
        seconds: float,
        mend: Callable[[], None],
        *,
        recovers: float,
    ) -> None:
        """Leave a component disturbed for so long, note that, and mend it then.

        :param recovers: for how many seconds after that the deployment may still feel it.
        """
        name = _name(deployment, component)
        self.disturbed.add(name)
        self._rests_until[deployment.name] = time.time() + seconds + self.dice.uniform(*_REST)

        def undo() -> None:
            mend()
            self.disturbed.discard(name)
            self.say(f"  {name} is there again")

        self.later(seconds, undo)
        self.note(
            kind, f"{deployment.name}, for {seconds:.0f} s", deployment=deployment, lasts=seconds + recovers
        )

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something in a while."""
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), action))

    def do_what_is_due(self, *, all_of_it: bool = False) -> None:
        """Do what was left for now, or all that was left for later as well."""
        while self._due and (all_of_it or self._due[0][0] <= time.monotonic()):
            heapq.heappop(self._due)[2]()

    def look(self) -> list[tuple[Deployment, Run]]:
        """See which runs live, and start again what has died by itself, as a service manager would."""
        for deployment in self.room.deployments:
            for component in deployment.components:
                if _name(deployment, component) not in self.disturbed and not component.is_running:
                    self.say(f"{_name(deployment, component)} has died by itself:\n{component.tail()}")
                    component.start()
        found = [(deployment, run) for deployment in self.room.deployments for run in deployment.runs("~")]
        for deployment, run in found:  # also one whose triggering was not answered
            name = deployment.name, run.dag_id, run.run_id
            started = Started(deployment, run.dag_id, run.run_id, run.conf["key"], "ends by itself")
            self.runs.setdefault(name, started)
        ended = {
            (deployment.name, run.dag_id, run.run_id) for deployment, run in found if run.state in FINISHED
        }
        self.live = [run for name, run in self.runs.items() if name not in ended]
        return found


def _name(deployment: Deployment, component: Component) -> str:
    return f"{deployment.name}'s {component.name}"
