"""The task group in a real Airflow, with failures of all kinds.

No two runs are inside at the same time, and the next waiter is granted the lock within the bound of
`docs/airflow.md`. The tests judge by the lines that the processes append to the ledger every 50 ms, never by
Airflow's task states.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from statistics import median

import psutil
import pytest
from airflow.triggers.base import BaseTrigger

from airflow_dynamo_lock.airflow.versions import RENDERS_IN_TRIGGERER, STARTS_IN_TRIGGERER
from proof.airflow.lease_uses import LeaseUse
from proof.airflow.testbed import GRACE, LEASE, POLL, Testbed, wait_for

pytestmark = pytest.mark.proof

#: Longest time from the grant to the first line of the next task, in seconds, on a machine that other programs keep
#: busy. `make matrix` notes the actual time, in docs/versions.md.
AIRFLOW = 60.0
#: A lease in seconds that outlasts these bounds, so that no hand-over within them waited for it to expire.
LONG_LEASE = 300.0
#: Longest time from a mark or a clear to the end of the process, in seconds: Airflow notices it at the
#: process's heartbeat, sends SIGTERM, and 5 s later SIGKILL.
KILL = 30.0

#: Seconds by which a waiter that ends without leaving the queue delays the waiters behind it
#: (docs/protocol.md). Before Airflow 3.3, a trigger is not notified if its task was marked or cleared.
SILENCE = 0.0 if hasattr(BaseTrigger, "on_kill") else 21.0

#: The tasks of a group that this version of Airflow starts on a worker, if the key is a template.
ON_WORKER = {
    *(() if RENDERS_IN_TRIGGERER else ("lock.acquire",)),
    *(() if STARTS_IN_TRIGGERER else ("lock.heartbeat", "lock.release")),
}

#: Whether Airflow restarts a task that was cleared while it ran. In 3.0 it stays "restarting"
#: (apache/airflow#55045).
RESTARTS = not version("apache-airflow").startswith("3.0.")


Record = Callable[[str, object], None]
Contend = Callable[..., "Contention"]


class Contention:
    """Two runs that compete for a lock: the first is inside, and the second waits.

    :ivar first: id of the first run.
    :ivar holder: lease use of the first run.
    :ivar second: id of the second run.
    """

    def __init__(
        self, testbed: Testbed, key: str, record: Record, dag_id: str = "guarded", lease: float = LONG_LEASE
    ) -> None:
        self.testbed, self.key, self.record, self.dag_id = testbed, key, record, dag_id
        self.first = testbed.start(dag_id, key, lease=lease)
        self.holder = testbed.wait_inside(key, self.first)
        self.second = testbed.start("guarded", key)
        testbed.airflow.wait_for_task("guarded", self.second, "lock.acquire", {"deferred"})
        wait_for(
            lambda: (
                "Waiting for the lock" in testbed.airflow.task_log("guarded", self.second, "lock.acquire")
                or None
            ),
            "the second run logs which holder it waits for",
            30,
        )

    def handed_over(self, within: float) -> LeaseUse:
        """Wait until the second run is inside, at most `within` seconds after the first run's last line."""
        use = self.testbed.wait_inside(self.key, self.second, timeout=within + KILL)
        last = max(each.last for each in self.testbed.uses(self.key) if each.run_id == self.first)
        assert use.first - last <= within, f"handed over after {use.first - last:.1f} s"
        self.record("seconds", round(use.first - last, 1))
        return use

    def finish(self, first: str) -> None:
        """Assert that the second run succeeds, the first ends in the state `first`, and the lock is free."""
        self.testbed.end_task(self.second, "finish")
        self.testbed.assert_green("guarded", self.second)
        assert self.testbed.airflow.wait(self.dag_id, self.first).state == first
        self.testbed.assert_exclusive(self.key)
        record = self.testbed.locks.get(self.key)
        assert record is not None
        assert not record.holders


@pytest.fixture
def contend(testbed: Testbed, key: str, record_property: Record) -> Contend:
    """Return a function that starts two runs which compete for the test's lock."""
    return partial(Contention, testbed, key, record_property)


def test_work_runs_only_under_the_lease_and_waiting_needs_no_worker(
    testbed: Testbed, key: str, contend: Contend
) -> None:
    runs = contend()
    record = testbed.locks.get(key)
    assert record is not None
    (holder,) = record.holders.values()
    assert len(holder.processes) == 1
    # The log of the second run contains its position, although the heartbeat task of the first run has
    # started the poller that reads the table for both.
    wait_for(
        lambda: "1st of 1." in testbed.airflow.task_log("guarded", runs.second, "lock.acquire") or None,
        "the second run logs its position in the queue",
        120,
    )
    testbed.end_task(runs.first, "finish")
    runs.handed_over(POLL + AIRFLOW)
    runs.finish("success")
    for run_id in (runs.first, runs.second):
        tasks = {ti.task_id: ti for ti in testbed.airflow.task_instances("guarded", run_id)}
        on_worker = {name for name, ti in tasks.items() if ti.pid is not None}
        skipped = {name for name, ti in tasks.items() if ti.state == "skipped"}
        assert on_worker == {"lock.work", *ON_WORKER} - skipped
        lingered = (tasks["lock.heartbeat"].end - tasks["lock.release"].end).total_seconds()  # type: ignore[operator]
        assert lingered <= POLL + AIRFLOW
        lease = testbed.airflow.xcom("guarded", run_id, "lock.acquire")
        assert lease["key"] == key
        assert isinstance(lease["token"], int)


def test_a_guarded_task_fails(testbed: Testbed, contend: Contend) -> None:
    runs = contend()
    testbed.end_task(runs.first, "fail")
    runs.handed_over(POLL + AIRFLOW)
    runs.finish("failed")


@pytest.mark.parametrize("state", ["failed", "success"])
def test_a_running_guarded_task_is_marked(testbed: Testbed, state: str, contend: Contend) -> None:
    runs = contend()
    testbed.airflow.set_task_state("guarded", runs.first, "lock.work", state)
    runs.handed_over(GRACE + POLL + AIRFLOW)
    runs.finish(state)


def test_the_run_is_marked_failed(testbed: Testbed, contend: Contend) -> None:
    runs = contend()
    testbed.airflow.set_run_state("guarded", runs.first, "failed")
    runs.handed_over(GRACE + POLL + AIRFLOW)
    runs.finish("failed")


def test_a_running_guarded_task_is_cleared(testbed: Testbed, key: str, contend: Contend) -> None:
    runs = contend()
    cleared = testbed.airflow.clear("guarded", runs.first, ["lock.work"])
    assert {"lock.acquire", "lock.work", "lock.release"} <= cleared
    # The new attempt of the first run and the second run may come in either order.
    wait_for(
        lambda: [use for use in testbed.uses(key) if use.pid != runs.holder.pid] or None,
        "another process is inside",
        KILL + GRACE + POLL + AIRFLOW,
    )
    assert not psutil.pid_exists(runs.holder.pid) or testbed.uses(key)[0].last < testbed.uses(key)[1].first
    if not RESTARTS:
        assert testbed.airflow.task_instance("guarded", runs.first, "lock.work").state == "restarting"
        testbed.airflow.set_task_state("guarded", runs.first, "lock.work", "failed")
        testbed.airflow.clear("guarded", runs.first, ["lock.work"])
    testbed.end_task(runs.first, "finish")
    runs.finish("success")


def test_acquire_is_cleared_while_it_waits(testbed: Testbed, contend: Contend) -> None:
    runs = contend()
    before = testbed.airflow.task_instance("guarded", runs.second, "lock.acquire")
    testbed.airflow.clear("guarded", runs.second, ["lock.acquire"])
    wait_for(
        lambda: testbed.airflow.task_instance("guarded", runs.second, "lock.acquire").id != before.id or None,
        "Airflow has created the new attempt",
        30,
    )
    testbed.airflow.wait_for_task("guarded", runs.second, "lock.acquire", {"deferred"})
    testbed.end_task(runs.first, "finish")
    runs.handed_over(POLL + AIRFLOW)
    runs.finish("success")


def test_acquire_is_marked_failed_while_it_waits(testbed: Testbed, key: str, contend: Contend) -> None:
    runs = contend()
    testbed.airflow.set_task_state("guarded", runs.second, "lock.acquire", "failed")
    assert testbed.airflow.wait("guarded", runs.second).state == "failed"
    third = testbed.start("guarded", key)
    testbed.airflow.wait_for_task("guarded", third, "lock.acquire", {"deferred"})
    runs.second = third
    testbed.end_task(runs.first, "finish")
    runs.handed_over(SILENCE + POLL + AIRFLOW)
    runs.finish("success")


def test_the_process_is_killed(contend: Contend) -> None:
    runs = contend()
    os.kill(runs.holder.pid, signal.SIGKILL)
    runs.handed_over(GRACE + POLL + AIRFLOW)
    runs.finish("failed")


def test_the_triggerer_is_killed_and_restarted(testbed: Testbed, key: str, contend: Contend) -> None:
    runs = contend()
    testbed.airflow.triggerer.kill()
    testbed.airflow.triggerer.start()
    testbed.airflow.wait_until_healthy()
    record = testbed.locks.get(key)
    assert record is not None
    assert [holder.lease_id for holder in record.holders.values()] == [runs.holder.lease_id]
    testbed.end_task(runs.first, "finish")
    # A new triggerer takes over the triggers of a dead one after triggerer_health_check_threshold, 30 s.
    runs.handed_over(35.0 + POLL + AIRFLOW)
    runs.finish("success")


def test_the_run_times_out(testbed: Testbed, contend: Contend) -> None:
    runs = contend("hurried", LEASE)
    assert testbed.airflow.wait("hurried", runs.first).state == "failed"
    runs.handed_over(LEASE + POLL + AIRFLOW)
    runs.finish("failed")


def test_the_lock_is_broken_by_hand(testbed: Testbed, key: str, contend: Contend) -> None:
    runs = contend()
    broken_at = testbed.uses(key)[0].last
    assert "guarded" in testbed.locks.break_lock(key, runs.holder.lease_id).owner
    wait_for(
        lambda: None if psutil.pid_exists(runs.holder.pid) else True,
        "the process of the first run has ended",
        120,
    )
    # One heartbeat interval of the guard, and time for the heartbeat and on_kill. The bound must be shorter than the
    # grace: a guard that does not notice the break stops the task before the grace ends.
    assert testbed.uses(key)[0].last - broken_at <= GRACE / 3 + 1.0
    testbed.wait_inside(key, runs.second)
    testbed.end_task(runs.second, "finish")
    assert testbed.airflow.wait("guarded", runs.second).state == "success"
    assert testbed.airflow.wait("guarded", runs.first).state == "failed"
    assert "LockLostError" in testbed.airflow.task_log("guarded", runs.first, "lock.work")


@pytest.mark.parametrize(
    ("dag_id", "acquire", "run"), [("guarded", "failed", "failed"), ("skipping", "skipped", "success")]
)
def test_waiting_past_the_timeout_names_the_holder(
    testbed: Testbed, key: str, dag_id: str, acquire: str, run: str
) -> None:
    holder = testbed.locks.try_acquire(key, owner="somebody/else", lease=300)
    assert holder is not None
    run_id = testbed.start(dag_id, key, timeout=3)
    assert testbed.airflow.wait(dag_id, run_id).state == run
    tasks = {ti.task_id: ti for ti in testbed.airflow.task_instances(dag_id, run_id)}
    assert tasks["lock.acquire"].state == acquire
    assert {name for name, ti in tasks.items() if ti.pid is not None} <= ON_WORKER
    assert "Locked by somebody/else since" in testbed.airflow.task_log(dag_id, run_id, "lock.acquire")
    assert testbed.locks.release(holder)


def test_an_operator_that_is_marked_failed_hands_over(testbed: Testbed, contend: Contend) -> None:
    runs = contend("operator")
    testbed.airflow.set_task_state("operator", runs.first, "locked", "failed")
    runs.handed_over(GRACE + POLL + AIRFLOW)
    runs.finish("failed")


def test_each_table_of_a_mapped_group_has_a_lock_of_its_own(testbed: Testbed, key: str) -> None:
    run_id = testbed.start("mapped", key)
    testbed.assert_green("mapped", run_id)
    for table in ("orders", "customers"):
        (use,) = testbed.uses(f"{key}/{table}")
        assert use.run_id == run_id


def test_locks_nest_and_hold_several_keys(testbed: Testbed, key: str) -> None:
    run_id = testbed.start("nested", key)
    testbed.assert_green("nested", run_id)
    outer = testbed.airflow.xcom("nested", run_id, "outer.acquire")
    assert [lease["key"] for lease in outer] == [f"{key}/b", f"{key}/a"]
    # Two tasks run in the first outer lock, the second of them also in the inner lock, and one in the second
    # outer lock, whose only key is "a".
    assert [len(testbed.uses(f"{key}/{name}")) for name in ("a", "b", "inner")] == [3, 2, 1]
    assert {use.lease_id for use in testbed.uses(f"{key}/b")} == {outer[0]["lease_id"]}
    assert testbed.uses(f"{key}/inner")[0].lease_id != outer[0]["lease_id"]
    for name in ("a", "b", "inner"):
        record = testbed.locks.get(f"{key}/{name}")
        assert record is not None
        assert not record.holders


def test_sensors_wait_until_the_lock_could_be_taken(testbed: Testbed, key: str) -> None:
    lease = testbed.locks.try_acquire(key, lease=300)
    assert lease is not None
    run_id = testbed.start("sensing", key)
    waiting: dict[str, set[str | None]] = {
        "in_triggerer": {"deferred"},
        "poke": {"running"},
        "reschedule": {"up_for_reschedule"},
    }
    for task_id, states in waiting.items():
        testbed.airflow.wait_for_task("sensing", run_id, task_id, states)
    testbed.locks.release(lease)
    testbed.assert_green("sensing", run_id)
    assert (
        testbed.airflow.task_instance("sensing", run_id, "in_triggerer").pid is None
    ) is RENDERS_IN_TRIGGERER


def test_a_removed_waiter_and_a_sensor_that_timed_out_fail_without_a_retry(
    testbed: Testbed, key: str
) -> None:
    lease = testbed.locks.try_acquire(key, lease=300)
    assert lease is not None
    run_id = testbed.start("ended", key)
    (waiter,) = wait_for(lambda: testbed.locks.waiters(key) or None, "the run waits for the lock", AIRFLOW)
    testbed.locks.remove_waiter(key, waiter.lease_id, reason="a drill")

    assert testbed.airflow.wait("ended", run_id).state == "failed"
    for task_id, message in ("lock.acquire", "(a drill)"), ("sensor", "was not free within"):
        failed = testbed.airflow.task_instance("ended", run_id, task_id)
        assert (failed.state, failed.try_number) == ("failed", 1), task_id
        assert message in testbed.airflow.task_log("ended", run_id, task_id)
    assert testbed.locks.waiters(key) == []
    testbed.locks.release(lease)


def test_an_uncontended_lock_is_acquired_at_once_and_its_release_is_skipped(
    testbed: Testbed, key: str, record_property: Record
) -> None:
    took, releases = [], []
    for number in range(10):
        run_id = testbed.start("quick", f"{key}/{number}")
        acquire = testbed.airflow.wait_for_task("quick", run_id, "lock.acquire", {"success"})
        start = testbed.airflow.run("quick", run_id).start
        assert start
        assert acquire.end
        took.append((acquire.end - start).total_seconds())
        testbed.assert_green("quick", run_id)
        releases.append(testbed.airflow.task_instance("quick", run_id, "lock.release").state)
    # The scheduler may start the task before the last guarded task can skip it, but not each time.
    assert "skipped" in releases
    record_property("seconds", round(median(took), 1))
    assert max(took) <= AIRFLOW
