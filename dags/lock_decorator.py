"""`@task.dynamo_lock` makes a function a task that holds a lock while the function runs."""

from __future__ import annotations

from airflow.sdk import DAG, get_current_context, task


@task
def today() -> str:
    return "2026-11-20"


# If the lock is not free within 600 seconds, the task is skipped and does not fail.
@task.dynamo_lock(key="reports/daily", timeout=600, on_timeout="skip")
def publish(day: str) -> str:
    lease = get_current_context()["dynamo_lock"]
    print(f"Publishing the report of {day} under {lease.key!r}.")
    return day


with DAG("dynamo_lock_decorator", schedule=None, doc_md=__doc__):
    publish(today())
