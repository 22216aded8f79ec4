"""Invalid arguments raise a typed error that says what is wrong, before any request is sent."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from airflow_dynamo_lock import LockClient, LockError, LockValueError
from airflow_dynamo_lock.core.model import arguments
from airflow_dynamo_lock.core.table.codec import decode, encode


class UnusedClient:
    """An SDK client that fails the test if it is used."""

    def __getattr__(self, name: str) -> Any:
        pytest.fail(f"{name} was called")


def _client(**options: Any) -> LockClient:
    return LockClient(UnusedClient(), **({"table": "locks"} | options))


Call = Callable[[LockClient], object]
WITH_A_KEY: dict[str, Callable[[LockClient, Any], object]] = {
    "try_acquire": lambda client, key: client.try_acquire(key),
    "acquire": lambda client, key: client.acquire(key),
    "lock": lambda client, key: client.lock(key).__enter__(),
    "wait": lambda client, key: client.wait(key),
    "get": lambda client, key: client.get(key),
    "break_lock": lambda client, key: client.break_lock(key, "lease"),
}


@pytest.mark.parametrize("use", WITH_A_KEY.values(), ids=WITH_A_KEY.keys())
@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("", "must not be empty"),
        ("x" * 2049, "2049 bytes.*at most 2048"),
        ("ü" * 1025, "2050 bytes"),
        ("broken \ud800", "lone surrogate"),
        (b"bytes", "must be text"),
        (None, "must be text"),
        (17, "must be text"),
    ],
)
def test_a_key_that_dynamodb_cannot_store_is_refused(
    use: Callable[[LockClient, Any], object], key: Any, message: str
) -> None:
    with pytest.raises(LockValueError, match=message):
        use(_client(), key)


@pytest.mark.parametrize("key", ["x" * 2048, "ü" * 1024, " ", "a/b c\n", "💡"])
def test_a_key_at_the_limit_is_accepted(key: str) -> None:
    assert arguments.checked_key(key) == key


BAD_TIMES: list[Any] = [
    -1,
    -0.001,
    math.nan,
    math.inf,
    -math.inf,
    True,
    "30",
    None,
    timedelta(seconds=-1),
    timedelta.max,
    1e300,
    10**400,
]


@pytest.mark.parametrize("value", [0, *BAD_TIMES], ids=repr)
@pytest.mark.parametrize("name", ["lease", "release_grace"])
def test_a_lease_must_be_a_positive_finite_time(name: str, value: Any) -> None:
    with pytest.raises(LockValueError, match=name):
        _client(**{name: value})
    if value is not None:  # None means the default of the client
        with pytest.raises(LockValueError, match=name):
            _client().try_acquire("k", **{name: value})


@pytest.mark.parametrize("value", [value for value in BAD_TIMES if value is not None], ids=repr)
@pytest.mark.parametrize(
    "use",
    [
        lambda value: _client(heartbeat=value),
        lambda value: _client(max_clock_skew=value),
        lambda value: _client().acquire("k", timeout=value),
        lambda value: _client().acquire("k", poll_interval=value),
        lambda value: _client().wait("k", timeout=value),
        lambda value: _client().wait("k", poll_interval=value),
        lambda value: _client().create_table(timeout=value),
    ],
    ids=[
        "heartbeat",
        "skew",
        "timeout",
        "poll_interval",
        "wait timeout",
        "wait poll_interval",
        "create_table",
    ],
)
def test_a_time_must_be_a_finite_number_of_seconds(use: Callable[[Any], object], value: Any) -> None:
    with pytest.raises(LockValueError, match="must be"):
        use(value)


@pytest.mark.parametrize("value", [0, 0.0, timedelta()])
def test_an_interval_of_zero_is_refused(value: Any) -> None:
    with pytest.raises(LockValueError, match="poll_interval must be a finite time, more than zero"):
        _client().acquire("k", poll_interval=value)
    with pytest.raises(LockValueError, match="heartbeat"):
        _client(heartbeat=value)


def test_seconds_may_be_given_as_a_number_or_a_timedelta() -> None:
    assert arguments.seconds("x", 2) == 2.0
    assert arguments.seconds("x", 0.5) == 0.5
    assert arguments.seconds("x", timedelta(minutes=2)) == 120.0
    assert arguments.seconds("x", 0, zero=True) == 0.0


def test_a_lease_shorter_than_two_heartbeats_is_refused() -> None:
    with pytest.raises(LockValueError, match="lease of 9 s is shorter than two heartbeats of 5 s"):
        _client(lease=9, heartbeat=5)
    with pytest.raises(LockValueError, match="two heartbeats"):
        _client(lease=30, heartbeat=5).try_acquire("k", lease=9)
    _client(lease=10, heartbeat=5)


@pytest.mark.parametrize(
    ("slots", "capacity", "message"),
    [
        (0, 1, "slots must be a whole number of at least 1"),
        (-1, 1, "slots must"),
        (1, 0, "capacity must"),
        (3, 2, "3 slots can never be free in a lock with a capacity of 2"),
        (True, 1, "slots must"),
        (1, True, "capacity must"),
        (1.0, 1, "slots must"),
        ("1", 1, "slots must"),
        (None, 1, "slots must"),
        (1, 10**40, "capacity must"),
    ],
)
def test_invalid_slots_and_capacities_are_refused(slots: Any, capacity: Any, message: str) -> None:
    with pytest.raises(LockValueError, match=message):
        _client().try_acquire("k", slots=slots, capacity=capacity)


@pytest.mark.parametrize("slots", [0, -1, True, 1.5, "1"])
def test_waiting_for_invalid_slots_is_refused(slots: Any) -> None:
    with pytest.raises(LockValueError, match="slots must"):
        _client().wait("k", slots=slots)


@pytest.mark.parametrize(
    "claim",
    [
        {"lease_id": ""},
        {"lease_id": uuid.UUID(int=1)},
        {"lease_id": "\ud800"},
        {"owner": 17},
        {"owner": "\ud800"},
        {"about": {"dag": 17}},
        {"about": {17: "dag"}},
        {"about": "dag"},
        {"attempt_of": 17},
        {"data": ["a", "list"]},
        {"data": "text"},
        {"data": {"at": datetime(2027, 1, 15, tzinfo=UTC)}},
        {"data": {"share": math.nan}},
        {"data": {"deep": {17: "x"}}},
        {"data": {"large": 10**39 + 1}},
        {"data": {"text": "\ud800"}},
        {"data": {"\ud800": 1}},
    ],
    ids=repr,
)
def test_a_claim_that_could_not_be_read_back_is_not_written(claim: dict[str, Any]) -> None:
    with pytest.raises(LockValueError):
        _client().try_acquire("k", **claim)


@pytest.mark.parametrize("table", ["", None, "ab", "no such name", "löcks", "x" * 256, "a/b", 17])
def test_an_invalid_table_name_is_refused(table: Any) -> None:
    with pytest.raises(LockValueError, match="cannot be the name of the lock table"):
        _client(table=table)


@pytest.mark.parametrize("table", ["abc", "A.b-c_9", "x" * 255, "arn:aws:dynamodb:eu-west-1:1:table/locks"])
def test_a_valid_table_name_is_accepted(table: str) -> None:
    _client(table=table)


def test_an_input_error_is_a_value_error_and_a_lock_error() -> None:
    assert issubclass(LockValueError, ValueError)
    assert issubclass(LockValueError, LockError)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -17,
        10**37,
        1.5,
        0.1,
        1e-100,
        "",
        "text",
        b"\x00\xff",
        [],
        [1, ["two", {"three": None}]],
        {},
        {"a": {"b": [False]}},
    ],
    ids=repr,
)
def test_a_value_survives_encoding_and_decoding(value: Any) -> None:
    read = decode(encode(value))
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    "attribute", [{}, {"S": "a", "N": "1"}, {"N": "many"}, {"X": "y"}, {"L": [{"X": "y"}]}], ids=repr
)
def test_an_invalid_attribute_value_is_not_decoded(attribute: Any) -> None:
    with pytest.raises(ValueError, match=r"not a|unknown"):
        decode(attribute)


def test_dynamodb_sets_are_read_as_lists() -> None:
    assert decode({"NS": ["1", "2.5"]}) == [1, 2.5]
    assert decode({"SS": ["a"]}) == ["a"]
