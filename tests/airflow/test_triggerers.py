"""One of two triggerers dies, and the other takes over its triggers; or a trigger outlives its task."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime

import pytest

from deployments.deployment import Deployment
from proof.airflow.production import ProductionDeployment
from proof.airflow.testbed import IN_PRODUCTION, Testbed, wait_for

pytestmark = pytest.mark.proof

WAITERS = 4
# Airflow treats a triggerer as dead after 30 s (`triggerer_health_check_threshold`). The test records how
# long the take-over lasts, and allows much more, because the machine may be busy. Both in seconds.
LEASE = 180.0
TAKEN_OVER = 150.0


@pytest.mark.skipif(not IN_PRODUCTION, reason="this deployment has one triggerer")
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


@pytest.mark.skipif(IN_PRODUCTION, reason="PostgreSQL gives no trigger the id of another one")
def test_a_task_waits_and_acquires_although_its_trigger_has_the_id_of_a_skipped_tasks_trigger(
    testbed: Testbed, key: str
) -> None:
    """Airflow takes the trigger of the skipped task, which still runs, for the new one."""
    airflow = testbed.airflow
    lease = testbed.locks.acquire(key, owner="the test", lease=300)
    skipped = testbed.start("guarded", key, seconds=0.5)
    wait_for(lambda: testbed.locks.waiters(key) or None, "the first run is queued", 150)
    pause_the_triggerer(airflow)
    try:
        trigger_id = trigger_of(airflow, skipped)
        airflow.set_task_state("guarded", skipped, "lock.acquire", "skipped")
        delete_unused_triggers(airflow)
        waits = testbed.start("guarded", key, seconds=0.5)
        airflow.wait_for_task("guarded", waits, "lock.acquire", {"deferred"})
        assert trigger_of(airflow, waits) == trigger_id
    finally:
        airflow.triggerer.resume()
    wait_for(
        lambda: any(waits in each.owner for each in testbed.locks.waiters(key)) or None,
        "the second run is queued",
        150,
    )
    testbed.locks.release(lease)
    testbed.assert_green("guarded", waits)
    testbed.assert_exclusive(key)


def pause_the_triggerer(airflow: Deployment) -> None:
    """Pause it at a moment when it does not lock the database."""

    def paused() -> bool | None:
        airflow.triggerer.pause()
        try:
            with closing(sqlite3.connect(airflow.home / "airflow.db", timeout=1)) as database:
                database.execute("BEGIN IMMEDIATE")
                database.rollback()
        except sqlite3.OperationalError:
            airflow.triggerer.resume()
            return None
        return True

    wait_for(paused, "the triggerer is paused", 150)


def trigger_of(airflow: Deployment, run_id: str) -> int:
    """Return the id of the trigger of a run's acquire task."""
    with closing(sqlite3.connect(airflow.home / "airflow.db")) as database:
        (found,) = database.execute(
            "SELECT trigger_id FROM task_instance WHERE run_id = ? AND task_id = 'lock.acquire'", [run_id]
        ).fetchone()
    return int(found)


def delete_unused_triggers(airflow: Deployment) -> None:
    """Do what any triggerer does each second."""
    cleaner = airflow.server(
        "clean-unused",
        sys.executable,
        "-c",
        "from airflow.models.trigger import Trigger; Trigger.clean_unused()",
    )
    cleaner.start()
    assert cleaner.wait() == 0, cleaner.tail()
