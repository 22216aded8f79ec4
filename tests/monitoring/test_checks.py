"""The findings about locks that are held, waited for or lost, and the limits from which they are reported."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_dynamo_lock.core.model.decisions import Decision, Loss
from airflow_dynamo_lock.core.model.record import LockRecord, Waiter
from airflow_dynamo_lock.core.model.state import LockState
from airflow_dynamo_lock.monitoring.checks import Limits, findings
from proof.simulator.stepped import a_holder

MIN, NOW = 60_000, 1_800_000_000_000


def a_waiter(owner: str = "south", since_ms: int = NOW, **changed: Any) -> Waiter:
    values: dict[str, Any] = {
        "key": "k",
        "place": "1",
        "lease_id": owner,
        "owner": owner,
        "slots": 1,
        "capacity": 1,
    }
    values |= {"priority": 0, "since_ms": since_ms, "until_ms": None, "process": None, "version": "v"}
    return Waiter(**(values | {"renewed_at_ms": None} | changed))


def a_state(*waiters: Waiter, key: str = "k", **changed: Any) -> LockState:
    """A lock, by default free."""
    holders = changed.pop("holders", {})
    record = LockRecord(key, 1, 1 - len(holders), holders, token=1, read_at_ms=NOW, **changed)
    return LockState(record, waiters, NOW)


def held(since_ms: int, **changed: Any) -> dict[str, Any]:
    return {"a": a_holder("a", **{"owner": "north", "acquired_at_ms": since_ms} | changed)}


def report(state: LockState, **limits: float) -> list[str]:
    return list(findings([state], Limits(**limits)))


def test_a_lock_that_is_held_over_the_limit_is_reported() -> None:
    state = a_state(holders=held(NOW - 10 * MIN, renewed_at_ms=NOW - 4000))

    assert report(state, held_ms=10 * MIN + 1) == []
    assert report(state, held_ms=10 * MIN) == [
        "The lock 'k' has been held for 10 min by north since 07:50 UTC, last heartbeat 4 s ago."
    ]


def test_the_longest_holder_of_a_semaphore_is_reported() -> None:
    holders = held(NOW - MIN) | {"b": a_holder("b", owner="east", acquired_at_ms=NOW - 5 * MIN)}
    state = LockState(LockRecord("k", 2, 0, holders, token=1), (), NOW)

    assert state.held_ms == 5 * MIN
    assert "by east" in report(state, held_ms=2 * MIN)[0]


def test_a_waiter_over_the_limit_is_reported_with_the_holder() -> None:
    state = a_state(
        a_waiter("urgent", NOW - MIN), a_waiter("south", NOW - 3 * MIN), holders=held(NOW - 10 * MIN)
    )

    assert report(state, waited_ms=3 * MIN + 1) == []
    assert report(state, waited_ms=3 * MIN) == [
        "south has waited for the lock 'k' for 3 min. Locked by north since 07:50 UTC."
    ]


@pytest.mark.parametrize("broken", [True, False])
def test_a_lost_lease_is_reported_for_a_while(broken: bool) -> None:
    loss = Loss("a", "north", NOW - MIN, broken, Decision("anna", "a drill") if broken else Decision())
    state = a_state(last_loss=loss)

    assert report(state, lost_ms=MIN - 1) == []
    how = "was broken by anna (a drill) at 2027-01-15 07:59:00 UTC"
    if not broken:
        how = "was reclaimed at 2027-01-15 07:59:00 UTC, because its heartbeats had stopped"
    assert report(state, lost_ms=MIN) == [f"north has lost the lock 'k': it {how}."]


def test_without_limits_nothing_is_reported() -> None:
    loss = Loss("a", "north", NOW, broken=True)
    assert report(a_state(a_waiter("south", 0), holders=held(0), last_loss=loss)) == []


def test_a_free_lock_has_no_times() -> None:
    state = a_state()
    assert (state.held_ms, state.waited_ms, state.silent_ms) == (0, 0, 0)
    assert report(state, held_ms=0, waited_ms=0, lost_ms=0) == []


def test_times_are_not_negative_if_the_clock_is_behind() -> None:
    state = a_state(a_waiter("south", NOW + MIN), holders=held(NOW + MIN, renewed_at_ms=NOW + MIN))
    assert (state.held_ms, state.waited_ms, state.silent_ms) == (0, 0, 0)


def test_a_holder_of_another_library_may_have_no_times() -> None:
    state = a_state(holders=held(0) | {"a": a_holder("a", acquired_at_ms=None)})
    assert (state.held_ms, state.silent_ms) == (0, 0)
    assert report(state, held_ms=0) == []


def test_control_characters_are_not_printed() -> None:
    state = a_state(a_waiter("so\nuth", 0), key="a\x1bb", holders=held(0, owner="no\rth"))
    for sentence in report(state, held_ms=0, waited_ms=0):
        assert sentence.isprintable()
