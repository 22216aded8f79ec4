"""What all tests share: they never reach AWS, nor an Airflow of this machine; what runs at the same time; and histories
that play beside them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.remote import Producer  # type: ignore[import-untyped]
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

from tests.engines import DynamoDBLocal, Engine, MotoServer

# Before anything is imported that reads them, and for child processes too. Engines take any credentials.
for _name in [name for name in os.environ if name.startswith("AWS_")]:
    del os.environ[_name]
os.environ.update(
    AWS_ACCESS_KEY_ID="test",
    AWS_SECRET_ACCESS_KEY="test-secret",
    AWS_DEFAULT_REGION="eu-central-1",
    AWS_EC2_METADATA_DISABLED="true",
    AWS_CONFIG_FILE=os.devnull,
    AWS_SHARED_CREDENTIALS_FILE=os.devnull,
)
for _name in [name for name in os.environ if name.startswith("AIRFLOW_")]:
    del os.environ[_name]
_home = tempfile.TemporaryDirectory(prefix="airflow-")  # removed at exit
os.environ.update(AIRFLOW_HOME=_home.name, AIRFLOW__CORE__LOAD_EXAMPLES="False")


@pytest.fixture(scope="session")
def moto() -> Iterator[Engine]:
    """A served moto that tests share: they keep to tables, or keys, of their own."""
    with MotoServer() as served:
        yield served


@pytest.fixture(scope="session")
def dynamodb_local() -> Iterator[Engine]:
    """The same of DynamoDB Local, which takes seconds to start."""
    with DynamoDBLocal() as served:
        yield served


class Scheduling(LoadFileScheduling):  # type: ignore[misc]
    """File by file, as with ``--dist loadfile``; but one worker has all that start whole deployments, and much else."""

    ALONE = ("tests/airflow/", "tests/chaos/", "tests/histories/", "tests/test_demo.py")

    def _split_scope(self, nodeid: str) -> str:
        return "alone" if nodeid.startswith(self.ALONE) else str(super()._split_scope(nodeid))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    # As they are collected: so those of one worker are begun at once, which take the longest.
    config.option.loadscopereorder = False
    return Scheduling(config, log)


class Playing:
    """The simulated histories, in processes of their own and with what nobody else wants of the machine's time."""

    def __init__(self, folder: Path) -> None:
        self._report = folder / "histories.json"
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.histories", "--histories", "25000", "--first", "1"),
                *("--report", str(self._report), "--idle"),
            ],
            start_new_session=True,
            stdout=subprocess.DEVNULL,
        )

    def result(self) -> Any:
        """Wait until they are over; their figures."""
        self._process.wait()
        return json.loads(self._report.read_text())

    def stop(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@pytest.fixture(scope="session")
def playing_histories(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Playing | None]:
    """Begun with the tests in a real Airflow, most of what these do is wait; if any test asks for them."""
    if not any(
        getattr(item, "originalname", None) == "test_the_invariants_hold_in_all_histories"
        for item in request.session.items
    ):
        yield None
        return
    playing = Playing(tmp_path_factory.mktemp("histories"))
    try:
        yield playing
    finally:
        playing.stop()
