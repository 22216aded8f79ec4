"""What waits, beats and releases in the triggerer, where it costs no worker.

A trigger may be run twice at once, restarted half-way, and cancelled at any moment. So none of them gives a lease back
because *it* ends (rule R8), and each holds under the task instance's own id (rule R7): its double finds the same lease.
Nothing is checked in a constructor: an exception there would end the whole triggerer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.triggers.base import (
    BaseTrigger,
    TaskFailedEvent,
    TaskSkippedEvent,
    TaskSuccessEvent,
    TriggerEvent,
)

from airflow_dynamo_lock.airflow import lock_options, task_states
from airflow_dynamo_lock.airflow.hooks import DynamoLockHook
from airflow_dynamo_lock.airflow.links import LINK_KEY, record_url
from airflow_dynamo_lock.airflow.versions import XCom, in_thread
from airflow_dynamo_lock.core.model.errors import LockError, LockTimeoutError
from airflow_dynamo_lock.core.model.lease import LeaseSet
from airflow_dynamo_lock.defaults import DEFAULT_CONN_ID

if TYPE_CHECKING:
    from airflow_dynamo_lock.airflow.lock_options import OnTimeout
    from airflow_dynamo_lock.client.async_client import AsyncLockClient
    from airflow_dynamo_lock.client.options import ClaimOptions
    from airflow_dynamo_lock.core.model.claim import Mode


# How soon a keeper sees that its lease was given back, at the latest, while DynamoDB can be reached, in seconds.
_NOTICED = 5.0


class LockTrigger(BaseTrigger):
    """What they share: arguments that are attributes, and an error of ours ends the task from here."""

    arguments: ClassVar[tuple[str, ...]]

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.{type(self).__name__}", {name: getattr(self, name) for name in self.arguments}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        await task_states.until_deferred(self.ti)
        working = asyncio.ensure_future(self.work())
        orphaned = asyncio.ensure_future(task_states.until_orphaned(self.ti))
        try:
            await asyncio.wait((working, orphaned), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                # Nobody would hear of what it does. Airflow starts it again, and then it waits to be wanted.
                return
            event = working.result()
        except LockError as failure:
            # The event carries no reason; the log is where people look.
            self.log.error("%s", failure)
            event = TaskFailedEvent()
        finally:
            working.cancel()
            orphaned.cancel()
            await asyncio.wait((working, orphaned))  # `on_kill` comes after what they still do
        yield event

    async def work(self) -> TriggerEvent:
        """Do it; return the event that ends it."""
        raise NotImplementedError

    @property
    def ti(self) -> Any:
        """The task instance that this runs for. Only ``dag.test()`` has none, and there nothing defers."""
        return self.task_instance


class DynamoLockAcquireTrigger(LockTrigger):
    """Waits for the lock, takes it, and ends the task.

    :param deadline: when the waiting ends, epoch seconds by this deployment's clock; None counts `timeout` from now.
    :param resume: give the leases to the task on a worker instead of ending it here.
    :param resume_after: do that no sooner than this many seconds after the trigger has started, and keep the leases
        meanwhile; see `versions.RESUME_AFTER`.

    The other parameters are those of `DynamoLockAcquireOperator`, with durations in seconds.
    """

    arguments = (
        *lock_options.PARAMETERS,
        "on_timeout",
        "dynamo_lock_conn_id",
        "deadline",
        "resume",
        "resume_after",
    )

    def __init__(
        self,
        key: str | Sequence[str],
        on_timeout: OnTimeout = "fail",
        dynamo_lock_conn_id: str = DEFAULT_CONN_ID,
        deadline: float | None = None,
        resume: bool = False,
        resume_after: float = 0.0,
        **wanted: Any,
    ) -> None:
        super().__init__()
        for name, default in lock_options.PARAMETERS.items():
            setattr(self, name, wanted.get(name, default))
        self.key = key
        self.on_timeout = on_timeout
        self.dynamo_lock_conn_id = dynamo_lock_conn_id
        self.deadline = deadline
        self.resume = resume
        self.resume_after = resume_after

    async def work(self) -> TriggerEvent:
        started = time.monotonic()
        wanted = lock_options.Wanted.of(self)
        try:
            async with DynamoLockHook(self.dynamo_lock_conn_id).async_client() as (client, settings):
                if url := record_url(settings, client.region_name, wanted.keys[0]):
                    await in_thread(
                        XCom.set, value=url, **lock_options.xcom_of(self.ti, self.ti.task_id, LINK_KEY)
                    )
                held = await self._acquire(
                    client, wanted, lock_options.claim_options(self.ti, settings, wanted)
                )
                await self._keep(client, held, started + self.resume_after - time.monotonic())
        except LockTimeoutError as failure:
            self.log.error("%s", failure)
            return TaskSkippedEvent() if self.on_timeout == "skip" else TaskFailedEvent()
        result = lock_options.as_result(held, wanted.keys, many=not isinstance(self.key, str))
        if self.resume:
            return TriggerEvent(result)
        # Written by ourselves: as a part of the event it would arrive downstream as JSON text.
        await in_thread(XCom.set, value=result, **lock_options.xcom_of(self.ti, self.ti.task_id))
        return TaskSuccessEvent()

    async def on_kill(self) -> None:
        """Somebody has marked or cleared the task. Those behind it in line need not wait until it is proven dead."""
        async with DynamoLockHook(self.dynamo_lock_conn_id).async_client() as (client, _):
            for key in lock_options.Wanted.of(self).keys:
                await client.leave_queue(key, str(self.ti.id))

    async def _acquire(
        self, client: AsyncLockClient, wanted: lock_options.Wanted, options: ClaimOptions
    ) -> LeaseSet:
        return await client.acquire(
            wanted.keys,
            timeout=wanted.timeout if self.deadline is None else max(0.0, self.deadline - time.time()),
            on_busy=lock_options.busy_log(self.log),
            on_position=lock_options.place_log(self.log),
            **options,
        )

    async def _keep(self, client: AsyncLockClient, held: LeaseSet, duration: float) -> None:
        """Send heartbeats for `duration` seconds; at once over where that is none."""
        if duration <= 0:
            return
        self.log.info(
            "Acquired; the task continues on a worker in %.0f s, once Airflow can resume it.", duration
        )
        every = lock_options.interval(None, held.leases[0].lease_ms / 1000)
        keeping = asyncio.ensure_future(client.keep_for_processes(held, interval=every))
        try:
            await asyncio.wait((keeping,), timeout=duration)
        finally:
            keeping.cancel()
            await asyncio.wait((keeping,))


class DynamoLockHeartbeatTrigger(LockTrigger):
    """Keeps the leases of an acquire task alive until they are given back, taken away or lost.

    :param acquire_task_id: the task that acquired them.
    :param heartbeat: seconds between beats; None for a twelfth of the lease.
    :param release_task_id: the task that is to give them back. Once it has ended without, the keeper does; else it
        would keep the lock for ever.
    """

    arguments = ("acquire_task_id", "heartbeat", "dynamo_lock_conn_id", "release_task_id")

    def __init__(
        self,
        acquire_task_id: str,
        heartbeat: float | str | None = None,
        dynamo_lock_conn_id: str = DEFAULT_CONN_ID,
        release_task_id: str | None = None,
    ) -> None:
        super().__init__()
        self.acquire_task_id = acquire_task_id
        self.heartbeat = heartbeat
        self.dynamo_lock_conn_id = dynamo_lock_conn_id
        self.release_task_id = release_task_id

    async def work(self) -> TriggerEvent:
        held = lock_options.from_result(
            await in_thread(XCom.get_one, **lock_options.xcom_of(self.ti, self.acquire_task_id)),
            self.acquire_task_id,
        )
        async with DynamoLockHook(self.dynamo_lock_conn_id).async_client() as (client, _):
            await self._keep(client, held)
        return TaskSuccessEvent()

    async def _keep(self, client: AsyncLockClient, held: LeaseSet) -> None:
        every = lock_options.interval(self.heartbeat, held.leases[0].lease_ms / 1000)
        keeping = asyncio.ensure_future(client.keep_for_processes(held, interval=every))
        # A release is noticed at the next look, not only at the next beat, or the run would linger.
        gone = asyncio.ensure_future(self._until_gone(client, held))
        forsaken = asyncio.ensure_future(self._until_forsaken())
        try:
            await asyncio.wait((keeping, gone, forsaken), return_when=asyncio.FIRST_COMPLETED)
            for ended in (keeping, gone, forsaken):
                if ended.done():
                    ended.result()
            if not keeping.done() and not gone.done():
                self.log.warning("The task %r has ended, but not the lease.", self.release_task_id)
                await client.release(held, retry_for=None)
        finally:
            keeping.cancel()
            gone.cancel()
            forsaken.cancel()
            await asyncio.wait((keeping, gone, forsaken))  # the client is closed after what they still do
        for lease in held:
            self.log.info(
                "The lock %r (lease %s) is given back or lost; the keeper ends.", lease.key, lease.lease_id
            )

    async def _until_gone(self, client: AsyncLockClient, held: LeaseSet) -> None:
        try:
            async with asyncio.TaskGroup() as looking:
                for each in held:
                    looking.create_task(client.until_gone(each))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _until_forsaken(self) -> None:
        """Wait until the release task has ended, and what it did would have been noticed."""
        if self.release_task_id is None:
            await asyncio.Event().wait()
        else:
            await task_states.until_ended(self.ti, self.release_task_id)
            await asyncio.sleep(_NOTICED)


class DynamoLockReleaseTrigger(LockTrigger):
    """Gives the leases of an acquire task back; while processes are inside, it abandons them (rule R8).

    :param acquire_task_id: the task that acquired them.
    """

    arguments = ("acquire_task_id", "dynamo_lock_conn_id")

    def __init__(self, acquire_task_id: str, dynamo_lock_conn_id: str = DEFAULT_CONN_ID) -> None:
        super().__init__()
        self.acquire_task_id = acquire_task_id
        self.dynamo_lock_conn_id = dynamo_lock_conn_id

    async def work(self) -> TriggerEvent:
        held = lock_options.from_result(
            await in_thread(XCom.get_one, **lock_options.xcom_of(self.ti, self.acquire_task_id)),
            self.acquire_task_id,
        )
        async with DynamoLockHook(self.dynamo_lock_conn_id).async_client() as (client, _):
            # Without end, as the keeper goes on without end: one that gave up would leave the lease to the other.
            await client.release(held, retry_for=None)
        return TaskSuccessEvent()


class DynamoLockSensorTrigger(LockTrigger):
    """Waits until the slots could be taken, and ends the task. The parameters are those of `DynamoLockSensor`.

    :param deadline: as for `DynamoLockAcquireTrigger`.
    """

    arguments = (
        *("key", "slots", "lock_mode", "timeout", "soft_fail", "poke_interval"),
        *("dynamo_lock_conn_id", "deadline"),
    )

    def __init__(
        self,
        key: str,
        slots: int | str = 1,
        timeout: float | None = None,
        soft_fail: bool = False,
        poke_interval: float = 1.0,
        dynamo_lock_conn_id: str = DEFAULT_CONN_ID,
        deadline: float | None = None,
        lock_mode: Mode = "exclusive",
    ) -> None:
        super().__init__()
        self.key = key
        self.slots = slots
        self.lock_mode = lock_mode
        self.timeout = timeout
        self.soft_fail = soft_fail
        self.poke_interval = poke_interval
        self.dynamo_lock_conn_id = dynamo_lock_conn_id
        self.deadline = deadline

    async def work(self) -> TriggerEvent:
        timeout = self.timeout if self.deadline is None else max(0.0, self.deadline - time.time())
        try:
            async with DynamoLockHook(self.dynamo_lock_conn_id).async_client() as (client, _):
                await client.wait(
                    self.key,
                    slots=lock_options.whole("slots", self.slots),
                    mode=self.lock_mode,
                    timeout=timeout,
                    poll_interval=self.poke_interval,
                )
        except LockTimeoutError as failure:
            self.log.error("%s", failure)
            return TaskSkippedEvent() if self.soft_fail else TaskFailedEvent()
        return TaskSuccessEvent()
