"""`DynamoLock`: the group of tasks that run while a lock is held.

::

    acquire ──┬── the guarded tasks ──┬── release        acquire is the setup; heartbeat and release are its
              └── heartbeat           │                  teardowns. None of the three needs a worker.
                  (until released) ···┘
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

from airflow_dynamo_lock.airflow import lock_options
from airflow_dynamo_lock.airflow.guard import EnterLock
from airflow_dynamo_lock.airflow.operators import (
    DynamoLockAcquireOperator,
    DynamoLockHeartbeatOperator,
    DynamoLockReleaseOperator,
)
from airflow_dynamo_lock.airflow.versions import BaseOperator, MappedOperator, TaskGroup
from airflow_dynamo_lock.core.model.arguments import Seconds
from airflow_dynamo_lock.core.model.errors import LockValueError
from airflow_dynamo_lock.core.model.limits import RELEASE_GRACE
from airflow_dynamo_lock.defaults import DEFAULT_CONN_ID, DEFAULT_LEASE

if TYPE_CHECKING:
    from airflow_dynamo_lock.airflow.lock_options import OnTimeout

_PLUMBING = (DynamoLockAcquireOperator, DynamoLockHeartbeatOperator, DynamoLockReleaseOperator)


class DynamoLock(TaskGroup):
    """Tasks that run one deployment, one run at a time: ``with DynamoLock("warehouse/orders"): extract() >> load()``.

    The tasks in the block start when the lock is acquired. Each enters the lease before its own code runs, and finds it
    in its context as ``dynamo_lock``. The lock is released when all have ended, in whatever way.

    :param key: the name of the locked resource: a text, a template, another task's result, an argument of a mapped task
        group (one lock for each map index), or a list of texts or templates, which are acquired together, all or none.
    :param lease: how long a lease lasts after its last heartbeat, seconds or timedelta: what a dead deployment costs
        the others. Default: the connection's, else 120 s.
    :param heartbeat: time between the keeper's heartbeats, seconds or timedelta. Default: a twelfth of the lease.
    :param timeout: how long to wait for the lock, seconds or timedelta. Default: without end.
    :param on_timeout: ``"fail"`` or ``"skip"`` the group when the lock was not free in time.
    :param slots: how many of the lock's slots to take.
    :param capacity: how many slots the lock has; 1 is a mutex. The same for all who use the key.
    :param mode: ``"shared"`` takes the lock together with others who share it, and in turn with those who do not.
    :param min_hold: the lock is not handed on sooner than so long after it was acquired, seconds or timedelta.
    :param fair: wait in line with others, and do not overtake them.
    :param priority: who waits is the sooner the next the larger this is.
    :param release_grace: how long the lease still lasts when it is given back while processes are inside, seconds or
        timedelta. Also how long a guarded process may be cut off from DynamoDB before it is stopped.
    :param dynamo_lock_conn_id: the connection that names the lock table.
    :param group_id: the group's id; a second ``lock`` in the DAG becomes ``lock__1``.
    :param kwargs: further arguments of `TaskGroup`.
    :raises LockValueError: an argument that can never work, or a group without tasks.
    """

    def __init__(
        self,
        key: Any,
        *,
        lease: Seconds | str | None = None,
        heartbeat: Seconds | str | None = None,
        timeout: Seconds | str | None = None,
        on_timeout: OnTimeout = "fail",
        slots: int | str = 1,
        capacity: int | str = 1,
        mode: str = "exclusive",
        min_hold: Seconds | str | None = None,
        fair: bool | str = True,
        priority: int | str = 0,
        release_grace: Seconds | str = RELEASE_GRACE,
        dynamo_lock_conn_id: str = DEFAULT_CONN_ID,
        group_id: str = "lock",
        **kwargs: Any,
    ) -> None:
        if isinstance(heartbeat, str) or isinstance(lease, str):
            pass  # checked when they are rendered
        elif heartbeat is not None or lease is not None:
            lock_options.interval(heartbeat, lock_options.optional_seconds("lease", lease) or DEFAULT_LEASE)
        super().__init__(group_id=group_id, add_suffix_on_collision=True, **kwargs)
        self.dynamo_lock_conn_id = dynamo_lock_conn_id
        # An execution timeout among the DAG's default arguments is meant for the work, not for waiting or for the
        # keeper; how long to wait is said by `timeout`.
        common: dict[str, Any] = {"task_group": self, "dag": self.dag, "execution_timeout": None}
        self.acquire = DynamoLockAcquireOperator(
            task_id="acquire",
            key=key,
            lease=lease,
            timeout=timeout,
            on_timeout=on_timeout,
            slots=slots,
            capacity=capacity,
            mode=mode,
            min_hold=min_hold,
            fair=fair,
            priority=priority,
            release_grace=release_grace,
            dynamo_lock_conn_id=dynamo_lock_conn_id,
            **common,
        )
        after: dict[str, Any] = {
            "acquire_task_id": self.acquire.task_id,
            "dynamo_lock_conn_id": dynamo_lock_conn_id,
            **common,
        }
        self.heartbeat = DynamoLockHeartbeatOperator(
            task_id="heartbeat", heartbeat=heartbeat, release_task_id=self.child_id("release"), **after
        )
        self.release = DynamoLockReleaseOperator(task_id="release", **after)
        self.acquire.as_setup()
        self.heartbeat.as_teardown(setups=self.acquire)
        self.release.as_teardown(setups=self.acquire)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(kind, failure, traceback)
        if failure is None:
            self._guard()

    def _guard(self) -> None:
        """Put the tasks of the block between acquire and release, each behind its guard."""
        own = {self.acquire.task_id, self.heartbeat.task_id, self.release.task_id}
        tasks = {task.task_id: task for task in self.iter_tasks() if task.task_id not in own}
        if not tasks:
            raise LockValueError(
                f"The lock group {self.group_id!r} guards nothing: create its tasks inside the with block."
            )
        mapped = next(self.iter_mapped_task_groups(), None) is not None
        for task in tasks.values():
            if not tasks.keys() & task.upstream_task_ids:
                self.acquire >> task
            if not tasks.keys() & task.downstream_task_ids:
                task >> self.release
            if isinstance(task, MappedOperator):
                then = task.partial_kwargs.get("pre_execute")
                task.partial_kwargs["pre_execute"] = self._enter(mapped, then)
            elif isinstance(task, BaseOperator) and not isinstance(task, _PLUMBING):
                task._pre_execute_hook = self._enter(mapped, task._pre_execute_hook)

    def _enter(self, mapped: bool, then: Any) -> EnterLock:
        return EnterLock(self.acquire.task_id, self.dynamo_lock_conn_id, mapped=mapped, then=then)
