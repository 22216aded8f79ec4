"""Locks in foreign formats behave like native ones, as far as the formats support it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import boto3
import pytest
from botocore.exceptions import ConnectionClosedError

from airflow_dynamo_lock import (
    LockClient,
    LockDeadlockError,
    LockLostError,
    LockNotHeldError,
    LockRecordError,
    LockTableError,
    LockTimeoutError,
    LockValueError,
    sdk_config,
)
from airflow_dynamo_lock.core.effects import Operation, Reply, Sleep
from airflow_dynamo_lock.core.model.edits import Heartbeat
from airflow_dynamo_lock.core.model.outcomes import Draining, Lost, Released
from deployments.clients import any_clock_skew
from deployments.patience import PATIENCE, TooBusyError, on_time
from tests.formats import items
from tests.formats.conftest import FOREIGN, MakeClient, Place, places


def test_a_waiter_is_granted_the_lock_after_the_release(
    client: LockClient, elsewhere: LockClient, key: str
) -> None:
    lease = client.acquire(key, timeout=0)
    assert lease.token == 0, "foreign formats have no tokens"
    assert elsewhere.try_acquire(key) is None
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(elsewhere.acquire, key, timeout=PATIENCE, poll_interval=0.05)
        with pytest.raises(LockTimeoutError, match="Locked by "):
            elsewhere.acquire(key, timeout=0)
        lease = client.renew(lease)
        assert not waiting.done()
        assert client.release(lease)
        successor = waiting.result()
    assert successor.owner == "elsewhere"
    assert not successor.took_over
    assert not client.release(lease), "another client holds the lock now"
    assert elsewhere.release(successor)
    record = elsewhere.get(key)
    assert record is None or not record.holders


@places(*(name for name in FOREIGN if name != "s3"))  # whose holders cannot have wait notes
def test_a_deadlock_ends_one_wait_and_the_error_names_both_locks(
    client: LockClient, elsewhere: LockClient, key: str
) -> None:
    held = {locks: locks.acquire(f"{key}{end}", lease=60) for locks, end in ((client, "a"), (elsewhere, "b"))}

    def nest(locks: LockClient, inner: str) -> str:
        try:
            locks.release(locks.acquire(f"{key}{inner}", timeout=PATIENCE, holding=[held[locks]]))
        except LockDeadlockError as deadlock:
            return str(deadlock)
        finally:
            locks.release(held[locks])
        return ""

    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(nest, client, "b"), pool.submit(nest, elsewhere, "a")]
        (failure,) = filter(None, (each.result() for each in ends))
    assert f"elsewhere holds '{key}b' and waits for '{key}a'" in failure


@places(engine="moto")  # whose answers have a Date
def test_the_refusal_names_the_holder(client: LockClient, elsewhere: LockClient, key: str) -> None:
    lease = elsewhere.acquire(key)
    with pytest.raises(
        LockTimeoutError, match=r"Locked by elsewhere since \d\d:\d\d UTC, last heartbeat \d s ago"
    ):
        client.acquire(key, timeout=0)
    assert lease.lease_id in [
        each for record in client.list_locks() if record.key == key for each in record.holders
    ]


def test_a_lease_lasts_only_while_heartbeats_are_sent(make_client: MakeClient, key: str) -> None:
    @on_time
    def _(factor: int) -> None:
        holder = make_client(lease=1.5 * factor, max_clock_skew=0.5)
        other = make_client(lease=1.5 * factor, max_clock_skew=0.5, owner="other")
        lease = holder.acquire(key)
        with holder.keep_alive(lease):
            try:
                early = other.acquire(key, timeout=2.5 * factor, poll_interval=0.1)
            except LockTimeoutError:
                pass
            else:
                assert lease.remaining() == 0, "the lease ran out before the reclaim"
                other.release(early)
                raise TooBusyError
            if not lease.remaining():
                raise TooBusyError
        successor = other.acquire(key, timeout=PATIENCE, poll_interval=0.1)
        assert lease.remaining() == 0, "the lease ran out before the reclaim"
        assert successor.took_over
        with pytest.raises(LockLostError):
            holder.renew(lease)


@places(engine="moto")  # whose answers have a Date
def test_a_newcomer_reclaims_a_dead_holder_in_one_attempt(make_client: MakeClient, key: str) -> None:
    lease = make_client(lease=0.2, max_clock_skew=0.1).acquire(key)
    deadline = time.monotonic() + PATIENCE
    newcomer = make_client(max_clock_skew=0.1)  # it has not observed the lock
    while time.monotonic() < deadline and (successor := newcomer.try_acquire(key)) is None:
        newcomer = make_client(max_clock_skew=0.1)
        time.sleep(0.1)
    assert successor is not None
    assert successor.took_over
    assert successor.reclaimed[0].lease_id == lease.lease_id


def test_a_heartbeat_that_arrives_twice_does_not_restore_its_version(
    place: Place, elsewhere: LockClient, key: str
) -> None:
    """An observer that saw that version long ago would take the lock from a living holder."""
    client = LockClient(place.sdk, table=place.table, table_format=place.format)
    lease, core = client.acquire(key), client._core

    def twice() -> Operation[bool]:
        record = yield from core.operations.requests.get(key)
        assert record is not None
        heartbeat = core.format.renew(
            key, lease.lease_id, lease.lease_ms, core.stamp(), Heartbeat(), record.holders[lease.lease_id]
        )
        first: Reply = yield heartbeat
        assert not first.refused
        elsewhere.renew(lease)
        second: Reply = yield heartbeat
        return second.refused

    assert client._run(twice())
    assert elsewhere.renew(lease).remaining() > 0


def test_a_release_waits_for_the_processes_inside(
    client: LockClient, elsewhere: LockClient, key: str
) -> None:
    lease = client.acquire(key)
    inside = client.enter(lease, "a process")
    assert isinstance(client.release(lease), Draining)
    with pytest.raises(LockLostError, match="being released"):
        client.enter(lease, "another")
    inside = client.renew(inside)
    assert elsewhere.try_acquire(key) is None
    client.leave(inside, "a process")
    assert elsewhere.try_acquire(key)


def test_the_last_process_can_release_as_it_leaves(
    client: LockClient, elsewhere: LockClient, key: str
) -> None:
    lease = client.acquire(key)
    insides = {name: client.enter(lease, name) for name in ("one", "other")}
    assert isinstance(client.leave(insides["one"], "one", release=True), Draining)
    assert elsewhere.try_acquire(key) is None
    assert client.leave(insides["other"], "other", release=True) == Released()
    lease = elsewhere.acquire(key, timeout=0)
    inside = client.enter(lease, "its only process")
    assert client.leave(inside, "its only process", release=True) == Released()
    assert client.try_acquire(key)


def test_a_process_outside_does_not_release_while_another_is_inside(
    client: LockClient, elsewhere: LockClient, key: str
) -> None:
    lease = client.acquire(key)
    inside = client.enter(lease, "inside")
    assert isinstance(client.leave(lease, "another", release=True), Draining)
    assert elsewhere.try_acquire(key) is None
    assert client.leave(inside, "inside")


def test_a_process_inside_does_not_shorten_the_lease(make_client: MakeClient, place: Place, key: str) -> None:
    client = make_client(lease=300.0, release_grace=1.0)
    lease = client.acquire(key)
    before = items.stored(place, key)
    inside = client.enter(lease, "a process")
    assert inside.lease_ms == 1000
    client.renew(inside)
    after = items.stored(place, key)
    for name, unit in (("expire_ts", 1), ("expiration_time", 1000)):
        if name in before:  # two estimates of server time may differ by 2 s
            assert (int(after[name]["N"]) - int(before[name]["N"])) * unit >= -2000
    if place.format == "s3":
        assert after["expire"] == before["expire"]


def test_a_heartbeat_can_extend_the_lease(client: LockClient, place: Place, key: str) -> None:
    lease = client.renew(client.acquire(key), duration=600.0)
    record = client.get(key)
    assert record
    assert record.holders[lease.lease_id].lease_ms == 600_000
    shown = items.stored(place, key)
    match place.format:
        case "amazon-lock-client":
            assert shown["leaseDuration"] == {"S": "600000"}
        case "python-dynamodb-lock":
            assert float(shown["lease_duration"]["N"]) == 600
        case "awsflock":
            assert shown["lease_duration"] == {"N": "600"}
            # The other library does not reclaim early, even if its clock is ahead.
            assert int(shown["expiration_time"]["N"]) >= time.time() + 608
        case "dyndbmutex":
            assert int(shown["expire_ts"]["N"]) >= (time.time() + 608) * 1000
            assert int(shown["ttl"]["N"]) >= time.time() + 600 + 172_700, (
                "DynamoDB does not delete the item before"
            )
        case "s3":
            assert shown["expire"] == 610
    with pytest.raises(LockValueError, match="cannot be made shorter"):
        client.renew(lease, duration=10.0)


def test_a_broken_lock_is_free(client: LockClient, elsewhere: LockClient, key: str) -> None:
    lease = client.acquire(key)
    assert elsewhere.break_lock(key, lease.lease_id).lease_id == lease.lease_id
    with pytest.raises(LockNotHeldError):
        elsewhere.break_lock(key, lease.lease_id)
    assert elsewhere.try_acquire(key)
    assert not client.release(lease)


def test_many_threads_take_turns(make_client: MakeClient, key: str) -> None:
    clients = [make_client(owner=f"client {number}", lease=5.0) for number in range(3)]
    inside, most, turns = 0, 0, 0
    counting = threading.Lock()

    def contend(client: LockClient) -> None:
        nonlocal inside, most, turns
        for _ in range(4):
            with client.lock(key, poll_interval=0.02):
                with counting:
                    inside, turns = inside + 1, turns + 1
                    most = max(most, inside)
                time.sleep(0.005)
                with counting:
                    inside -= 1

    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(contend, client) for client in clients * 2]:
            done.result(PATIENCE)
    assert (most, turns) == (1, 24)


# -- locks of the other library -------------------------------------------------------------------------------------


def test_a_lock_of_a_foreign_holder_is_not_acquired(client: LockClient, place: Place, key: str) -> None:
    items.put(place, key, item := items.held(place.format))
    with pytest.raises(LockTimeoutError, match="Locked by theirs"):
        client.acquire(key, timeout=0.3, poll_interval=0.1)
    assert items.stored(place, key) == item, "the item is unchanged"


@places("amazon-lock-client", "dyndbmutex", "s3")  # the other formats delete the item
def test_a_lock_that_a_foreign_client_released_is_free(client: LockClient, place: Place, key: str) -> None:
    items.put(place, key, items.released(place.format))
    lease = client.acquire(key, timeout=0)
    assert not lease.took_over
    assert client.release(lease)


@places("dyndbmutex", "awsflock", "s3", engine="moto")
def test_a_dead_foreign_holder_with_an_end_time_is_reclaimed_at_once(
    make_client: MakeClient, place: Place, key: str
) -> None:
    client = make_client(max_clock_skew=1.0)
    items.put(place, key, items.held(place.format, lease=60, ago=60.5))
    assert client.try_acquire(key) is None, "the lease is still valid by a clock that is behind"
    items.put(place, key, items.held(place.format, lease=60, ago=64))
    client = make_client(max_clock_skew=1.0)  # it has not observed the lock
    lease = client.acquire(key, timeout=0)
    assert lease.took_over
    assert [each.owner for each in lease.reclaimed] == ["theirs"]
    assert client.release(lease)


@places("amazon-lock-client", "python-dynamodb-lock", "awsflock", "s3")
def test_a_dead_foreign_holder_is_reclaimed_after_its_lease(
    make_client: MakeClient, place: Place, key: str
) -> None:
    client = make_client(max_clock_skew=1.0)
    items.put(place, key, items.held(place.format, lease=1))
    began = time.monotonic()
    lease = client.acquire(key, timeout=PATIENCE, poll_interval=0.1)
    assert time.monotonic() - began >= 1.0
    assert lease.took_over
    assert [each.owner for each in lease.reclaimed] == ["theirs"]
    assert client.release(lease)


def test_a_foreign_holder_that_sends_heartbeats_is_not_dead(
    make_client: MakeClient, place: Place, key: str
) -> None:
    client = make_client(max_clock_skew=0.0)

    @on_time
    def _(factor: int) -> None:
        ended = threading.Event()
        written = [time.monotonic()]

        def send_heartbeats() -> None:
            while not ended.wait(0.2):
                items.put(place, key, items.held(place.format, lease=factor))
                written.append(time.monotonic())

        items.put(place, key, items.held(place.format, lease=factor))
        sender = threading.Thread(target=send_heartbeats)
        sender.start()
        try:
            client.acquire(key, timeout=2.0 * factor, poll_interval=0.1)
        except LockTimeoutError:
            return
        finally:
            ended.set()
            sender.join()
        gaps = [later - sooner for sooner, later in pairwise([*written, time.monotonic()])]
        assert max(gaps) >= factor / 2, "the lock was reclaimed although the heartbeats were on time"
        raise TooBusyError


def test_a_foreign_client_can_overwrite_our_holder(client: LockClient, place: Place, key: str) -> None:
    """Its library allows that once our lease has run out by its own rules."""
    lease = client.acquire(key)
    items.put(place, key, item := items.held(place.format))
    assert not client.release(lease)
    with pytest.raises(LockLostError):
        client.renew(lease)
    assert items.stored(place, key) == item


def test_the_lease_of_a_foreign_holder_can_be_broken(client: LockClient, place: Place, key: str) -> None:
    items.put(place, key, items.held(place.format))
    record = client.get(key)
    assert record
    (lease_id,) = record.holders
    assert client.break_lock(key, lease_id).owner == "theirs"
    assert client.try_acquire(key)


def test_a_damaged_item_is_refused_and_left_unchanged(client: LockClient, place: Place, key: str) -> None:
    items.put(place, key, item := items.damaged(place.format))
    for call in (client.try_acquire, client.get):
        with pytest.raises(LockRecordError) as refused:
            call(key)
        assert repr(key) in str(refused.value)
        assert len(str(refused.value).splitlines()) == 1
    assert [record for record in client.list_locks() if record.key == key] == []
    assert items.stored(place, key) == item


# -- lost answers, requests, unsupported options ----------------------------------------------------------------------


class _Losing:
    """An SDK client that executes one call and loses its answer."""

    def __init__(self, sdk: Any, method: str) -> None:
        self._sdk, self._method, self.lost = sdk, method, 0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._sdk, name)

        def lose(**params: Any) -> Any:
            answer = call(**params)
            if name == self._method and not self.lost:
                self.lost += 1
                raise ConnectionClosedError(endpoint_url="there")
            return answer

        return lose


class _Overtaken:
    """An SDK client that lets a foreign client write just before each reclaim."""

    def __init__(self, sdk: Any, overtake: Callable[[], None]) -> None:
        self._sdk, self._overtake = sdk, overtake

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._sdk, name)

        def overtaken(**params: Any) -> Any:
            if "IfMatch" in params or any(
                each.startswith(":seen") for each in params.get("ExpressionAttributeValues", ())
            ):
                self._overtake()
            return call(**params)

        return overtaken


@places(engine="moto")
def test_a_heartbeat_just_before_a_reclaim_prevents_it(place: Place, key: str) -> None:
    # The holder is silent for longer than its lease before each heartbeat.
    silent = place.format in ("amazon-lock-client", "python-dynamodb-lock")
    options = {"lease": 0.3} if silent else {"lease": 1.0, "ago": 9.0}
    heartbeats: list[Any] = []

    def heartbeat() -> None:
        heartbeats.append(items.held(place.format, **options))
        items.put(place, key, heartbeats[-1])

    heartbeat()
    sdk = _Overtaken(place.sdk, heartbeat)
    with any_clock_skew():
        client = LockClient(sdk, table=place.table, table_format=place.format, max_clock_skew=1.0)
    with pytest.raises(LockTimeoutError):
        client.acquire(key, timeout=1.5 if silent else 0, poll_interval=0.1)
    assert len(heartbeats) > 1
    assert items.stored(place, key) == heartbeats[-1]


class _Counting:
    """An SDK client that counts its calls."""

    def __init__(self, sdk: Any) -> None:
        self._sdk = sdk
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self._sdk, name)


@places(engine="moto")
def test_the_requests_of_a_cycle(place: Place, key: str) -> None:
    sdk = _Counting(place.sdk)
    client = LockClient(sdk, table=place.table, table_format=place.format)
    lease = client.acquire(key, timeout=0)
    lease = client.renew(lease)
    assert client.release(lease)
    if place.format == "s3":
        change = ["get_object", "put_object"]
        assert sdk.calls == [*change, "get_object", *change, *change]
    else:
        keeps = place.format in ("amazon-lock-client", "dyndbmutex")
        release = "update_item" if keeps else "delete_item"
        assert sdk.calls == ["update_item", "update_item", release]


@pytest.mark.parametrize("what", ["acquire", "release"])
def test_a_call_succeeds_although_an_answer_is_lost(place: Place, key: str, what: str) -> None:
    make: Any = boto3.client
    sdk = make(
        place.sdk.meta.service_model.service_name,
        endpoint_url=place.engine.endpoint_url,
        config=sdk_config(retries={"total_max_attempts": 1}),
    )
    deletes = place.format in ("python-dynamodb-lock", "awsflock")
    writes = "put_object" if place.format == "s3" else "update_item"
    losing = _Losing(sdk, "delete_item" if what == "release" and deletes else writes)
    client = LockClient(losing, table=place.table, table_format=place.format)
    if what == "release":
        losing.lost = 1
    lease = client.acquire(key, timeout=10, poll_interval=0.1)
    if what == "release":
        losing.lost = 0
    lease.check()
    assert client.release(lease)
    assert losing.lost == 1
    assert LockClient(sdk, table=place.table, table_format=place.format).try_acquire(key), "no holder is left"


@pytest.mark.parametrize(
    "claim",
    [
        {"slots": 1, "capacity": 2},
        {"mode": "shared"},
        {"priority": 1},
        {"min_hold": 1.0},
        {"data": {"some": "data"}},
    ],
    ids=lambda claim: next(iter(claim)),
)
def test_an_unsupported_option_is_a_clear_error(
    client: LockClient, place: Place, key: str, claim: dict[str, Any]
) -> None:
    with pytest.raises(LockValueError, match=f"format '{place.format}'"):
        client.acquire(key, timeout=0, **claim)
    assert items.stored(place, key) is None


def test_sets_queues_and_capacities_are_not_supported(client: LockClient, place: Place, key: str) -> None:
    for call in (
        lambda: client.acquire([key, "another"], timeout=0),
        lambda: client.waiters(key),
        lambda: client.set_capacity(key, 3),
    ):
        with pytest.raises(LockValueError, match=f"format '{place.format}'"):
            call()


def test_a_wait_that_times_out_leaves_the_item_unchanged(
    client: LockClient, elsewhere: LockClient, place: Place, key: str
) -> None:
    lease = elsewhere.acquire(key)
    before = items.stored(place, key)
    with pytest.raises(LockTimeoutError):
        client.acquire(key, timeout=0.2, poll_interval=0.05, lease_id="named")
    if place.kind == "async":
        client.leave_queue(key, "named")  # type: ignore[attr-defined]
    assert items.stored(place, key) == before
    assert elsewhere.release(lease)


# -- of one format only -----------------------------------------------------------------------------------------------


@places("amazon-lock-client")
def test_bytes_are_kept_with_a_lock_of_the_java_library(client: LockClient, place: Place, key: str) -> None:
    items.put(place, key, items.released(place.format))
    lease = client.acquire(key)
    record = client.get(key)
    assert record
    assert record.data == {"data": b"their data"}, "the data are kept"
    client.renew(lease, data={"data": b"ours"})
    assert items.stored(place, key)["data"] == {"B": b"ours"}
    assert items.stored(place, key)["team"] == {"S": "an attribute of their own"}
    assert client.release(lease)
    left = items.stored(place, key)
    assert (left["data"], left["isReleased"], "airflow_dynamo_lock" in left) == (
        {"B": b"ours"},
        {"S": "1"},
        False,
    )
    lease = client.acquire(key, only_existing=True)
    client.renew(lease, data={})
    assert "data" not in items.stored(place, key)
    assert client.release(lease)
    assert client.forget(key)
    assert items.stored(place, key) is None


@places("amazon-lock-client")
def test_a_foreign_update_in_place_replaces_our_holder(client: LockClient, place: Place, key: str) -> None:
    """The Java library updates in place if it is configured to keep the attributes of the item."""
    lease = client.acquire(key)
    place.sdk.update_item(
        TableName=place.table,
        Key=items.key_of(place.format, key),
        UpdateExpression="SET recordVersionNumber = :new, ownerName = :me, leaseDuration = :lease",
        ExpressionAttributeValues={":new": {"S": "v2"}, ":me": {"S": "theirs"}, ":lease": {"S": "20000"}},
    )
    record = client.get(key)
    assert record
    assert [each.owner for each in record.holders.values()] == ["theirs"]
    assert not client.release(lease)
    with pytest.raises(LockLostError):
        client.renew(lease)


@places("python-dynamodb-lock")
def test_a_key_consists_of_a_partition_key_and_a_sort_key(
    client: LockClient, make_client: MakeClient, place: Place, key: str
) -> None:
    lease, other = client.acquire("ab::c", timeout=0), client.acquire("a::bc", timeout=0)
    assert place.sdk.get_item(TableName=place.table, Key={"lock_key": {"S": "ab"}, "sort_key": {"S": "c"}})[
        "Item"
    ]
    assert {"ab::c", "a::bc"} <= {record.key for record in client.list_locks()}
    for wrong in ("a::-", "::b", "a::"):
        with pytest.raises(LockValueError, match="'partition key::sort key'"):
            client.acquire(wrong)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(make_client().acquire, "ab::c", poll_interval=0.05, timeout=PATIENCE)
        client.release(lease)
        waiting.result()
    client.release(other)


@places("python-dynamodb-lock")
def test_a_partition_key_that_cannot_be_named_is_not_listed(
    client: LockClient, place: Place, key: str
) -> None:
    """``a::b`` is the partition key ``a`` and the sort key ``b``."""
    place.sdk.put_item(
        TableName=place.table,
        Item={"lock_key": {"S": f"{key}::b"}, "sort_key": {"S": "-"}, **items.held(place.format)},
    )
    assert [each.key for each in client.list_locks() if each.key.startswith(key)] == []
    assert client.release(client.acquire(f"{key}::b", timeout=0)), "this is another lock"


@places("s3")
def test_a_change_of_the_metadata_changes_the_etag(client: LockClient, place: Place, key: str) -> None:
    """Otherwise, of two processes that leave at the same moment, one would overwrite the other's write."""
    lease = client.acquire(key)
    insides = {name: client.enter(lease, name) for name in ("one", "other")}
    before = place.sdk.head_object(Bucket=place.table, Key=key)["ETag"]
    client.leave(insides["one"], "one")
    assert place.sdk.head_object(Bucket=place.table, Key=key)["ETag"] != before
    assert items.stored(place, key)["owner"], "the other library can parse the object"
    client.leave(insides["other"], "other")
    record = client.get(key)
    assert record
    assert record.holders[lease.lease_id].processes == {}


@places("s3")
def test_a_holder_that_a_foreign_client_overwrites_detects_the_loss(
    client: LockClient, elsewhere: LockClient, place: Place, key: str
) -> None:
    """A foreign client reads a free lock, takes longer than its own second, and overwrites the holder."""
    lease = client.acquire(key)
    items.put(place, key, late := items.held(place.format))  # by a client that has read the free lock
    with pytest.raises(LockLostError, match="Locked by theirs"):
        client.renew(lease)
    assert not client.release(lease)
    assert elsewhere.try_acquire(key) is None
    assert items.stored(place, key) == late, "the foreign holder remains"


def _in_the_pause(monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]) -> None:
    """Let something happen in the second between a write to S3 and the read that confirms it."""

    def pause(_: float) -> Sleep:
        action()
        return Sleep(0.0)

    monkeypatch.setattr("airflow_dynamo_lock.core.foreign.s3_requests.Sleep", pause)


@places("s3")
def test_an_acquire_that_is_overwritten_within_a_second_is_no_grant(
    make_client: MakeClient, place: Place, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A foreign client reads the lock before our write, and overwrites it before our client reads it again."""
    late = items.held(place.format)

    def overwrite() -> None:
        assert items.stored(place, key) is not None
        items.put(place, key, late)

    _in_the_pause(monkeypatch, overwrite)
    assert make_client().try_acquire(key) is None
    assert items.stored(place, key) == late


@places("s3")
def test_a_repeated_acquire_reads_the_lock_again(
    make_client: MakeClient, place: Place, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second triggerer may repeat it while a foreign client that has read the free lock is about to write."""
    lease = make_client().acquire(key, lease_id="the same")
    before = place.sdk.head_object(Bucket=place.table, Key=key)["ETag"]

    def overwrite() -> None:
        assert place.sdk.head_object(Bucket=place.table, Key=key)["ETag"] != before
        items.put(place, key, items.held(place.format))

    _in_the_pause(monkeypatch, overwrite)
    assert make_client().try_acquire(key, lease_id=lease.lease_id) is None


@places("s3")
def test_other_objects_in_the_bucket_are_ignored(client: LockClient, place: Place, key: str) -> None:
    lease = client.acquire(key)
    for name, body in ((f"{key}/text", b"no JSON"), (f"{key}/json", b"[1]"), (f"{key}/large", b" " * 9000)):
        place.sdk.put_object(Bucket=place.table, Key=name, Body=body)
    damaged: list[LockRecordError] = []
    assert [each.key for each in client.list_locks(key, on_damaged=damaged.append)] == [key]
    assert not damaged
    items.put(place, f"{key}/lock", items.held("s3") | {"expire": "soon"})
    assert [each.key for each in client.list_locks(key, on_damaged=damaged.append)] == [key]
    assert f"{key}/lock" in str(damaged)
    client.release(lease)


@places("awsflock", "s3")
def test_a_foreign_lease_can_be_neither_renewed_nor_released(
    client: LockClient, place: Place, key: str
) -> None:
    items.put(place, key, held := items.held(place.format))
    record = client.get(key)
    assert record
    (lease_id,) = record.holders
    lease = client.find(key, lease_id)
    assert isinstance(client.release(lease), Lost)
    with pytest.raises(LockLostError):
        client.renew(client.find(key, lease_id))
    assert items.stored(place, key) == held


@places("dyndbmutex", "amazon-lock-client")
def test_a_lock_with_an_endless_lease_is_held(client: LockClient, place: Place, key: str) -> None:
    for_ever = {
        "dyndbmutex": {"expire_ts": {"N": str(2**63 + int(time.time()))}},
        "amazon-lock-client": {"leaseDuration": {"S": str(2**63 - 1)}},
    }
    items.put(place, key, items.held(place.format) | for_ever[place.format])
    with pytest.raises(LockTimeoutError, match="Locked by theirs"):
        client.acquire(key, timeout=0)
    assert client.break_lock(key, "theirs")
    assert client.release(client.acquire(key, timeout=0))


@places("amazon-lock-client")
def test_a_table_with_ttl_on_an_unknown_attribute_is_refused(client: LockClient, place: Place) -> None:
    client.check_table()
    specification = {"Enabled": True, "AttributeName": "expires"}
    place.sdk.update_time_to_live(TableName=place.table, TimeToLiveSpecification=specification)
    try:
        with pytest.raises(
            LockTableError, match="by the attribute 'expires', which this package does not renew"
        ):
            client.check_table()
    finally:
        specification["Enabled"] = False
        place.sdk.update_time_to_live(TableName=place.table, TimeToLiveSpecification=specification)
