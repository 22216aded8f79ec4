"""Wait until nobody works on the orders, without locking them: others may start the next moment.

Enough to keep a report from being built in the middle of a load; to keep loads away from it, use `DynamoLock`.
"""

from __future__ import annotations

from airflow.sdk import DAG, task

from airflow_dynamo_lock import DynamoLockSensor


@task
def build_report() -> None:
    print("Nobody was working on the orders just now.")


with DAG("dynamo_lock_sensor", schedule=None, doc_md=__doc__):
    DynamoLockSensor(task_id="orders_are_idle", key="warehouse/orders", timeout=3600) >> build_report()
