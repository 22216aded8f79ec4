"""The DAGs of both deployments. `warehouse`: two tasks under a lock that lets one run at a time work on a warehouse.

Each of its tasks appends its start and its end to the ledger, a file that both deployments share (`demo/ledger.py`).
`first_task` runs once, before the runs compete: the first task of a new deployment takes Airflow about 10 s.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, get_current_context, task

from airflow_dynamo_lock import DynamoLock

WORK = 1.0  # duration of each task, in seconds


@task
def extract() -> None:
    """Pretend to read the orders."""
    work()


@task
def load() -> None:
    """Pretend to write the orders into the warehouse."""
    work()


@task
def do_nothing() -> None:
    """Let Airflow start a worker."""


def work() -> None:
    """Sleep for `WORK` seconds, and record the start and the end in the ledger."""
    note("start")
    time.sleep(WORK)
    note("end")


def note(event: str) -> None:
    """Append a line to the ledger."""
    now = time.time()
    context: dict[str, Any] = dict(get_current_context())
    entry = {
        "time": now,
        "event": event,
        "deployment": os.environ["DEMO_DEPLOYMENT"],
        "run": context["dag_run"].run_id,
        "task": context["task"].label,
        "pid": os.getpid(),
        "token": context["dynamo_lock"].token,
    }
    # A single write with O_APPEND, so that the lines of two processes never mix.
    ledger = os.open(os.environ["DEMO_LEDGER"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(ledger, f"{json.dumps(entry)}\n".encode())
    finally:
        os.close(ledger)


with (
    DAG("warehouse", schedule=None, max_active_runs=100, doc_md=__doc__),
    DynamoLock("warehouse/orders", timeout=timedelta(minutes=10)),
):
    extract() >> load()

with DAG("first_task", schedule=None):
    do_nothing()
