"""Real processes that die, or stop and resume, while they hold a lock or wait for it (R3 and R4): when their slots are
reclaimed, and when a resumed holder detects that its lease is lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from airflow_dynamo_lock import LockClient
from airflow_dynamo_lock.core.model.limits import SHARED
from deployments.clients import TABLE
from deployments.engines import Engine
from deployments.patience import PATIENCE
from tests.client.child import Child
from tests.client.conftest import MakeClient

pytestmark = pytest.mark.proof

LEASE = 1.5
SKEW = 0.5
POLL = 0.25
#: Seconds that a busy machine may need for a few requests.
SLACK = 10.0

StartChild = Callable[..., Child]


@pytest.fixture
def start_child(engine: Engine, kind: str) -> Iterator[StartChild]:
    """Starts processes, each with a client of its own. They end with the test."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(Child(kind, engine.endpoint_url, **options))


def test_a_waiter_reclaims_a_killed_holder_after_its_lease(
    start_child: StartChild, client: LockClient, key: str, record_property: Callable[[str, object], None]
) -> None:
    holder = start_child()
    held = holder.do("enter_block", key=key, lease=LEASE)
    killed = _kill_after_heartbeats(client, key, holder.kill)

    lease = client.acquire(key, timeout=PATIENCE, poll_interval=POLL, lease=LEASE)

    took = time.monotonic() - killed
    record_property("succeeded_after_seconds", round(took, 2))
    assert [dead.lease_id for dead in lease.reclaimed] == [held["lease_id"]]
    assert lease.token > held["token"]
    assert LEASE / 3 < took < LEASE + 2 * POLL + SLACK


def test_a_newcomer_reclaims_a_dead_holder_in_one_attempt_if_the_engine_sends_dates(
    start_child: StartChild, make_client: MakeClient, key: str, sends_dates: bool
) -> None:
    """The holder is new as well: it is killed before its first heartbeat."""
    holder = start_child()
    held = holder.do("take", key=key, lease=LEASE)
    killed = holder.kill()
    assert make_client(max_clock_skew=SKEW).try_acquire(key) is None, "the holder may still be alive"
    _sleep_until(killed + LEASE + SKEW + 1.1)  # a Date has whole seconds

    newcomer = make_client(max_clock_skew=SKEW)
    lease = newcomer.try_acquire(key)

    if not sends_dates:
        assert lease is None, "without dates, a newcomer must observe"
        begun = time.monotonic()
        lease = newcomer.acquire(key, timeout=PATIENCE, poll_interval=POLL)
        assert LEASE * 0.9 < time.monotonic() - begun < LEASE + 2 * POLL + SLACK
    assert lease
    assert [dead.lease_id for dead in lease.reclaimed] == [held["lease_id"]]


def test_a_holder_that_resumes_after_its_lease_detects_the_loss_and_changes_nothing(
    start_child: StartChild, client: LockClient, key: str
) -> None:
    holder = start_child()
    holder.do("enter_block", key=key, lease=LEASE)
    holder.stop()
    successor = client.acquire(key, timeout=PATIENCE, poll_interval=POLL, lease=60)
    before = client.get(key)

    holder.resume()

    assert "is lost" in holder.receive("lost"), "`on_lost` reports it"
    assert holder.do("check") == "LockLostError"
    assert holder.do("renew") == "LockLostError"
    assert holder.do("release") is False
    assert holder.do("leave_block") == "LockLostError"
    assert client.get(key) == before
    successor.check()


def test_a_holder_that_resumes_after_its_lease_detects_the_loss_of_a_free_lock(
    start_child: StartChild, client: LockClient, key: str
) -> None:
    holder = start_child()
    holder.do("enter_block", key=key, lease=1.0)
    holder.stop()
    time.sleep(1.1)

    holder.resume()

    assert "no heartbeat has succeeded in time" in holder.receive("lost")
    assert holder.do("leave_block") == "LockLostError"
    assert client.try_acquire(key), "the block releases the lock nevertheless"


def test_a_holder_stopped_for_less_than_its_lease_keeps_the_lock(
    start_child: StartChild, client: LockClient, key: str
) -> None:
    holder = start_child()
    holder.do("enter_block", key=key, lease=9.0)  # with a heartbeat every 1.5 s
    holder.stop()
    time.sleep(3.0)
    assert client.try_acquire(key) is None

    holder.resume()

    assert holder.do("check") > 0
    assert holder.do("leave_block") is None
    assert client.try_acquire(key)


def test_a_writer_clears_130_dead_readers_within_the_bound(
    client: LockClient,
    elsewhere: LockClient,
    sdk_client: Any,
    key: str,
    record_property: Callable[[str, object], None],
) -> None:
    """Each write removes a batch of them, because DynamoDB limits an expression to 4 KB."""
    reader = elsewhere.acquire(key, mode="shared", lease=LEASE)
    place = {"key": {"S": key}, "entry": {"S": "lock"}}
    item = sdk_client.get_item(TableName=TABLE, Key=place, ConsistentRead=True)["Item"]
    holder = item["holders"]["M"][reader.lease_id]
    item["holders"] = {"M": {f"dead-reader-{number:024}": holder for number in range(130)}}
    item["available"] = {"N": str(SHARED - 130)}
    sdk_client.put_item(TableName=TABLE, Item=item)
    died = time.monotonic()

    lease = client.acquire(key, timeout=PATIENCE, poll_interval=POLL, lease=LEASE)

    took = time.monotonic() - died
    record_property("succeeded_after_seconds", round(took, 2))
    record = client.get(key)
    assert record
    assert set(record.holders) == {lease.lease_id}
    assert took < LEASE + 2 * POLL + SLACK


@pytest.mark.parametrize("ending", ["kill", "stop"])
def test_a_free_lock_is_granted_if_the_first_waiter_is_dead_or_stopped(
    start_child: StartChild,
    client: LockClient,
    elsewhere: LockClient,
    key: str,
    ending: str,
    record_property: Callable[[str, object], None],
) -> None:
    holder = elsewhere.acquire(key, lease=60)
    first = start_child()
    first.send("acquire", key=key)
    first.receive("waiting")
    queued = threading.Event()
    with ThreadPoolExecutor() as threads:
        second = threads.submit(client.acquire, key, timeout=PATIENCE, on_position=lambda _: queued.set())
        assert queued.wait(PATIENCE)
        getattr(first, ending)()
        elsewhere.release(holder)
        released = time.monotonic()
        second.result()
        took = time.monotonic() - released
    record_property("taken_after_seconds", round(took, 2))
    assert 1.5 < took < 5.0 + SLACK


def test_host_clocks_hours_apart_change_nothing(engine: Engine, key: str) -> None:
    """Two locks at once. In one, the holder's clock is behind and the newcomer's ahead; in the other, the reverse."""
    with ExitStack() as stack:

        def start(kind: str, hours: int) -> Child:
            child = Child(kind, engine.endpoint_url, wall_clock_off=hours * 3600.0, max_clock_skew=SKEW)
            return stack.enter_context(child)

        locks = {
            f"{key}/behind": (start("sync", -5), start("async", 5)),
            f"{key}/ahead": (start("async", 5), start("sync", -5)),
        }
        begun = time.monotonic()
        held = {name: holder.do("enter_block", key=name, lease=LEASE) for name, (holder, _) in locks.items()}

        while time.monotonic() < begun + LEASE + SKEW + 1.5:
            for name, (_, newcomer) in locks.items():
                assert newcomer.do("take", key=name) is None, "the holder is alive, whatever the clocks show"

        killed = {}
        for name, (holder, _) in locks.items():
            assert holder.do("check") > 0
            killed[name] = holder.kill()

        for name, (_, newcomer) in locks.items():
            while (lease := newcomer.do("take", key=name)) is None:
                assert time.monotonic() < killed[name] + LEASE + SKEW + 2 + SLACK
            assert time.monotonic() > killed[name] + LEASE * 0.6
            assert lease["token"] == held[name]["token"] + 1


def _kill_after_heartbeats(client: LockClient, key: str, kill: Callable[[], float]) -> float:
    """Kill the holder after the client has read three of its versions. Returns the result of `kill`."""
    versions: set[str] = set()
    while len(versions) < 3:
        record = client.get(key)
        assert record
        versions |= {holder.version for holder in record.holders.values()}
    return kill()


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))
