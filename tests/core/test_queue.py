"""The queue: waiters are granted the lock in their order, by priority, and dead waiters delay no other."""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Callable
from typing import Any

import pytest

from airflow_dynamo_lock.core.effects import Operation, Reply, Request, Sleep, Stamp, T, WaitForSlots
from airflow_dynamo_lock.core.model.errors import LockAccessError, LockTimeoutError, LockUnavailableError
from airflow_dynamo_lock.core.model.outcomes import Busy, Granted
from airflow_dynamo_lock.core.model.record import Waiter
from airflow_dynamo_lock.core.queue.view import queue_positions
from airflow_dynamo_lock.core.table.position import ticket_of
from proof.simulator.stepped import KEY, LOST, LOST_THEN_RETRIED, TABLE, UNSENT, Host, Paused, World


def waiting(
    host: Host, *, timeout: float | None = None, owns_lease_id: bool = True, **claim: Any
) -> Paused[Granted]:
    """Return an acquire that has found the lock held, and is queued."""
    return until_waiting(host.start_acquire(timeout=timeout, owns_lease_id=owns_lease_id, **claim))


def until_waiting(paused: Paused[T]) -> Paused[T]:
    """Continue an operation until it waits for free slots, or has ended."""
    while paused.effect is not None and not isinstance(paused.effect, WaitForSlots):
        paused.step()
    return paused


def woken(paused: Paused[T]) -> T | None:
    """Wake a waiter, and return its outcome, or None if it waits again."""
    until_waiting(paused.step())
    return None if paused.effect is not None else paused.finish()


def queue(world: World) -> list[Waiter]:
    """Return the waiters of the queue as another process reads them."""
    host = Host(world, "observer")
    return host.run(host.queue.reader.waiters(KEY))


def owners(world: World) -> list[str]:
    return [each.owner for each in queue(world)]


# -- order ------------------------------------------------------------------------------------------------------------


def test_waiters_are_granted_in_the_order_in_which_they_came(world: World) -> None:
    holder, first, second = (Host(world, name) for name in ("holder", "first", "second"))
    holder.take()
    one, two = waiting(first), waiting(second)
    assert owners(world) == ["first", "second"]

    holder.release()

    assert woken(two) is None, "the first waiter is alive"
    assert woken(one) is not None
    assert owners(world) == ["second"]
    first.release()
    assert woken(two) is not None
    assert owners(world) == []


def test_a_newcomer_does_not_overtake(world: World) -> None:
    holder, first, newcomer = (Host(world, name) for name in ("holder", "first", "newcomer"))
    holder.take()
    one = waiting(first)
    holder.release()

    busy = newcomer.take()

    assert isinstance(busy, Busy)
    assert "first waits for it already" in busy.describe()
    assert woken(one) is not None


def test_an_unfair_newcomer_overtakes(world: World) -> None:
    holder, first, newcomer = (Host(world, name) for name in ("holder", "first", "newcomer"))
    holder.take()
    waiting(first)
    holder.release()

    assert isinstance(newcomer.take(fair=False), Granted)


def test_an_unfair_waiter_is_not_queued(world: World) -> None:
    Host(world, "holder").take()
    waiting(Host(world, "unfair"), fair=False)
    assert owners(world) == []


def test_when_the_queue_is_empty_a_lock_costs_one_request_again(world: World) -> None:
    holder, first, newcomer = (Host(world, name) for name in ("holder", "first", "newcomer"))
    holder.take()
    one = waiting(first)
    holder.release()
    assert woken(one) is not None
    first.release()
    world.sent.clear()

    assert isinstance(newcomer.take(), Granted)
    assert world.actions() == ["UpdateItem"]
    assert world.record().queue_head is None


def test_a_higher_priority_goes_before_earlier_waiters(world: World) -> None:
    holder, usual, urgent, late = (Host(world, name) for name in ("holder", "usual", "urgent", "patient"))
    holder.take()
    patient, one, two = waiting(late, priority=-5), waiting(usual), waiting(urgent, priority=10)
    assert owners(world) == ["urgent", "usual", "patient"]

    holder.release()

    assert woken(one) is None
    assert woken(patient) is None
    assert woken(two) is not None
    urgent.release()
    assert woken(patient) is None
    assert woken(one) is not None


def test_a_waiter_for_many_slots_is_not_starved_by_waiters_for_few(world: World) -> None:
    a, b, big, small = (Host(world, name) for name in ("a", "b", "big", "small"))
    a.take(capacity=2)
    b.take(capacity=2)
    wants_two, wants_one = waiting(big, slots=2, capacity=2), waiting(small, capacity=2)
    a.release()

    assert woken(wants_one) is None, "one slot is free, but the waiter ahead wants two"
    assert isinstance(Host(world, "newcomer").take(capacity=2), Busy)
    b.release()
    assert woken(wants_one) is None
    assert woken(wants_two) is not None


def test_waiters_with_enough_free_slots_do_not_wait_for_each_other(world: World) -> None:
    holder, first, second = (Host(world, name) for name in ("holder", "first", "second"))
    holder.take(slots=3, capacity=3)
    one, two = waiting(first, capacity=3), waiting(second, capacity=3)
    holder.release(slots=3)

    assert woken(two) is not None, "there are slots for both"
    assert woken(one) is not None
    assert isinstance(Host(world, "newcomer").take(capacity=3), Granted)
    assert world.record().queue_head is None


# -- waiters that leave or die ----------------------------------------------------------------------------------------


def test_a_waiter_that_times_out_leaves_the_queue(world: World) -> None:
    Host(world, "holder").take()
    one = waiting(Host(world, "first"), timeout=5.0)
    assert owners(world) == ["first"]
    world.now += 6.0

    with pytest.raises(LockTimeoutError, match=r"not free within 5 s. Locked by holder"):
        one.finish()
    assert owners(world) == []


def test_a_first_waiter_that_times_out_advances_the_head(world: World) -> None:
    holder, one, two, three = (Host(world, name) for name in ("holder", "one", "two", "three"))
    holder.take()
    first, second, third = (waiting(each, timeout=1.0) for each in (one, two, three))
    for leaving, next_one in ((first, two), (second, three), (third, None)):
        world.now += 2.0
        with pytest.raises(LockTimeoutError):
            leaving.finish()
        head = world.record().queue_head
        place = next((each.place for each in queue(world) if next_one and each.owner == next_one.name), None)
        assert (head is None) == (place is None)
        if head is not None and place is not None:
            assert ticket_of(head) == ticket_of(place)
            assert head <= place
    world.sent.clear()

    assert three.run(three.operations.admin.forget(KEY)) is False, "it is held"
    holder.release()
    world.sent.clear()
    assert isinstance(Host(world, "next").take(), Granted)
    assert world.actions() == ["UpdateItem"]


def test_a_waiter_that_times_out_does_not_move_the_head_past_a_higher_priority(world: World) -> None:
    holder, one, two, urgent = (Host(world, name) for name in ("holder", "one", "two", "urgent"))
    holder.take()
    first, _, _ = waiting(one, timeout=1.0), waiting(two), waiting(urgent, priority=5)
    before = world.record().queue_head
    world.now += 2.0

    with pytest.raises(LockTimeoutError):
        first.finish()

    assert world.record().queue_head == before is not None


def test_dead_waiters_are_skipped(world: World) -> None:
    holder, dead, second = (Host(world, name) for name in ("holder", "dead", "second"))
    holder.take(lease_ms=3_600_000)
    waiting(dead)
    world.now += 60.0  # and its process has sent no heartbeat
    two = waiting(second)
    assert owners(world) == ["second"]
    holder.release()

    assert woken(two) is not None


def test_items_of_dead_waiters_are_removed_by_a_process_that_reads_them(world: World) -> None:
    holder, dead, second = (Host(world, name) for name in ("holder", "dead", "second"))
    holder.take(lease_ms=3_600_000)
    waiting(dead)
    world.now += 60.0
    two = waiting(second)
    holder.release()
    assert woken(two) is not None
    assert entries(world) == 1
    run_a_while(second, second.presence.maintain(), 7.0)
    assert entries(world) == 0


def entries(world: World) -> int:
    """Return the number of waiter items, of dead and live waiters."""
    host = Host(world, "reader")
    return len(host.run(host.queue.reader.entries(KEY, None)))


def test_without_server_time_dead_waiters_are_skipped_after_an_observation(world: World) -> None:
    world.dates = False
    holder, dead, second = (Host(world, name) for name in ("holder", "dead", "second"))
    holder.take(lease_ms=3_600_000)
    waiting(dead)
    two = waiting(second)
    holder.release()

    assert woken(two) is None
    world.now += 31.0
    assert woken(two) is not None


def test_a_waiter_is_alive_as_long_as_its_process_sends_heartbeats(world: World) -> None:
    holder, first, second = (Host(world, name) for name in ("holder", "first", "second"))
    holder.take(lease_ms=3_600_000)
    one = waiting(first)
    maintaining = first.start(first.presence.maintain())
    two = waiting(second)
    while world.now < 120.0:
        maintaining.step()
    holder.release()

    assert woken(two) is None
    assert woken(one) is not None


def test_a_paused_waiter_that_counted_as_dead_keeps_its_position(world: World) -> None:
    holder, paused, second, third = (Host(world, name) for name in ("holder", "paused", "second", "third"))
    holder.take(lease_ms=3_600_000)
    one = waiting(paused)
    world.now += 60.0
    two = waiting(second)
    holder.release()
    assert woken(two) is not None
    three = waiting(third)

    assert woken(one) is None  # the second waiter holds the lock; and this restores the head of the queue
    assert owners(world) == ["third"], "its item is old, and its process has not sent a heartbeat yet"
    run_a_while(paused, paused.presence.maintain(), 7.0)
    assert owners(world) == ["paused", "third"]
    second.release()
    assert woken(three) is None
    assert woken(one) is not None


def run_a_while(host: Host, operation: Operation[None], seconds: float) -> None:
    """Run an operation for some seconds."""
    running, until = host.start(operation), host.world.now + seconds
    while running.effect is not None and host.world.now < until:
        running.step()


def test_a_failed_attempt_is_not_repeated_at_once_although_the_lock_is_free(world: World) -> None:
    holder, waiter = Host(world, "holder"), Host(world, "waiter")
    holder.take()
    waits = waiting(waiter)
    holder.release()
    unwoken = []
    for _ in range(4):
        waits.step()  # woken
        while not (isinstance(waits.effect, Request) and waits.effect.action == "UpdateItem"):
            waits.step()
        world.faults.append(UNSENT)
        waits.step()
        assert isinstance(waits.effect, Sleep)
        unwoken.append(waits.effect.seconds)
        until_waiting(waits)
    assert 0.5 <= unwoken[0] <= 1.0
    assert unwoken[-1] == 1.0
    granted: object = until_waiting(waits.step()).finish()
    assert isinstance(granted, Granted)


def test_a_waiter_item_that_could_not_be_deleted_is_deleted_later(world: World) -> None:
    holder, first, second = (Host(world, name) for name in ("holder", "first", "second"))
    holder.take()
    one = waiting(first)
    holder.release()
    one.step()
    one.until("DeleteItem")
    world.faults.append(UNSENT)
    assert one.finish()
    first.release()
    assert owners(world) == ["first"], "its item has not been removed yet"

    run_a_while(first, first.presence.maintain(), 3.0)

    assert owners(world) == []
    assert not first.queue
    assert isinstance(second.take(), Granted)


def test_an_item_that_cannot_be_deleted_does_not_block_the_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, answer = Host(world), world.answer

    def deny_some(request: Request, clock: Callable[[], float]) -> Reply:
        if request.params["Key"]["key"]["S"] in ("a", "b"):
            raise LockAccessError("AWS denies access.")
        return answer(request, clock)

    monkeypatch.setattr(world, "answer", deny_some)
    for key in "abcd":
        host.queue.discard(key, ["place"])

    run_a_while(host, host.presence.maintain(), 4.0)

    assert {key for key, _ in host.queue.leftovers} == {"a", "b"}


@pytest.mark.parametrize("fate", [LOST, LOST_THEN_RETRIED])
def test_a_waiter_item_is_deleted_for_as_long_as_a_late_copy_may_arrive(world: World, fate: str) -> None:
    holder, first = Host(world, "holder"), Host(world, "first")
    holder.take()
    one = first.start_acquire().until("PutItem")
    put = one.request
    world.faults.append(fate)
    until_waiting(one)
    with pytest.raises(CancelledError):
        one.interrupt(CancelledError()).finish()
    maintaining = first.start(first.presence.maintain())
    while world.now < 10.0:
        maintaining.step()
    assert owners(world) == []
    sent = len(world.sent)
    world.client.put_item(**put.params)  # a late copy arrives
    assert owners(world) == ["first"]
    while world.now < 25.0:
        maintaining.step()
    assert owners(world) == [], "the late item is deleted within 15 s"
    world.client.put_item(**put.params)

    while maintaining.effect is not None:
        maintaining.step()

    assert owners(world) == []
    assert 60.0 < world.now < 80.0
    deletes = [each for each in world.sent[sent:] if each.action == "DeleteItem"]
    assert len(deletes) <= 8, "other processes may have as many items to delete"


def test_a_late_waiter_item_that_was_left_to_another_process_counts_as_dead(world: World) -> None:
    holder, first, second = (Host(world, name) for name in ("holder", "first", "second"))
    for key in (KEY, "other"):
        holder.take(key=key, lease_ms=3_600_000)
    waiting(first, key="other", owns_lease_id=False)  # so that its process continues to send heartbeats
    one = first.start_acquire("ti-1", owns_lease_id=False).until("PutItem")
    put = one.request.params
    world.faults.append(LOST)
    one.step()
    place = {name: put["Item"][name] for name in ("key", "entry")}
    world.client.delete_item(TableName=TABLE, Key=place)
    with pytest.raises(CancelledError):
        one.interrupt(CancelledError())
    maintaining = first.start(first.presence.maintain())
    while world.now < 10.0:
        maintaining.step()
    world.client.put_item(**put)  # a late copy arrives

    while world.now < 30.0:
        maintaining.step()

    assert "process" not in world.client.get_item(TableName=TABLE, Key=place)["Item"]
    two = waiting(second)
    holder.release()
    assert woken(two) is not None


def test_a_stalled_process_does_not_take_a_waiter_from_the_one_that_continues(world: World) -> None:
    holder, stalled, next_one = (Host(world, name) for name in ("holder", "stalled", "next"))
    holder.take(lease_ms=3_600_000)
    one = waiting(stalled, lease_id="ti-1", owns_lease_id=False)
    waiting(next_one, lease_id="ti-1", owns_lease_id=False)
    with pytest.raises(CancelledError):
        one.interrupt(CancelledError())

    run_a_while(stalled, stalled.presence.maintain(), 3.0)

    (entry,) = queue(world)
    assert entry.process == next_one.queue.own.process


@pytest.mark.parametrize(
    ("owns_lease_id", "left"), [(True, 0), (False, 1)], ids=["outside Airflow", "in Airflow"]
)
def test_the_entry_of_a_discarded_wait_stays_only_if_another_process_may_continue_in_it(
    world: World, owns_lease_id: bool, left: int
) -> None:
    Host(world, "holder").take(lease_ms=3_600_000)
    host = Host(world, "host")
    paused = waiting(host, owns_lease_id=owns_lease_id)
    with pytest.raises(GeneratorExit):
        paused.interrupt(GeneratorExit())

    run_a_while(host, host.presence.maintain(), 3.0)

    assert entries(world) == left


def test_the_entry_of_a_wait_that_ended_in_an_outage_is_deleted_afterwards(world: World) -> None:
    Host(world, "holder").take(lease_ms=3_600_000)
    host = Host(world, "host")
    paused = waiting(host, owns_lease_id=False, timeout=5.0)
    world.faults.extend([UNSENT] * 100)
    with pytest.raises(LockUnavailableError):
        paused.finish()
    world.faults.clear()

    run_a_while(host, host.presence.maintain(), 3.0)

    assert entries(world) == 0


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, CancelledError])
def test_an_interrupted_waiter_leaves_the_queue_before_it_ends(
    world: World, interruption: type[BaseException]
) -> None:
    holder, first, second = (Host(world, name) for name in ("holder", "first", "second"))
    holder.take()
    one, two = waiting(first), waiting(second)

    with pytest.raises(interruption):
        one.interrupt(interruption()).finish()

    assert owners(world) == ["second"]
    assert not first.queue
    holder.release()
    assert woken(two) is not None


def test_the_removal_of_a_waiter_item_is_not_retried_for_ever(world: World) -> None:
    holder, first = Host(world, "holder"), Host(world, "first")
    holder.take(lease_ms=3_600_000)
    one = waiting(first)
    world.faults.extend([UNSENT] * 10_000)
    with pytest.raises(CancelledError):
        one.interrupt(CancelledError()).finish()

    first.start(first.presence.maintain()).finish()

    assert 300.0 <= world.now < 400.0


def test_taking_a_ticket_does_not_move_the_head_past_a_higher_priority(world: World) -> None:
    before, holder, slow, urgent, usual = (
        Host(world, name) for name in ("before", "holder", "slow", "urgent", "usual")
    )
    before.take()
    waits = waiting(holder)
    before.release()
    assert woken(waits)
    waits = slow.start_acquire()
    while not (isinstance(waits.effect, Request) and "SET #last_ticket" in str(waits.effect.params)):
        waits.step()
    for host, priority in ((usual, 0), (urgent, 5)):
        waiting(host, priority=priority)
    first = world.record().queue_head
    assert first

    waits.step()  # it has read the record before there was a queue

    assert world.record().queue_head == first


@pytest.mark.parametrize("pause", [0.0, 300.0], ids=["at once", "long after the other process has died"])
def test_a_waiter_that_continues_in_another_process_keeps_its_position(world: World, pause: float) -> None:
    holder, triggerer, second, next_one = (
        Host(world, name) for name in ("holder", "triggerer", "second", "next triggerer")
    )
    holder.take(lease_ms=3_600_000)
    one = waiting(triggerer, lease_id="ti-1", owns_lease_id=False)
    with pytest.raises(KeyboardInterrupt):
        one.interrupt(KeyboardInterrupt())
    run_a_while(triggerer, triggerer.presence.maintain(), 3.0)
    assert owners(world) == ["triggerer"], "another process may continue it soon"
    world.now += pause
    two = waiting(second)

    one = waiting(next_one, lease_id="ti-1", owns_lease_id=False)

    assert len(queue(world)) == 2
    holder.release()
    assert woken(two) is None
    assert woken(one) is not None


def test_a_waiter_reads_the_queue_itself_if_the_read_that_it_shares_fails(world: World) -> None:
    holder, triggerer = Host(world, "holder"), Host(world, "triggerer")
    holder.take(lease_ms=3_600_000)

    one, two = (triggerer.start_acquire(lease_id, owns_lease_id=False) for lease_id in ("ti-1", "ti-2"))
    one.until("Query")
    while not isinstance(two.effect, Sleep):
        two.step()
    with pytest.raises(CancelledError):
        one.interrupt(CancelledError())
    since = world.now

    until_waiting(two)

    assert world.now - since < 1.0
    assert owners(world) == ["triggerer"]


def test_dequeuing_an_attempt_removes_its_waiter_at_once(world: World) -> None:
    holder, triggerer, second = (Host(world, name) for name in ("holder", "triggerer", "second"))
    holder.take()
    one = waiting(triggerer, lease_id="ti-1", owns_lease_id=False)
    two = waiting(second)
    with pytest.raises(KeyboardInterrupt):
        one.interrupt(KeyboardInterrupt())
    triggerer.start(triggerer.queue.dequeue_attempt(KEY, "ti-1")).finish()
    run_a_while(triggerer, triggerer.presence.maintain(), 3.0)
    assert owners(world) == ["second"]
    holder.release()

    assert woken(two) is not None


def test_a_waiter_that_no_process_continues_counts_as_dead(world: World) -> None:
    holder, triggerer, second = (Host(world, name) for name in ("holder", "triggerer", "second"))
    holder.take(lease_ms=3_600_000)
    one = waiting(triggerer, lease_id="ti-1", owns_lease_id=False)
    with pytest.raises(KeyboardInterrupt):
        one.interrupt(KeyboardInterrupt())
    run_a_while(triggerer, triggerer.presence.maintain(), 3.0)
    two = waiting(second)
    world.now += 60.0
    holder.release()

    assert woken(two) is not None


def test_a_waiter_whose_item_was_deleted_is_queued_again(world: World) -> None:
    holder, first, second = (Host(world, name) for name in ("holder", "first", "second"))
    holder.take()
    one = waiting(first)
    (entry,) = queue(world)
    two = waiting(second)
    world.client.delete_item(
        TableName="locks", Key={"key": {"S": KEY}, "entry": {"S": f"waiter/{entry.place}"}}
    )
    assert owners(world) == ["second"]

    assert woken(one) is None

    assert owners(world) == ["first", "second"]
    holder.release()
    assert woken(two) is None
    assert woken(one) is not None


def test_a_later_attempt_does_not_wait_behind_an_earlier_one(world: World) -> None:
    holder, triggerer = Host(world, "holder"), Host(world, "triggerer")
    holder.take()
    waiting(triggerer, lease_id="ti-1", owns_lease_id=False, attempt_of="run")
    again = waiting(Host(world, "next"), lease_id="ti-2", owns_lease_id=False, attempt_of="run")
    holder.release()

    assert woken(again) is not None


# -- what others can read ---------------------------------------------------------------------------------------------


def test_a_waiter_item_has_owner_priority_start_and_deadline(world: World) -> None:
    Host(world, "holder").take()
    waiting(Host(world, "first"), timeout=60.0, priority=3)

    (waiter,) = queue(world)

    assert (waiter.owner, waiter.priority, waiter.slots, waiter.mode) == ("first", 3, 1, "exclusive")
    assert waiter.until is not None
    assert (waiter.until - waiter.since).total_seconds() == 60.0


def test_a_process_has_one_name_even_if_two_threads_read_it_at_once(world: World) -> None:
    host = Host(world)
    faster: list[str] = []

    def stamp() -> Stamp:
        if not faster:
            faster.append("a thread that reads the name while another creates its stamp")
            faster[0] = host.queue.own.process
        return host.stamp()

    host.queue.own.stamp = stamp

    assert host.queue.own.process == faster[0] == host.queue.own.process


def test_a_position_is_described(world: World) -> None:
    Host(world, "holder").take()
    for name in ("prod/a", "prod/b", "prod/c"):
        waiting(Host(world, name))
    waiters = queue(world)

    third, first = (queue_positions(waiters)[waiters[number].place] for number in (2, 0))
    assert third.describe() == "3rd of 3, behind prod/b"
    assert first.describe() == "1st of 3"


def test_a_queued_waiter_can_be_woken_from_the_pause_after_a_failed_attempt(world: World) -> None:
    """The poller leaves the free slots to it, so a sleeping waiter would keep them from all others of its process."""
    Host(world, "holder").take()
    waits = until_waiting(Host(world, "waiter").start_acquire())
    waits.step()
    world.faults.append(UNSENT)
    assert isinstance(waits.step().effect, Sleep)
    assert isinstance(waits.step().effect, WaitForSlots)
