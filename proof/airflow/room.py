"""Real Airflow deployments that share one lock table on a served moto, and one ledger that the guarded processes write.

Used through Airflow's REST API, as a user would, and with hands on the processes: what the tests of this folder and
`proof.airflow.chaos` have in common.
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
from typing import Any, TypeVar

from airflow_dynamo_lock import LockClient, LockRecord
from airflow_dynamo_lock.core.foreign.registry import FORMATS, NATIVE
from deployments.clients import FOREIGN_TABLES
from deployments.deployment import Deployment, running
from deployments.engines import REGION, Engine, MotoServer
from proof.airflow.production import ProductionDeployment
from proof.airflow.stays import Ledger, Stay, faults

T = TypeVar("T")
#: Whether the deployments of this test run are set up as a managed service does it.
IN_PRODUCTION = os.environ.get("DYNAMO_LOCK_MATRIX") == "production"
TABLE = "airflow_locks"
LEASE, GRACE = 20.0, 6.0  # as in dags/guarded.py
POLL = 1.25  # the poller's interval, jitter included
#: The connections of other lock libraries' tables, and the formats of these.
FOREIGN = {name.replace("-", "_"): name for name in FORMATS if name != NATIVE}
DAGS = {
    "guarded",
    "retried",
    "queued",
    "decorated",
    "constant",
    "skipping",
    "timed_out",
    "quick",
    "many",
    "operator",
    "sensing",
    "mapped",
    "nested",
    "steps",
    "hurried",
    *(f"in_{name}" for name in FOREIGN),
}


@dataclass
class Room:
    """The deployments, the lock table and the ledger."""

    deployments: tuple[Deployment, ...]
    folder: Path
    locks: LockClient
    engine: Engine
    ledger: Ledger

    @property
    def airflow(self) -> Deployment:
        """The deployment, where there is one."""
        return self.deployments[0]

    @property
    def endpoint_url(self) -> str:
        """Where the lock table is."""
        return self.engine.endpoint_url

    def start(self, dag_id: str, key: str, **conf: Any) -> str:
        """Trigger a run."""
        return self.airflow.trigger(dag_id, {"key": key, **conf})

    def tell(self, run_id: str, what: str, task_id: str = "lock.work") -> None:
        """Let a guarded task ``finish`` or ``fail``."""
        (self.folder / f"{run_id}.{task_id}.{what}").touch()

    def stays(self, key: str) -> list[Stay]:
        """Who was inside, from what the processes themselves wrote, in order."""
        return self.ledger.stays(key)

    def wait_inside(
        self, key: str, run_id: str, *, timeout: float = 180.0, beside: tuple[int, ...] = ()
    ) -> Stay:
        """Wait until a process of the run is inside; `beside` are pids of earlier ones."""

        def found() -> Stay | None:
            stays = [stay for stay in self.stays(key) if stay.run_id == run_id and stay.pid not in beside]
            return stays[-1] if stays else None

        return until(found, f"a process of {run_id} is inside {key}", timeout)

    def wait_record(
        self, key: str, what: Callable[[LockRecord], Any], *, timeout: float = 180.0
    ) -> LockRecord:
        """Wait until the lock's record is as wanted."""

        def found() -> LockRecord | None:
            record = self.locks.get(key)
            return record if record is not None and what(record) else None

        return until(found, f"the record of {key} is as wanted", timeout)

    def blocked(self, since: int) -> list[str]:
        """What the triggerer says of its event loop being blocked by work of this package (`site/sitecustomize.py`).

        :param since: the line of its log to begin with.
        """
        collections, ours = self._noted("pauses.jsonl"), self._noted("ours.jsonl")

        def is_ours(line: str) -> bool:
            at = datetime.fromisoformat(line.split()[0]).timestamp()
            seconds = float(line.partition("blocked for ")[2].split()[0])
            # The warning comes at most a probe (0.1 s) and the pause itself after what it is about has begun.
            worked: defaultdict[float, float] = defaultdict(float)
            for each in ours:
                if at - seconds - 0.2 <= each["at"] <= at:
                    worked[each["callback"]] += each["took"]
            collected = any(abs(at - each["at"]) < 0.5 and each["took"] > seconds / 2 for each in collections)
            return max(worked.values(), default=0.0) >= seconds / 2 and not collected

        lines = self.airflow.triggerer.log.read_text().splitlines()[since:]
        return [line for line in lines if "was blocked for" in line and is_ours(line)]

    def _noted(self, name: str) -> list[dict[str, float]]:
        file = self.folder / name
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def assert_green(self, dag_id: str, run_id: str) -> None:
        """The run and every one of its tasks succeeded: a teardown that failed leaves the run itself green."""
        assert self.airflow.wait(dag_id, run_id).state == "success"
        states = {(ti.task_id, ti.map_index): ti.state for ti in self.airflow.task_instances(dag_id, run_id)}
        assert set(states.values()) == {"success"}, states

    def assert_exclusive(self, key: str) -> None:
        """No two leases' processes were inside at the same time, and each grant's token was larger than the last."""
        stays = self.stays(key)
        assert stays, f"nobody was ever inside {key}"
        assert not list(faults(stays)), "\n".join(map(str, faults(stays)))


def until(found: Callable[[], T | None], what: str, timeout: float) -> T:
    """Poll until there is something."""
    deadline = time.monotonic() + timeout
    while (result := found()) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout:g} s: {what}")
        time.sleep(0.1)
    return result


@contextmanager
def opened(folder: Path, *names: str, env: Mapping[str, str] | None = None) -> Iterator[Room]:
    """Have the deployments of these names up, with their homes and all that they write in `folder`.

    :param env: more of their environment, configuration for example.
    """
    with MotoServer() as engine:
        locks = LockClient(engine.client(), table=TABLE, owner="the tests")
        locks.create_table()
        deployments = tuple(_deployment(name, folder, engine, env or {}) for name in names)
        with running(*deployments):
            for deployment in deployments:
                deployment.wait_for_dags(DAGS)
                deployment.add_pool("narrow", 1)
            yield Room(deployments, folder, locks, engine, Ledger(folder / "ledger.jsonl"))


def connection(deployment: str, **extra: str) -> str:
    """An Airflow connection of that deployment to the lock table, as its environment has it. It names no endpoint, as
    where the table is in AWS: the SDK finds the engine by the environment's `AWS_ENDPOINT_URL_…`.

    :param extra: more of what it says, or something else.
    """
    usual = {"table": TABLE, "region_name": REGION, "deployment": deployment}
    return json.dumps({"conn_type": "dynamo_lock", "extra": usual | extra})


def _deployment(name: str, folder: Path, engine: Engine, env: Mapping[str, str]) -> Deployment:
    here = Path(__file__).parent
    environment = {
        "DYNAMO_LOCK_TEST_ROOM": str(folder),
        "DYNAMO_LOCK_TEST_DEPLOYMENT": name,
        "PYTHONPATH": str(here / "site"),
        "AIRFLOW__CORE__TEST_CONNECTION": "Enabled",
        **{f"AWS_ENDPOINT_URL_{service}": engine.endpoint_url for service in ("DYNAMODB", "S3")},
        "AIRFLOW_CONN_DYNAMO_LOCK_DEFAULT": connection(name),
        "AIRFLOW_CONN_AWS_DEFAULT": json.dumps(
            {"conn_type": "aws", "login": "test", "password": "test-secret"}
        ),
    }
    for conn_id, name_of_format in FOREIGN.items():
        theirs = connection(name, format=name_of_format, table=FOREIGN_TABLES[name_of_format])
        environment[f"AIRFLOW_CONN_{conn_id.upper()}"] = theirs
    kind = ProductionDeployment if IN_PRODUCTION else Deployment
    return kind(name, folder / name, here / "dags", env=environment | dict(env), parallelism=6)
