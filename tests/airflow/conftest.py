"""A real Airflow for the tests, all of its processes, used through its REST API as a user would; with its lock table on
a served moto.
"""

from __future__ import annotations

import json
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import boto3
import pytest

from airflow_dynamo_lock import LockClient, LockRecord, sdk_config
from demo.deployment import Deployment
from tests.engines import MotoServer

T = TypeVar("T")
TABLE = "airflow_locks"


@dataclass(frozen=True)
class Stay:
    """What one process wrote about its time inside."""

    pid: int
    run_id: str
    lease_id: str
    token: int
    first: float
    last: float


@dataclass
class Room:
    """One deployment, one lock table, one ledger that the guarded processes write."""

    airflow: Deployment
    folder: Path
    locks: LockClient
    endpoint_url: str

    def start(self, dag_id: str, key: str, **conf: Any) -> str:
        """Trigger a run."""
        return self.airflow.trigger(dag_id, {"key": key, **conf})

    def tell(self, run_id: str, what: str, task_id: str = "lock.work") -> None:
        """Let a guarded task ``finish`` or ``fail``."""
        (self.folder / f"{run_id}.{task_id}.{what}").touch()

    def stays(self, key: str) -> list[Stay]:
        """Who was inside, from what the processes themselves wrote, in order."""
        lines: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
        ledger = self.folder / "ledger.jsonl"
        for text in ledger.read_text().splitlines() if ledger.exists() else ():
            line = json.loads(text)
            if line["key"] == key:
                lines[line["pid"], line["lease_id"]].append(line)
        stays = [
            Stay(pid, each[0]["run_id"], lease_id, each[0]["token"], each[0]["at"], each[-1]["at"])
            for (pid, lease_id), each in lines.items()
        ]
        return sorted(stays, key=lambda stay: stay.first)

    def wait_inside(
        self, key: str, run_id: str, *, timeout: float = 60.0, beside: tuple[int, ...] = ()
    ) -> Stay:
        """Wait until a process of the run is inside; `beside` are pids of earlier ones."""

        def found() -> Stay | None:
            stays = [stay for stay in self.stays(key) if stay.run_id == run_id and stay.pid not in beside]
            return stays[-1] if stays else None

        return until(found, f"a process of {run_id} is inside {key}", timeout)

    def wait_record(
        self, key: str, what: Callable[[LockRecord], Any], *, timeout: float = 60.0
    ) -> LockRecord:
        """Wait until the lock's record is as wanted."""

        def found() -> LockRecord | None:
            record = self.locks.get(key)
            return record if record is not None and what(record) else None

        return until(found, f"the record of {key} is as wanted", timeout)

    def blocked(self, since: int) -> list[str]:
        """What the triggerer says of its event loop being blocked, other than by its own garbage collection.

        :param since: the line of its log to begin with.
        """
        pauses = self.folder / "pauses.jsonl"
        collections = (
            [json.loads(line) for line in pauses.read_text().splitlines()] if pauses.exists() else []
        )

        def is_collection(line: str) -> bool:
            at = datetime.fromisoformat(line.split()[0]).timestamp()
            seconds = float(line.partition("blocked for ")[2].split()[0])
            # The warning comes at most a probe (0.1 s) and the pause itself after the collection has begun.
            return any(abs(at - each["at"]) < 0.5 and each["took"] > seconds / 2 for each in collections)

        lines = self.airflow.triggerer.log.read_text().splitlines()[since:]
        return [line for line in lines if "was blocked for" in line and not is_collection(line)]

    def assert_exclusive(self, key: str) -> None:
        """No two leases' processes were inside at the same time, and each grant's token was larger than the last."""
        stays = self.stays(key)
        assert stays, f"nobody was ever inside {key}"
        for earlier, later in pairwise(stays):
            if earlier.lease_id != later.lease_id:
                assert earlier.last < later.first, f"two inside at once: {earlier} {later}"
                assert earlier.token < later.token


def until(found: Callable[[], T | None], what: str, timeout: float) -> T:
    """Poll until there is something."""
    deadline = time.monotonic() + timeout
    while (result := found()) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout:g} s: {what}")
        time.sleep(0.1)
    return result


@pytest.fixture(scope="session")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    """The deployment that all these tests share; each uses a key of its own."""
    folder = tmp_path_factory.mktemp("room")
    with MotoServer() as engine:
        aws = boto3.client(
            "dynamodb",
            region_name="us-east-1",
            endpoint_url=engine.endpoint_url,
            aws_access_key_id="test",
            aws_secret_access_key="test-secret",
            config=sdk_config(),
        )
        locks = LockClient(aws, table=TABLE, owner="the tests")
        locks.create_table()
        extra = {
            "table": TABLE,
            "endpoint_url": engine.endpoint_url,
            "region_name": "us-east-1",
            "deployment": "north",
        }
        environment = {
            "DYNAMO_LOCK_TEST_ROOM": str(folder),
            "PYTHONPATH": str(Path(__file__).parent / "site"),
            "AIRFLOW_CONN_DYNAMO_LOCK_DEFAULT": json.dumps({"conn_type": "dynamo_lock", "extra": extra}),
            "AIRFLOW_CONN_AWS_DEFAULT": json.dumps(
                {"conn_type": "aws", "login": "test", "password": "test-secret"}
            ),
        }
        home = tmp_path_factory.mktemp("north")
        home.rmdir()
        dags = Path(__file__).parent / "dags"
        with Deployment("north", home, dags, env=environment, parallelism=6) as airflow:
            airflow.wait_for_dags(
                {"guarded", "skipping", "timed_out", "many", "operator", "sensing", "mapped", "nested"}
            )
            yield Room(airflow, folder, locks, engine.endpoint_url)


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    """A lock of the test's own."""
    return f"{request.node.name}/{uuid.uuid4().hex[:6]}"
