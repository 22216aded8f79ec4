"""Decisions of people: a broken lease and a removed waiter (R15) end for good, with the name and the reason."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_dynamo_lock.core.model.decisions import Decision, Removal
from airflow_dynamo_lock.core.model.errors import LockNotWaitingError, LockRemovedError
from airflow_dynamo_lock.core.model.outcomes import Busy, Granted, Lost
from airflow_dynamo_lock.core.table.items import REMOVED_PREFIX
from proof.simulator.stepped import KEY, UNSENT, Host, World
from tests.core.test_queue import owners, until_waiting, waiting, woken

DECISION = Decision(by="anna", reason="the host is gone")


@pytest.fixture
def host(world: World) -> Host:
    return Host(world, "a")


def release(host: Host) -> None:
    """Release the host's lease as its holder does."""
    host.run(host.operations.releasing.release_all([host.lease(host.name)], confirmed=True))


def break_(world: World, lease_id: str, decision: Decision = DECISION) -> None:
    person = Host(world, "person")
    person.run(person.operations.admin.break_(KEY, lease_id, decision))


def remove(world: World, lease_id: str, decision: Decision = DECISION) -> str:
    """Remove a waiter. Returns its owner."""
    person = Host(world, "person")
    return person.run(person.operations.admin.remove_waiter(KEY, lease_id, decision)).owner


# -- how the last lease ended -----------------------------------------------------------------------------------------


def test_a_release_records_the_name_of_the_holder(world: World, host: Host) -> None:
    host.take()
    release(host)

    record = world.record()
    assert (record.previous_owner, record.last_loss) == ("a", None)
    assert record.last_freed_at_ms == world.server_ms // 1000 * 1000, "with the precision of Date"


def test_an_undo_records_no_name(world: World, host: Host) -> None:
    host.take()
    host.run(host.operations.attempting.undo([host.claim()]))
    host.take(min_hold_ms=1000)
    host.run(host.operations.attempting.undo([host.claim(min_hold_ms=1000)]))

    assert (world.record().previous_owner, world.record().last_loss) == (None, None)


def test_a_lease_that_a_later_attempt_ends_leaves_no_name_and_no_usual_time(world: World, host: Host) -> None:
    attempt: dict[str, Any] = {"attempt_of": "work/", "min_hold_ms": 60_000}
    host.take("work/1", **attempt)
    world.now += 5.0
    assert isinstance(host.take("work/2", **attempt), Busy)

    record = world.record()
    assert record.holders["work/1"].cooling_down
    assert (record.previous_owner, record.usual_ms) == (None, None)


def test_the_record_says_who_broke_a_lease_and_why(world: World, host: Host) -> None:
    host.take()
    break_(world, "a")

    record = world.record()
    assert record.previous_owner == "a"
    assert record.last_loss is not None
    assert record.last_loss.as_dict() == {
        "lease_id": "a",
        "owner": "a",
        "at": "2027-01-15T08:00:00.000+00:00",
        "broken": True,
        "by": "anna",
        "reason": "the host is gone",
    }


def test_the_heartbeat_of_a_broken_lease_names_who_broke_it(world: World, host: Host) -> None:
    host.take()
    break_(world, "a")

    lost = host.heartbeat()

    assert isinstance(lost, Lost)
    assert lost.describe() == (
        "it was broken by anna (the host is gone) at 2027-01-15 08:00:00 UTC, and the lock is not locked now"
    )


def test_a_break_without_a_name_is_described_without_one(world: World, host: Host) -> None:
    host.take()
    break_(world, "a", Decision())
    assert host.heartbeat().describe().startswith("it was broken at 2027-01-15 08:00:00 UTC, and")


def test_a_holder_does_not_report_the_loss_of_another_lease(world: World, host: Host) -> None:
    host.take("other", capacity=2)
    host.take(capacity=2)
    break_(world, "other")
    release(host)

    assert host.heartbeat().describe().startswith("it was released, broken or reclaimed")


def test_a_reclaim_records_the_loss_of_the_dead_holder(world: World, host: Host) -> None:
    host.take()
    world.now += 100
    assert isinstance(Host(world, "next").take(), Granted)

    loss = world.record().last_loss
    assert loss is not None
    assert (loss.owner, loss.broken, loss.decision) == ("a", False, Decision())
    assert (
        host.heartbeat()
        .describe()
        .startswith(
            "it was reclaimed at 2027-01-15 08:01:40 UTC, because its heartbeats had stopped. Locked by next"
        )
    )


def test_a_removal_of_dead_holders_without_a_grant_records_a_loss(world: World) -> None:
    for number in range(45):
        Host(world, f"reader-{number}").take(slots=1, capacity=45)
    world.now += 100
    assert isinstance(Host(world, "next").take(slots=45, capacity=45), Granted)
    assert world.record().last_loss is not None


@pytest.mark.parametrize("ended", ["drained", "cooling down"])
def test_a_lease_that_its_holder_has_ended_is_no_loss(world: World, host: Host, ended: str) -> None:
    if ended == "drained":
        host.take()
        host.enter("killed")
    else:
        host.take(min_hold_ms=20_000)
    host.release()
    assert world.record().holders["a"].draining
    world.now += 100
    assert isinstance(Host(world, "next").take(), Granted)
    assert world.record().last_loss is None


# -- removed waiters (R15) --------------------------------------------------------------------------------------------


def test_a_removed_waiter_ends_with_the_reason(world: World) -> None:
    Host(world, "holder").take()
    paused = waiting(Host(world, "first"))
    waiting(Host(world, "second"))

    assert remove(world, "first") == "first"

    assert owners(world) == ["second"]
    with pytest.raises(
        LockRemovedError, match=rf"This wait for the lock '{KEY}' was ended by anna \(the host is gone\)"
    ):
        woken(paused)
    assert owners(world) == ["second"], "and it does not queue again"


def test_the_next_waiter_is_granted_after_a_removal(world: World) -> None:
    holder = Host(world, "holder")
    holder.take()
    waiting(Host(world, "first"))
    second = waiting(Host(world, "second"))
    remove(world, "first")
    holder.release()

    assert woken(second) is not None


def test_a_removal_of_the_last_waiter_leaves_no_queue(world: World) -> None:
    holder = Host(world, "holder")
    holder.take()
    paused = waiting(Host(world, "first"))
    remove(world, "first")
    with pytest.raises(LockRemovedError):
        woken(paused)
    holder.release()
    assert world.record().queue_head is None


def test_a_waiter_that_is_removed_while_it_takes_the_lock_does_not_get_it(world: World) -> None:
    holder = Host(world, "holder")
    holder.take()
    paused = waiting(Host(world, "first"))
    holder.release()
    paused.step()  # woken
    paused.step()  # it has read the queue, and the lock is free for it

    remove(world, "first")

    with pytest.raises(LockRemovedError):
        paused.finish()
    assert world.record().holders == {}


@pytest.mark.parametrize("capacity", [1, 2])
@pytest.mark.parametrize("dead", [True, False])
@pytest.mark.parametrize("failed", [True, False])
def test_no_kind_of_grant_gives_a_lock_to_a_removed_waiter(
    world: World, capacity: int, dead: bool, failed: bool
) -> None:
    """Its entry has the first lease id. After an attempt that failed, the claim has a new one."""
    holders = [Host(world, f"holder-{number}") for number in range(capacity)]
    for each in holders:
        each.take(capacity=capacity)
    paused = waiting(Host(world, "first"), capacity=capacity)
    if failed:
        world.faults.append(UNSENT)
        until_waiting(paused.step())
    if dead:
        world.now += 12
        for each in holders[1:]:
            each.heartbeat()
        world.now += 31
    else:
        holders[0].release()
    paused.step()
    paused.step()
    remove(world, "first")

    with pytest.raises(LockRemovedError):
        paused.finish()
    assert "first" not in world.record().holders


def test_a_waiter_that_has_just_been_granted_the_lock_is_not_removed(world: World) -> None:
    holder = Host(world, "holder")
    holder.take()
    paused = waiting(Host(world, "first"))
    holder.release()
    while "first" not in world.record().holders:  # granted; its entry is still there
        paused.step()

    with pytest.raises(LockNotWaitingError, match=r"does not wait for the lock .* Locked by first"):
        remove(world, "first")
    assert isinstance(paused.finish(), Granted)
    assert world.record().removals == {}


def test_a_removal_that_arrives_after_the_record_was_deleted_writes_no_record(world: World) -> None:
    Host(world, "holder").take()
    waiting(Host(world, "first"))
    person = Host(world, "person")
    removal = person.start(person.operations.admin.remove_waiter(KEY, "first", DECISION)).until("UpdateItem")
    world.delete()

    with pytest.raises(LockNotWaitingError, match="Not locked"):
        removal.finish()
    assert world.item() is None


def test_a_claimant_that_does_not_wait_cannot_be_removed(world: World, host: Host) -> None:
    with pytest.raises(LockNotWaitingError, match="Not locked"):
        remove(world, "nobody")
    host.take()
    with pytest.raises(LockNotWaitingError, match="Locked by a"):
        remove(world, "nobody")


def test_another_process_that_continues_the_wait_of_a_removed_waiter_ends_too(world: World) -> None:
    Host(world, "holder").take()
    waiting(Host(world, "triggerer-1"), lease_id="attempt", owns_lease_id=False)
    remove(world, "attempt")

    with pytest.raises(LockRemovedError):
        until_waiting(Host(world, "triggerer-2").start_acquire("attempt", owns_lease_id=False))
    assert owners(world) == []


def test_a_write_under_way_does_not_get_the_lock_for_a_claim_that_was_removed_meanwhile(world: World) -> None:
    """Its process has written no entry; another process of the claim had."""
    late = Host(world, "triggerer-1").start_acquire("attempt", owns_lease_id=False).until("UpdateItem")
    holder = Host(world, "holder")
    holder.take()
    other = waiting(Host(world, "triggerer-2"), lease_id="attempt", owns_lease_id=False)
    remove(world, "attempt")
    with pytest.raises(LockRemovedError):
        woken(other)
    holder.release()

    with pytest.raises(LockRemovedError):
        late.finish()
    assert world.record().holders == {}


def test_the_record_forgets_removals_after_an_hour(world: World) -> None:
    Host(world, "holder").take(capacity=2)
    Host(world, "another").take(capacity=2)
    for name in ("old", "new", "third"):
        waiting(Host(world, name), capacity=2)
        remove(world, name)
        if name == "old":
            world.now += 3590
            for each in ("holder", "another"):
                Host(world, each).heartbeat()
        world.now += 6
    assert set(world.record().removals) == {"new", "third"}


def test_the_record_keeps_twenty_removals(world: World) -> None:
    Host(world, "holder").take(lease_ms=3_600_000)
    for number in range(25):
        waiting(Host(world, f"waiter-{number}"))
        remove(world, f"waiter-{number}")
        world.now += 1
    assert set(world.record().removals) == {f"waiter-{number}" for number in range(4, 25)}


def test_a_damaged_removal_note_still_removes_the_waiter(world: World, host: Host) -> None:
    host.take()
    paused = waiting(Host(world, "first"))
    item = world.item()
    assert item is not None
    world.client.put_item(TableName="locks", Item=item | {f"{REMOVED_PREFIX}first": {"S": "?"}})
    with pytest.raises(LockRemovedError, match="was ended by hand"):
        woken(paused)
    assert world.record().removals == {"first": Removal(0)}


def test_a_damaged_loss_is_read_as_none(world: World, host: Host) -> None:
    host.take()
    item = world.item()
    assert item is not None
    damages: list[dict[str, Any]] = [
        {"S": "?"},
        {"M": {}},
        {"M": {"lease_id": {"S": "a"}, "owner": {"N": "1"}}},
    ]
    for damaged in damages:
        world.client.put_item(
            TableName="locks", Item=item | {"last_loss": damaged, "previous_owner": {"N": "1"}}
        )
        assert (world.record().last_loss, world.record().previous_owner) == (None, None)


def test_a_removal_may_have_a_reason_and_no_name(world: World, host: Host) -> None:
    host.take()
    paused = waiting(Host(world, "first"))
    remove(world, "first", Decision(reason="a mistake"))
    with pytest.raises(LockRemovedError, match=r"was ended by hand \(a mistake\)\."):
        woken(paused)
