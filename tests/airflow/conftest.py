"""The real Airflow of these tests: one deployment, which all of them share."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from proof.airflow.room import Room, opened


@pytest.fixture(scope="package")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    """The deployment that all these tests share; each uses a key of its own."""
    env = {
        # Else it looks at 20 runs in each round, and one of hundreds comes to its turn in each tenth round only.
        "AIRFLOW__SCHEDULER__MAX_DAGRUNS_PER_LOOP_TO_SCHEDULE": "200",
    }
    with opened(tmp_path_factory.mktemp("room"), "north", env=env) as room:
        yield room


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    """A lock of the test's own."""
    return f"{request.node.name}/{uuid.uuid4().hex[:6]}"
