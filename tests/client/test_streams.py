"""Quick hand-over by the table's stream, with both clients on both engines; and what happens without the stream.

Most waiters poll every 60 s here, or less often, so a quicker hand-over comes from the stream.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest

from airflow_dynamo_lock import Lease, LockClient, LockLostError, LockTableError, LockTimeoutError
from airflow_dynamo_lock.core.lock import presence
from airflow_dynamo_lock.core.wait import stream as streams
from deployments.clients import SLOW, async_lock_client, core_of
from deployments.engines import DynamoDBLocal, Engine, MotoServer
from deployments.patience import PATIENCE, TooBusyError, on_time, until, wait_until
from deployments.proxy import Proxy, Seen
from tests.client.conftest import MakeClient

pytestmark = pytest.mark.proof

POLL = 60.0
#: Seconds: well before the next poll, on a busy machine too.
SOON = 20.0
#: The requests of waiters while no lock changes.
READS = {"GetRecords", "BatchGetItem"}

# For tests where one engine is enough.
on_moto = pytest.mark.parametrize("engine", [MotoServer], indirect=True, ids=["moto"])


@pytest.fixture
def kind(engine: Engine) -> str:
    """One kind of client per engine, because each of these tests takes seconds."""
    return "sync" if isinstance(engine, MotoServer) else "async"


@pytest.fixture
def table(engine: Engine, sdk_client: Any) -> str:
    """A lock table with a stream."""
    name = f"table-{uuid4()}"
    LockClient(sdk_client, table=name).create_table(streams=True)
    return name


@pytest.fixture
def holder(make_client: MakeClient, table: str) -> LockClient:
    """A client that does not read the stream. It stands for another process."""
    return make_client(table=table, owner="holder")


@pytest.fixture
def waiter(make_client: MakeClient, proxy: Proxy, table: str) -> LockClient:
    """A client that reads the stream, through the proxy."""
    return make_client(proxy, table=table, streams=True, sdk=SLOW)


# -- hand-over ------------------------------------------------------------------------------------------------------


def test_a_lock_is_handed_over_long_before_the_next_poll(
    holder: LockClient, waiter: LockClient, threads: ThreadPoolExecutor, key: str
) -> None:
    took = []
    for _ in range(11):
        held = holder.acquire(key)
        waiting, _ = _acquire(threads, waiter, key)
        _until_stream_is_read(waiter)
        time.sleep(random.uniform(0, 0.25))  # to release at a random time between two reads
        released_at = time.monotonic()
        holder.release(held)
        lease = waiting.result(PATIENCE)
        took.append(time.monotonic() - released_at)
        waiter.release(lease)

    print(f"\nhand-over by the stream: median {statistics.median(took):.3f} s, longest {max(took):.3f} s")
    assert max(took) < SOON


def test_until_gone_ends_by_the_stream_when_the_lease_is_broken(
    holder: LockClient, engine: Engine, table: str, key: str
) -> None:
    async def wait() -> float:
        async with async_lock_client(engine.endpoint_url, table=table, streams=True) as client:
            lease = await client.acquire(key)
            waiting = asyncio.create_task(client.until_gone(lease, poll_interval=600))
            await until(lambda: client._core.poller._reported_until != -math.inf)
            await asyncio.to_thread(holder.break_lock, key, lease.lease_id)
            broken_at = time.monotonic()
            await asyncio.wait_for(waiting, PATIENCE)
            return time.monotonic() - broken_at

    assert asyncio.run(wait()) < SOON


def test_a_dead_holder_is_reclaimed_when_its_lease_has_run_out(
    holder: LockClient, waiter: LockClient, threads: ThreadPoolExecutor, key: str
) -> None:
    """A holder that dies writes nothing, so the stream shows nothing."""

    @on_time
    def _(factor: int) -> None:
        seconds, name = 1.5 * factor, f"{key}/{factor}"
        lease = holder.try_acquire(name, lease=seconds)
        assert lease
        waiting, _ = _acquire(threads, waiter, name, poll_interval=600)
        _until_stream_is_read(waiter)
        try:
            begun = time.monotonic()
            seen_last = holder.renew(lease)
        except LockLostError:
            waiter.release(waiting.result(PATIENCE))
            raise TooBusyError from None

        assert [dead.lease_id for dead in waiting.result(PATIENCE).reclaimed] == [seen_last.lease_id]
        took = time.monotonic() - begun
        print(f"\na dead holder with a lease of {seconds} s: reclaimed {took:.3f} s after its last heartbeat")
        assert seconds - 0.1 < took < seconds + SOON


# -- requests -------------------------------------------------------------------------------------------------------


def test_all_waiters_share_one_reader_and_few_polls(
    holder: LockClient,
    waiter: LockClient,
    proxy: Proxy,
    threads: ThreadPoolExecutor,
    key: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # On a slow machine, the first write of the process's presence would be counted.
    monkeypatch.setattr(presence, "_PRESENCE_AFTER", 600.0)
    keys = [f"{key}-{number}" for number in range(15)]
    held = [holder.acquire(each) for each in keys]
    waiting = [_acquire(threads, waiter, each, poll_interval=1.0)[0] for each in keys]
    _until_stream_is_read(waiter)
    # All waiters are queued, and their last requests for that were sent a while ago.
    wait_until(lambda: len(core_of(waiter).queue.own.ids) == len(keys))
    wait_until(lambda: all(seen.what in READS or seen.at < time.monotonic() - 0.5 for seen in proxy.seen))
    begun, since = len(proxy.seen), time.monotonic()
    time.sleep(4)
    asked, lasted = [seen.action for seen in proxy.seen[begun:]], time.monotonic() - since
    print(f"\nin {lasted:.1f} s of waiting: { ({action: asked.count(action) for action in set(asked)}) }")

    assert set(asked) <= READS
    assert 4 <= asked.count("GetRecords") <= lasted / 0.2
    assert asked.count("BatchGetItem") <= 1, "without the stream, there is one each second"
    for lease in held:
        holder.release(lease)
    for future in waiting:
        waiter.release(future.result(PATIENCE))


@on_moto
def test_no_request_is_sent_after_the_last_wait(
    holder: LockClient, waiter: LockClient, proxy: Proxy, threads: ThreadPoolExecutor, key: str
) -> None:
    held = holder.acquire(key)
    waiting, _ = _acquire(threads, waiter, key)
    _until_stream_is_read(waiter)
    holder.release(held)
    waiting.result(PATIENCE)
    # The stream was read every 0.25 s.
    wait_until(lambda: proxy.seen[-1].at < time.monotonic() - 1.5, "the requests end")


@on_moto
@pytest.mark.parametrize("kind", ["sync"])  # this client reads the stream in a thread
def test_the_reader_ends_with_the_last_waiter(
    holder: LockClient, waiter: LockClient, threads: ThreadPoolExecutor, key: str
) -> None:
    before = _stream_threads()
    held = holder.acquire(key)
    waiting, _ = _acquire(threads, waiter, key)
    _until_stream_is_read(waiter)
    (thread,) = _stream_threads() - before
    assert thread.daemon
    holder.release(held)
    waiting.result(PATIENCE)

    wait_until(lambda: not thread.is_alive())


# -- without a stream -----------------------------------------------------------------------------------------------


@on_moto
def test_without_a_stream_waiters_poll_and_one_warning_says_so(
    make_client: MakeClient,
    proxy: Proxy,
    threads: ThreadPoolExecutor,
    key: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    waiter, holder = make_client(proxy, streams=True, sdk=SLOW), make_client()
    for _ in range(2):
        held = holder.acquire(key)
        waiting, refused = _acquire(threads, waiter, key, poll_interval=0.2)
        assert refused.wait(PATIENCE)
        begun = len(proxy.seen)
        wait_until(lambda: len(proxy.seen) > begun + 2)  # noqa: B023 - called in this round only
        holder.release(held)
        waiter.release(waiting.result(SOON))

    assert _warnings(caplog) == [
        "Cannot read the stream of the lock table 'locks', polling instead: "
        "The lock table 'locks' has no stream, or it is disabled."
    ]
    assert "GetRecords" not in proxy.whats()


@on_moto
@pytest.mark.parametrize(
    "action", ["DescribeTable", "DescribeStream", "GetShardIterator", "GetRecords"], ids=str.lower
)
def test_without_permission_waiters_poll(
    holder: LockClient,
    waiter: LockClient,
    proxy: Proxy,
    threads: ThreadPoolExecutor,
    key: str,
    action: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    held = holder.acquire(key)
    with proxy.answering(lambda seen: seen.action == action, 400, "AccessDeniedException", "not for you"):
        waiting, _ = _acquire(threads, waiter, key, poll_interval=0.2)
        proxy.wait_for(1, action)
        proxy.wait_for(proxy.whats().count("BatchGetItem") + 4, "BatchGetItem")
        holder.release(held)
        waiter.release(waiting.result(SOON))

    (warning,) = _warnings(caplog)
    assert f"AWS does not allow {action} on the lock table" in warning
    assert core_of(waiter).table in warning


# -- failures of the stream -----------------------------------------------------------------------------------------


@on_moto
def test_waiters_poll_while_the_stream_is_denied_and_then_use_it_again(
    holder: LockClient,
    waiter: LockClient,
    proxy: Proxy,
    threads: ThreadPoolExecutor,
    key: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(streams, "_RETRY", 1.0)
    held = holder.acquire(key)
    waiting, _ = _acquire(threads, waiter, key, poll_interval=0.5)
    _until_stream_is_read(waiter)
    with proxy.answering(_of_the_stream, 400, "AccessDeniedException", "not for you") as denied:
        proxy.wait_for(1, "GetRecords")
        begun = time.monotonic()
        polls = proxy.whats().count("BatchGetItem")
        proxy.wait_for(polls + 5, "BatchGetItem")
        assert time.monotonic() - begun < 5 * 0.5 * 1.25 + SOON
        wait_until(lambda: denied.hits >= 3)
    assert len(_warnings(caplog)) == 1

    _until_stream_is_read(waiter)
    begun = time.monotonic()
    holder.release(held)
    waiter.release(waiting.result(PATIENCE))
    assert time.monotonic() - begun < SOON


@on_moto
@pytest.mark.parametrize("how", ["throttled", "broken", "expired"])
def test_failed_reads_of_the_stream_lose_no_change(
    holder: LockClient,
    waiter: LockClient,
    proxy: Proxy,
    threads: ThreadPoolExecutor,
    key: str,
    how: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    held = holder.acquire(key)
    waiting, _ = _acquire(threads, waiter, key, poll_interval=600)
    _until_stream_is_read(waiter)
    code = {"throttled": "LimitExceededException", "expired": "ExpiredIteratorException"}
    bad = proxy.breaking(_reads) if how == "broken" else proxy.answering(_reads, 400, code[how], "try later")
    with bad as rule:
        wait_until(lambda: rule.hits >= 2)
        assert not waiting.done()
        holder.release(held)
        # Each restart of the reader makes the poller read all locks, which may already end the wait.
        wait_until(lambda: rule.hits >= 3 or (how == "expired" and waiting.done()))
    begun = time.monotonic()

    waiter.release(waiting.result(PATIENCE))
    assert time.monotonic() - begun < SOON + 1
    assert _warnings(caplog) == []


def test_waiters_poll_after_the_stream_is_disabled(
    holder: LockClient,
    waiter: LockClient,
    sdk_client: Any,
    proxy: Proxy,
    table: str,
    threads: ThreadPoolExecutor,
    key: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "_CHECK", 0.5)  # moto still serves a disabled stream
    holder.acquire(key)
    waiting, _ = _acquire(threads, waiter, key, poll_interval=0.5, timeout=6)
    _until_stream_is_read(waiter)
    sdk_client.update_table(TableName=table, StreamSpecification={"StreamEnabled": False})
    wait_until(lambda: core_of(waiter).poller._reported_until == -math.inf)

    proxy.wait_for(proxy.whats().count("BatchGetItem") + 4, "BatchGetItem")
    with pytest.raises(LockTimeoutError):
        waiting.result(PATIENCE)


@pytest.mark.parametrize(
    "engine", [DynamoDBLocal], indirect=True, ids=["dynamodb-local"]
)  # moto cannot enable a stream again
def test_a_stream_that_is_enabled_again_is_read_again(
    holder: LockClient,
    waiter: LockClient,
    sdk_client: Any,
    table: str,
    threads: ThreadPoolExecutor,
    key: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(streams, "_RETRY", 0.5)
    held = holder.acquire(key)
    waiting, _ = _acquire(threads, waiter, key)
    _until_stream_is_read(waiter)
    sdk_client.update_table(TableName=table, StreamSpecification={"StreamEnabled": False})
    wait_until(lambda: len(_warnings(caplog)) == 1)
    on = {"StreamEnabled": True, "StreamViewType": "NEW_AND_OLD_IMAGES"}
    sdk_client.update_table(TableName=table, StreamSpecification=on)

    _until_stream_is_read(waiter)
    begun = time.monotonic()
    holder.release(held)
    waiter.release(waiting.result(PATIENCE))
    assert time.monotonic() - begun < SOON
    assert len(_warnings(caplog)) == 1


# -- the table ------------------------------------------------------------------------------------------------------


def test_create_table_enables_a_stream_of_keys_on_request(make_client: MakeClient, sdk_client: Any) -> None:
    for wanted in (True, False):
        locks = make_client(table=f"table-{uuid4()}")
        locks.create_table(streams=wanted)
        specification = locks.describe_table().get("StreamSpecification")
        keys_only = {"StreamEnabled": True, "StreamViewType": "KEYS_ONLY"}
        assert specification == (keys_only if wanted else None)
        locks.check_table()
        locks.create_table()


@on_moto
def test_create_table_with_a_stream_refuses_a_table_without_one(make_client: MakeClient) -> None:
    locks = make_client(table=f"table-{uuid4()}")
    locks.create_table()
    with pytest.raises(LockTableError, match="exists already, without a stream: enable one"):
        locks.create_table(streams=True)


def _reads(seen: Seen) -> bool:
    return seen.action == "GetRecords"


def _of_the_stream(seen: Seen) -> bool:
    return seen.action in streams.STREAM_ACTIONS


def _stream_threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name == "dynamo-lock stream reader"}


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings about the stream, without those about polls."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and "stream" in record.getMessage()
    ]


def _until_stream_is_read(client: LockClient) -> None:
    """Wait until the client reads the stream, and receives all changes from now on."""
    since = time.clock_gettime(time.CLOCK_BOOTTIME)
    wait_until(lambda: core_of(client).poller._reported_until > since)


def _acquire(
    threads: ThreadPoolExecutor, client: LockClient, key: str, **options: object
) -> tuple[Future[Lease], threading.Event]:
    """Start an acquire in a thread. The event is set when it is refused. It ends, even if the test fails."""
    options.setdefault("timeout", PATIENCE)
    options.setdefault("poll_interval", POLL)
    refused = threading.Event()
    acquire: Callable[..., Lease] = client.acquire
    return threads.submit(acquire, key, on_busy=lambda _: refused.set(), **options), refused
