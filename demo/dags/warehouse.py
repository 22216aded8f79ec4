"""What both deployments run: two tasks on one warehouse, at which nobody else may be at work meanwhile.

Each task writes down when it starts and when it ends, all of them into the same ledger: see `demo/ledger.py`.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, get_current_context, task

from airflow_dynamo_lock import DynamoLock

WORK = 1.0  # seconds of work in each task


@task
def extract() -> None:
    """Pretend to read the orders."""
    work()


@task
def load() -> None:
    """Pretend to write them into the warehouse."""
    work()


def work() -> None:
    """Take some time, and write its start and its end into the ledger."""
    note("start")
    time.sleep(WORK)
    note("end")


def note(event: str) -> None:
    """Append a line to the ledger: one write to a file opened for appending, so that lines never mix."""
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
