"""Readers and writers: many runs may report on the prices at the same time, but none while a run loads them.

Who only reads takes the lock in shared mode. Loads and reports wait in one line, so that neither keeps the other out.
"""

from __future__ import annotations

from airflow.sdk import DAG, get_current_context, task

from airflow_dynamo_lock import DynamoLock


@task
def load() -> None:
    if get_current_context()["dynamo_lock"].took_over:
        print("The run before has died while it held the lock: its load may be half done.")
    print("Nobody reads the prices now, and nobody else loads them.")


@task
def report() -> None:
    print("Nobody loads the prices now. Others may be reading them, too.")


with DAG("dynamo_lock_shared", schedule=None, doc_md=__doc__):
    with DynamoLock("warehouse/prices", group_id="writing") as writing:
        load()
    with DynamoLock("warehouse/prices", mode="shared", group_id="reading") as reading:
        report()
    # Not `writing >> reading`: that would begin to wait for the lock while this run still holds it.
    writing.release >> reading
