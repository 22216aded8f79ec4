"""`DynamoLockOperator` on its worker: with the lease that the trigger took, or without it."""

from __future__ import annotations

import uuid
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import DAG
from airflow.sdk.exceptions import TaskDeferred

from airflow_dynamo_lock import DynamoLockOperator, LockClient
from airflow_dynamo_lock.triggers import DynamoLockAcquireTrigger

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
    )
    return {"ti": ti, "outlet_events": {}, **more}


def test_it_works_under_the_lease_that_the_trigger_took_and_releases_it(locks: LockClient) -> None:
    lease = locks.try_acquire("taken")
    assert lease

    def work(dynamo_lock: Any = None) -> int:
        dynamo_lock.check()
        record = locks.get("taken")
        assert record
        assert record.holders[lease.lease_id].inside
        return int(dynamo_lock.token)

    assert operator("taken", work).execute_locked(context(), lease.as_dict()) == lease.token
    record = locks.get("taken")
    assert record
    assert not record.holders


def test_it_releases_the_lock_when_the_callable_fails(locks: LockClient) -> None:
    lease = locks.try_acquire("failing")
    assert lease

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        operator("failing", fail).execute_locked(context(), lease.as_dict())
    assert locks.try_acquire("failing")


def test_it_waits_again_if_the_lease_was_lost_in_the_queue(locks: LockClient) -> None:
    lease = locks.try_acquire("lost")
    assert lease
    locks.break_lock("lost", lease.lease_id)

    def never() -> None:
        raise AssertionError("the callable ran without the lock")

    with pytest.raises(TaskDeferred) as deferred:
        operator("lost", never, timeout=60).execute_locked(context(), lease.as_dict())
    assert isinstance(deferred.value.trigger, DynamoLockAcquireTrigger)
    assert deferred.value.trigger.resume
    assert deferred.value.method_name == "execute_locked"


def test_it_defers_at_once_if_the_lock_is_taken(locks: LockClient) -> None:
    assert locks.try_acquire("busy")
    with pytest.raises(TaskDeferred) as deferred:
        operator("busy", print).execute(context())
    assert deferred.value.method_name == "execute_locked"
