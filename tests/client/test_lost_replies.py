"""The reply of a write is lost after the engine has applied it (R5), with and without the SDK's own retry: no lease is
lost or granted twice, and no client is blocked by its own lock.
"""

from __future__ import annotations

import pytest

from airflow_dynamo_lock import LockClient, LockUnavailableError
from deployments.proxy import Proxy
from tests.client.conftest import MakeClient


@pytest.fixture
def retrying(make_client: MakeClient, proxy: Proxy) -> LockClient:
    """A client whose SDK retries a request if the connection breaks, as recommended."""
    return make_client(proxy, sdk={"retries": {"mode": "standard", "total_max_attempts": 2}})


@pytest.fixture
def once(make_client: MakeClient, proxy: Proxy) -> LockClient:
    """A client whose SDK sends each request once."""
    return make_client(proxy, sdk={"retries": {"mode": "standard", "total_max_attempts": 1}})


def _holders(client: LockClient, key: str) -> list[str]:
    record = client.get(key)
    return list(record.holders) if record else []


# -- acquire --------------------------------------------------------------------------------------------------------


def test_an_acquire_that_the_sdk_sends_again_is_one_lease(
    retrying: LockClient, client: LockClient, proxy: Proxy, key: str
) -> None:
    with proxy.losing_replies("acquire") as lost:
        lease = retrying.try_acquire(key)

    assert lost.hits == 1
    assert lease
    assert lease.remaining() > 0
    assert _holders(client, key) == [lease.lease_id]
    record = client.get(key)
    assert record
    assert record.token == lease.token
    assert retrying.release(lease)
    assert client.try_acquire(key)


def test_a_client_that_gives_up_an_unanswered_acquire_undoes_it(
    once: LockClient, client: LockClient, proxy: Proxy, key: str
) -> None:
    with proxy.losing_replies("acquire"), pytest.raises(LockUnavailableError) as unavailable:
        once.try_acquire(key)

    assert unavailable.value.maybe_applied
    assert _holders(client, key) == []
    assert once.try_acquire(key), "the client's own lock does not block it"


def test_a_waiting_acquire_gets_the_lock_in_spite_of_lost_replies(
    once: LockClient, client: LockClient, proxy: Proxy, key: str
) -> None:
    with proxy.losing_replies("acquire", times=2):
        lease = once.acquire(key, timeout=20, poll_interval=0.1)

    assert _holders(client, key) == [lease.lease_id]
    assert once.release(lease)


def test_a_waiting_acquire_gets_the_lock_though_its_undo_was_lost_as_well(
    once: LockClient, client: LockClient, proxy: Proxy, key: str
) -> None:
    with proxy.losing_replies("acquire"), proxy.breaking(lambda seen: seen.what == "release") as undo:
        with pytest.raises(LockUnavailableError):
            once.try_acquire(key, lease=60)
        assert undo.hits == 1
    assert len(_holders(client, key)) == 1

    with proxy.losing_replies("acquire"), proxy.losing_replies("release"):
        lease = once.acquire(f"{key}-2", timeout=20, poll_interval=0.1)

    assert _holders(client, f"{key}-2") == [lease.lease_id]


@pytest.mark.parametrize("sdk", ["retrying", "once"])
def test_a_repeated_acquire_with_the_callers_lease_id_finds_its_lease(
    request: pytest.FixtureRequest, client: LockClient, proxy: Proxy, key: str, sdk: str
) -> None:
    """As when Airflow restarts a trigger while it acquires."""
    flaky: LockClient = request.getfixturevalue(sdk)
    with proxy.losing_replies("acquire"):
        lease = flaky.acquire(key, lease_id="ti.id", timeout=20, poll_interval=0.1)
    again = flaky.try_acquire(key, lease_id="ti.id")

    assert again
    assert again.token > lease.token
    assert _holders(client, key) == ["ti.id"]


@pytest.mark.parametrize("sdk", ["retrying", "once"])
def test_an_acquire_with_lost_replies_takes_its_slots_once(
    request: pytest.FixtureRequest, client: LockClient, proxy: Proxy, key: str, sdk: str
) -> None:
    flaky: LockClient = request.getfixturevalue(sdk)
    client.acquire(key, slots=2, capacity=5)
    with proxy.losing_replies("acquire", times=2):
        lease = flaky.acquire(key, slots=2, capacity=5, timeout=20, poll_interval=0.1)

    record = client.get(key)
    assert record
    assert record.available == 1
    assert len(record.holders) == 2
    assert flaky.release(lease)


# -- heartbeat ------------------------------------------------------------------------------------------------------


def test_a_heartbeat_that_the_sdk_sends_again_keeps_the_lease(
    retrying: LockClient, client: LockClient, proxy: Proxy, key: str
) -> None:
    lease = retrying.acquire(key)
    with proxy.losing_replies("heartbeat") as lost:
        retrying.renew(lease)

    assert lost.hits == 1
    lease.check()
    assert _holders(client, key) == [lease.lease_id]


def test_a_heartbeat_that_the_sdk_sends_once_keeps_the_lease(
    once: LockClient, client: LockClient, proxy: Proxy, key: str
) -> None:
    lease = once.acquire(key)
    with proxy.losing_replies("heartbeat"), pytest.raises(LockUnavailableError):
        once.renew(lease)

    lease.check()
    once.renew(lease)
    assert _holders(client, key) == [lease.lease_id]


def test_background_heartbeats_go_on_after_lost_replies(
    retrying: LockClient, once: LockClient, client: LockClient, proxy: Proxy, key: str
) -> None:
    with retrying.lock(f"{key}/1", lease=9) as one, once.lock(f"{key}/2", lease=9) as two:
        with proxy.losing_replies("heartbeat", times=5) as lost:
            proxy.wait_for(9, "heartbeat")
        one.check()
        two.check()
        assert client.try_acquire(f"{key}/1") is None
        assert client.try_acquire(f"{key}/2") is None

    assert lost.hits == 5
    assert _holders(client, f"{key}/1") == _holders(client, f"{key}/2") == []


# -- release --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sdk", ["retrying", "once"])
def test_a_release_whose_reply_is_lost_frees_the_lock(
    request: pytest.FixtureRequest, client: LockClient, proxy: Proxy, key: str, sdk: str
) -> None:
    flaky: LockClient = request.getfixturevalue(sdk)
    lease = flaky.acquire(key)
    with proxy.losing_replies("release") as lost:
        assert flaky.release(lease)

    assert lost.hits == 1
    assert client.try_acquire(key)


@pytest.mark.parametrize("sdk", ["retrying", "once"])
def test_a_block_whose_release_reply_is_lost_raises_nothing(
    request: pytest.FixtureRequest, client: LockClient, proxy: Proxy, key: str, sdk: str
) -> None:
    flaky: LockClient = request.getfixturevalue(sdk)
    with proxy.losing_replies("release"), flaky.lock(key):
        pass

    assert _holders(client, key) == []


@pytest.mark.parametrize("sdk", ["retrying", "once"])
def test_a_break_whose_reply_is_lost_frees_the_lock(
    request: pytest.FixtureRequest, client: LockClient, proxy: Proxy, key: str, sdk: str
) -> None:
    flaky: LockClient = request.getfixturevalue(sdk)
    lease = client.acquire(key)
    with proxy.losing_replies("release"):
        if sdk == "retrying":
            assert flaky.break_lock(key, lease.lease_id).owner == lease.owner
        else:
            with pytest.raises(LockUnavailableError):
                flaky.break_lock(key, lease.lease_id)

    assert _holders(client, key) == []
