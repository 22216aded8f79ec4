"""Random items under a lock's key: each operation ends with a typed error or a correct action, and destroys nothing
that it does not understand.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.conftest import examples
from tests.fuzz.items import Item, damaged, foreign, keys, no_waiters, records
from tests.fuzz.judge import MOVES, Table, judge, lease_of, play, understood

PLACE = "waiter/0999/000000000000001/5f0b"

moves = st.sampled_from(list(MOVES))
items = records() | damaged() | damaged() | foreign


def try_out(table: Table, key: str, item: Item, move: str, data: st.DataObject, *, strict: bool) -> None:
    """Run one operation on one item, sometimes with another item in the position of a waiter."""
    lease = lease_of(item, key, lambda ids: data.draw(st.sampled_from(ids), label="lease"))
    beside = data.draw(st.none() | st.none() | st.none() | no_waiters, label="beside")
    if not table.store(key, item):
        return
    if beside:
        beside = beside if table.store(key, beside, PLACE) else None
    try:
        judge(key, MOVES[move], lease, play(table, key, MOVES[move], lease), strict=strict)
    finally:
        table.delete(key)
        if beside:
            assert table.item(key, PLACE) == {**beside, "key": {"S": key}, "entry": {"S": PLACE}}
            table.delete(key, PLACE)


@examples(500)
@given(key=keys, item=items, move=moves, data=st.data())
def test_on_moto(moto_table: Table, key: str, item: Item, move: str, data: st.DataObject) -> None:
    try_out(moto_table, key, item, move, data, strict=False)


@examples(180)
@given(key=keys, item=items, move=moves, data=st.data())
def test_on_dynamodb_local(local_table: Table, key: str, item: Item, move: str, data: st.DataObject) -> None:
    try_out(local_table, key, item, move, data, strict=False)


@examples(200)
@given(record=records())
def test_a_good_record_is_understood(record: Item) -> None:
    """Otherwise the other tests would prove little."""
    assert understood({**record, "key": {"S": "k"}, "entry": {"S": "lock"}}) is not None
