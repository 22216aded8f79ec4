"""What the random tests have found, or should find: single records and operations, on both engines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from airflow_dynamo_lock.core.model.errors import LockRecordError, LockTimeoutError, LockValueError
from tests.fuzz.items import FOREIGN, LONG_AGO, NOW_MS, Item, of_many
from tests.fuzz.judge import MOVES, Table, judge, lease_of, play, understood

pytestmark = pytest.mark.proof

KEY = "warehouse/orders"
NUMBER = {"N": "17"}


def holder(**changed: Any) -> Item:
    """Return a dead holder, with an attribute that a later version of this package might add."""
    values: dict[str, Any] = {
        "owner": {"S": "me"},
        "slots": {"N": "1"},
        "lease_ms": {"N": "30000"},
        "version": {"S": "v"},
        "acquired_at": {"N": str(LONG_AGO)},
        "renewed_at": {"N": str(LONG_AGO)},
        "processes": {"M": {}},
        "later": {"S": "kept"},
    } | changed
    return {name: value for name, value in values.items() if value is not None}


def held(*, attributes: Item | None = None, **changed: Any) -> Item:
    """Return a mutex that the lease `a` holds."""
    return {
        "capacity": {"N": "1"},
        "available": {"N": "0"},
        "holders": {"M": {"a": {"M": holder(**changed)}}},
        "token": NUMBER,
        "expires_at": {"N": str(NOW_MS // 1000)},
        **(attributes or {}),
    }


IDLE: Item = held() | {"available": {"N": "1"}, "holders": {"M": {}}}
# A client acquires it without reading it first.
VERIFIED = IDLE | {"token_base": {"S": "verified"}}

DAMAGED: dict[str, Item] = {
    "data that is null": IDLE | {"data": {"NULL": True}},  # it looked free, but could not be acquired
    "data that is a secret text": held(attributes={"data": {"S": "hunter2"}}),
    # Conditions test whether the attribute exists, and readers tested whether it is true.
    "draining that is false": held(draining={"BOOL": False}),
    "draining that is null": held(draining={"NULL": True}),
    "a grace of zero": held(grace_ms={"N": "0"}),  # after a drain, its lease would last for 0 ms
    "a negative grace": held(grace_ms={"N": "-1"}),
    "a huge lease duration": held(lease_ms={"N": "1E+60"}),
    "a huge number of slots": held(slots={"N": "1E+60"}),
    "a process whose time is text": held(processes={"M": {"p": {"S": "now"}}}),
    "holders that are a set": held(attributes={"holders": {"SS": ["a"]}}),
    "a queue head that is a number": held(attributes={"queue_head": NUMBER}),
    "a queue head of an idle lock that is a number": VERIFIED | {"queue_head": NUMBER},
    "a last ticket that is text": VERIFIED | {"last_ticket": {"S": "17"}},
    "a capacity_pinned that is text": VERIFIED | {"capacity_pinned": {"S": "true"}},
    "a hold_until that is text": held(hold_until={"S": "soon"}),
    "a holder that is a number": held(attributes={"holders": {"M": {"a": NUMBER}}}),
    **{f"{name}'s item": item for name, item in FOREIGN.items()},
}
UNDERSTOOD: dict[str, Item] = {
    "an expiry that is text": IDLE | {"expires_at": {"S": "never"}},
    "an expiry that is missing": {name: value for name, value in IDLE.items() if name != "expires_at"},
    "attributes of a later version": held(attributes={"later": {"SS": ["x"]}}),
    "a queue head like a path": IDLE | {"queue_head": {"S": "#me.a[0]:"}, "last_ticket": NUMBER},
    "a capacity below what is held": held(
        attributes={"capacity_pinned": {"BOOL": True}, "capacity": {"N": "2"}, "available": {"N": "-1"}},
        slots={"N": "3"},
    ),
    "a holder that is cooling down": held(
        hold_until={"N": str(LONG_AGO)}, cooling_down={"BOOL": True}, draining={"BOOL": True}
    ),
    "a lease id like a path": held(attributes={"holders": {"M": {"#me.a[0]:": {"M": holder()}}}}),
    "a negative token": IDLE | {"token": {"N": "-17"}},
}
READS_FIRST = [name for name, move in MOVES.items() if not move.writes_blind]


@pytest.fixture(params=["moto", "dynamodb-local"])
def table(request: pytest.FixtureRequest) -> Table:
    name = {"moto": "moto_table", "dynamodb-local": "local_table"}[request.param]
    table: Table = request.getfixturevalue(name)
    table.delete(KEY)
    return table


@pytest.mark.parametrize("item", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_record_is_refused_and_left_as_it_is(table: Table, item: Item) -> None:
    assert understood({**item, "key": {"S": KEY}, "entry": {"S": "lock"}}) is None
    for name in READS_FIRST:
        assert table.store(KEY, item)
        lease = lease_of(item, KEY, lambda ids: ids[0])
        judge(KEY, MOVES[name], lease, play(table, KEY, MOVES[name], lease))


@pytest.mark.parametrize("item", UNDERSTOOD.values(), ids=UNDERSTOOD.keys())
@pytest.mark.parametrize("move", MOVES)
def test_an_unusual_record_is_understood_and_unknown_attributes_survive(
    table: Table, move: str, item: Item
) -> None:
    assert table.store(KEY, item)
    lease = lease_of(item, KEY, lambda ids: ids[0])
    played = play(table, KEY, MOVES[move], lease)
    judge(KEY, MOVES[move], lease, played)
    assert (played.after or {}).get("later") == item.get("later")


@pytest.mark.parametrize("move", ["get", "list", "try_acquire", "renew", "release"])
def test_a_record_near_the_size_limit(moto_table: Table, move: str) -> None:
    """If the item would become too large, that is the caller's error, not a damaged record."""
    item = of_many(300, 1000)
    assert moto_table.store(KEY, item)
    lease = lease_of(item, KEY, lambda ids: ids[0])
    judge(KEY, MOVES[move], lease, play(moto_table, KEY, MOVES[move], lease))
    moto_table.delete(KEY)


@pytest.mark.parametrize("move", ["get", "list", "try_acquire", "break_lock"])
def test_one_damaged_holder_among_hundreds(moto_table: Table, move: str) -> None:
    item = of_many(200, 100, lambda values: values.pop("version"))
    assert moto_table.store(KEY, item)
    lease = lease_of(item, KEY, lambda ids: ids[-2])
    judge(KEY, MOVES[move], lease, play(moto_table, KEY, MOVES[move], lease))
    moto_table.delete(KEY)


def test_data_that_exceeds_the_item_size_is_refused(table: Table) -> None:
    assert table.store(KEY, IDLE)
    with pytest.raises(LockValueError, match="would be too large"):
        table.locks().try_acquire(KEY, data={"large": "x" * 420_000})
    assert table.locks().get(KEY)


def test_an_error_does_not_name_hundreds_of_holders(moto_table: Table) -> None:
    assert moto_table.store(KEY, of_many(300, 1))
    with pytest.raises(LockTimeoutError) as refused:
        moto_table.locks().acquire(KEY, timeout=0, slots=301, capacity=301)
    assert str(refused.value).endswith("; and 290 more.")
    moto_table.delete(KEY)


def test_a_stored_owner_cannot_forge_a_log_line(moto_table: Table) -> None:
    assert moto_table.store(KEY, held(owner={"S": "me\nERROR all is lost \u202e"}, renewed_at=None))
    with pytest.raises(LockTimeoutError, match=r"Locked by me\\nERROR all is lost \\u202e since"):
        moto_table.locks().acquire(KEY, timeout=0)
    moto_table.delete(KEY)


def test_an_error_shows_no_data(moto_table: Table) -> None:
    assert moto_table.store(KEY, held(attributes={"data": {"S": "hunter2"}}))
    with pytest.raises(LockRecordError, match="'data' is text, not a map") as refused:
        moto_table.locks().get(KEY)
    assert "hunter2" not in repr([refused.value, refused.value.__cause__])
    moto_table.delete(KEY)


def test_a_release_frees_the_slots_that_the_record_shows(moto_table: Table) -> None:
    """The number in the lease does not count, which may come from an XCom."""
    item = held(attributes={"capacity": {"N": "3"}, "available": {"N": "1"}}, slots={"N": "2"})
    moto_table.delete(KEY)
    assert moto_table.store(KEY, item)
    lease = replace(lease_of(item, KEY, lambda ids: ids[0]), slots=1)
    move = MOVES["release"]
    judge(KEY, move, lease, play(moto_table, KEY, move, lease))


def test_a_repeated_acquire_with_other_slots_is_refused(moto_table: Table) -> None:
    moto_table.delete(KEY)
    assert moto_table.store(KEY, held(attributes={"capacity": {"N": "3"}, "available": {"N": "2"}}))
    with pytest.raises(LockValueError, match="has 1 of 3 slots already, not 2 of 3"):
        moto_table.locks().try_acquire(KEY, lease_id="a", slots=2, capacity=3)


def test_a_token_of_another_program_is_never_lowered(moto_table: Table) -> None:
    """Even if it is far ahead of the clock."""
    moto_table.delete(KEY)
    token = 10**15
    assert moto_table.store(KEY, IDLE | {"token": {"N": str(token)}})
    lease = moto_table.locks().try_acquire(KEY)
    assert lease is not None
    assert lease.token > token
