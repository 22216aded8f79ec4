"""Set-up of all tests: environment variables, engines as fixtures, and the distribution of tests to workers.

`make test` leaves out the tests, and the parameters of tests, that are marked `proof`; `make proof` runs
them. Most of these parameters are engines: DynamoDB Local in addition to moto, and in `tests/core` moto in
addition to the simulated table.
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

from airflow_dynamo_lock.core.lock import acquire
from deployments.engines import DynamoDBLocal, Engine, MotoServer

# Garbage collections take long while so many modules are imported, Airflow's above all. `pytest_collection_finish`
# excludes the modules from later collections.
gc.disable()

# Set before anything that reads them is imported. Child processes inherit them. Engines accept any
# credentials.
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
# Each worker has a home of its own, in a folder of the process that starts the workers. That process removes it at its
# exit, also after Ctrl-C, when workers are killed.
if "TEST_AIRFLOW_HOMES" not in os.environ:
    _homes = tempfile.TemporaryDirectory(prefix="airflow-", ignore_cleanup_errors=True)
    os.environ["TEST_AIRFLOW_HOMES"] = _homes.name
os.environ.update(
    AIRFLOW_HOME=os.path.join(os.environ["TEST_AIRFLOW_HOMES"], str(os.getpid())),
    AIRFLOW__CORE__LOAD_EXAMPLES="False",
)

# Without the cache, each new client reads the descriptions of all services, which takes longer than most
# tests.
botocore.session.create_loader = cache(botocore.loaders.create_loader)


@pytest.fixture(scope="session")
def moto() -> Iterator[Engine]:
    """Start a moto server that all tests of a worker share. Each test uses a table or keys of its own."""
    with MotoServer() as served:
        yield served


@pytest.fixture(scope="session")
def dynamodb_local() -> Iterator[Engine]:
    """Start a DynamoDB Local that all tests of a worker share, because it takes seconds to start."""
    with DynamoDBLocal() as served:
        yield served


#: Tests on simulated clocks.
SIMULATED = ("tests/core/", "tests/simulator/")


@pytest.fixture(autouse=True)
def patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait longer for an engine's answers than a client does: on a busy machine, one may take over 3 s.

    The tests in `tests/core` check the client's own limit.
    """
    if not request.node.nodeid.startswith(SIMULATED):
        monkeypatch.setattr(acquire, "_ANSWER_WITHIN", 60.0)


#: Tests that start many processes, Airflow deployments above all. One worker runs all of them, one after the other.
PROCESSES = ("tests/test_demo.py", "tests/browser/", "tests/chaos/")
#: Files with Airflow deployments of their own. All other tests in `tests/airflow` share one deployment and a worker.
OWN_DEPLOYMENTS = (
    "tests/airflow/test_telemetry.py",
    "tests/airflow/test_deadlocks.py",
    "tests/airflow/test_first_in_queue.py",
    "tests/page/test_roles.py",
)
#: Long tests that share no fixtures. Any worker may run any of them.
APART = (
    "tests/simulator/",
    "tests/cli/test_run.py",
    "tests/client/test_heartbeats.py",
    "tests/layer/test_guard.py",
)
#: Parts of the ids of the tests on DynamoDB Local. One worker runs all of them, so that only one server
#: starts.
LOCAL = ("dynamodb-local", "dynamodb_local", "test_smoke.py", "tests/simulator/test_dynamodb.py")
#: Tests that mostly wait.
MOSTLY_WAITING = ("tests/cli/test_run.py", "tests/layer/", "tests/client/", "tests/formats/")
#: Tests that keep a core busy. The files among them take long, and none of them should be the last to end.
BUSY = (
    "tests/simulator/",
    "tests/test_example_dags.py",
    "tests/core/",
    "tests/fuzz/",
    "tests/test_packaging.py",
    "tests/test_documentation.py",
    "tests/cli/test_airflow.py",
    "tests/cli/test_locks.py",
    "tests/notebook/",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests: first those with Airflow deployments and many processes, which take longest, then
    `MOSTLY_WAITING` mixed with `BUSY`, then others.

    Busy tests then use the cores while other tests wait.
    """
    order: dict[str, tuple[int, float]] = {}
    for group in MOSTLY_WAITING, BUSY:
        scopes = dict.fromkeys(scope_of(item.nodeid) for item in items if item.nodeid.startswith(group))
        order |= {scope: (1, number / len(scopes)) for number, scope in enumerate(scopes)}
    order |= {"tests/airflow": (0, 0.0), "processes": (0, 0.0)} | dict.fromkeys(OWN_DEPLOYMENTS, (0, 1.0))
    items.sort(key=lambda item: order.get(scope_of(item.nodeid), (2, 0.0)))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def scope_of(nodeid: str) -> str:
    """Return the scope of a test. One worker runs all tests of a scope.

    The scope is the test's file, as with ``--dist loadfile``. All of `PROCESSES` is one scope, and so are all of
    `LOCAL` and what shares the deployment of `tests/airflow`; each test of `APART` is a scope of its own.
    """
    if nodeid.startswith(PROCESSES):
        return "processes"
    if nodeid.startswith("tests/airflow/") and not nodeid.startswith(OWN_DEPLOYMENTS):
        return "tests/airflow"
    if any(name in nodeid for name in LOCAL):
        return "DynamoDB Local"
    return nodeid if nodeid.startswith(APART) else nodeid.partition("::")[0]


class Scheduling(LoadFileScheduling):  # type: ignore[misc]
    """A scheduler that gives each worker one scope of tests at a time, as `scope_of` defines it."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    config.option.loadscopereorder = False  # keep the order of `pytest_collection_modifyitems`
    return Scheduling(config, log)
