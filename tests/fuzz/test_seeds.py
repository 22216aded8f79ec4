"""What the random tests have found, or should: each record and operation by itself, on both engines."""

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
    """One that is dead, with what a later version of this program might have added."""
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
    """A mutex held by `a`."""
    return {
        "capacity": {"N": "1"},
        "available": {"N": "0"},
        "holders": {"M": {"a": {"M": holder(**changed)}}},
        "token": NUMBER,
        "expires_at": {"N": str(NOW_MS // 1000)},
        **(attributes or {}),
    }


IDLE: Item = held() | {"available": {"N": "1"}, "holders": {"M": {}}}
# Whoever takes it does so without having looked at it.
OURS = IDLE | {"token_base": {"S": "verified"}}

DAMAGED: dict[str, Item] = {
    "data that is null": IDLE | {"data": {"NULL": True}},  # it looked free for ever, and could not be taken
    "data that is a secret text": held(attributes={"data": {"S": "hunter2"}}),
    "draining that is false": held(
        draining={"BOOL": False}
    ),  # conditions ask if it is there, readers asked if it is true
    "draining that is null": held(draining={"NULL": True}),
    "a grace of nothing": held(grace_ms={"N": "0"}),  # abandoned, its lease would have been none
    "a grace before the beginning": held(grace_ms={"N": "-1"}),
    "a lease of many ages": held(lease_ms={"N": "1E+60"}),
    "more slots than there are": held(slots={"N": "1E+60"}),
    "a process that entered at no time": held(processes={"M": {"p": {"S": "now"}}}),
    "holders that are a set": held(attributes={"holders": {"SS": ["a"]}}),
    "a mark that is a number": held(attributes={"queue_head": NUMBER}),
    "an idle lock's mark that is a number": OURS | {"queue_head": NUMBER},
    "numbers that are text": OURS | {"last_ticket": {"S": "17"}},
    "a capacity that is set by text": OURS | {"capacity_pinned": {"S": "true"}},
    "a time to hold that is text": held(hold_until={"S": "soon"}),
    "a holder that is a number": held(attributes={"holders": {"M": {"a": NUMBER}}}),
    **{f"{name}'s item": item for name, item in FOREIGN.items()},
}
UNDERSTOOD: dict[str, Item] = {
    "an expiry that is text": IDLE | {"expires_at": {"S": "never"}},
    "an expiry that is missing": {name: value for name, value in IDLE.items() if name != "expires_at"},
    "attributes of a later version": held(attributes={"later": {"SS": ["x"]}}),
    "a mark like a path": IDLE | {"queue_head": {"S": "#me.a[0]:"}, "last_ticket": NUMBER},
    "a capacity below what is held": held(
        attributes={"capacity_pinned": {"BOOL": True}, "capacity": {"N": "2"}, "available": {"N": "-1"}},
        slots={"N": "3"},
    ),
    "a holder that rests": held(
        hold_until={"N": str(LONG_AGO)}, cooling_down={"BOOL": True}, draining={"BOOL": True}
    ),
    "names like paths": held(attributes={"holders": {"M": {"#me.a[0]:": {"M": holder()}}}}),
    "a token below nothing": IDLE | {"token": {"N": "-17"}},
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
def test_an_unusual_record_is_understood_and_what_is_unknown_survives(
    table: Table, move: str, item: Item
) -> None:
    assert table.store(KEY, item)
    lease = lease_of(item, KEY, lambda ids: ids[0])
    played = play(table, KEY, MOVES[move], lease)
    judge(KEY, MOVES[move], lease, played)
    assert (played.after or {}).get("later") == item.get("later")


@pytest.mark.parametrize("move", ["get", "list", "try_acquire", "renew", "release"])
def test_a_record_near_the_size_limit(moto_table: Table, move: str) -> None:
    """Too little room for more is an error of the caller's, not a damaged record."""
    item = of_many(300, 1000)
    assert moto_table.store(KEY, item)
    lease = lease_of(item, KEY, lambda ids: ids[0])
    judge(KEY, MOVES[move], lease, play(moto_table, KEY, MOVES[move], lease))
    moto_table.delete(KEY)


@pytest.mark.parametrize("move", ["get", "list", "try_acquire", "break_lock"])
def test_one_damaged_holder_of_hundreds(moto_table: Table, move: str) -> None:
    item = of_many(200, 100, lambda values: values.pop("version"))
    assert moto_table.store(KEY, item)
    lease = lease_of(item, KEY, lambda ids: ids[-2])
    judge(KEY, MOVES[move], lease, play(moto_table, KEY, MOVES[move], lease))
    moto_table.delete(KEY)


def test_a_full_item_takes_no_more(table: Table) -> None:
    assert table.store(KEY, IDLE)
    with pytest.raises(LockValueError, match="would be too large"):
        table.locks().try_acquire(KEY, data={"large": "x" * 420_000})
    assert table.locks().get(KEY)


def test_hundreds_of_holders_are_not_all_named(moto_table: Table) -> None:
    assert moto_table.store(KEY, of_many(300, 1))
    with pytest.raises(LockTimeoutError) as refused:
        moto_table.locks().acquire(KEY, timeout=0, slots=301, capacity=301)
    assert str(refused.value).endswith("; and 290 more.")
    moto_table.delete(KEY)


def test_what_others_wrote_cannot_forge_a_line_of_the_log(moto_table: Table) -> None:
    assert moto_table.store(KEY, held(owner={"S": "me\nERROR all is lost \u202e"}, renewed_at=None))
    with pytest.raises(LockTimeoutError, match=r"Locked by me\\nERROR all is lost \\u202e since"):
        moto_table.locks().acquire(KEY, timeout=0)
    moto_table.delete(KEY)


def test_the_error_tells_no_payload(moto_table: Table) -> None:
    assert moto_table.store(KEY, held(attributes={"data": {"S": "hunter2"}}))
    with pytest.raises(LockRecordError, match="'data' is text, not a map") as refused:
        moto_table.locks().get(KEY)
    assert "hunter2" not in repr([refused.value, refused.value.__cause__])
    moto_table.delete(KEY)


def test_a_release_gives_back_as_many_slots_as_the_record_shows(moto_table: Table) -> None:
    """Whatever number the lease has, which may have come by way of an XCom."""
    item = held(attributes={"capacity": {"N": "3"}, "available": {"N": "1"}}, slots={"N": "2"})
    moto_table.delete(KEY)
    assert moto_table.store(KEY, item)
    lease = replace(lease_of(item, KEY, lambda ids: ids[0]), slots=1)
    move = MOVES["release"]
    judge(KEY, move, lease, play(moto_table, KEY, move, lease))


def test_taking_again_with_other_slots_is_refused(moto_table: Table) -> None:
    moto_table.delete(KEY)
    assert moto_table.store(KEY, held(attributes={"capacity": {"N": "3"}, "available": {"N": "2"}}))
    with pytest.raises(LockValueError, match="has 1 of 3 slots already, not 2 of 3"):
        moto_table.locks().try_acquire(KEY, lease_id="a", slots=2, capacity=3)


def test_a_token_that_somebody_else_wrote_is_never_lowered(moto_table: Table) -> None:
    """However far it is ahead of the clock."""
    moto_table.delete(KEY)
    token = 10**15
    assert moto_table.store(KEY, IDLE | {"token": {"N": str(token)}})
    lease = moto_table.locks().try_acquire(KEY)
    assert lease is not None
    assert lease.token > token
