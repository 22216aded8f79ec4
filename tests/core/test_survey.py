"""The survey of all locks: one scan of the table shows each lock with its queue."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_dynamo_lock.core.lock.survey import survey
from airflow_dynamo_lock.core.model.errors import LockRecordError, LockVersionError
from airflow_dynamo_lock.core.model.state import LockState
from proof.simulator.stepped import KEY, TABLE, Host, World
from tests.core.test_hold_times import MIN, hold
from tests.core.test_queue import run_a_while, waiting

#: The simulated table has no scans.
pytestmark = pytest.mark.parametrize("client", ["moto"], indirect=True)


def surveyed(world: World, prefix: str = "", on_damaged: Any = None) -> dict[str, LockState]:
    host = Host(world, "observer")
    states = host.run(survey(host.operations.requests, prefix, on_damaged))
    assert [each.record.key for each in states] == sorted(each.record.key for each in states)
    return {each.record.key: each for each in states}


def owners(state: LockState) -> list[str]:
    return [each.owner for each in state.waiters]


def test_each_lock_has_its_own_queue_in_order(world: World) -> None:
    for key in ("a", "b"):
        Host(world, f"holder of {key}").take(key=key)
    waiting(Host(world, "first"), key="a")
    waiting(Host(world, "urgent"), key="a", priority=5)
    waiting(Host(world, "other"), key="b")
    world.sent.clear()

    found = surveyed(world)

    assert {key: owners(each) for key, each in found.items()} == {"a": ["urgent", "first"], "b": ["other"]}
    assert world.actions() == ["Scan"], "one scan, and no query for each queue"


def test_a_prefix_chooses_locks_and_their_waiters(world: World) -> None:
    for key in ("a/1", "b/1"):
        Host(world, f"holder of {key}").take(key=key)
        waiting(Host(world, f"waiter for {key}"), key=key)
    found = surveyed(world, "a/")
    assert {key: owners(each) for key, each in found.items()} == {"a/1": ["waiter for a/1"]}


@pytest.mark.parametrize("prefix", ["", "a"])
def test_a_waiter_is_shown_for_as_long_as_its_process_sends_heartbeats(world: World, prefix: str) -> None:
    Host(world, "holder").take(key="a", lease_ms=3_600_000)
    living, dead = Host(world, "living"), Host(world, "dead")
    waits = [waiting(host, key="a") for host in (living, dead)]
    run_a_while(living, living.presence.maintain(), 60.0)

    state = surveyed(world, prefix)["a"]
    assert owners(state) == ["living"]
    assert all(each.effect is not None for each in waits)
    assert prefix or set(surveyed(world)) == {"a"}, "the presence of the process is not shown as a lock"
    assert state.waited_ms == pytest.approx(60_000, abs=3000)


def test_a_waiter_is_shown_if_answers_have_no_date(world: World) -> None:
    """DynamoDB Local sends none. Then the age of a heartbeat is unknown."""
    world.dates = False
    Host(world, "holder").take(key="a", lease_ms=3_600_000)
    living = Host(world, "living")
    waits = waiting(living, key="a")
    run_a_while(living, living.presence.maintain(), 120.0)
    state = surveyed(world)["a"]
    assert owners(state) == ["living"]
    assert state.now_ms == world.server_ms, "by the clock of the host"
    assert waits.effect is not None


def test_a_waiter_that_was_granted_the_lock_is_not_shown(world: World) -> None:
    holder = Host(world, "holder")
    holder.take(key="a")
    paused = waiting(Host(world, "first"), key="a")
    holder.run(holder.operations.releasing.release("a", "holder", 1, 15_000, confirmed=True))
    while "first" not in world.record("a").holders:  # its waiter item still exists
        paused.step()
    assert owners(surveyed(world)["a"]) == []


def test_a_waiter_has_an_expected_wait_if_the_usual_time_is_known(world: World) -> None:
    hold(world, Host(world, "earlier"), 4)
    Host(world, "holder").take()
    waiting(Host(world, "first"))
    (waiter,) = surveyed(world)[KEY].waiters
    assert waiter.expected_wait_ms == pytest.approx(4 * MIN, abs=3000)


def test_a_damaged_record_is_left_out_and_reported(world: World) -> None:
    Host(world, "holder").take(key="good")
    world.client.put_item(TableName=TABLE, Item={"key": {"S": "bad"}, "entry": {"S": "lock"}})
    reported: list[LockRecordError] = []
    assert set(surveyed(world, on_damaged=reported.append)) == {"good"}
    assert "'bad'" in str(reported[0])


def test_waiters_of_a_newer_version_are_left_out_and_reported_once(world: World) -> None:
    Host(world, "holder").take(key="a")
    for name in ("first", "newer", "another"):
        waiting(Host(world, name), key="a")
    for entry in world.client.scan(TableName=TABLE)["Items"]:
        if entry.get("owner", {}).get("S") in ("newer", "another"):
            world.client.put_item(TableName=TABLE, Item={**entry, "format_version": {"N": "2"}})
    reported: list[LockRecordError] = []

    found = surveyed(world, on_damaged=reported.append)

    assert owners(found["a"]) == ["first"]
    assert [type(each) for each in reported] == [LockVersionError]


def test_a_damaged_record_is_logged_by_default(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.client.put_item(TableName=TABLE, Item={"key": {"S": "bad"}, "entry": {"S": "lock"}})
    assert surveyed(world) == {}
    assert "'bad'" in caplog.text
