"""The group in a real Airflow: whatever happens to its tasks, at no moment are two runs' processes inside, and the next
in line gets its turn within the bound of `docs/airflow.md`.

"Inside" is judged by what the processes themselves write every 50 ms, never by the states that Airflow shows.
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
from proof.airflow.room import GRACE, LEASE, POLL, Room, until
from proof.airflow.stays import Stay

pytestmark = pytest.mark.proof

#: What Airflow needs from the grant to the first line of the next task's code, on two busy cores.
AIRFLOW = 15.0
#: What it needs from a mark or a clear to the end of the process: its heartbeat, SIGTERM, 5 s, SIGKILL.
KILL = 30.0

#: How long a waiter that has ended without a word holds up those behind it in the queue (docs/protocol.md). Before
#: Airflow 3.3 a trigger does not learn that its task was marked or cleared.
SILENCE = 0.0 if hasattr(BaseTrigger, "on_kill") else 21.0

#: The tasks of a group that start on a worker, if the key is a template, in this version of Airflow.
ON_WORKER = {
    *(() if RENDERS_IN_TRIGGERER else ("lock.acquire",)),
    *(() if STARTS_IN_TRIGGERER else ("lock.heartbeat", "lock.release")),
}

#: Airflow 3.0 does not start a task again that was cleared while it ran: it stays "restarting" (apache/airflow#55045).
RESTARTS = not version("apache-airflow").startswith("3.0.")


Record = Callable[[str, object], None]
Contend = Callable[..., "Contention"]


class Contention:
    """One run inside, and the next in line waiting for it."""

    def __init__(self, room: Room, key: str, record: Record, dag_id: str = "guarded") -> None:
        self.room, self.key, self.record, self.dag_id = room, key, record, dag_id
        self.first = room.start(dag_id, key)
        self.holder = room.wait_inside(key, self.first)
        self.second = room.start("guarded", key)
        room.airflow.wait_for_task("guarded", self.second, "lock.acquire", {"deferred"})
        until(
            lambda: (
                "Waiting for the lock" in room.airflow.task_log("guarded", self.second, "lock.acquire")
                or None
            ),
            "the second run says whom it waits for",
            30,
        )

    def handed_over(self, within: float) -> Stay:
        """Wait until the second run is inside; the last sign of the first must be no longer ago than `within`."""
        stay = self.room.wait_inside(self.key, self.second, timeout=within + KILL)
        last = max(each.last for each in self.room.stays(self.key) if each.run_id == self.first)
        assert stay.first - last <= within, f"handed over after {stay.first - last:.1f} s"
        self.record("seconds", round(stay.first - last, 1))
        return stay

    def finish(self, first: str) -> None:
        """The second run ends well, and the first in the state that it should."""
        self.room.tell(self.second, "finish")
        self.room.assert_green("guarded", self.second)
        assert self.room.airflow.wait(self.dag_id, self.first).state == first
        self.room.assert_exclusive(self.key)
        record = self.room.locks.get(self.key)
        assert record is not None
        assert not record.holders


@pytest.fixture
def contend(room: Room, key: str, record_property: Record) -> Contend:
    """Begin a contention for the test's lock."""
    return partial(Contention, room, key, record_property)


def test_work_runs_only_under_the_lease_and_waiting_needs_no_worker(
    room: Room, key: str, contend: Contend
) -> None:
    runs = contend()
    record = room.locks.get(key)
    assert record is not None
    (holder,) = record.holders.values()
    assert len(holder.processes) == 1
    # In its own log, though it is the first run's keeper that has begun to look at the table for both.
    until(
        lambda: "1st of 1." in room.airflow.task_log("guarded", runs.second, "lock.acquire") or None,
        "the second run says where it stands in line",
        120,
    )
    room.tell(runs.first, "finish")
    runs.handed_over(POLL + AIRFLOW)
    runs.finish("success")
    for run_id in (runs.first, runs.second):
        tasks = {ti.task_id: ti for ti in room.airflow.task_instances("guarded", run_id)}
        assert {name for name, ti in tasks.items() if ti.pid is not None} == {"lock.work", *ON_WORKER}
        lingered = (tasks["lock.heartbeat"].end - tasks["lock.release"].end).total_seconds()  # type: ignore[operator]
        assert lingered <= 2.0
        lease = room.airflow.xcom("guarded", run_id, "lock.acquire")
        assert lease["key"] == key
        assert isinstance(lease["token"], int)


def test_a_guarded_task_fails(room: Room, contend: Contend) -> None:
    runs = contend()
    room.tell(runs.first, "fail")
    runs.handed_over(POLL + AIRFLOW)
    runs.finish("failed")


@pytest.mark.parametrize("state", ["failed", "success"])
def test_a_running_guarded_task_is_marked(room: Room, state: str, contend: Contend) -> None:
    runs = contend()
    room.airflow.set_task_state("guarded", runs.first, "lock.work", state)
    runs.handed_over(GRACE + POLL + AIRFLOW)
    runs.finish(state)


def test_the_run_is_marked_failed(room: Room, contend: Contend) -> None:
    runs = contend()
    room.airflow.set_run_state("guarded", runs.first, "failed")
    runs.handed_over(GRACE + POLL + AIRFLOW)
    runs.finish("failed")


def test_a_running_guarded_task_is_cleared(room: Room, key: str, contend: Contend) -> None:
    runs = contend()
    cleared = room.airflow.clear("guarded", runs.first, ["lock.work"])
    assert {"lock.acquire", "lock.work", "lock.release"} <= cleared
    # One of the two is next: the new attempt of the first run, or the second run.
    until(
        lambda: [stay for stay in room.stays(key) if stay.pid != runs.holder.pid] or None,
        "somebody else is inside",
        KILL + GRACE + POLL + AIRFLOW,
    )
    assert not psutil.pid_exists(runs.holder.pid) or room.stays(key)[0].last < room.stays(key)[1].first
    if not RESTARTS:
        assert room.airflow.task_instance("guarded", runs.first, "lock.work").state == "restarting"
        room.airflow.set_task_state("guarded", runs.first, "lock.work", "failed")
        room.airflow.clear("guarded", runs.first, ["lock.work"])
    room.tell(runs.first, "finish")
    runs.finish("success")


def test_acquire_is_cleared_while_it_waits(room: Room, contend: Contend) -> None:
    runs = contend()
    before = room.airflow.task_instance("guarded", runs.second, "lock.acquire")
    room.airflow.clear("guarded", runs.second, ["lock.acquire"])
    until(
        lambda: room.airflow.task_instance("guarded", runs.second, "lock.acquire").id != before.id or None,
        "the new attempt is there",
        30,
    )
    room.airflow.wait_for_task("guarded", runs.second, "lock.acquire", {"deferred"})
    room.tell(runs.first, "finish")
    runs.handed_over(POLL + AIRFLOW)
    runs.finish("success")


def test_acquire_is_marked_failed_while_it_waits(room: Room, key: str, contend: Contend) -> None:
    runs = contend()
    room.airflow.set_task_state("guarded", runs.second, "lock.acquire", "failed")
    assert room.airflow.wait("guarded", runs.second).state == "failed"
    third = room.start("guarded", key)
    room.airflow.wait_for_task("guarded", third, "lock.acquire", {"deferred"})
    runs.second = third
    room.tell(runs.first, "finish")
    runs.handed_over(SILENCE + POLL + AIRFLOW)
    runs.finish("success")


def test_the_process_is_killed(contend: Contend) -> None:
    runs = contend()
    os.kill(runs.holder.pid, signal.SIGKILL)
    runs.handed_over(GRACE + POLL + AIRFLOW)
    runs.finish("failed")


def test_the_triggerer_is_killed_and_restarted(room: Room, key: str, contend: Contend) -> None:
    runs = contend()
    room.airflow.triggerer.kill()
    room.airflow.triggerer.start()
    room.airflow.wait_until_healthy()
    record = room.locks.get(key)
    assert record is not None
    assert [holder.lease_id for holder in record.holders.values()] == [runs.holder.lease_id]
    room.tell(runs.first, "finish")
    # A new triggerer takes a dead one's triggers over only after triggerer_health_check_threshold, 30 s.
    runs.handed_over(35.0 + POLL + AIRFLOW)
    runs.finish("success")


def test_the_run_times_out(room: Room, contend: Contend) -> None:
    runs = contend("timed_out")
    assert room.airflow.wait("timed_out", runs.first).state == "failed"
    runs.handed_over(LEASE + POLL + AIRFLOW)
    runs.finish("failed")


def test_the_lock_is_broken_by_hand(room: Room, key: str, contend: Contend) -> None:
    runs = contend()
    broken_at = room.stays(key)[0].last
    assert "guarded" in room.locks.break_lock(key, runs.holder.lease_id).owner
    until(lambda: None if psutil.pid_exists(runs.holder.pid) else True, "the first has stopped", 120)
    # A heartbeat interval of the guard, and what the beat and on_kill take.
    assert room.stays(key)[0].last - broken_at <= GRACE / 3 + 1.0
    room.wait_inside(key, runs.second)
    room.tell(runs.second, "finish")
    assert room.airflow.wait("guarded", runs.second).state == "success"
    assert room.airflow.wait("guarded", runs.first).state == "failed"
    assert "LockLostError" in room.airflow.task_log("guarded", runs.first, "lock.work")


@pytest.mark.parametrize(
    ("dag_id", "acquire", "run"), [("guarded", "failed", "failed"), ("skipping", "skipped", "success")]
)
def test_waiting_past_the_timeout_names_the_holder(
    room: Room, key: str, dag_id: str, acquire: str, run: str
) -> None:
    holder = room.locks.try_acquire(key, owner="somebody/else", lease=300)
    assert holder is not None
    run_id = room.start(dag_id, key, timeout=3)
    assert room.airflow.wait(dag_id, run_id).state == run
    tasks = {ti.task_id: ti for ti in room.airflow.task_instances(dag_id, run_id)}
    assert tasks["lock.acquire"].state == acquire
    assert {name for name, ti in tasks.items() if ti.pid is not None} <= ON_WORKER
    assert "Locked by somebody/else since" in room.airflow.task_log(dag_id, run_id, "lock.acquire")
    assert room.locks.release(holder)


def test_an_operator_that_is_marked_failed_hands_over(room: Room, contend: Contend) -> None:
    runs = contend("operator")
    room.airflow.set_task_state("operator", runs.first, "locked", "failed")
    runs.handed_over(GRACE + POLL + AIRFLOW)
    runs.finish("failed")


def test_each_table_of_a_mapped_group_has_a_lock_of_its_own(room: Room, key: str) -> None:
    run_id = room.start("mapped", key)
    room.assert_green("mapped", run_id)
    for table in ("orders", "customers"):
        (stay,) = room.stays(f"{key}/{table}")
        assert stay.run_id == run_id


def test_locks_nest_and_hold_several_keys(room: Room, key: str) -> None:
    run_id = room.start("nested", key)
    room.assert_green("nested", run_id)
    outer = room.airflow.xcom("nested", run_id, "outer.acquire")
    assert [lease["key"] for lease in outer] == [f"{key}/b", f"{key}/a"]
    # One stay under each lease in each process: two in the outer lock, the second of them in the inner one as well.
    assert [len(room.stays(f"{key}/{name}")) for name in ("a", "b", "inner")] == [3, 2, 1]
    assert {stay.lease_id for stay in room.stays(f"{key}/b")} == {outer[0]["lease_id"]}
    assert room.stays(f"{key}/inner")[0].lease_id != outer[0]["lease_id"]
    for name in ("a", "b", "inner"):
        record = room.locks.get(f"{key}/{name}")
        assert record is not None
        assert not record.holders


def test_sensors_wait_until_the_lock_could_be_taken(room: Room, key: str) -> None:
    lease = room.locks.try_acquire(key, lease=300)
    assert lease is not None
    run_id = room.start("sensing", key)
    waiting: dict[str, set[str | None]] = {
        "in_triggerer": {"deferred"},
        "poke": {"running"},
        "reschedule": {"up_for_reschedule"},
    }
    for task_id, states in waiting.items():
        room.airflow.wait_for_task("sensing", run_id, task_id, states)
    room.locks.release(lease)
    room.assert_green("sensing", run_id)
    assert (room.airflow.task_instance("sensing", run_id, "in_triggerer").pid is None) is RENDERS_IN_TRIGGERER


def test_an_uncontended_lock_is_acquired_within_three_seconds(
    room: Room, key: str, record_property: Record
) -> None:
    took = []
    for number in range(10):
        run_id = room.start("quick", f"{key}/{number}")
        acquire = room.airflow.wait_for_task("quick", run_id, "lock.acquire", {"success"})
        start = room.airflow.run("quick", run_id).start
        assert start
        assert acquire.end
        took.append((acquire.end - start).total_seconds())
    record_property("seconds", round(median(took), 1))
    assert median(took) <= 3.0
