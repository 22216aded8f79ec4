"""The DAGs of the testbed. Each is named after what it tests.

A run's conf contains the key of the lock, and optionally:

- ``lease``, ``grace``, ``timeout``: options of the lock, in seconds;
- ``seconds``: for how long the guarded tasks work. Default: until the test creates a file that ends the task;
- ``fails``: the guarded tasks fail after that time.
"""

from __future__ import annotations

import glob
import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, get_current_context, task, task_group

from airflow_dynamo_lock import DynamoLock, DynamoLockOperator, DynamoLockSensor, LockAlert

FOLDER = Path(os.environ["DYNAMO_LOCK_TEST_FOLDER"])
DEPLOYMENT = os.environ["DYNAMO_LOCK_TEST_DEPLOYMENT"]

KEY = "{{ dag_run.conf['key'] }}"
TIMES: Any = {
    "lease": "{{ dag_run.conf.get('lease', 20) }}",
    "release_grace": "{{ dag_run.conf.get('grace', 6) }}",
    "timeout": "{{ dag_run.conf.get('timeout') }}",
}
#: Arguments of a task that is retried once.
AGAIN: Any = {"retries": 1, "retry_delay": timedelta(seconds=1)}


def note(**values: object) -> None:
    """Append one line to the ledger."""
    line = json.dumps({**values, "pid": os.getpid(), "deployment": DEPLOYMENT}) + "\n"
    # A single write with O_APPEND, so that the lines of two processes never mix.
    ledger = os.open(FOLDER / "ledger.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(ledger, line.encode())
    os.close(ledger)


def use_lease() -> None:
    """Append a line to the ledger every 50 ms, until the conf's time is over or the test ends this task.

    The test ends it by a file ``RUN.TASK.finish`` or ``RUN.TASK.fail``; see `Testbed.end_task`.
    """
    context: Any = get_current_context()
    lease, ti, conf = context["dynamo_lock"], context["ti"], context["dag_run"].conf
    here = {"key": lease.key, "lease_id": lease.lease_id, "token": lease.token}
    here |= {"dag_id": ti.dag_id, "run_id": ti.run_id, "task_id": ti.task_id, "try_number": ti.try_number}
    name = f"{ti.run_id}.{ti.task_id}".replace("/", "_")
    end = time.monotonic() + conf.get("seconds", float("inf"))
    while True:
        # Read the clock before the lease, so that the line is true even if the process is paused in between.
        at = time.time()
        note(at=at, remaining=lease.remaining(), **here)
        if (FOLDER / f"{name}.fail").exists() or (time.monotonic() > end and conf.get("fails")):
            raise RuntimeError("The test has made this task fail.")
        if (FOLDER / f"{name}.finish").exists() or time.monotonic() > end:
            return
        time.sleep(0.05)


@task
def work() -> None:
    use_lease()


@task
def quick() -> None:
    """Append one line to the ledger for each lease of this task."""
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
    work.override(task_id="first", **AGAIN)() >> work.override(task_id="second", **AGAIN)()

with DAG("retried", schedule=None), DynamoLock(KEY, **TIMES):
    work.override(task_id="fails_once", retries=1, retry_delay=timedelta(seconds=30))()

with DAG("queued", schedule=None, max_active_runs=300), DynamoLock(KEY, **TIMES):
    work.override(task_id="in_pool", pool="narrow")()

with (
    DAG("hurried", schedule=None, max_active_runs=300, dagrun_timeout=timedelta(seconds=45)),
    DynamoLock(KEY, **TIMES),
):
    work()

with DAG("quick", schedule=None), DynamoLock(KEY, **TIMES):
    quick()

with (
    DAG("many", schedule=None, max_active_runs=300, max_active_tasks=300),
    DynamoLock(KEY, dynamo_lock_conn_id="dynamodb_local", **TIMES),
):
    quick()

with DAG("operator", schedule=None, max_active_runs=300):
    DynamoLockOperator(task_id="locked", key=KEY, python_callable=use_lease, **TIMES)

with DAG("on_worker", schedule=None):
    DynamoLockOperator(task_id="locked", key=KEY, python_callable=use_lease, deferrable=False, **TIMES)

with DAG("decorated", schedule=None, max_active_runs=300):
    task.dynamo_lock(key=KEY, task_id="locked", **TIMES)(use_lease)()

ALERTS: Any = {
    name: LockAlert(0.5, "alert_file.AlertFile", {"kind": name, "text": "{{ lock_alert.text }}"})
    for name in ("on_wait", "on_held")
}

with DAG("alerting", schedule=None), DynamoLock(KEY, **TIMES, **ALERTS):
    work()

with DAG("alerting_alone", schedule=None):
    DynamoLockOperator(task_id="locked", key=KEY, python_callable=use_lease, **TIMES, **ALERTS)

# A lock without templates.
with DAG("constant", schedule=None), DynamoLock("constant", lease=20, release_grace=6):
    quick()

with DAG("sensing", schedule=None):
    DynamoLockSensor(task_id="in_triggerer", key=KEY)
    DynamoLockSensor(task_id="poke", key=KEY, deferrable=False, poke_interval=1)
    DynamoLockSensor(task_id="reschedule", key=KEY, deferrable=False, mode="reschedule", poke_interval=20)


with DAG("nested", schedule=None):
    # The outer lock has two keys, not in the order in which they are acquired. The inner lock's key is the
    # result of a task.
    with DynamoLock([f"{KEY}/b", f"{KEY}/a"], group_id="outer", **TIMES):
        quick()

        @task
        def inner_key() -> str:
            return f"{get_current_context()['dag_run'].conf['key']}/inner"  # type: ignore[index]

        with DynamoLock(inner_key(), group_id="inner", lease=20, release_grace=6):
            quick()
    with DynamoLock(f"{KEY}/a", group_id="outer", **TIMES) as again:
        quick()


@task
def meet() -> None:
    """Wait until all runs of a round are here."""
    context: Any = get_current_context()
    conf = context["dag_run"].conf
    (FOLDER / f"{conf['together']}.{DEPLOYMENT}.{context['run_id']}.met").touch()
    while len([*FOLDER.glob(f"{glob.escape(conf['together'])}.*.met")]) < conf["of"]:
        time.sleep(0.1)


# Each run of a round waits for its inner lock when all of them hold their outer one. A task that is retried after the
# error would wait again, while its run still holds the outer lock.
with DAG("crossed", schedule=None, default_args=AGAIN), DynamoLock(KEY, group_id="outer", **TIMES):
    met = meet()
    with DynamoLock("{{ dag_run.conf['inner'] }}", group_id="inner", **TIMES) as inner:
        quick()
    met >> inner


# The group's wait and the sensor's are ended while the lock is held. A retry would wait again.
with DAG("ended", schedule=None, default_args=AGAIN):
    DynamoLockSensor(task_id="sensor", key=KEY, timeout=5)
    with DynamoLock(KEY, **TIMES):
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
