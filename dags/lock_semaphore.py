"""A semaphore: at most three runs call the partner's interface at a time, in all deployments together.

The others stand in line, in the order in which they came. To let in more at night, or fewer, set the capacity
(`LockClient.set_capacity`): it then counts instead of the one below.
"""

from __future__ import annotations

from airflow.sdk import DAG, get_current_context, task

from airflow_dynamo_lock import DynamoLock


@task
def call() -> int:
    lease = get_current_context()["dynamo_lock"]
    print(f"Calling, as one of {lease.capacity} at most.")
    return lease.capacity


with (
    DAG("dynamo_lock_semaphore", schedule=None, doc_md=__doc__),
    DynamoLock("partner/api", slots=1, capacity=3),
):
    call()
