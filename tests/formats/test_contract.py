"""The lock in the formats of other libraries: what holds of ours holds of these, as far as they can."""

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
from airflow_dynamo_lock.core.model.outcomes import Draining, Lost, Released
from deployments.clients import any_clock_skew
from deployments.patience import PATIENCE, TooBusyError, on_time
from tests.formats import items
from tests.formats.conftest import FOREIGN, MakeClient, Place, places


def test_one_holds_and_the_other_waits(client: LockClient, elsewhere: LockClient, key: str) -> None:
    lease = client.acquire(key, timeout=0)
    assert lease.token == 0, "there are no tokens"
    assert elsewhere.try_acquire(key) is None
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(elsewhere.acquire, key, timeout=20, poll_interval=0.05)
        with pytest.raises(LockTimeoutError, match="Locked by "):
            elsewhere.acquire(key, timeout=0)
        lease = client.renew(lease)
        assert not waiting.done()
        assert client.release(lease)
        successor = waiting.result()
    assert successor.owner == "elsewhere"
    assert not successor.took_over
    assert not client.release(lease), "it is another's now"
    assert elsewhere.release(successor)
    record = elsewhere.get(key)
    assert record is None or not record.holders


@places(*(name for name in FOREIGN if name != "s3"))  # whose holders cannot show what they wait for
def test_of_two_that_nest_in_opposite_orders_one_ends_and_names_both(
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


@places(engine="moto")  # which tells its time
def test_the_refusal_names_the_holder(client: LockClient, elsewhere: LockClient, key: str) -> None:
    lease = elsewhere.acquire(key)
    with pytest.raises(
        LockTimeoutError, match=r"Locked by elsewhere since \d\d:\d\d UTC, last heartbeat \d s ago"
    ):
        client.acquire(key, timeout=0)
    assert lease.lease_id in [
        each for record in client.list_locks() if record.key == key for each in record.holders
    ]


def test_heartbeats_keep_it_and_silence_loses_it(make_client: MakeClient, key: str) -> None:
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
                assert lease.remaining() == 0, "the holder gave up before"
                other.release(early)
                raise TooBusyError
            if not lease.remaining():
                raise TooBusyError
        successor = other.acquire(key, timeout=PATIENCE, poll_interval=0.1)
        assert lease.remaining() == 0, "the holder gave up before"
        assert successor.took_over
        with pytest.raises(LockLostError):
            holder.renew(lease)


@places(engine="moto")  # which tells its time
def test_a_dead_holder_of_ours_is_taken_in_one_try(make_client: MakeClient, key: str) -> None:
    lease = make_client(lease=0.2, max_clock_skew=0.1).acquire(key)
    deadline = time.monotonic() + 10
    newcomer = make_client(max_clock_skew=0.1)  # it has seen nothing
    while time.monotonic() < deadline and (taken := newcomer.try_acquire(key)) is None:
        newcomer = make_client(max_clock_skew=0.1)
        time.sleep(0.1)
    assert taken is not None
    assert taken.took_over
    assert taken.reclaimed[0].lease_id == lease.lease_id


def test_a_release_waits_for_those_who_are_inside(
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


def test_a_process_that_is_not_inside_does_not_release_over_one_that_is(
    client: LockClient, elsewhere: LockClient, key: str
) -> None:
    lease = client.acquire(key)
    inside = client.enter(lease, "inside")
    assert isinstance(client.leave(lease, "another", release=True), Draining)
    assert elsewhere.try_acquire(key) is None
    assert client.leave(inside, "inside")


def test_who_is_inside_does_not_shorten_the_lease(make_client: MakeClient, place: Place, key: str) -> None:
    client = make_client(lease=300.0, release_grace=1.0)
    lease = client.acquire(key)
    before = items.stored(place, key)
    inside = client.enter(lease, "a process")
    assert inside.lease_ms == 1000
    client.renew(inside)
    after = items.stored(place, key)
    for name, unit in (("expire_ts", 1), ("expiration_time", 1000)):
        if name in before:  # to within what two estimates of the time may differ by
            assert (int(after[name]["N"]) - int(before[name]["N"])) * unit >= -2000
    if place.format == "s3":
        assert after["expire"] == before["expire"]


def test_a_longer_lease_with_one_heartbeat(client: LockClient, place: Place, key: str) -> None:
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
            # As long as their clock may be ahead, they take nothing.
            assert int(shown["expiration_time"]["N"]) >= time.time() + 608
        case "dyndbmutex":
            assert int(shown["expire_ts"]["N"]) >= (time.time() + 608) * 1000
            assert int(shown["ttl"]["N"]) >= time.time() + 600 + 172_700, "nor does DynamoDB delete it before"
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
            done.result(timeout=100)
    assert (most, turns) == (1, 24)


# -- theirs ---------------------------------------------------------------------------------------------------------


def test_a_lock_that_they_hold_is_respected(client: LockClient, place: Place, key: str) -> None:
    items.put(place, key, item := items.held(place.format))
    with pytest.raises(LockTimeoutError, match="Locked by theirs"):
        client.acquire(key, timeout=0.3, poll_interval=0.1)
    assert items.stored(place, key) == item, "nothing was changed"


@places("amazon-lock-client", "dyndbmutex", "s3")  # of the others, nothing is left then
def test_a_lock_that_they_gave_back_is_free(client: LockClient, place: Place, key: str) -> None:
    items.put(place, key, items.released(place.format))
    lease = client.acquire(key, timeout=0)
    assert not lease.took_over
    assert client.release(lease)


@places("dyndbmutex", "awsflock", "s3", engine="moto")
def test_a_dead_one_of_theirs_is_taken_at_once_where_a_time_tells(
    make_client: MakeClient, place: Place, key: str
) -> None:
    client = make_client(max_clock_skew=1.0)
    items.put(place, key, items.held(place.format, lease=60, ago=60.5))
    assert client.try_acquire(key) is None, "by a clock that is behind, it is not over"
    items.put(place, key, items.held(place.format, lease=60, ago=64))
    client = make_client(max_clock_skew=1.0)  # it has not seen the lock change
    lease = client.acquire(key, timeout=0)
    assert lease.took_over
    assert [each.owner for each in lease.reclaimed] == ["theirs"]
    assert client.release(lease)


@places("amazon-lock-client", "python-dynamodb-lock", "awsflock", "s3")
def test_a_dead_one_of_theirs_is_taken_after_its_lease(
    make_client: MakeClient, place: Place, key: str
) -> None:
    client = make_client(max_clock_skew=1.0)
    items.put(place, key, items.held(place.format, lease=1))
    began = time.monotonic()
    lease = client.acquire(key, timeout=20, poll_interval=0.1)
    assert time.monotonic() - began >= 1.0
    assert lease.took_over
    assert [each.owner for each in lease.reclaimed] == ["theirs"]
    assert client.release(lease)


def test_one_that_beats_is_not_dead(make_client: MakeClient, place: Place, key: str) -> None:
    client = make_client(max_clock_skew=0.0)

    @on_time
    def _(factor: int) -> None:
        ended = threading.Event()
        written = [time.monotonic()]

        def beat() -> None:
            while not ended.wait(0.2):
                items.put(place, key, items.held(place.format, lease=factor))
                written.append(time.monotonic())

        items.put(place, key, items.held(place.format, lease=factor))
        beating = threading.Thread(target=beat)
        beating.start()
        try:
            client.acquire(key, timeout=2.0 * factor, poll_interval=0.1)
        except LockTimeoutError:
            return
        finally:
            ended.set()
            beating.join()
        gaps = [later - sooner for sooner, later in pairwise([*written, time.monotonic()])]
        assert max(gaps) >= factor / 2, "it was taken between heartbeats that came on time"
        raise TooBusyError


def test_who_writes_over_ours_has_it(client: LockClient, place: Place, key: str) -> None:
    """As they may, once our lease has run out by their rules."""
    lease = client.acquire(key)
    items.put(place, key, item := items.held(place.format))
    assert not client.release(lease)
    with pytest.raises(LockLostError):
        client.renew(lease)
    assert items.stored(place, key) == item


def test_a_lock_of_theirs_can_be_broken(client: LockClient, place: Place, key: str) -> None:
    items.put(place, key, items.held(place.format))
    record = client.get(key)
    assert record
    (lease_id,) = record.holders
    assert client.break_lock(key, lease_id).owner == "theirs"
    assert client.try_acquire(key)


def test_what_is_no_lock_is_refused_and_left_as_it_is(client: LockClient, place: Place, key: str) -> None:
    items.put(place, key, item := items.damaged(place.format))
    for call in (client.try_acquire, client.get):
        with pytest.raises(LockRecordError) as refused:
            call(key)
        assert repr(key) in str(refused.value)
        assert len(str(refused.value).splitlines()) == 1
    assert [record for record in client.list_locks() if record.key == key] == []
    assert items.stored(place, key) == item


# -- what is lost on the way, and what cannot be ----------------------------------------------------------------------


class _Losing:
    """An SDK client that carries one call out and loses the answer."""

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
    """An SDK client before whose reclaims a client of theirs is quicker."""

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
def test_one_who_beats_just_before_he_is_reclaimed_is_not(place: Place, key: str) -> None:
    # Silent for longer than his lease, each time anew.
    silent = place.format in ("amazon-lock-client", "python-dynamodb-lock")
    how = {"lease": 0.3} if silent else {"lease": 1.0, "ago": 9.0}
    beats: list[Any] = []

    def beat() -> None:
        beats.append(items.held(place.format, **how))
        items.put(place, key, beats[-1])

    beat()
    sdk = _Overtaken(place.sdk, beat)
    with any_clock_skew():
        client = LockClient(sdk, table=place.table, table_format=place.format, max_clock_skew=1.0)
    with pytest.raises(LockTimeoutError):
        client.acquire(key, timeout=1.5 if silent else 0, poll_interval=0.1)
    assert len(beats) > 1
    assert items.stored(place, key) == beats[-1]


class _Counting:
    """An SDK client that counts its calls."""

    def __init__(self, sdk: Any) -> None:
        self._sdk = sdk
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self._sdk, name)


@places(engine="moto")
def test_how_many_requests_it_takes(place: Place, key: str) -> None:
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
        gives = "update_item" if keeps else "delete_item"
        assert sdk.calls == ["update_item", "update_item", gives]


@pytest.mark.parametrize("what", ["acquire", "release"])
def test_a_lost_answer_loses_nothing(place: Place, key: str, what: str) -> None:
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
    assert LockClient(sdk, table=place.table, table_format=place.format).try_acquire(key), (
        "nobody is in the way"
    )


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
def test_what_the_format_cannot_is_a_clear_error(
    client: LockClient, place: Place, key: str, claim: dict[str, Any]
) -> None:
    with pytest.raises(LockValueError, match=f"format '{place.format}'"):
        client.acquire(key, timeout=0, **claim)
    assert items.stored(place, key) is None


def test_several_locks_lines_and_capacities_are_not_there(client: LockClient, place: Place, key: str) -> None:
    for call in (
        lambda: client.acquire([key, "another"], timeout=0),
        lambda: client.waiters(key),
        lambda: client.set_capacity(key, 3),
    ):
        with pytest.raises(LockValueError, match=f"format '{place.format}'"):
            call()


def test_who_gives_up_waiting_leaves_nothing_behind(
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
    assert record.data == {"data": b"their data"}, "kept"
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
def test_an_update_in_place_takes_it_from_us(client: LockClient, place: Place, key: str) -> None:
    """As the Java library does it when it is told to keep what stands in the item."""
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
def test_sort_keys(client: LockClient, make_client: MakeClient, place: Place, key: str) -> None:
    lease, other = client.acquire("ab::c", timeout=0), client.acquire("a::bc", timeout=0)
    assert place.sdk.get_item(TableName=place.table, Key={"lock_key": {"S": "ab"}, "sort_key": {"S": "c"}})[
        "Item"
    ]
    assert {"ab::c", "a::bc"} <= {record.key for record in client.list_locks()}
    for wrong in ("a::-", "::b", "a::"):
        with pytest.raises(LockValueError, match="'partition key::sort key'"):
            client.acquire(wrong)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(make_client().acquire, "ab::c", poll_interval=0.05, timeout=20)
        client.release(lease)
        waiting.result()
    client.release(other)


@places("python-dynamodb-lock")
def test_a_partition_key_that_has_no_name_is_refused(client: LockClient, place: Place, key: str) -> None:
    """``a::b`` is the partition key ``a`` and the sort key ``b``."""
    place.sdk.put_item(
        TableName=place.table,
        Item={"lock_key": {"S": f"{key}::b"}, "sort_key": {"S": "-"}, **items.held(place.format)},
    )
    assert [each.key for each in client.list_locks() if each.key.startswith(key)] == []
    assert client.release(client.acquire(f"{key}::b", timeout=0)), "another lock"


@places("s3")
def test_what_only_the_metadata_tell_is_a_change_too(client: LockClient, place: Place, key: str) -> None:
    """Else one of two who leave at the same moment would write over the other."""
    lease = client.acquire(key)
    insides = {name: client.enter(lease, name) for name in ("one", "other")}
    before = place.sdk.head_object(Bucket=place.table, Key=key)["ETag"]
    client.leave(insides["one"], "one")
    assert place.sdk.head_object(Bucket=place.table, Key=key)["ETag"] != before
    assert items.stored(place, key)["owner"], "their parser reads it"
    client.leave(insides["other"], "other")
    record = client.get(key)
    assert record
    assert record.holders[lease.lease_id].processes == {}


@places("s3")
def test_a_race_of_theirs_is_lost_by_whoever_it_overtakes_and_he_learns_of_it(
    client: LockClient, elsewhere: LockClient, place: Place, key: str
) -> None:
    """They read a free lock, take longer than their own second, and write over whoever holds it then."""
    lease = client.acquire(key)
    items.put(place, key, late := items.held(place.format))  # by one who read it before
    with pytest.raises(LockLostError, match="Locked by theirs"):
        client.renew(lease)
    assert not client.release(lease)
    assert elsewhere.try_acquire(key) is None
    assert items.stored(place, key) == late, "theirs stays"


@places("s3")
def test_who_is_overtaken_within_their_second_is_not_told_that_he_holds_it(
    make_client: MakeClient, place: Place, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them read it before we wrote, and writes after it, sooner than he looks again."""
    monkeypatch.setattr("airflow_dynamo_lock.core.foreign.s3_requests.SETTLE", 1.0)
    client = make_client()
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(client.try_acquire, key)
        deadline = time.monotonic() + 10
        while items.stored(place, key) is None:
            assert time.monotonic() < deadline
        items.put(place, key, late := items.held(place.format))
        assert taking.result() is None
    assert items.stored(place, key) == late


@places("s3")
def test_a_lock_that_is_taken_up_again_is_looked_at_again(
    make_client: MakeClient, place: Place, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a second triggerer, say, while one of theirs who read the free lock is still about to write."""
    lease = make_client().acquire(key, lease_id="the same")
    monkeypatch.setattr("airflow_dynamo_lock.core.foreign.s3_requests.SETTLE", 1.0)
    before = place.sdk.head_object(Bucket=place.table, Key=key)["ETag"]
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(make_client().try_acquire, key, lease_id=lease.lease_id)
        deadline = time.monotonic() + 10
        while place.sdk.head_object(Bucket=place.table, Key=key)["ETag"] == before:
            assert time.monotonic() < deadline
        items.put(place, key, items.held(place.format))
        assert taking.result() is None


@places("s3")
def test_a_bucket_may_have_other_things_in_it(client: LockClient, place: Place, key: str) -> None:
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
def test_a_lease_of_theirs_is_not_ours_to_renew_or_release(
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
def test_a_lock_that_is_held_for_ever_is_held(client: LockClient, place: Place, key: str) -> None:
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
def test_a_table_that_expires_what_we_do_not_renew_is_refused(client: LockClient, place: Place) -> None:
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
