"""`DynamoLockOperator` on its worker: with the lease that the trigger acquired, or without one."""

from __future__ import annotations

import os
import time
import uuid
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import DAG

from airflow_dynamo_lock import (
    DynamoLockHeartbeatOperator,
    DynamoLockOperator,
    Lease,
    LockClient,
    LockUnavailableError,
)
from airflow_dynamo_lock.airflow.guard import Guard
from airflow_dynamo_lock.airflow.lock_options import LEASES_KEY
from airflow_dynamo_lock.airflow.triggers import DynamoLockAcquireTrigger
from airflow_dynamo_lock.airflow.versions import TaskDeferred

pytestmark = pytest.mark.usefixtures("connection")


def operator(key: str, function: Any, **arguments: Any) -> DynamoLockOperator:
    with DAG("dag"):
        return DynamoLockOperator(task_id="locked", key=key, python_callable=function, **arguments)


def context(**more: Any) -> Any:
    ti = SimpleNamespace(
        id=uuid.uuid4(),
        dag_id="dag",
        run_id="run",
        task_id="locked",
        map_index=-1,
        try_number=1,
        dag_version_id="v",
        xcom_push=lambda **_: None,
    )
    return {"ti": ti, "outlet_events": {}, **more}


def test_it_works_under_the_lease_of_the_trigger_and_releases_it(locks: LockClient) -> None:
    lease = locks.try_acquire("taken")
    assert lease

    def work(dynamo_lock: Any = None) -> int:
        dynamo_lock.check()
        record = locks.get("taken")
        assert record
        assert record.holders[lease.lease_id].processes
        return int(dynamo_lock.token)

    assert operator("taken", work).execute_locked(context(), lease.as_dict()) == lease.token
    record = locks.get("taken")
    assert record
    assert not record.holders


def test_its_leases_are_stored_for_the_locks_page_if_airflow_answers(locks: LockClient) -> None:
    stored: dict[str, Any] = {}
    stored_context = context()
    stored_context["ti"].xcom_push = lambda key, value: stored.update({key: value})
    assert operator("stored", lambda: 5).execute(stored_context) == 5
    (lease,) = stored[LEASES_KEY]
    assert lease["key"] == "stored"

    def fail(**_: Any) -> None:
        raise ConnectionError("Airflow does not answer")

    stored_context = context()
    stored_context["ti"].xcom_push = fail
    assert operator("stored", lambda: 6).execute(stored_context) == 6


def test_it_releases_the_lock_when_the_callable_fails(locks: LockClient) -> None:
    lease = locks.try_acquire("failing")
    assert lease

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        operator("failing", fail).execute_locked(context(), lease.as_dict())
    assert locks.try_acquire("failing")


def test_a_fork_of_the_callable_does_not_release_the_lock(locks: LockClient) -> None:
    lease = locks.try_acquire("forking")
    assert lease

    def fork() -> bool:
        if os.fork() == 0:
            raise SystemExit
        assert os.wait()[1] == 0
        record = locks.get("forking")
        assert record
        return bool(record.holders[lease.lease_id].processes)

    test = os.getpid()
    try:
        assert operator("forking", fork).execute_locked(context(), lease.as_dict()) is True
    finally:
        if os.getpid() != test:
            os._exit(0)


def test_it_waits_again_if_another_run_took_the_lock_before_its_start(locks: LockClient) -> None:
    lease = locks.try_acquire("lost")
    assert lease
    locks.break_lock("lost", lease.lease_id)
    assert locks.try_acquire("lost")

    def never() -> None:
        raise AssertionError("the callable ran without the lock")

    with pytest.raises(TaskDeferred) as deferred:
        operator("lost", never, timeout=60).execute_locked(context(), lease.as_dict())
    assert isinstance(deferred.value.trigger, DynamoLockAcquireTrigger)
    assert deferred.value.trigger.resume
    assert deferred.value.method_name == "execute_locked"


def test_without_deferring_it_acquires_the_lock_again_if_the_lease_was_lost_before_its_start(
    locks: LockClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[Lease] = []
    enter = Guard.enter

    def lose_once(guard: Guard) -> None:
        if not lost:
            lost.extend(guard._held)
            locks.break_lock("lost twice", lost[0].lease_id)
        enter(guard)

    monkeypatch.setattr(Guard, "enter", lose_once)
    assert operator("lost twice", lambda: 5, deferrable=False).execute(context()) == 5
    record = locks.get("lost twice")
    assert record
    assert lost
    assert not record.holders


def test_it_defers_at_once_if_the_lock_is_taken(locks: LockClient) -> None:
    assert locks.try_acquire("busy")
    with pytest.raises(TaskDeferred) as deferred:
        operator("busy", print).execute(context())
    assert deferred.value.method_name == "execute_locked"


def test_a_heartbeat_task_on_a_worker_continues_after_a_failed_read(
    locks: LockClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = locks.try_acquire("kept")
    assert lease
    with DAG("dag"):
        heartbeat = DynamoLockHeartbeatOperator(task_id="keep", acquire_task_id="acquire", deferrable=False)
    reads: list[str] = []

    def get(client: LockClient, key: str) -> None:
        reads.append(key)
        if len(reads) == 1:
            raise LockUnavailableError("DynamoDB cannot be reached.", maybe_applied=False)

    monkeypatch.setattr(LockClient, "get", get)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    ti = SimpleNamespace(map_index=-1, xcom_pull=lambda **_: lease.as_dict())

    heartbeat.execute({"ti": ti})  # type: ignore[typeddict-item]

    assert reads == ["kept", "kept"]
