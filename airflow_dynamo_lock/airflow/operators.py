"""The operators.

Waiting, beating and releasing need no worker where Airflow can start a task in the triggerer. Where it cannot (mapped
tasks, older versions, ``dag.test()``, ``deferrable=False``), `execute` is a complete way of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.providers.standard.operators.python import PythonOperator
from airflow.triggers.base import StartTriggerArgs

from airflow_dynamo_lock.airflow import lock_options
from airflow_dynamo_lock.airflow.guard import Guard, leave_ended_tasks, show_leases
from airflow_dynamo_lock.airflow.hooks import DynamoLockHook
from airflow_dynamo_lock.airflow.links import LINK_KEY, LockRecordLink, record_url
from airflow_dynamo_lock.airflow.versions import (
    RESUME_AFTER,
    AirflowSkipException,
    BaseOperator,
    as_execute,
    may_start_from_trigger,
    runs_in_dag_test,
)
from airflow_dynamo_lock.core.model.arguments import Seconds
from airflow_dynamo_lock.core.model.errors import (
    LockLostError,
    LockTimeoutError,
    LockUnavailableError,
    LockValueError,
)
from airflow_dynamo_lock.core.model.limits import RELEASE_GRACE
from airflow_dynamo_lock.defaults import DEFAULT_CONN_ID

if TYPE_CHECKING:
    from airflow_dynamo_lock.airflow.lock_options import OnTimeout
    from airflow_dynamo_lock.airflow.versions import Context
    from airflow_dynamo_lock.client.options import ClaimOptions
    from airflow_dynamo_lock.client.sync_client import LockClient
    from airflow_dynamo_lock.client.threads import KeepAlive
    from airflow_dynamo_lock.core.model.lease import Lease, LeaseSet

_TRIGGERS = "airflow_dynamo_lock.airflow.triggers"


def start_in_triggerer(operator: BaseOperator, trigger: str, arguments: dict[str, Any], resume: str) -> None:
    """Let the scheduler defer `operator` to `trigger` by itself, if what is to be rendered can be rendered there.

    Set on the instance, never on the class: there it would count for mapped tasks too, with their arguments unresolved.
    """
    if may_start_from_trigger(operator, arguments):
        operator.start_from_trigger = True
        operator.start_trigger_args = StartTriggerArgs(f"{_TRIGGERS}.{trigger}", resume, arguments)


def check_early(operator: Any) -> None:
    """Check what an author has written as it is written, where no template has yet to say what it is.

    :raises LockValueError: it cannot be; the DAG does not load, and Airflow's page of import errors says why.
    """
    lock_options.Wanted.check_early(operator)
    if operator.on_timeout not in ("fail", "skip"):
        raise LockValueError(f"on_timeout must be 'fail' or 'skip', not {operator.on_timeout!r}.")


class _Acquires(BaseOperator):
    """What the two operators that take a lock share. See `DynamoLockAcquireOperator` for the parameters."""

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
        deferrable: bool = True,
        dynamo_lock_conn_id: str = DEFAULT_CONN_ID,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
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
        if deferrable:
            start_in_triggerer(self, "DynamoLockAcquireTrigger", self._trigger_arguments(), self._resume)

    def _trigger_arguments(self) -> dict[str, Any]:
        names = (*lock_options.PARAMETERS, "on_timeout", "dynamo_lock_conn_id")
        arguments = {name: lock_options.plain(getattr(self, name)) for name in names}
        return arguments | ({"resume": True} if self._resume != "execute_complete" else {})

    def _take(self, context: Context) -> tuple[LockClient, LeaseSet]:
        """Take the lock here, or hand the waiting over to the triggerer."""
        hook = DynamoLockHook(self.dynamo_lock_conn_id)
        wanted = lock_options.Wanted.of(self)
        options = lock_options.claim_options(context["ti"], hook.settings, wanted)
        client = hook.get_conn()
        if url := record_url(hook.settings, client.region_name, wanted.keys[0]):
            context["ti"].xcom_push(key=LINK_KEY, value=url)
        started = time.time()
        if not self.deferrable or runs_in_dag_test():
            return client, self._wait_here(client, wanted, options)
        held = client.try_acquire(wanted.keys, **options)
        if held is None:
            self._wait_in_triggerer(None if wanted.timeout is None else started + wanted.timeout)
        return client, held

    def _wait_in_triggerer(self, deadline: float | None) -> NoReturn:
        from airflow_dynamo_lock.airflow.triggers import DynamoLockAcquireTrigger

        arguments = self._trigger_arguments()
        if arguments.get("resume"):
            arguments["resume_after"] = RESUME_AFTER
        trigger = DynamoLockAcquireTrigger(**arguments, deadline=deadline)
        self.defer(trigger=trigger, method_name=self._resume)

    def _wait_here(self, client: LockClient, wanted: lock_options.Wanted, options: ClaimOptions) -> LeaseSet:
        busy, place = lock_options.busy_log(self.log), lock_options.place_log(self.log)
        try:
            return client.acquire(
                wanted.keys, timeout=wanted.timeout, on_busy=busy, on_position=place, **options
            )
        except LockTimeoutError as failure:
            if self.on_timeout == "skip":
                raise AirflowSkipException(str(failure)) from failure
            raise


class DynamoLockAcquireOperator(_Acquires):
    """Takes a lock, waiting for it in the triggerer. Its result is the lease (see `Lease.as_dict`), or a list of them.

    The lease is not renewed by this task: let a `DynamoLockHeartbeatOperator` follow, and a `DynamoLockReleaseOperator`
    as teardown. `DynamoLock` makes all three.

    :param key: the name of the locked resource, or a list of names, which are taken together, all or none. (templated)
    :param lease: how long a lease lasts after its last heartbeat, seconds or timedelta. Default: the connection's, else
        120 s. (templated)
    :param timeout: how long to wait, seconds or timedelta. Default: without end. (templated)
    :param on_timeout: ``"fail"`` or ``"skip"`` the task when the lock was not free in time.
    :param slots: how many of the lock's slots to take. (templated)
    :param capacity: how many slots the lock has; 1 is a mutex. The same for all who use the key. (templated)
    :param mode: ``"shared"`` takes the lock together with others who share it, and in turn with those who do not;
        ``"exclusive"`` takes it alone. (templated)
    :param min_hold: the lock is not handed on sooner than so long after it was acquired, seconds or timedelta, also if
        it is released before. Default: as soon as it is released. (templated)
    :param fair: wait in line, and do not overtake those who do. (templated)
    :param priority: who waits in line is the sooner the next the larger this is, from -999 to 999. Airflow's own
        ``priority_weight`` does not count here. (templated)
    :param release_grace: how long a lease still lasts when it is given back while processes are inside, seconds or
        timedelta. (templated)
    :param deferrable: wait in the triggerer; if False, wait on a worker.
    :param dynamo_lock_conn_id: the connection that names the lock table. (templated)
    :raises LockValueError: an argument that can never work.
    """

    def execute(self, context: Context) -> Any:
        _, held = self._take(context)
        return lock_options.as_result(
            held, lock_options.checked_keys(self.key), many=not isinstance(self.key, str)
        )

    def execute_complete(self, context: Context, event: Any) -> Any:
        """The leases that the trigger of an earlier version of this package took. Today's ends the task itself."""
        return event


class _OfAcquired(BaseOperator):
    """What the two operators share that go on with what an acquire task got, in the same run and map index."""

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
        self.acquire_task_id = acquire_task_id
        self.deferrable = deferrable
        self.dynamo_lock_conn_id = dynamo_lock_conn_id

    def execute_complete(self, context: Context, event: Any) -> None:
        """Nothing is left to do; the trigger has done it."""

    def _acquired(self, context: Context) -> tuple[LockClient, LeaseSet]:
        ti = context["ti"]
        result = ti.xcom_pull(task_ids=self.acquire_task_id, map_indexes=ti.map_index)
        client = DynamoLockHook(self.dynamo_lock_conn_id).get_conn()
        return client, lock_options.from_result(result, self.acquire_task_id)


class DynamoLockHeartbeatOperator(_OfAcquired):
    """The keeper: keeps the lease of an acquire task alive, in the triggerer, until it is given back or lost.

    :param acquire_task_id: the task that acquired the lease.
    :param heartbeat: time between beats, seconds or timedelta. Default: a twelfth of the lease. (templated)
    :param release_task_id: the `DynamoLockReleaseOperator` of the same lease. If it ends without having given the lease
        back (it failed, was killed, or was marked), the keeper does, from the triggerer; without this it keeps the lock
        for ever then.
    :param deferrable: beat in the triggerer; if False, on a worker.
    :param dynamo_lock_conn_id: the connection that names the lock table. (templated)
    """

    template_fields: Sequence[str] = ("heartbeat", *_OfAcquired.template_fields)

    def __init__(
        self, *, heartbeat: Seconds | str | None = None, release_task_id: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.heartbeat = heartbeat
        self.release_task_id = release_task_id
        if self.deferrable:
            start_in_triggerer(
                self, "DynamoLockHeartbeatTrigger", self._trigger_arguments(), "execute_complete"
            )

    def _trigger_arguments(self) -> dict[str, Any]:
        return {
            "acquire_task_id": self.acquire_task_id,
            "heartbeat": lock_options.plain(self.heartbeat),
            "dynamo_lock_conn_id": self.dynamo_lock_conn_id,
            "release_task_id": self.release_task_id,
        }

    def execute(self, context: Context) -> None:
        from airflow_dynamo_lock.airflow.triggers import DynamoLockHeartbeatTrigger

        if self.deferrable and not runs_in_dag_test():
            trigger = DynamoLockHeartbeatTrigger(**self._trigger_arguments())
            self.defer(trigger=trigger, method_name="execute_complete")
        client, held = self._acquired(context)
        first = held.leases[0]
        beats = client.keep_alive(
            client.renew(held), interval=lock_options.interval(self.heartbeat, first.lease_ms / 1000)
        )
        if runs_in_dag_test():
            # The tasks to be guarded come only after this one: go on beating in the background.
            _beating[first.lease_id] = beats
            return
        with beats:
            while any(_is_held(client, lease) for lease in held):
                time.sleep(1)


class DynamoLockReleaseOperator(_OfAcquired):
    """Gives the lease of an acquire task back; while guarded processes are inside, it is abandoned instead (rule R8).

    :param acquire_task_id: the task that acquired the lease.
    :param deferrable: release in the triggerer; if False, on a worker.
    :param dynamo_lock_conn_id: the connection that names the lock table. (templated)
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self.deferrable:
            arguments = {
                "acquire_task_id": self.acquire_task_id,
                "dynamo_lock_conn_id": self.dynamo_lock_conn_id,
            }
            start_in_triggerer(self, "DynamoLockReleaseTrigger", arguments, "execute_complete")

    def execute(self, context: Context) -> None:
        leave_ended_tasks()
        client, held = self._acquired(context)
        first = held.leases[0]
        if beats := _beating.pop(first.lease_id, None):
            beats.stop()
        client.release(held, retry_for=first.lease_ms / 1000)


class DynamoLockOperator(_Acquires, PythonOperator):
    """Runs a Python callable while holding a lock: waits in the triggerer, runs on a worker with heartbeats, releases
    whatever happens. The lease is in the callable's context, as ``dynamo_lock``.

    :param python_callable: what to run; `op_args`, `op_kwargs`, … are those of Airflow's `PythonOperator`.

    The other parameters are those of `DynamoLockAcquireOperator`.
    """

    template_fields: Sequence[str] = (*_Acquires.template_fields, *PythonOperator.template_fields)
    _resume = "execute_locked"

    def __init__(self, *, python_callable: Callable[..., Any], **kwargs: Any) -> None:
        super().__init__(python_callable=python_callable, **kwargs)
        self._waited_for: LeaseSet | None = None
        self._guard: Guard | None = None

    def execute(self, context: Context) -> Any:
        if self._waited_for is not None:
            client, held = DynamoLockHook(self.dynamo_lock_conn_id).get_conn(), self._waited_for
        else:
            client, held = self._take(context)
        guard = Guard(client, held, self)
        try:
            guard.enter()
        except LockLostError as lost:
            self.log.warning(
                "%s It was lost while this task waited for a worker; waiting for the lock again.", lost
            )
            timeout = lock_options.Wanted.of(self).timeout
            self._wait_in_triggerer(None if timeout is None else time.time() + timeout)
        self._guard = guard
        try:
            show_leases(context, guard.leases)
            return PythonOperator.execute(self, context)
        finally:
            self._guard = None
            guard.leave()
            guard.release()

    def execute_locked(self, context: Context, event: Any) -> Any:
        """Go on, on a worker, with the lease that the trigger took."""
        self._waited_for = lock_options.from_result(event, self.task_id)
        with as_execute(self):
            return self.execute(context)

    def on_kill(self) -> None:
        """This process is about to be killed, and will not get to release."""
        if self._guard is not None:
            # In a thread: a signal handler may have interrupted the very client that is to be used.
            threading.Thread(target=self._guard.abandon, name="dynamo-lock abandon", daemon=True).start()
        super().on_kill()


def _is_held(client: LockClient, lease: Lease) -> bool:
    try:
        record = client.get(lease.key)
    except LockUnavailableError:
        return True  # one failed read ends no heartbeats (rule R9)
    holder = record.holders.get(lease.lease_id) if record else None
    return holder is not None and not holder.draining


# Heartbeats of a ``dag.test()``, which runs in one process.
_beating: dict[str, KeepAlive] = {}
