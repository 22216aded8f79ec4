"""Records that another program wrote or damaged: they are refused with an error that names them, and not changed."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from airflow_dynamo_lock.core.model.decisions import Decision, Removal
from airflow_dynamo_lock.core.model.edits import Heartbeat
from airflow_dynamo_lock.core.model.errors import LockRecordError, LockTableError
from airflow_dynamo_lock.core.model.limits import LONGEST_TIME
from airflow_dynamo_lock.core.model.outcomes import Granted, Lost
from airflow_dynamo_lock.core.model.record import LockRecord
from airflow_dynamo_lock.core.table.codec import encode
from airflow_dynamo_lock.core.table.items import REMOVED_PREFIX, WAIT_PREFIX, read_waiter
from airflow_dynamo_lock.core.table.native import NativeFormat
from proof.simulator.stepped import BEGIN_MS, KEY, Host, World, a_holder

HOLDER = {
    "owner": "me",
    "slots": 1,
    "lease_ms": 30_000,
    "version": "v1",
    "acquired_at": BEGIN_MS,
    "renewed_at": BEGIN_MS,
    "processes": {},
}
HELD = {"capacity": 1, "available": 0, "holders": {"a": HOLDER}, "token": 17, "expires_at": 2_000_000_000}
IDLE = HELD | {"available": 1, "holders": {}}


def _without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _holder(**changed: Any) -> dict[str, Any]:
    return HELD | {"holders": {"a": HOLDER | changed}}


DAMAGED = {
    "an empty item": {},
    "another program's item": {"LockID": "terraform", "Info": "{}"},
    **{
        f"held, without {name}": _without(HELD, name)
        for name in ("capacity", "available", "holders", "token")
    },
    **{
        f"idle, without {name}": _without(IDLE, name)
        for name in ("capacity", "available", "holders", "token")
    },
    **{
        f"a holder without {name}": HELD | {"holders": {"a": _without(HOLDER, name)}}
        for name in ("owner", "slots", "lease_ms", "version", "acquired_at", "processes")
    },
    "held, capacity as text": HELD | {"capacity": "1"},
    "held, capacity as a truth value": HELD | {"capacity": True},
    "held, a capacity of a half": HELD | {"capacity": 0.5},
    "idle, counters as text": IDLE | {"capacity": "1", "available": "1"},
    "held, token as text": HELD | {"token": "17"},
    "idle, token as text": IDLE | {"token": "17"},
    "held, holders as text": HELD | {"holders": "a"},
    "held, holders as a list": HELD | {"holders": [HOLDER]},
    "idle, holders as an empty list": IDLE | {"holders": []},
    "a holder that is text": HELD | {"holders": {"a": "me"}},
    "a holder that is null": HELD | {"holders": {"a": None}},
    "a holder with no slots": _holder(slots=0),
    "a holder with half a slot": _holder(slots=0.5),
    "a holder without a lease": _holder(lease_ms=0),
    "a holder whose grace is text": _holder(grace_ms="15 s"),
    "a holder with slots as text": _holder(slots="1"),
    "a holder whose version is a number": _holder(version=1),
    "a holder whose owner is a number": _holder(owner=1),
    "a holder acquired at no valid time": _holder(acquired_at="yesterday"),
    "a holder acquired after the last valid time": _holder(acquired_at=10**20),
    "a holder renewed at no valid time": _holder(renewed_at="yesterday"),
    "a holder renewed after the last valid time": _holder(renewed_at=10**20),
    "a holder whose processes are a list": _holder(processes=["pid-1"]),
    "a holder whose about is text": _holder(about="dag"),
    "held, a token base that is a number": HELD | {"token_base": 7},
    "idle, a token base that is a number": IDLE | {"token_base": 7},
    "idle, a token base that is null": IDLE | {"token_base": None},
    "held, freed at no valid time": HELD | {"last_freed_at": "yesterday"},
    "idle, freed after the last valid time": IDLE | {"last_freed_at": 10**20},
    "counters that do not add up": HELD | {"available": 1, "capacity": 3},
    "a held lock that counts as free": HELD | {"available": 1},
    "a free lock that counts as held": IDLE | {"available": 0},
    "held, data that is no map": HELD | {"data": "text"},
    "idle, data that is no map": IDLE | {"data": "text"},
}


# The same with the attribute that the first write of an acquire requires.
DAMAGED |= {
    f"{name}, verified": values | {"token_base": "verified"}
    for name, values in DAMAGED.items()
    if "idle" in name and "token base" not in name
}


@pytest.fixture
def host(world: World) -> Host:
    return Host(world, "b")


@pytest.mark.parametrize("values", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_record_is_refused_by_name_and_not_changed(
    world: World, host: Host, values: dict[str, Any]
) -> None:
    world.store(**{name: encode(value) for name, value in values.items()})
    before = world.item()

    with pytest.raises(LockRecordError, match=KEY):
        host.take()
    assert world.item() == before

    with pytest.raises(LockRecordError, match=KEY):
        host.run(host.operations.requests.get(KEY))


@pytest.mark.parametrize("values", DAMAGED.values(), ids=DAMAGED.keys())
def test_no_write_of_a_holder_changes_a_damaged_record(
    world: World, host: Host, values: dict[str, Any]
) -> None:
    """They report that the lease is lost, or that the record is damaged, and change nothing."""
    world.store(**{name: encode(value) for name, value in values.items()})
    for write in (
        host.heartbeat,
        host.release,
        lambda lease: host.enter("pid", lease),
        lambda lease: host.leave("pid", lease),
    ):
        with suppress(LockRecordError):
            assert isinstance(write("not there"), Lost)
    assert world.item() == {
        "key": {"S": KEY},
        "entry": {"S": "lock"},
        **{n: encode(v) for n, v in values.items()},
    }


def test_a_record_with_the_smallest_values_is_read(world: World) -> None:
    least = {
        "lease_ms": 1,
        "grace_ms": 1,
        "acquired_at": 0,
        "renewed_at": 0,
        "hold_until": 0,
        "processes": {"p": 0},
    }
    least[f"{WAIT_PREFIX}w"] = {"since": 0, "keys": ["k"], "slots": 1, "capacity": 1}
    record_values = _holder(**least) | {
        "last_freed_at": 0,
        "usual_ms": 0,
        "last_loss": {"lease_id": "b", "owner": "b", "at": 0, "broken": False},
        f"{REMOVED_PREFIX}c": {"at": 0, "by": "anna"},
    }
    world.store(**{name: encode(value) for name, value in record_values.items()})

    record = world.record()

    holder = record.holders["a"]
    assert (holder.lease_ms, holder.grace_ms, holder.processes) == (1, 1, {"p": 0})
    assert (holder.acquired_at_ms, holder.renewed_at_ms, holder.hold_until_ms) == (0, 0, 0)
    assert (record.last_freed_at_ms, record.usual_ms) == (0, 0)
    assert record.last_loss is not None
    assert (record.last_loss.at_ms, holder.waits["w"].since_ms) == (0, 0)
    assert record.removals == {"c": Removal(0, Decision("anna"))}


def test_a_waiter_item_with_the_smallest_values_is_read() -> None:
    least = {
        "key": KEY, "entry": "waiter/50/000000000000001/x", "lease_id": "a", "owner": "me", "slots": 1, "capacity": 1,
        "priority": 0, "since": 0, "until": 0, "renewed_at": 0, "version": "v",
    }  # fmt: skip
    waiter = read_waiter({name: encode(value) for name, value in least.items()}, "t")
    assert (waiter.since_ms, waiter.until_ms, waiter.renewed_at_ms) == (0, 0, 0)


@pytest.mark.parametrize("names", [["key"], ["entry"], []])
def test_an_item_with_other_keys_is_no_waiter_but_an_error(names: list[str]) -> None:
    with pytest.raises(LockTableError, match="is not a lock table"):
        NativeFormat("t").waiters({"Items": [{name: encode("lock") for name in names}]})


@pytest.mark.parametrize(
    "changed",
    [
        {"acquired_at": 253_402_300_800_000},  # the year 10000, which no datetime can represent
        {"lease_ms": round(LONGEST_TIME * 1000) + 1},
    ],
)
def test_a_number_out_of_range_is_damage(world: World, changed: dict[str, int]) -> None:
    world.store(**{name: encode(value) for name, value in _holder(**changed).items()})
    with pytest.raises(LockRecordError):
        world.record()


def test_the_error_says_what_is_wrong_and_what_to_do(world: World, host: Host) -> None:
    world.store(**{name: encode(value) for name, value in _without(HELD, "token").items()})

    with pytest.raises(
        LockRecordError, match=r"'token' is missing.*not changed: correct it, or delete the item"
    ):
        host.take()
    assert issubclass(LockRecordError, LockTableError)


def test_unknown_attributes_are_kept(world: World, host: Host) -> None:
    world.store(
        **{name: encode(value) for name, value in IDLE.items()}, note={"S": "mine"}, tags={"SS": ["x"]}
    )

    assert isinstance(host.take(), Granted)

    item = world.item()
    assert item is not None
    assert (item["note"], item["tags"]) == ({"S": "mine"}, {"SS": ["x"]})


def test_a_token_base_is_unverified_only_if_the_record_says_so(world: World) -> None:
    for attributes, unverified in (
        ({"token_base": "unverified"}, True),
        ({"token_base": "verified"}, False),
        ({}, False),
    ):
        world.store(**{name: encode(value) for name, value in (IDLE | attributes).items()})
        assert world.record().unverified is unverified, attributes


def test_the_token_of_a_record_without_a_token_base_counts_as_verified(world: World, host: Host) -> None:
    world.store(**{name: encode(value) for name, value in IDLE.items()})

    granted = host.take()

    assert granted.token == 18
    assert world.actions() == ["UpdateItem"] * 2, "a read shows first that the record has a token"
    assert world.record().token_base == "verified"


def test_a_record_describes_its_holder_and_its_last_heartbeat() -> None:
    noon = 1_800_014_400_000
    holder = a_holder(owner="prod/etl/run", acquired_at_ms=noon, renewed_at_ms=noon + 60_000)
    record = LockRecord(KEY, 1, 0, {"a": holder}, token=1, read_at_ms=noon + 64_000)

    assert record.describe() == "Locked by prod/etl/run since 12:00 UTC, last heartbeat 4 s ago"
    assert LockRecord(KEY, 1, 1, {}, token=1).describe() == "Not locked"


def test_records_read_at_different_times_are_equal() -> None:
    assert LockRecord(KEY, 1, 1, {}, token=1, read_at_ms=1) == LockRecord(
        KEY, 1, 1, {}, token=1, read_at_ms=2
    )


def test_a_holder_since_yesterday_is_described_with_the_date() -> None:
    noon = 1_800_014_400_000
    holder = a_holder(acquired_at_ms=noon, processes={"1": noon, "2": noon}, draining=True)

    assert (
        holder.describe(noon + 24 * 3_600_000)
        == "me since 2027-01-15 12:00 UTC, 2 processes inside, draining"
    )


def test_locks_with_similar_names_have_records_of_their_own(world: World, host: Host) -> None:
    """In another library, ("ab", "c") and ("a", "bc") shared one lock."""
    for name in ("ab/c", "a/bc", "abc", "ab", "c"):
        assert isinstance(host.take(name, key=name), Granted)


def test_a_heartbeat_that_races_a_release_does_not_restore_the_lease(world: World, host: Host) -> None:
    """In another library it did, and the record stayed locked without a holder."""
    host.take()
    late = host.operations.requests.format.renew(KEY, "b", 30_000, host.stamp(), Heartbeat())
    host.release()
    before = world.item()

    assert host.send(late).refused
    assert world.item() == before


def test_keys_that_need_escaping_are_stored_as_they_are(world: World, host: Host) -> None:
    for key in ("a.b", "#x", ":y", "with space", "k\x00null", "💡", "SELECT"):
        assert isinstance(host.take(f"lease.{key}#:", key=key), Granted)
        assert list(world.record(key).holders) == [f"lease.{key}#:"]
