"""A lock per table, for tables that are known only when the DAG runs: each map index waits for its own key."""

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
    print(f"Vacuuming the table behind {lease.key!r}.")
    return lease.key


@task_group
def per_table(key: str) -> None:
    with DynamoLock(key):
        vacuum()


with DAG("dynamo_lock_mapped", schedule=None, doc_md=__doc__):
    per_table.expand(key=keys(tables()))
