"""Any text or number as an argument: if it can be stored, it is returned unchanged. If not, the client raises a typed
error and sends nothing.
"""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_dynamo_lock import Lease, LockClient
from airflow_dynamo_lock.core.model.errors import LockNotHeldError, LockValueError
from airflow_dynamo_lock.core.model.limits import MAX_ID_BYTES, MAX_KEY_BYTES
from airflow_dynamo_lock.core.table.codec import decode, encode
from tests.fuzz.conftest import examples
from tests.fuzz.items import broken_texts, keys, texts
from tests.fuzz.judge import TABLE, Table

ids = texts | texts.map(lambda text: (text * MAX_ID_BYTES).encode()[:MAX_ID_BYTES].decode(errors="ignore"))
payloads = st.dictionaries(
    texts,
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(10**38) + 1, 10**38 - 1)
        | texts
        | st.binary(min_size=1, max_size=4),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
        max_leaves=5,
    ),
    max_size=3,
)


def whole_life(
    table: Table, key: str, lease_id: str, process: str, owner: str, data: Any, about: Any
) -> None:
    """Acquire, enter, renew, leave and release. The record shows what was given."""
    locks = table.locks()
    table.delete(key)
    lease = locks.try_acquire(key, lease_id=lease_id, owner=owner, data=data, about=about, attempt_of=owner)
    assert lease is not None
    assert (lease.key, lease.lease_id, lease.owner) == (key, lease_id, owner)
    locks.enter(lease, process)
    record = locks.get(key)
    assert record is not None
    shown = record.holders[lease_id]
    assert (shown.owner, list(shown.processes), record.data) == (owner, [process], data or None)
    assert shown.about == {**about, "attempt_of": owner}
    assert key in [each.key for each in locks.list_locks()]
    assert locks.renew(Lease.from_dict(lease.as_dict())).key == key
    locks.leave(lease, process)
    assert locks.release(lease)
    with pytest.raises(LockNotHeldError):
        locks.break_lock(key, lease_id)
    table.delete(key)


@examples(60)
@given(key=keys, lease_id=ids, process=ids, owner=texts, data=payloads, about=st.dictionaries(texts, texts))
def test_all_of_unicode_on_moto(moto_table: Table, **given_texts: Any) -> None:
    whole_life(moto_table, **given_texts)


@examples(25)
@given(key=keys, lease_id=ids, process=ids, owner=texts, data=payloads, about=st.dictionaries(texts, texts))
def test_all_of_unicode_on_dynamodb_local(local_table: Table, **given_texts: Any) -> None:
    whole_life(local_table, **given_texts)


class NothingMayBeSent:
    """An SDK client that must not be called."""

    def __getattr__(self, name: str) -> Any:
        pytest.fail(f"{name} was called")


LOCKS = LockClient(NothingMayBeSent(), table=TABLE)
LEASE = Lease("key", "lease", 17, "me", 1, 1, 30_000, 15_000, 0)

_CYCLE: dict[str, Any] = {}
_CYCLE["itself"] = _CYCLE
_DEEP: Any = "the bottom"
for _ in range(40):
    _DEEP = [_DEEP]
_UNSHOWN = type("Unshown", (), {"__repr__": lambda _: 1 / 0})()

wrong_texts = broken_texts | st.sampled_from(
    [17, None, b"bytes", ["twice", "twice"], "", "x" * (MAX_KEY_BYTES + 1), _UNSHOWN]
)
wrong_payloads = st.sampled_from(
    [
        *(
            {"a": {1, 2}},
            {"a": object()},
            {"a": 10**38 + 1},
            {"a": 10**5000},
            {"a": float("nan")},
            {"a": 1e126},
        ),
        *({"a": Decimal("sNaN")}, {"a": Decimal("1E-131")}, {"": 1}, {1: 1}, "text", ["list"], 17, _UNSHOWN),
        *(_CYCLE, {"a": _DEEP}, {"a": _UNSHOWN}),
    ]
) | broken_texts.flatmap(lambda text: st.sampled_from([{text: 1}, {"a": text}, {"a": [text]}]))


@examples(150)
@given(wrong=wrong_texts)
def test_a_name_that_cannot_be_stored_is_refused_before_anything_is_sent(wrong: Any) -> None:
    for call in (
        lambda: LOCKS.try_acquire(wrong),
        lambda: LOCKS.acquire(wrong, timeout=0),
        lambda: LOCKS.wait(wrong, timeout=0),
        lambda: LOCKS.get(wrong),
        lambda: LOCKS.look(wrong),
        lambda: LOCKS.waiters(wrong),
        lambda: LOCKS.set_capacity(wrong, 2),
        lambda: LOCKS.break_lock(wrong, "lease"),
        lambda: LOCKS.break_lock("key", wrong),
        lambda: LOCKS.enter(LEASE, wrong),
        lambda: LOCKS.leave(LEASE, wrong),
        lambda: LOCKS.renew(replace(LEASE, key=wrong)),
        lambda: LOCKS.renew(replace(LEASE, lease_id=wrong)),
        lambda: LOCKS.enter(replace(LEASE, lease_id=wrong), "process"),
        lambda: LOCKS.leave(replace(LEASE, lease_id=wrong), "process"),
        lambda: LOCKS.release(replace(LEASE, lease_id=wrong)),
        lambda: Lease.from_dict({**LEASE.as_dict(), "key": wrong}),
    ):
        with pytest.raises(LockValueError) as refused:
            call()
        assert len(str(refused.value).splitlines()) == 1
        assert len(str(refused.value)) < 300


@examples(100)
@given(wrong=broken_texts | st.sampled_from([17, b"bytes", ["list"]]))
def test_a_description_that_cannot_be_stored_is_refused(wrong: Any) -> None:
    options: list[dict[str, Any]] = [
        *({"owner": wrong}, {"attempt_of": wrong}, {"about": {"a": wrong}}),
        *([{"about": {wrong: "a"}}] if isinstance(wrong, str) else []),
    ]
    for option in options:
        with pytest.raises(LockValueError):
            LOCKS.try_acquire("key", **option)


@examples(60)
@given(wrong=wrong_payloads)
def test_data_that_cannot_be_stored_is_refused_and_not_shown(wrong: Any) -> None:
    with pytest.raises(LockValueError) as refused:
        LOCKS.try_acquire("key", data=wrong)
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    "huge",
    [10**5000, -(10**5000), float("inf"), float("nan"), _UNSHOWN, None],
    ids=[
        "more digits than Python shows",
        "negative",
        "infinite",
        "not a number",
        "without a repr",
        "none",
    ],
)
def test_a_number_out_of_range_is_refused(huge: Any) -> None:
    for options in ({"lease": huge}, {"release_grace": huge}, {"slots": huge}, {"capacity": huge}):
        if huge is None and options.keys() <= {"lease", "release_grace"}:
            continue  # None stands for the client's default
        with pytest.raises(LockValueError):
            LOCKS.try_acquire("key", **options)
    for option in ("priority", "min_hold", "fair", "reentrant", "mode"):
        if huge is not None or option != "min_hold":
            wrong: dict[str, Any] = {option: huge}
            with pytest.raises(LockValueError):
                LOCKS.try_acquire("key", **wrong)
    if huge is not None:
        with pytest.raises(LockValueError):
            LOCKS.set_capacity("key", huge)
    for name in ("slots", "capacity", "lease_ms", "grace_ms"):
        with pytest.raises(LockValueError):
            LOCKS.renew(replace(LEASE, **{name: huge}))


@pytest.mark.parametrize("values", [{}, {"key": "k"}, None, 17, "text", ["list"]])
def test_a_value_that_is_no_lease_is_refused(values: Any) -> None:
    with pytest.raises(LockValueError, match="not the result of a task that acquires a lock"):
        Lease.from_dict(values)


@examples(300)
@given(number=st.integers(-(10**38) + 1, 10**38 - 1) | st.integers(0, 86).map(lambda power: 10**power))
def test_a_whole_number_is_decoded_unchanged(number: int) -> None:
    assert decode(encode(number)) == number


@pytest.mark.proof
@pytest.mark.parametrize("number", ["1E+125", "9.9E+125", "1E-130", "0E-200", "1" + "0" * 60, "-" + "9" * 38])
def test_numbers_at_the_limit_are_stored(local_table: Table, number: str) -> None:
    locks = local_table.locks()
    assert locks.try_acquire("numbers", data={"n": Decimal(number)})
    record = locks.get("numbers")
    assert record is not None
    assert record.data == {"n": pytest.approx(float(number))}
    local_table.delete("numbers")


@pytest.mark.proof
def test_data_of_the_maximum_depth_is_stored(local_table: Table) -> None:
    data: Any = "the bottom"
    for _ in range(30):
        data = [data]
    assert local_table.locks().try_acquire("levels", data={"a": data})
    local_table.delete("levels")
