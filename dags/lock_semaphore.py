"""A semaphore: at most three runs at a time call a partner's API, in all deployments together.

Other runs are queued in arrival order. To change the number of runs later, call `LockClient.set_capacity`.
The capacity that it sets overrides the one in this file.
"""

from __future__ import annotations

from airflow.sdk import DAG, get_current_context, task

from airflow_dynamo_lock import DynamoLock


@task
def call() -> int:
    lease = get_current_context()["dynamo_lock"]
    print(f"Calling the API. At most {lease.capacity} runs do so at a time.")
    return lease.capacity


with (
    DAG("dynamo_lock_semaphore", schedule=None, doc_md=__doc__),
    DynamoLock("partner/api", slots=1, capacity=3),
):
    call()
