"""Background heartbeats (R4 and R9): one lease never delays another, failures are retried until the lease's own
deadline, and `on_lost` is called in time, once.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest

from airflow_dynamo_lock import Lease, LockClient, LockLostError
from airflow_dynamo_lock.core.model.outcomes import Released
from deployments.clients import AsyncClientInThread
from deployments.engines import MotoServer
from deployments.patience import PATIENCE, wait_until
from deployments.proxy import Proxy, Seen
from tests.client.conftest import MakeClient
from tests.client.losses import Losses

# One engine is enough: these tests try the clients, and the network in front of the engine.
pytestmark = pytest.mark.parametrize("engine", [MotoServer], indirect=True, ids=["moto"])

#: Seconds. On a busy machine, one heartbeat of six must succeed in this time.
LEASE = 4.0
#: Seconds after the last successful heartbeat at which the holder gives up.
DEADLINE = LEASE * 0.9
#: Seconds that a busy machine may need for a few requests.
SLACK = 10.0


@pytest.fixture
def lost() -> Losses:
    return Losses()


@pytest.fixture
def flaky(make_client: MakeClient, proxy: Proxy) -> LockClient:
    """A client behind the proxy, so that a test can disturb its requests."""
    return make_client(proxy, lease=LEASE, sdk={"read_timeout": 0.3})


def _heartbeats(key: str) -> Callable[[Seen], bool]:
    return lambda seen: seen.what == "heartbeat" and seen.key == key


def test_a_block_longer_than_its_lease_keeps_the_lock(
    make_client: MakeClient, client: LockClient, key: str, lost: Losses
) -> None:
    with make_client(lease=LEASE).lock(key, on_lost=lost) as lease:
        end = time.monotonic() + 1.5 * LEASE
        while time.monotonic() < end:
            assert client.try_acquire(key) is None
            lease.check()
            time.sleep(0.1)

    lost.none()


def test_a_lease_whose_heartbeats_hang_does_not_delay_another(
    flaky: LockClient, proxy: Proxy, key: str, lost: Losses
) -> None:
    hole, other = f"{key}/hole", f"{key}/other"
    with flaky.lock(other) as alive, proxy.hanging(_heartbeats(hole)):
        leases = [flaky.acquire(hole, capacity=9) for _ in range(3)]
        heartbeats = [flaky.keep_alive(lease, on_lost=lost) for lease in leases]
        for _ in leases:
            lost.one()
        for each in heartbeats:
            each.stop()
        alive.check()

    sent = [seen.at for seen in proxy.seen if seen.key == other and seen.what == "heartbeat"]
    pauses = [later - earlier for earlier, later in itertools.pairwise(sent)]
    assert len(sent) >= 3
    assert max(pauses) < DEADLINE, "the failures of the other lease do not delay it"


def test_on_lost_is_called_once_at_the_deadline(flaky: LockClient, proxy: Proxy, key: str) -> None:
    """Three leases at once, each with another failure of the network."""
    dead, down, busy = f"{key}/answers nothing", f"{key}/is down", f"{key}/is throttled"
    leases, acquired = dict[str, Lease](), dict[str, float]()
    for name in (dead, down, busy):
        acquired[name] = time.monotonic()
        leases[name] = flaky.acquire(name)
    losses = {name: Losses() for name in leases}
    with ExitStack() as stack:
        failures = [
            stack.enter_context(proxy.hanging(_heartbeats(dead))),
            stack.enter_context(proxy.breaking(_heartbeats(down))),
            stack.enter_context(proxy.answering(_heartbeats(busy), 400, "ThrottlingException", "slow down")),
        ]
        for name, lease in leases.items():
            stack.enter_context(flaky.keep_alive(lease, on_lost=losses[name]))

        for name, lease in leases.items():
            at, lease_lost, error = losses[name].one()
            assert DEADLINE * 0.9 < at - acquired[name] < DEADLINE + SLACK
            assert lease_lost == lease
            assert "no heartbeat has succeeded in time" in str(error)
            assert lease.remaining() == 0
        assert min(failure.hits for failure in failures) >= 2, "the heartbeats are retried"
        time.sleep(LEASE / 3)

    for each in losses.values():
        each.none()


def test_heartbeats_resume_when_the_network_recovers_before_the_deadline(
    flaky: LockClient, client: LockClient, proxy: Proxy, key: str, lost: Losses
) -> None:
    """In another library, they never resume after one failure (test_peers.py, 4)."""
    lasts = 2 * LEASE
    with flaky.lock(key, on_lost=lost, lease=lasts) as lease:
        with proxy.breaking() as down:
            wait_until(lambda: lease.remaining() < lasts / 2 and down.hits >= 2)
        assert down.hits >= 2
        failed = len(proxy.seen)
        while len(proxy.seen) < failed + 3:
            proxy.wait_for(proxy.whats().count("heartbeat") + 1, "heartbeat")
        assert lease.remaining() > lasts / 2
        assert client.try_acquire(key) is None

    lost.none()


def test_a_broken_lease_is_detected_by_the_next_heartbeat(
    flaky: LockClient, client: LockClient, key: str, lost: Losses
) -> None:
    lease = flaky.acquire(key)
    with flaky.keep_alive(lease, interval=0.2, on_lost=lost):
        broken = time.monotonic()
        client.break_lock(key, lease.lease_id)
        at, _, error = lost.one()

    assert at - broken < 0.2 + SLACK
    assert "broken" in str(error)
    with pytest.raises(LockLostError):
        lease.check()
    lost.none(within=0.3)


def test_on_lost_is_not_called_for_a_released_lease(flaky: LockClient, key: str, lost: Losses) -> None:
    with flaky.lock(key, on_lost=lost):
        pass
    lease = flaky.acquire(key)
    heartbeats = flaky.keep_alive(lease, interval=0.1, on_lost=lost)
    heartbeats.stop()
    flaky.release(lease)

    lost.none(within=0.4)


@pytest.mark.parametrize("failure", [None, ZeroDivisionError])
def test_after_the_block_no_heartbeat_is_sent_and_on_lost_is_not_called(
    flaky: LockClient, proxy: Proxy, key: str, lost: Losses, failure: type[Exception] | None
) -> None:
    with suppress(ZeroDivisionError), flaky.lock(key, on_lost=lost):
        proxy.wait_for(1, "heartbeat")
        if failure:
            raise failure
    sent = len(proxy.seen)

    lost.none(within=LEASE / 3)
    assert len(proxy.seen) == sent


def test_a_release_with_retry_for_outlasts_a_network_failure(
    flaky: LockClient, client: LockClient, proxy: Proxy, key: str
) -> None:
    lease = flaky.acquire(key)
    with ThreadPoolExecutor(1) as pool:
        with proxy.breaking() as down:
            releasing = pool.submit(flaky.release, lease, retry_for=PATIENCE)
            proxy.wait_for(2, "release")
            assert not releasing.done()
        assert releasing.result(PATIENCE) == Released()

    assert down.hits >= 2
    assert client.try_acquire(key)


def test_heartbeats_that_cannot_be_sent_at_all_lose_the_lease_with_that_reason(
    make_client: MakeClient, key: str, lost: Losses
) -> None:
    """The SDK client is unusable, for example because it was closed. That is not an error of the network."""
    client = make_client(lease=30, heartbeat=0.2)
    lease = client.acquire(key)
    with client.keep_alive(lease, on_lost=lost):
        _make_unusable(client)
        _, _, error = lost.one()

    assert "heartbeats ended with an error" in str(error)
    assert lease.remaining() == 0


def test_a_lost_lease_cannot_be_renewed(flaky: LockClient, proxy: Proxy, key: str, lost: Losses) -> None:
    lease = flaky.acquire(key)
    with proxy.breaking(), flaky.keep_alive(lease, on_lost=lost):
        lost.one()
    sent = len(proxy.seen)

    with pytest.raises(LockLostError):
        flaky.renew(lease)
    assert len(proxy.seen) == sent


def test_a_renewed_lease_counts_from_now(client: LockClient, key: str) -> None:
    lease = client.acquire(key, lease=30)
    before = lease.remaining()
    wait_until(lambda: lease.remaining() < before - 0.1)
    before = lease.remaining()

    assert client.renew(lease) == lease
    assert lease.remaining() > before


def test_a_lease_from_another_process_can_be_renewed_and_released(
    client: LockClient, make_client: MakeClient, key: str
) -> None:
    lease = Lease.from_dict(client.acquire(key).as_dict())
    elsewhere = make_client()

    renewed = elsewhere.renew(lease)

    assert renewed.remaining() > 0
    assert elsewhere.release(renewed)
    assert client.try_acquire(key)


def _make_unusable(client: LockClient) -> None:
    def broken(**_: object) -> None:
        raise RuntimeError("Session is closed")

    inner = client.client if isinstance(client, AsyncClientInThread) else client
    inner._client.update_item = broken
