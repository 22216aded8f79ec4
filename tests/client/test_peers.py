"""Defects that were measured in other lock libraries, tried on this one. The design's list of peers numbers them.

Each has one test or more. If another file tests a case in more detail, the test here is its shortest form.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from airflow_dynamo_lock import (
    LockClient,
    LockDeadlockError,
    LockError,
    LockLostError,
    LockTimeoutError,
    LockUnavailableError,
)
from airflow_dynamo_lock.core.model.outcomes import Lost
from deployments.clients import SLOW, TABLE
from deployments.patience import PATIENCE, TooBusyError, on_time, wait_until
from deployments.proxy import Proxy
from tests.client.conftest import MakeClient

#: For a client that waits briefly for an answer, and sends each request once.
HASTY = {"read_timeout": 0.3, "retries": {"mode": "standard", "total_max_attempts": 1}}


def _holders(client: LockClient, key: str) -> list[str]:
    record = client.get(key)
    return list(record.holders) if record else []


@pytest.mark.parametrize("code", ["ThrottlingException", "AccessDeniedException", "InternalServerError"])
def test_1_a_failed_write_is_not_a_grant(make_client: MakeClient, proxy: Proxy, key: str, code: str) -> None:
    client = make_client(proxy, sdk=SLOW)
    with proxy.answering(lambda _: True, 400, code), pytest.raises(LockError):
        client.try_acquire(key)


def test_2_a_delayed_acquire_makes_no_second_holder(
    make_client: MakeClient, client: LockClient, proxy: Proxy, key: str
) -> None:
    slow = make_client(proxy, sdk=HASTY)
    with proxy.delaying("acquire"):
        with pytest.raises(LockUnavailableError):
            slow.try_acquire(key)
        lease = client.acquire(key)

    assert _holders(client, key) == [lease.lease_id]
    lease.check()


def test_2_a_delayed_release_does_not_free_the_successors_lock(
    make_client: MakeClient, client: LockClient, proxy: Proxy, key: str
) -> None:
    slow = make_client(proxy, sdk=HASTY)
    first = slow.acquire(key)
    with proxy.delaying("release"):
        assert slow.release(first), "the client sends it again, and receives an answer"
        second = client.acquire(key)

    assert _holders(client, key) == [second.lease_id]


@pytest.mark.parametrize("polls", [1, 3, 7])
def test_3_a_wait_of_any_number_of_polls_sleeps_between_them_and_ends(
    make_client: MakeClient, client: LockClient, proxy: Proxy, key: str, polls: int
) -> None:
    client.acquire(key)
    begun = time.monotonic()
    with pytest.raises(LockTimeoutError):
        make_client(proxy).acquire(key, timeout=polls * 0.1, poll_interval=0.1)

    took = time.monotonic() - begun
    assert took >= polls * 0.1
    assert proxy.whats().count("BatchGetItem") <= took / 0.1 + 1
    # The others: attempts, a ticket, the write of the queue entry, a last read, and the removal of the entry.
    assert len([each for each in proxy.whats() if each != "BatchGetItem"]) <= 8


def test_3_a_lease_has_its_whole_length_after_a_long_wait(
    client: LockClient, elsewhere: LockClient, key: str
) -> None:
    elsewhere.acquire(key, lease=0.6)  # and sends no heartbeat

    lease = client.acquire(key, timeout=PATIENCE, poll_interval=0.1, lease=30)

    assert lease.remaining() > 20


def test_3_and_6_the_ttl_is_days_after_the_lease_in_the_right_unit(client: LockClient, key: str) -> None:
    client.acquire(key)
    record = client.get(key)
    assert record
    assert record.expires_at
    assert 6.9 < (record.expires_at - time.time()) / 86_400 < 7.1


def test_4_an_exception_comes_out_of_a_with_block(client: LockClient, key: str) -> None:
    with pytest.raises(ZeroDivisionError), client.lock(key):
        raise ZeroDivisionError


def test_4_a_timeout_of_zero_does_not_wait(client: LockClient, key: str) -> None:
    client.acquire(key)
    begun = time.monotonic()
    with pytest.raises(LockTimeoutError):
        client.acquire(key, timeout=0)
    assert time.monotonic() - begun < 10


def test_4_an_error_shows_that_the_client_itself_holds_the_lock(make_client: MakeClient, key: str) -> None:
    client = make_client(owner="myself")
    lease = client.acquire(key)
    with pytest.raises(LockDeadlockError, match=r"because it holds .* itself"):
        client.acquire(key, holding=[lease])
    with pytest.raises(LockTimeoutError, match="Locked by myself"):
        client.acquire(key, timeout=0.2, poll_interval=0.1)


def test_5_an_acquire_without_an_answer_does_not_block_the_next_claimant(
    make_client: MakeClient, client: LockClient, proxy: Proxy, key: str
) -> None:
    for attempts, outcome in ((1, None), (2, "granted")):
        flaky = make_client(proxy, sdk={"retries": {"mode": "standard", "total_max_attempts": attempts}})
        with proxy.losing_replies("acquire"):
            if outcome is None:
                with pytest.raises(LockUnavailableError):
                    flaky.try_acquire(key)
            else:
                lease = flaky.try_acquire(key)
                assert lease
                flaky.release(lease)
        lease = client.try_acquire(key)
        assert lease
        client.release(lease)


def test_6_a_lost_lock_does_not_count_as_held(client: LockClient, elsewhere: LockClient, key: str) -> None:
    lease = client.acquire(key)
    elsewhere.break_lock(key, lease.lease_id)
    with pytest.raises(LockLostError):
        client.renew(lease)

    assert lease.remaining() == 0
    with pytest.raises(LockLostError):
        lease.check()


def test_6_releasing_a_lock_without_a_record_creates_none(
    client: LockClient, sdk_client: Any, key: str
) -> None:
    lease = client.acquire(key)
    item = {"key": {"S": key}, "entry": {"S": "lock"}}
    sdk_client.delete_item(TableName=TABLE, Key=item)

    assert isinstance(client.release(lease), Lost)
    assert client.get(key) is None


def test_7_a_newcomer_reclaims_a_dead_holder_in_one_attempt(
    make_client: MakeClient, elsewhere: LockClient, key: str, sends_dates: bool
) -> None:
    elsewhere.acquire(key, lease=0.3)
    time.sleep(0.3 + 1.2)  # a Date has whole seconds

    lease = make_client(max_clock_skew=0).try_acquire(key)

    assert (lease is not None) == sends_dates, "without dates, it cannot know that the holder is dead"


def test_8_a_heartbeat_applied_after_the_release_does_not_restore_the_lease(
    make_client: MakeClient, client: LockClient, proxy: Proxy, key: str
) -> None:
    slow = make_client(proxy, sdk=HASTY)
    lease = slow.acquire(key)
    with proxy.delaying("heartbeat"):
        with pytest.raises(LockUnavailableError):
            slow.renew(lease)
        assert slow.release(lease)

    assert _holders(client, key) == []
    assert client.try_acquire(key)


def test_8_keys_that_read_alike_are_two_locks(client: LockClient, key: str) -> None:
    assert client.try_acquire(f"{key}/ab/c")
    assert client.try_acquire(f"{key}/a/bc")


def test_9_a_heartbeat_that_hangs_does_not_delay_the_others(
    make_client: MakeClient, proxy: Proxy, key: str
) -> None:
    @on_time
    def _(factor: int) -> None:
        client = make_client(proxy, lease=2.0 * factor)
        hole, other = f"{key}/hole/{factor}", f"{key}/other/{factor}"
        with (
            proxy.hanging(lambda seen: seen.what == "heartbeat" and seen.key == hole),
            client.lock(other) as alive,
        ):
            hanging = client.acquire(hole)
            with client.keep_alive(hanging):
                wait_until(lambda: not hanging.remaining())
            if not alive.remaining() and factor < 64:
                raise TooBusyError
            alive.check()


def test_10_a_late_release_frees_nothing(client: LockClient, elsewhere: LockClient, key: str) -> None:
    late = client.acquire(key, lease=0.3)
    successor = elsewhere.acquire(key, timeout=PATIENCE, poll_interval=0.1)
    before = elsewhere.get(key)

    assert isinstance(client.release(late), Lost)

    after = elsewhere.get(key)
    assert before
    assert after
    assert after.holders == before.holders
    successor.check()
