"""What people are shown of a lock: its state, and how long it is held, waited for and without a heartbeat."""

from __future__ import annotations

from dataclasses import replace

import pytest

from airflow_dynamo_lock.core.model.limits import SHARED
from airflow_dynamo_lock.core.model.state import LockState
from airflow_dynamo_lock.core.model.waits import Wait
from airflow_dynamo_lock.core.table.items import waiter_values
from proof.simulator.stepped import a_holder
from tests.core.test_details import a_record, a_waiter

WAITER = replace(a_waiter("0999/1/w"), since_ms=2_000)
NOW_MS = 10_000


@pytest.mark.parametrize(
    ("capacity", "holders", "pinned", "state"),
    [
        (1, "", False, "free"),
        (1, "a", False, "held"),
        (1, "a", True, "1 of 1 slots"),
        (3, "", False, "0 of 3 slots"),
        (3, "ab", False, "2 of 3 slots"),
        (SHARED, "", False, "free"),
        (SHARED, "ab", False, "shared by 2"),
    ],
)
def test_the_state_of_a_lock_is_told_in_a_few_words(
    capacity: int, holders: str, pinned: bool, state: str
) -> None:
    assert a_record(capacity, capacity - len(holders), *holders, capacity_pinned=pinned).state == state


def test_a_state_tells_the_longest_times() -> None:
    times = {"a": (4_000, 7_000), "b": (1_000, 5_000), "c": (None, None)}
    holders = {
        name: a_holder(name, acquired_at_ms=acquired, renewed_at_ms=renewed)
        for name, (acquired, renewed) in times.items()
    }
    waiters = (replace(WAITER, lease_id="late", since_ms=6_000), WAITER)

    state = LockState(replace(a_record(3, 0), holders=holders), waiters, NOW_MS)

    longest = state.longest_holder()
    assert longest is not None
    assert longest.lease_id == "b"
    assert state.longest_waiter() == WAITER
    assert (state.held_ms, state.waited_ms, state.silent_ms) == (9_000, 8_000, 5_000)


@pytest.mark.parametrize("since_ms", [None, NOW_MS + 2_000], ids=["not known", "by a clock that is ahead"])
def test_a_time_that_is_not_known_or_in_the_future_counts_as_0(since_ms: int | None) -> None:
    holder = a_holder("a", acquired_at_ms=since_ms, renewed_at_ms=since_ms)
    waiters = () if since_ms is None else (replace(WAITER, since_ms=since_ms),)

    state = LockState(replace(a_record(1, 0), holders={"a": holder}), waiters, NOW_MS)

    assert (state.held_ms, state.waited_ms, state.silent_ms) == (0, 0, 0)


def test_three_of_the_locks_that_a_holder_waits_for_are_named() -> None:
    waits = {"a/set": Wait("a/set", 1, ("k1", "k2", "k3", "k4"), 1, 1)}
    assert a_holder("a", waits=waits).describe(None).endswith(", waiting for 'k1', 'k2', 'k3'")


def test_a_waiter_tells_its_expected_wait_in_seconds() -> None:
    assert replace(WAITER, expected_wait_ms=1_500).as_dict()["expected_wait_seconds"] == 1.5


def test_the_entry_of_a_waiter_for_one_lock_has_no_size_of_a_set() -> None:
    assert "set_size" not in waiter_values(WAITER)
