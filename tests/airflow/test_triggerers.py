"""One of two triggerers dies, and the other takes over its triggers. Only in a `ProductionDeployment`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from proof.airflow.production import ProductionDeployment
from proof.airflow.testbed import IN_PRODUCTION, Testbed, wait_for

pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(not IN_PRODUCTION, reason="this deployment has one triggerer"),
]

WAITERS = 4
# Airflow treats a triggerer as dead after 30 s (`triggerer_health_check_threshold`). The test records how
# long the take-over lasts, and allows much more, because the machine may be busy. Both in seconds.
LEASE = 180.0
TAKEN_OVER = 150.0


def test_one_of_two_triggerers_is_killed_for_good_and_the_other_takes_over(
    testbed: Testbed, key: str, record_property: Callable[[str, object], None]
) -> None:
    """A run holds the lock, with no process inside, and others wait. All of them depend on the dead triggerer."""
    airflow = testbed.airflow
    assert isinstance(airflow, ProductionDeployment)
    airflow.second_triggerer.kill()
    occupies = testbed.start("queued", f"{key}/other", lease=LEASE)
    testbed.wait_inside(f"{key}/other", occupies)
    holder = testbed.start("queued", key, lease=LEASE, seconds=0.5)
    (lease_id,) = testbed.wait_for_record(key, lambda record: record.holders).holders
    waiting = [testbed.start("guarded", key, lease=LEASE, seconds=0.5) for _ in range(WAITERS)]
    wait_for(lambda: len(testbed.locks.waiters(key)) == WAITERS or None, f"{WAITERS} runs are queued", 150)

    airflow.second_triggerer.start()
    airflow.triggerer.kill()
    killed = datetime.now(UTC)
    try:
        airflow.wait_until_healthy()
        testbed.wait_for_record(
            key, lambda record: (record.holders[lease_id].renewed_at or killed) > killed, timeout=TAKEN_OVER
        )
        record_property("seconds", round((datetime.now(UTC) - killed).total_seconds(), 1))
        testbed.end_task(occupies, "finish", "lock.in_pool")
        for dag_id, run_id in [
            ("queued", occupies),
            ("queued", holder),
            *(("guarded", each) for each in waiting),
        ]:
            airflow.wait(dag_id, run_id, timeout=300)
            testbed.assert_green(dag_id, run_id)
        testbed.assert_exclusive(key)
        assert len(testbed.uses(key)) == 1 + WAITERS
    finally:
        airflow.triggerer.start()
        airflow.wait_until_healthy()
