"""What all tests share: no test reaches AWS or an Airflow of this machine, and the workers share the test files.

A test, or one parameter of a test, that is marked `proof` is left out of `make test` and run by `make proof`. The
parameters in question are mostly engines: DynamoDB Local beside moto, and in `tests/core` moto beside the simulated
table.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from functools import cache

import botocore.loaders
import botocore.session
import pytest
from xdist.remote import Producer  # type: ignore[import-untyped]
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

from deployments.engines import DynamoDBLocal, Engine, MotoServer

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

# Each new client would read the descriptions of all services again, which takes longer than most tests.
botocore.session.create_loader = cache(botocore.loaders.create_loader)


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


#: Files that start whole Airflow deployments or many processes: one worker runs them, one after the other.
ALONE = ("tests/test_demo.py", "tests/airflow/", "tests/chaos/")
#: Files with long tests that share nothing: any worker runs any of the tests.
APART = (
    "tests/simulator/",
    "tests/cli/test_run.py",
    "tests/client/test_heartbeats.py",
    "tests/layer/test_guard.py",
)
#: Tests on DynamoDB Local: one worker runs them, so that it is started once.
LOCAL = ("dynamodb-local", "dynamodb_local", "test_smoke.py", "tests/simulator/test_dynamodb.py")
#: Files whose tests mostly wait.
WAITING_PREFIX = ("tests/cli/test_run.py", "tests/layer/", "tests/client/", "tests/formats/")
#: Files whose tests keep a core busy.
BUSY = ("tests/simulator/", "tests/test_example_dags.py", "tests/core/", "tests/fuzz/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest. Then spread the busy tests among those that wait, so that no core is ever idle."""
    places: dict[str, tuple[int, float]] = {}
    for group in WAITING_PREFIX, BUSY:
        scopes = dict.fromkeys(scope_of(item.nodeid) for item in items if item.nodeid.startswith(group))
        places |= {scope: (1, number / len(scopes)) for number, scope in enumerate(scopes)}
    places["alone"] = 0, 0.0
    items.sort(key=lambda item: places.get(scope_of(item.nodeid), (2, 0.0)))


def pytest_collection_finish() -> None:
    gc.freeze()  # what is loaded by now stays, and takes long to look through: Airflow


def scope_of(nodeid: str) -> str:
    """What one worker runs as a whole: a file, as with ``--dist loadfile``, but for `ALONE`, `LOCAL` and `APART`."""
    if nodeid.startswith(ALONE):
        return "alone"
    if any(name in nodeid for name in LOCAL):
        return "DynamoDB Local"
    return nodeid if nodeid.startswith(APART) else nodeid.partition("::")[0]


class Scheduling(LoadFileScheduling):  # type: ignore[misc]
    """Give each worker one `scope_of` tests at a time."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    config.option.loadscopereorder = False  # keep the order of `pytest_collection_modifyitems`
    return Scheduling(config, log)
