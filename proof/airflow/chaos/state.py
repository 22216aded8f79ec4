"""The state of a chaos run: the DAG runs that it has started, the troubles so far, and actions for later.

Troubles choose their targets by it.
"""

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
from proof.airflow.lease_uses import Exemptions, LeaseUse
from proof.airflow.testbed import T, Testbed

# Shortest and longest time after a trouble of a whole deployment in which it has no other one, in seconds.
# Otherwise there would soon be no process inside that a trouble could affect.
_RECOVERY = (25.0, 60.0)
# A process is inside if its last line is at most this old, in seconds.
_MAX_LINE_AGE = 0.4


class NoTarget(Exception):
    """A trouble finds nothing that it could affect."""


@dataclass(frozen=True)
class StartedRun:
    """A DAG run that the chaos run has started.

    :ivar ending: how the DAG run ends if no trouble affects it.
    :ivar wanted_at: when it began to wait for the lock: when it was started, and each time that it was
        cleared. Seconds since the epoch.
    """

    deployment: Deployment
    dag_id: str
    run_id: str
    key: str
    ending: str
    wanted_at: list[float] = field(default_factory=lambda: [time.time()], compare=False)

    @property
    def acquire_task(self) -> str:
        """Id of the task that waits for the lock."""
        return "locked" if self.dag_id == "operator" else "lock.acquire"

    def __str__(self) -> str:
        return f"{self.deployment.name}/{self.dag_id}/{self.run_id}"


@dataclass
class Trouble:
    """A trouble that has begun. Times are seconds since the epoch.

    :ivar until: when its effects on other leases than its target should be over. Equal to `at` if it has
        none.
    :ivar lease_id: lease of the target; None if the target is not a process inside.
    :ivar deployment: deployment that it affects; None for all.
    """

    kind: str
    at: float
    until: float
    lease_id: str | None = None
    deployment: str | None = None


@dataclass
class ChaosState:
    """All that troubles read and change.

    :ivar rng: makes all random choices.
    :ivar runs: all DAG runs, by deployment, DAG id and run id.
    :ivar unfinished: DAG runs that had not ended at the last `refresh`.
    :ivar disturbed: names of the components that are dead or paused because of a trouble.
    :ivar began: when the chaos run began, in seconds since the epoch.
    """

    testbed: Testbed
    rng: random.Random
    runs: dict[tuple[str, str, str], StartedRun] = field(default_factory=dict)
    unfinished: list[StartedRun] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)
    exemptions: Exemptions = field(default_factory=Exemptions)
    disturbed: set[str] = field(default_factory=set)
    began: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        self._scheduled: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._recovers_until: dict[str, float] = defaultdict(lambda: self.began + _RECOVERY[1])

    # -- output ----------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Print a line, with the seconds since the beginning."""
        print(f"{time.time() - self.began:7.1f}  {text}", flush=True)

    def note(
        self,
        kind: str,
        target: LeaseUse | StartedRun | str,
        *,
        deployment: Deployment | None = None,
        lasts: float = 0.0,
    ) -> None:
        """Print and record that a trouble has begun.

        :param deployment: the deployment that it affects; None for all.
        :param lasts: for how many seconds it may affect other leases than its target.
        """
        lease_id = None
        text = str(target)
        if isinstance(target, LeaseUse):
            lease_id = target.lease_id
            text = f"{self.run_of(target)}/{target.task_id}, pid {target.pid}, "
            text += f"token {target.token} of {target.key}"
        self.say(f"{kind}: {text}")
        now = time.time()
        name = deployment.name if deployment else None
        self.troubles.append(Trouble(kind, now, now + lasts, lease_id, name))

    # -- targets ---------------------------------------------------------------------------------------------

    def run_of(self, use: LeaseUse) -> StartedRun | None:
        """Return the DAG run of a guarded process."""
        return self.runs.get((use.deployment, use.dag_id, use.run_id))

    def choose_inside(self) -> tuple[LeaseUse, StartedRun]:
        """Choose a process that is inside. Prefers one whose lease has had no trouble yet.

        :raises NoTarget: no process is inside.
        """
        now = time.time()
        uses = [
            use for use in self.testbed.ledger.uses() if now - use.last < _MAX_LINE_AGE and self.run_of(use)
        ]
        troubled = {trouble.lease_id for trouble in self.troubles}
        use = self.choose([use for use in uses if use.lease_id not in troubled] or uses)
        run = self.run_of(use)
        assert run
        return use, run

    def choose_waiting(self) -> StartedRun:
        """Choose a DAG run whose acquire task waits in the triggerer.

        :raises NoTarget: there is none, or the chosen run does not wait at the moment.
        """
        were_inside = {(use.deployment, use.dag_id, use.run_id) for use in self.testbed.ledger.uses()}
        candidates = [
            run for name, run in self.runs.items() if run in self.unfinished and name not in were_inside
        ]
        run = self.choose(candidates)
        if run.deployment.task_instance(run.dag_id, run.run_id, run.acquire_task).state != "deferred":
            raise NoTarget
        return run

    def processes_of(self, use: LeaseUse) -> tuple[psutil.Process, psutil.Process]:
        """Return the process of a lease use, and its supervisor. Both belong to the deployments.

        :raises NoTarget: one of them has ended.
        """
        for deployment in self.testbed.deployments:
            by_pid = {process.pid: process for process in deployment.processes()}
            if use.pid in by_pid and (supervisor := by_pid.get(by_pid[use.pid].ppid())):
                return by_pid[use.pid], supervisor
        raise NoTarget

    def choose_component(self, name: str) -> tuple[Deployment, Component]:
        """Choose a component of this name, in a deployment that has recovered from its last trouble.

        :raises NoTarget: there is none.
        """
        components = [
            (deployment, component)
            for deployment in self.testbed.deployments
            for component in deployment.components
            if component.name == name and self._recovers_until[deployment.name] < time.time()
        ]
        return self.choose(components)

    def choose(self, candidates: Iterable[T]) -> T:
        """Choose one of the candidates.

        :raises NoTarget: there are none.
        """
        choice = list(candidates)
        if not choice:
            raise NoTarget
        return self.rng.choice(choice)

    # -- changes ---------------------------------------------------------------------------------------------

    def clear(self, run: StartedRun, task_id: str) -> None:
        """Clear a task of a DAG run, with all tasks after it and the acquire task."""
        run.deployment.clear(run.dag_id, run.run_id, [task_id])
        run.wanted_at.append(time.time())

    def disturb(
        self,
        kind: str,
        deployment: Deployment,
        component: Component,
        seconds: float,
        repair: Callable[[], None],
        *,
        recovery: float,
    ) -> None:
        """Record that a component was killed or paused, and repair it later.

        :param seconds: time until `repair` is called.
        :param recovery: for how many seconds after that it may affect the deployment.
        """
        name = _name(deployment, component)
        self.disturbed.add(name)
        self._recovers_until[deployment.name] = time.time() + seconds + self.rng.uniform(*_RECOVERY)

        def undo() -> None:
            repair()
            self.disturbed.discard(name)
            self.say(f"  {name} runs again")

        self.schedule(seconds, undo)
        target = f"{deployment.name}, for {seconds:.0f} s"
        self.note(kind, target, deployment=deployment, lasts=seconds + recovery)

    def schedule(self, seconds: float, action: Callable[[], None]) -> None:
        """Let `run_scheduled` call an action, when that many seconds have passed."""
        heapq.heappush(self._scheduled, (time.monotonic() + seconds, next(self._numbers), action))

    def run_scheduled(self, *, all_of_them: bool = False) -> None:
        """Call the scheduled actions that are due, or all of them."""
        while self._scheduled and (all_of_them or self._scheduled[0][0] <= time.monotonic()):
            heapq.heappop(self._scheduled)[2]()

    def refresh(self) -> list[tuple[Deployment, Run]]:
        """Update `runs` and `unfinished`, and restart components that died by themselves, as a service
        manager does.

        :returns: all DAG runs of all deployments.
        """
        for deployment in self.testbed.deployments:
            for component in deployment.components:
                name = _name(deployment, component)
                if name not in self.disturbed and not component.is_running:
                    self.say(f"{name} has died by itself:\n{component.tail()}")
                    component.start()
        found = [(deployment, run) for deployment in self.testbed.deployments for run in deployment.runs("~")]
        # `runs` lacks a run if the request that started it was not answered.
        for deployment, run in found:
            key = deployment.name, run.dag_id, run.run_id
            started = StartedRun(deployment, run.dag_id, run.run_id, run.conf["key"], "run ends normally")
            self.runs.setdefault(key, started)
        ended = {
            (deployment.name, run.dag_id, run.run_id) for deployment, run in found if run.state in FINISHED
        }
        self.unfinished = [run for key, run in self.runs.items() if key not in ended]
        return found


def _name(deployment: Deployment, component: Component) -> str:
    return f"{deployment.name}'s {component.name}"
