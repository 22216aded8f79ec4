"""A group of tasks under a lock. Only one run at a time executes them, in all Airflow deployments together.

While another run holds the lock, `acquire` waits in the triggerer. No task of the group occupies a worker.
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
    print("The orders are loaded. Another run may already hold the lock.")


with DAG("dynamo_lock_group", schedule=None, doc_md=__doc__):
    with DynamoLock("warehouse/orders", timeout=timedelta(hours=2)) as lock:
        load(extract())
    lock >> report()  # starts when load() has ended, and does not wait for the release
