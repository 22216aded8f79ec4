"""The operators that acquire, renew and release a lock.

If Airflow can start a task in the triggerer, the wait, the heartbeats and the release need no worker. If it cannot
(`versions.can_start_from_trigger` says when), the task starts on a worker, and `execute` defers it from there. With
``deferrable=False``, and in ``dag.test()``, `execute` does all of the work itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.triggers.base import StartTriggerArgs

from airflow_dynamo_lock.airflow import alerts, lock_options, metrics, nesting, task_states
from airflow_dynamo_lock.airflow.guard import leave_ended_tasks
from airflow_dynamo_lock.airflow.hooks import DynamoLockHook
from airflow_dynamo_lock.airflow.last_task import (
    LAST_TASK_RELEASED,
    RELEASE_TASK_FAILED,
    RELEASED_KEY,
    was_released,
)
from airflow_dynamo_lock.airflow.links import LINK_KEY, LockRecordLink, record_url
from airflow_dynamo_lock.airflow.versions import (
    RESUME_AFTER,
    AirflowFailException,
    AirflowSkipException,
    BaseOperator,
    can_start_from_trigger,
    runs_in_dag_test,
)
from airflow_dynamo_lock.core.model.arguments import Seconds
from airflow_dynamo_lock.core.model.errors import (
    LockDeadlockError,
    LockError,
    LockLostError,
    LockRemovedError,
    LockTimeoutError,
    LockUnavailableError,
    LockValueError,
)
from airflow_dynamo_lock.core.model.lease import LeaseSet
from airflow_dynamo_lock.core.model.limits import RELEASE_GRACE
from airflow_dynamo_lock.core.model.text import shown
from airflow_dynamo_lock.defaults import DEFAULT_CONN_ID

if TYPE_CHECKING:
    from airflow_dynamo_lock.airflow.alerts import LockAlert
    from airflow_dynamo_lock.airflow.lock_options import OnTimeout
    from airflow_dynamo_lock.airflow.versions import Context
    from airflow_dynamo_lock.client.options import ClaimOptions
    from airflow_dynamo_lock.client.sync_client import LockClient
    from airflow_dynamo_lock.client.threads import KeepAlive
    from airflow_dynamo_lock.core.model.lease import Lease

_TRIGGERS = "airflow_dynamo_lock.airflow.triggers"


def enable_start_from_trigger(
    operator: BaseOperator, trigger: str, arguments: dict[str, Any], resume: str
) -> None:
    """Let the scheduler defer an operator without a worker, if the triggerer can render the arguments.

    The attributes are set on the instance, never on the class: mapped tasks would inherit them from the class, with
    unresolved arguments.

    :param operator: the operator to defer.
    :param trigger: name of the trigger's class in `airflow_dynamo_lock.airflow.triggers`.
    :param arguments: the arguments of the trigger.
    :param resume: name of the operator's method that resumes the task on a worker.
    """
    if can_start_from_trigger(operator, arguments):
        operator.start_from_trigger = True
        operator.start_trigger_args = StartTriggerArgs(f"{_TRIGGERS}.{trigger}", resume, arguments)


def check_early(operator: Any) -> None:
    """Check the arguments that are not templates while Airflow parses the DAG.

    :param operator: an operator with the attributes that `lock_options.PARAMETERS` names, `on_timeout` and
        `dynamo_lock_conn_id`.
    :raises LockValueError: an argument is not valid. The DAG does not load, and Airflow lists the error among its
        import errors.
    """
    lock_options.Wanted.check_early(operator)
    lock_options.check_conn_id(operator.dynamo_lock_conn_id)
    if operator.on_timeout not in ("fail", "skip"):
        raise LockValueError(f"on_timeout must be 'fail' or 'skip', not {shown(operator.on_timeout)}.")


class Acquires(BaseOperator):
    """Base of the two operators that acquire a lock. `DynamoLockAcquireOperator` documents the parameters."""

    template_fields: Sequence[str] = (*lock_options.PARAMETERS, "dynamo_lock_conn_id")
    operator_extra_links = (LockRecordLink(),)
    ui_color = "#fbe7c6"
    _resume = "execute_complete"

    def __init__(
        self,
        *,
        key: Any,
        lease: Seconds | str | None = None,
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
        deferrable: bool = True,
        dynamo_lock_conn_id: str = DEFAULT_CONN_ID,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.on_wait = alerts.checked("on_wait", on_wait)
        self.key = key
        self.lease = lease
        self.timeout = timeout
        self.on_timeout = on_timeout
        self.slots = slots
        self.capacity = capacity
        self.mode = mode
        self.min_hold = min_hold
        self.fair = fair
        self.priority = priority
        self.release_grace = release_grace
        self.deferrable = deferrable
        self.dynamo_lock_conn_id = dynamo_lock_conn_id
        check_early(self)
        nesting.check_not_held(self)
        if deferrable:
            enable_start_from_trigger(
                self, "DynamoLockAcquireTrigger", self._trigger_arguments(), self._resume
            )

    def _trigger_arguments(self) -> dict[str, Any]:
        names = (*lock_options.PARAMETERS, "on_timeout", "dynamo_lock_conn_id")
        arguments = {name: lock_options.plain(getattr(self, name)) for name in names}
        if outer := nesting.outer_acquires(self):
            arguments["outer_acquires"] = outer
        if self.on_wait is not None:
            arguments["on_wait"] = self.on_wait.as_json()
        if self._resume != "execute_complete":
            arguments["resume"] = True
        return arguments

    def _acquire(self, context: Context) -> tuple[LockClient, LeaseSet]:
        """Acquire the lock in this process. If the task can defer, try once, and wait in the triggerer."""
        hook = DynamoLockHook(self.dynamo_lock_conn_id)
        wanted = lock_options.Wanted.of(self)
        options = lock_options.claim_options(context["ti"], hook.settings, wanted)
        client = hook.get_conn()
        if url := record_url(hook.settings, client.region_name, wanted.keys[0]):
            self._show(context, LINK_KEY, url)
        started = time.time()
        if not self.deferrable or runs_in_dag_test():
            held_outside = nesting.held_in_task(context["ti"], self)

            def report() -> alerts.Report | None:
                record = client.get(wanted.keys[0])
                return alerts.report_of_wait(str(options["owner"]), started, record) if record else None

            with alerts.on_worker(self, "on_wait", context, since=started, report=report):
                return client, self._wait_here(client, wanted, options, held_outside)
        held = client.try_acquire(wanted.keys, **options)
        if held is None:
            self._wait_in_triggerer(None if wanted.timeout is None else started + wanted.timeout)
        return client, held

    def _show(self, context: Context, key: str, value: Any) -> None:
        """Store something that only the web interface shows. A failure is logged, and the task goes on."""
        try:
            context["ti"].xcom_push(key=key, value=value)
        except Exception as failure:
            self.log.warning("Could not store %s for the web interface: %s", key, failure)

    def _wait_in_triggerer(self, deadline: float | None) -> NoReturn:
        from airflow_dynamo_lock.airflow.triggers import DynamoLockAcquireTrigger

        trigger = DynamoLockAcquireTrigger(
            **self._trigger_arguments(),
            has_retries=bool(self.retries),
            deadline=deadline,
            resume_after=RESUME_AFTER,
        )
        self.defer(trigger=trigger, method_name=self._resume)

    def _wait_here(
        self,
        client: LockClient,
        wanted: lock_options.Wanted,
        options: ClaimOptions,
        holding: Sequence[Lease] = (),
    ) -> LeaseSet:
        on_busy, on_position = lock_options.holder_log(self.log), lock_options.position_log(self.log)
        try:
            with metrics.wait_span(wanted.keys):
                return client.acquire(
                    wanted.keys,
                    timeout=wanted.timeout,
                    on_busy=on_busy,
                    on_position=on_position,
                    holding=holding,
                    **options,
                )
        except (LockRemovedError, LockDeadlockError) as failure:
            # A retry would queue again; after a deadlock, while the groups around this task hold their locks.
            raise AirflowFailException(str(failure)) from failure
        except LockTimeoutError as failure:
            if self.on_timeout == "skip":
                raise AirflowSkipException(str(failure)) from failure
            raise


class DynamoLockAcquireOperator(Acquires):
    """Waits for a lock in the triggerer, and acquires it.

    The task's result is the lease as a dictionary (`Lease.as_dict`); if `key` is a list, it is a list of them.

    This task does not renew the lease. Let a `DynamoLockHeartbeatOperator` follow it, and add a
    `DynamoLockReleaseOperator` as teardown. `DynamoLock` creates all three.

    :param key: the name of the locked resource; or a list of up to 100 names, which are acquired together, all or
        none. (templated)
    :param lease: how long a lease lasts after its last heartbeat, in seconds or as timedelta. Default: the
        connection's lease, else 120 s. (templated)
    :param timeout: maximum time to wait for the lock, in seconds or as timedelta. Default: no limit. (templated)
    :param on_timeout: ``"fail"`` or ``"skip"`` the task if the lock is not free in time.
    :param slots: number of slots to take. (templated)
    :param capacity: number of slots that the lock has; 1 is a mutex. All claims of a key name the same capacity.
        (templated)
    :param mode: ``"shared"`` holds the lock together with other shared holders; ``"exclusive"`` does not.
        (templated)
    :param min_hold: minimum time from an acquisition to the next grant of the same slots, in seconds or as
        timedelta; an earlier release does not shorten it. Default: none. (templated)
    :param fair: queue for the lock, and overtake no waiter; False ignores the queue. (templated)
    :param priority: from -999 to 999; a waiter with a higher priority is granted first. Airflow's
        ``priority_weight`` has no effect. (templated)
    :param release_grace: how long a released lease still lasts after each heartbeat of a process that is inside, in
        seconds or as timedelta. (templated)
    :param on_wait: the alert to send when the task has waited for the lock for too long.
    :param deferrable: wait in the triggerer; if False, wait on a worker.
    :param dynamo_lock_conn_id: the connection that names the lock table. (templated)
    :raises LockValueError: an argument is not valid.
    :raises LockDeadlockError: a `DynamoLock` around this task holds the same lock; or, while the task waits, runs would
        wait for each other's locks without end.
    """

    def execute(self, context: Context) -> Any:
        _, held = self._acquire(context)
        return lock_options.as_result(
            held, lock_options.checked_keys(self.key), many=not isinstance(self.key, str)
        )

    def execute_complete(self, context: Context, event: Any) -> Any:
        """Fail the task for good, if the trigger has resumed it for that. Else the trigger has ended it."""
        return lock_options.checked_event(event)


class _UsesLease(BaseOperator):
    """Base of the two operators that use the lease of an acquire task in the same run, at the same map index."""

    template_fields: Sequence[str] = ("dynamo_lock_conn_id",)
    ui_color = "#fbe7c6"

    def __init__(
        self,
        *,
        acquire_task_id: str,
        deferrable: bool = True,
        dynamo_lock_conn_id: str = DEFAULT_CONN_ID,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        lock_options.check_id(
            "acquire_task_id", acquire_task_id, "the task that acquires the lock, such as acquire.task_id"
        )
        lock_options.check_conn_id(dynamo_lock_conn_id)
        self.acquire_task_id = acquire_task_id
        self.deferrable = deferrable
        self.dynamo_lock_conn_id = dynamo_lock_conn_id

    def execute_complete(self, context: Context, event: Any) -> None:
        """Do nothing: the trigger has done all of the work."""

    def _client_and_leases(self, context: Context) -> tuple[LockClient, LeaseSet]:
        ti = context["ti"]
        result = ti.xcom_pull(task_ids=self.acquire_task_id, map_indexes=ti.map_index)
        client = DynamoLockHook(self.dynamo_lock_conn_id).get_conn()
        return client, lock_options.from_result(result, self.acquire_task_id)


class DynamoLockHeartbeatOperator(_UsesLease):
    """The heartbeat task: renews the lease of an acquire task in the triggerer, until it is released or lost.

    :param acquire_task_id: id of the task that acquired the lease.
    :param heartbeat: interval of the heartbeats, in seconds or as timedelta. Default: a twelfth of the lease.
        (templated)
    :param release_task_id: id of the `DynamoLockReleaseOperator` of the same lease. If that task ends without a
        release (it failed, was killed or was marked), the heartbeat task releases the lease.
        Without this parameter it renews the lease without end in that case.
    :param on_held: the alert to send when the lock has been held for too long.
    :param deferrable: send heartbeats from the triggerer; if False, from a worker.
    :param dynamo_lock_conn_id: the connection that names the lock table. (templated)
    :raises LockValueError: an argument is not valid.
    :raises LockNotHeldError: the acquire task has no result.
    """

    template_fields: Sequence[str] = ("heartbeat", *_UsesLease.template_fields)

    def __init__(
        self,
        *,
        heartbeat: Seconds | str | None = None,
        release_task_id: str | None = None,
        on_held: LockAlert | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if not lock_options.is_template(heartbeat):
            lock_options.optional_seconds("heartbeat", heartbeat)
        if release_task_id is not None:
            lock_options.check_id("release_task_id", release_task_id, "the task that releases the lock")
        self.heartbeat = heartbeat
        self.release_task_id = release_task_id
        self.on_held = alerts.checked("on_held", on_held)
        if self.deferrable:
            enable_start_from_trigger(
                self, "DynamoLockHeartbeatTrigger", self._trigger_arguments(), "execute_complete"
            )

    def _trigger_arguments(self) -> dict[str, Any]:
        arguments = {
            "acquire_task_id": self.acquire_task_id,
            "heartbeat": lock_options.plain(self.heartbeat),
            "dynamo_lock_conn_id": self.dynamo_lock_conn_id,
            "release_task_id": self.release_task_id,
        }
        return arguments | ({} if self.on_held is None else {"on_held": self.on_held.as_json()})

    def execute(self, context: Context) -> None:
        from airflow_dynamo_lock.airflow.triggers import DynamoLockHeartbeatTrigger

        if self.deferrable and not runs_in_dag_test():
            trigger = DynamoLockHeartbeatTrigger(**self._trigger_arguments())
            self.defer(trigger=trigger, method_name="execute_complete")
        client, held = self._client_and_leases(context)
        first = held.leases[0]
        interval = lock_options.interval(self.heartbeat, first.lease_ms / 1000)
        if runs_in_dag_test():
            # The guarded tasks run only after this one has ended, so a thread continues the heartbeats.
            _dag_test_heartbeats[first.lease_id] = client.keep_alive(client.renew(held), interval=interval)
            return
        with alerts.on_held_on_worker(self, context, client, first):
            self._renew_until_gone(client, held, interval, context["ti"])

    def _renew_until_gone(self, client: LockClient, held: LeaseSet, interval: float, ti: Any) -> None:
        """Send heartbeats until no lease is held. If the release task has ended without a release, release them.

        A heartbeat that fails is repeated, also after an outage that is longer than the lease: no process relies on the
        lease of this task, so it is renewed for as long as the record shows it.
        """
        next_heartbeat, next_look = time.monotonic(), time.monotonic() + task_states.EVERY
        while _is_any_held(client, held):
            if time.monotonic() >= next_heartbeat:
                try:
                    client.renew(held)
                except LockLostError:
                    # Of a set, the other leases go on.
                    held = LeaseSet(tuple(lease for lease in held if _is_any_held(client, (lease,))))
                except LockUnavailableError as failure:
                    self.log.warning("Heartbeat of %s failed, trying again: %s", held, failure)
                else:
                    next_heartbeat = time.monotonic() + interval
            time.sleep(min(1.0, interval))
            if self.release_task_id is None or time.monotonic() < next_look:
                continue
            next_look = time.monotonic() + task_states.EVERY
            if task_states.has_ended(ti, self.release_task_id):
                time.sleep(task_states.RELEASE_DETECTION_SECONDS)
                if _is_any_held(client, held):
                    self.log.warning(RELEASE_TASK_FAILED, self.release_task_id)
                    client.release(held, retry_for=None)


class DynamoLockReleaseOperator(_UsesLease):
    """Releases the lease of an acquire task; if guarded processes are inside, drains it (R8, drain before release).

    :param acquire_task_id: id of the task that acquired the lease.
    :param deferrable: release from the triggerer; if False, from a worker.
    :param dynamo_lock_conn_id: the connection that names the lock table. (templated)
    :raises LockValueError: an argument is not valid.
    :raises LockNotHeldError: the acquire task has no result.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self.deferrable:
            arguments = {
                "acquire_task_id": self.acquire_task_id,
                "dynamo_lock_conn_id": self.dynamo_lock_conn_id,
            }
            enable_start_from_trigger(self, "DynamoLockReleaseTrigger", arguments, "execute_complete")

    def execute(self, context: Context) -> None:
        leave_ended_tasks()
        client, held = self._client_and_leases(context)
        first = held.leases[0]
        if heartbeats := _dag_test_heartbeats.pop(first.lease_id, None):
            heartbeats.stop()
        ti = context["ti"]
        released = ti.xcom_pull(task_ids=self.acquire_task_id, key=RELEASED_KEY, map_indexes=ti.map_index)
        with suppress(LockError):  # a failed read proves nothing
            if was_released(released, held) and not _is_any_held(client, held):
                self.log.info(LAST_TASK_RELEASED, held)
                return
        client.release(held, retry_for=first.lease_ms / 1000)


def _is_any_held(client: LockClient, leases: Iterable[Lease]) -> bool:
    """Whether a record shows one of the leases as held. A read without an answer proves nothing."""
    try:
        return any(
            (record := client.get(lease.key)) is not None and record.is_held(lease.lease_id)
            for lease in leases
        )
    except LockUnavailableError:
        return True


# Lease id → heartbeats that continue after the heartbeat task of a ``dag.test()`` has ended.
_dag_test_heartbeats: dict[str, KeepAlive] = {}
