"""Locks of other kinds: shared ones, semaphores whose capacity is set, and those that are held for a while at least."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_dynamo_lock.core.model.errors import CapacityMismatchError, LockUnavailableError, LockValueError
from airflow_dynamo_lock.core.model.limits import SHARED
from airflow_dynamo_lock.core.model.outcomes import Busy, CapacitySet, Granted, Released
from airflow_dynamo_lock.core.model.record import LockRecord
from proof.simulator.stepped import KEY, LOST, Host, World, a_lease
from tests.core.test_queue import waiting, woken


def share(host: Host) -> Any:
    return host.take(capacity=SHARED)


def set_capacity(host: Host, capacity: int | None) -> LockRecord:
    outcome = host.run(host.operations.admin.set_capacity(KEY, capacity))
    assert isinstance(outcome, CapacitySet)
    return outcome.record


# -- shared and exclusive ---------------------------------------------------------------------------------------------


def test_those_who_share_hold_it_together_and_with_nobody_else(world: World) -> None:
    readers = [Host(world, f"reader {number}") for number in range(3)]
    tokens = {share(reader).token for reader in readers}
    assert len(tokens) == 3
    assert world.record().mode == "shared"

    busy = Host(world, "writer").take()

    assert isinstance(busy, Busy)
    for reader in readers:
        assert isinstance(Host(world, "writer").take(), Busy)
        assert isinstance(reader.release(), Released)
    assert isinstance(Host(world, "writer").take(), Granted)
    assert isinstance(share(readers[0]), Busy)
    assert world.record().mode == "exclusive"


def test_a_shared_lock_takes_the_place_of_a_dead_writer_and_a_writer_that_of_dead_readers(
    world: World,
) -> None:
    Host(world, "writer").take()
    world.now += 60.0

    granted = share(Host(world, "reader"))

    assert isinstance(granted, Granted)
    assert granted.took_over
    assert isinstance(share(Host(world, "another reader")), Granted)
    world.now += 60.0
    writer = Host(world, "another writer").take()
    assert isinstance(writer, Granted)
    assert len(writer.reclaimed) == 2


def test_a_waiting_writer_is_not_starved_by_readers_that_keep_coming(world: World) -> None:
    first, writer, second = (Host(world, name) for name in ("reader", "writer", "another reader"))
    share(first)
    waits = waiting(writer)

    assert isinstance(share(second), Busy), "it would overtake the writer"
    late = waiting(second, capacity=SHARED)
    first.release()
    assert woken(late) is None
    assert woken(waits) is not None
    writer.release()
    assert woken(late) is not None


def test_a_lock_in_use_as_a_semaphore_is_not_shared(world: World) -> None:
    Host(world, "etl").take(capacity=3)

    with pytest.raises(
        CapacityMismatchError, match=r"as a semaphore with a capacity of 3, not as a shared lock.*etl"
    ):
        share(Host(world, "reader"))


def test_a_shared_lock_is_not_used_as_a_semaphore(world: World) -> None:
    share(Host(world, "reader"))

    with pytest.raises(CapacityMismatchError, match=r"as a shared lock, not as a semaphore.*reader"):
        Host(world, "etl").take(capacity=3)


# -- a capacity that was set ------------------------------------------------------------------------------------------


def test_a_semaphore_that_is_held_gets_more_slots(world: World) -> None:
    holder, other = Host(world, "holder"), Host(world, "other")
    holder.take(slots=2, capacity=2)
    assert isinstance(other.take(capacity=2), Busy)

    record = set_capacity(Host(world, "operator"), 3)

    assert (record.capacity, record.available) == (3, 1)
    assert isinstance(other.take(capacity=2), Granted)
    assert isinstance(Host(world, "third").take(capacity=2), Busy)


def test_a_semaphore_that_is_held_gets_fewer_slots_and_nobody_loses_a_lease(world: World) -> None:
    holders = [Host(world, f"holder {number}") for number in range(3)]
    for holder in holders:
        holder.take(capacity=3)

    record = set_capacity(Host(world, "operator"), 1)

    assert (record.capacity, record.available, len(record.holders)) == (1, -2, 3)
    for holder in holders:
        assert isinstance(Host(world, "newcomer").take(capacity=3), Busy)
        holder.release()
    assert isinstance(Host(world, "newcomer").take(capacity=3), Granted)
    assert isinstance(Host(world, "another").take(capacity=3), Busy)


def test_a_capacity_that_was_set_counts_until_it_is_taken_back(world: World) -> None:
    operator, holder = Host(world, "operator"), Host(world, "holder")
    set_capacity(operator, 2)  # of a lock never used before
    for _ in range(2):
        holder.take(capacity=5)
        assert world.record().capacity == 2
        holder.release()

    set_capacity(operator, None)

    holder.take(capacity=5)
    assert world.record().capacity == 5


def test_more_slots_than_the_capacity_that_was_set_are_refused(world: World) -> None:
    set_capacity(Host(world, "operator"), 2)

    with pytest.raises(LockValueError, match=r"3 slots can never be free in the lock .*set to 2"):
        Host(world, "etl").take(slots=3, capacity=5)


def test_a_lock_whose_capacity_was_set_is_no_plain_lock(world: World) -> None:
    set_capacity(Host(world, "operator"), 2)

    with pytest.raises(
        CapacityMismatchError, match=r"capacity of 2, which was set.*set_capacity\(key, None\)"
    ):
        Host(world, "etl").take()


@pytest.mark.parametrize("capacity", [1, SHARED])
def test_nor_if_the_capacity_that_was_set_is_that_of_one(world: World, capacity: int) -> None:
    """Else its holder would have to share it, once more slots were made."""
    operator, semaphore = Host(world, "operator"), Host(world, "semaphore")
    set_capacity(operator, capacity)

    with pytest.raises(CapacityMismatchError, match="which was set"):
        Host(world, "plain").take(capacity=capacity)
    assert isinstance(semaphore.take(capacity=3), Granted)
    set_capacity(operator, 3)
    assert isinstance(Host(world, "another").take(capacity=3), Granted)


def test_a_capacity_is_taken_back_when_nobody_counts_on_it(world: World) -> None:
    operator, holder, waiter = (Host(world, name) for name in ("operator", "holder", "waiter"))
    set_capacity(operator, 1)
    holder.take(capacity=5)
    waits = waiting(waiter, capacity=5)

    with pytest.raises(
        CapacityMismatchError, match=r"cannot be unset while the lock is held.*Locked by holder"
    ):
        set_capacity(operator, None)

    assert woken(waits) is None, "it waits on"
    holder.release()
    assert woken(waits) is not None
    waiter.release()
    assert set_capacity(operator, None).capacity == 1
    assert isinstance(holder.take(capacity=5), Granted)


def test_who_waits_for_a_semaphore_is_not_overtaken_when_it_gets_more_slots(world: World) -> None:
    for number in range(3):
        Host(world, f"holder {number}").take(capacity=3, lease_ms=3_600_000)
    waits = [waiting(Host(world, f"waiter {number}"), capacity=3, lease_ms=3_600_000) for number in range(50)]

    set_capacity(Host(world, "operator"), 33)

    assert woken(waits[-1]) is None
    assert [number for number, each in enumerate(waits) if woken(each) is not None] == list(range(30))


def test_what_can_never_be_free_is_not_waited_for(world: World) -> None:
    set_capacity(Host(world, "operator"), 3)
    looker = Host(world, "looker")

    _, room = looker.run(looker.operations.acquiring.look(KEY, 3, None))
    assert room
    with pytest.raises(LockValueError, match="5 slots can never be free"):
        looker.run(looker.operations.acquiring.look(KEY, 5, None))


def test_who_would_share_a_lock_that_is_in_use_as_a_semaphore_sees_no_room(world: World) -> None:
    holder, looker = Host(world, "holder"), Host(world, "looker")
    holder.take(capacity=3)

    assert not looker.run(looker.operations.acquiring.look(KEY, 1, SHARED))[1]
    holder.release()
    assert looker.run(looker.operations.acquiring.look(KEY, 1, SHARED))[1]


@pytest.mark.parametrize(("capacity", "kind"), [(1, "a plain lock"), (SHARED, "a shared lock")])
def test_who_counts_on_being_alone_is_not_made_to_share(world: World, capacity: int, kind: str) -> None:
    Host(world, "etl").take(capacity=capacity)
    before = world.item()

    with pytest.raises(CapacityMismatchError, match=rf"in use as {kind}.*etl"):
        set_capacity(Host(world, "operator"), 3)
    assert world.item() == before


def test_the_dead_of_a_semaphore_whose_capacity_was_set_are_reclaimed(world: World) -> None:
    Host(world, "holder").take(slots=2, capacity=2)
    set_capacity(Host(world, "operator"), 4)
    world.now += 60.0

    granted = Host(world, "other").take(slots=3, capacity=3)

    assert isinstance(granted, Granted)
    assert (world.record().capacity, world.record().available) == (4, 1)


def test_one_of_the_dead_makes_place_in_a_semaphore_that_has_fewer_slots_than_are_held(world: World) -> None:
    Host(world, "three").take(slots=3, capacity=5)
    Host(world, "two").take(slots=2, capacity=5)
    set_capacity(Host(world, "operator"), 4)
    world.now += 60.0

    granted = Host(world, "other").take(slots=2, capacity=5)

    assert isinstance(granted, Granted)
    assert len(granted.reclaimed) == 1, "with its three slots there are enough"
    assert (world.record().capacity, world.record().available) == (4, 0)


# -- held for a while at least ----------------------------------------------------------------------------------------


def test_a_lock_is_not_handed_on_before_it_was_held_long_enough(world: World) -> None:
    holder, other = Host(world, "holder"), Host(world, "other")
    holder.take(min_hold_ms=20_000)
    world.now += 5.0

    outcome = holder.release()

    assert isinstance(outcome, Released)
    assert outcome.hold_until_ms is not None
    busy = other.take()
    assert isinstance(busy, Busy)
    assert "released, and not handed on before 08:00:20 UTC" in busy.describe()
    world.now += 14.0
    assert isinstance(other.take(), Busy)
    world.now += 3.0
    granted = other.take()
    assert isinstance(granted, Granted)
    assert not granted.took_over, "nobody has died"
    assert granted.reclaimed == ()


def test_a_lock_that_was_held_long_enough_is_released_with_one_request(world: World) -> None:
    holder = Host(world, "holder")
    holder.take(min_hold_ms=20_000)
    world.now += 21.0
    world.sent.clear()

    assert holder.release() == Released()
    assert world.actions() == ["UpdateItem"]


def test_a_release_before_the_time_whose_answer_is_lost_is_none_the_less_one(world: World) -> None:
    holder = Host(world, "holder")
    holder.take(min_hold_ms=20_000)
    assert isinstance(holder.release(), Released)

    again = holder.release()

    assert isinstance(again, Released)
    assert again.hold_until_ms is not None


def test_a_grant_that_nobody_was_told_of_is_not_held_for_a_while(world: World) -> None:
    world.faults.append(LOST)
    with pytest.raises(LockUnavailableError):
        Host(world, "unlucky").take(min_hold_ms=60_000, owns_lease_id=True)

    assert isinstance(Host(world, "next").take(), Granted)


def test_a_resting_lease_is_kept_alive_by_nobody(world: World) -> None:
    holder, other = Host(world, "holder"), Host(world, "other")
    holder.take(min_hold_ms=20_000)
    keeper = holder.start(holder.operations.renewing.keep_for_processes([a_lease("holder")], 5.0))
    keeper.step()
    holder.release()
    while keeper.effect is not None and world.now < 100.0:
        keeper.step()

    assert keeper.effect is None
    world.now += 21.0
    assert isinstance(other.take(), Granted)


def test_with_processes_inside_it_is_abandoned_and_rests_when_the_last_has_left(world: World) -> None:
    holder, other = Host(world, "holder"), Host(world, "other")
    holder.take(min_hold_ms=20_000)
    holder.enter("pid-1")
    holder.release()
    world.now += 5.0

    assert isinstance(holder.leave("pid-1"), Released)

    assert isinstance(other.take(), Busy)
    world.now += 17.0
    assert isinstance(other.take(), Granted)


# -- taken from the dead ----------------------------------------------------------------------------------------------


def test_who_takes_over_from_the_dead_is_told_so_also_by_a_second_try(world: World) -> None:
    Host(world, "dead").take()
    world.now += 60.0
    winner = Host(world, "winner")
    winner.clock.answered = True
    claim = winner.claim()
    operation = winner.start(winner.operations.attempting.try_acquire(claim, owns_lease_id=False))
    operation.step()  # refused, as it is held
    world.faults.append(LOST)
    with pytest.raises(Exception, match="broke"):
        operation.finish()

    granted = winner.take()

    assert isinstance(granted, Granted)
    assert granted.took_over
    assert world.record().holders["winner"].took_over
    winner.release()
    assert not Host(world, "next").take().took_over
