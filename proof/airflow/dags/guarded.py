"""The DAGs that the tests of `tests/airflow` run. What they do is told by the run's conf, and by files of the test:

a guarded task notes every 50 ms in the ledger that it is inside, until the test says how it should end, or for as long
as the conf says.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, get_current_context, task, task_group

from airflow_dynamo_lock import DynamoLock, DynamoLockOperator, DynamoLockSensor

ROOM = Path(os.environ["DYNAMO_LOCK_TEST_ROOM"])
DEPLOYMENT = os.environ["DYNAMO_LOCK_TEST_DEPLOYMENT"]

KEY = "{{ dag_run.conf['key'] }}"
TIMES: Any = {
    "lease": "{{ dag_run.conf.get('lease', 20) }}",
    "release_grace": "{{ dag_run.conf.get('grace', 6) }}",
    "timeout": "{{ dag_run.conf.get('timeout') }}",
}


def note(**values: object) -> None:
    """Append one line to the ledger, in one write."""
    line = json.dumps({**values, "pid": os.getpid(), "deployment": DEPLOYMENT}) + "\n"
    ledger = os.open(ROOM / "ledger.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(ledger, line.encode())
    os.close(ledger)


def be_inside() -> None:
    """Work under the lease until the test has made the file ``finish`` or ``fail`` for this run and task, or until the
    ``seconds`` of the run's conf are over; it then ``fails``, if the conf has that."""
    context: Any = get_current_context()
    lease, ti, conf = context["dynamo_lock"], context["ti"], context["dag_run"].conf
    here = {"key": lease.key, "lease_id": lease.lease_id, "token": lease.token}
    here |= {"dag_id": ti.dag_id, "run_id": ti.run_id, "task_id": ti.task_id, "try_number": ti.try_number}
    name = f"{ti.run_id}.{ti.task_id}".replace("/", "_")
    end = time.monotonic() + conf.get("seconds", float("inf"))
    while True:
        # The time first: what the lease is good for is then true of this moment, even if the process is paused here.
        at = time.time()
        note(at=at, remaining=lease.remaining(), **here)
        if (ROOM / f"{name}.fail").exists() or (time.monotonic() > end and conf.get("fails")):
            raise RuntimeError("the test wanted it so")
        if (ROOM / f"{name}.finish").exists() or time.monotonic() > end:
            return
        time.sleep(0.05)


@task
def work() -> None:
    be_inside()


@task
def quick() -> None:
    context: Any = get_current_context()
    for lease in context["dynamo_locks"].values():
        lease.check()
        here = {"key": lease.key, "lease_id": lease.lease_id, "token": lease.token}
        note(at=time.time(), **here, run_id=context["run_id"], task_id=context["ti"].task_id)


with DAG("guarded", schedule=None, max_active_runs=300), DynamoLock(KEY, **TIMES):
    work()

with DAG("skipping", schedule=None, max_active_runs=300), DynamoLock(KEY, on_timeout="skip", **TIMES):
    work()

with DAG("steps", schedule=None, max_active_runs=300), DynamoLock(KEY, **TIMES):
    again: Any = {"retries": 1, "retry_delay": timedelta(seconds=1)}
    work.override(task_id="first", **again)() >> work.override(task_id="second", **again)()

with DAG("retried", schedule=None), DynamoLock(KEY, **TIMES):
    work.override(task_id="fails_once", retries=1, retry_delay=timedelta(seconds=30))()

with DAG("queued", schedule=None, max_active_runs=300), DynamoLock(KEY, **TIMES):
    work.override(task_id="in_pool", pool="narrow")()

with (
    DAG("hurried", schedule=None, max_active_runs=300, dagrun_timeout=timedelta(seconds=45)),
    DynamoLock(KEY, **TIMES),
):
    work()

with DAG("timed_out", schedule=None, dagrun_timeout=timedelta(seconds=12)), DynamoLock(KEY, **TIMES):
    work()

with DAG("quick", schedule=None), DynamoLock(KEY, **TIMES):
    quick()

with (
    DAG("many", schedule=None, max_active_runs=300, max_active_tasks=300),
    DynamoLock(KEY, dynamo_lock_conn_id="dynamodb_local", **TIMES),
):
    quick()

with DAG("operator", schedule=None, max_active_runs=300):
    DynamoLockOperator(task_id="locked", key=KEY, python_callable=be_inside, **TIMES)

with DAG("decorated", schedule=None, max_active_runs=300):
    task.dynamo_lock(key=KEY, task_id="locked", **TIMES)(be_inside)()

# A lock without any template.
with DAG("constant", schedule=None), DynamoLock("constant", lease=20, release_grace=6):
    quick()

with DAG("sensing", schedule=None):
    DynamoLockSensor(task_id="in_triggerer", key=KEY)
    DynamoLockSensor(task_id="poke", key=KEY, deferrable=False, poke_interval=1)
    DynamoLockSensor(task_id="reschedule", key=KEY, deferrable=False, mode="reschedule", poke_interval=20)


with DAG("nested", schedule=None):
    # The outer lock's keys are acquired in one order, whatever the author's; the inner one's come from another task.
    with DynamoLock([f"{KEY}/b", f"{KEY}/a"], group_id="outer", **TIMES):
        quick()

        @task
        def inner_key() -> str:
            return f"{get_current_context()['dag_run'].conf['key']}/inner"  # type: ignore[index]

        with DynamoLock(inner_key(), group_id="inner", lease=20, release_grace=6):
            quick()
    with DynamoLock(f"{KEY}/a", group_id="outer", **TIMES) as again:
        quick()


for name in ("amazon_lock_client", "python_dynamodb_lock", "dyndbmutex", "awsflock", "s3"):
    with DAG(f"in_{name}", schedule=None):
        DynamoLockSensor(task_id="sensor", key=KEY, dynamo_lock_conn_id=name)
        with DynamoLock(KEY, dynamo_lock_conn_id=name, **TIMES):
            work()


@task_group
def per_table(table: str) -> None:
    with DynamoLock(table, lease=20, release_grace=6):
        quick()


with DAG("mapped", schedule=None):

    @task
    def tables() -> list[str]:
        conf = get_current_context()["dag_run"].conf or {}
        return [f"{conf['key']}/{name}" for name in ("orders", "customers")]

    per_table.expand(table=tables())
