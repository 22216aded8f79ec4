"""Fixtures: one Airflow deployment for all these tests, two for each file that needs them, and a key for each test."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from proof.airflow.deadlocks import NAMES
from proof.airflow.testbed import Testbed, start_testbed


@pytest.fixture(scope="package")
def testbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Testbed]:
    """Start a testbed with one deployment. Run one task first: in a new deployment, Airflow takes longer for it."""
    env = {
        # By default the scheduler examines 20 runs in each loop, so hundreds of runs would wait for ten
        # loops.
        "AIRFLOW__SCHEDULER__MAX_DAGRUNS_PER_LOOP_TO_SCHEDULE": "200",
    }
    with start_testbed(tmp_path_factory.mktemp("testbed"), "north", env=env) as testbed:
        testbed.airflow.wait("guarded", testbed.start("guarded", "the first task", seconds=0.1))
        yield testbed


@pytest.fixture(scope="module")
def two_deployments(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Testbed]:
    """Start a testbed with two deployments."""
    with start_testbed(tmp_path_factory.mktemp("two-deployments"), *NAMES) as testbed:
        yield testbed


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    """Return a key that no other test uses."""
    return f"{request.node.name}/{uuid.uuid4().hex[:6]}"
