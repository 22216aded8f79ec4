"""Runs of two Airflow deployments that nest locks in opposite orders (R14): one fails, and the others succeed."""

from __future__ import annotations

import pytest

from proof.airflow.deadlocks import finish_round, start_round
from proof.airflow.testbed import Testbed

pytestmark = pytest.mark.proof


@pytest.mark.parametrize("number", [2, 3])
def test_one_run_of_a_cycle_fails_and_names_all_and_the_others_succeed(
    two_deployments: Testbed, key: str, number: int
) -> None:
    started = start_round(two_deployments, key, number)
    finish_round(two_deployments, started)
    assert started.violations == []
