"""Waiting for a lock: until it is free, until the time is up, until nothing is seen; and for a lease's end."""

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
from deployments.patience import PATIENCE, wait_until
from deployments.proxy import Proxy, Rule
from tests.client.conftest import MakeClient

# What the engine is does not matter here: it is the clients' own waiting that is tried. `test_contract` has both.
pytestmark = pytest.mark.parametrize("engine", [MotoServer], indirect=True, ids=["moto"])

HOUR = 3_600_000  # milliseconds

#: What a busy machine may need for a handful of requests, in seconds.
SLACK = 10.0


# -- until it is free -----------------------------------------------------------------------------------------------


def test_waiters_of_one_process_get_the_lock_in_the_order_in_which_they_came(
    client: LockClient, threads: ThreadPoolExecutor, key: str
) -> None:
    held = client.acquire(key)
    order: list[int] = []
    waiters = []
    for number in range(5):
        waiting, _ = _acquire(threads, client, key, poll_interval=0.2)
        waiting.add_done_callback(lambda _, number=number: order.append(number))  # type: ignore[misc]
        wait_until(lambda so_many=number + 1: _queue(client, key) == so_many)  # type: ignore[misc]
        waiters.append(waiting)
    client.release(held)
    for waiting in waiters:
        client.release(waiting.result(PATIENCE))

    assert order == [0, 1, 2, 3, 4]


#: When the patient one wakes up, in seconds.
PATIENT = 6.0


def test_an_impatient_waiter_does_not_wait_for_the_poll_of_a_patient_one(
    client: LockClient, elsewhere: LockClient, threads: ThreadPoolExecutor, key: str
) -> None:
    for name in (key, f"{key}/other"):
        elsewhere.acquire(name)
    patient, _ = _acquire(threads, client, f"{key}/other", poll_interval=600, timeout=PATIENT)
    wait_until(lambda: _queue(client, f"{key}/other") == 1)
    time.sleep(0.1)  # the poller has fallen asleep
    impatient, _ = _acquire(threads, client, key, poll_interval=0.2)
    wait_until(lambda: _queue(client, key) == 1)
    record = elsewhere.get(key)
    assert record
    elsewhere.break_lock(key, *record.holders)

    assert impatient.result(PATIENT - 1)
    with pytest.raises(LockTimeoutError):
        patient.result(PATIENCE)


def test_a_waiter_is_told_who_holds_the_lock(client: LockClient, elsewhere: LockClient, key: str) -> None:
    elsewhere.acquire(key)
    told: list[LockRecord] = []

    with pytest.raises(LockTimeoutError):
        client.acquire(key, timeout=0.5, poll_interval=0.1, on_busy=told.append)

    assert {holder.owner for record in told for holder in record.holders.values()} == {"elsewhere"}


def test_a_waiter_is_told_about_how_long_it_may_take(
    client: LockClient, elsewhere: LockClient, threads: ThreadPoolExecutor, key: str
) -> None:
    make_usual(elsewhere, key, timedelta(hours=8))
    held = elsewhere.acquire(key)
    told = SimpleQueue[str]()

    def note(position: QueuePosition) -> None:
        told.put(position.describe())

    first, _ = _acquire(threads, elsewhere, key, poll_interval=0.1, owner="first")
    wait_until(lambda: _queue(elsewhere, key) == 1)
    second, _ = _acquire(threads, client, key, poll_interval=0.1, on_position=note)
    assert told.get(timeout=PATIENCE) == "2nd of 2, about 16 h, behind first"
    assert [each.expected_wait_ms for each in client.waiters(key)] == pytest.approx(
        [8 * HOUR, 16 * HOUR], abs=PATIENCE * 1000
    )
    elsewhere.release(held)
    held = first.result(PATIENCE)

    # The lease of a few seconds has made the mean an eighth smaller. A waiter that has read the record before that, and
    # the queue after it, reports the old mean.
    assert told.get(timeout=PATIENCE) in ("1st of 1, about 7 h", "1st of 1, about 8 h")
    assert [each.expected_wait_ms for each in client.waiters(key)] == pytest.approx(
        [7 * HOUR], abs=PATIENCE * 1000
    )
    elsewhere.release(held)
    assert second.result(PATIENCE)


# -- until the time is up -------------------------------------------------------------------------------------------


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
    """peers.md, 4: it was taken for the default."""
    impatient = make_client(proxy)
    held = elsewhere.acquire(key)
    with pytest.raises(LockTimeoutError):
        impatient.acquire(key, timeout=0)
    assert proxy.whats().count("acquire") == 1

    elsewhere.release(held)
    assert impatient.acquire(key, timeout=0)


# -- until nothing can be seen --------------------------------------------------------------------------------------


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
def test_a_crowd_does_not_keep_a_slow_dynamodb_busy_with_what_nobody_waits_for_any_more(
    make_client: MakeClient, proxy: Proxy, key: str
) -> None:
    client = make_client(proxy, sdk={"read_timeout": 0.2, "retries": {"total_max_attempts": 1}})

    def take_turns() -> None:
        client.release(client.acquire(key, poll_interval=0.1, timeout=60), retry_for=60)

    # Thirty requests at once take three times as long as each of them is waited for.
    with proxy.applying(Rule(lambda _: True, delay=0.02, in_turn=True)), ThreadPoolExecutor(30) as pool:
        for turn in [pool.submit(take_turns) for _ in range(30)]:
            turn.result()

    print(f"\n{len(proxy.seen)} requests")
    assert len(proxy.seen) < 20 * 30


@pytest.mark.proof
def test_nor_does_a_crowd_that_waits_without_taking(make_client: MakeClient, proxy: Proxy, key: str) -> None:
    client = make_client(proxy, sdk={"read_timeout": 0.2, "retries": {"total_max_attempts": 1}})

    with proxy.applying(Rule(lambda _: True, delay=0.02, in_turn=True)), ThreadPoolExecutor(60) as pool:
        for looks in [pool.submit(client.wait, key, poll_interval=0.1, timeout=60) for _ in range(60)]:
            assert looks.result() is None

    print(f"\n{len(proxy.seen)} requests")
    assert len(proxy.seen) < 4 * 60


def test_a_process_that_queues_again_shows_again_that_it_lives(
    engine: Engine, threads: ThreadPoolExecutor, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lock_client("sync", engine.endpoint_url) as client:
        core = client._core
        maintain, tended = Presence.maintain, list[Operation[None]]()

        def noted(presence: Presence) -> Operation[None]:
            tended.append(maintain(presence))
            return tended[-1]

        monkeypatch.setattr(Presence, "maintain", noted)

        for times in (1, 2):
            held = client.acquire(key, owner="another")
            waiting, _ = _acquire(threads, client, key)
            wait_until(lambda: key in core.poller.waiters)
            client.release(held)
            client.release(waiting.result(PATIENCE))
            for thread in threading.enumerate():
                if thread.name == "dynamo-lock queue entries":
                    thread.join(PATIENCE)
            assert len(tended) == times


def test_who_gets_into_line_while_he_waits_is_looked_after_in_his_place(client: LockClient, key: str) -> None:
    """As a set does for which others drew numbers each time that it tried at first."""
    inner: Any = getattr(client, "client", client)
    tickets, seen = inner._core.poller.waiters, []

    def waits() -> Operation[None]:
        for place in (None, "0999/1/a", "0999/1/a"):
            yield WaitForSlots(key, 1, True, 5.0, 0.01, place=place)
            seen.append([each.wants.place for each in tickets[key]])

    if inner is client:
        inner._run(waits())
    else:
        client.run(inner._run(waits()))  # type: ignore[attr-defined]

    assert seen == [[None], ["0999/1/a"], ["0999/1/a"]]
    assert key not in tickets


def test_whatever_the_poller_cannot_go_on_after_is_told_to_all_who_wait(
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


def test_an_on_place_that_fails_harms_no_waiter(
    make_client: MakeClient, elsewhere: LockClient, threads: ThreadPoolExecutor, key: str
) -> None:
    client = make_client()
    held = [elsewhere.acquire(name) for name in (f"{key}/1", f"{key}/2")]
    told = threading.Event()

    def fail(_: QueuePosition) -> None:
        told.set()
        raise ZeroDivisionError

    waiting, _ = _acquire(threads, client, f"{key}/1", poll_interval=0.1, on_position=fail)
    other, _ = _acquire(threads, client, f"{key}/2", poll_interval=0.1)
    assert told.wait(PATIENCE)
    for lease in held:
        elsewhere.release(lease)

    assert waiting.result(PATIENCE).key == f"{key}/1"
    assert other.result(PATIENCE).key == f"{key}/2"


@pytest.mark.parametrize("kind", ["sync"], indirect=True)
def test_on_place_may_use_the_client(
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


def test_a_wait_without_any_network_says_so_when_its_time_is_up(
    make_client: MakeClient, proxy: Proxy, key: str
) -> None:
    begun = time.monotonic()
    with proxy.breaking(), pytest.raises(LockUnavailableError):
        make_client(proxy).acquire(key, timeout=0.5, poll_interval=0.1)
    assert time.monotonic() - begun < 0.5 + SLACK


def test_a_black_hole_is_not_waited_for_much_longer_than_the_timeout(
    make_client: MakeClient, proxy: Proxy, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acquire, "_ANSWER_WITHIN", 0.3)
    for module in (acquire, attempt):
        monkeypatch.setattr(module, "UNDO_WITHIN", 0.4)
    client = make_client(proxy, sdk={"read_timeout": 60})
    begun = time.monotonic()
    with proxy.hanging(lambda _: True), pytest.raises(LockUnavailableError):
        client.acquire(key, timeout=0.5)
    assert time.monotonic() - begun < 0.5 + 0.4 + SLACK, "until its time is up, and then to undo"


# -- until a lease is gone ------------------------------------------------------------------------------------------


@pytest.fixture
async def keeper(proxy: Proxy) -> AsyncIterator[AsyncLockClient]:
    """An asynchronous client, which alone can watch over leases."""
    async with async_lock_client(proxy.endpoint_url) as client:
        yield client


@pytest.mark.parametrize("end", ["release", "abandon", "break"])
async def test_a_keeper_learns_of_the_end_of_its_lease_from_another_process(
    keeper: AsyncLockClient, engine: Engine, key: str, end: str, elsewhere_async: AsyncLockClient
) -> None:
    lease = await elsewhere_async.acquire(key)
    keeping = asyncio.create_task(keeper.until_gone(lease, poll_interval=0.1))
    await asyncio.sleep(0.4)
    assert not keeping.done()

    if end == "abandon":
        await elsewhere_async.enter(lease, "pid-1")
    if end == "break":
        await elsewhere_async.break_lock(key, lease.lease_id)
    else:
        await elsewhere_async.release(lease)

    await asyncio.wait_for(keeping, PATIENCE)
    record = await keeper.get(key)
    assert record
    assert [holder.draining for holder in record.holders.values()] == ([True] if end == "abandon" else [])


async def test_a_keeper_in_the_process_that_releases_asks_nobody(
    keeper: AsyncLockClient, proxy: Proxy, key: str
) -> None:
    lease = await keeper.acquire(key)
    keeping = asyncio.create_task(keeper.until_gone(lease, poll_interval=600))
    await asyncio.sleep(0)

    await keeper.release(lease)

    await asyncio.wait_for(keeping, PATIENCE)
    assert proxy.whats() == ["acquire", "release"]


async def test_a_keeper_whose_poll_may_be_stale_asks_once_more(
    keeper: AsyncLockClient, proxy: Proxy, key: str
) -> None:
    lease = await keeper.acquire(key)
    keeping = asyncio.create_task(keeper.until_gone(lease, poll_interval=600))
    await asyncio.sleep(0)
    (sight,) = keeper._core.poller.listeners[key]

    sight.gone(False)
    await asyncio.to_thread(proxy.wait_for, 1, "GetItem")

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(keeping, 0.1)


async def test_a_keeper_whose_question_is_denied_looks_again(
    keeper: AsyncLockClient, proxy: Proxy, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    lease = await keeper.acquire(key)
    keeping = asyncio.create_task(keeper.until_gone(lease, poll_interval=600))
    await asyncio.sleep(0)
    (sight,) = keeper._core.poller.listeners[key]

    with proxy.answering(lambda seen: seen.what == "GetItem", 400, "ExpiredTokenException"):
        sight.gone(False)
        await asyncio.to_thread(proxy.wait_for, 1, "GetItem")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(keeping), 0.2)
    assert "ExpiredTokenException" in caplog.text
    await keeper.release(lease)

    await asyncio.wait_for(keeping, PATIENCE)


@pytest.fixture
async def elsewhere_async(engine: Engine) -> AsyncIterator[AsyncLockClient]:
    async with async_lock_client(engine.endpoint_url) as client:
        yield client


@pytest.mark.parametrize("end", ["release", "abandon"])
async def test_a_keeper_beats_through_a_bad_network_until_its_lease_ends(
    keeper: AsyncLockClient, proxy: Proxy, elsewhere_async: AsyncLockClient, key: str, end: str
) -> None:
    lease = await elsewhere_async.acquire(key)
    keeping = asyncio.create_task(keeper.keep_for_processes(lease, interval=0.05))
    await asyncio.to_thread(proxy.wait_for, 3, "heartbeat")
    with proxy.breaking() as down:
        await asyncio.to_thread(proxy.wait_for, 6, "heartbeat")
    assert down.hits
    assert not keeping.done()

    if end == "abandon":
        await elsewhere_async.enter(lease, "pid-1")
    await elsewhere_async.release(lease)

    outcome = await asyncio.wait_for(keeping, PATIENCE)
    assert type(outcome).__name__ == ("Draining" if end == "abandon" else "Lost")


async def test_many_leases_are_watched_over_with_one_read_per_poll(
    keeper: AsyncLockClient, proxy: Proxy, key: str
) -> None:
    leases = [await keeper.acquire(f"{key}-{number}") for number in range(20)]
    keeping = [asyncio.create_task(keeper.until_gone(lease, poll_interval=0.2)) for lease in leases]
    await asyncio.to_thread(proxy.wait_for, 4, "BatchGetItem")
    assert proxy.whats()[20:] == ["BatchGetItem"] * 4

    for lease in leases:
        await keeper.release(lease)
    await asyncio.wait_for(asyncio.gather(*keeping), PATIENCE)


def _queue(client: LockClient, key: str) -> int:
    """How many wait for that lock in the client's process."""
    return len(core_of(client).poller.waiters.get(key, []))


def _acquire(
    threads: ThreadPoolExecutor, client: LockClient, key: str, **options: object
) -> tuple[Future[Lease], threading.Event]:
    """An acquire in a thread, and the moment at which it was refused first. It ends, even if the test fails."""
    options.setdefault("timeout", PATIENCE)
    refused = threading.Event()
    acquire: Callable[..., Lease] = client.acquire
    return threads.submit(acquire, key, on_busy=lambda _: refused.set(), **options), refused
