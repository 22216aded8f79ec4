"""Features that users of other lock libraries expect: docs/coming-from.md."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

import pytest

from airflow_dynamo_lock import (
    Lease,
    LockClient,
    LockLostError,
    LockNotFoundError,
    LockTimeoutError,
    LockUnavailableError,
    LockValueError,
)
from deployments.clients import core_of
from deployments.patience import PATIENCE, wait_until
from deployments.proxy import Proxy, Seen
from tests.client.conftest import MakeClient
from tests.client.losses import Losses


class Dangers:
    """An `on_danger` callback that records its calls."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[tuple[Lease, float]] = SimpleQueue()

    def __call__(self, lease: Lease, left: float) -> None:
        self.calls.put((lease, left))


def _is_heartbeat(seen: Seen) -> bool:
    return seen.what == "heartbeat"


def test_a_lease_whose_heartbeats_fail_is_in_danger_before_it_is_lost(
    make_client: MakeClient, proxy: Proxy, key: str
) -> None:
    """`test_monitor.py` tests the times, on a simulated clock."""
    client = make_client(proxy, lease=6.0, heartbeat=0.3, sdk={"read_timeout": 0.2})
    dangers, losses = Dangers(), Losses()
    lease = client.acquire(key)
    with (
        client.keep_alive(lease, on_danger=dangers, safe_time=5.0, on_lost=losses),
        proxy.hanging(_is_heartbeat),
    ):
        endangered, left = dangers.calls.get(timeout=PATIENCE)
        assert endangered.lease_id == lease.lease_id
        assert left <= 5.0
        losses.one()


@pytest.mark.parametrize("wrong", [-1, 0, "soon", 27.0, float("nan")])
def test_an_impossible_safe_time_is_refused(client: LockClient, key: str, wrong: float) -> None:
    lease = client.acquire(key)
    with pytest.raises(LockValueError, match="safe_time"):
        client.keep_alive(lease, safe_time=wrong)


@pytest.mark.parametrize("callback", ["on_lost", "on_danger"])
def test_a_callback_that_is_no_function_is_refused_before_the_lock_is_acquired(
    client: LockClient, key: str, callback: str
) -> None:
    lease = client.acquire(key)
    wrong: dict[str, Any] = {callback: "x"}
    with pytest.raises(LockValueError, match=f"{callback} must be a function, not 'x'"):
        client.keep_alive(lease, **wrong)
    with (
        pytest.raises(LockValueError, match=f"{callback} must be a function"),
        client.lock(key, timeout=0, **wrong),
    ):
        pytest.fail("the block has started")


@pytest.mark.parametrize("callback", ["on_busy", "on_position", "on_lost", "on_danger"])
def test_a_coroutine_function_is_refused_as_a_callback(client: LockClient, key: str, callback: str) -> None:
    async def call(*_: object) -> None: ...

    wrong: dict[str, Any] = {callback: call}
    with (
        pytest.raises(LockValueError, match=f"{callback} must be a plain function, not the `async def`"),
        client.lock(key, timeout=0, **wrong),
    ):
        pytest.fail("the block has started")


def test_an_exception_of_on_lost_is_logged_and_the_next_lease_is_reported(
    client: LockClient, elsewhere: LockClient, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    reported: list[str] = []

    def fails(lease: Lease, lost: LockLostError) -> None:
        reported.append(lease.key)
        raise RuntimeError("no")

    keys = [f"{key}/a", f"{key}/b"]
    leases = client.acquire(keys)
    elsewhere.break_lock(keys[0], leases[keys[0]].lease_id)
    elsewhere.break_lock(keys[1], leases[keys[1]].lease_id)
    with client.keep_alive(leases, interval=0.05, on_lost=fails):
        wait_until(lambda: f"The on_lost callback of the lock '{keys[1]}' failed." in caplog.text)
    assert reported == keys


def test_a_closed_client_sends_no_heartbeats(make_client: MakeClient, client: LockClient, key: str) -> None:
    closing = make_client(lease=2.0)
    lease, other = closing.acquire(key), closing.acquire(f"{key} too")
    losses = Losses()
    closing.keep_alive(lease, on_lost=losses)
    closing.keep_alive(other)
    closing.close()
    assert client.try_acquire(key) is None, "closing does not release the lock"
    wait_until(lambda: not lease.remaining())
    losses.none()


def test_closing_with_release_frees_the_locks_with_heartbeats(
    make_client: MakeClient, client: LockClient, key: str
) -> None:
    closing = make_client()
    lease, by_hand = closing.acquire(key), closing.acquire(f"{key} by hand")
    closing.keep_alive(lease)
    closing.close(release=True)
    assert client.try_acquire(key)
    assert client.try_acquire(f"{key} by hand") is None
    with pytest.raises(LockLostError, match="released"):
        lease.check()
    assert closing.release(by_hand)


def test_closing_frees_the_other_locks_if_one_release_fails(
    make_client: MakeClient, client: LockClient, proxy: Proxy, key: str
) -> None:
    closing = make_client(proxy, lease=5.0, sdk={"read_timeout": 0.3})
    for name in (key, f"{key} too"):
        closing.keep_alive(closing.acquire(name))
    with (
        proxy.hanging(lambda seen: seen.what == "release" and seen.key == key),
        pytest.raises(LockUnavailableError),
    ):
        closing.close(release=True)
    assert client.try_acquire(key) is None
    assert client.try_acquire(f"{key} too"), "the other lease is released"


@pytest.mark.parametrize("wrong", ["soon", 60])
def test_a_block_with_an_impossible_safe_time_is_refused_before_the_lock_is_acquired(
    client: LockClient, key: str, wrong: Any
) -> None:
    with pytest.raises(LockValueError, match="safe_time"), client.lock(key, safe_time=wrong):
        pytest.fail("the block has started")
    assert client.get(key) is None


def test_only_existing_refuses_a_lock_without_a_record(
    client: LockClient, elsewhere: LockClient, key: str
) -> None:
    with pytest.raises(LockNotFoundError, match=f"There is no record of the lock '{key[:5]}"):
        client.acquire(key, only_existing=True)
    assert client.get(key) is None, "no record is created"
    with elsewhere.lock(key), pytest.raises(LockTimeoutError):
        client.acquire(key, timeout=0, only_existing=True)
    assert client.release(client.acquire(key, timeout=0, only_existing=True))


def test_a_free_lock_can_be_forgotten_and_its_tokens_go_on(
    client: LockClient, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_of(client).observer, "max_clock_skew_ms", 0)  # there is only one clock here
    assert client.forget(key), "there is no record"
    lease = client.acquire(key, data={"some": "data"})
    assert not client.forget(key)
    assert client.release(lease)
    assert client.forget(key)
    assert client.get(key) is None
    again = client.acquire(key)
    assert again.token > lease.token
    record = client.get(key)
    assert record
    assert record.data is None


def test_a_lock_with_tokens_ahead_of_server_time_is_not_forgotten(
    client: LockClient, sdk_client: object, key: str
) -> None:
    client.release(client.acquire(key))
    sdk_client.update_item(  # type: ignore[attr-defined]
        TableName="locks",
        Key={"key": {"S": key}, "entry": {"S": "lock"}},
        UpdateExpression="SET #token = :far",
        ExpressionAttributeNames={"#token": "token"},
        ExpressionAttributeValues={":far": {"N": str(10**15)}},
    )
    assert not client.forget(key)
    assert client.acquire(key).token > 10**15
