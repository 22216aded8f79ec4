"""Waiting for a lock: until it is free, until the timeout, while DynamoDB fails; and waiting for the end of a lease."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import pytest

from airflow_dynamo_lock import (
    AsyncLockClient,
    Lease,
    LockAccessError,
    LockClient,
    LockRecord,
    LockTimeoutError,
    LockUnavailableError,
)
from airflow_dynamo_lock.core.effects import Operation, WaitForSlots
from airflow_dynamo_lock.core.lock import acquire, attempt
from airflow_dynamo_lock.core.lock.presence import Presence
from airflow_dynamo_lock.core.model.record import QueuePosition
from deployments.clients import async_lock_client, core_of, lock_client
from deployments.engines import Engine, MotoServer
from deployments.hold_times import make_usual
from deployments.patience import PATIENCE, until, wait_until
from deployments.proxy import Proxy, Rule
from tests.client.conftest import MakeClient

# One engine is enough: these tests try how the clients wait. `test_contract` waits on both.
pytestmark = pytest.mark.parametrize("engine", [MotoServer], indirect=True, ids=["moto"])

HOUR = 3_600_000  # milliseconds

#: Seconds that a busy machine may need for a few requests.
SLACK = 10.0


# -- until it is free -----------------------------------------------------------------------------------------------


def test_waiters_of_one_process_are_granted_the_lock_in_arrival_order(
    client: LockClient, threads: ThreadPoolExecutor, key: str
) -> None:
    held = client.acquire(key)
    order: list[int] = []
    waiters = []
    for number in range(5):
        waiting, _ = _acquire(threads, client, key, poll_interval=0.2)
        waiting.add_done_callback(lambda _, number=number: order.append(number))  # type: ignore[misc]
        wait_until(lambda count=number + 1: _queue(client, key) == count)  # type: ignore[misc]
        waiters.append(waiting)
    client.release(held)
    for waiting in waiters:
        client.release(waiting.result(PATIENCE))

    assert order == [0, 1, 2, 3, 4]


#: Timeout of the patient waiter, in seconds.
PATIENT = 6.0


def test_an_impatient_waiter_does_not_wait_for_the_poll_of_a_patient_one(
    client: LockClient, elsewhere: LockClient, threads: ThreadPoolExecutor, key: str
) -> None:
    for name in (key, f"{key}/other"):
        elsewhere.acquire(name)
    patient, _ = _acquire(threads, client, f"{key}/other", poll_interval=600, timeout=PATIENT)
    wait_until(lambda: _queue(client, f"{key}/other") == 1)
    time.sleep(0.1)  # until the poller sleeps
    impatient, _ = _acquire(threads, client, key, poll_interval=0.2)
    wait_until(lambda: _queue(client, key) == 1)
    record = elsewhere.get(key)
    assert record
    elsewhere.break_lock(key, *record.holders)

    assert impatient.result(PATIENT - 1)
    with pytest.raises(LockTimeoutError):
        patient.result(PATIENCE)


def test_on_busy_receives_the_holder(client: LockClient, elsewhere: LockClient, key: str) -> None:
    elsewhere.acquire(key)
    records: list[LockRecord] = []

    with pytest.raises(LockTimeoutError):
        client.acquire(key, timeout=0.5, poll_interval=0.1, on_busy=records.append)

    assert {holder.owner for record in records for holder in record.holders.values()} == {"elsewhere"}


def test_a_waiter_receives_its_expected_wait(
    client: LockClient, elsewhere: LockClient, threads: ThreadPoolExecutor, key: str
) -> None:
    make_usual(elsewhere, key, timedelta(hours=8))
    held = elsewhere.acquire(key)
    positions = SimpleQueue[str]()

    def report(position: QueuePosition) -> None:
        positions.put(position.describe())

    first, _ = _acquire(threads, elsewhere, key, poll_interval=0.1, owner="first")
    wait_until(lambda: _queue(elsewhere, key) == 1)
    second, _ = _acquire(threads, client, key, poll_interval=0.1, on_position=report)
    assert positions.get(timeout=PATIENCE) == "2nd of 2, about 16 h, behind first"
    assert [each.expected_wait_ms for each in client.waiters(key)] == pytest.approx(
        [8 * HOUR, 16 * HOUR], abs=PATIENCE * 1000
    )
    elsewhere.release(held)
    held = first.result(PATIENCE)

    # The lease of a few seconds has made the mean an eighth smaller. A waiter that has read the record before that, and
    # the queue after it, reports the old mean.
    assert positions.get(timeout=PATIENCE) in ("1st of 1, about 7 h", "1st of 1, about 8 h")
    assert [each.expected_wait_ms for each in client.waiters(key)] == pytest.approx(
        [7 * HOUR], abs=PATIENCE * 1000
    )
    elsewhere.release(held)
    assert second.result(PATIENCE)


# -- until the timeout ----------------------------------------------------------------------------------------------


def test_waiting_past_the_timeout_is_an_error_that_names_the_holder(
    client: LockClient, elsewhere: LockClient, key: str
) -> None:
    timeout = 0.5
    elsewhere.acquire(key)
    begun = time.monotonic()

    with pytest.raises(
        LockTimeoutError, match=f"not free within {timeout:g} s. Locked by elsewhere since"
    ) as late:
        client.acquire(key, timeout=timeout, poll_interval=0.2)

    assert timeout <= time.monotonic() - begun < timeout + SLACK
    assert late.value.record
    assert isinstance(late.value, TimeoutError)


def test_a_timeout_of_zero_tries_once_and_does_not_wait(
    make_client: MakeClient, elsewhere: LockClient, proxy: Proxy, key: str
) -> None:
    """Another library uses its default timeout instead (test_peers.py, 4)."""
    impatient = make_client(proxy)
    held = elsewhere.acquire(key)
    with pytest.raises(LockTimeoutError):
        impatient.acquire(key, timeout=0)
    assert proxy.whats().count("acquire") == 1

    elsewhere.release(held)
    assert impatient.acquire(key, timeout=0)


# -- while DynamoDB fails -------------------------------------------------------------------------------------------


def test_waiting_goes_on_while_dynamodb_throttles_and_ends_in_a_grant(
    make_client: MakeClient, elsewhere: LockClient, proxy: Proxy, threads: ThreadPoolExecutor, key: str
) -> None:
    held = elsewhere.acquire(key)
    waiting, _ = _acquire(threads, make_client(proxy), key, poll_interval=0.1)
    proxy.wait_for(1, "BatchGetItem")
    with proxy.answering(lambda _: True, 400, "ThrottlingException") as throttled:
        elsewhere.release(held)
        proxy.wait_for(proxy.whats().count("BatchGetItem") + 4, "BatchGetItem")
        assert not waiting.done()
    assert throttled.hits >= 4

    assert waiting.result(PATIENCE)


@pytest.mark.proof
def test_many_waiters_do_not_flood_a_slow_dynamodb(make_client: MakeClient, proxy: Proxy, key: str) -> None:
    client = make_client(proxy, sdk={"read_timeout": 0.2, "retries": {"total_max_attempts": 1}})

    def take_turns() -> None:
        client.release(client.acquire(key, poll_interval=0.1, timeout=PATIENCE), retry_for=60)

    # Thirty requests at once take three times as long as the client waits for each answer.
    with proxy.applying(Rule(lambda _: True, delay=0.02, in_turn=True)), ThreadPoolExecutor(30) as pool:
        for turn in [pool.submit(take_turns) for _ in range(30)]:
            turn.result()

    print(f"\n{len(proxy.seen)} requests")
    assert len(proxy.seen) < 20 * 30


@pytest.mark.proof
def test_many_calls_of_wait_do_not_flood_a_slow_dynamodb(
    make_client: MakeClient, proxy: Proxy, key: str
) -> None:
    client = make_client(proxy, sdk={"read_timeout": 0.2, "retries": {"total_max_attempts": 1}})

    with proxy.applying(Rule(lambda _: True, delay=0.02, in_turn=True)), ThreadPoolExecutor(60) as pool:
        for waiting in [
            pool.submit(client.wait, key, poll_interval=0.1, timeout=PATIENCE) for _ in range(60)
        ]:
            assert waiting.result() is None

    print(f"\n{len(proxy.seen)} requests")
    assert len(proxy.seen) < 4 * 60


def test_a_process_that_queues_again_starts_its_maintenance_again(
    engine: Engine, threads: ThreadPoolExecutor, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lock_client("sync", engine.endpoint_url) as client:
        core = client._core
        maintain, maintained = Presence.maintain, list[Operation[None]]()

        def recorded(presence: Presence) -> Operation[None]:
            maintained.append(maintain(presence))
            return maintained[-1]

        monkeypatch.setattr(Presence, "maintain", recorded)

        for times in (1, 2):
            held = client.acquire(key, owner="another")
            waiting, _ = _acquire(threads, client, key)
            wait_until(lambda: key in core.poller.waiters)
            client.release(held)
            client.release(waiting.result(PATIENCE))
            for thread in threading.enumerate():
                if thread.name == "dynamo-lock queue entries":
                    thread.join(PATIENCE)
            assert len(maintained) == times


def test_a_waiter_that_is_queued_while_it_waits_is_polled_by_its_position(
    client: LockClient, key: str
) -> None:
    """As for a set whose first attempts to take tickets have collided with those of other waiters."""
    inner: Any = getattr(client, "client", client)
    handles, seen = inner._core.poller.waiters, []

    def wait() -> Operation[None]:
        for place in (None, "0999/1/a", "0999/1/a"):
            yield WaitForSlots(key, 1, True, 5.0, 0.01, place=place)
            seen.append([each.wants.place for each in handles[key]])

    if inner is client:
        inner._run(wait())
    else:
        client.run(inner._run(wait()))  # type: ignore[attr-defined]

    assert seen == [[None], ["0999/1/a"], ["0999/1/a"]]
    assert key not in handles


def test_an_error_that_ends_the_poller_is_raised_in_all_waiters(
    make_client: MakeClient, elsewhere: LockClient, proxy: Proxy, threads: ThreadPoolExecutor, key: str
) -> None:
    client = make_client(proxy)
    waiters = []
    for name in (f"{key}/1", f"{key}/2"):
        elsewhere.acquire(name)
        for _ in range(2):
            waiters.append(_acquire(threads, client, name, poll_interval=0.1)[0])
    proxy.wait_for(4, "acquire")
    with proxy.answering(
        lambda seen: seen.what == "BatchGetItem", 400, "AccessDeniedException", "not for you"
    ):
        for waiting in waiters:
            with pytest.raises(LockAccessError, match="BatchGetItem"):
                waiting.result(PATIENCE)


def test_a_failing_on_position_affects_no_waiter(
    make_client: MakeClient, elsewhere: LockClient, threads: ThreadPoolExecutor, key: str
) -> None:
    client = make_client()
    held = [elsewhere.acquire(name) for name in (f"{key}/1", f"{key}/2")]
    called = threading.Event()

    def fail(_: QueuePosition) -> None:
        called.set()
        raise ZeroDivisionError

    waiting, _ = _acquire(threads, client, f"{key}/1", poll_interval=0.1, on_position=fail)
    other, _ = _acquire(threads, client, f"{key}/2", poll_interval=0.1)
    assert called.wait(PATIENCE)
    for lease in held:
        elsewhere.release(lease)

    assert waiting.result(PATIENCE).key == f"{key}/1"
    assert other.result(PATIENCE).key == f"{key}/2"


@pytest.mark.parametrize("kind", ["sync"], indirect=True)
def test_on_position_may_use_the_client(
    make_client: MakeClient, elsewhere: LockClient, threads: ThreadPoolExecutor, key: str
) -> None:
    client = make_client()
    held, mine = elsewhere.acquire(key), client.acquire(f"{key}/mine")
    freed = threading.Event()

    def release(_: QueuePosition) -> None:
        client.release(mine)
        freed.set()

    waiting, _ = _acquire(threads, client, key, poll_interval=0.1, on_position=release)
    assert freed.wait(PATIENCE)
    elsewhere.release(held)

    assert waiting.result(PATIENCE).key == key


def test_a_wait_without_a_network_fails_at_its_timeout(
    make_client: MakeClient, proxy: Proxy, key: str
) -> None:
    begun = time.monotonic()
    with proxy.breaking(), pytest.raises(LockUnavailableError):
        make_client(proxy).acquire(key, timeout=0.5, poll_interval=0.1)
    assert time.monotonic() - begun < 0.5 + SLACK


def test_a_wait_for_an_engine_that_hangs_ends_soon_after_the_timeout(
    make_client: MakeClient, proxy: Proxy, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acquire, "_ANSWER_WITHIN", 0.3)
    for module in (acquire, attempt):
        monkeypatch.setattr(module, "UNDO_WITHIN", 0.4)
    client = make_client(proxy, sdk={"read_timeout": 60})
    begun = time.monotonic()
    with proxy.hanging(lambda _: True), pytest.raises(LockUnavailableError):
        client.acquire(key, timeout=0.5)
    assert time.monotonic() - begun < 0.5 + 0.4 + SLACK, "the timeout, and the time to undo"


# -- until a lease ends ---------------------------------------------------------------------------------------------


@pytest.fixture
async def async_client(proxy: Proxy) -> AsyncIterator[AsyncLockClient]:
    """An asynchronous client behind the proxy. Only this kind of client can wait for the end of a lease."""
    async with async_lock_client(proxy.endpoint_url) as client:
        yield client


@pytest.mark.parametrize("end", ["release", "abandon", "break"])
async def test_until_gone_ends_when_another_process_ends_the_lease(
    async_client: AsyncLockClient, proxy: Proxy, key: str, end: str, elsewhere_async: AsyncLockClient
) -> None:
    lease = await elsewhere_async.acquire(key)
    begun = len(proxy.seen)
    waiting = asyncio.create_task(async_client.until_gone(lease, poll_interval=0.1))
    await until(lambda: len(proxy.seen) > begun + 2)
    assert not waiting.done()

    if end == "abandon":
        await elsewhere_async.enter(lease, "pid-1")
    if end == "break":
        await elsewhere_async.break_lock(key, lease.lease_id)
    else:
        await elsewhere_async.release(lease)

    await asyncio.wait_for(waiting, PATIENCE)
    record = await async_client.get(key)
    assert record
    assert [holder.draining for holder in record.holders.values()] == ([True] if end == "abandon" else [])


async def test_until_gone_sends_no_request_if_the_same_process_releases(
    async_client: AsyncLockClient, proxy: Proxy, key: str
) -> None:
    lease = await async_client.acquire(key)
    waiting = asyncio.create_task(async_client.until_gone(lease, poll_interval=600))
    await asyncio.sleep(0)

    await async_client.release(lease)

    await asyncio.wait_for(waiting, PATIENCE)
    assert proxy.whats() == ["acquire", "release"]


async def test_until_gone_reads_again_if_its_poll_may_be_stale(
    async_client: AsyncLockClient, proxy: Proxy, key: str
) -> None:
    lease = await async_client.acquire(key)
    waiting = asyncio.create_task(async_client.until_gone(lease, poll_interval=600))
    await asyncio.sleep(0)
    (listener,) = async_client._core.poller.listeners[key]

    listener.gone(False)
    await asyncio.to_thread(proxy.wait_for, 1, "GetItem")

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(waiting, 0.1)


async def test_until_gone_goes_on_after_a_denied_read(
    async_client: AsyncLockClient, proxy: Proxy, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    lease = await async_client.acquire(key)
    waiting = asyncio.create_task(async_client.until_gone(lease, poll_interval=600))
    await asyncio.sleep(0)
    (listener,) = async_client._core.poller.listeners[key]

    with proxy.answering(lambda seen: seen.what == "GetItem", 400, "ExpiredTokenException"):
        listener.gone(False)
        await asyncio.to_thread(proxy.wait_for, 1, "GetItem")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(waiting), 0.2)
    assert "ExpiredTokenException" in caplog.text
    await async_client.release(lease)

    await asyncio.wait_for(waiting, PATIENCE)


@pytest.fixture
async def elsewhere_async(engine: Engine) -> AsyncIterator[AsyncLockClient]:
    """An asynchronous client that stands for another process."""
    async with async_lock_client(engine.endpoint_url) as client:
        yield client


@pytest.mark.parametrize("end", ["release", "abandon"])
async def test_keep_for_processes_outlasts_a_network_failure_until_the_lease_ends(
    async_client: AsyncLockClient, proxy: Proxy, elsewhere_async: AsyncLockClient, key: str, end: str
) -> None:
    lease = await elsewhere_async.acquire(key)
    waiting = asyncio.create_task(async_client.keep_for_processes(lease, interval=0.05))
    await asyncio.to_thread(proxy.wait_for, 3, "heartbeat")
    with proxy.breaking() as down:
        await asyncio.to_thread(proxy.wait_for, 6, "heartbeat")
    assert down.hits
    assert not waiting.done()

    if end == "abandon":
        await elsewhere_async.enter(lease, "pid-1")
    await elsewhere_async.release(lease)

    outcome = await asyncio.wait_for(waiting, PATIENCE)
    assert type(outcome).__name__ == ("Draining" if end == "abandon" else "Lost")


async def test_many_calls_of_until_gone_share_one_read_per_poll(
    async_client: AsyncLockClient, proxy: Proxy, key: str
) -> None:
    leases = [await async_client.acquire(f"{key}-{number}") for number in range(20)]
    waiting = [asyncio.create_task(async_client.until_gone(lease, poll_interval=0.2)) for lease in leases]
    await asyncio.to_thread(proxy.wait_for, 4, "BatchGetItem")
    assert proxy.whats()[20:] == ["BatchGetItem"] * 4

    for lease in leases:
        await async_client.release(lease)
    await asyncio.wait_for(asyncio.gather(*waiting), PATIENCE)


def _queue(client: LockClient, key: str) -> int:
    """Return the number of waiters for the lock in the client's process."""
    return len(core_of(client).poller.waiters.get(key, []))


def _acquire(
    threads: ThreadPoolExecutor, client: LockClient, key: str, **options: object
) -> tuple[Future[Lease], threading.Event]:
    """Start an acquire in a thread. The event is set when it is refused. It ends, even if the test fails."""
    options.setdefault("timeout", PATIENCE)
    refused = threading.Event()
    acquire: Callable[..., Lease] = client.acquire
    return threads.submit(acquire, key, on_busy=lambda _: refused.set(), **options), refused
