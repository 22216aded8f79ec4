"""The base of the triggers, which run in the triggerer, without a worker.

Airflow may run a trigger twice at the same time, restart it, or cancel it at any moment. Therefore:

- No trigger releases a lease because the trigger itself ends (R8, drain before release).
- The lease id is the id of the task instance (R7, one lease id per attempt), so a second copy of a trigger
  finds the same lease.
- Constructors check no arguments, because an exception in a trigger's constructor ends the triggerer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from typing import Any, ClassVar

from airflow.triggers.base import BaseTrigger, TaskFailedEvent, TriggerEvent

from airflow_dynamo_lock.airflow import lock_options, task_states
from airflow_dynamo_lock.airflow.hooks import DynamoLockHook
from airflow_dynamo_lock.airflow.time_line import TimeLine
from airflow_dynamo_lock.airflow.versions import RETRIES_AFTER_TRIGGER
from airflow_dynamo_lock.core.model.errors import LockDeadlockError, LockError, LockRemovedError

# Why a trigger ends whose task is no longer deferred. It ends as if it was cancelled, because an event, an error or a
# return ends the task that has the trigger's id now, and that may be another task (`task_states`). If it is still this
# one, cleared, Airflow starts the trigger again, which then waits until the task is deferred.
_ORPHANED = "the task is no longer deferred"

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
    :cvar fails_for_good: the errors after which the task is not retried.
    :ivar has_retries: whether a task that was deferred on a worker has retries.
    :ivar resume_after: seconds from now before which the task cannot be resumed, if it was deferred on a worker. See
        `versions.RESUME_AFTER` for the reason.
    """

    arguments: ClassVar[tuple[str, ...]]
    fails_for_good: ClassVar[tuple[type[LockError], ...]] = (LockRemovedError, LockDeadlockError)
    dynamo_lock_conn_id: str
    has_retries: bool = False
    resume_after: float = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.time_line = TimeLine()

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{type(self).__module__}.{type(self).__name__}", {
            name: getattr(self, name) for name in self.arguments
        }

    def get_template_env(self, dag: Any = None) -> Any:
        """The environment in which the triggerer renders templates: an undefined name is an error, as in a DAG.

        Without that, a part of a key would be missing, and it would be the key of another lock.
        """
        from jinja2 import StrictUndefined

        environment = super().get_template_env(dag)
        environment.undefined = StrictUndefined
        return environment

    async def run(self) -> AsyncIterator[TriggerEvent]:
        self.time_line = TimeLine()
        preparing = asyncio.ensure_future(self._prepare())
        try:
            deferred = await task_states.until_deferred(self.ti)
        finally:
            preparing.cancel()  # `work` joins what it has begun
        if not deferred:
            raise asyncio.CancelledError(_ORPHANED)
        self.time_line.end("task state")
        working = asyncio.ensure_future(self._event())
        orphaned = asyncio.ensure_future(task_states.until_orphaned(self.ti))
        try:
            await asyncio.wait((working, orphaned), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise asyncio.CancelledError(_ORPHANED)
            event = working.result()
        finally:
            working.cancel()
            orphaned.cancel()
            await asyncio.wait((working, orphaned))  # so that they have ended before Airflow calls `on_kill`
        self.time_line.end("end")
        self.time_line.write(self.log)
        yield event

    async def _event(self) -> TriggerEvent:
        """The event of `work`, or the one that fails the task. The reason goes into the task's log.

        Where `versions.RETRIES_AFTER_TRIGGER`, only a worker can fail a task that has retries left for good. So the
        task is resumed there.
        """
        started = time.monotonic()
        try:
            return await self.work()
        except LockError as failure:
            self.log.error("%s", failure)
            if not isinstance(failure, self.fails_for_good) or not self._may_be_retried():
                return TaskFailedEvent()
            await asyncio.sleep(started + self.resume_after - time.monotonic())
            return TriggerEvent(lock_options.fail_for_good(failure))

    def _may_be_retried(self) -> bool:
        """Whether Airflow may retry the task after `TaskFailedEvent`."""
        # Where the task has started in the triggerer, its retries may have been set after it was made: by the DAG's
        # author, or by a cluster policy.
        return RETRIES_AFTER_TRIGGER and bool(self.has_retries or getattr(self.task, "retries", 0))

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
