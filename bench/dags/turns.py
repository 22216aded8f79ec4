"""The same two tasks in four DAGs: ``plain`` without a lock, ``locked`` under `DynamoLock`, ``flagged`` with a flag.

``streamed`` is ``locked`` on a table whose stream the waiters read.
``flagged`` is the usual workaround to keep two deployments apart. A pool with one slot keeps the waiting runs of a
deployment from filling its workers. A sensor sets a flag in DynamoDB, with a conditional write. Many such sensors read
first and then write, which is not safe; this one is.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from typing import Any

import psutil
from airflow.providers.standard.sensors.python import PythonSensor
from airflow.sdk import DAG, get_current_context, task

from airflow_dynamo_lock import DynamoLock

WORK = 0.5  # seconds of work in each task
POKE = 5.0  # seconds between two pokes of the sensor; Airflow's default is a minute
FLAG = {"key": {"S": "warehouse/flag"}}
MANY: Any = {"schedule": None, "max_active_runs": 100}
POOL: Any = {"pool": "warehouse"}


def work() -> None:
    """Sleep, and record the start and the end in the ledger."""
    note("start")
    time.sleep(WORK)
    note("end")


def note(event: str) -> None:
    """Append a line to the ledger, in one write, because other processes append at the same time."""
    context: Any = get_current_context()
    now = time.time()
    entry = {
        "at": now,
        "event": event,
        "deployment": os.environ["BENCH_DEPLOYMENT"],
        "run": context["dag_run"].run_id,
        # Age of this task's process. Airflow does not store the durations of a sensor's pokes.
        "on_worker": now - psutil.Process().create_time(),
    }
    ledger = os.open(os.environ["BENCH_LEDGER"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(ledger, f"{json.dumps(entry)}\n".encode())
    os.close(ledger)


@task
def extract() -> None:
    """Stand-in for a task that reads the orders."""
    work()


@task
def load() -> None:
    """Stand-in for a task that writes them into the warehouse."""
    work()


def _dynamodb() -> Any:
    import boto3

    return boto3.client("dynamodb", endpoint_url=os.environ["BENCH_ENDPOINT"])


def set_flag() -> bool:
    """Set the flag if it is not set. Returns whether this call has set it."""
    client = _dynamodb()
    try:
        client.put_item(
            TableName="flags",
            Item=FLAG,
            ConditionExpression="attribute_not_exists(#key)",
            ExpressionAttributeNames={"#key": "key"},
        )
        return True
    except client.exceptions.ConditionalCheckFailedException:
        return False
    finally:
        note("locking")


@task
def clear_flag() -> None:
    """Clear the flag, even if another run has set it."""
    _dynamodb().delete_item(TableName="flags", Key=FLAG)
    note("locking")


with DAG("plain", **MANY):
    extract() >> load()

with DAG("locked", **MANY), DynamoLock("warehouse/orders"):
    extract() >> load()

with DAG("streamed", **MANY), DynamoLock("warehouse/orders", dynamo_lock_conn_id="dynamo_lock_streamed"):
    extract() >> load()

with DAG("flagged", **MANY):
    turn = PythonSensor(
        task_id="set_flag",
        python_callable=set_flag,
        mode="reschedule",
        poke_interval=POKE,
        # Airflow sometimes fails a rescheduled sensor: when it processes the end of one poke after it has queued the
        # next (apache/airflow#71172). Without retries, most of many waiting runs would fail.
        retries=100,
        retry_delay=timedelta(seconds=POKE),
        **POOL,
    )
    clear = clear_flag.override(**POOL)().as_teardown(setups=turn)
    turn >> extract.override(**POOL)() >> load.override(**POOL)() >> clear
