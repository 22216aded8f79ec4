"""A simulated Airflow deployment: a scheduler for each run of a DAG, a triggerer, and workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow_dynamo_lock.client.async_client import AsyncLockClient
from airflow_dynamo_lock.core.model.errors import LockError, LockLostError
from airflow_dynamo_lock.core.model.lease import Lease
from proof.simulator.guards import GuardedTask
from proof.simulator.network import resolve
from proof.simulator.world import Process

if TYPE_CHECKING:
    from proof.simulator.history import History

# An operation in a triggerer, with a client that belongs to its process.
_Operation = Callable[[Process, AsyncLockClient], Coroutine[Any, Any, Any]]

# Longest time in seconds until a trigger notices that its task has ended or was cleared.
_ORPHANED_WITHIN = 25.0


@dataclass(frozen=True)
class _Trigger:
    """A deferred operation.

    :ivar scheduler: process that waits for the result.
    """

    scheduler: Process
    operation: _Operation
    result: asyncio.Future[Any]


class Airflow:
    """A deployment.

    A scheduler is never faulty, but it knows of other processes only what Airflow's scheduler would know: it
    may consider a task ended while the task's process is still at work.

    :ivar triggerer: process of the present triggerer.
    """

    def __init__(self, history: History) -> None:
        self.history, self.world, self.checker = history, history.world, history.checker
        # Triggers whose tasks wait for them, by trigger number.
        self._unfinished: dict[int, _Trigger] = {}
        # All triggers ever started: the trigger number, and the function that cancels the trigger.
        self._started: list[tuple[int, Callable[[], object]]] = []
        # Processes that may act for the leases of this deployment.
        self._processes: list[Process] = []
        self._trigger_count = self._attempt_count = 0
        self._start_triggerer()

    # -- the triggerer --------------------------------------------------------------------------------------

    def _start_triggerer(self) -> None:
        self.triggerer = self.history.process("triggerer")
        self._processes.append(self.triggerer)
        self._client = self.history.connect(self.triggerer)

    def replace_triggerer(self) -> None:
        """Start a new triggerer, which takes over the unfinished triggers of the old one.

        The old triggerer may be killed now or later, or live on.
        """
        old, rng, started = self.triggerer, self.world.random, list(self._started)
        self._start_triggerer()
        self.world.faults["triggerer replaced"] += 1
        self.world.log(f"takes over from {old.name}", self.triggerer)
        if rng.random() < 0.6:
            self.history.faults.kill(old)
        elif rng.random() < 0.7:
            self.world.at(self.world.now + rng.random() * 10, None, self.history.faults.kill, old)
        if old.alive and rng.random() < 0.5:
            # The old triggerer notices that its triggers were reassigned, and cancels them.
            for _, cancel in started:
                self.world.at(self.world.now + rng.random() * 3, None, cancel)
        for number in self._unfinished:
            self._start_trigger(number)

    async def _defer(self, scheduler: Process, operation: _Operation) -> Any:
        """Run an operation in the triggerer, and again in a new triggerer until it has ended in one of them.

        :returns: result of the operation; None if it raised a `LockError`.
        """
        self._trigger_count += 1
        number, result = self._trigger_count, scheduler.create_future()
        self._unfinished[number] = _Trigger(scheduler, operation, result)
        self._start_trigger(number)
        return await result

    def _start_trigger(self, number: int) -> None:
        trigger = self._unfinished[number]
        work = trigger.operation(self.triggerer, self._client)
        cancel = self._run(
            self.triggerer, work, trigger.scheduler, trigger.result, lambda: self._orphan_later(number)
        )
        self._started.append((number, cancel))

    def _orphan_later(self, number: int) -> None:
        """Cancel a trigger wherever it still runs, because its task has ended or was cleared.

        The trigger notices that some time later, as by `task_states.until_orphaned`.
        """
        self._unfinished.pop(number, None)
        self.world.at(
            self.world.now + self.world.random.uniform(0, _ORPHANED_WITHIN), None, self._orphan, number
        )

    def _orphan(self, number: int) -> None:
        for each, cancel in self._started:
            if each == number:
                cancel()

    def _run(
        self,
        process: Process,
        work: Coroutine[Any, Any, Any],
        scheduler: Process,
        result: asyncio.Future[Any],
        on_end: Callable[[], object] = lambda: None,
    ) -> Callable[[], object]:
        """Run a coroutine in a process, and send its result to the scheduler.

        :param result: future of the scheduler; None stands for a `LockError`.
        :param on_end: called when the scheduler receives the result.
        :returns: function that cancels the coroutine.
        """

        def receive(value: Any) -> None:
            on_end()
            if not result.done():
                result.set_result(value)

        async def until_done() -> None:
            try:
                value = await work
            except LockError as failure:
                self.world.log(f"fails: {failure}", process)
                value = None
            self.world.at(process.true_now, scheduler, receive, value)

        return process.start(until_done())

    # -- a run of a DAG: a group with one or two guarded tasks ----------------------------------------------

    def start_run(self) -> None:
        """Start a run, with further attempts as long as somebody clears its tasks."""
        scheduler, key = self.history.process("run"), self.world.random.choice(self.history.keys)
        self.history.schedulers.append(scheduler)

        async def until_done() -> None:
            while await self._attempt(key, scheduler):
                pass

        self.history.start(scheduler, f"works under {key}", until_done())

    async def _attempt(self, key: str, scheduler: Process) -> bool:
        """Run the acquire task, the heartbeat task, the guarded tasks and the release task of a group once.

        :returns: whether somebody has cleared a task, so that another attempt follows.
        """
        rng = self.world.random
        self._attempt_count += 1
        lease_id = f"ti{self._attempt_count:04}"
        self.checker.deputies[lease_id] = self._processes
        claim: Any = self.history.claim(lease_id) | {
            "lease_id": lease_id,
            "attempt_of": scheduler.name,
        }

        # Futures that end the heartbeat triggers, each with its process.
        heartbeats: list[tuple[Process, asyncio.Future[None]]] = []
        release_ended = False

        async def acquire(process: Process, locks: AsyncLockClient) -> Lease:
            begun = process.true_now
            lease = await locks.acquire(key, **claim)
            self.checker.confirmed(process, lease, begun, process.true_now)
            return lease

        async def heartbeat(process: Process, locks: AsyncLockClient) -> None:
            # As `DynamoLockHeartbeatTrigger` does: until a heartbeat or a poll shows that the lease is gone,
            # or until Airflow, which the trigger asks from time to time, says that the release task has
            # ended.
            beating = asyncio.ensure_future(locks.keep_for_processes(held, interval=self.history.lease / 3))
            gone = asyncio.ensure_future(locks.until_gone(held, poll_interval=self.history.poll))
            orphaned = process.create_future()
            if release_ended:
                due = process.true_now + rng.uniform(0, _ORPHANED_WITHIN)
                self.world.at(due, process, resolve, orphaned, None)
            heartbeats.append((process, orphaned))
            try:
                await asyncio.wait((beating, gone, orphaned), return_when=asyncio.FIRST_COMPLETED)
                if not beating.done() and not gone.done():
                    await locks.release(held, retry_for=None)
            finally:
                beating.cancel()
                gone.cancel()

        async def release(process: Process, locks: AsyncLockClient) -> None:
            await locks.release(held, retry_for=None)

        self.checker.queue.processes[lease_id] = lambda: self.triggerer
        with self.checker.queue.waits(lease_id):
            acquired: Lease | None = await self._defer(scheduler, acquire)
        if acquired is None:
            return False
        held = Lease.from_dict(acquired.as_dict())  # as an XCom transfers it
        heartbeat_ended = asyncio.ensure_future(self._defer(scheduler, heartbeat))
        await asyncio.sleep(0)  # until the heartbeat trigger has its number
        heartbeat_number = self._trigger_count
        cleared = False
        for left in reversed(range(rng.randint(1, 2))):
            cleared = await self._task(held, scheduler, releases=left == 0 and self._attempt_count % 3 != 0)
            if cleared:
                break
        if cleared and rng.random() < 0.7:
            # The whole group was cleared. The next attempt has to supersede this lease.
            self._orphan_later(heartbeat_number)
            return True
        await self._defer(scheduler, release)
        release_ended = True
        for process, orphaned in heartbeats:
            due = scheduler.true_now + rng.uniform(0, _ORPHANED_WITHIN)
            self.world.at(due, process, resolve, orphaned, None)
        await heartbeat_ended
        return cleared

    async def _task(self, held: Lease, scheduler: Process, *, releases: bool) -> bool:
        """Run a guarded task in a process of its own.

        :param releases: if the task succeeds, its process releases the lease as it exits. Without it, the process did
            not receive the states of the other tasks.
        :returns: whether somebody has cleared it.
        """
        rng = self.world.random
        process = self.history.process("worker")
        self._processes.append(process)
        ended = scheduler.create_future()

        # The supervisor reports a success before the process exits, and a process that its guard has ended.
        def report() -> None:
            self.world.at(self.world.now, scheduler, resolve, ended, None)

        if self.history.threads:
            work = GuardedTask(self.history, process, held, report, releases=releases).run()
        else:
            work = self._guarded(process, held, report, releases)
        self._run(process, work, scheduler, ended)
        fate = (
            rng.choices(["", "marked", "killed", "cleared"], [6, 2, 2, 2])[0] if self.history.faulty else ""
        )
        # Airflow considers a process dead that sends no heartbeats for long, and kills it.
        await asyncio.wait([ended], timeout=rng.random() * self.history.lease if fate else 100.0)
        if fate:
            self.world.faults[f"task {fate}"] += 1
            self.world.log(f"has its task {fate}", process)
        if fate or not ended.done():
            # Airflow considers the task ended at once, but its process may run for some seconds more.
            delay = 0.0 if fate == "killed" else rng.uniform(1.0, 6.0)
            self.world.at(scheduler.true_now + delay, None, self.history.faults.kill, process)
        return fate == "cleared"

    async def _guarded(
        self, process: Process, held: Lease, report: Callable[[], None], releases: bool
    ) -> None:
        """Enter the lease, work under it and leave it, as the guard does, by the asynchronous client."""
        locks = self.history.connect(process)
        lost = process.create_future()
        heartbeats, succeeded = None, False
        try:
            entered = await locks.enter(held, process.name)
            heartbeats = locks.keep_alive(
                entered, interval=entered.lease_ms / 3000, on_lost=lambda *_: lost.set_result(None)
            )
            with self.checker.using(process, entered, inside=True):
                longest = self.history.lease if self.history.faulty else 1.0
                await asyncio.wait([lost], timeout=self.world.random.random() * longest)
            succeeded = not lost.done()
        except LockLostError as refused:
            self.world.log(f"does not start: {refused}", process)
        finally:
            if heartbeats is not None:
                heartbeats.cancel()
            if succeeded:
                report()
            # Leave in any case: an `enter` without an answer may have been applied.
            await locks.leave(held, process.name, release=succeeded and releases)
