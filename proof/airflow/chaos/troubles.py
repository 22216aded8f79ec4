"""The troubles: each is done to somebody who is inside, to one that waits, or to what all of them need.

Each has a weight, by which it is chosen, and the name under which it is counted. One that finds nobody to trouble
raises `NotNow`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from airflow_dynamo_lock import LockUnavailableError
from proof.airflow.chaos.scene import NotNow, Scene
from proof.airflow.room import GRACE, LEASE

Cause = Callable[[Scene], None]
#: (weight, trouble)
TROUBLES: list[tuple[int, Cause]] = []

# A broken holder counts on its lease until its next heartbeat. Its last one may be a moment old, and may be the last
# that is answered for a while (rule R4).
_NOTICES = 0.9 * GRACE + 0.1
DYNAMODB = "DynamoDB"
# How long Airflow needs to be itself again after the triggerer or the scheduler was killed: a dead triggerer's triggers
# are taken over after 30 s.
_RECOVERS = 40.0


def _trouble(weight: int) -> Callable[[Cause], Cause]:
    def add(cause: Cause) -> Cause:
        TROUBLES.append((weight, cause))
        return cause

    return add


# -- those inside -----------------------------------------------------------------------------------------------


@_trouble(5)
def kill_process(scene: Scene) -> None:
    stay, _ = scene.inside()
    process, _ = scene.process(stay)
    process.kill()
    scene.note("its process is killed", stay)


@_trouble(2)
def kill_supervisor(scene: Scene) -> None:
    """The task goes on without one: Airflow can neither stop it nor hear of it any more."""
    stay, _ = scene.inside()
    _, supervisor = scene.process(stay)
    supervisor.kill()
    scene.note("its supervisor is killed", stay)


@_trouble(3)
def kill_both(scene: Scene) -> None:
    """As when a worker machine dies."""
    stay, _ = scene.inside()
    for process in reversed(scene.process(stay)):
        process.kill()
    scene.note("its process and supervisor are killed", stay)


@_trouble(5)
def pause_process(scene: Scene) -> None:
    stay, _ = scene.inside()
    process, _ = scene.process(stay)
    seconds = scene.dice.uniform(1, 15)
    process.suspend()

    def go_on() -> None:
        scene.excuses.resumed[stay.pid].append(time.time())
        with suppress(psutil.NoSuchProcess):
            process.resume()

    scene.later(seconds, go_on)
    scene.note(f"its process is paused{_for_long(seconds)}", stay)


def _for_long(seconds: float) -> str:
    return ", for less than the grace" if seconds < 0.9 * GRACE else ", for longer than the grace"


def _mark_task(state: str) -> Cause:
    def mark(scene: Scene) -> None:
        stay, run = scene.inside()
        run.deployment.set_task_state(stay.dag_id, stay.run_id, stay.task_id, state)
        scene.note(f"its task is marked {state}", stay)

    return mark


def _mark_run(state: str) -> Cause:
    def mark(scene: Scene) -> None:
        stay, run = scene.inside()
        run.deployment.set_run_state(stay.dag_id, stay.run_id, state)
        scene.note(f"its run is marked {state}", stay)

    return mark


for _state in ("failed", "success"):
    _trouble(4)(_mark_task(_state))
    _trouble(2)(_mark_run(_state))


@_trouble(6)
def clear_task(scene: Scene) -> None:
    stay, run = scene.inside()
    scene.clear(run, stay.task_id)
    scene.note("its task is cleared", stay)


@_trouble(2)
def fail_release(scene: Scene) -> None:
    """As when the worker that releases dies, or is not allowed to write. The keeper has to see to it."""
    stay, run = scene.inside()
    if run.dag_id == "operator":
        raise NotNow
    run.deployment.set_task_state(stay.dag_id, stay.run_id, "lock.release", "failed")
    scene.note("its release has failed", stay)


@_trouble(5)
def break_lock(scene: Scene) -> None:
    if DYNAMODB in scene.disturbed:
        raise NotNow
    stay, _ = scene.inside()
    at = time.time()
    try:
        scene.room.locks.break_lock(stay.key, stay.lease_id)
    except LockUnavailableError:
        # It may be done all the same, and later.
        scene.excuses.broken[stay.lease_id] = at, at + 60
        raise
    scene.excuses.broken[stay.lease_id] = at, time.time() + _NOTICES
    scene.note("its lock is broken", stay)


# -- those who wait, and those who have ended -------------------------------------------------------------------


@_trouble(4)
def clear_waiting(scene: Scene) -> None:
    run = scene.waiting()
    scene.clear(run, run.acquire)
    scene.note("a waiting acquire is cleared", run)


@_trouble(3)
def mark_waiting_failed(scene: Scene) -> None:
    run = scene.waiting()
    run.deployment.set_task_state(run.dag_id, run.run_id, run.acquire, "failed")
    scene.note("a waiting acquire is marked failed", run)


@_trouble(2)
def mark_waiting_run_failed(scene: Scene) -> None:
    run = scene.waiting()
    run.deployment.set_run_state(run.dag_id, run.run_id, "failed")
    scene.note("a waiting run is marked failed", run)


@_trouble(2)
def clear_ended(scene: Scene) -> None:
    run = scene.one_of(run for run in scene.runs.values() if run not in scene.live)
    scene.clear(run, run.acquire)
    scene.note("an ended run is cleared", run)


# -- what all of them need --------------------------------------------------------------------------------------


@_trouble(3)
def kill_triggerer(scene: Scene) -> None:
    deployment, triggerer = scene.component("triggerer")
    seconds = scene.dice.uniform(0, 25)
    triggerer.kill()
    kind = "the triggerer is killed"
    scene.disturb(kind, deployment, triggerer, seconds, triggerer.start, recovers=_RECOVERS)


@_trouble(3)
def pause_triggerer(scene: Scene) -> None:
    deployment, triggerer = scene.component("triggerer")
    seconds = scene.dice.uniform(2, 35)
    triggerer.pause()
    scene.disturb("the triggerer is paused", deployment, triggerer, seconds, triggerer.resume, recovers=5)


@_trouble(2)
def kill_scheduler(scene: Scene) -> None:
    deployment, scheduler = scene.component("scheduler")
    seconds = scene.dice.uniform(0, 10)
    scheduler.kill()
    kind = "the scheduler is killed with its tasks"
    scene.disturb(kind, deployment, scheduler, seconds, scheduler.start, recovers=_RECOVERS)


@_trouble(2)
def kill_scheduler_alone(scene: Scene) -> None:
    """Its tasks go on, beside those that the next scheduler starts."""
    deployment, scheduler = scene.component("scheduler")
    seconds = scene.dice.uniform(0, 10)
    orphans = scheduler.processes()
    scheduler.kill_leader()
    kind = "the scheduler is killed, its tasks go on"
    scene.disturb(kind, deployment, scheduler, seconds, scheduler.start, recovers=_RECOVERS)

    def bury() -> None:
        """Workers to whom nobody gives work any more."""
        for orphan in orphans:
            with suppress(psutil.NoSuchProcess):
                orphan.kill()

    scene.later(90, bury)


@_trouble(2)
def pause_scheduler(scene: Scene) -> None:
    deployment, scheduler = scene.component("scheduler")
    seconds = scene.dice.uniform(2, 20)
    paused = [process.pid for process in scheduler.processes()]
    scheduler.pause()

    def go_on() -> None:
        for pid in paused:
            scene.excuses.resumed[pid].append(time.time())
        scheduler.resume()

    kind = "the scheduler is paused with its tasks"
    scene.disturb(kind, deployment, scheduler, seconds, go_on, recovers=5)


def _stall(kind: str, shortest: float, longest: float) -> Cause:
    def stall(scene: Scene) -> None:
        if DYNAMODB in scene.disturbed:
            raise NotNow
        seconds = scene.dice.uniform(shortest, longest)
        engine = scene.room.engine.process
        os.kill(engine.pid, signal.SIGSTOP)
        scene.disturbed.add(DYNAMODB)

        def go_on() -> None:
            os.kill(engine.pid, signal.SIGCONT)
            scene.disturbed.discard(DYNAMODB)
            scene.say("  DynamoDB answers again")

        scene.later(seconds, go_on)
        scene.note(kind, f"for {seconds:.0f} s", lasts=seconds + 5)

    return stall


_trouble(3)(_stall("DynamoDB does not answer", 1, 0.6 * LEASE))
_trouble(2)(_stall("DynamoDB does not answer, for two leases", 2 * LEASE, 2.5 * LEASE))
