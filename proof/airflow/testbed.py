"""Real Airflow deployments that share one lock table on moto, and a ledger of their guarded tasks.

The tests of ``tests/airflow`` and `proof.airflow.chaos` use it. It operates Airflow by its REST API, as users
do, and its processes by signals.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

from airflow_dynamo_lock import LockClient, LockRecord
from airflow_dynamo_lock.core.foreign.registry import FORMATS, NATIVE
from deployments.clients import FOREIGN_TABLES
from deployments.deployment import Deployment, running
from deployments.engines import REGION, Engine, MotoServer
from proof.airflow.lease_uses import LeaseUse, Ledger, violations
from proof.airflow.production import ProductionDeployment

T = TypeVar("T")
#: Whether to start deployments like those of a managed service (`production`).
IN_PRODUCTION = os.environ.get("DYNAMO_LOCK_MATRIX") == "production"
TABLE = "airflow_locks"
LEASE, GRACE = 20.0, 6.0  # seconds, as in dags/guarded.py
POLL = 1.25  # longest interval of the poller, in seconds, jitter included
#: Connection ids for the tables of other lock libraries, and the format of each table.
FOREIGN = {name.replace("-", "_"): name for name in FORMATS if name != NATIVE}
#: Ids of the DAGs in dags/guarded.py.
DAGS = {
    "guarded",
    "retried",
    "queued",
    "decorated",
    "constant",
    "skipping",
    "quick",
    "many",
    "operator",
    "on_worker",
    "sensing",
    "mapped",
    "nested",
    "crossed",
    "steps",
    "alerting",
    "alerting_alone",
    "hurried",
    *(f"in_{name}" for name in FOREIGN),
}


@dataclass
class Testbed:
    """Running deployments, the lock table and the ledger.

    :ivar folder: folder for the ledger, the homes of the deployments and all other files.
    :ivar locks: a client of the lock table.
    """

    __test__ = False  # pytest would take it for a test class, because of its name

    deployments: tuple[Deployment, ...]
    folder: Path
    locks: LockClient
    engine: Engine
    ledger: Ledger

    @property
    def airflow(self) -> Deployment:
        """The first deployment, for tests that use only one."""
        return self.deployments[0]

    def start(self, dag_id: str, key: str, **conf: Any) -> str:
        """Trigger a run of the first deployment, and return its id.

        :param key: key of the lock.
        :param conf: more values for the run's conf; dags/guarded.py reads them.
        """
        return self.airflow.trigger(dag_id, {"key": key, **conf})

    def end_task(self, run_id: str, how: Literal["finish", "fail"], task_id: str = "lock.work") -> None:
        """Make a guarded task finish or fail, when it next looks for the file that this creates."""
        (self.folder / f"{run_id}.{task_id}.{how}").touch()

    def uses(self, key: str) -> list[LeaseUse]:
        """Return the lease uses of one lock from the ledger, in the order in which they began."""
        return self.ledger.uses(key)

    def wait_inside(self, key: str, run_id: str, *, timeout: float = 180.0) -> LeaseUse:
        """Wait until a process of the run is inside, and return its lease use.

        :param timeout: seconds after which this raises `TimeoutError`.
        """

        def found() -> LeaseUse | None:
            uses = [use for use in self.uses(key) if use.run_id == run_id]
            return uses[-1] if uses else None

        return wait_for(found, f"a process of {run_id} is inside {key}", timeout)

    def wait_for_record(
        self, key: str, condition: Callable[[LockRecord], Any], *, timeout: float = 180.0
    ) -> LockRecord:
        """Wait until the lock's record fulfils a condition, and return it.

        :param timeout: seconds after which this raises `TimeoutError`.
        """

        def found() -> LockRecord | None:
            record = self.locks.get(key)
            return record if record is not None and condition(record) else None

        return wait_for(found, f"the record of {key} fulfils the condition", timeout)

    def blocked_warnings(self, since: int) -> list[str]:
        """Return the triggerer's warnings that work of this package blocked its event loop.

        `site/sitecustomize.py` records the work and the garbage collections in the triggerer. A warning does
        not count if a single callback did not work for half of the time in this package's code, or if a
        collection took more than half of it.

        :param since: first line of the triggerer's log to read, counted from 0.
        """
        collections, work = self._measured("collections.jsonl"), self._measured("work.jsonl")

        def is_ours(line: str) -> bool:
            at = datetime.fromisoformat(line.split()[0]).timestamp()
            seconds = float(line.partition("blocked for ")[2].split()[0])
            # Airflow notices the end of a block at its next probe, after 0.1 s.
            by_callback: defaultdict[float, float] = defaultdict(float)
            for each in work:
                if at - seconds - 0.2 <= each["at"] <= at:
                    by_callback[each["callback"]] += each["took"]
            collected = any(abs(at - each["at"]) < 0.5 and each["took"] > seconds / 2 for each in collections)
            return max(by_callback.values(), default=0.0) >= seconds / 2 and not collected

        lines = self.airflow.triggerer.log.read_text().splitlines()[since:]
        return [line for line in lines if "was blocked for" in line and is_ours(line)]

    def alerts(self, run_id: str) -> list[dict[str, Any]]:
        """What the notifier ``alert_file.AlertFile`` was told of a run."""
        return [each for each in self._measured("alerts.jsonl") if each["run_id"] == run_id]

    def _measured(self, name: str) -> list[dict[str, Any]]:
        file = self.folder / name
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def assert_green(self, dag_id: str, run_id: str) -> None:
        """Assert that a run and all its tasks succeed. A failed teardown alone does not make the run fail.

        A `release` task may be skipped: the process of the last guarded task may have done its work.
        """
        assert self.airflow.wait(dag_id, run_id).state == "success"
        states = {(ti.task_id, ti.map_index): ti.state for ti in self.airflow.task_instances(dag_id, run_id)}
        for (task_id, _), state in states.items():
            assert state == "success" or (state == "skipped" and task_id.endswith(".release")), states

    def assert_exclusive(self, key: str) -> None:
        """Assert that no two leases of the lock were used at the same time, and that the tokens increased."""
        uses = self.uses(key)
        assert uses, f"no process was ever inside {key}"
        found = list(violations(uses))
        assert not found, "\n".join(map(str, found))


def wait_for(found: Callable[[], T | None], what: str, timeout: float) -> T:
    """Call `found` every 0.1 s until it returns something other than None, and return that.

    :param what: the expected state, for the error message.
    :param timeout: seconds after which this raises `TimeoutError`.
    """
    deadline = time.monotonic() + timeout
    while (result := found()) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"This has not happened within {timeout:g} s: {what}.")
        time.sleep(0.1)
    return result


@contextmanager
def start_testbed(
    folder: Path,
    *names: str,
    env: Mapping[str, str] | None = None,
    base_paths: Mapping[str, str] | None = None,
) -> Iterator[Testbed]:
    """Start a testbed, and stop it at the end of the ``with`` block.

    :param folder: folder for all files.
    :param names: a name for each deployment.
    :param env: additional environment variables of the deployments.
    :param base_paths: for deployments that are served under a path: their names and paths.
    """
    with MotoServer() as engine:
        locks = LockClient(engine.client(), table=TABLE, owner="the tests")
        locks.create_table()
        deployments = tuple(
            _deployment(name, folder, engine, env or {}, (base_paths or {}).get(name, "")) for name in names
        )
        with running(*deployments):
            for deployment in deployments:
                deployment.wait_for_dags(DAGS)
                deployment.add_pool("narrow", 1)
            yield Testbed(deployments, folder, locks, engine, Ledger(folder / "ledger.jsonl"))


def connection(deployment: str, **extra: str) -> str:
    """Return the JSON of a deployment's Airflow connection to the lock table.

    It contains no endpoint, as if the table were in AWS. The SDK finds the engine by the environment
    variables ``AWS_ENDPOINT_URL_…``.

    :param extra: fields that are added to the connection's extra, or replace its fields.
    """
    defaults = {"table": TABLE, "region_name": REGION, "deployment": deployment}
    return json.dumps({"conn_type": "dynamo_lock", "extra": defaults | extra})


def table_environment(deployment: str, engine: Engine) -> dict[str, str]:
    """Return the environment variables with which a deployment finds the lock table on an engine."""
    return {
        **{f"AWS_ENDPOINT_URL_{service}": engine.endpoint_url for service in ("DYNAMODB", "S3")},
        "AIRFLOW_CONN_DYNAMO_LOCK_DEFAULT": connection(deployment),
        "AIRFLOW_CONN_AWS_DEFAULT": json.dumps(
            {"conn_type": "aws", "login": "test", "password": "test-secret"}
        ),
    }


def _deployment(
    name: str, folder: Path, engine: Engine, env: Mapping[str, str], base_path: str
) -> Deployment:
    here = Path(__file__).parent
    environment = {
        "DYNAMO_LOCK_TEST_FOLDER": str(folder),
        "DYNAMO_LOCK_TEST_DEPLOYMENT": name,
        "PYTHONPATH": str(here / "site"),
        "AIRFLOW__CORE__TEST_CONNECTION": "Enabled",
        **table_environment(name, engine),
    }
    for conn_id, table_format in FOREIGN.items():
        foreign = connection(name, format=table_format, table=FOREIGN_TABLES[table_format])
        environment[f"AIRFLOW_CONN_{conn_id.upper()}"] = foreign
    kind = ProductionDeployment if IN_PRODUCTION else Deployment
    return kind(
        name,
        folder / name,
        here / "dags",
        env=environment | dict(env),
        parallelism=6,
        base_path=base_path,
    )
