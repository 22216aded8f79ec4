"""A sensor that waits until a lock is free, without acquiring it.

The report does not start during a load, but a load may start during the report. `DynamoLock` prevents both.
"""

from __future__ import annotations

from airflow.sdk import DAG, task

from airflow_dynamo_lock import DynamoLockSensor


@task
def build_report() -> None:
    print("No run held the lock when the sensor read it.")


with DAG("dynamo_lock_sensor", schedule=None, doc_md=__doc__):
    DynamoLockSensor(task_id="orders_are_idle", key="warehouse/orders", timeout=3600) >> build_report()
