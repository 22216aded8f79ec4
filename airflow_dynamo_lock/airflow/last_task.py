"""Lets the last task of a group release the lock, so that the lock is free before Airflow has started `release`.

Each guarded task that has succeeded asks Airflow for the states of all guarded tasks of its group. If all have ended,
no guarded task can start any more. Then the process releases the lease as it exits, in the same write in which it
leaves; if another process is still inside, that write drains the lease (R8, drain before release). In all other cases
the `release` task does it.

The process also sets the `release` task to skipped, because Airflow needs about 3 s for a task without work. If the
process is killed before it has released, the heartbeat task notices that `release` has ended, and releases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from airflow_dynamo_lock.airflow import lock_options, task_states
from airflow_dynamo_lock.airflow.guard import active_guard
from airflow_dynamo_lock.airflow.versions import XCom, runs_in_dag_test, skip_task
from airflow_dynamo_lock.core.model.lease import LeaseSet
from airflow_dynamo_lock.log import log

#: The XCom of the acquire task that has the id of the lease which the last task's process releases.
RELEASED_KEY = "dynamo_lock_released"
#: Log line of a `release` task that has nothing to do.
LAST_TASK_RELEASED = "The process of the last guarded task has released the lock %s as it exited."

#: Log line of a heartbeat task whose `release` task has ended without a release, with the id of that task.
RELEASE_TASK_FAILED = "The task %r has ended without releasing the lease. Releasing it now."


@dataclass(frozen=True)
class ReleaseIfLast:
    """The ``on_success_callback`` of a guarded task. Airflow calls it after it has stored the task's success.

    :ivar acquire_task_id: id of the task that acquired the leases.
    :ivar release_task_id: id of the group's `release` task.
    :ivar task_ids: ids of all guarded tasks of the group.
    :ivar members: ids of all tasks of the group, also of those without a guard.
    :ivar mapped: whether the group is in a mapped task group, so that only tasks of the same map index belong to it.
    """

    acquire_task_id: str
    release_task_id: str
    task_ids: tuple[str, ...]
    members: frozenset[str]
    mapped: bool

    def __call__(self, context: Any) -> None:
        ti = context["ti"]
        guard = active_guard(self.acquire_task_id)
        if guard is None or runs_in_dag_test():
            return
        # A task from outside the block that was put before `release` needs the lock too.
        if not ti.task.get_dag().get_task(self.release_task_id).upstream_task_ids <= self.members:
            return
        try:
            states = task_states.read_states(
                ti, (*self.task_ids, self.release_task_id), own_map_index_only=self.mapped
            )
            release_states = states.pop(self.release_task_id)
            if not all(task_states.have_ended(each) for each in states.values()):
                return
            # Before the release, so that the `release` task can tell it from a loss of the lease.
            where = lock_options.xcom_arguments(ti, self.acquire_task_id, RELEASED_KEY, mapped=self.mapped)
            XCom.set(value=guard.leases[0].lease_id, **where)
        except Exception as failure:
            log.info("This task does not release the lock early, the release task will: %s", failure)
            return
        guard.release_on_exit()
        if release_states == [None]:
            self._skip_release(ti)

    def _skip_release(self, ti: Any) -> None:
        """Set the `release` task to skipped, unless a task that is no teardown waits for it: both would be skipped.

        The run would end about a second sooner if the heartbeat task was skipped too. But it is deferred, so Airflow
        deletes its trigger, which still runs for a moment. On SQLite the next trigger gets the same id, and the old
        one's event ends another task: an acquire task succeeded without a lease.
        """
        dag = ti.task.get_dag()
        downstream = dag.get_task(self.release_task_id).downstream_task_ids
        if not all(dag.get_task(task_id).is_teardown for task_id in downstream):
            return
        try:
            skip_task(self.release_task_id, ti.map_index if self.mapped else -1)
        except Exception as failure:
            log.info(
                "The task %r was not skipped, and will find nothing to do: %s", self.release_task_id, failure
            )
        else:
            log.info(
                "This process releases the lock as it exits. The task %r is skipped: it has nothing to do.",
                self.release_task_id,
            )


def was_released(released: Any, held: LeaseSet) -> bool:
    """Whether the process of the last task was about to release these leases.

    :param released: value of the XCom `RELEASED_KEY`.
    """
    return bool(released == held.leases[0].lease_id)
