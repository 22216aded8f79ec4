"""The operator that runs a function while it holds a lock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from airflow.providers.standard.operators.python import PythonOperator

from airflow_dynamo_lock.airflow import alerts, lock_options
from airflow_dynamo_lock.airflow.guard import Guard
from airflow_dynamo_lock.airflow.hooks import DynamoLockHook
from airflow_dynamo_lock.airflow.operators import Acquires
from airflow_dynamo_lock.airflow.versions import as_execute
from airflow_dynamo_lock.core.model.errors import LockLostError

if TYPE_CHECKING:
    from airflow_dynamo_lock.airflow.alerts import LockAlert
    from airflow_dynamo_lock.airflow.versions import Context
    from airflow_dynamo_lock.client.sync_client import LockClient
    from airflow_dynamo_lock.core.model.lease import LeaseSet


class DynamoLockOperator(Acquires, PythonOperator):
    """Runs a Python function while it holds a lock.

    The task waits in the triggerer, and runs the function on a worker, with heartbeats. Then it releases the lock,
    even if the function raises. The lease is in the function's context, as ``dynamo_lock``.

    If the lease is lost before the task starts on a worker, the task waits for the lock again, for the whole
    `timeout`.

    :param python_callable: the function; `op_args`, `op_kwargs`, … are those of Airflow's `PythonOperator`.
    :param on_held: the alert to send when the task has held the lock for too long.

    The other parameters are those of `DynamoLockAcquireOperator`.

    :raises LockValueError: an argument is not valid.
    """

    template_fields: Sequence[str] = (*Acquires.template_fields, *PythonOperator.template_fields)
    _resume = "execute_locked"

    def __init__(
        self, *, python_callable: Callable[..., Any], on_held: LockAlert | None = None, **kwargs: Any
    ) -> None:
        super().__init__(python_callable=python_callable, **kwargs)
        self.on_held = alerts.checked("on_held", on_held)
        self._leases_from_trigger: LeaseSet | None = None
        self._guard: Guard | None = None

    def execute(self, context: Context) -> Any:
        client, guard = self._enter(context)
        self._guard = guard
        try:
            guard.show_leases(context)
            leases = [each.as_dict() for each in guard.leases]
            self._show(context, lock_options.LEASES_KEY, leases)
            with alerts.on_held_on_worker(self, context, client, guard.leases[0]):
                return PythonOperator.execute(self, context)
        finally:
            self._guard = None
            guard.release_on_exit()
            guard.leave()

    def _enter(self, context: Context) -> tuple[LockClient, Guard]:
        """Acquire the lock, unless the trigger has, and enter its leases. If one is lost in between, acquire again."""
        if self._leases_from_trigger is not None:
            client, held = DynamoLockHook(self.dynamo_lock_conn_id).get_conn(), self._leases_from_trigger
        else:
            client, held = self._acquire(context)
        while True:
            guard = Guard(client, held, self)
            try:
                guard.enter()
            except LockLostError as lost:
                self.log.warning("%s It was lost before this task started; acquiring the lock again.", lost)
                client, held = self._acquire(context)
            else:
                return client, guard

    def execute_locked(self, context: Context, event: Any) -> Any:
        """Resume on a worker, with the lease that the trigger acquired."""
        self._leases_from_trigger = lock_options.from_result(lock_options.checked_event(event), self.task_id)
        with as_execute(self):
            return self.execute(context)

    def on_kill(self) -> None:
        """Drain the lease: Airflow is about to kill this process, so it cannot release after the function."""
        if self._guard is not None:
            # In a thread: Airflow may call this from a signal handler that interrupted a call of the same client.
            threading.Thread(target=self._guard.drain, name="dynamo-lock drain", daemon=True).start()
        super().on_kill()
