"""A mapped task group with one lock per map index.

The keys are the result of a task. Each map index acquires, holds and releases the lock of its own key.
"""

from __future__ import annotations

from airflow.sdk import DAG, get_current_context, task, task_group

from airflow_dynamo_lock import DynamoLock


@task
def tables() -> list[str]:
    return ["orders", "customers", "stock"]


@task
def keys(names: list[str]) -> list[str]:
    return [f"warehouse/{name}" for name in names]


@task
def vacuum() -> str:
    lease = get_current_context()["dynamo_lock"]
    print(f"Vacuuming the table that the lock {lease.key!r} protects.")
    return lease.key


@task_group
def per_table(key: str) -> None:
    with DynamoLock(key):
        vacuum()


with DAG("dynamo_lock_mapped", schedule=None, doc_md=__doc__):
    per_table.expand(key=keys(tables()))
