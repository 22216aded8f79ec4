"""Those who wait stand in line: as they came, the urgent before others; and the dead hold up nobody."""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Callable
from typing import Any

import pytest

from airflow_dynamo_lock.core.effects import Operation, Reply, Request, Sleep, Stamp, T, WaitForSlots
from airflow_dynamo_lock.core.model.errors import LockAccessError, LockTimeoutError
from airflow_dynamo_lock.core.model.outcomes import Busy, Granted
from airflow_dynamo_lock.core.model.record import Waiter
from airflow_dynamo_lock.core.queue.view import queue_positions
from airflow_dynamo_lock.core.table.position import ticket_of
from proof.simulator.stepped import KEY, LOST, LOST_THEN_RETRIED, TABLE, UNSENT, Host, Paused, World


def waiting(
    host: Host, *, timeout: float | None = None, owns_lease_id: bool = True, **claim: Any
) -> Paused[Granted]:
    """Somebody who wants the lock, has found it taken, and stands in line by now."""
    return until_waiting(host.start_acquire(timeout=timeout, owns_lease_id=owns_lease_id, **claim))


def until_waiting(paused: Paused[T]) -> Paused[T]:
    """Let it go on until it has nothing to do but wait, or has ended."""
    while paused.effect is not None and not isinstance(paused.effect, WaitForSlots):
        paused.step()
    return paused


def woken(paused: Paused[T]) -> T | None:
    """Wake a waiter: its grant, or None if it waits again."""
    until_waiting(paused.step())
    return None if paused.effect is not None else paused.finish()


def line(world: World) -> list[Waiter]:
    """Who stands in line, as somebody else sees it."""
    host = Host(world, "observer")
    return host.run(host.queue.reader.waiters(KEY))


def owners(world: World) -> list[str]:
    return [each.owner for each in line(world)]


# -- order ------------------------------------------------------------------------------------------------------------


def test_those_who_wait_are_granted_in_the_order_in_which_they_came(world: World) -> None:
    holder, first, second = (Host(world, name) for name in ("holder", "first", "second"))
    holder.take()
    one, two = waiting(first), waiting(second)
    assert owners(world) == ["first", "second"]

    holder.release()

    assert woken(two) is None, "the first one is alive"
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


def test_a_newcomer_that_does_not_care_overtakes(world: World) -> None:
    holder, first, newcomer = (Host(world, name) for name in ("holder", "first", "newcomer"))
    holder.take()
    waiting(first)
    holder.release()

    assert isinstance(newcomer.take(fair=False), Granted)


def test_an_unfair_waiter_does_not_stand_in_line(world: World) -> None:
    Host(world, "holder").take()
    waiting(Host(world, "unfair"), fair=False)
    assert owners(world) == []


def test_when_the_line_is_over_a_lock_costs_one_request_again(world: World) -> None:
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


def test_the_urgent_come_before_those_who_came_sooner(world: World) -> None:
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


def test_one_who_wants_many_slots_is_not_starved_by_those_who_want_few(world: World) -> None:
    a, b, big, small = (Host(world, name) for name in ("a", "b", "big", "small"))
    a.take(capacity=2)
    b.take(capacity=2)
    wants_two, wants_one = waiting(big, slots=2, capacity=2), waiting(small, capacity=2)
    a.release()

    assert woken(wants_one) is None, "one slot is free, but not for him"
    assert isinstance(Host(world, "newcomer").take(capacity=2), Busy)
    b.release()
    assert woken(wants_one) is None
    assert woken(wants_two) is not None


def test_those_for_whom_there_is_room_need_not_wait_for_each_other(world: World) -> None:
    holder, first, second = (Host(world, name) for name in ("holder", "first", "second"))
    holder.take(slots=3, capacity=3)
    one, two = waiting(first, capacity=3), waiting(second, capacity=3)
    holder.release(slots=3)

    assert woken(two) is not None, "there is room for both"
    assert woken(one) is not None
    assert isinstance(Host(world, "newcomer").take(capacity=3), Granted)
    assert world.record().queue_head is None


# -- who goes ---------------------------------------------------------------------------------------------------------


def test_who_gives_up_leaves_the_line(world: World) -> None:
    Host(world, "holder").take()
    one = waiting(Host(world, "first"), timeout=5.0)
    assert owners(world) == ["first"]
    world.now += 6.0

    with pytest.raises(LockTimeoutError, match=r"not free within 5 s. Locked by holder"):
        one.finish()
    assert owners(world) == []


def test_who_gives_up_first_leaves_nothing_that_others_would_wait_for(world: World) -> None:
    holder, one, two, three = (Host(world, name) for name in ("holder", "one", "two", "three"))
    holder.take()
    first, second, third = (waiting(each, timeout=1.0) for each in (one, two, three))
    for gives_up, behind in ((first, two), (second, three), (third, None)):
        world.now += 2.0
        with pytest.raises(LockTimeoutError):
            gives_up.finish()
        mark = world.record().queue_head
        place = next((each.place for each in line(world) if behind and each.owner == behind.name), None)
        assert (mark is None) == (place is None)
        if mark is not None and place is not None:
            assert ticket_of(mark) == ticket_of(place)
            assert mark <= place
    world.sent.clear()

    assert three.run(three.operations.admin.forget(KEY)) is False, "it is held"
    holder.release()
    world.sent.clear()
    assert isinstance(Host(world, "next").take(), Granted)
    assert world.actions() == ["UpdateItem"]


def test_who_gives_up_does_not_put_another_behind_him_who_is_more_urgent(world: World) -> None:
    holder, one, two, urgent = (Host(world, name) for name in ("holder", "one", "two", "urgent"))
    holder.take()
    first, _, _ = waiting(one, timeout=1.0), waiting(two), waiting(urgent, priority=5)
    before = world.record().queue_head
    world.now += 2.0

    with pytest.raises(LockTimeoutError):
        first.finish()

    assert world.record().queue_head == before is not None


def test_the_dead_are_passed_over(world: World) -> None:
    holder, dead, second = (Host(world, name) for name in ("holder", "dead", "second"))
    holder.take(lease_ms=3_600_000)
    waiting(dead)
    world.now += 60.0  # and its process has not begun to show that it lives
    two = waiting(second)
    assert owners(world) == ["second"]
    holder.release()

    assert woken(two) is not None


def test_the_entries_of_the_dead_are_removed_by_those_who_see_them(world: World) -> None:
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
    """How many waiters have an entry, dead or alive."""
    host = Host(world, "reader")
    return len(host.run(host.queue.reader.entries(KEY, None)))


def test_without_server_time_the_dead_are_passed_over_after_they_were_watched(world: World) -> None:
    world.dates = False
    holder, dead, second = (Host(world, name) for name in ("holder", "dead", "second"))
    holder.take(lease_ms=3_600_000)
    waiting(dead)
    two = waiting(second)
    holder.release()

    assert woken(two) is None
    world.now += 31.0
    assert woken(two) is not None


def test_a_waiter_is_alive_as_long_as_its_process_shows_it(world: World) -> None:
    holder, first, second = (Host(world, name) for name in ("holder", "first", "second"))
    holder.take(lease_ms=3_600_000)
    one = waiting(first)
    tending = first.start(first.presence.maintain())
    two = waiting(second)
    while world.now < 120.0:
        tending.step()
    holder.release()

    assert woken(two) is None
    assert woken(one) is not None


def test_a_paused_waiter_that_was_taken_for_dead_keeps_its_place(world: World) -> None:
    holder, paused, second, third = (Host(world, name) for name in ("holder", "paused", "second", "third"))
    holder.take(lease_ms=3_600_000)
    one = waiting(paused)
    world.now += 60.0
    two = waiting(second)
    holder.release()
    assert woken(two) is not None
    three = waiting(third)

    assert (
        woken(one) is None
    )  # the second one has it; and now it is known that there is somebody before the third
    assert owners(world) == ["third"], "its own sign of life is old: its process has to show that it lives"
    run_a_while(paused, paused.presence.maintain(), 7.0)
    assert owners(world) == ["paused", "third"]
    second.release()
    assert woken(three) is None
    assert woken(one) is not None


def run_a_while(host: Host, operation: Operation[None], seconds: float) -> None:
    """Carry it out for so long."""
    running, until = host.start(operation), host.world.now + seconds
    while running.effect is not None and host.world.now < until:
        running.step()


def test_a_place_that_could_not_be_left_is_cleared_away_later(world: World) -> None:
    holder, first, second = (Host(world, name) for name in ("holder", "first", "second"))
    holder.take()
    one = waiting(first)
    holder.release()
    one.step()
    one.until("DeleteItem")
    world.faults.append(UNSENT)
    assert one.finish()
    first.release()
    assert owners(world) == ["first"], "nobody has cleared it away"

    run_a_while(first, first.presence.maintain(), 3.0)

    assert owners(world) == []
    assert not first.queue
    assert isinstance(second.take(), Granted)


def test_an_entry_that_cannot_be_removed_does_not_keep_others_from_being_removed(
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
def test_a_place_that_may_still_be_taken_late_is_cleared_away_for_as_long(world: World, fate: str) -> None:
    holder, first = Host(world, "holder"), Host(world, "first")
    holder.take()
    one = first.start_acquire().until("PutItem")
    put = one.request
    world.faults.append(fate)
    until_waiting(one)
    with pytest.raises(CancelledError):
        one.interrupt(CancelledError()).finish()
    tending = first.start(first.presence.maintain())
    while world.now < 10.0:
        tending.step()
    assert owners(world) == []
    sent = len(world.sent)
    world.client.put_item(**put.params)  # at last it arrives
    assert owners(world) == ["first"]
    while world.now < 25.0:
        tending.step()
    assert owners(world) == [], "it holds the others up for some seconds"
    world.client.put_item(**put.params)

    while tending.effect is not None:
        tending.step()

    assert owners(world) == []
    assert 60.0 < world.now < 80.0
    deletes = [each for each in world.sent[sent:] if each.action == "DeleteItem"]
    assert len(deletes) <= 8, "others may have as much to clear away"


def test_a_place_that_is_left_to_another_process_and_taken_late_is_a_dead_ones(world: World) -> None:
    holder, first, second = (Host(world, name) for name in ("holder", "first", "second"))
    for key in (KEY, "other"):
        holder.take(key=key, lease_ms=3_600_000)
    waiting(first, key="other", owns_lease_id=False)  # so that its process goes on showing that it lives
    one = first.start_acquire("ti-1", owns_lease_id=False).until("PutItem")
    put = one.request.params
    world.faults.append(LOST)
    one.step()
    place = {name: put["Item"][name] for name in ("key", "entry")}
    world.client.delete_item(TableName=TABLE, Key=place)
    with pytest.raises(CancelledError):
        one.interrupt(CancelledError())
    tending = first.start(first.presence.maintain())
    while world.now < 10.0:
        tending.step()
    world.client.put_item(**put)  # at last it arrives

    while world.now < 30.0:
        tending.step()

    assert "process" not in world.client.get_item(TableName=TABLE, Key=place)["Item"]
    two = waiting(second)
    holder.release()
    assert woken(two) is not None


def test_a_process_that_was_stalled_does_not_take_a_waiter_from_the_one_that_goes_on(world: World) -> None:
    holder, stalled, next_one = (Host(world, name) for name in ("holder", "stalled", "next"))
    holder.take(lease_ms=3_600_000)
    one = waiting(stalled, lease_id="ti-1", owns_lease_id=False)
    waiting(next_one, lease_id="ti-1", owns_lease_id=False)
    with pytest.raises(CancelledError):
        one.interrupt(CancelledError())

    run_a_while(stalled, stalled.presence.maintain(), 3.0)

    (entry,) = line(world)
    assert entry.process == next_one.queue.own.process


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, CancelledError])
def test_a_waiter_that_is_interrupted_leaves_the_queue_before_it_ends(
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


def test_a_line_that_cannot_be_left_is_left_to_others_some_day(world: World) -> None:
    holder, first = Host(world, "holder"), Host(world, "first")
    holder.take(lease_ms=3_600_000)
    one = waiting(first)
    world.faults.extend([UNSENT] * 10_000)
    with pytest.raises(CancelledError):
        one.interrupt(CancelledError()).finish()

    first.start(first.presence.maintain()).finish()

    assert 300.0 <= world.now < 400.0


def test_who_draws_a_number_does_not_put_another_behind_him_who_is_more_urgent(world: World) -> None:
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

    waits.step()  # it has seen no line

    assert world.record().queue_head == first


@pytest.mark.parametrize("away", [0.0, 300.0], ids=["at once", "when the other is long dead"])
def test_a_waiter_that_goes_on_in_another_process_keeps_its_place(world: World, away: float) -> None:
    holder, triggerer, second, next_one = (
        Host(world, name) for name in ("holder", "triggerer", "second", "next triggerer")
    )
    holder.take(lease_ms=3_600_000)
    one = waiting(triggerer, lease_id="ti-1", owns_lease_id=False)
    with pytest.raises(KeyboardInterrupt):
        one.interrupt(KeyboardInterrupt())
    run_a_while(triggerer, triggerer.presence.maintain(), 3.0)
    assert owners(world) == ["triggerer"], "somebody may go on in it soon"
    world.now += away
    two = waiting(second)

    one = waiting(next_one, lease_id="ti-1", owns_lease_id=False)

    assert len(line(world)) == 2
    holder.release()
    assert woken(two) is None
    assert woken(one) is not None


def test_who_leaves_the_look_at_the_line_to_another_looks_himself_if_that_fails(world: World) -> None:
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


def test_who_resigns_for_a_waiter_frees_its_place_at_once(world: World) -> None:
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


def test_a_place_that_nobody_goes_on_in_is_a_dead_ones(world: World) -> None:
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


def test_a_waiter_whose_entry_is_gone_stands_in_line_again(world: World) -> None:
    holder, first, second = (Host(world, name) for name in ("holder", "first", "second"))
    holder.take()
    one = waiting(first)
    (entry,) = line(world)
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


# -- what is seen of it -----------------------------------------------------------------------------------------------


def test_a_waiter_tells_who_it_is_since_when_and_for_how_long_it_would_wait(world: World) -> None:
    Host(world, "holder").take()
    waiting(Host(world, "first"), timeout=60.0, priority=3)

    (waiter,) = line(world)

    assert (waiter.owner, waiter.priority, waiter.slots, waiter.mode) == ("first", 3, 1, "exclusive")
    assert waiter.until is not None
    assert (waiter.until - waiter.since).total_seconds() == 60.0


def test_a_process_has_one_name_though_two_threads_ask_for_it_at_once(world: World) -> None:
    host = Host(world)
    quicker: list[str] = []

    def stamp() -> Stamp:
        if not quicker:
            quicker.append("a thread that asks while the other makes its stamp")
            quicker[0] = host.queue.own.process
        return host.stamp()

    host.queue.own.stamp = stamp

    assert host.queue.own.process == quicker[0] == host.queue.own.process


def test_a_standing_is_described(world: World) -> None:
    Host(world, "holder").take()
    for name in ("prod/a", "prod/b", "prod/c"):
        waiting(Host(world, name))
    waiters = line(world)

    third, first = (queue_positions(waiters)[waiters[number].place] for number in (2, 0))
    assert third.describe() == "3rd of 3, behind prod/b"
    assert first.describe() == "1st of 3"
