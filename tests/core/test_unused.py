"""Unused slots: how long waiters leave free slots to waiters ahead, and which waiters may be passed over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from airflow_dynamo_lock.core.effects import Reply
from airflow_dynamo_lock.core.model.limits import SHARED
from airflow_dynamo_lock.core.model.outcomes import Granted
from airflow_dynamo_lock.core.model.record import LockRecord
from airflow_dynamo_lock.core.queue.unused import PASS_OVER_AFTER, UnusedSlots
from proof.simulator.stepped import KEY, Host, Paused, World
from tests.core.test_queue import until_waiting, waiting, woken


def a_record(token: int = 1) -> LockRecord:
    return LockRecord("k", 9, 9, {}, token)


def a_reply(at: float, took: float = 0.0) -> Reply:
    return Reply({}, sent_at=at - took, received_at=at)


# -- the time -------------------------------------------------------------------------------------------------------


def test_slots_are_unused_once_they_were_free_for_two_seconds() -> None:
    unused = UnusedSlots()
    assert unused.see(a_record(), 1, a_reply(10.0)) == 0
    assert unused.see(a_record(), 1, a_reply(11.9)) == 0
    assert unused.see(a_record(), 1, a_reply(12.0)) == 1


def test_the_time_counts_from_an_answer_to_a_request() -> None:
    unused = UnusedSlots()
    unused.see(a_record(), 1, a_reply(10.0, took=5.0))
    assert unused.see(a_record(), 1, a_reply(12.0, took=0.1)) == 0
    assert unused.see(a_record(), 1, a_reply(12.1, took=0.1)) == 1


def test_slots_that_were_freed_later_are_not_unused_yet() -> None:
    unused = UnusedSlots()
    for at, free, expected in [(0.0, 2, 0), (1.0, 5, 0), (2.0, 5, 2), (2.5, 4, 2), (3.0, 6, 4), (5.0, 6, 6)]:
        assert unused.see(a_record(), free, a_reply(at)) == expected, at


def test_a_lock_that_stays_free_is_remembered_once() -> None:
    unused = UnusedSlots()
    for second in range(100):
        unused.see(a_record(), 1, a_reply(float(second)))
    assert unused._seen["k"].free_since == ((0.0, 1),)


def test_slots_that_are_in_use_again_are_not_claimed() -> None:
    unused = UnusedSlots()
    unused.see(a_record(), 1, a_reply(0.0))
    unused.see(a_record(), 0, a_reply(3.0))
    assert not unused.claims("k", 3.0)


@pytest.mark.parametrize(("token", "free"), [(2, 1), (1, 0), (1, -1)])
def test_the_time_restarts_when_slots_were_granted(token: int, free: int) -> None:
    unused = UnusedSlots()
    unused.see(a_record(), 1, a_reply(0.0))
    assert unused.see(a_record(token), free, a_reply(3.0)) == 0
    assert unused.see(a_record(token), 1, a_reply(4.9)) == 0


def test_other_threads_may_add_reads_while_old_reads_are_dropped(world: World) -> None:
    reader = Host(world).queue.reader

    class Moment(float):
        """A time. While it is compared with another one, another thread adds its reads."""

        def __rsub__(self, now: float) -> float:
            reader.unused.see(replace(a_record(), key=f"new {now}"), 1, a_reply(now))
            reader._read[f"new {now}"] = now, []
            return now - float(self)

    reader.unused.see(a_record(), 1, a_reply(Moment(0.0)))
    reader._read["k"] = Moment(0.0), []
    for now in (1.0, 2.0):
        reader.forget_old_reads(now)

    assert "k" in reader.unused._seen
    assert "k" in reader._read


def test_waiters_claim_unused_slots_once_in_two_seconds() -> None:
    unused = UnusedSlots()
    assert not unused.claims("k", 0.0)
    unused.see(a_record(), 1, a_reply(0.0))
    assert [unused.claims("k", at) for at in (0.0, 1.9, 2.0, 3.9, 4.1)] == [True, False, True, False, True]
    unused.see(a_record(), 1, a_reply(4.2))
    assert not unused.claims("k", 4.2), "the slots have been free all the time"


def test_a_lock_that_is_no_longer_read_is_dropped() -> None:
    unused = UnusedSlots()
    unused.see(a_record(), 1, a_reply(0.0))
    unused.forget_old(119.0)
    assert unused.see(a_record(), 1, a_reply(119.0)) == 1
    unused.forget_old(240.0)
    assert unused.see(a_record(), 1, a_reply(240.0)) == 0


# -- which waiters are passed over ----------------------------------------------------------------------------------


def one_of_two_slots_is_released(world: World, *, wants: int) -> Paused[Any]:
    """Release one of two slots of a semaphore for which two waiters are queued, and return the second one.

    :param wants: slots that the first waiter wants.
    """
    one, two = Host(world, "one"), Host(world, "two")
    one.take(capacity=2)
    two.take(capacity=2)
    waiting(Host(world, "ahead"), slots=wants, capacity=2)
    last = waiting(Host(world, "behind"), capacity=2)
    one.release()
    return last


@pytest.mark.parametrize("ahead", [[{}], [{}, {}, {}], [{"capacity": SHARED}], [{}] * 60])
def test_waiters_that_do_not_take_a_free_lock_are_passed_over(
    world: World, ahead: list[dict[str, Any]]
) -> None:
    holder = Host(world, "holder")
    holder.take()
    for number, wants in enumerate(ahead):
        waiting(Host(world, f"ahead {number}"), **wants)
    last = waiting(Host(world, "behind"))
    holder.release()
    assert woken(last) is None, "a waiter ahead may still take it"
    world.now += PASS_OVER_AFTER + 0.5
    assert woken(last) is not None
    assert world.record().queue_head is not None, "the waiters ahead still wait"


def test_a_waiter_with_another_capacity_is_passed_over(world: World) -> None:
    holder = Host(world, "holder")
    holder.take()
    waiting(Host(world, "dead"))
    holder.release()
    waiting(Host(world, "semaphore"), capacity=5, slots=3)
    last = waiting(Host(world, "behind"))
    assert woken(last) is None
    world.now += PASS_OVER_AFTER + 0.5
    assert woken(last) is not None


def test_a_waiter_that_was_passed_over_is_next(world: World) -> None:
    holder, slow, quick, third = (Host(world, name) for name in ("holder", "slow", "quick", "third"))
    holder.take()
    first, second, last = waiting(slow), waiting(quick), waiting(third)
    holder.release()
    assert woken(second) is None
    world.now += PASS_OVER_AFTER + 0.5
    assert woken(second) is not None
    quick.release()
    assert woken(last) is None
    assert woken(first) is not None


def test_a_late_write_passes_over_no_waiter_if_the_lock_was_granted_meanwhile(world: World) -> None:
    holder, slow, quick = (Host(world, name) for name in ("holder", "slow", "quick"))
    holder.take()
    first, second = waiting(slow), waiting(quick)
    holder.release()
    assert woken(second) is None
    world.now += PASS_OVER_AFTER + 0.5
    second.step().until("UpdateItem")  # its write is not sent yet
    assert Host(world, "unfair").take(fair=False)
    Host(world, "unfair").release()
    until_waiting(second)
    assert second.effect is not None, "it waits again"
    assert woken(first) is not None


def test_a_write_that_passes_over_no_waiter_succeeds_although_a_slot_was_granted_meanwhile(
    world: World,
) -> None:
    holders = [Host(world, f"holder {number}") for number in range(3)]
    for each in holders:
        each.take(capacity=3)
    only = waiting(Host(world, "only"), capacity=3)
    holders[0].release()
    holders[1].release()
    only.step().until("UpdateItem")  # its write is not sent yet
    assert isinstance(Host(world, "unfair").take(capacity=3, fair=False), Granted)
    world.sent.clear()

    assert only.finish()
    assert world.actions().count("UpdateItem") == 1


def test_a_waiter_for_several_locks_is_not_passed_over(world: World) -> None:
    """The lock is free, and the waiter waits for the other one."""
    for name, key in (("holder", KEY), ("other", "another")):
        Host(world, name).take(key=key)
    both = Host(world, "both")
    claims = [both.claim(key=KEY), both.claim(key="another")]
    until_waiting(
        both.start(
            both.operations.acquiring.acquire_all(
                claims, now=both.now(), timeout=None, poll_interval=1.0, owns_lease_id=True
            )
        )
    )
    last = waiting(Host(world, "behind"))
    Host(world, "holder").release()
    for _ in range(3):
        assert woken(last) is None
        world.now += PASS_OVER_AFTER + 0.5


def test_a_waiter_for_more_slots_than_are_unused_is_not_passed_over(world: World) -> None:
    last = one_of_two_slots_is_released(world, wants=2)
    for _ in range(3):
        assert woken(last) is None
        world.now += PASS_OVER_AFTER + 0.5


def test_a_writer_is_not_passed_over_while_there_are_readers(world: World) -> None:
    reader = Host(world, "reader")
    reader.take(capacity=SHARED)
    waiting(Host(world, "writer"))
    late = waiting(Host(world, "late reader"), capacity=SHARED)
    for _ in range(3):
        assert woken(late) is None
        world.now += PASS_OVER_AFTER + 0.5


def test_a_waiter_that_does_not_take_a_slot_of_a_semaphore_is_passed_over(world: World) -> None:
    last = one_of_two_slots_is_released(world, wants=1)
    assert woken(last) is None
    world.now += PASS_OVER_AFTER + 0.5
    assert woken(last) is not None
