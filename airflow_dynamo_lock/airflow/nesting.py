"""Lock groups around a task: what a run holds while the task waits for a further lock (R14, deadlocks end)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from airflow_dynamo_lock.airflow import lock_options
from airflow_dynamo_lock.airflow.versions import TaskGroup, XCom
from airflow_dynamo_lock.core.model.errors import (
    LockDeadlockError,
    LockError,
    LockNotHeldError,
    LockValueError,
)
from airflow_dynamo_lock.core.model.lease import Lease


class LockGroup(TaskGroup):
    """A task group whose tasks run under a lock.

    :ivar acquire: the task that acquires the lock.
    """

    acquire: Any


def outer_acquires(task: Any) -> list[list[Any]]:
    """The acquire tasks of the lock groups around a task: the id of each one, and whether it is mapped as the task is.

    They are part of the arguments of a trigger, so they are values for JSON.
    """
    return [
        [group.acquire.task_id, next(group.iter_mapped_task_groups(), None) is not None]
        for group in _groups_around(task)
    ]


def check_not_held(task: Any) -> None:
    """Check while Airflow parses the DAG that no group around a task holds the lock that the task waits for.

    Keys that are templates are compared when the task runs.

    :param task: an operator with the attributes that `lock_options.PARAMETERS` names.
    :raises LockDeadlockError: a group holds it, so the task would wait without end.
    """
    for group in _groups_around(task):
        outer = group.acquire
        if task.dynamo_lock_conn_id != outer.dynamo_lock_conn_id or _fit_together(task, outer):
            continue
        if common := sorted(_known_keys(task) & _known_keys(outer)):
            raise LockDeadlockError(
                f"The task {task.task_id!r} would wait without end for the lock {common[0]!r}, because the group "
                f"{group.group_id!r} around it holds that lock: leave the inner lock out, or move it out of the group."
            )


def held_in_task(ti: Any, task: Any) -> list[Lease]:
    """The leases of the groups around a task that runs on a worker."""
    leases: list[Lease] = []
    for task_id, mapped in outer_acquires(task):
        index = ti.map_index if mapped else -1
        leases += _leases(ti.xcom_pull(task_ids=task_id, map_indexes=index), task_id)
    return leases


def held_in_triggerer(ti: Any, acquires: list[list[Any]]) -> list[Lease]:
    """The leases of the groups around a task that waits in the triggerer. Sends blocking requests to Airflow.

    :param acquires: the result of `outer_acquires`.
    """
    leases: list[Lease] = []
    for task_id, mapped in acquires:
        result = XCom.get_one(**lock_options.xcom_arguments(ti, task_id, mapped=mapped))
        leases += _leases(result, task_id)
    return leases


def _groups_around(task: Any) -> Iterator[LockGroup]:
    group = getattr(task, "task_group", None)
    while group is not None:
        # The group of the task's own lock has no acquire task before that task is created.
        acquire = getattr(group, "acquire", None) if isinstance(group, LockGroup) else None
        if acquire is not None and acquire.task_id != task.task_id:
            yield group
        group = group.parent_group


def _known_keys(task: Any) -> set[str]:
    with suppress(LockError):
        return {each for each in lock_options.checked_keys(task.key) if not lock_options.is_template(each)}
    return set()


def _fit_together(task: Any, outer: Any) -> bool:
    """Whether one run may hold the lock for both, or that is not known yet."""
    try:
        inner, around = lock_options.Wanted.of(task).spec, lock_options.Wanted.of(outer).spec
        slots, capacity = inner.slots + around.slots, inner.capacity
    except LockValueError:  # an option is a template
        return True
    if "shared" in (inner.mode, around.mode):
        return inner.mode == around.mode
    return capacity == around.capacity and slots <= capacity


def _leases(result: Any, task_id: str) -> list[Lease]:
    """The leases in the result of an acquire task; none if it has no valid result."""
    try:
        return list(lock_options.from_result(result, task_id))
    except (LockNotHeldError, LockValueError):
        return []
