"""How many requests the clients send (R2 and R11). A proxy counts them, including the SDK's retries."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest

from airflow_dynamo_lock import Lease, LockClient
from airflow_dynamo_lock.core.model.limits import WAITING_PREFIX
from deployments.clients import SLOW, async_lock_client
from deployments.engines import DynamoDBLocal
from deployments.patience import PATIENCE
from deployments.proxy import Proxy, Seen
from tests.client.conftest import MakeClient


@pytest.fixture
def counted(make_client: MakeClient, proxy: Proxy) -> LockClient:
    """A fresh client whose requests are counted."""
    return make_client(proxy, sdk=SLOW)


@pytest.fixture
def first(sends_dates: bool) -> list[str]:
    """The requests of a fresh client's first grant. If the answer has no date, it removes its times from the record."""
    return ["acquire"] if sends_dates else ["acquire", "acquire"]


def test_a_fresh_client_acquires_a_new_key_with_one_request(
    counted: LockClient, proxy: Proxy, key: str, first: list[str]
) -> None:
    assert counted.try_acquire(key)
    assert proxy.whats() == first


def test_a_fresh_client_acquires_a_free_lock_with_one_request(
    counted: LockClient, client: LockClient, proxy: Proxy, key: str, first: list[str]
) -> None:
    with client.lock(key):
        pass

    assert counted.try_acquire(key)
    assert proxy.whats() == first


def test_acquiring_and_releasing_are_two_requests(
    counted: LockClient, proxy: Proxy, key: str, first: list[str]
) -> None:
    lease = counted.acquire(key)
    assert counted.release(lease)

    assert proxy.whats() == [*first, "release"]


def test_a_short_with_block_is_two_requests(
    counted: LockClient, proxy: Proxy, key: str, first: list[str]
) -> None:
    with counted.lock(key):
        pass

    assert proxy.whats() == [*first, "release"]


def test_a_heartbeat_is_one_request(counted: LockClient, proxy: Proxy, key: str, first: list[str]) -> None:
    lease = counted.acquire(key)
    for _ in range(3):
        counted.renew(lease)

    assert proxy.whats() == first + ["heartbeat"] * 3


def test_entering_and_leaving_are_one_request_each(
    counted: LockClient, proxy: Proxy, key: str, first: list[str]
) -> None:
    lease = counted.acquire(key)
    counted.enter(lease, "pid-1")
    counted.leave(lease, "pid-1")

    assert proxy.whats() == [*first, "enter", "leave"]


def test_leaving_and_releasing_is_one_request(
    counted: LockClient, proxy: Proxy, key: str, first: list[str]
) -> None:
    lease = counted.enter(counted.acquire(key), "pid-1")
    counted.leave(lease, "pid-1", release=True)

    assert proxy.whats() == [*first, "enter", "release"]


def test_a_refused_acquire_is_one_request_if_the_engine_returns_the_item(
    counted: LockClient, client: LockClient, proxy: Proxy, key: str, shows_refused: bool
) -> None:
    client.acquire(key)

    assert counted.try_acquire(key) is None
    assert proxy.whats() == (["acquire"] if shows_refused else ["acquire", "GetItem"])


def test_a_free_slot_of_a_held_lock_is_acquired_with_two_requests(
    counted: LockClient, client: LockClient, proxy: Proxy, key: str, shows_refused: bool
) -> None:
    """The refusal shows that a slot is free, and the second write takes it."""
    client.acquire(key, capacity=2)

    assert counted.try_acquire(key, capacity=2)
    assert proxy.whats().count("acquire") == 2
    assert len(proxy.seen) == (2 if shows_refused else 3)


def test_a_host_clock_that_is_hours_off_costs_one_more_request_once(
    counted: LockClient, proxy: Proxy, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: right() - 3 * 3600 * 10**9)

    for _ in range(3):
        with counted.lock(key):
            pass

    assert proxy.whats().count("acquire") == 4


POLL = 0.5


@pytest.mark.proof
@pytest.mark.parametrize("engine", [DynamoDBLocal], indirect=True, ids=["dynamodb-local"])
async def test_a_thousand_coroutines_that_wait_for_fifty_locks_share_one_read_per_poll(
    proxy: Proxy, key: str
) -> None:
    async with (
        async_lock_client(proxy.endpoint_url, lease=300) as holder,
        async_lock_client(proxy.endpoint_url, sdk=SLOW) as waiters,
    ):
        held = {name: await holder.acquire(name) for name in (f"{key}-{number}" for number in range(50))}
        tasks = [
            asyncio.create_task(waiters.acquire(name, poll_interval=POLL)) for name in held for _ in range(20)
        ]
        try:
            await _until_all_wait(proxy, len(tasks))

            begun, first = time.monotonic(), len(proxy.seen)
            await asyncio.to_thread(proxy.wait_for, proxy.whats().count("BatchGetItem") + 6, "BatchGetItem")
            polls = _of_waiting(proxy, first)
            assert {request.what for request in polls} == {"BatchGetItem"}, (
                "no waiter is woken while all locks are held"
            )
            assert len(polls) <= (time.monotonic() - begun) / POLL + 1

            # Another client frees one lock. Exactly one waiter is woken: it reads the queue, acquires and dequeues.
            first = len(proxy.seen)
            assert await holder.release(held[f"{key}-17"])
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=PATIENCE)
            (granted,) = done
            assert granted.result().key == f"{key}-17"
            woken = [each.what for each in _of_waiting(proxy, first) if each.what != "BatchGetItem"]
            assert woken == ["release", "Query", "acquire", "DeleteItem"]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _until_all_wait(proxy: Proxy, waiters: int) -> None:
    """Wait until all waiters are queued, and one more poll has been sent."""
    await asyncio.to_thread(proxy.wait_for, waiters, "PutItem", within=600)
    await asyncio.to_thread(proxy.wait_for, proxy.whats().count("BatchGetItem") + 1, "BatchGetItem")


def _of_waiting(proxy: Proxy, first: int) -> list[Seen]:
    """Return the requests since the number `first`, except those for the presence of the process."""
    return [each for each in proxy.seen[first:] if not (each.key or "").startswith(WAITING_PREFIX)]


def test_threads_that_wait_in_one_process_share_the_poller(
    make_client: MakeClient, proxy: Proxy, key: str
) -> None:
    poll_interval = 0.2
    holder, waiters = make_client(lease=300), make_client(proxy, sdk=SLOW)
    held = [holder.acquire(f"{key}-{number}") for number in range(5)]
    granted: SimpleQueue[Lease] = SimpleQueue()

    def wait(name: str) -> None:
        granted.put(waiters.acquire(name, poll_interval=poll_interval, timeout=PATIENCE))

    with ThreadPoolExecutor(30) as threads:
        for lease in held * 6:
            threads.submit(wait, lease.key)
        proxy.wait_for(30, "PutItem")
        proxy.wait_for(proxy.whats().count("BatchGetItem") + 1, "BatchGetItem")

        begun, first = time.monotonic(), len(proxy.seen)
        proxy.wait_for(proxy.whats().count("BatchGetItem") + 4, "BatchGetItem")
        polls = _of_waiting(proxy, first)
        assert {request.what for request in polls} == {"BatchGetItem"}
        assert len(polls) <= (time.monotonic() - begun) / poll_interval + 1

        # Each waiter gets the lock.
        for lease in held:
            holder.release(lease)
        turns: list[Lease] = []
        while len(turns) < 30:
            turns.append(granted.get(timeout=PATIENCE))
            waiters.release(turns[-1])

    assert len({lease.lease_id for lease in turns}) == 30
