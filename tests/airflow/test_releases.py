"""What differs between Airflow's releases, in a real Airflow: these tests run on each that the package supports.

The connection of these tests names no endpoint, as where the table is in AWS. Each run is judged by what its processes
wrote and by the state of every task: a heartbeat task that failed leaves the run itself green.
"""

from __future__ import annotations

import time
from statistics import median

import pytest

from airflow_dynamo_lock.airflow.provider_info import FIELDS
from airflow_dynamo_lock.airflow.versions import RENDERS_IN_TRIGGERER, RESUME_AFTER, STARTS_IN_TRIGGERER
from deployments.engines import REGION
from proof.airflow.room import POLL, TABLE, Room, until
from tests.airflow.test_group import AIRFLOW, Record

pytestmark = pytest.mark.proof


def locked_for(room: Room, key: str, dag_id: str, task_id: str, seconds: float, runs: int = 1) -> float:
    """Runs of the DAG wait while another holds the lock for `seconds` after they began to wait. All must end well.

    :return: seconds from the release to the first line of the next holder's code.
    """
    lease = room.locks.acquire(key, owner="the test", lease=300)
    started = [room.start(dag_id, key, seconds=0.5) for _ in range(runs)]
    for run_id in started:
        room.airflow.wait_for_task(dag_id, run_id, task_id, {"deferred"})
    time.sleep(seconds)  # what is tested is how long they have waited
    released = time.time()
    room.locks.release(lease)
    for run_id in started:
        room.airflow.wait(dag_id, run_id)
        room.assert_green(dag_id, run_id)
    room.assert_exclusive(key)
    return room.stays(key)[0].first - released


def test_a_group_waits_and_every_task_of_it_succeeds(room: Room, key: str, record_property: Record) -> None:
    took = locked_for(room, key, "guarded", "lock.acquire", 1.0)
    record_property("seconds", round(took, 1))
    assert took <= POLL + AIRFLOW


@pytest.mark.parametrize("seconds", [1, 5, 20])
@pytest.mark.parametrize("dag_id", ["operator", "decorated"])
def test_a_single_function_waits(
    room: Room, key: str, dag_id: str, seconds: float, record_property: Record
) -> None:
    took = locked_for(room, key, dag_id, "locked", seconds)
    record_property("seconds", round(took, 1))
    # Where it was deferred on a worker, it is not resumed sooner than that.
    assert took <= (0 if RENDERS_IN_TRIGGERER else max(0.0, RESUME_AFTER - seconds)) + POLL + AIRFLOW


def test_two_functions_at_once_ten_times(room: Room, key: str) -> None:
    """Resumed at once, they are marked as failed while they run (`versions.RESUME_AFTER`)."""
    keys = [f"{key}/{number}" for number in range(10)]
    runs = {each: [room.start("decorated", each, seconds=1.0) for _ in range(2)] for each in keys}
    for each in keys:
        for run_id in runs[each]:
            room.airflow.wait("decorated", run_id, timeout=300)
            room.assert_green("decorated", run_id)
        room.assert_exclusive(each)
        assert {stay.run_id for stay in room.stays(each)} == set(runs[each])


def test_a_run_keeps_its_lock_through_a_retry_delay_of_three_leases(room: Room, key: str) -> None:
    run_id = room.start("retried", key, lease=10, grace=5)
    first = room.wait_inside(key, run_id)
    room.tell(run_id, "fail", "lock.fails_once")
    waiting = room.start("guarded", key, lease=10, grace=5, seconds=0.5)
    room.airflow.wait_for_task("retried", run_id, "lock.fails_once", {"up_for_retry"})
    (room.folder / f"{run_id}.lock.fails_once.fail").unlink()
    room.tell(run_id, "finish", "lock.fails_once")
    room.assert_green("retried", run_id)
    second = room.stays(key)[1]
    assert (second.run_id, second.lease_id) == (run_id, first.lease_id)
    assert second.first - first.last >= 30
    room.assert_green("guarded", waiting)
    room.assert_exclusive(key)


def test_a_run_keeps_its_lock_while_its_task_waits_for_a_slot(room: Room, key: str) -> None:
    """For three leases, with nobody inside."""
    occupies = room.start("queued", f"{key}/other")
    room.wait_inside(f"{key}/other", occupies)
    run_id = room.start("queued", key, lease=10, grace=5, seconds=0.5)
    lease = next(iter(room.wait_record(key, lambda record: record.holders).holders))
    renewed = time.time() + 30
    room.wait_record(key, lambda record: time.time() > renewed and lease in record.holders)
    room.tell(occupies, "finish", "lock.in_pool")
    for each in (occupies, run_id):
        room.assert_green("queued", each)
    (stay,) = room.stays(key)
    assert stay.lease_id == lease


def test_the_form_of_a_connection_has_its_own_fields_and_a_test_button(room: Room) -> None:
    form = room.airflow.connection_form("dynamo_lock")
    assert set(form["extra_fields"]) == set(FIELDS)
    assert form["standard_fields"]["host"]["hidden"]
    says = {"table": TABLE, "region_name": REGION}
    assert room.airflow.test_connection("any", "dynamo_lock", extra=says) == (
        True,
        f"The lock table {TABLE!r} is ready.",
    )
    ready, why = room.airflow.test_connection("any", "dynamo_lock", extra=says | {"table": "missing"})
    assert not ready
    assert "The lock table 'missing' does not exist" in why


def test_the_link_to_the_record_is_there_while_the_lock_is_waited_for(room: Room, key: str) -> None:
    lease = room.locks.acquire(key, lease=300)
    run_id = room.start("guarded", key, seconds=0.5)
    link = until(lambda: _link(room, run_id), "acquire has pushed its link while it waits", 180)
    room.locks.release(lease)
    assert f"table={TABLE}" in link
    room.assert_green("guarded", run_id)


def _link(room: Room, run_id: str) -> str | None:
    entries = room.airflow.xcoms("guarded", run_id, "lock.acquire")
    return str(entries["lock_record_link"]) if entries.get("lock_record_link") else None


def test_what_a_lock_costs_in_worker_slots(room: Room, record_property: Record) -> None:
    """For how many seconds the lock's own tasks occupy a worker slot, in a run without any template."""
    took = []
    for _ in range(3):
        run_id = room.airflow.trigger("constant")
        room.assert_green("constant", run_id)
        tasks = {ti.id: ti for ti in room.airflow.task_instances("constant", run_id)}
        on_worker = {id for id, ti in tasks.items() if ti.pid is not None and ti.task_id != "lock.quick"}
        if STARTS_IN_TRIGGERER:
            assert not on_worker
        _wait_for_ends(room, on_worker)
        took.append(sum(seconds for id, seconds in room.airflow.ended_processes() if id in on_worker))
    record_property("seconds", round(median(took), 1))


def _wait_for_ends(room: Room, tasks: set[str]) -> None:
    until(
        lambda: tasks <= {id for id, _ in room.airflow.ended_processes()} or None,
        "the processes of all tasks have ended",
        30,
    )
