"""``with client.lock(...)``: what comes out of the block, and what is left behind."""

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
    """A client whose network the test commands."""
    return make_client(proxy, sdk={"read_timeout": 0.3})


class BodyError(Exception):
    pass


@pytest.mark.parametrize(
    "failure", [BodyError("mine"), ValueError("theirs"), KeyboardInterrupt(), GeneratorExit()]
)
def test_a_with_block_lets_every_exception_out_unchanged_and_releases(
    client: LockClient, key: str, failure: BaseException
) -> None:
    """peers.md, 4: it swallowed them all."""
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


def test_a_block_that_ends_well_but_cannot_release_says_so(flaky: LockClient, proxy: Proxy, key: str) -> None:
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
    assert len(record.holders) == 1, "the successor's lock is left alone"


def test_a_block_whose_time_ran_out_raises_when_it_ends_even_if_nobody_took_the_lock(
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
async def test_a_block_that_is_cancelled_while_it_releases_leaves_no_lock_behind(
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
