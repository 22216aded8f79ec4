"""Tasks in a real Airflow take turns with a program that uses the table format of another lock library."""

from __future__ import annotations

import pytest

from airflow_dynamo_lock import LockClient
from proof.airflow.testbed import FOREIGN, Testbed, wait_for
from tests.formats.conftest import make_place

pytestmark = pytest.mark.proof


def test_a_group_and_a_sensor_take_turns_with_a_program_in_each_format(testbed: Testbed, key: str) -> None:
    """Test all formats at the same time, because most of the time is spent waiting."""
    programs, leases, runs = {}, {}, {}
    for name, format in FOREIGN.items():
        place = make_place(format, testbed.engine)
        programs[name] = LockClient(place.sdk, table=place.table, table_format=format, owner="their program")
        leases[name] = programs[name].acquire(f"{key}/{name}", lease=600)
        runs[name] = testbed.start(f"in_{name}", f"{key}/{name}")
    for name, run_id in runs.items():
        for task_id in ("sensor", "lock.acquire"):
            testbed.airflow.wait_for_task(f"in_{name}", run_id, task_id, {"deferred"})
        wait_for(
            lambda name=name, run_id=run_id: (  # type: ignore[misc]
                "Locked by their program" in testbed.airflow.task_log(f"in_{name}", run_id, "lock.acquire")
                or None
            ),
            f"the run in {name} logs which holder it waits for",
            30,
        )
        assert programs[name].release(leases[name])
    for name, run_id in runs.items():
        use = testbed.wait_inside(f"{key}/{name}", run_id)
        record = programs[name].get(f"{key}/{name}")
        assert record
        (holder,) = record.holders.values()
        assert (holder.lease_id, len(holder.processes)) == (use.lease_id, 1)
        assert programs[name].try_acquire(f"{key}/{name}") is None
        testbed.end_task(run_id, "finish")
    for name, run_id in runs.items():
        assert testbed.airflow.wait(f"in_{name}", run_id).state == "success"
        assert programs[name].release(programs[name].acquire(f"{key}/{name}", timeout=0))
