"""Conditions of the core that no other test needs.

`scripts/mutate.py` found them: it changed each of them, and no history and no test failed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from airflow_dynamo_lock.core.effects import Request, Sleep, Stamp
from airflow_dynamo_lock.core.lock.confirm import _BEHIND_MS
from airflow_dynamo_lock.core.lock.operations import Operations
from airflow_dynamo_lock.core.lock.requests import ROUNDS
from airflow_dynamo_lock.core.model.capacity import has_free_slots, should_wake
from airflow_dynamo_lock.core.model.claim import Claim
from airflow_dynamo_lock.core.model.edits import Change, Enter, Heartbeat
from airflow_dynamo_lock.core.model.errors import (
    LockLostError,
    LockNotHeldError,
    LockRecordError,
    LockTimeoutError,
    LockUnavailableError,
    LockValueError,
)
from airflow_dynamo_lock.core.model.kind import compatible
from airflow_dynamo_lock.core.model.lease import Lease
from airflow_dynamo_lock.core.model.limits import MIN_CLOCK_SKEW, SHARED
from airflow_dynamo_lock.core.model.outcomes import Busy, Draining, Granted, Lost, Released, Renewed
from airflow_dynamo_lock.core.model.record import LockRecord, QueuePosition, Waiter
from airflow_dynamo_lock.core.model.text import readable, utc
from airflow_dynamo_lock.core.queue.view import head_update_of, on_change
from airflow_dynamo_lock.core.table.grant_writes import MAX_REMOVED
from airflow_dynamo_lock.core.table.lease_writes import ESTIMATE_BEHIND_MS
from airflow_dynamo_lock.core.table.native import NativeFormat
from airflow_dynamo_lock.core.table.position import head_after, place_of, ticket_of
from proof.simulator.stepped import (
    CONFLICT,
    KEY,
    LOST,
    LOST_THEN_RETRIED,
    TABLE,
    Host,
    World,
    a_holder,
    a_lease,
)
from tests.core.test_queue import owners, run_a_while, waiting, woken
from tests.core.test_sets import claims, leases, take_all, waiting_for

#: Noon of the first day of 1970, in epoch milliseconds.
NOON = 12 * 3_600_000


def a_record(capacity: int, available: int, *holders: str, capacity_pinned: bool = False) -> LockRecord:
    return LockRecord(
        KEY,
        capacity,
        available,
        {each: a_holder(each) for each in holders},
        token=1,
        capacity_pinned=capacity_pinned,
    )


# -- capacity ---------------------------------------------------------------------------------------------------------


def test_a_writer_has_no_free_slot_beside_living_readers() -> None:
    assert not has_free_slots(a_record(SHARED, SHARED - 1, "reader"), [], 1, 1)


def test_an_idle_lock_can_grant_any_capacity_but_no_more_slots_than_that() -> None:
    assert has_free_slots(a_record(3, 3), [], 5, 5)
    assert not has_free_slots(a_record(3, 3), [], 6, 5)


@pytest.mark.parametrize(
    ("record", "slots", "wakes"),
    [
        (a_record(SHARED, SHARED - 1, "reader"), 1, False),  # the slots of readers are not free for others
        (a_record(SHARED, SHARED), 1, True),
        (a_record(SHARED, SHARED), 2, True),
        (a_record(SHARED, SHARED - 1, "reader", capacity_pinned=True), 1, True),
        (a_record(1, 1), 2, True),  # the next claim may change the capacity
        (a_record(3, 1, "a", "b"), 2, False),
    ],
)
def test_a_wait_without_a_capacity_uses_that_of_the_lock(record: LockRecord, slots: int, wakes: bool) -> None:
    assert should_wake(record, [], slots, None, takes=False) is wakes


def test_a_waiter_without_a_capacity_does_not_join_readers() -> None:
    assert not should_wake(a_record(SHARED, SHARED - 1, "reader"), [], 1, None, takes=True)


def test_a_pinned_capacity_wakes_no_plain_waiter_that_does_not_acquire() -> None:
    pinned = a_record(3, 3, capacity_pinned=True)
    assert should_wake(pinned, [], 1, 1, takes=True)  # so that its attempt raises the error
    assert not should_wake(pinned, [], 1, 1, takes=False)
    assert should_wake(pinned, [], 1, 5, takes=False)


def test_a_free_slot_is_granted_without_a_reclaim(world: World) -> None:
    Host(world, "dead").take(capacity=2)
    world.now += 60.0

    granted = Host(world, "b").take(capacity=2)

    assert isinstance(granted, Granted)
    assert granted.reclaimed == ()
    assert sorted(world.record().holders) == ["b", "dead"]


def test_one_write_reclaims_the_maximum_number_of_dead_holders(world: World) -> None:
    for number in range(MAX_REMOVED):
        Host(world, f"dead {number}").take(capacity=MAX_REMOVED)
    world.now += 60.0

    granted = Host(world, "b").take(slots=MAX_REMOVED, capacity=MAX_REMOVED)

    assert isinstance(granted, Granted)
    assert len(granted.reclaimed) == MAX_REMOVED


# -- stamps -----------------------------------------------------------------------------------------------------------


def test_server_time_is_fresh_up_to_the_allowed_age() -> None:
    stamp = Stamp("v", 1, 1, 0.0, age=10.0)
    assert stamp.is_fresh(10_000)
    assert not stamp.is_fresh(9_999)
    assert not Stamp("v", None, 1, 0.0, answered=False).is_fresh(10_000)
    assert Stamp("v", 1, 1, 0.0).is_fresh(0)


def test_the_minimum_clock_skew_is_the_sum_of_its_parts() -> None:
    """R3 (proof of death): a stamp may be early by what is not corrected plus the resolution of ``Date``. 2 s are to
    spare."""
    assert _BEHIND_MS + 1000 == ESTIMATE_BEHIND_MS
    assert ESTIMATE_BEHIND_MS + 2000 == MIN_CLOCK_SKEW * 1000


def test_an_error_without_server_time_names_the_allowed_age(world: World) -> None:
    host = Host(world, "a")
    host.take()
    world.now += 31.0
    world.dates = False  # from now on a proxy removes the header

    with pytest.raises(LockUnavailableError, match=r"had it within 30 s"):
        host.heartbeat()


# -- renew ------------------------------------------------------------------------------------------------------------


def test_a_grant_is_corrected_by_a_time_that_is_at_most_ten_seconds_old(world: World) -> None:
    host = Host(world, "a", wall_clock_offset=-3600.0)
    suspended = iter([0.0, 11.0])  # before the first stamp, and before the second one

    def stamp() -> Stamp:
        world.now += next(suspended, 0.0)
        return host.stamp()

    operations = Operations.of(NativeFormat(TABLE), stamp, host.observer, host.queue)
    host.run(operations.attempting.try_acquire(host.claim(), owns_lease_id=False))

    assert world.actions() == ["UpdateItem", "GetItem", "UpdateItem"]


def overtaken(world: World, operation: Any, host: Host) -> Any:
    """Return the outcome of a write that arrives after a later heartbeat of the same lease."""
    paused = host.start(operation)
    later = Host(world, "later")
    later.heartbeat("a")  # its answer has the server's time
    world.now += 5.0
    assert isinstance(later.heartbeat("a"), Renewed)
    world.now -= 5.0
    return paused.finish()


def test_an_overtaken_renewal_is_written_again(world: World) -> None:
    host = Host(world, "a")
    host.take()

    entered = overtaken(world, host.operations.renewing.renew(KEY, "a", 30_000, Enter("task")), host)

    assert isinstance(entered, Renewed)
    assert list(world.record().holders["a"].processes) == ["task"]


def test_an_overtaken_heartbeat_of_a_draining_lease_is_written_again(world: World) -> None:
    host = Host(world, "a")
    host.take()
    host.enter("task")
    assert isinstance(host.release(), Draining)

    renewed = overtaken(world, host.operations.renewing.renew(KEY, "a", 15_000, Heartbeat()), host)

    assert isinstance(renewed, Renewed)


@pytest.mark.parametrize("lease_ms", [None, 30_000, 60_000])
def test_an_overtaken_change_of_a_lease_is_written_again(world: World, lease_ms: int | None) -> None:
    host = Host(world, "a")
    host.take()
    change = Change(longer=lease_ms is not None, data={"rows": 7})
    longer = replace(a_lease("a"), lease_ms=lease_ms or 30_000)

    renewed = overtaken(world, host.operations.renewing.renew_all([longer], change), host)

    assert isinstance(renewed, Renewed)
    assert world.record().data == {"rows": 7}


def test_a_lease_is_not_made_shorter_and_the_error_names_both_lengths(world: World) -> None:
    host = Host(world, "a")
    host.take(lease_ms=90_000)
    change = Change(longer=True)
    with pytest.raises(LockValueError, match=r"lasts 90 s and cannot be made shorter \(30 s\)"):
        host.run(host.operations.renewing.renew_all([a_lease("a")], change))


def test_two_leases_are_renewed_with_one_request_and_one_without_a_transaction(world: World) -> None:
    host = Host(world, "me")
    take_all(host, "ab")
    world.sent.clear()
    for keys in "ab", "a":
        world.now += 1.0
        host.run(host.operations.renewing.renew_all(leases(host, keys), Heartbeat()))
    assert world.actions() == ["TransactWriteItems", "UpdateItem"]

    world.sent.clear()
    for keys in "ab", "a":
        world.now += 1.0
        heartbeats = host.start(host.operations.renewing.keep_for_processes(leases(host, keys), 5.0))
        while isinstance(heartbeats.effect, Request):
            heartbeats.step()
    assert world.actions() == ["TransactWriteItems", "UpdateItem"]


def test_two_locks_are_released_with_one_request_and_one_without_a_transaction(world: World) -> None:
    host = Host(world, "me")
    take_all(host, "ab")
    world.sent.clear()
    host.run(host.operations.releasing.release_all(leases(host, "ab"), confirmed=True))
    take_all(host, "a")
    host.run(host.operations.releasing.release_all(leases(host, "a"), confirmed=True))
    assert world.actions() == ["TransactWriteItems", "UpdateItem", "UpdateItem"]


# -- release ----------------------------------------------------------------------------------------------------------


def test_a_lease_after_its_min_hold_drains_while_a_process_is_inside(world: World) -> None:
    host = Host(world, "a")
    host.take(min_hold_ms=10_000)
    host.enter("task", lease_ms=30_000)
    world.now += 11.0

    assert isinstance(host.release(), Draining)

    assert isinstance(host.leave("task"), Released)
    assert world.record().holders == {}


def test_min_hold_ends_in_the_millisecond_that_it_names(world: World) -> None:
    host = Host(world, "a")
    host.take(min_hold_ms=10_000)
    hold_until_ms = world.record().holders["a"].hold_until_ms
    assert hold_until_ms is not None
    world.now = round(world.now + (hold_until_ms - host.stamp().best_ms) / 1000, 3)
    assert host.stamp().best_ms == hold_until_ms

    assert host.release() == Released()


# -- acquire ----------------------------------------------------------------------------------------------------------


def test_a_set_of_one_lock_needs_no_transaction(world: World) -> None:
    take_all(Host(world, "me"), "a")
    assert world.actions() == ["UpdateItem"]


@pytest.mark.parametrize(("owns_lease_id", "left"), [(True, []), (False, ["me"])])
def test_a_set_that_loses_a_lock_releases_the_others_if_it_owns_the_lease_id(
    world: World, owns_lease_id: bool, left: list[str]
) -> None:
    host, rival = Host(world, "me"), Host(world, "rival")
    paused = host.start(
        host.operations.attempting.try_acquire_all(claims(host, "ab"), owns_lease_id=owns_lease_id)
    )
    paused.step()  # acquires both locks
    rival.run(rival.operations.admin.break_("b", "me"))
    rival.take(key="b")

    assert isinstance(paused.finish(), Busy)

    assert list(world.record("a").holders) == left


@pytest.mark.parametrize(("owns_lease_id", "left"), [(True, []), (False, ["me"])])
def test_a_set_whose_reply_is_lost_is_released_if_it_owns_the_lease_id(
    world: World, owns_lease_id: bool, left: list[str]
) -> None:
    world.faults.append(LOST)

    with pytest.raises(LockUnavailableError):
        take_all(Host(world, "me"), "ab", owns_lease_id=owns_lease_id)

    assert list(world.record("a").holders) == left
    assert world.actions() == ["TransactWriteItems"] * (1 + owns_lease_id)


def test_a_set_of_slots_has_a_token_of_its_own_after_a_concurrent_grant(world: World) -> None:
    host, other = Host(world, "me"), Host(world, "other")
    taking = host.start(
        host.operations.attempting.try_acquire_all(claims(host, "ab", capacity=2), owns_lease_id=False)
    ).step()
    beside = other.take(key="a", capacity=2)

    granted = taking.finish()

    assert isinstance(granted, tuple)
    assert beside.token != granted[0].token == world.record("a").token


def test_a_set_that_conflicts_with_a_transaction_is_retried_a_few_times(world: World) -> None:
    world.faults.append(CONFLICT)
    assert isinstance(take_all(Host(world, "me"), "ab"), tuple)

    world.sent.clear()
    world.faults.extend([CONFLICT] * 10)
    with pytest.raises(LockUnavailableError):
        take_all(Host(world, "other"), "cd")
    assert world.actions() == ["TransactWriteItems"] * ROUNDS


def test_a_claim_that_loses_every_race_names_the_holder(world: World) -> None:
    host, rival = Host(world, "a"), Host(world, "rival")
    rival.take()
    paused = host.start(host.operations.attempting.try_acquire(host.claim(fair=False), owns_lease_id=False))
    while paused.effect is not None:
        rival.release()
        rival.take()
        paused.step()

    busy = paused.finish()

    assert isinstance(busy, Busy)
    assert [each.owner for each in busy.record.holders.values()] == ["rival"]


def test_a_claim_that_loses_every_race_and_reads_no_holder_is_busy(world: World) -> None:
    world.shows_refused = False
    host, rival = Host(world, "a"), Host(world, "rival")
    paused = host.start(host.operations.attempting.try_acquire(host.claim(fair=False), owns_lease_id=False))
    while paused.effect is not None:
        if paused.request.action == "GetItem":
            rival.release()
            world.delete()
        else:
            rival.take()
        paused.step()

    busy = paused.finish()
    assert isinstance(busy, Busy)
    assert busy.record.key == KEY


@pytest.mark.parametrize("timeout", [None, 5.0])
def test_a_newcomer_sleeps_while_the_admission_window_is_full(world: World, timeout: float | None) -> None:
    host = Host(world, "b")
    host.operations.acquiring.window._size = 0
    waits = (
        lambda: host.start_acquire(timeout=timeout),
        lambda: host.start(
            host.operations.acquiring.wait(KEY, 1, now=host.now(), timeout=timeout, poll_interval=1.0)
        ),
    )
    for wait in waits:
        assert isinstance(wait().effect, Sleep)


def test_the_admission_window_does_not_limit_waiters_and_single_attempts(world: World) -> None:
    holder, host = Host(world, "holder"), Host(world, "b")
    holder.take()
    paused = waiting(host)
    host.operations.acquiring.window._size = 0
    for wait in (
        host.start_acquire("c", timeout=0.0),
        host.start(host.operations.acquiring.wait(KEY, 1, now=host.now(), timeout=0.0, poll_interval=1.0)),
    ):
        assert isinstance(wait.effect, Request)
    holder.release()
    assert woken(paused) is not None


# -- wait -------------------------------------------------------------------------------------------------------------


def test_a_timeout_of_0_allows_one_request_and_errors_name_the_timeout(world: World) -> None:
    Host(world, "holder").take()
    host = Host(world, "b")
    world.sent.clear()

    with pytest.raises(LockTimeoutError, match="was not free within 0 s"):
        host.start_acquire(timeout=0.0).finish()

    assert world.actions() == ["UpdateItem"]
    for timeout, text in (
        (0.0, "0 s"),
        (2.5, r"2\.5 s"),
    ):
        with pytest.raises(LockTimeoutError, match=f"was not free within {text}"):
            host.run(
                host.operations.acquiring.wait(KEY, 1, now=host.now(), timeout=timeout, poll_interval=1.0)
            )


def test_the_error_of_a_waiter_names_its_timeout(world: World) -> None:
    Host(world, "holder").take(lease_ms=90_000)
    with pytest.raises(LockTimeoutError, match=r"was not free within 2\.5 s"):
        waiting(Host(world, "b"), timeout=2.5).finish()
    assert world.now == pytest.approx(2.5)


def test_a_waiter_for_several_locks_enters_each_queue_once(world: World) -> None:
    Host(world, "holder").take(key="a")
    paused = waiting_for(Host(world, "b"), "ab")
    world.sent.clear()

    assert woken(paused) is None

    assert "PutItem" not in world.actions()
    assert "TransactWriteItems" not in world.actions()


def test_an_interrupted_waiter_releases_its_grant(world: World) -> None:
    """An operation that is discarded (`GeneratorExit`) can send no more requests, so its lease expires."""
    for failure, left in (KeyboardInterrupt, []), (GeneratorExit, ["b"]):
        holder, host = Host(world, "holder"), Host(world, "b")
        holder.take()
        paused = waiting(host)
        holder.release()
        paused.until("UpdateItem").step()  # the write that takes the lock
        with pytest.raises(failure):
            paused.interrupt(failure()).finish()
        assert list(world.record().holders) == left
        world.delete()


def test_the_error_of_a_newcomer_names_the_waiter_ahead(world: World) -> None:
    holder, first, newcomer = (Host(world, name) for name in ("holder", "first", "newcomer"))
    holder.take()
    one = waiting(first)
    holder.release()

    with pytest.raises(LockTimeoutError, match="first waits for it already"):
        waiting(newcomer, timeout=0.0)

    assert one.effect is not None


def test_a_request_of_a_renewal_gets_no_time_beyond_its_deadline(world: World) -> None:
    host = Host(world, "a")
    host.take()
    paused = host.start(host.operations.renewing.renew(KEY, "a", 30_000, Heartbeat(), until=host.now() - 1.0))
    assert paused.request.within == 0.0


def test_a_release_by_a_clock_that_is_behind_cools_down_for_min_hold_at_most(
    world: World,
) -> None:
    world.dates = False
    Host(world, "a").take("lease", min_hold_ms=60_000)

    outcome = Host(world, "b", wall_clock_offset=-3600.0).release("lease")

    assert isinstance(outcome, Released)
    assert world.record().holders["lease"].lease_ms == 60_000


# -- admin ------------------------------------------------------------------------------------------------------------


def test_a_capacity_is_set_although_another_process_changes_it(world: World) -> None:
    one, two = Host(world, "one"), Host(world, "two")
    one.run(one.operations.admin.set_capacity(KEY, 3))
    paused = one.start(one.operations.admin.set_capacity(KEY, 5)).step()
    two.run(two.operations.admin.set_capacity(KEY, 4))

    assert paused.finish().record.capacity == 5


def test_a_record_that_is_used_meanwhile_is_not_forgotten(world: World) -> None:
    one, two = Host(world, "one"), Host(world, "two")
    one.take()
    one.release()
    paused = one.start(one.operations.admin.forget(KEY, at_once=True)).step()
    two.take()

    assert paused.finish() is False
    assert list(world.record().holders) == ["two"]


def test_a_record_with_holders_or_waiters_is_not_forgotten_and_costs_no_write(world: World) -> None:
    holder, host = Host(world, "holder"), Host(world, "b")
    holder.take()
    world.sent.clear()
    assert holder.run(holder.operations.admin.forget(KEY, at_once=True)) is False
    assert world.actions() == ["GetItem"]
    one = waiting(host)
    holder.release()
    world.sent.clear()
    assert holder.run(holder.operations.admin.forget(KEY, at_once=True)) is False
    assert world.actions() == ["GetItem"]
    assert one.effect is not None


def test_a_lease_that_was_broken_by_a_lost_request_counts_as_broken(world: World) -> None:
    host = Host(world, "a")
    host.take()
    world.faults.extend(["", LOST_THEN_RETRIED])  # the read, and the write

    broken = host.run(host.operations.admin.break_(KEY, "a"))

    assert broken.holder.lease_id == "a"


def test_a_lease_that_does_not_exist_cannot_be_broken(world: World) -> None:
    host = Host(world, "a")
    with pytest.raises(LockNotHeldError, match="Not locked"):
        host.run(host.operations.admin.break_(KEY, "a"))
    host.take()
    with pytest.raises(LockNotHeldError, match="Locked by a"):
        host.run(host.operations.admin.break_(KEY, "b"))


def test_a_lease_whose_record_is_deleted_meanwhile_counts_as_broken(world: World) -> None:
    world.shows_refused = False
    host = Host(world, "a")
    host.take()
    breaking = host.start(host.operations.admin.break_(KEY, "a")).step()
    world.faults.append(LOST_THEN_RETRIED)
    breaking.step()
    world.delete()

    assert breaking.finish().holder.lease_id == "a"


def test_a_capacity_that_was_never_set_can_be_unset(world: World) -> None:
    host = Host(world, "a")
    record = host.run(host.operations.admin.set_capacity(KEY, None)).record
    assert (record.capacity, record.available, record.token, record.holders) == (1, 1, 0, {})
    assert world.actions() == ["GetItem"]


@pytest.mark.parametrize("client", ["moto"], indirect=True)  # the simulated table has no scans
def test_a_page_lists_locks_without_waiters_and_presences(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    holder, host = Host(world, "holder"), Host(world, "b")
    holder.take(lease_ms=3_600_000)
    paused = waiting(host)
    run_a_while(host, host.presence.maintain(), 10.0)
    assert world.item(host.queue.own.process) is not None
    damaged = "warehouse/damaged"
    holder.take(key=damaged)
    world.client.update_item(
        TableName=TABLE,
        Key={"key": {"S": damaged}, "entry": {"S": "lock"}},
        UpdateExpression="SET #capacity = :x",
        ExpressionAttributeNames={"#capacity": "capacity"},
        ExpressionAttributeValues={":x": {"S": "x"}},
    )

    reported: list[LockRecordError] = []
    records, _ = host.run(host.operations.admin.page(None, on_damaged=reported.append))
    assert [each.key for each in records] == [KEY]
    assert damaged in str(reported[0])
    assert len(reported) == 1
    caplog.clear()
    host.run(host.operations.admin.page(None))
    assert [damaged in each.getMessage() for each in caplog.records] == [True]
    assert paused.effect is not None


# -- the queue --------------------------------------------------------------------------------------------------------


def test_a_position_is_reported_only_when_it_changes(world: World) -> None:
    reported: list[QueuePosition] = []
    report = on_change(reported.append)
    first, second = QueuePosition(KEY, 1, 1, None), QueuePosition(KEY, 2, 2, None)
    for each in second, second, first, first, second:
        report(each)
    assert reported == [second, first, second]


def test_a_queue_longer_than_a_page_is_granted_in_order(world: World) -> None:
    holder = Host(world, "holder")
    holder.take()
    queue = [(name, Host(world, name)) for name in (f"waiter {number:02d}" for number in range(30))]
    paused = {name: waiting(host) for name, host in queue}
    assert owners(world) == [name for name, _ in queue]
    holder.release()

    assert woken(paused["waiter 20"]) is None
    assert woken(paused["waiter 29"]) is None
    for name, host in queue[:3]:
        assert woken(paused[name]) is not None
        host.release()
    assert owners(world) == [name for name, _ in queue[3:]]


def test_waiters_beyond_the_first_page_are_granted_together(world: World) -> None:
    holder = Host(world, "holder")
    holder.take(slots=40, capacity=40)
    hosts = [Host(world, f"waiter {number:02d}") for number in range(40)]
    paused = [waiting(host, slots=1, capacity=40) for host in hosts]
    holder.release(slots=40)

    assert all(woken(each) is not None for each in reversed(paused))
    assert world.record().available == 0


def test_a_granted_waiter_leaves_nothing_to_remove(world: World) -> None:
    holder, host = Host(world, "holder"), Host(world, "b")
    holder.take()
    paused = waiting(host)
    assert bool(host.queue)
    holder.release()
    assert woken(paused) is not None
    assert not host.queue


def test_a_reader_does_not_overtake_a_writer_to_join_a_reader(world: World) -> None:
    writer = Host(world, "writer")
    writer.take()
    one, two, last = Host(world, "one"), Host(world, "two"), Host(world, "last")
    first = waiting(one, capacity=SHARED)
    between = waiting(two)
    behind = waiting(last, capacity=SHARED)
    writer.release()

    assert woken(behind) is None, "the writer ahead waits for the first reader"
    assert woken(first) is not None
    assert woken(behind) is None
    one.release()
    assert woken(between) is not None
    two.release()
    assert woken(behind) is not None


def test_two_waiters_of_one_process_are_granted_in_order(world: World) -> None:
    holder, host = Host(world, "holder"), Host(world, "b")
    holder.take()
    one, two = waiting(host, lease_id="one"), waiting(host, lease_id="two")
    holder.release()
    assert woken(two) is None
    assert woken(one) is not None


def test_a_process_renews_its_presence_with_one_request_and_releases_it_at_the_end(world: World) -> None:
    holder, host = Host(world, "holder"), Host(world, "b")
    holder.take(lease_ms=3_600_000)
    one = waiting(host)
    maintaining = host.start(host.presence.maintain())
    while world.item(host.queue.own.process) is None:
        maintaining.step()
    world.sent.clear()
    until = world.now + 20.0
    while world.now < until:
        maintaining.step()
    assert set(world.actions()) == {"UpdateItem"}
    assert len(world.actions()) <= 5  # one every four seconds
    holder.release()
    assert woken(one) is not None
    world.sent.clear()
    maintaining.finish()
    assert world.record(host.queue.own.process).holders == {}
    removals = [each for each in world.sent if "REMOVE" in each.params["UpdateExpression"]]
    assert len(removals) == 1


def test_waiters_of_a_dead_process_are_skipped_even_if_its_presence_was_renewed(world: World) -> None:
    holder, dead, second = (Host(world, name) for name in ("holder", "dead", "second"))
    holder.take(lease_ms=3_600_000)
    one = waiting(dead)
    run_a_while(dead, dead.presence.maintain(), 40.0)
    world.now += 8.0
    two = waiting(second)
    holder.release()
    assert woken(two) is None
    assert world.item(dead.queue.own.process) is not None

    world.now += 10.0

    assert owners(world) == ["second"]
    assert woken(two) is not None
    assert woken(one) is None


def test_a_newcomer_separates_living_and_dead_waiters(world: World) -> None:
    holder, first, second, newcomer = (Host(world, name) for name in ("holder", "first", "second", "new"))
    holder.take(lease_ms=3_600_000)
    waiting(first)
    world.now += 16.0
    waiting(second)

    view = newcomer.run(newcomer.queue.reader.look(newcomer.claim(), None, None))

    assert [each.owner for each in view.ahead] == ["second"]
    assert len(view.dead) == 1
    newcomer.queue.discard(KEY, view.dead)
    run_a_while(newcomer, newcomer.presence.maintain(), 3.0)
    assert owners(world) == ["second"]


def test_a_process_does_not_remove_its_own_waiter(world: World) -> None:
    holder, host = Host(world, "holder"), Host(world, "b")
    holder.take(lease_ms=3_600_000)
    paused = waiting(host)
    ((key, place),) = host.queue.own.ids
    host.queue.discard(key, [place])
    run_a_while(host, host.presence.maintain(), 3.0)
    assert owners(world) == ["b"]
    assert paused.effect is not None


def test_a_granted_waiter_in_the_queue_is_not_ahead_of_others(world: World) -> None:
    holder, first, second = (Host(world, name) for name in ("holder", "first", "second"))
    holder.take(slots=2, capacity=2)
    one, two = waiting(first, capacity=2), waiting(second, capacity=2)
    holder.release(slots=2)
    one.until("DeleteItem")  # it is granted, and still in the queue

    assert owners(world) == ["second"]
    assert woken(two) is not None
    assert world.record().available == 0


@pytest.mark.parametrize("others", [0, 1])
def test_a_waiter_whose_item_was_deleted_writes_it_again(world: World, others: int) -> None:
    holder, first, second = (Host(world, name) for name in ("holder", "first", "second"))
    holder.take(lease_ms=3_600_000)
    paused = waiting(first)
    for _ in range(others):
        waiting(second)
    ((key, place),) = first.queue.own.ids
    world.client.delete_item(TableName=TABLE, Key={"key": {"S": key}, "entry": {"S": f"waiter/{place}"}})

    assert woken(paused) is None

    assert owners(world) == ["first", "second"][: 1 + others]


def test_a_lock_that_is_deleted_before_the_ticket_is_taken_is_granted(world: World) -> None:
    holder, host = Host(world, "holder"), Host(world, "b")
    holder.take()
    paused = host.start_acquire().step()  # refused
    world.delete()

    world.sent.clear()
    assert isinstance(paused.finish(), Granted)
    assert "PutItem" not in world.actions()
    assert world.now == 0.0, "without a pause"


def test_a_text_that_is_no_position_has_ticket_0() -> None:
    assert (ticket_of("50"), ticket_of("50/x"), ticket_of("")) == (0, 0, 0)


LOW, HIGH = place_of(0, 100, "x"), place_of(0, 200, "y")
URGENT = place_of(5, 300, "z")


SEEN = "(attribute_not_exists(#queue_head) OR #queue_head >= :seen_head)"


@pytest.mark.parametrize(
    ("seen_head", "last_ticket", "own", "ahead", "following", "condition", "head"),
    [
        # No queue.
        (None, 0, None, False, None, "attribute_not_exists(#queue_head)", ""),
        # The head is missing although a waiter is behind: it is set.
        (None, 200, None, False, HIGH, "attribute_not_exists(#queue_head)", HIGH),
        # Waiters are ahead: they keep the head.
        (LOW, 200, None, True, None, SEEN, ""),
        # The first waiter takes the lock: the head moves on to the next.
        (LOW, 200, LOW, False, HIGH, SEEN, HIGH),
        # The last waiter takes it: the head is removed, unless a claimant has taken a ticket.
        (
            LOW, 100, LOW, False, None,
            f"{SEEN} AND #last_ticket = :tickets", None,
        ),
        # The same, in a record without tickets.
        (
            LOW, 0, None, False, None,
            f"{SEEN} AND attribute_not_exists(#last_ticket)", None,
        ),
        # The waiter with the next ticket may not have written its entry yet: the head stays before it.
        (LOW, 101, LOW, False, None, SEEN, head_after(LOW)),
        # The head would pass positions of a higher priority.
        (
            URGENT, 300, URGENT, False, HIGH,
            f"{SEEN} AND #last_ticket = :tickets", HIGH,
        ),
    ],
)  # fmt: skip
def test_a_grant_checks_and_updates_the_queue_head(
    seen_head: str | None,
    last_ticket: int,
    own: str | None,
    ahead: bool,
    following: str | None,
    condition: str,
    head: str | None,
) -> None:
    record = replace(a_record(1, 1), queue_head=seen_head, last_ticket=last_ticket)
    waiters = [a_waiter(place) for place in (own or LOW,)]

    update = head_update_of(record, waiters[0] if own else None, waiters if ahead else [], following)

    assert (update.condition, update.next) == (condition, head)


def a_waiter(place: str) -> Waiter:
    return Waiter(
        key=KEY, place=place, lease_id="w", owner="w", slots=1, capacity=1, priority=0, since_ms=0,
        until_ms=None, process="p", version="v", renewed_at_ms=None, about={},
    )  # fmt: skip


# -- texts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (1, "1st"),
        (2, "2nd"),
        (3, "3rd"),
        (4, "4th"),
        (11, "11th"),
        (13, "13th"),
        (21, "21st"),
        (31, "31st"),
        (111, "111th"),
        (122, "122nd"),
    ],
)
def test_a_position_is_described_in_english(number: int, text: str) -> None:
    assert QueuePosition(KEY, number, 200, None).describe() == f"{text} of 200"


def test_a_very_long_text_of_the_table_is_shortened() -> None:
    assert readable("x" * 1000) == "x" * 1000
    assert readable("x" * 1001) == "x" * 1000 + "…"


def test_ten_holders_are_named_and_the_others_counted() -> None:
    assert "more" not in a_record(11, 1, *map(str, range(10))).describe()
    assert a_record(11, 0, *map(str, range(11))).describe().endswith("; and 1 more")


def test_a_lost_lease_names_the_present_holder() -> None:
    assert "the lock is not locked now" in Lost(None).describe()
    assert "the lock is not locked now" in Lost(a_record(1, 1)).describe()
    assert "Locked by me" in Lost(a_record(1, 0, "b")).describe()


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({}, "me since 00:00 UTC"),
        ({"renewed_at_ms": NOON}, "me since 00:00 UTC, last heartbeat 0 s ago"),
        ({"renewed_at_ms": NOON + 9_000}, "me since 00:00 UTC, last heartbeat 0 s ago"),
        ({"processes": {"a": 1}}, "me since 00:00 UTC, 1 process inside"),
        ({"processes": {"a": 1, "b": 1}}, "me since 00:00 UTC, 2 processes inside"),
        ({"draining": True, "hold_until_ms": NOON}, "me since 00:00 UTC, draining"),
        (
            {"draining": True, "cooling_down": True, "hold_until_ms": NOON},
            "me since 00:00 UTC, released, and not handed on before 12:00:00 UTC",
        ),
    ],
)
def test_a_holder_is_described(changed: dict[str, Any], text: str) -> None:
    holder = a_holder(**changed)
    assert holder.describe(NOON) == text
    assert holder.renewed_at == (utc(changed["renewed_at_ms"]) if "renewed_at_ms" in changed else None)


def test_a_claim_supersedes_earlier_attempts_only() -> None:
    about = {"attempt_of": "run/task"}
    claim = Claim(KEY, "0002", "me", 30_000, 15_000, attempt_of="run/task")
    assert claim.supersedes(a_holder("0001", about=about))
    assert not claim.supersedes(a_holder("0002", about=about))
    assert not claim.supersedes(a_holder("0003", about=about))
    assert not claim.supersedes(a_holder("0001"))


@pytest.mark.parametrize(
    ("one", "other", "together"),
    [(1, 1, True), (3, 3, True), (3, 5, True), (1, 3, False), (SHARED, SHARED, True), (1, SHARED, False)],
)
def test_claims_that_can_hold_a_lock_together(one: int, other: int, together: bool) -> None:
    assert compatible(one, other) is together
    assert compatible(other, one) is together


def test_a_lease_is_read_from_an_xcom_that_has_all_values() -> None:
    values = {**a_lease("a").as_dict(), "lease_ms": 1, "grace_ms": 1}
    assert Lease.from_dict({**values, "took_over": True}).took_over
    for name in values.keys() - {"usual_ms"}:  # older versions do not write it
        with pytest.raises(LockValueError):
            Lease.from_dict({other: value for other, value in values.items() if other != name})
    for name in "lease_ms", "grace_ms":
        with pytest.raises(LockValueError):
            Lease.from_dict({**values, name: 0})


def test_a_lease_is_valid_to_the_last_moment(world: World) -> None:
    host = Host(world, "a")
    term = host.term()
    lease = replace(a_lease("a"), term=term)
    term.renewed(host.now(), 30_000)
    world.now += 26.5  # a holder does not count on the last tenth of its lease
    lease.check()
    world.now += 0.5
    with pytest.raises(LockLostError, match="no heartbeat has succeeded in time"):
        lease.check()
