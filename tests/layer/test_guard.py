"""The guard in a process of its own, which these tests are for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from airflow_dynamo_lock import LockClient, LockLostError, LockNotHeldError, guard, leases
from airflow_dynamo_lock.guard import Guard, show_leases
from airflow_dynamo_lock.protocol.model import Abandoned, Lease, Lost

GRACE = 1.5


class Task:
    """As much of an operator as the guard needs."""

    def __init__(self) -> None:
        self.killed = threading.Event()

    def on_kill(self) -> None:
        self.killed.set()


@pytest.fixture
def lease(locks: LockClient, request: pytest.FixtureRequest) -> Lease:
    lease = locks.try_acquire(request.node.name, lease=30, release_grace=GRACE)
    assert lease
    # As a task gets it: from an XCom.
    return leases.from_result(lease.as_dict(), "acquire").leases[0]


@pytest.fixture
def task() -> Task:
    return Task()


@pytest.fixture
def inside(locks: LockClient, lease: Lease, task: Task) -> Iterator[Guard]:
    guard = Guard(locks, [lease], task)
    guard.enter()
    yield guard
    guard.leave()


def holder(locks: LockClient, lease: Lease) -> object:
    record = locks.get(lease.key)
    return record and record.holders.get(lease.lease_id)


def test_a_process_is_noted_while_it_is_inside(locks: LockClient, lease: Lease, inside: Guard) -> None:
    record = locks.get(lease.key)
    assert record
    assert list(record.holders[lease.lease_id].inside) == [inside._process]
    inside.leave()
    record = locks.get(lease.key)
    assert record
    assert not record.holders[lease.lease_id].inside
    assert locks.release(lease)


def test_it_counts_on_the_grace_only(inside: Guard) -> None:
    assert 0 < inside.leases[0].remaining() <= GRACE


def test_a_lease_given_back_meanwhile_is_free_when_the_process_leaves(
    locks: LockClient, lease: Lease, inside: Guard
) -> None:
    assert isinstance(locks.give_back(lease), Abandoned)
    assert locks.try_acquire(lease.key) is None
    inside.leave()
    assert locks.try_acquire(lease.key)


def test_nothing_starts_under_a_lease_that_is_lost(locks: LockClient, lease: Lease, task: Task) -> None:
    locks.break_lock(lease.key, lease.lease_id)
    with pytest.raises(LockLostError, match="released, broken or reclaimed"):
        Guard(locks, [lease], task).enter()
    assert guard._here == []


def test_nothing_starts_under_a_lease_that_is_being_given_back(
    locks: LockClient, lease: Lease, inside: Guard, task: Task
) -> None:
    locks.give_back(lease)
    with pytest.raises(LockLostError, match="nothing may start under it any more"):
        Guard(locks, [lease], task).enter()


def test_a_lost_lease_stops_the_task(locks: LockClient, lease: Lease, inside: Guard, task: Task) -> None:
    locks.break_lock(lease.key, lease.lease_id)
    with pytest.raises(LockLostError, match="released, broken or reclaimed"):
        threading.Event().wait(10 * GRACE)
    assert task.killed.is_set()
    assert isinstance(locks.give_back(lease), Lost)


def test_a_task_is_not_interrupted_while_it_talks_to_its_supervisor(
    locks: LockClient, lease: Lease, inside: Guard, task: Task
) -> None:
    talk = {"__name__": "airflow.sdk.execution_time.comms"}
    exec(
        "def talk(until):\n    assert until(10)\n    for _ in range(20): sleep(0.01)\n    return 'answered'",
        talk,
    )
    talk["sleep"] = threading.Event().wait  # type: ignore[assignment]
    locks.break_lock(lease.key, lease.lease_id)
    assert talk["talk"](task.killed.wait) == "answered"  # type: ignore[operator]
    with pytest.raises(LockLostError):
        threading.Event().wait(10)


def test_the_context_has_the_innermost_lease_and_all_by_key(lease: Lease) -> None:
    context: dict[str, object] = {}
    outer = Lease.from_dict({**lease.as_dict(), "key": "outer"})
    show_leases(context, [outer])
    show_leases(context, [lease])
    assert context == {"dynamo_lock": lease, "dynamo_locks": {"outer": outer, lease.key: lease}}


@pytest.mark.parametrize("result", [None, []])
def test_without_an_acquired_lease_nothing_may_work(result: object) -> None:
    with pytest.raises(LockNotHeldError, match=r"'lock\.acquire' has acquired no lease in this run"):
        leases.from_result(result, "lock.acquire")
