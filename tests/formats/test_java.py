"""Our clients share locks with AmazonDynamoDBLockClient, modelled in `java.py`: each replaces the other."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import pytest

from airflow_dynamo_lock import LockClient, LockLostError
from deployments.patience import PATIENCE
from tests.formats import items
from tests.formats.conftest import MakeClient, Place, places
from tests.formats.java import JavaClient

pytestmark = [places("amazon-lock-client"), pytest.mark.proof]


@pytest.mark.parametrize("deletes", [True, False], ids=["deletes", "keeps"])
def test_our_waiter_is_granted_the_lock_after_a_java_release(
    client: LockClient, place: Place, key: str, deletes: bool
) -> None:
    java = JavaClient(place, deletes=deletes)
    assert java.acquire(key)
    assert client.try_acquire(key) is None
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.acquire, key, timeout=PATIENCE, poll_interval=0.05)
        for _ in range(3):
            assert java.heartbeat(key)
        assert not waiting.done()
        assert java.release(key)
        lease = waiting.result()
    assert not lease.took_over
    assert not java.heartbeat(key)
    assert not java.release(key)
    assert client.release(lease)
    assert java.acquire(key, timeout=0)


def test_our_waiter_reclaims_a_dead_java_holder(client: LockClient, place: Place, key: str) -> None:
    java = JavaClient(place, lease=1.0)
    assert java.acquire(key)
    granted = time.monotonic()
    lease = client.acquire(key, timeout=PATIENCE, poll_interval=0.05)
    assert time.monotonic() - granted >= 1.0
    assert lease.took_over
    assert not java.heartbeat(key), "the Java client detects the loss"


def test_a_java_waiter_is_granted_the_lock_after_our_release(
    make_client: MakeClient, place: Place, key: str
) -> None:
    client = make_client(lease=1.0)
    lease = client.acquire(key)
    with client.keep_alive(lease), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(JavaClient(place).acquire, key)
        time.sleep(2.5)  # longer than the Java client waits for a dead holder
        assert not waiting.done()
        lease.check()
        assert client.release(lease)
        assert waiting.result()
    assert client.try_acquire(key) is None


def test_a_java_waiter_reclaims_our_dead_holder(make_client: MakeClient, place: Place, key: str) -> None:
    client = make_client(lease=1.0)
    lease = client.acquire(key)
    begun = time.monotonic()
    assert JavaClient(place).acquire(key)
    assert time.monotonic() - begun >= 1.0
    assert lease.remaining() == 0, "our lease had run out before"
    assert not client.release(lease)
    with pytest.raises(LockLostError):
        client.renew(lease)


def test_a_java_client_does_not_reclaim_a_version_before_our_heartbeat(
    client: LockClient, place: Place, key: str
) -> None:
    lease = client.acquire(key)
    java = JavaClient(place)
    seen = java._get(key)["recordVersionNumber"]["S"]
    client.renew(lease)
    reclaim = (
        "attribute_exists(#pk) AND #version = :seen",
        {":seen": seen},
        {"#version": "recordVersionNumber"},
    )
    assert not java._put(key, *reclaim)
    assert not java._put(key, "attribute_not_exists(#pk)")
    assert java._get(key)["recordVersionNumber"]["S"] != seen
    lease.check()


def test_never_two_holders(make_client: MakeClient, place: Place, key: str) -> None:
    holds: list[tuple[float, float, str]] = []
    until = time.monotonic() + 10

    def use_java(number: int) -> None:
        java = JavaClient(replace(place), owner=f"java {number}", refresh=0.02, deletes=bool(number))
        while time.monotonic() < until:
            assert java.acquire(key)
            began = time.monotonic()
            time.sleep(0.02)
            holds.append((began, time.monotonic(), "java"))
            assert java.release(key)
            time.sleep(0.02)

    def use_ours() -> None:
        client = make_client()
        while time.monotonic() < until:
            lease = client.acquire(key, timeout=60, poll_interval=0.02)
            began = time.monotonic()
            time.sleep(0.02)
            holds.append((began, time.monotonic(), "ours"))
            assert client.release(lease)
            time.sleep(0.02)

    with ThreadPoolExecutor(4) as pool:
        for done in [
            *(pool.submit(use_java, number) for number in range(2)),
            pool.submit(use_ours),
            pool.submit(use_ours),
        ]:
            done.result()
    assert {who for _, _, who in holds} == {"java", "ours"}
    for (_, ended, one), (began, _, other) in pairwise(sorted(holds)):
        assert ended <= began, f"{one} and {other}"


def test_a_java_holder_detects_a_break_at_its_next_heartbeat(
    client: LockClient, place: Place, key: str
) -> None:
    java = JavaClient(place)
    assert java.acquire(key)
    client.break_lock(key, java.owner)
    assert not java.heartbeat(key)


def test_a_java_client_does_not_reclaim_what_was_released_meanwhile(
    client: LockClient, elsewhere: LockClient, place: Place, key: str
) -> None:
    """The Java client has observed our holder for a lease, and writes just after that holder has released.

    An update in place would leave `isReleased` in the item: the client would rely on a lock that others see as free.
    """
    lease = client.acquire(key)
    seen = items.stored(place, key)["recordVersionNumber"]
    assert client.release(lease)
    with pytest.raises(place.sdk.exceptions.ConditionalCheckFailedException):
        place.sdk.update_item(
            TableName=place.table,
            Key=items.key_of(place.format, key),
            UpdateExpression="SET recordVersionNumber = :new, ownerName = :me, leaseDuration = :lease",
            ConditionExpression="attribute_exists(#pk) AND recordVersionNumber = :seen",
            ExpressionAttributeNames={"#pk": "key"},
            ExpressionAttributeValues={
                ":new": {"S": "v2"},
                ":me": {"S": "theirs"},
                ":lease": {"S": "20000"},
                ":seen": seen,
            },
        )
    assert elsewhere.release(elsewhere.acquire(key, timeout=0))
