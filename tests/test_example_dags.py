"""The DAGs in `dags/` work: each loads without an AWS SDK, and succeeds with `dag.test()`."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import pytest

from airflow_dynamo_lock import LockClient, LockRecord
from airflow_dynamo_lock.core.model.limits import SHARED
from deployments.engines import REGION, MotoServer
from tests.commands import output_of

DAGS = Path(__file__).parent.parent / "dags"
FILES = sorted(DAGS.glob("*.py"))

LOAD = """
import importlib, json, sys
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    importlib.import_module(name)
    print(json.dumps([name, sorted({"boto3", "botocore", "aiobotocore"} & sys.modules.keys())]))
"""

RUN = """
import json, sys
from functools import cache
import botocore.loaders, botocore.session
botocore.session.create_loader = cache(botocore.loaders.create_loader)  # as in tests/conftest.py
from airflow.__main__ import main
from airflow.sdk.execution_time import supervisor
# As Airflow 3.3 does: earlier releases build the Execution API anew for each task, which takes them seconds.
supervisor.in_process_api_server = cache(supervisor.in_process_api_server)

dags, sys.argv[1:] = sys.argv[1], ["db", "migrate"]
main()
try:
    from airflow.dag_processing.dagbag import DagBag
except ImportError:  # before Airflow 3.2
    from airflow.models.dagbag import DagBag

bag = DagBag(dags)
assert not bag.import_errors, bag.import_errors
for dag_id, dag in sorted(bag.dags.items()):
    run = dag.test()
    tasks = {}
    for ti in run.get_task_instances():
        result = ti.xcom_pull(ti.task_id, map_indexes=ti.map_index)
        tasks.setdefault(ti.task_id, []).append([ti.map_index, ti.state, result])
    print("RESULT", json.dumps([dag_id, run.state, tasks]), flush=True)
"""


@dataclass(frozen=True)
class Run:
    """The outcome of one DAG's run.

    :ivar tasks: task id → state and result of each of its instances, by map index.
    """

    state: str
    tasks: Mapping[str, list[tuple[str, Any]]]

    @classmethod
    def parse(cls, state: str, tasks: Mapping[str, list[list[Any]]]) -> Self:
        """Create an outcome from the output of `RUN`."""
        return cls(state, {name: [(it[1], it[2]) for it in sorted(each)] for name, each in tasks.items()})

    def result(self, task_id: str) -> Any:
        """Return the result of a task that is not mapped."""
        ((_, result),) = self.tasks[task_id]
        return result


@dataclass(frozen=True)
class Runs:
    """One run of each example."""

    by_dag: Mapping[str, Run]
    locks: LockClient
    folder: Path

    def lock(self, key: str) -> LockRecord:
        """Return the record of a lock after the runs."""
        record = self.locks.get(key)
        assert record is not None
        return record


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Run all examples in turn in one process, because Airflow takes longer to start than they take."""
    folder = tmp_path_factory.mktemp("examples")
    with MotoServer() as engine:
        locks = LockClient(engine.client(), table="airflow_locks")
        locks.create_table()
        lock = {"region_name": REGION}
        aws_default = {"conn_type": "aws", "login": "test", "password": "test-secret"}
        environment = airflow_environment(folder) | {
            "AWS_ENDPOINT_URL_DYNAMODB": engine.endpoint_url,
            "AIRFLOW_CONN_DYNAMO_LOCK_DEFAULT": json.dumps({"conn_type": "dynamo_lock", "extra": lock}),
            "AIRFLOW_CONN_AWS_DEFAULT": json.dumps(aws_default),
        }
        lines = output_of(sys.executable, "-c", RUN, DAGS, env=environment).splitlines()
        results = (json.loads(line.removeprefix("RESULT ")) for line in lines if line.startswith("RESULT "))
        yield Runs({dag_id: Run.parse(state, tasks) for dag_id, state, tasks in results}, locks, folder)


def airflow_environment(folder: Path) -> dict[str, str]:
    """Return the environment of a new Airflow, without variables of this process."""
    return {
        "PATH": os.environ["PATH"],
        "TMPDIR": str(folder),
        "AIRFLOW_HOME": str(folder),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_FOLDER": str(DAGS),
    }


def test_all_examples_load_without_an_aws_sdk(tmp_path: Path) -> None:
    names = [file.stem for file in FILES]
    printed = output_of(sys.executable, "-c", LOAD, DAGS, *names, env=airflow_environment(tmp_path))
    assert [json.loads(line) for line in printed.splitlines()[-len(names) :]] == [
        [name, []] for name in names
    ]


def test_every_example_succeeds(runs: Runs) -> None:
    assert {dag_id: run.state for dag_id, run in runs.by_dag.items()} == {
        f"dynamo_{file.stem}": "success" for file in FILES
    }


def test_every_lock_is_free_afterwards(runs: Runs) -> None:
    assert [record.key for record in runs.locks.list_locks() if record.holders or not record.token] == []


def test_group(runs: Runs) -> None:
    run = runs.by_dag["dynamo_lock_group"]
    inside = {f"lock.{name}" for name in ("acquire", "heartbeat", "release", "extract", "load")}
    assert run.tasks.keys() == {*inside, "report"}
    lease = run.result("lock.acquire")
    assert lease["key"] == "warehouse/orders"
    assert lease["lease_id"] in run.result("lock.extract")


def test_operator(runs: Runs) -> None:
    assert runs.by_dag["dynamo_lock_operator"].result("send_invoice") == "acme"
    assert runs.lock("invoices/acme").token


def test_decorator(runs: Runs) -> None:
    assert runs.by_dag["dynamo_lock_decorator"].result("publish") == "2026-11-20"
    assert runs.lock("reports/daily").token


def test_sensor_acquires_no_lock(runs: Runs) -> None:
    assert runs.by_dag["dynamo_lock_sensor"].tasks.keys() == {"orders_are_idle", "build_report"}
    group = runs.by_dag["dynamo_lock_group"].result("lock.acquire")
    _, mapped = runs.by_dag["dynamo_lock_mapped"].tasks["per_table.lock.acquire"][0]
    assert runs.lock("warehouse/orders").token == max(group["token"], mapped["token"])


def test_mapped_group_has_a_lock_per_table(runs: Runs) -> None:
    tasks = runs.by_dag["dynamo_lock_mapped"].tasks
    keys = ["warehouse/orders", "warehouse/customers", "warehouse/stock"]
    assert [lease["key"] for _, lease in tasks["per_table.lock.acquire"]] == keys
    assert [key for _, key in tasks["per_table.lock.vacuum"]] == keys


def test_semaphore(runs: Runs) -> None:
    assert runs.by_dag["dynamo_lock_semaphore"].result("lock.call") == 3
    assert runs.lock("partner/api").capacity == 3


def test_shared_and_exclusive_take_turns(runs: Runs) -> None:
    run = runs.by_dag["dynamo_lock_shared"]
    writing, reading = run.result("writing.acquire"), run.result("reading.acquire")
    assert writing["key"] == reading["key"]
    assert writing["token"] < reading["token"]
    assert (writing["capacity"], reading["capacity"]) == (1, SHARED)


@pytest.mark.skipif(find_spec("papermill") is None, reason="papermill is not installed in this environment")
def test_notebook_joins_the_lease_of_its_run(runs: Runs) -> None:
    run = runs.by_dag["dynamo_lock_notebook"]
    token = run.result("lock.acquire")["token"]
    assert run.result("lock.repair") == f"Repaired under 'warehouse/customers' with token {token}.\n"


def test_fencing_lets_no_earlier_holder_write(runs: Runs) -> None:
    lease = runs.by_dag["dynamo_lock_fencing"].result("lock.acquire")
    with closing(sqlite3.connect(runs.folder / "dynamo_lock_fencing.db")) as db, db:
        assert db.execute("SELECT balance, token FROM account").fetchall() == [(100, lease["token"])]
        earlier = lease["token"] - 1
        late = db.execute("UPDATE account SET balance = 0 WHERE name = 'cash' AND token <= ?", (earlier,))
        assert late.rowcount == 0
