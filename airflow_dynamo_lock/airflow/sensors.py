"""`DynamoLockSensor`, which waits until slots of a lock are available and does not acquire them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow_dynamo_lock.airflow import lock_options
from airflow_dynamo_lock.airflow.hooks import DynamoLockHook
from airflow_dynamo_lock.airflow.operators import enable_start_from_trigger
from airflow_dynamo_lock.airflow.versions import RESUME_AFTER, BaseSensorOperator, runs_in_dag_test
from airflow_dynamo_lock.core.model import arguments
from airflow_dynamo_lock.core.model.arguments import Seconds
from airflow_dynamo_lock.defaults import DEFAULT_CONN_ID

if TYPE_CHECKING:
    from airflow_dynamo_lock.airflow.versions import Context


class DynamoLockSensor(BaseSensorOperator):
    """Waits until slots of a lock are free, or their holders are dead.

    The sensor acquires nothing and is not queued, so another run may take the slots immediately afterwards.
    To run tasks while the lock is held, use `DynamoLock`.

    In reschedule mode, each poke is a new process. It has no earlier reads to compare with, so it can prove
    that a holder is dead only by server time, ten seconds later than a process that keeps polling.

    Parameters of all sensors of Airflow apply too:

    - `timeout`: maximum time to wait, in seconds or as timedelta. Without it, and with None where Airflow accepts that,
      Airflow's option ``[sensors] default_timeout`` applies: 7 days, and not an unlimited time as for `DynamoLock`.
    - `soft_fail`: skip the task instead of failing it if the time is over. Default: False.
    - `mode`: ``"poke"`` or ``"reschedule"``, for ``deferrable=False``. Default: ``"poke"``.

    :param key: name of the lock. (templated)
    :param slots: number of slots that must be free. (templated)
    :param lock_mode: ``"exclusive"`` waits until an exclusive claim of the slots could be granted, and
        ``"shared"`` until there is no exclusive holder. Not to be confused with ``mode``, which Airflow
        defines for all sensors. (templated)
    :param deferrable: wait in the triggerer. If False, wait on a worker as other sensors do, with
        ``mode="poke"`` or ``mode="reschedule"``.
    :param poke_interval: time between two reads of the lock, in seconds or as timedelta. Default: 60 s in
        reschedule mode, else 5 s.
    :param dynamo_lock_conn_id: id of the Airflow connection that names the lock table. (templated)
    :raises LockValueError: an argument is not valid.
    """

    template_fields: Sequence[str] = ("key", "slots", "lock_mode", "dynamo_lock_conn_id")
    ui_color = "#fbe7c6"

    def __init__(
        self,
        *,
        key: str,
        slots: int | str = 1,
        lock_mode: str = "exclusive",
        deferrable: bool = True,
        dynamo_lock_conn_id: str = DEFAULT_CONN_ID,
        poke_interval: Seconds | None = None,
        **kwargs: Any,
    ) -> None:
        if poke_interval is not None:
            arguments.seconds("poke_interval", poke_interval)
            kwargs["poke_interval"] = poke_interval
        super().__init__(**kwargs)
        if poke_interval is None:
            # Airflow fails the task if it is due before the executor has reported the end of the last poke.
            self.poke_interval = 60.0 if self.mode == "reschedule" else 5.0
        self.key = key
        self.slots = slots
        self.lock_mode = lock_mode
        self.deferrable = deferrable
        self.dynamo_lock_conn_id = dynamo_lock_conn_id
        if not lock_options.is_template(key):
            lock_options.checked_key(key)
        lock_options.checked_look(
            1 if lock_options.is_template(slots) else slots,
            "exclusive" if lock_options.is_template(lock_mode) else lock_mode,
        )
        lock_options.check_conn_id(dynamo_lock_conn_id)
        if deferrable:
            enable_start_from_trigger(
                self, "DynamoLockSensorTrigger", self._trigger_arguments(), "execute_complete"
            )

    def _trigger_arguments(self) -> dict[str, Any]:
        names = ("key", "slots", "lock_mode", "timeout", "soft_fail", "poke_interval", "dynamo_lock_conn_id")
        return {name: lock_options.plain(getattr(self, name)) for name in names}

    def execute(self, context: Context) -> Any:
        """Read the lock once, and continue in the triggerer if the slots are not free."""
        from airflow_dynamo_lock.airflow.triggers import DynamoLockSensorTrigger

        if not self.deferrable or runs_in_dag_test():
            return super().execute(context)
        if self.poke(context):
            return None
        trigger = DynamoLockSensorTrigger(
            **self._trigger_arguments(),
            has_retries=bool(self.retries),
            deadline=time.time() + self.timeout,
            resume_after=RESUME_AFTER,
        )
        self.defer(trigger=trigger, method_name="execute_complete")

    def poke(self, context: Context) -> bool:
        """Read the lock once.

        :returns: whether a claim of the slots could be granted.
        :raises LockError: the lock could not be read.
        """
        if not hasattr(self, "_client"):
            # Kept between pokes: to prove that a holder is dead, the client compares reads.
            self._client = DynamoLockHook(self.dynamo_lock_conn_id).get_conn()
        slots, mode = lock_options.checked_look(self.slots, self.lock_mode)
        record, free = self._client.look(lock_options.checked_key(self.key), slots=slots, mode=mode)
        if not free and record is not None:
            self.log.info("Waiting for the lock %r. %s.", self.key, record.describe())
        return free

    def execute_complete(self, context: Context, event: Any) -> None:
        """Fail the task for good, if the trigger has resumed it for that. Else the trigger has ended it."""
        lock_options.checked_event(event)
