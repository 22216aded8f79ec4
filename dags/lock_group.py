"""Tasks that only one run works on at a time, in all the Airflow deployments that share the lock table.

While another run holds the lock, `acquire` waits in the triggerer and no task of the group occupies a worker.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, get_current_context, task

from airflow_dynamo_lock import DynamoLock


@task
def extract() -> str:
    lease = get_current_context()["dynamo_lock"]
    return f"the orders, read under lease {lease.lease_id}"


@task
def load(orders: str) -> None:
    print(f"Loading {orders}.")


@task
def report() -> None:
    print("The orders are loaded. Another run may be working on them by now.")


with DAG("dynamo_lock_group", schedule=None, doc_md=__doc__):
    with DynamoLock("warehouse/orders", timeout=timedelta(hours=2)) as lock:
        load(extract())
    lock >> report()  # when load() is done; it does not wait for the release
