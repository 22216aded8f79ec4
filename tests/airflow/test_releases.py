"""Cases in which releases of Airflow have differed. They run in a real Airflow of each supported release.

The connection of these tests names no endpoint, as if the table were in AWS. The tests check the lines in the
ledger and the state of every task, because a run succeeds even if its heartbeat task fails.
"""

from __future__ import annotations

import time
from statistics import median

import pytest

from airflow_dynamo_lock.airflow.provider_info import FIELDS
from airflow_dynamo_lock.airflow.versions import RENDERS_IN_TRIGGERER, RESUME_AFTER, STARTS_IN_TRIGGERER
from deployments.engines import REGION
from proof.airflow.testbed import POLL, TABLE, Testbed, wait_for
from tests.airflow.test_group import AIRFLOW, Record

pytestmark = pytest.mark.proof


def locked_for(testbed: Testbed, key: str, dag_id: str, task_id: str, seconds: float, runs: int = 1) -> float:
    """Hold the lock until runs of the DAG have waited for `seconds`, and assert that all of them succeed.

    :param task_id: the task that waits for the lock.
    :returns: seconds from the release to the first line of the next holder.
    """
    lease = testbed.locks.acquire(key, owner="the test", lease=300)
    started = [testbed.start(dag_id, key, seconds=0.5) for _ in range(runs)]
    for run_id in started:
        testbed.airflow.wait_for_task(dag_id, run_id, task_id, {"deferred"})
    time.sleep(seconds)
    released = time.time()
    testbed.locks.release(lease)
    for run_id in started:
        testbed.airflow.wait(dag_id, run_id)
        testbed.assert_green(dag_id, run_id)
    testbed.assert_exclusive(key)
    return testbed.uses(key)[0].first - released


def test_a_group_waits_and_every_task_of_it_succeeds(
    testbed: Testbed, key: str, record_property: Record
) -> None:
    took = locked_for(testbed, key, "guarded", "lock.acquire", 1.0)
    record_property("seconds", round(took, 1))
    assert took <= POLL + AIRFLOW


@pytest.mark.parametrize("seconds", [1, 5, 20])
@pytest.mark.parametrize("dag_id", ["operator", "decorated"])
def test_a_locked_function_waits(
    testbed: Testbed, key: str, dag_id: str, seconds: float, record_property: Record
) -> None:
    took = locked_for(testbed, key, dag_id, "locked", seconds)
    record_property("seconds", round(took, 1))
    # If the task was deferred on a worker, it is resumed `RESUME_AFTER` seconds later at the earliest.
    assert took <= (0 if RENDERS_IN_TRIGGERER else max(0.0, RESUME_AFTER - seconds)) + POLL + AIRFLOW


def test_two_runs_of_a_locked_function_succeed(testbed: Testbed, key: str) -> None:
    """Without `versions.RESUME_AFTER`, Airflow marks some of the tasks as failed while they run."""
    keys = [f"{key}/{number}" for number in range(10)]
    runs = {each: [testbed.start("decorated", each, seconds=1.0) for _ in range(2)] for each in keys}
    for each in keys:
        for run_id in runs[each]:
            testbed.airflow.wait("decorated", run_id, timeout=300)
            testbed.assert_green("decorated", run_id)
        testbed.assert_exclusive(each)
        assert {use.run_id for use in testbed.uses(each)} == set(runs[each])


def test_a_run_keeps_its_lock_through_a_retry_delay_of_three_leases(testbed: Testbed, key: str) -> None:
    run_id = testbed.start("retried", key, lease=10, grace=5)
    first = testbed.wait_inside(key, run_id)
    testbed.end_task(run_id, "fail", "lock.fails_once")
    waiting = testbed.start("guarded", key, lease=10, grace=5, seconds=0.5)
    testbed.airflow.wait_for_task("retried", run_id, "lock.fails_once", {"up_for_retry"})
    (testbed.folder / f"{run_id}.lock.fails_once.fail").unlink()
    testbed.end_task(run_id, "finish", "lock.fails_once")
    testbed.assert_green("retried", run_id)
    second = testbed.uses(key)[1]
    assert (second.run_id, second.lease_id) == (run_id, first.lease_id)
    assert second.first - first.last >= 30
    testbed.assert_green("guarded", waiting)
    testbed.assert_exclusive(key)


def test_a_run_keeps_its_lock_while_its_task_waits_for_a_slot(testbed: Testbed, key: str) -> None:
    """Wait for three times the lease, with no process inside."""
    occupies = testbed.start("queued", f"{key}/other")
    testbed.wait_inside(f"{key}/other", occupies)
    run_id = testbed.start("queued", key, lease=10, grace=5, seconds=0.5)
    lease = next(iter(testbed.wait_for_record(key, lambda record: record.holders).holders))
    renewed = time.time() + 30
    testbed.wait_for_record(key, lambda record: time.time() > renewed and lease in record.holders)
    testbed.end_task(occupies, "finish", "lock.in_pool")
    for each in (occupies, run_id):
        testbed.assert_green("queued", each)
    (use,) = testbed.uses(key)
    assert use.lease_id == lease


def test_the_form_of_a_connection_has_its_own_fields_and_a_test_button(testbed: Testbed) -> None:
    form = testbed.airflow.connection_form("dynamo_lock")
    assert set(form["extra_fields"]) == set(FIELDS)
    assert form["standard_fields"]["host"]["hidden"]
    extra = {"table": TABLE, "region_name": REGION}
    assert testbed.airflow.test_connection("any", "dynamo_lock", extra=extra) == (
        True,
        f"The lock table {TABLE!r} is ready.",
    )
    ready, why = testbed.airflow.test_connection("any", "dynamo_lock", extra=extra | {"table": "missing"})
    assert not ready
    assert "The lock table 'missing' does not exist" in why


def test_the_link_to_the_record_is_there_while_a_task_waits(testbed: Testbed, key: str) -> None:
    lease = testbed.locks.acquire(key, lease=300)
    run_id = testbed.start("guarded", key, seconds=0.5)
    link = wait_for(lambda: _link(testbed, run_id), "acquire has stored its link while it waits", 180)
    testbed.locks.release(lease)
    assert f"table={TABLE}" in link
    testbed.assert_green("guarded", run_id)


def _link(testbed: Testbed, run_id: str) -> str | None:
    """Return the link that acquire has stored as XCom; None if there is none yet."""
    entries = testbed.airflow.xcoms("guarded", run_id, "lock.acquire")
    return str(entries["lock_record_link"]) if entries.get("lock_record_link") else None


@pytest.mark.parametrize(("dag_id", "waits"), [("alerting", "lock.acquire"), ("alerting_alone", "locked")])
def test_a_long_wait_and_a_long_hold_send_one_alert_each(
    testbed: Testbed, key: str, dag_id: str, waits: str
) -> None:
    lease = testbed.locks.acquire(key, owner="the test", lease=300)
    run_id = testbed.start(dag_id, key)
    wait_for(lambda: testbed.alerts(run_id) or None, "the alert for the long wait is sent", 180)
    testbed.locks.release(lease)
    testbed.wait_inside(key, run_id)
    wait_for(lambda: len(testbed.alerts(run_id)) > 1 or None, "the alert for the long hold is sent", 180)
    testbed.end_task(run_id, "finish", "locked" if waits == "locked" else "lock.work")
    testbed.assert_green(dag_id, run_id)

    waited, held = testbed.alerts(run_id)
    assert (waited["kind"], held["kind"]) == ("on_wait", "on_held")
    assert f"{run_id}/{waits} has waited for the lock '{key}' for " in waited["text"]
    assert "Locked by the test since " in waited["text"]
    assert f"The lock '{key}' has been held for " in held["text"]
    assert f"{run_id}/{waits} since " in held["text"]


def test_the_cost_of_a_lock_in_worker_slots(testbed: Testbed, record_property: Record) -> None:
    """Record for how many seconds the lock's own tasks occupy worker slots, without templates."""
    took = []
    for _ in range(3):
        run_id = testbed.airflow.trigger("constant")
        testbed.assert_green("constant", run_id)
        tasks = {ti.id: ti for ti in testbed.airflow.task_instances("constant", run_id)}
        on_worker = {id for id, ti in tasks.items() if ti.pid is not None and ti.task_id != "lock.quick"}
        if STARTS_IN_TRIGGERER:
            assert not on_worker
        _wait_for_ends(testbed, on_worker)
        took.append(sum(seconds for id, seconds in testbed.airflow.ended_processes() if id in on_worker))
    record_property("seconds", round(median(took), 1))


def _wait_for_ends(testbed: Testbed, tasks: set[str]) -> None:
    """Wait until the processes of these task instances have ended."""
    wait_for(
        lambda: tasks <= {id for id, _ in testbed.airflow.ended_processes()} or None,
        "the processes of all tasks have ended",
        30,
    )
