"""Other kinds of locks: shared locks, semaphores with a pinned capacity, and locks with `min_hold`."""

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


def test_readers_hold_a_lock_together_and_exclude_writers(world: World) -> None:
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


def test_readers_reclaim_a_dead_writer_and_a_writer_reclaims_dead_readers(
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


def test_new_readers_do_not_overtake_a_waiting_writer(world: World) -> None:
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


# -- pinned capacity --------------------------------------------------------------------------------------------------


def test_the_capacity_of_a_held_semaphore_is_raised(world: World) -> None:
    holder, other = Host(world, "holder"), Host(world, "other")
    holder.take(slots=2, capacity=2)
    assert isinstance(other.take(capacity=2), Busy)

    record = set_capacity(Host(world, "operator"), 3)

    assert (record.capacity, record.available) == (3, 1)
    assert isinstance(other.take(capacity=2), Granted)
    assert isinstance(Host(world, "third").take(capacity=2), Busy)


def test_the_capacity_of_a_held_semaphore_is_lowered_without_a_lost_lease(world: World) -> None:
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


def test_a_pinned_capacity_counts_until_it_is_unset(world: World) -> None:
    operator, holder = Host(world, "operator"), Host(world, "holder")
    set_capacity(operator, 2)  # of a lock without a record
    for _ in range(2):
        holder.take(capacity=5)
        assert world.record().capacity == 2
        holder.release()

    set_capacity(operator, None)

    holder.take(capacity=5)
    assert world.record().capacity == 5


def test_more_slots_than_the_pinned_capacity_are_refused(world: World) -> None:
    set_capacity(Host(world, "operator"), 2)

    with pytest.raises(LockValueError, match=r"3 slots can never be free in the lock .*set to 2"):
        Host(world, "etl").take(slots=3, capacity=5)


def test_a_plain_claim_is_refused_by_a_pinned_lock(world: World) -> None:
    set_capacity(Host(world, "operator"), 2)

    with pytest.raises(
        CapacityMismatchError, match=r"capacity of 2, which was set.*set_capacity\(key, None\)"
    ):
        Host(world, "etl").take()


@pytest.mark.parametrize("capacity", [1, SHARED])
def test_a_pinned_lock_refuses_a_plain_or_shared_claim_of_its_capacity(world: World, capacity: int) -> None:
    """If the capacity were raised later, an exclusive holder would share the lock."""
    operator, semaphore = Host(world, "operator"), Host(world, "semaphore")
    set_capacity(operator, capacity)

    with pytest.raises(CapacityMismatchError, match="which was set"):
        Host(world, "plain").take(capacity=capacity)
    assert isinstance(semaphore.take(capacity=3), Granted)
    set_capacity(operator, 3)
    assert isinstance(Host(world, "another").take(capacity=3), Granted)


def test_a_capacity_is_unset_only_while_the_lock_has_no_holder(world: World) -> None:
    operator, holder, waiter = (Host(world, name) for name in ("operator", "holder", "waiter"))
    set_capacity(operator, 1)
    holder.take(capacity=5)
    waits = waiting(waiter, capacity=5)

    with pytest.raises(
        CapacityMismatchError, match=r"cannot be unset while the lock is held.*Locked by holder"
    ):
        set_capacity(operator, None)

    assert woken(waits) is None, "it still waits"
    holder.release()
    assert woken(waits) is not None
    waiter.release()
    assert set_capacity(operator, None).capacity == 1
    assert isinstance(holder.take(capacity=5), Granted)


def test_waiters_are_granted_in_order_when_the_capacity_is_raised(world: World) -> None:
    for number in range(3):
        Host(world, f"holder {number}").take(capacity=3, lease_ms=3_600_000)
    waits = [waiting(Host(world, f"waiter {number}"), capacity=3, lease_ms=3_600_000) for number in range(50)]

    set_capacity(Host(world, "operator"), 33)

    assert woken(waits[-1]) is None
    assert [number for number, each in enumerate(waits) if woken(each) is not None] == list(range(30))


def test_a_wait_for_more_slots_than_the_capacity_is_an_error(world: World) -> None:
    set_capacity(Host(world, "operator"), 3)
    observer = Host(world, "observer")

    _, free = observer.run(observer.operations.acquiring.look(KEY, 3, None))
    assert free
    with pytest.raises(LockValueError, match="5 slots can never be free"):
        observer.run(observer.operations.acquiring.look(KEY, 5, None))


def test_a_semaphore_in_use_has_no_free_slot_for_a_reader(world: World) -> None:
    holder, observer = Host(world, "holder"), Host(world, "observer")
    holder.take(capacity=3)

    assert not observer.run(observer.operations.acquiring.look(KEY, 1, SHARED))[1]
    holder.release()
    assert observer.run(observer.operations.acquiring.look(KEY, 1, SHARED))[1]


@pytest.mark.parametrize(("capacity", "kind"), [(1, "a plain lock"), (SHARED, "a shared lock")])
def test_the_capacity_of_a_held_plain_or_shared_lock_is_not_set(
    world: World, capacity: int, kind: str
) -> None:
    Host(world, "etl").take(capacity=capacity)
    before = world.item()

    with pytest.raises(CapacityMismatchError, match=rf"in use as {kind}.*etl"):
        set_capacity(Host(world, "operator"), 3)
    assert world.item() == before


def test_dead_holders_of_a_pinned_semaphore_are_reclaimed(world: World) -> None:
    Host(world, "holder").take(slots=2, capacity=2)
    set_capacity(Host(world, "operator"), 4)
    world.now += 60.0

    granted = Host(world, "other").take(slots=3, capacity=3)

    assert isinstance(granted, Granted)
    assert (world.record().capacity, world.record().available) == (4, 1)


def test_a_claim_reclaims_one_dead_holder_if_more_is_held_than_the_capacity(world: World) -> None:
    Host(world, "three").take(slots=3, capacity=5)
    Host(world, "two").take(slots=2, capacity=5)
    set_capacity(Host(world, "operator"), 4)
    world.now += 60.0

    granted = Host(world, "other").take(slots=2, capacity=5)

    assert isinstance(granted, Granted)
    assert len(granted.reclaimed) == 1, "the three slots of the first holder are enough"
    assert (world.record().capacity, world.record().available) == (4, 0)


# -- min_hold ---------------------------------------------------------------------------------------------------------


def test_a_lock_is_not_granted_again_before_its_min_hold(world: World) -> None:
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
    assert not granted.took_over, "no holder has died"
    assert granted.reclaimed == ()


def test_a_release_after_min_hold_needs_one_request(world: World) -> None:
    holder = Host(world, "holder")
    holder.take(min_hold_ms=20_000)
    world.now += 21.0
    world.sent.clear()

    assert holder.release() == Released()
    assert world.actions() == ["UpdateItem"]


def test_a_repeated_release_during_min_hold_is_a_release(world: World) -> None:
    holder = Host(world, "holder")
    holder.take(min_hold_ms=20_000)
    assert isinstance(holder.release(), Released)

    again = holder.release()

    assert isinstance(again, Released)
    assert again.hold_until_ms is not None


def test_a_grant_that_no_caller_received_has_no_min_hold(world: World) -> None:
    world.faults.append(LOST)
    with pytest.raises(LockUnavailableError):
        Host(world, "unlucky").take(min_hold_ms=60_000, owns_lease_id=True)

    assert isinstance(Host(world, "next").take(), Granted)


def test_a_lease_that_cools_down_is_not_renewed(world: World) -> None:
    holder, other = Host(world, "holder"), Host(world, "other")
    holder.take(min_hold_ms=20_000)
    heartbeats = holder.start(holder.operations.renewing.keep_for_processes([a_lease("holder")], 5.0))
    heartbeats.step()
    holder.release()
    while heartbeats.effect is not None and world.now < 100.0:
        heartbeats.step()

    assert heartbeats.effect is None
    world.now += 21.0
    assert isinstance(other.take(), Granted)


def test_a_lease_with_a_process_inside_drains_and_then_cools_down(world: World) -> None:
    holder, other = Host(world, "holder"), Host(world, "other")
    holder.take(min_hold_ms=20_000)
    holder.enter("pid-1")
    holder.release()
    world.now += 5.0

    assert isinstance(holder.leave("pid-1"), Released)

    assert isinstance(other.take(), Busy)
    world.now += 17.0
    assert isinstance(other.take(), Granted)


# -- took_over --------------------------------------------------------------------------------------------------------


def test_a_repeated_attempt_after_a_reclaim_is_marked_as_took_over(world: World) -> None:
    Host(world, "dead").take()
    world.now += 60.0
    winner = Host(world, "winner")
    winner.clock.answered = True
    claim = winner.claim()
    operation = winner.start(winner.operations.attempting.try_acquire(claim, owns_lease_id=False))
    operation.step()  # refused, as it is held
    world.faults.append(LOST)
    with pytest.raises(LockUnavailableError, match="broke"):
        operation.finish()

    granted = winner.take()

    assert isinstance(granted, Granted)
    assert granted.took_over
    assert world.record().holders["winner"].took_over
    winner.release()
    assert not Host(world, "next").take().took_over
