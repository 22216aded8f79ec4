"""One of two triggerers is gone for good: the other takes over what it ran. In a production deployment only."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from proof.airflow.production import ProductionDeployment
from proof.airflow.room import IN_PRODUCTION, Room, until

pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(not IN_PRODUCTION, reason="this deployment has one triggerer"),
]

WAITERS = 4
#: Airflow takes 30 s to find a triggerer dead (`triggerer_health_check_threshold`). What it takes here is recorded, not
#: judged: the machine may be busy.
LEASE = 180.0
TAKEN_OVER = 150.0


def test_one_of_two_triggerers_is_killed_for_good_and_the_other_takes_over(
    room: Room, key: str, record_property: Callable[[str, object], None]
) -> None:
    """One run holds the lock, with nobody inside, and others wait; their triggers are in the triggerer that dies."""
    airflow = room.airflow
    assert isinstance(airflow, ProductionDeployment)
    airflow.second_triggerer.kill()
    occupies = room.start("queued", f"{key}/other", lease=LEASE)
    room.wait_inside(f"{key}/other", occupies)
    holder = room.start("queued", key, lease=LEASE, seconds=0.5)
    (lease_id,) = room.wait_record(key, lambda record: record.holders).holders
    waiting = [room.start("guarded", key, lease=LEASE, seconds=0.5) for _ in range(WAITERS)]
    until(lambda: len(room.locks.waiters(key)) == WAITERS or None, "all are in the queue", 150)

    airflow.second_triggerer.start()
    airflow.triggerer.kill()
    killed = datetime.now(UTC)
    try:
        airflow.wait_until_healthy()
        room.wait_record(
            key, lambda record: (record.holders[lease_id].renewed_at or killed) > killed, timeout=TAKEN_OVER
        )
        record_property("seconds", round((datetime.now(UTC) - killed).total_seconds(), 1))
        room.tell(occupies, "finish", "lock.in_pool")
        for dag_id, run_id in [
            ("queued", occupies),
            ("queued", holder),
            *(("guarded", each) for each in waiting),
        ]:
            airflow.wait(dag_id, run_id, timeout=300)
            room.assert_green(dag_id, run_id)
        room.assert_exclusive(key)
        assert len(room.stays(key)) == 1 + WAITERS
    finally:
        airflow.triggerer.start()
        airflow.wait_until_healthy()
