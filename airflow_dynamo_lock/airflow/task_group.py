"""`DynamoLock`: a task group that holds a lock while its tasks run.

::

    acquire ──┬── the guarded tasks ──┬── release
              └── heartbeat ··········┘

acquire is the setup; heartbeat and release are its teardowns. All three can run in the triggerer. heartbeat runs beside
the guarded tasks, and ends when the lease is released. The dotted line is no dependency. If the last guarded task
succeeds, its process releases the lease as it exits, sooner than Airflow can start release (`last_task`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from types import TracebackType
from typing import TYPE_CHECKING, Any

from airflow_dynamo_lock.airflow import lock_options, task_states
from airflow_dynamo_lock.airflow.guard import EnterLease
from airflow_dynamo_lock.airflow.last_task import ReleaseIfLast
from airflow_dynamo_lock.airflow.nesting import LockGroup
from airflow_dynamo_lock.airflow.operators import (
    DynamoLockAcquireOperator,
    DynamoLockHeartbeatOperator,
    DynamoLockReleaseOperator,
)
from airflow_dynamo_lock.airflow.versions import BaseOperator, MappedOperator
from airflow_dynamo_lock.core.model.arguments import Seconds
from airflow_dynamo_lock.core.model.errors import LockValueError
from airflow_dynamo_lock.core.model.limits import RELEASE_GRACE
from airflow_dynamo_lock.defaults import DEFAULT_CONN_ID

if TYPE_CHECKING:
    from airflow_dynamo_lock.airflow.alerts import LockAlert
    from airflow_dynamo_lock.airflow.lock_options import OnTimeout

_LOCK_OPERATORS = (DynamoLockAcquireOperator, DynamoLockHeartbeatOperator, DynamoLockReleaseOperator)


class DynamoLock(LockGroup):
    """A task group that holds a lock while its tasks run, so that one run at a time uses the resource.

    ``with DynamoLock("warehouse/orders"): extract() >> load()``

    The tasks of the block start when the lock is acquired. Each task enters the lease before its own code starts,
    and finds it in its context as ``dynamo_lock``. The lock is released when all tasks have ended, in any state.

    All parameters but `on_timeout`, `on_wait`, `on_held`, `group_id` and `kwargs` may be templates.

    :param key: the name of the locked resource: a string, a template, another task's result, or an argument of a
        mapped task group (one lock for each map index). A list of strings or templates names up to 100 locks, which
        are acquired together, all or none.
    :param lease: how long a lease lasts after its last heartbeat, in seconds or as timedelta. If a deployment dies,
        the others wait this long. Default: the connection's lease, else 120 s.
    :param heartbeat: interval of the heartbeat task, in seconds or as timedelta, at most half the lease. Default: a
        twelfth of the lease.
    :param timeout: maximum time to wait for the lock, in seconds or as timedelta. Default: no limit.
    :param on_timeout: ``"fail"`` or ``"skip"`` the group if the lock is not free in time.
    :param slots: number of slots to take.
    :param capacity: number of slots that the lock has; 1 is a mutex. All claims of a key name the same capacity.
    :param mode: ``"shared"`` holds the lock together with other shared holders; ``"exclusive"`` does not.
    :param min_hold: minimum time from an acquisition to the next grant of the same slots, in seconds or as
        timedelta. Default: none.
    :param fair: queue for the lock, and overtake no waiter; False ignores the queue.
    :param priority: from -999 to 999; a waiter with a higher priority is granted first. Airflow's
        ``priority_weight`` has no effect.
    :param release_grace: how long a released lease still lasts after each heartbeat of a process that is inside, in
        seconds or as timedelta. The guard stops a task that is cut off from DynamoDB before this time is over.
    :param on_wait: the alert to send when the acquire task has waited for the lock for too long.
    :param on_held: the alert to send when the group has held the lock for too long.
    :param dynamo_lock_conn_id: the connection that names the lock table.
    :param group_id: the group's id; a second ``lock`` in the DAG becomes ``lock__1``.
    :param kwargs: further arguments of `TaskGroup`.
    :raises LockValueError: an argument is not valid; or, when the block ends, the group has no tasks.
    :raises LockDeadlockError: a group around this one holds the same lock.
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
        on_wait: LockAlert | None = None,
        on_held: LockAlert | None = None,
        dynamo_lock_conn_id: str = DEFAULT_CONN_ID,
        group_id: str = "lock",
        **kwargs: Any,
    ) -> None:
        if not lock_options.is_template(heartbeat):
            # A template has no value yet, and the connection may have another lease than the default: the heartbeat
            # task compares with both.
            known = None if lock_options.is_template(lease) else lock_options.optional_seconds("lease", lease)
            lock_options.interval(heartbeat, known or math.inf)
        super().__init__(group_id=group_id, add_suffix_on_collision=True, **kwargs)
        self._is_guarded = False
        self.dynamo_lock_conn_id = dynamo_lock_conn_id
        # An execution timeout in the DAG's default arguments is meant for the guarded tasks. It would end a long
        # wait, and the heartbeat task; `timeout` limits the wait.
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
            on_wait=on_wait,
            dynamo_lock_conn_id=dynamo_lock_conn_id,
            **common,
        )
        lease_options: dict[str, Any] = {
            "acquire_task_id": self.acquire.task_id,
            "dynamo_lock_conn_id": dynamo_lock_conn_id,
            **common,
        }
        self.heartbeat = DynamoLockHeartbeatOperator(
            task_id="heartbeat",
            heartbeat=heartbeat,
            on_held=on_held,
            release_task_id=self.child_id("release"),
            **lease_options,
        )
        self.release = DynamoLockReleaseOperator(task_id="release", **lease_options)
        self.acquire.as_setup()
        # Teardowns, so that no task after the group waits for them, and they do not decide the state of the run.
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
            if self._is_guarded:
                raise LockValueError(
                    f"The lock group {self.group_id!r} was entered twice: create all its tasks in one with block."
                )
            self._is_guarded = True
            self._guard()

    def _guard(self) -> None:
        """Put the tasks of the block between acquire and release, and give each one a guard."""
        own = {self.acquire.task_id, self.heartbeat.task_id, self.release.task_id}
        tasks = {task.task_id: task for task in self.iter_tasks() if task.task_id not in own}
        if not tasks:
            raise LockValueError(
                f"The lock group {self.group_id!r} guards nothing: create its tasks inside the with block."
            )
        mapped = next(self.iter_mapped_task_groups(), None) is not None
        guarded = {
            task_id: task
            for task_id, task in tasks.items()
            if isinstance(task, (BaseOperator, MappedOperator)) and not isinstance(task, _LOCK_OPERATORS)
        }
        for task in tasks.values():
            self._check_guardable(task, tasks.keys())
            if not tasks.keys() & task.upstream_task_ids:
                self.acquire >> task
            if not tasks.keys() & task.downstream_task_ids:
                task >> self.release
        for task in guarded.values():
            if isinstance(task, MappedOperator):
                pre_execute = task.partial_kwargs.get("pre_execute")
                task.partial_kwargs["pre_execute"] = self._enter(mapped, pre_execute)
            else:
                task._pre_execute_hook = self._enter(mapped, task._pre_execute_hook)
        if task_states.can_tell_states(list(guarded)):
            members = frozenset({*own, *tasks})
            release_if_last = ReleaseIfLast(
                self.acquire.task_id, self.release.task_id, tuple(guarded), members, mapped
            )
            for task in guarded.values():
                # A callback would make Airflow start a worker for an empty task.
                if not guarded.keys() & task.downstream_task_ids and not task.inherits_from_empty_operator:
                    callbacks = task.on_success_callback or []
                    users = callbacks if isinstance(callbacks, Sequence) else [callbacks]
                    task.on_success_callback = [*users, release_if_last]

    def _check_guardable(self, task: Any, tasks: Set[str]) -> None:
        """Check a task of the block.

        :param tasks: the ids of all tasks of the block.
        :raises LockValueError: no guard would run in it, or it would skip `release` while others run.
        """
        kind = task.operator_class if isinstance(task, MappedOperator) else type(task)
        kinds = {each.__name__ for each in kind.__mro__}
        if "_StubOperator" in kinds:
            raise LockValueError(
                f"The stub task {task.task_id!r} cannot be in a lock group, because it runs without Python, and "
                "nothing would stop it when the lock is lost: acquire the lock in its own program."
            )
        if "BranchMixIn" not in kinds or tasks & task.downstream_task_ids:
            return
        if beside := tasks - task.get_flat_relative_ids(upstream=True) - {task.task_id}:
            raise LockValueError(
                f"The branch {task.task_id!r} would skip the release of its lock group while {min(beside)!r} may still "
                "run: put a task behind the branch in the with block, such as an EmptyOperator."
            )

    def _enter(self, mapped: bool, pre_execute: Any) -> EnterLease:
        """The callback that enters the lease, and then calls the task's own ``pre_execute``."""
        return EnterLease(self.acquire.task_id, self.dynamo_lock_conn_id, mapped=mapped, then=pre_execute)
