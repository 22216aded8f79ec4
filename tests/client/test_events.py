"""The events that a program can subscribe to: one for each thing that happens to a lock, with its value."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from airflow_dynamo_lock import LockClient
from airflow_dynamo_lock.client.leases import lease_of
from airflow_dynamo_lock.core.model.claim import Claim
from airflow_dynamo_lock.core.model.errors import (
    LockDeadlockError,
    LockLostError,
    LockRemovedError,
    LockTimeoutError,
)
from airflow_dynamo_lock.core.model.lease import Term
from airflow_dynamo_lock.core.model.outcomes import Granted
from airflow_dynamo_lock.events import LockEvent, notify, subscribe, unsubscribe
from deployments.patience import wait_until
from deployments.proxy import Proxy
from proof.simulator.stepped import a_holder
from tests.client.conftest import MakeClient


@pytest.fixture
def heard() -> Iterator[list[LockEvent]]:
    events: list[LockEvent] = []
    subscribe(events.append)
    yield events
    unsubscribe(events.append)


def names(heard: list[LockEvent], key: str) -> list[str]:
    return [each.name for each in heard if each.key == key]


def value(heard: list[LockEvent], name: str) -> float:
    return next(each.value for each in heard if each.name == name)


def test_a_lock_that_is_acquired_and_released(client: LockClient, key: str, heard: list[LockEvent]) -> None:
    client.release(client.acquire(key))
    assert names(heard, key) == ["acquired", "waited", "released", "held"]
    assert 0 <= value(heard, "waited") < 60
    assert 0 <= value(heard, "held") < 60


def test_one_attempt_does_not_wait(client: LockClient, key: str, heard: list[LockEvent]) -> None:
    assert client.try_acquire(key)
    assert not client.try_acquire(key)
    assert names(heard, key) == ["acquired"]


def test_a_wait_that_takes_too_long(
    client: LockClient, elsewhere: LockClient, key: str, heard: list[LockEvent]
) -> None:
    elsewhere.acquire(key)
    with pytest.raises(LockTimeoutError):
        client.acquire(key, timeout=0)
    assert names(heard, key) == ["acquired", "waited", "timed_out"]


def test_a_wait_that_would_never_end(client: LockClient, key: str, heard: list[LockEvent]) -> None:
    with client.lock(key) as lease, pytest.raises(LockDeadlockError):
        client.acquire(key, holding=[lease])
    assert "deadlocked" in names(heard, key)


def test_the_poller_says_how_many_wait_and_a_waiter_is_removed(
    client: LockClient, elsewhere: LockClient, key: str, heard: list[LockEvent], threads: ThreadPoolExecutor
) -> None:
    elsewhere.acquire(key)
    waiting = threads.submit(client.acquire, key)
    # The pollers of other clients in this process are heard as well, so the event of this waiter need not be the first.
    wait_until(lambda: any(each.name == "waiting" and each.value == 1 for each in heard))
    wait_until(lambda: any(each.name == "poll_cpu" for each in heard))
    assert value(heard, "poll_cpu") >= 0

    (waiter,) = elsewhere.waiters(key)
    elsewhere.remove_waiter(key, waiter.lease_id)
    assert isinstance(waiting.exception(), LockRemovedError)
    assert "removed" in names(heard, key)


def test_a_lease_that_is_broken_and_lost(
    client: LockClient, elsewhere: LockClient, key: str, heard: list[LockEvent]
) -> None:
    lease = client.acquire(key)
    elsewhere.break_lock(key, lease.lease_id)
    with pytest.raises(LockLostError):
        client.renew(lease)
    client.release(lease)
    assert names(heard, key) == ["acquired", "waited", "broken", "lost"]


def test_heartbeats_that_find_the_lease_gone(
    client: LockClient, elsewhere: LockClient, key: str, heard: list[LockEvent]
) -> None:
    lease = client.acquire(key)
    elsewhere.break_lock(key, lease.lease_id)
    with client.keep_alive(lease, interval=0.05):
        wait_until(lambda: "lost" in names(heard, key))
    client.release(lease)
    assert names(heard, key) == ["acquired", "waited", "broken", "lost"]


def test_a_set_reports_each_lost_lease_once(
    client: LockClient, elsewhere: LockClient, key: str, heard: list[LockEvent]
) -> None:
    keys = [f"{key} 1", f"{key} 2"]
    leases = client.acquire(keys)
    for lease in leases:
        elsewhere.break_lock(lease.key, lease.lease_id)
    with pytest.raises(LockLostError):
        client.renew(leases)
    client.release(leases)
    assert [names(heard, each).count("lost") for each in keys] == [1, 1]


def test_a_drained_lease_that_its_last_process_releases(
    client: LockClient, key: str, heard: list[LockEvent]
) -> None:
    lease = client.acquire(key)
    inside = client.enter(lease, "process")
    client.release(lease)
    client.leave(inside, "process")
    assert names(heard, key) == ["acquired", "waited", "drained", "released", "held"]


def test_a_heartbeat_that_fails(
    make_client: MakeClient, proxy: Proxy, key: str, heard: list[LockEvent]
) -> None:
    client = make_client(proxy)
    lease = client.acquire(key)
    with proxy.breaking(), client.keep_alive(lease, interval=0.05):
        wait_until(lambda: "heartbeat_failed" in names(heard, key))


def test_a_grant_in_the_place_of_a_dead_holder(heard: list[LockEvent]) -> None:
    claim = Claim("k", "me", "me", lease_ms=30_000, grace_ms=15_000)
    lease_of(Granted(claim, 1, 0, 0.0, reclaimed=(a_holder(),)), Term(lambda: 0.0))
    assert names(heard, "k") == ["acquired", "reclaimed"]


def test_a_listener_that_fails_harms_nobody(heard: list[LockEvent], caplog: pytest.LogCaptureFixture) -> None:
    def fails(_: LockEvent) -> None:
        raise RuntimeError("no")

    unsubscribe(heard.append)
    subscribe(fails)
    subscribe(heard.append)
    subscribe(heard.append)  # once is enough
    notify("acquired", "k")
    unsubscribe(fails)
    unsubscribe(fails)

    assert names(heard, "k") == ["acquired"]
    assert "A listener failed at the event 'acquired' of the lock 'k'." in caplog.text
