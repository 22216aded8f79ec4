"""The common operations of a lock on DynamoDB Local, with each kind of client.

`make test` runs the whole contract on moto. This file shows that AWS's own engine accepts the expressions of the common
operations. `make proof` runs the whole contract on it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from airflow_dynamo_lock import Lease, LockClient, LockLostError
from deployments.engines import DynamoDBLocal
from deployments.patience import PATIENCE
from tests.client.test_kinds import start_waiter

pytestmark = pytest.mark.parametrize("engine", [DynamoDBLocal], indirect=True, ids=["dynamodb-local"])


def test_acquire_renew_and_release(client: LockClient, elsewhere: LockClient, key: str) -> None:
    client.check_table()
    lease = client.acquire(key, data={"offset": 1})
    assert elsewhere.try_acquire(key) is None
    longer = client.renew(lease, duration=90, data={"offset": 2})
    client.enter(longer, "process")
    record = elsewhere.get(key)
    assert record
    assert (record.data, list(record.holders)) == ({"offset": 2}, [lease.lease_id])
    assert [each.key for each in elsewhere.list_locks(key)] == [key]
    client.leave(longer, "process")
    assert client.release(longer)
    assert elsewhere.acquire(key).token > lease.token


def test_the_next_waiter_is_granted_a_released_lock(
    client: LockClient, elsewhere: LockClient, threads: ThreadPoolExecutor, key: str
) -> None:
    held = client.acquire(key)
    waiting = start_waiter(threads, elsewhere, key, timeout=PATIENCE)
    assert [each.owner for each in client.waiters(key)] == ["elsewhere"]
    client.release(held)
    lease = waiting.result(PATIENCE)
    assert isinstance(lease, Lease)
    assert lease.token > held.token


def test_a_semaphore_a_shared_lock_and_several_locks_at_once(
    client: LockClient, elsewhere: LockClient, key: str
) -> None:
    client.acquire(f"{key}/semaphore", slots=2, capacity=3)
    assert elsewhere.try_acquire(f"{key}/semaphore", slots=2, capacity=3) is None
    client.set_capacity(f"{key}/semaphore", 4)
    assert elsewhere.try_acquire(f"{key}/semaphore", slots=2, capacity=4)

    client.acquire(f"{key}/shared", mode="shared")
    assert elsewhere.try_acquire(f"{key}/shared", mode="shared")
    assert elsewhere.try_acquire(f"{key}/shared") is None

    both = client.acquire([f"{key}/a", f"{key}/b"])
    assert elsewhere.try_acquire([f"{key}/b", f"{key}/c"]) is None
    assert client.release(both)
    assert elsewhere.try_acquire([f"{key}/b", f"{key}/c"])


def test_a_dead_holder_is_reclaimed_and_a_living_one_broken(
    client: LockClient, elsewhere: LockClient, key: str
) -> None:
    dead = client.acquire(key, lease=1)
    successor = elsewhere.acquire(key, timeout=PATIENCE, poll_interval=0.1)
    assert [each.lease_id for each in successor.reclaimed] == [dead.lease_id]
    client.break_lock(key, successor.lease_id)
    with pytest.raises(LockLostError):
        elsewhere.renew(successor)
