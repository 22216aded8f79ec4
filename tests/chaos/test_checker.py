"""The checker finds each violation in made-up evidence, and only violations.

The helpers make the events, records and incidents of a lock ``k`` with leases of 10 s. A process has the role
``p`` and its number, and a link of its own. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from proof.chaos.checker import violations
from proof.chaos.evidence import Evidence, Incident
from proof.chaos.log import Event
from proof.chaos.records import Held, Record, Records
from proof.chaos.settings import PASSING_OVER, POLL

LEASE = 10.0
#: Longest time, in seconds, for which a waiter waits beside free slots.
WAIT = POLL + PASSING_OVER


def event(at: float, process: int, what: str, **more: Any) -> Event:
    return Event(at, f"p{process}", process, what, {"use": str(process), **more})


def requested(at: float, process: int, *, slots: int = 1, capacity: int = 1) -> Event:
    """The process begins an attempt to acquire."""
    return event(at, process, "requested", key="k", slots=slots, capacity=capacity)


def granted(
    at: float,
    process: int,
    token: int,
    *,
    asked: float | None = None,
    lease_id: str | None = None,
    slots: int = 1,
    capacity: int = 1,
    what: str = "granted",
) -> Event:
    """The process receives a grant, or enters a lease, and counts on it for 9 s after the request.

    :param asked: when it sent the request. Default the time of the grant.
    :param lease_id: default an id that no other process uses.
    :param what: ``granted`` or ``entered``.
    """
    lease = {
        "key": "k",
        "lease_id": lease_id or f"lease {process}",
        "token": token,
        "slots": slots,
        "capacity": capacity,
        "lease_ms": LEASE * 1000,
    }
    until = (at if asked is None else asked) + 0.9 * LEASE
    return event(at, process, what, lease=lease, until=until, reclaimed=[])


def renewed(at: float, process: int) -> Event:
    """A heartbeat of the process succeeds."""
    return event(at, process, "renewed", until=at + 0.9 * LEASE)


def record(at: float, token: int, *holders: tuple[str, float], capacity: int = 1) -> Record:
    """The record after a write.

    :param holders: each holder's name, and the time of its last heartbeat. Each holds one slot.
    """
    held = {name: Held(name, 1, LEASE, f"{name} {since}", False, since) for name, since in holders}
    return Record(at, at, "k", "write", token, capacity, capacity - len(held), held)


def found(
    events: Sequence[Event], *, incidents: Sequence[Incident] = (), records: Sequence[Record] = ()
) -> list[str]:
    """Return the types of the violations that the checker finds in a run of 100 s."""
    evidence = Evidence(
        engine="none",
        began=0,
        calm=100,
        ended=100,
        dated=False,
        events=sorted(events, key=lambda event: event.at),
        incidents=incidents,
        histories={"k": records},
        links={f"p{process}": f"link {process}" for process in range(10)},
    )
    return [violation.what for violation in violations(evidence)]


# -- exclusion -----------------------------------------------------------------------------------------------


def test_two_holders_at_once_are_found() -> None:
    assert found([granted(0, 1, 1), granted(8.9, 2, 2)]) == ["exclusion"]


def test_a_holder_whose_term_has_ended_does_not_count() -> None:
    assert found([granted(0, 1, 1), granted(9.1, 2, 2)]) == []


def test_a_holder_that_has_renewed_still_counts() -> None:
    assert found([granted(0, 1, 1), renewed(5, 1), granted(9.1, 2, 2)]) == ["exclusion"]


@pytest.mark.parametrize("end", ["releasing", "handed_over", "lost", "failed", "leaving"])
def test_a_holder_that_has_given_up_does_not_count(end: str) -> None:
    assert found([granted(0, 1, 1), event(4, 1, end), granted(4.1, 2, 2)]) == []
    assert found([granted(0, 1, 1), event(4, 1, end), granted(3.9, 2, 2)]) == ["exclusion"]


def test_a_killed_holder_does_not_count_but_a_stopped_one_does() -> None:
    overlap = [granted(0, 1, 1), granted(5, 2, 2)]
    assert found(overlap, incidents=[Incident("SIGKILL", 4, 4, process=1)]) == []
    assert found(overlap, incidents=[Incident("SIGSTOP", 4, 20, process=1)]) == ["exclusion"]


def test_more_held_slots_than_the_capacity_are_found() -> None:
    three = [granted(i, i, i, capacity=3) for i in (1, 2, 3)]
    assert found(three) == []
    assert found([*three, granted(4, 4, 4, capacity=3)]) == ["exclusion"]
    assert found([*three[:2], granted(4, 4, 4, capacity=3, slots=2)]) == ["exclusion"]


def test_processes_inside_share_one_lease() -> None:
    group = [granted(0, 1, 1, lease_id="group"), event(1, 1, "handed_over")]
    group += [granted(2, process, 1, lease_id="group", what="entered") for process in (2, 3)]
    assert found(group) == []
    assert found([*group, granted(4, 4, 2)]) == ["exclusion"]


def test_the_holder_of_a_broken_lease_does_not_count_from_then_on() -> None:
    broken = event(4, 9, "breaking", lease_id="lease 1")
    assert found([granted(0, 1, 1), broken, granted(5, 2, 2)]) == []
    assert found([granted(0, 1, 1), broken, granted(3, 2, 2)]) == ["exclusion"]
    assert found([granted(0, 1, 1), broken, granted(5, 2, 2), granted(6, 3, 3)]) == ["exclusion"]


# -- fencing -------------------------------------------------------------------------------------------------


def test_tokens_that_repeat_or_go_back_are_found() -> None:
    assert found([granted(0, 1, 7), granted(20, 2, 7)]) == ["fencing"]
    assert found([granted(0, 1, 7), granted(20, 2, 6)]) == ["fencing"]
    assert found([granted(0, 1, 7), granted(20, 2, 8)]) == []


def test_concurrent_grants_have_no_order() -> None:
    assert found([granted(10, 1, 7, asked=0, capacity=2), granted(9, 2, 8, asked=8, capacity=2)]) == []


# -- progress ------------------------------------------------------------------------------------------------


def test_a_free_lock_that_a_waiter_does_not_get_is_found() -> None:
    free = [record(0, 1)]
    assert found([requested(10, 1), granted(WAIT + 13, 1, 2)], records=free) == []
    assert found([requested(10, 1), granted(WAIT + 15, 1, 2)], records=free) == ["progress"]
    assert found([requested(10, 1)], records=free) == ["progress"], "the waiter never gets the lock"


def test_a_dead_holder_that_is_not_reclaimed_is_found() -> None:
    dead = [record(0, 1, ("dead", 0.0))]
    assert found([requested(-5, 1), granted(WAIT + 13, 1, 2)], records=dead) == []
    assert found([requested(-5, 1), granted(WAIT + 15, 1, 2)], records=dead) == ["progress"]
    assert found([requested(5, 1), granted(WAIT + 15, 1, 2)], records=dead) == [], (
        "it requested after the last heartbeat, and must observe for a whole lease"
    )
    alive = [record(at, 1, ("dead", at)) for at in (0.0, 3.0, 6.0, 9.0)]
    assert found([requested(-5, 1), granted(WAIT + 15, 1, 2)], records=alive) == []


def test_a_waiter_that_is_disturbed_must_observe_again() -> None:
    dead = [record(0, 1, ("dead", 0.0))]
    waits = [requested(-5, 1), granted(WAIT + 16, 1, 2)]
    assert found(waits, records=dead, incidents=[Incident("connection reset", 6, 7, link="link 1")]) == []
    assert found(waits, records=dead, incidents=[Incident("connection reset", 6, 7, everywhere=True)]) == []
    assert found(waits, records=dead, incidents=[Incident("SIGSTOP", 6, 7, process=1)]) == []
    assert found(waits, records=dead, incidents=[Incident("connection reset", 6, 7, link="link 2")]) == [
        "progress"
    ]


def test_one_free_slot_is_not_enough_for_two() -> None:
    some = [record(at, 1, ("a", at), capacity=2) for at in range(0, 64, 4)]
    assert found([requested(0, 1, capacity=2), granted(62, 1, 2, capacity=2)], records=some) == ["progress"]
    assert found([requested(0, 1, slots=2, capacity=2), granted(62, 1, 2, capacity=2)], records=some) == []


# -- order ---------------------------------------------------------------------------------------------------


def test_errors_and_damaged_records_are_found() -> None:
    assert found([event(0, 1, "failed", error="LockUnavailableError", why="")]) == []
    assert found([event(0, 1, "failed", error="LockRecordError", why="")]) == ["order"]
    assert found([event(0, 1, "error", trace="KeyError")]) == ["order"]
    whole = record(0, 1, ("a", 0.0))
    assert found([], records=[whole]) == []
    assert found([], records=[Record(**{**vars(whole), "available": 1})]) == ["order"]


# -- records -------------------------------------------------------------------------------------------------


def test_concurrent_answers_are_put_in_the_order_of_their_tokens() -> None:
    released = Record(1.1, 0.9, "k", "release", 1, 1, 1, {})
    taken = Record(1.0, 0.95, "k", "acquire", 2, 1, 0, record(1.0, 2, ("a", 1.0)).holders)
    records = Records()
    records.add(taken)
    records.add(released)
    assert records.of["k"] == [released, taken]
