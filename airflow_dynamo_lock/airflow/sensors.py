"""`DynamoLockSensor`: waits until a lock could be taken, and does not take it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow_dynamo_lock.airflow import lock_options
from airflow_dynamo_lock.airflow.hooks import DynamoLockHook
from airflow_dynamo_lock.airflow.operators import start_in_triggerer
from airflow_dynamo_lock.airflow.versions import BaseSensorOperator, runs_in_dag_test
from airflow_dynamo_lock.core.model import arguments
from airflow_dynamo_lock.core.model.arguments import Seconds
from airflow_dynamo_lock.defaults import DEFAULT_CONN_ID

if TYPE_CHECKING:
    from airflow_dynamo_lock.airflow.versions import Context


class DynamoLockSensor(BaseSensorOperator):
    """Waits until the wanted slots are free, or held by the dead.

    Somebody else may take them the next moment: to work under the lock, acquire it (`DynamoLock`).

    :param key: the name of the locked resource. (templated)
    :param slots: how many slots should be free. (templated)
    :param lock_mode: ``"shared"`` waits only until nobody holds it alone; ``"exclusive"`` until it could be held alone.
        (``mode`` is every sensor's way of waiting.) (templated)
    :param deferrable: wait in the triggerer; if False, as a sensor does, by ``mode="poke"`` or ``"reschedule"``.
    :param poke_interval: time between looks, seconds or timedelta. Default 5 s, in reschedule mode 60 s.
    :param dynamo_lock_conn_id: the connection that names the lock table. (templated)

    In reschedule mode each poke is a new process, which can only know from the server's time that a holder is dead.
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
        if poke_interval is None:
            # Airflow fails a task that it reschedules sooner than it has noticed the end of the last poke.
            poke_interval = 60.0 if kwargs.get("mode") == "reschedule" else 5.0
        super().__init__(poke_interval=poke_interval, **kwargs)
        self.key = key
        self.slots = slots
        self.lock_mode: Any = lock_mode
        self.deferrable = deferrable
        self.dynamo_lock_conn_id = dynamo_lock_conn_id
        if not lock_options.is_template(key):
            arguments.checked_key(key)
        if not (lock_options.is_template(slots) or lock_options.is_template(lock_mode)):
            arguments.checked_mode(lock_mode, wanted := lock_options.whole("slots", slots), wanted)
        if deferrable:
            start_in_triggerer(self, "DynamoLockSensorTrigger", self._trigger_arguments(), "execute_complete")

    def _trigger_arguments(self) -> dict[str, Any]:
        names = ("key", "slots", "lock_mode", "timeout", "soft_fail", "poke_interval", "dynamo_lock_conn_id")
        return {name: lock_options.plain(getattr(self, name)) for name in names}

    def execute(self, context: Context) -> Any:
        from airflow_dynamo_lock.airflow.triggers import DynamoLockSensorTrigger

        if not self.deferrable or runs_in_dag_test():
            return super().execute(context)
        if self.poke(context):
            return None
        trigger = DynamoLockSensorTrigger(**self._trigger_arguments(), deadline=time.time() + self.timeout)
        self.defer(trigger=trigger, method_name="execute_complete")

    def poke(self, context: Context) -> bool:
        """Look once."""
        if not hasattr(self, "_client"):
            # Kept between pokes: what it has seen of a holder is how it knows one to be dead.
            self._client = DynamoLockHook(self.dynamo_lock_conn_id).get_conn()
        record, free = self._client.look(
            self.key, slots=lock_options.whole("slots", self.slots), mode=self.lock_mode
        )
        if not free and record is not None:
            self.log.info("Waiting for the lock %r. %s.", self.key, record.describe())
        return free

    def execute_complete(self, context: Context, event: Any) -> None:
        """Nothing is left to do; the trigger has waited."""
