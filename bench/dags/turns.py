"""The same two tasks three times: without a lock, under ours, and as people keep two deployments apart today.

``flagged`` is that: a pool with one slot, so that a deployment's own runs do not crowd its workers, and a sensor that
sets a flag in DynamoDB by a conditional write as soon as it is not set. It is about as well as it can be done in
so many lines, and more careful than the usual one, which looks first and writes then.
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
POKE = 5.0  # seconds between two pokes of the sensor; its default is a minute
FLAG = {"key": {"S": "warehouse/flag"}}
MANY: Any = {"schedule": None, "max_active_runs": 100}
POOL: Any = {"pool": "warehouse"}


def work() -> None:
    """Take some time, and write its start and its end into the ledger."""
    note("start")
    time.sleep(WORK)
    note("end")


def note(event: str) -> None:
    """Append a line to the ledger in one write, so that lines never mix."""
    context: Any = get_current_context()
    now = time.time()
    entry = {
        "at": now,
        "event": event,
        "deployment": os.environ["BENCH_DEPLOYMENT"],
        "run": context["dag_run"].run_id,
        # For how long this task has had its process. Airflow itself does not keep that of a sensor's pokes.
        "on_worker": now - psutil.Process().create_time(),
    }
    ledger = os.open(os.environ["BENCH_LEDGER"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(ledger, f"{json.dumps(entry)}\n".encode())
    os.close(ledger)


@task
def extract() -> None:
    """Pretend to read the orders."""
    work()


@task
def load() -> None:
    """Pretend to write them into the warehouse."""
    work()


def _dynamodb() -> Any:
    import boto3

    return boto3.client("dynamodb", endpoint_url=os.environ["BENCH_ENDPOINT"])


def set_flag() -> bool:
    """Set the flag if it is not set."""
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
    """Clear it, whoever has set it."""
    _dynamodb().delete_item(TableName="flags", Key=FLAG)
    note("locking")


with DAG("plain", **MANY):
    extract() >> load()

with DAG("locked", **MANY), DynamoLock("warehouse/orders"):
    extract() >> load()

with DAG("flagged", **MANY):
    turn = PythonSensor(
        task_id="set_flag",
        python_callable=set_flag,
        mode="reschedule",
        poke_interval=POKE,
        # Airflow fails such a sensor now and then, when it hears of the end of one poke after it has queued the next
        # (apache/airflow#71172). Without retries few of many waiting runs come to their turn.
        retries=100,
        retry_delay=timedelta(seconds=POKE),
        **POOL,
    )
    clear = clear_flag.override(**POOL)().as_teardown(setups=turn)
    turn >> extract.override(**POOL)() >> load.override(**POOL)() >> clear
