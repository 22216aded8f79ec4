"""The troubles. Each affects a process inside, a run that waits or has ended, or what all runs need.

Each has a weight, by which it is chosen at random, and a name, under which the report counts it. A trouble
that finds no target raises `NoTarget`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from airflow_dynamo_lock import LockUnavailableError
from proof.airflow.chaos.state import ChaosState, NoTarget
from proof.airflow.testbed import GRACE, LEASE

Cause = Callable[[ChaosState], None]
#: All troubles, with their weights.
TROUBLES: list[tuple[int, Cause]] = []

# Seconds within which a holder notices a break: it counts on its lease until its next heartbeat, or, if no
# further heartbeat is answered, until the lease runs out (R4).
_NOTICES_BREAK = 0.9 * GRACE + 0.1
DYNAMODB = "DynamoDB"
# Seconds that Airflow needs to recover after the triggerer or the scheduler was killed. It takes over the
# triggers of a dead triggerer after 30 s.
_RECOVERY = 40.0


def _trouble(weight: int) -> Callable[[Cause], Cause]:
    """Add the decorated function to `TROUBLES`."""

    def add(cause: Cause) -> Cause:
        TROUBLES.append((weight, cause))
        return cause

    return add


# -- processes inside ----------------------------------------------------------------------------------------


@_trouble(5)
def kill_process(state: ChaosState) -> None:
    use, _ = state.choose_inside()
    process, _ = state.processes_of(use)
    process.kill()
    state.note("process killed", use)


@_trouble(2)
def kill_supervisor(state: ChaosState) -> None:
    """Kill the supervisor only. The task continues, and Airflow can neither stop it nor learn its state."""
    use, _ = state.choose_inside()
    _, supervisor = state.processes_of(use)
    supervisor.kill()
    state.note("supervisor killed", use)


@_trouble(3)
def kill_both(state: ChaosState) -> None:
    """Kill the process and its supervisor, as if the worker's machine had died."""
    use, _ = state.choose_inside()
    for process in reversed(state.processes_of(use)):
        process.kill()
    state.note("process and supervisor killed", use)


@_trouble(5)
def pause_process(state: ChaosState) -> None:
    use, _ = state.choose_inside()
    process, _ = state.processes_of(use)
    seconds = state.rng.uniform(1, 15)
    process.suspend()

    def resume() -> None:
        state.exemptions.resumed[use.pid].append(time.time())
        with suppress(psutil.NoSuchProcess):
            process.resume()

    state.schedule(seconds, resume)
    comparison = "less" if seconds < 0.9 * GRACE else "longer"
    state.note(f"process paused, for {comparison} than the grace", use)


def _mark_task(task_state: str) -> Cause:
    def mark(state: ChaosState) -> None:
        use, run = state.choose_inside()
        run.deployment.set_task_state(use.dag_id, use.run_id, use.task_id, task_state)
        state.note(f"task marked {task_state}", use)

    return mark


def _mark_run(run_state: str) -> Cause:
    def mark(state: ChaosState) -> None:
        use, run = state.choose_inside()
        run.deployment.set_run_state(use.dag_id, use.run_id, run_state)
        state.note(f"run marked {run_state}", use)

    return mark


for _mark in ("failed", "success"):
    _trouble(4)(_mark_task(_mark))
    _trouble(2)(_mark_run(_mark))


@_trouble(6)
def clear_task(state: ChaosState) -> None:
    use, run = state.choose_inside()
    state.clear(run, use.task_id)
    state.note("task cleared", use)


@_trouble(2)
def fail_release(state: ChaosState) -> None:
    """Mark `release` as failed, as if its worker had died or its write was denied. The heartbeat task must
    act.
    """
    use, run = state.choose_inside()
    if run.dag_id == "operator":
        raise NoTarget
    run.deployment.set_task_state(use.dag_id, use.run_id, "lock.release", "failed")
    state.note("release marked failed", use)


@_trouble(5)
def break_lock(state: ChaosState) -> None:
    if DYNAMODB in state.disturbed:
        raise NoTarget
    use, _ = state.choose_inside()
    at = time.time()
    try:
        state.testbed.locks.break_lock(use.key, use.lease_id)
    except LockUnavailableError:
        # DynamoDB may still apply the write, up to a minute later.
        state.exemptions.broken[use.lease_id] = at, at + 60
        raise
    state.exemptions.broken[use.lease_id] = at, time.time() + _NOTICES_BREAK
    state.note("lock broken", use)


# -- runs that wait or have ended ----------------------------------------------------------------------------


@_trouble(4)
def clear_waiting(state: ChaosState) -> None:
    run = state.choose_waiting()
    state.clear(run, run.acquire_task)
    state.note("waiting acquire cleared", run)


@_trouble(3)
def mark_waiting_failed(state: ChaosState) -> None:
    run = state.choose_waiting()
    run.deployment.set_task_state(run.dag_id, run.run_id, run.acquire_task, "failed")
    state.note("waiting acquire marked failed", run)


@_trouble(2)
def mark_waiting_run_failed(state: ChaosState) -> None:
    run = state.choose_waiting()
    run.deployment.set_run_state(run.dag_id, run.run_id, "failed")
    state.note("waiting run marked failed", run)


@_trouble(2)
def clear_ended(state: ChaosState) -> None:
    run = state.choose(run for run in state.runs.values() if run not in state.unfinished)
    state.clear(run, run.acquire_task)
    state.note("ended run cleared", run)


# -- what all runs need --------------------------------------------------------------------------------------


@_trouble(3)
def kill_triggerer(state: ChaosState) -> None:
    deployment, triggerer = state.choose_component("triggerer")
    seconds = state.rng.uniform(0, 25)
    triggerer.kill()
    state.disturb("triggerer killed", deployment, triggerer, seconds, triggerer.start, recovery=_RECOVERY)


@_trouble(3)
def pause_triggerer(state: ChaosState) -> None:
    deployment, triggerer = state.choose_component("triggerer")
    seconds = state.rng.uniform(2, 35)
    triggerer.pause()
    state.disturb("triggerer paused", deployment, triggerer, seconds, triggerer.resume, recovery=5)


@_trouble(2)
def kill_scheduler(state: ChaosState) -> None:
    deployment, scheduler = state.choose_component("scheduler")
    seconds = state.rng.uniform(0, 10)
    scheduler.kill()
    kind = "scheduler killed with its tasks"
    state.disturb(kind, deployment, scheduler, seconds, scheduler.start, recovery=_RECOVERY)


@_trouble(2)
def kill_scheduler_alone(state: ChaosState) -> None:
    """Kill the scheduler only. Its tasks continue, beside those that the next scheduler starts."""
    deployment, scheduler = state.choose_component("scheduler")
    seconds = state.rng.uniform(0, 10)
    orphans = scheduler.processes()
    scheduler.kill_leader()
    kind = "scheduler killed, its tasks continue"
    state.disturb(kind, deployment, scheduler, seconds, scheduler.start, recovery=_RECOVERY)

    def kill_orphans() -> None:
        """Kill the workers of the dead scheduler, which receive no more tasks."""
        for orphan in orphans:
            with suppress(psutil.NoSuchProcess):
                orphan.kill()

    state.schedule(90, kill_orphans)


@_trouble(2)
def pause_scheduler(state: ChaosState) -> None:
    deployment, scheduler = state.choose_component("scheduler")
    seconds = state.rng.uniform(2, 20)
    paused = [process.pid for process in scheduler.processes()]
    scheduler.pause()

    def resume() -> None:
        for pid in paused:
            state.exemptions.resumed[pid].append(time.time())
        scheduler.resume()

    kind = "scheduler paused with its tasks"
    state.disturb(kind, deployment, scheduler, seconds, resume, recovery=5)


def _stop_dynamodb(kind: str, shortest: float, longest: float) -> Cause:
    """Return a trouble that stops the engine of the lock table for a random number of seconds."""

    def stop(state: ChaosState) -> None:
        if DYNAMODB in state.disturbed:
            raise NoTarget
        seconds = state.rng.uniform(shortest, longest)
        engine = state.testbed.engine.process
        os.kill(engine.pid, signal.SIGSTOP)
        state.disturbed.add(DYNAMODB)

        def resume() -> None:
            os.kill(engine.pid, signal.SIGCONT)
            state.disturbed.discard(DYNAMODB)
            state.say("  DynamoDB answers again")

        state.schedule(seconds, resume)
        state.note(kind, f"for {seconds:.0f} s", lasts=seconds + 5)

    return stop


_trouble(3)(_stop_dynamodb("DynamoDB does not answer", 1, 0.6 * LEASE))
_trouble(2)(_stop_dynamodb("DynamoDB does not answer for two leases", 2 * LEASE, 2.5 * LEASE))
