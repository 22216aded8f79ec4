"""``with client.lock(...)``: which exceptions leave the block, and that the lock is released."""

from __future__ import annotations

import asyncio

import pytest

from airflow_dynamo_lock import AsyncLockClient, LockClient, LockLostError, LockUnavailableError
from deployments.clients import async_lock_client
from deployments.engines import Engine
from deployments.proxy import Proxy
from tests.client.conftest import MakeClient
from tests.client.losses import Losses


@pytest.fixture
def flaky(make_client: MakeClient, proxy: Proxy) -> LockClient:
    """A client behind the proxy, so that a test can disturb its requests."""
    return make_client(proxy, sdk={"read_timeout": 0.3})


class BodyError(Exception):
    pass


@pytest.mark.parametrize(
    "failure", [BodyError("mine"), ValueError("theirs"), KeyboardInterrupt(), GeneratorExit()]
)
def test_every_exception_leaves_a_block_unchanged_and_the_lock_is_released(
    client: LockClient, key: str, failure: BaseException
) -> None:
    """Another library swallows all exceptions (test_peers.py, 4)."""
    with pytest.raises(type(failure)) as raised, client.lock(key):
        raise failure

    assert raised.value is failure
    assert client.try_acquire(key)


def test_an_exception_in_a_block_whose_lease_is_lost_comes_out_unchanged(
    client: LockClient, key: str
) -> None:
    with pytest.raises(BodyError), client.lock(key) as lease:  # noqa: PT012
        client.break_lock(key, lease.lease_id)
        raise BodyError


def test_an_exception_in_a_block_that_cannot_release_comes_out_unchanged(
    flaky: LockClient, proxy: Proxy, key: str
) -> None:
    with proxy.breaking(lambda seen: seen.what == "release"), pytest.raises(BodyError), flaky.lock(key):
        raise BodyError


def test_a_block_that_cannot_release_raises_an_error(flaky: LockClient, proxy: Proxy, key: str) -> None:
    with (
        proxy.breaking(lambda seen: seen.what == "release"),
        pytest.raises(LockUnavailableError),
        flaky.lock(key),
    ):
        pass


def test_a_block_whose_lease_was_lost_raises_when_it_ends(client: LockClient, key: str) -> None:
    with pytest.raises(LockLostError, match="lost while it was in use"), client.lock(key) as lease:  # noqa: PT012
        client.break_lock(key, lease.lease_id)
        client.acquire(key)

    record = client.get(key)
    assert record
    assert len(record.holders) == 1, "the successor still holds the lock"


def test_a_block_whose_lease_ran_out_raises_even_if_the_lock_is_free(
    flaky: LockClient, client: LockClient, proxy: Proxy, key: str
) -> None:
    lost = Losses()
    with (
        pytest.raises(LockLostError, match="in time"),
        flaky.lock(key, lease=1, on_lost=lost),
        proxy.breaking(),
    ):
        lost.one()

    assert client.try_acquire(key)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_block_that_is_cancelled_while_it_releases_frees_the_lock(
    engine: Engine, proxy: Proxy, key: str, *, fails: bool
) -> None:
    async def work(client: AsyncLockClient) -> None:
        async with client.lock(key):
            if fails:
                raise BodyError

    async with (
        async_lock_client(proxy.endpoint_url) as client,
        async_lock_client(engine.endpoint_url) as other,
    ):
        with proxy.hanging(lambda seen: seen.what == "release"):
            working = asyncio.create_task(work(client))
            await asyncio.to_thread(proxy.wait_for, 1, "release")
            working.cancel()
            await asyncio.to_thread(proxy.wait_for, 2, "release")
        with pytest.raises(asyncio.CancelledError):
            await working
        assert await other.try_acquire(key)
