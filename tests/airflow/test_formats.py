"""Tasks in a real Airflow take turns with a program that uses another lock library, on its table."""

from __future__ import annotations

import pytest

from airflow_dynamo_lock import LockClient
from deployments.engines import REGION
from proof.airflow.room import FOREIGN, Room, until
from tests.formats.conftest import make_place

pytestmark = pytest.mark.proof


def test_a_group_and_a_sensor_take_turns_with_a_program_in_each_format(room: Room, key: str) -> None:
    """In all formats at the same time: most of it is waiting."""
    programs, leases, runs = {}, {}, {}
    for name, format in FOREIGN.items():
        place = make_place(format, room.engine, REGION)
        programs[name] = LockClient(place.sdk, table=place.table, table_format=format, owner="their program")
        leases[name] = programs[name].acquire(f"{key}/{name}", lease=600)
        runs[name] = room.start(f"in_{name}", f"{key}/{name}")
    for name, run_id in runs.items():
        for task_id in ("sensor", "lock.acquire"):
            room.airflow.wait_for_task(f"in_{name}", run_id, task_id, {"deferred"})
        until(
            lambda name=name, run_id=run_id: (  # type: ignore[misc]
                "Locked by their program" in room.airflow.task_log(f"in_{name}", run_id, "lock.acquire")
                or None
            ),
            f"the run in {name} says whom it waits for",
            30,
        )
        assert programs[name].release(leases[name])
    for name, run_id in runs.items():
        stay = room.wait_inside(f"{key}/{name}", run_id)
        record = programs[name].get(f"{key}/{name}")
        assert record
        (holder,) = record.holders.values()
        assert (holder.lease_id, len(holder.processes)) == (stay.lease_id, 1)
        assert programs[name].try_acquire(f"{key}/{name}") is None
        room.tell(run_id, "finish")
    for name, run_id in runs.items():
        assert room.airflow.wait(f"in_{name}", run_id).state == "success"
        assert programs[name].release(programs[name].acquire(f"{key}/{name}", timeout=0))
