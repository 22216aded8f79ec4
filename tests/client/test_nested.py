"""Nested locks of both clients: a deadlock ends with one error, and the waits around it go on (R14)."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from airflow_dynamo_lock import Lease, LockClient, LockDeadlockError, LockTimeoutError, LockValueError
from deployments.clients import async_lock_client
from deployments.engines import Engine
from deployments.patience import PATIENCE
from tests.client.conftest import MakeClient


def both_orders(first: LockClient, second: LockClient, key: str, threads: ThreadPoolExecutor) -> list[str]:
    """Nest two locks in two clients, in opposite orders. Returns the deadlock errors."""
    both_hold = threading.Barrier(2)

    def nest(locks: LockClient, outer: str, inner: str) -> str:
        try:
            with locks.lock(outer) as lease:
                both_hold.wait()
                locks.release(locks.acquire(inner, timeout=30, holding=[lease]))
        except LockDeadlockError as deadlock:
            return str(deadlock)
        return ""

    ends = [
        threads.submit(nest, first, f"{key}/a", f"{key}/b"),
        threads.submit(nest, second, f"{key}/b", f"{key}/a"),
    ]
    return sorted(filter(None, (each.result() for each in ends)))


def test_nesting_in_opposite_orders_ends_with_one_deadlock_error(
    make_client: MakeClient, key: str, threads: ThreadPoolExecutor
) -> None:
    (failure,) = both_orders(make_client(owner="north"), make_client(owner="south"), key, threads)
    assert f"north holds '{key}/a' and waits for '{key}/b'" in failure
    assert f"south holds '{key}/b' and waits for '{key}/a'" in failure


@pytest.mark.parametrize("timeout", [None, 10])
def test_acquiring_a_lock_inside_its_own_block_fails_at_once(
    engine: Engine, client: LockClient, kind: str, key: str, timeout: float | None
) -> None:
    async def nest() -> None:
        async with async_lock_client(engine.endpoint_url) as locks, locks.lock(key):
            await locks.acquire(key, timeout=timeout)

    if kind == "async":
        with pytest.raises(LockDeadlockError, match="itself"):
            asyncio.run(nest())
    else:
        with (
            pytest.raises(LockDeadlockError, match="itself"),
            client.lock(key),
            client.lock(key, timeout=timeout),
        ):
            pass


def test_after_the_block_the_client_waits_for_the_lock_again(
    client: LockClient, elsewhere: LockClient, key: str
) -> None:
    with client.lock(key):
        pass
    assert elsewhere.try_acquire(key)
    with pytest.raises(LockTimeoutError):
        client.acquire(key, timeout=0.1)


def test_a_task_that_is_started_in_a_block_does_not_hold_its_lease(engine: Engine, key: str) -> None:
    async def in_task() -> None:
        async with async_lock_client(engine.endpoint_url) as locks, locks.lock(f"{key}/task"):
            with pytest.raises(LockTimeoutError):
                await asyncio.create_task(locks.acquire(f"{key}/task", timeout=0.1))

    asyncio.run(in_task())


def test_a_task_can_declare_the_leases_that_it_holds(engine: Engine, key: str) -> None:
    async def in_task() -> None:
        async with (
            async_lock_client(engine.endpoint_url) as locks,
            locks.lock([f"{key}/a", f"{key}/b"]) as held,
        ):
            with pytest.raises(LockDeadlockError):
                await asyncio.create_task(locks.acquire(f"{key}/b", timeout=5, holding=[held]))

    asyncio.run(in_task())


@pytest.mark.parametrize("wrong", [["a"], "a", None, 5])
def test_holding_must_be_a_lease_or_a_list_of_leases(client: LockClient, key: str, wrong: Any) -> None:
    with pytest.raises(LockValueError, match="holding must be a lease or a list of leases, not"):
        client.acquire(key, holding=wrong)


def test_holding_may_be_a_single_lease_or_lease_set(client: LockClient, key: str) -> None:
    for held in (client.acquire(key), client.acquire([f"{key}/a", f"{key}/b"])):
        for lease in [held] if isinstance(held, Lease) else held:
            with pytest.raises(LockDeadlockError, match="itself"):
                client.acquire(lease.key, timeout=PATIENCE, holding=held)


def test_the_block_of_another_client_does_not_count(
    client: LockClient, elsewhere: LockClient, key: str
) -> None:
    with client.lock(key), pytest.raises(LockTimeoutError):
        elsewhere.acquire(key, timeout=0.1)


def test_a_wait_note_is_removed_when_the_wait_ends(
    client: LockClient, elsewhere: LockClient, key: str
) -> None:
    with elsewhere.lock(f"{key}/inner"), client.lock(key):
        with pytest.raises(LockTimeoutError):
            client.acquire(f"{key}/inner", timeout=0.2)
        record = client.get(key)
        assert record
        assert [each.waits for each in record.holders.values()] == [{}]
