"""Attempts to acquire: each state of a lock's record, with one request where one is enough."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from airflow_dynamo_lock.core.model.errors import CapacityMismatchError
from airflow_dynamo_lock.core.model.outcomes import Busy, Granted
from proof.simulator.stepped import KEY, Host, World

LEASE = 30.0
SKEW = 10.0
#: Seconds after its last heartbeat at which a holder is dead by server time, also for a process that never read it.
LONG_DEAD = LEASE + SKEW + 1


def test_a_new_key_is_taken_with_one_write(world: World) -> None:
    granted = Host(world, "a").take()

    assert isinstance(granted, Granted)
    assert world.actions() == ["UpdateItem"]
    record = world.record()
    assert (record.capacity, record.available, list(record.holders)) == (1, 0, ["a"])
    assert record.token == granted.token


def test_a_released_lock_is_taken_with_one_write(world: World) -> None:
    Host(world, "a").take()
    Host(world, "a").release()
    world.sent.clear()

    assert isinstance(Host(world, "b").take(), Granted)
    assert world.actions() == ["UpdateItem"]
    assert list(world.record().holders) == ["b"]


def test_an_idle_lock_may_be_taken_with_another_capacity(world: World) -> None:
    a = Host(world, "a")
    a.take(slots=2, capacity=3)
    a.release(slots=2)

    a.take(slots=1, capacity=5)

    assert (world.record().capacity, world.record().available) == (5, 4)


def test_a_partly_held_lock_grants_its_free_slots(world: World) -> None:
    first = Host(world, "a").take(capacity=3)
    second = Host(world, "b").take(slots=2, capacity=3)

    assert isinstance(second, Granted)
    assert second.token == first.token + 1
    assert world.record().available == 0
    assert {name: holder.slots for name, holder in world.record().holders.items()} == {"a": 1, "b": 2}


def test_a_lock_with_too_few_free_slots_is_busy(world: World) -> None:
    Host(world, "a").take(slots=2, capacity=3)

    busy = Host(world, "b").take(slots=2, capacity=3)

    assert isinstance(busy, Busy)
    assert list(busy.record.holders) == ["a"]
    assert world.record().available == 1


def test_a_refusal_names_the_holder_without_another_request(world: World) -> None:
    Host(world, "prod/etl").take()
    world.sent.clear()

    busy = Host(world, "b").take()

    assert isinstance(busy, Busy)
    assert [holder.owner for holder in busy.record.holders.values()] == ["prod/etl"]
    assert world.actions() == ["UpdateItem"]


def test_an_engine_that_hides_the_refused_item_costs_one_consistent_read(
    make_world: Callable[..., World],
) -> None:
    world = make_world(shows_refused=False)
    Host(world, "a").take()
    world.sent.clear()

    busy = Host(world, "b").take()

    assert isinstance(busy, Busy)
    assert world.actions() == ["UpdateItem", "GetItem"]
    assert world.sent[1].params["ConsistentRead"] is True


def test_a_lock_released_between_refusal_and_read_is_taken(make_world: Callable[..., World]) -> None:
    world = make_world(shows_refused=False)
    a, b = Host(world, "a"), Host(world, "b")
    a.take()
    refused = b.start(b.operations.attempting.try_acquire(b.claim(), owns_lease_id=False)).step()
    a.release()

    assert isinstance(refused.finish(), Granted)


def test_a_dead_holder_is_reclaimed_in_the_write_that_acquires(world: World) -> None:
    host = Host(world, "a")
    host.take("before")
    host.release("before")
    first = host.take()
    world.now += LONG_DEAD
    world.sent.clear()

    granted = Host(world, "b").take()

    assert isinstance(granted, Granted)
    assert [dead.lease_id for dead in granted.reclaimed] == ["a"]
    assert granted.token == first.token + 1
    assert world.actions() == ["UpdateItem", "UpdateItem"], "the refused acquire, and the reclaim"
    assert list(world.record().holders) == ["b"]


def test_a_claim_reclaims_only_as_many_dead_holders_as_it_needs(world: World) -> None:
    for name in ("a", "b", "c"):
        Host(world, name).take(capacity=4)
    world.now += LONG_DEAD

    granted = Host(world, "d").take(slots=2, capacity=4)

    assert isinstance(granted, Granted)
    assert len(granted.reclaimed) == 1, "one slot was free, so one dead holder is enough"
    assert len(world.record().holders) == 3
    assert world.record().available == 0


def test_one_claim_reclaims_several_dead_holders(world: World) -> None:
    for name in ("a", "b", "c"):
        Host(world, name).take(capacity=3)
    world.now += LONG_DEAD
    Host(world, "alive").heartbeat("c")
    world.now += 1.0

    granted = Host(world, "d").take(slots=2, capacity=3)

    assert isinstance(granted, Granted)
    assert {dead.lease_id for dead in granted.reclaimed} == {"a", "b"}
    assert set(world.record().holders) == {"c", "d"}
    assert world.record().available == 0


def test_a_reclaim_of_more_slots_than_needed_frees_the_rest(world: World) -> None:
    Host(world, "big").take(slots=3, capacity=4)
    Host(world, "small").take(slots=1, capacity=4)
    world.now += LONG_DEAD
    Host(world, "alive").heartbeat("small")

    Host(world, "new").take(slots=1, capacity=4)

    assert world.record().available == 2


def test_dead_holders_with_too_few_slots_are_not_reclaimed(world: World) -> None:
    Host(world, "a").take(slots=2, capacity=3)
    Host(world, "dead").take(capacity=3)
    world.now += LONG_DEAD
    Host(world, "alive").heartbeat("a")
    before = world.item()

    assert isinstance(Host(world, "b").take(slots=2, capacity=3), Busy)
    assert world.item() == before


def test_a_lock_whose_holders_are_all_dead_may_be_taken_with_another_capacity(world: World) -> None:
    Host(world, "a").take(slots=2, capacity=3)
    Host(world, "b").take(slots=1, capacity=3)
    world.now += LONG_DEAD

    granted = Host(world, "c").take(slots=4, capacity=5)

    assert isinstance(granted, Granted)
    assert {dead.lease_id for dead in granted.reclaimed} == {"a", "b"}
    assert (world.record().capacity, world.record().available) == (5, 1)


def test_another_capacity_while_the_lock_is_in_use_is_an_error_that_names_both(world: World) -> None:
    Host(world, "prod/etl").take(capacity=2)
    before = world.item()

    with pytest.raises(CapacityMismatchError, match=r"capacity of 2, not 3.*prod/etl"):
        Host(world, "b").take(capacity=3)
    assert world.item() == before


def test_another_capacity_is_an_error_as_long_as_one_holder_lives(world: World) -> None:
    Host(world, "dead").take(capacity=2)
    Host(world, "a").take(capacity=2)
    world.now += LONG_DEAD
    Host(world, "alive").heartbeat("a")

    with pytest.raises(CapacityMismatchError):
        Host(world, "b").take(capacity=3)


def test_a_heartbeat_before_the_reclaim_is_written_keeps_the_lock(world: World) -> None:
    a, b = Host(world, "a"), Host(world, "b")
    a.take()
    world.now += LONG_DEAD
    about_to_reclaim = b.start(b.operations.attempting.try_acquire(b.claim(), owns_lease_id=False)).step()
    a.heartbeat()

    assert isinstance(about_to_reclaim.finish(), Busy)
    assert list(world.record().holders) == ["a"]


def test_only_one_of_two_reclaims_of_a_dead_holder_succeeds(world: World) -> None:
    Host(world, "dead").take()
    world.now += LONG_DEAD
    b, c = Host(world, "b"), Host(world, "c")
    about_to_reclaim = b.start(b.operations.attempting.try_acquire(b.claim(), owns_lease_id=False)).step()

    assert isinstance(c.take(), Granted)
    assert isinstance(about_to_reclaim.finish(), Busy)
    assert list(world.record().holders) == ["c"]


def test_two_processes_that_make_the_same_attempt_take_its_slots_once(world: World) -> None:
    """Two triggerers of Airflow may run the same trigger."""
    Host(world, "other").take(capacity=3)
    first, second = Host(world, "a"), Host(world, "b")
    attempts = [
        host.start(
            host.operations.attempting.try_acquire(host.claim("ti.id", capacity=3), owns_lease_id=False)
        ).step()
        for host in (first, second)
    ]

    granted = [attempt.finish() for attempt in attempts]

    assert all(isinstance(each, Granted) for each in granted)
    assert set(world.record().holders) == {"other", "ti.id"}
    assert world.record().available == 1


def test_a_holder_that_joins_during_a_reclaim_of_all_keeps_its_slot(world: World) -> None:
    Host(world, "dead").take(slots=2, capacity=3)
    world.now += LONG_DEAD
    b = Host(world, "b")
    about_to_reclaim = b.start(
        b.operations.attempting.try_acquire(b.claim(slots=2, capacity=3), owns_lease_id=False)
    ).step()
    assert isinstance(Host(world, "c").take(capacity=3), Granted)

    assert isinstance(about_to_reclaim.finish(), Granted)
    assert set(world.record().holders) == {"b", "c"}
    assert world.record().available == 0


def test_a_claim_that_loses_every_race_is_busy_in_the_end(
    make_world: Callable[..., World],
) -> None:
    world = make_world(shows_refused=False)
    rival, b = Host(world, "rival"), Host(world, "b")
    attempt = b.start(b.operations.attempting.try_acquire(b.claim(), owns_lease_id=False))

    while attempt.effect is not None:
        rival.take()
        attempt.step()  # the write
        rival.release()
        attempt.step()  # the read, which shows a free lock

    busy = attempt.finish()
    assert isinstance(busy, Busy)
    assert busy.record.token > 0, "the last lock snapshot"
    assert world.record().holders == {}


def test_data_is_stored_with_the_grant_and_kept_until_it_is_replaced(world: World) -> None:
    a = Host(world, "a")
    a.take(data={"offset": 17, "done": ["x"]})
    a.release()
    assert world.record().data == {"offset": 17, "done": ["x"]}

    a.take("again")
    assert world.record().data == {"offset": 17, "done": ["x"]}
    a.release("again")

    a.take("third", data={})
    assert world.record().data is None


def test_a_later_attempt_of_the_same_task_replaces_the_earlier_one(world: World) -> None:
    host = Host(world)
    host.take("attempt-1", attempt_of="dag/run/task")

    granted = host.take("attempt-2", attempt_of="dag/run/task")

    assert isinstance(granted, Granted)
    assert list(world.record().holders) == ["attempt-2"]


def test_a_later_attempt_drains_the_lease_of_an_earlier_one(world: World) -> None:
    host = Host(world)
    host.take("attempt-1", attempt_of="dag/run/task", grace_ms=7_000)
    host.enter("pid-1", "attempt-1")

    busy = host.take("attempt-2", attempt_of="dag/run/task")

    assert isinstance(busy, Busy)
    assert world.record().holders["attempt-1"].draining
    assert world.record().holders["attempt-1"].lease_ms == 7_000

    # The lock is free after that process has left.
    host.leave("pid-1", "attempt-1")
    assert isinstance(host.take("attempt-2", attempt_of="dag/run/task"), Granted)


def test_an_earlier_attempt_is_drained_only_once(world: World) -> None:
    host = Host(world)
    host.take("attempt-1", attempt_of="dag/run/task")
    host.enter("pid-1", "attempt-1")
    host.take("attempt-2", attempt_of="dag/run/task")
    before = world.item()

    host.take("attempt-2", attempt_of="dag/run/task")

    assert world.item() == before


def test_a_late_earlier_attempt_does_not_end_the_later_one(world: World) -> None:
    host = Host(world)
    host.take("attempt-2", attempt_of="dag/run/task")

    assert isinstance(host.take("attempt-1", attempt_of="dag/run/task"), Busy)
    assert list(world.record().holders) == ["attempt-2"]


@pytest.mark.parametrize("attempt_of", ["dag/run/other task", None])
def test_only_an_attempt_of_the_same_task_ends_a_holder(world: World, attempt_of: str | None) -> None:
    host = Host(world)
    host.take("attempt-1", attempt_of="dag/run/task")

    assert isinstance(host.take("attempt-2", attempt_of=attempt_of), Busy)
    assert list(world.record().holders) == ["attempt-1"]


def test_other_locks_and_other_entries_of_the_key_are_not_touched(world: World) -> None:
    other = {"key": {"S": KEY}, "entry": {"S": "waiter#1"}, "who": {"S": "me"}}
    world.client.put_item(TableName="locks", Item=other)

    Host(world, "a").take()
    Host(world, "b").take(key="warehouse/order")  # a prefix of the other key

    stored = world.client.get_item(TableName="locks", Key={"key": {"S": KEY}, "entry": {"S": "waiter#1"}})
    assert stored["Item"] == other
    assert list(world.record(KEY).holders) == ["a"]
    assert list(world.record("warehouse/order").holders) == ["b"]
