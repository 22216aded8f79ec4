"""The guard, in the process of these tests and in processes of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from airflow_dynamo_lock import LockClient, LockLostError, LockNotHeldError
from airflow_dynamo_lock.airflow import guard, lock_options
from airflow_dynamo_lock.airflow.guard import Guard
from airflow_dynamo_lock.airflow.versions import run_hook
from airflow_dynamo_lock.client import held
from airflow_dynamo_lock.client.clock import monotonic
from airflow_dynamo_lock.core.model.lease import Lease
from airflow_dynamo_lock.core.model.outcomes import Draining, Lost
from deployments.clients import lock_client
from deployments.patience import PATIENCE
from deployments.proxy import Proxy
from tests.layer.guarded import guarded

GRACE = 6.0


class Task:
    """The part of an operator that the guard needs."""

    def __init__(self) -> None:
        self.killed = threading.Event()

    def on_kill(self) -> None:
        self.killed.set()


@pytest.fixture(autouse=True)
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Keep the guard from ending the process of the tests."""
    ended: list[str] = []
    monkeypatch.setattr(guard, "end_process", lambda: ended.append("ended"))
    yield ended
    assert not ended


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


@pytest.fixture
def lease(locks: LockClient, key: str) -> Lease:
    lease = locks.try_acquire(key, lease=30, release_grace=GRACE)
    assert lease
    # A task gets it from an XCom.
    return lock_options.from_result(lease.as_dict(), "acquire").leases[0]


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


def test_a_process_is_recorded_while_it_is_inside(locks: LockClient, lease: Lease, inside: Guard) -> None:
    record = locks.get(lease.key)
    assert record
    assert list(record.holders[lease.lease_id].processes) == [inside._process]
    inside.leave()
    record = locks.get(lease.key)
    assert record
    assert not record.holders[lease.lease_id].processes
    assert locks.release(lease)


def test_a_process_inside_relies_on_the_grace_only(inside: Guard) -> None:
    assert 0 < inside.leases[0].remaining() <= GRACE


def test_no_task_starts_that_the_guard_would_stop_at_once(
    locks: LockClient, lease: Lease, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first answer arrives so late that nearly all of the time that it grants has passed."""
    answers: list[Lease] = []

    def enter(held: Lease, process: str) -> Lease:
        answers.append(LockClient.enter(locks, held, process))
        if len(answers) == 1:
            monkeypatch.setattr(answers[0].term, "_until", monotonic() + 0.01)
        return answers[-1]

    monkeypatch.setattr(locks, "enter", enter)
    inside = Guard(locks, [lease], task)
    inside.enter()
    assert len(answers) == 2
    assert inside.leases[0].remaining() > GRACE / 2
    inside.leave()
    assert not task.killed.is_set()


def test_a_task_starts_when_dynamodb_answers_again(
    locks: LockClient, key: str, task: Task, caplog: pytest.LogCaptureFixture
) -> None:
    lease = locks.acquire(key, lease=600)
    with Proxy(locks._client.meta.endpoint_url) as proxy, lock_client("sync", proxy.endpoint_url) as client:
        inside = Guard(client, [lease], task)
        with proxy.losing_replies("GetItem", times=2):  # each attempt of the client is two of the SDK
            inside.enter()
        assert f"Entering the lock '{key}' (lease {lease.lease_id}) failed, trying again: " in caplog.text
        assert inside.leases[0].remaining() > 0
        inside.leave()


def test_a_lease_released_meanwhile_is_free_when_the_process_leaves(
    locks: LockClient, lease: Lease, inside: Guard
) -> None:
    assert isinstance(locks.release(lease), Draining)
    assert locks.try_acquire(lease.key) is None
    inside.leave()
    assert locks.try_acquire(lease.key)


def test_no_task_starts_under_a_lost_lease(locks: LockClient, lease: Lease, task: Task) -> None:
    locks.break_lock(lease.key, lease.lease_id)
    with pytest.raises(LockLostError, match="it was broken at "):
        Guard(locks, [lease], task).enter()
    assert guard._active_guards == []


def test_no_task_starts_under_a_draining_lease(
    locks: LockClient, lease: Lease, inside: Guard, task: Task
) -> None:
    locks.release(lease)
    with pytest.raises(LockLostError, match="no process can enter it any more"):
        Guard(locks, [lease], task).enter()


def wait_until_stopped(guard: Guard) -> None:
    """Work until the guard interrupts it, and leave at once, because this process must not be ended."""
    try:
        threading.Event().wait(10 * GRACE)
    finally:
        guard.leave()


def test_a_lost_lease_stops_the_task(locks: LockClient, lease: Lease, inside: Guard, task: Task) -> None:
    locks.break_lock(lease.key, lease.lease_id)
    with pytest.raises(LockLostError, match="it was broken at "):
        wait_until_stopped(inside)
    assert task.killed.is_set()
    assert isinstance(locks.release(lease), Lost)


def test_a_task_is_not_interrupted_during_a_request_to_its_supervisor(
    locks: LockClient, lease: Lease, inside: Guard, task: Task
) -> None:
    module = {"__name__": "airflow.sdk.execution_time.comms"}
    exec(
        "def send(until):\n    assert until(60)\n    for _ in range(20): sleep(0.01)\n    return 'answered'",
        module,
    )
    module["sleep"] = threading.Event().wait  # type: ignore[assignment]
    locks.break_lock(lease.key, lease.lease_id)
    assert module["send"](task.killed.wait) == "answered"  # type: ignore[operator]
    with pytest.raises(LockLostError):
        wait_until_stopped(inside)


def test_the_loss_of_an_outer_lock_stops_a_task_in_nested_locks(
    locks: LockClient, lease: Lease, inside: Guard
) -> None:
    inner = locks.acquire(f"{lease.key}/inner", release_grace=GRACE)
    guard = Guard(locks, [Lease.from_dict(inner.as_dict())], Task())
    guard.enter()
    locks.break_lock(lease.key, lease.lease_id)
    with pytest.raises(LockLostError, match="it was broken at "):
        wait_until_stopped(inside)
    guard.leave()


def test_a_process_is_not_interrupted_after_the_code_of_its_task_has_ended(
    locks: LockClient, lease: Lease, task: Task
) -> None:
    """Airflow is about to report the state of the task to its server, or calls the task's callbacks."""
    guard = Guard(locks, [lease], task)
    runner = {"__name__": "airflow.sdk.execution_time.task_runner", "enter": guard.enter}
    exec("def run():\n    enter()", runner)
    runner["run"]()  # type: ignore[operator]
    locks.break_lock(lease.key, lease.lease_id)
    guard._heartbeats[0]._thread.join(PATIENCE)
    guard.leave()
    assert guard._lost
    assert not task.killed.is_set()


# -- a task that resists being stopped ------------------------------------------------------------------------------

#: Maximum time until a process is ended, in seconds.
WITHIN = 60.0


@pytest.mark.parametrize(
    ("body", "ended", "reported"),
    [
        pytest.param(
            "swallows exceptions",
            3,
            ["on_kill", "swallowed LockLostError", "ended by KeyboardInterrupt: LockLostError"],
            marks=pytest.mark.proof,
        ),
        ("swallows everything", 1, ["on_kill", "swallowed LockLostError", "swallowed LockLostInterrupt"]),
        pytest.param("has its own handler", 1, ["on_kill"], marks=pytest.mark.proof),
        pytest.param("is in a thread", 1, ["on_kill"], marks=pytest.mark.proof),
    ],
)
def test_a_task_whose_lease_is_lost_ends_whatever_it_catches(
    locks: LockClient, lease: Lease, body: str, ended: int, reported: list[str]
) -> None:
    with guarded(locks._client.meta.endpoint_url, lease, body) as process:
        locks.break_lock(lease.key, lease.lease_id)
        out, err = process.communicate(timeout=WITHIN)
    assert process.returncode == ended
    lines = out.splitlines()
    assert [line[: len(start)] for line, start in zip(lines, reported, strict=False)] == reported
    assert set(lines[len(reported) :]) <= {"swallowed LockLostInterrupt"}
    assert "is lost: it was broken at " in err
    assert ("Ending its process" in err) is (ended == 1)


def test_child_processes_of_an_ended_process_are_ended_too(locks: LockClient, lease: Lease) -> None:
    with guarded(locks._client.meta.endpoint_url, lease, "has a child") as process:
        assert process.stdout
        child = psutil.Process(int(process.stdout.readline().split()[1]))
        locks.break_lock(lease.key, lease.lease_id)
        process.communicate(timeout=WITHIN)
    child.wait(WITHIN)


@pytest.mark.proof
def test_a_task_without_network_has_ended_when_another_takes_the_lock(locks: LockClient, key: str) -> None:
    lease = locks.acquire(key, lease=60, release_grace=6)
    with (
        Proxy(locks._client.meta.endpoint_url) as proxy,
        guarded(proxy.endpoint_url, lease, "swallows everything") as process,
        proxy.breaking(),
    ):
        assert isinstance(locks.release(lease), Draining)
        locks.acquire(key, timeout=WITHIN, poll_interval=0.1)
        assert process.poll() == 1


# -- forks ----------------------------------------------------------------------------------------------------------


def in_a_fork(action: Callable[[], object]) -> None:
    """Fork, do something in the child, and wait for its end."""
    if pid := os.fork():
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        return
    try:
        action()
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.parametrize("action", ["leave", "drain"])
def test_a_fork_of_a_guarded_process_neither_leaves_nor_drains_the_lease(
    locks: LockClient, lease: Lease, inside: Guard, action: str
) -> None:
    in_a_fork(getattr(inside, action))
    record = locks.get(lease.key)
    assert record
    assert list(record.holders[lease.lease_id].processes) == [inside._process]
    assert not record.holders[lease.lease_id].draining


def test_the_context_has_the_innermost_lease_and_all_by_key(
    monkeypatch: pytest.MonkeyPatch, locks: LockClient, lease: Lease
) -> None:
    monkeypatch.delenv(held.VARIABLE, raising=False)
    context: dict[str, object] = {}
    outer = Lease.from_dict({**lease.as_dict(), "key": "outer", "lease_id": "outer"})
    for each in (outer, lease):
        around = Guard(locks, [each], None)
        around.leases.append(each)
        around.show_leases(context)
    assert context == {"dynamo_lock": lease, "dynamo_locks": {"outer": outer, lease.key: lease}}
    assert held.held_around(locks) == [outer, lease], "child processes find the leases"


def test_the_leases_of_a_guard_that_left_are_not_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, locks: LockClient, inside: Guard
) -> None:
    monkeypatch.delenv(held.VARIABLE, raising=False)
    inside.show_leases({})
    assert held.held_around(locks)
    inside.leave()
    assert held.held_around(locks) == []


@pytest.mark.parametrize("result", [None, []])
def test_without_an_acquired_lease_no_task_starts(result: object) -> None:
    with pytest.raises(LockNotHeldError, match=r"'lock\.acquire' has acquired no lease in this run"):
        lock_options.from_result(result, "lock.acquire")


def test_a_pre_execute_that_is_a_generator_function_runs() -> None:
    ran = []

    def hook(_: Any) -> Iterator[None]:
        ran.append(True)
        yield

    context: Any = {}
    run_hook(hook, context)
    assert ran
