"""The triggers: they acquire, renew and release locks in the triggerer (`trigger_base` says how they are run)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import TaskSkippedEvent, TaskSuccessEvent, TriggerEvent

from airflow_dynamo_lock.airflow import alerts, lock_options, metrics, nesting, task_states
from airflow_dynamo_lock.airflow.hooks import DynamoLockHook
from airflow_dynamo_lock.airflow.last_task import (
    LAST_TASK_RELEASED,
    RELEASE_TASK_FAILED,
    RELEASED_KEY,
    was_released,
)
from airflow_dynamo_lock.airflow.links import LINK_KEY, record_url
from airflow_dynamo_lock.airflow.trigger_base import LockTrigger, in_background
from airflow_dynamo_lock.airflow.versions import XCom, in_thread
from airflow_dynamo_lock.core.model.errors import LockError, LockTimeoutError
from airflow_dynamo_lock.core.model.lease import Lease, LeaseSet
from airflow_dynamo_lock.defaults import DEFAULT_CONN_ID

if TYPE_CHECKING:
    from airflow_dynamo_lock.airflow.lock_options import OnTimeout
    from airflow_dynamo_lock.client.async_client import AsyncLockClient
    from airflow_dynamo_lock.client.options import ClaimOptions
    from airflow_dynamo_lock.core.model.claim import Mode
    from airflow_dynamo_lock.core.model.record import LockRecord


class DynamoLockAcquireTrigger(LockTrigger):
    """Waits for the lock, acquires it, and ends the task.

    :param deadline: end of the waiting, in epoch seconds by this deployment's clock; None waits for `timeout`
        from now.
    :param resume: resume the task on a worker with the leases, instead of ending it here.
    :param resume_after: minimum seconds from the start of the trigger until the task is resumed. Until then
        the trigger sends the heartbeats. See `versions.RESUME_AFTER` for the reason.
    :param outer_acquires: acquire tasks of the groups around the task, as `nesting.outer_acquires` returns them.
    :param on_wait: the alert for a long wait, as `LockAlert.as_json` returns it.
    :param has_retries: see `LockTrigger`.

    The other parameters are those of `DynamoLockAcquireOperator`, with durations in seconds.
    """

    arguments = (
        *lock_options.PARAMETERS,
        "on_timeout",
        "dynamo_lock_conn_id",
        "deadline",
        "resume",
        "resume_after",
        "outer_acquires",
        "on_wait",
        "has_retries",
    )

    def __init__(
        self,
        key: str | Sequence[str],
        on_timeout: OnTimeout = "fail",
        dynamo_lock_conn_id: str = DEFAULT_CONN_ID,
        deadline: float | None = None,
        resume: bool = False,
        resume_after: float = 0.0,
        outer_acquires: list[list[Any]] | None = None,
        on_wait: str | None = None,
        has_retries: bool = False,
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
        self.outer_acquires = outer_acquires or []
        self.on_wait = on_wait
        self.has_retries = has_retries
        # The link that is not stored yet.
        self._link: str | None = None

    async def work(self) -> TriggerEvent:
        started = time.monotonic()
        wanted = lock_options.Wanted.of(self)
        try:
            hook = DynamoLockHook(self.dynamo_lock_conn_id)
            await hook.aget_settings()
            self.time_line.end("connection")
            async with hook.async_client() as (client, settings):
                self.time_line.end("client")
                self._link = record_url(settings, client.region_name, wanted.keys[0])
                held = await self._acquire(
                    client, wanted, lock_options.claim_options(self.ti, settings, wanted)
                )
                self.time_line.end("grant")
                if self.resume:
                    await self._send_heartbeats_for(
                        started + self.resume_after - time.monotonic(), client, held
                    )
        except LockTimeoutError as failure:
            if self.on_timeout == "fail":
                raise
            self.log.error("%s", failure)
            return TaskSkippedEvent()
        result = lock_options.as_result(held, wanted.keys, many=not isinstance(self.key, str))
        if not self.resume:
            # Not as a part of the event: downstream tasks would receive the result as JSON text.
            await in_thread(XCom.set, value=result, **lock_options.xcom_arguments(self.ti, self.ti.task_id))
            self.time_line.end("result")
        self._store_link()
        return TriggerEvent(result) if self.resume else TaskSuccessEvent()

    def _store_link(self) -> None:
        """Store the link to the lock's record in the AWS console, once, if there is one.

        A background task does that: before the wait, so that the page of the waiting task has the link; and if there
        was no wait, after all else, because the event need not wait for it.
        """
        if self._link is not None:
            in_background(self._store(self._link))
            self._link = None

    async def _store(self, link: str) -> None:
        try:
            await in_thread(
                XCom.set, value=link, **lock_options.xcom_arguments(self.ti, self.ti.task_id, LINK_KEY)
            )
        except Exception as failure:
            self.log.warning("Could not store the link to the lock's record: %s", failure)

    async def on_kill(self) -> None:
        """Leave the queue, because the task was marked or cleared while it waited.

        Otherwise the waiters behind it would wait until this one is proven dead.
        """
        async with DynamoLockHook(self.dynamo_lock_conn_id).async_client() as (client, _):
            for key in lock_options.Wanted.of(self).keys:
                await client.leave_queue(key, str(self.ti.id))

    async def _acquire(
        self, client: AsyncLockClient, wanted: lock_options.Wanted, options: ClaimOptions
    ) -> LeaseSet:
        log_holders = lock_options.holder_log(self.log)
        busy_key, waits_since = wanted.keys[0], time.time()

        def on_busy(record: LockRecord) -> None:
            nonlocal busy_key
            busy_key = record.key
            self._store_link()
            log_holders(record)

        async def since() -> float:
            # Another triggerer may have begun this wait. Without a queue to read, it counts from this trigger's start.
            nonlocal waits_since
            with suppress(LockError):
                own = [
                    each for each in await client.waiters(busy_key) if each.lease_id == options["lease_id"]
                ]
                waits_since = min([waits_since, *(each.since_ms / 1000 for each in own)])
            return waits_since

        async def report() -> alerts.Report | None:
            record = await client.get(busy_key)
            return (
                None if record is None else alerts.report_of_wait(str(options["owner"]), waits_since, record)
            )

        with metrics.wait_span(wanted.keys):
            async with alerts.in_triggerer(self, "on_wait", since=since, report=report):
                return await client.acquire(
                    wanted.keys,
                    timeout=_remaining(wanted.timeout, self.deadline),
                    on_busy=on_busy,
                    on_position=lock_options.position_log(self.log),
                    holding=await self._held_outside(),
                    **options,
                )

    async def _held_outside(self) -> list[Lease]:
        """The leases of the groups around the task."""
        outer = self.outer_acquires
        return await in_thread(nesting.held_in_triggerer, self.ti, outer) if outer else []

    async def _send_heartbeats_for(self, duration: float, client: AsyncLockClient, held: LeaseSet) -> None:
        """Send heartbeats for `duration` seconds. If that is not positive, return at once."""
        if duration <= 0:
            return
        self.log.info(
            "Acquired the lock. The task continues on a worker in %.0f s; Airflow cannot resume it earlier.",
            duration,
        )
        every = lock_options.interval(None, held.leases[0].lease_ms / 1000)
        heartbeats = asyncio.ensure_future(client.keep_for_processes(held, interval=every))
        try:
            await asyncio.wait((heartbeats,), timeout=duration)
        finally:
            heartbeats.cancel()
            await asyncio.wait((heartbeats,))


class DynamoLockHeartbeatTrigger(LockTrigger):
    """Sends the heartbeats of an acquire task's leases until they are released, drained or lost.

    :param acquire_task_id: id of the task that acquired the leases.
    :param heartbeat: seconds between heartbeats. Default a twelfth of the lease.
    :param dynamo_lock_conn_id: id of the ``dynamo_lock`` connection.
    :param release_task_id: id of the task that releases the leases. If it ends without a release, this
        trigger releases them; otherwise the lock would be held for ever. None: no such task.
    :param on_held: the alert for a lock that is held for long, as `LockAlert.as_json` returns it.
    """

    arguments = ("acquire_task_id", "heartbeat", "dynamo_lock_conn_id", "release_task_id", "on_held")

    def __init__(
        self,
        acquire_task_id: str,
        heartbeat: float | str | None = None,
        dynamo_lock_conn_id: str = DEFAULT_CONN_ID,
        release_task_id: str | None = None,
        on_held: str | None = None,
    ) -> None:
        super().__init__()
        self.on_held = on_held
        self.acquire_task_id = acquire_task_id
        self.heartbeat = heartbeat
        self.dynamo_lock_conn_id = dynamo_lock_conn_id
        self.release_task_id = release_task_id

    async def work(self) -> TriggerEvent:
        held = lock_options.from_result(
            await in_thread(XCom.get_one, **lock_options.xcom_arguments(self.ti, self.acquire_task_id)),
            self.acquire_task_id,
        )
        first = held.leases[0]

        async def since() -> float:
            return first.acquired_at_ms / 1000

        async def report() -> alerts.Report | None:
            return alerts.report_of_hold(first, await client.get(first.key))

        async with (
            DynamoLockHook(self.dynamo_lock_conn_id).async_client() as (client, _),
            alerts.in_triggerer(self, "on_held", since=since, report=report),
        ):
            await self._send_heartbeats(client, held)
        return TaskSuccessEvent()

    async def _send_heartbeats(self, client: AsyncLockClient, held: LeaseSet) -> None:
        """Send heartbeats until the leases have ended. If the release task fails to, release them."""
        every = lock_options.interval(self.heartbeat, held.leases[0].lease_ms / 1000)
        heartbeats = asyncio.ensure_future(client.keep_for_processes(held, interval=every))
        # The poller detects a release sooner than the next heartbeat does, so that the DAG run ends sooner.
        gone = asyncio.ensure_future(self._until_all_gone(client, held))
        release_ended = asyncio.ensure_future(self._until_release_task_ended())
        tasks = (heartbeats, gone, release_ended)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()  # raises the error of a task that failed
            if not heartbeats.done() and not gone.done():
                self.log.warning(RELEASE_TASK_FAILED, self.release_task_id)
                await client.release(held, retry_for=None)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)  # they use the client, which may be closed after this
        for lease in held:
            self.log.info(
                "The lock %r (lease %s) was released, is draining or was lost. Ending the heartbeat task.",
                lease.key,
                lease.lease_id,
            )

    async def _until_all_gone(self, client: AsyncLockClient, held: LeaseSet) -> None:
        """Wait until the record shows each lease as gone or draining. If a read fails, raise its error."""
        try:
            async with asyncio.TaskGroup() as group:
                for lease in held:
                    group.create_task(client.until_gone(lease))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _until_release_task_ended(self) -> None:
        """Wait until the release task has ended, and a release by it would have been detected."""
        if self.release_task_id is None:
            await asyncio.Event().wait()
        else:
            await task_states.until_ended(self.ti, self.release_task_id)
            await asyncio.sleep(task_states.RELEASE_DETECTION_SECONDS)


class DynamoLockReleaseTrigger(LockTrigger):
    """Releases the leases of an acquire task, or drains them while processes are inside (R8).

    :param acquire_task_id: id of the task that acquired the leases.
    :param dynamo_lock_conn_id: id of the ``dynamo_lock`` connection.
    """

    arguments = ("acquire_task_id", "dynamo_lock_conn_id")

    def __init__(self, acquire_task_id: str, dynamo_lock_conn_id: str = DEFAULT_CONN_ID) -> None:
        super().__init__()
        self.acquire_task_id = acquire_task_id
        self.dynamo_lock_conn_id = dynamo_lock_conn_id

    async def work(self) -> TriggerEvent:
        held = lock_options.from_result(
            await in_thread(XCom.get_one, **lock_options.xcom_arguments(self.ti, self.acquire_task_id)),
            self.acquire_task_id,
        )
        released = await in_thread(
            XCom.get_one, **lock_options.xcom_arguments(self.ti, self.acquire_task_id, RELEASED_KEY)
        )
        async with DynamoLockHook(self.dynamo_lock_conn_id).async_client() as (client, _):
            if was_released(released, held) and not await _is_any_held(client, held):
                self.log.info(LAST_TASK_RELEASED, held)
                return TaskSuccessEvent()
            # Retry without a time limit: until the release, the heartbeat task renews the lease without one.
            await client.release(held, retry_for=None)
        return TaskSuccessEvent()


class DynamoLockSensorTrigger(LockTrigger):
    """Waits until the lock has capacity for the slots, and ends the task.

    :param deadline: end of the waiting, in epoch seconds by this deployment's clock; None waits for `timeout`
        from now.
    :param has_retries: see `LockTrigger`, also for `resume_after`.

    The other parameters are those of `DynamoLockSensor`.
    """

    arguments = (
        *("key", "slots", "lock_mode", "timeout", "soft_fail", "poke_interval"),
        *("dynamo_lock_conn_id", "deadline", "has_retries", "resume_after"),
    )
    fails_for_good = (*LockTrigger.fails_for_good, LockTimeoutError)  # as Airflow does for other sensors

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
        has_retries: bool = False,
        resume_after: float = 0.0,
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
        self.has_retries = has_retries
        self.resume_after = resume_after

    async def work(self) -> TriggerEvent:
        timeout = _remaining(self.timeout, self.deadline)
        try:
            async with DynamoLockHook(self.dynamo_lock_conn_id).async_client() as (client, _):
                slots, mode = lock_options.checked_look(self.slots, self.lock_mode)
                await client.wait(
                    lock_options.checked_key(self.key),
                    slots=slots,
                    mode=mode,
                    timeout=timeout,
                    poll_interval=self.poke_interval,
                )
        except LockTimeoutError as failure:
            if not self.soft_fail:
                raise
            self.log.error("%s", failure)
            return TaskSkippedEvent()
        return TaskSuccessEvent()


async def _is_any_held(client: AsyncLockClient, held: LeaseSet) -> bool:
    """Whether a record shows one of the leases. A failed read proves nothing."""
    try:
        records = [await client.get(lease.key) for lease in held]
    except LockError:
        return True
    return any(
        record is not None and record.is_held(lease.lease_id)
        for lease, record in zip(held, records, strict=True)
    )


def _remaining(timeout: float | None, deadline: float | None) -> float | None:
    """Seconds to wait: until `deadline` (epoch seconds) if there is one, else `timeout`. None: no limit."""
    return timeout if deadline is None else max(0.0, deadline - time.time())
