"""The base of the triggers, which run in the triggerer, without a worker.

Airflow may run a trigger twice at the same time, restart it, or cancel it at any moment. Therefore:

- No trigger releases a lease because the trigger itself ends (R8, drain before release).
- The lease id is the id of the task instance (R7, one lease id per attempt), so a second copy of a trigger
  finds the same lease.
- Constructors check no arguments, because an exception in a trigger's constructor ends the triggerer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from typing import Any, ClassVar

from airflow.triggers.base import BaseTrigger, TaskFailedEvent, TriggerEvent

from airflow_dynamo_lock.airflow import lock_options, task_states
from airflow_dynamo_lock.airflow.hooks import DynamoLockHook
from airflow_dynamo_lock.airflow.time_line import TimeLine
from airflow_dynamo_lock.core.model.errors import LockDeadlockError, LockError, LockRemovedError

# An event loop keeps no references to its tasks.
_in_background: set[asyncio.Future[Any]] = set()


def in_background(work: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
    """Start work that goes on also if the trigger that has started it ends."""
    started = asyncio.ensure_future(work)
    _in_background.add(started)
    started.add_done_callback(_in_background.discard)
    return started


class LockTrigger(BaseTrigger):
    """Base of the triggers. It ends the task with the event of `work`; after a `LockError`, as failed.

    :cvar arguments: names of the constructor's arguments, which are attributes of the same names.
    :ivar has_retries: whether Airflow may retry the task after `TaskFailedEvent`.
    """

    arguments: ClassVar[tuple[str, ...]]
    dynamo_lock_conn_id: str
    has_retries: bool = False

    def __init__(self) -> None:
        super().__init__()
        self.time_line = TimeLine()

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{type(self).__module__}.{type(self).__name__}", {
            name: getattr(self, name) for name in self.arguments
        }

    async def run(self) -> AsyncIterator[TriggerEvent]:
        self.time_line = TimeLine()
        preparing = asyncio.ensure_future(self._prepare())
        try:
            await task_states.until_deferred(self.ti)
        finally:
            preparing.cancel()  # `work` joins what it has begun
        self.time_line.end("task state")
        working = asyncio.ensure_future(self.work())
        orphaned = asyncio.ensure_future(task_states.until_orphaned(self.ti))
        try:
            await asyncio.wait((working, orphaned), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                # The task is no longer deferred, so it cannot receive an event. Airflow starts this trigger
                # again, which then waits until the task is deferred.
                return
            event = working.result()
        except LockError as failure:
            event = self.failed(failure, for_good=isinstance(failure, (LockRemovedError, LockDeadlockError)))
        finally:
            working.cancel()
            orphaned.cancel()
            await asyncio.wait((working, orphaned))  # so that they have ended before Airflow calls `on_kill`
        self.time_line.end("end")
        self.time_line.write(self.log)
        yield event

    def failed(self, failure: LockError, *, for_good: bool) -> TriggerEvent:
        """Return the event that fails the task. The reason goes into the task's log.

        :param for_good: whether the task fails even if it has retries left. Only a worker can do that where
            `versions.RETRIES_AFTER_TRIGGER`, so the task is resumed there.
        """
        self.log.error("%s", failure)
        if for_good and self.has_retries:
            return TriggerEvent(lock_options.fail_for_good(failure))
        return TaskFailedEvent()

    async def _prepare(self) -> None:
        """Begin to look up the connection and to create the client, if this process has none yet.

        If that fails, `work` does it again and raises the error.
        """
        with suppress(Exception):
            async with DynamoLockHook(self.dynamo_lock_conn_id).async_client():
                pass

    async def work(self) -> TriggerEvent:
        """Do the work of this trigger, and return the event that ends the task."""
        raise NotImplementedError

    @property
    def ti(self) -> Any:
        """The task instance. Only ``dag.test()`` sets none, and our operators do not defer there."""
        return self.task_instance
