"""The events that a program can subscribe to: which ones an operation sends, and their values."""

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
def events() -> Iterator[list[LockEvent]]:
    """The events of this process, in order."""
    received: list[LockEvent] = []
    subscribe(received.append)
    yield received
    unsubscribe(received.append)


def names(events: list[LockEvent], key: str) -> list[str]:
    return [each.name for each in events if each.key == key]


def value(events: list[LockEvent], name: str) -> float:
    return next(each.value for each in events if each.name == name)


def test_acquire_and_release_send_events(client: LockClient, key: str, events: list[LockEvent]) -> None:
    client.release(client.acquire(key))
    assert names(events, key) == ["acquired", "waited", "released", "held"]
    assert 0 <= value(events, "waited") < 60
    assert 0 <= value(events, "held") < 60


def test_a_single_attempt_sends_no_wait_event(client: LockClient, key: str, events: list[LockEvent]) -> None:
    assert client.try_acquire(key)
    assert not client.try_acquire(key)
    assert names(events, key) == ["acquired"]


def test_a_wait_that_times_out_sends_an_event(
    client: LockClient, elsewhere: LockClient, key: str, events: list[LockEvent]
) -> None:
    elsewhere.acquire(key)
    with pytest.raises(LockTimeoutError):
        client.acquire(key, timeout=0)
    assert names(events, key) == ["acquired", "waited", "timed_out"]


def test_a_deadlock_sends_an_event(client: LockClient, key: str, events: list[LockEvent]) -> None:
    with client.lock(key) as lease, pytest.raises(LockDeadlockError):
        client.acquire(key, holding=[lease])
    assert "deadlocked" in names(events, key)


def test_the_poller_sends_the_number_of_waiters_and_a_removal(
    client: LockClient, elsewhere: LockClient, key: str, events: list[LockEvent], threads: ThreadPoolExecutor
) -> None:
    elsewhere.acquire(key)
    waiting = threads.submit(client.acquire, key)
    # Pollers of other clients in this process send events too, so the first one may not be that of this waiter.
    wait_until(lambda: any(each.name == "waiting" and each.value == 1 for each in events))
    wait_until(lambda: any(each.name == "poll_cpu" for each in events))
    assert value(events, "poll_cpu") >= 0

    (waiter,) = elsewhere.waiters(key)
    elsewhere.remove_waiter(key, waiter.lease_id)
    assert isinstance(waiting.exception(), LockRemovedError)
    assert "removed" in names(events, key)


def test_a_broken_lease_sends_one_lost_event(
    client: LockClient, elsewhere: LockClient, key: str, events: list[LockEvent]
) -> None:
    lease = client.acquire(key)
    elsewhere.break_lock(key, lease.lease_id)
    with pytest.raises(LockLostError):
        client.renew(lease)
    client.release(lease)
    assert names(events, key) == ["acquired", "waited", "broken", "lost"]


def test_heartbeats_that_detect_a_loss_send_one_lost_event(
    client: LockClient, elsewhere: LockClient, key: str, events: list[LockEvent]
) -> None:
    lease = client.acquire(key)
    elsewhere.break_lock(key, lease.lease_id)
    with client.keep_alive(lease, interval=0.05):
        wait_until(lambda: "lost" in names(events, key))
    client.release(lease)
    assert names(events, key) == ["acquired", "waited", "broken", "lost"]


def test_a_set_reports_each_lost_lease_once(
    client: LockClient, elsewhere: LockClient, key: str, events: list[LockEvent]
) -> None:
    keys = [f"{key} 1", f"{key} 2"]
    leases = client.acquire(keys)
    for lease in leases:
        elsewhere.break_lock(lease.key, lease.lease_id)
    with pytest.raises(LockLostError):
        client.renew(leases)
    client.release(leases)
    assert [names(events, each).count("lost") for each in keys] == [1, 1]


def test_a_drained_lease_sends_released_when_its_last_process_leaves(
    client: LockClient, key: str, events: list[LockEvent]
) -> None:
    lease = client.acquire(key)
    inside = client.enter(lease, "process")
    client.release(lease)
    client.leave(inside, "process")
    assert names(events, key) == ["acquired", "waited", "drained", "released", "held"]


def test_a_failed_heartbeat_sends_an_event(
    make_client: MakeClient, proxy: Proxy, key: str, events: list[LockEvent]
) -> None:
    client = make_client(proxy)
    lease = client.acquire(key)
    with proxy.breaking(), client.keep_alive(lease, interval=0.05):
        wait_until(lambda: "heartbeat_failed" in names(events, key))


def test_a_grant_of_a_dead_holders_slots_sends_reclaimed(events: list[LockEvent]) -> None:
    claim = Claim("k", "me", "me", lease_ms=30_000, grace_ms=15_000)
    lease_of(Granted(claim, 1, 0, 0.0, reclaimed=(a_holder(),)), Term(lambda: 0.0))
    assert names(events, "k") == ["acquired", "reclaimed"]


def test_a_failing_listener_does_not_affect_the_others(
    events: list[LockEvent], caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_: LockEvent) -> None:
        raise RuntimeError("no")

    unsubscribe(events.append)
    subscribe(fails)
    subscribe(events.append)
    subscribe(events.append)  # a second subscription has no effect
    notify("acquired", "k")
    unsubscribe(fails)
    unsubscribe(fails)

    assert names(events, "k") == ["acquired"]
    assert "A listener failed at the event 'acquired' of the lock 'k'." in caplog.text
