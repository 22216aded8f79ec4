"""Runs of two Airflow deployments that nest locks in opposite orders: one ends, and the others succeed (R14)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from proof.airflow.deadlocks import NAMES, finish_round, start_round
from proof.airflow.testbed import Testbed, start_testbed

pytestmark = pytest.mark.proof


@pytest.fixture(scope="module")
def two_deployments(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Testbed]:
    """Start a testbed with two deployments."""
    with start_testbed(tmp_path_factory.mktemp("deadlocks"), *NAMES) as testbed:
        yield testbed


@pytest.mark.parametrize("number", [2, 3])
def test_one_run_of_a_cycle_ends_and_names_all_and_the_others_succeed(
    two_deployments: Testbed, key: str, number: int
) -> None:
    started = start_round(two_deployments, key, number)
    finish_round(two_deployments, started)
    assert started.violations == []
