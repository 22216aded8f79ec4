"""Readers and writers: any number of runs may report on the prices at once, but none while a run loads them.

Readers acquire the lock in shared mode, writers in exclusive mode. Both wait in the same queue, so neither
can keep the other waiting for ever.
"""

from __future__ import annotations

from airflow.sdk import DAG, get_current_context, task

from airflow_dynamo_lock import DynamoLock


@task
def load() -> None:
    if get_current_context()["dynamo_lock"].took_over:
        print("The previous holder died while it held the lock. Its load may be half done.")
    print("No other run reads or loads the prices now.")


@task
def report() -> None:
    print("No run loads the prices now. Other runs may read them at the same time.")


with DAG("dynamo_lock_shared", schedule=None, doc_md=__doc__):
    with DynamoLock("warehouse/prices", group_id="writing") as writing:
        load()
    with DynamoLock("warehouse/prices", mode="shared", group_id="reading") as reading:
        report()
    # With `writing >> reading`, `reading` would start to wait for the lock while this run still holds it.
    writing.release >> reading
