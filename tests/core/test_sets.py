"""Several locks at once: all or none, in any order of the keys, and with few requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from airflow_dynamo_lock.core.effects import Request, WaitForSlots
from airflow_dynamo_lock.core.model.claim import Claim
from airflow_dynamo_lock.core.model.decisions import Decision
from airflow_dynamo_lock.core.model.edits import Enter, Heartbeat
from airflow_dynamo_lock.core.model.errors import (
    CapacityMismatchError,
    LockNotFoundError,
    LockRecordError,
    LockRemovedError,
    LockTimeoutError,
    LockUnavailableError,
)
from airflow_dynamo_lock.core.model.lease import Lease
from airflow_dynamo_lock.core.model.limits import SHARED
from airflow_dynamo_lock.core.model.outcomes import Busy, Draining, Granted, Lost, Released, Renewed
from proof.simulator.stepped import LOST, LOST_THEN_RETRIED, UNSENT, Host, Paused, World, a_lease
from tests.core.test_queue import run_a_while, until_waiting, woken


def claims(host: Host, keys: str, **options: Any) -> list[Claim]:
    return [host.claim(key=key, **options) for key in keys]


def take_all(host: Host, keys: str, *, owns_lease_id: bool = False, **options: Any) -> Any:
    return host.run(
        host.operations.attempting.try_acquire_all(claims(host, keys, **options), owns_lease_id=owns_lease_id)
    )


def waiting_for(
    host: Host, keys: str, *, timeout: float | None = None, **options: Any
) -> Paused[tuple[Granted, ...]]:
    """Return an acquire of several locks that has found one of them held, and is queued."""
    operation = host.operations.acquiring.acquire_all(
        claims(host, keys, **options), now=host.now(), timeout=timeout, poll_interval=1.0, owns_lease_id=True
    )
    return until_waiting(host.start(operation))


def leases(host: Host, keys: str) -> list[Lease]:
    return [a_lease(host.name, key) for key in keys]


def release_all(host: Host, keys: str) -> Any:
    return host.run(host.operations.releasing.release_all(leases(host, keys), confirmed=True))


def holders(world: World, keys: str) -> dict[str, list[str]]:
    return {key: list(world.record(key).holders) for key in keys}


# -- acquire ----------------------------------------------------------------------------------------------------------


def test_locks_never_used_before_are_taken_together_with_two_requests(world: World) -> None:
    granted = take_all(Host(world, "me"), "abc")

    assert world.actions() == ["TransactWriteItems", "BatchGetItem"]
    assert holders(world, "abc") == {"a": ["me"], "b": ["me"], "c": ["me"]}
    assert [each.token for each in granted] == [world.record(key).token for key in "abc"]


def test_if_one_lock_is_busy_none_is_taken_and_the_refusal_names_it_and_its_holder(world: World) -> None:
    Host(world, "prod/etl").run(
        Host(world, "prod/etl").operations.attempting.try_acquire(
            claims(Host(world, "prod/etl"), "b")[0], owns_lease_id=False
        )
    )

    busy = take_all(Host(world, "me"), "abc")

    assert isinstance(busy, Busy)
    assert busy.record.key == "b"
    assert "Locked by prod/etl" in busy.describe()
    assert world.item("a") is None
    assert world.item("c") is None


def test_dead_holders_of_each_lock_are_reclaimed_in_the_same_transaction(world: World) -> None:
    take_all(Host(world, "dead"), "ab")
    world.now += 60.0
    world.sent.clear()

    granted = take_all(Host(world, "me"), "abc")

    assert [each.took_over for each in granted] == [True, True, False]
    assert world.actions()[:3] == ["TransactWriteItems", "TransactWriteItems", "BatchGetItem"]
    assert holders(world, "abc") == {"a": ["me"], "b": ["me"], "c": ["me"]}


def test_slots_of_semaphores_are_taken_together_each_with_its_own_token(world: World) -> None:
    first, second = Host(world, "first"), Host(world, "second")
    one = take_all(first, "ab", capacity=3)
    two = take_all(second, "ab", capacity=3)

    assert holders(world, "ab") == {"a": ["first", "second"], "b": ["first", "second"]}
    for before, after in zip(one, two, strict=True):
        assert before.token < after.token
    assert isinstance(take_all(Host(world, "third"), "ab", slots=2, capacity=3), Busy)


def test_locks_are_shared_together(world: World) -> None:
    for name in ("first", "second"):
        assert not isinstance(take_all(Host(world, name), "ab", capacity=SHARED), Busy)
    assert isinstance(take_all(Host(world, "writer"), "bc"), Busy)


def test_a_lock_held_with_another_capacity_is_an_error_and_none_is_taken(world: World) -> None:
    take_all(Host(world, "etl"), "ab", capacity=3)

    with pytest.raises(CapacityMismatchError, match="'a'"):
        take_all(Host(world, "me"), "cab", capacity=2)
    assert world.item("c") is None


@pytest.mark.parametrize("fate", [LOST, LOST_THEN_RETRIED])
def test_a_lost_answer_loses_no_lock(world: World, fate: str) -> None:
    me = Host(world, "me")
    world.faults.append(fate)
    try:
        granted = take_all(me, "ab")
    except LockUnavailableError:
        granted = take_all(me, "ab")

    assert holders(world, "ab") == {"a": ["me"], "b": ["me"]}
    assert [each.token for each in granted] == [world.record(key).token for key in "ab"]


def test_a_failed_acquire_of_unknown_fate_is_undone(world: World) -> None:
    world.faults.append(LOST)
    with pytest.raises(LockUnavailableError, match="broke"):
        take_all(Host(world, "me"), "ab", owns_lease_id=True)
    assert holders(world, "ab") == {"a": [], "b": []}


def test_a_lock_that_was_broken_before_the_confirmation_is_taken_again(world: World) -> None:
    me, person = Host(world, "me"), Host(world, "person")
    taking = me.start(me.operations.attempting.try_acquire_all(claims(me, "ab"), owns_lease_id=False)).step()
    person.run(person.operations.admin.break_("b", "me"))

    granted = taking.finish()

    assert not isinstance(granted, Busy)
    assert holders(world, "ab") == {"a": ["me"], "b": ["me"]}
    assert granted[1].token == world.record("b").token


# -- wait -------------------------------------------------------------------------------------------------------------


def test_two_sets_in_different_orders_do_not_wait_for_each_other(world: World) -> None:
    holder, one, two = (Host(world, name) for name in ("holder", "one", "two"))
    take_all(holder, "ab")
    first, second = waiting_for(one, "ab"), waiting_for(two, "ba")
    release_all(holder, "ab")

    assert woken(second) is None
    assert woken(first) is not None
    release_all(one, "ab")
    assert woken(second) is not None
    assert holders(world, "ab") == {"a": ["two"], "b": ["two"]}
    assert world.record("a").queue_head is None


def test_a_waiter_for_several_locks_is_not_starved_by_waiters_for_one(world: World) -> None:
    a, b, both, newcomer = (Host(world, name) for name in ("a", "b", "both", "newcomer"))
    take_all(a, "a")
    take_all(b, "b")
    waits = waiting_for(both, "ab")
    release_all(a, "a")

    assert isinstance(take_all(newcomer, "a"), Busy), "it is reserved for the waiter for both"
    assert woken(waits) is None
    release_all(b, "b")
    assert woken(waits) is not None


def test_it_is_also_queued_for_a_lock_never_used_before(world: World) -> None:
    holder, both = Host(world, "holder"), Host(world, "both")
    take_all(holder, "a")
    waits = waiting_for(both, "az")

    assert isinstance(take_all(Host(world, "newcomer"), "z"), Busy)
    release_all(holder, "a")
    assert woken(waits) is not None


def test_a_lock_that_must_exist_is_not_created_by_a_wait_for_another(world: World) -> None:
    take_all(Host(world, "holder"), "a")

    with pytest.raises(LockNotFoundError, match="no record of the lock 'z'"):
        waiting_for(Host(world, "both"), "az", only_existing=True)
    assert world.item("z") is None


def test_a_waiter_that_times_out_leaves_all_queues(world: World) -> None:
    holder, both = Host(world, "holder"), Host(world, "both")
    take_all(holder, "ab")
    waits = waiting_for(both, "ab", timeout=5.0)
    world.now += 6.0

    with pytest.raises(LockTimeoutError, match=r"'a' was not free within 5 s. Locked by holder"):
        waits.finish()
    for key in "ab":
        assert both.run(both.queue.reader.waiters(key)) == []


def test_a_waiter_that_is_disconnected_while_it_leaves_leaves_all_queues_later(world: World) -> None:
    holder, both = Host(world, "holder"), Host(world, "both")
    take_all(holder, "ab")
    waits = waiting_for(both, "ab", timeout=5.0)
    places = {key: [each.place for each in both.run(both.queue.reader.waiters(key))] for key in "ab"}
    assert places["a"] == places["b"], "both queues gave out the same ticket"
    world.now += 6.0
    waits.until("TransactWriteItems")
    world.faults.append(UNSENT)
    with pytest.raises(LockTimeoutError):
        waits.finish()

    run_a_while(both, both.presence.maintain(), 3.0)

    other = Host(world, "other")
    assert [other.run(other.queue.reader.waiters(key)) for key in "ab"] == [[], []]


def test_a_waiter_takes_new_tickets_if_another_took_some_at_the_same_time(world: World) -> None:
    holder, one, two = (Host(world, name) for name in ("holder", "one", "two"))
    take_all(holder, "ab")
    enqueueing = one.start(
        one.operations.acquiring.acquire_all(
            claims(one, "ab"), now=one.now(), timeout=None, poll_interval=1.0, owns_lease_id=True
        )
    )
    while world.actions()[-1] != "BatchGetItem" or len(world.sent) < 4:
        enqueueing.step()
    second = waiting_for(two, "ba")
    first = until_waiting(enqueueing)
    release_all(holder, "ab")

    assert woken(first) is None
    assert woken(second) is not None


@pytest.mark.parametrize("requests", range(12))
def test_of_two_sets_one_comes_first_in_every_queue(world: World, requests: int) -> None:
    """Also if the second set enqueues between any two requests of the first: otherwise they would deadlock."""
    holder, one, two = (Host(world, name) for name in ("holder", "one", "two"))
    take_all(holder, "ab")
    begun = len(world.sent)
    first = one.start(
        one.operations.acquiring.acquire_all(
            claims(one, "ab"), now=one.now(), timeout=None, poll_interval=1.0, owns_lease_id=True
        )
    )
    while isinstance(first.effect, Request) and len(world.sent) < begun + requests:
        first.step()
    waiting_for(two, "ba")
    until_waiting(first)

    queues = [[each.owner for each in holder.run(holder.queue.reader.waiters(key))] for key in "ab"]

    assert sorted(queues[0]) == ["one", "two"]
    assert queues[0] == queues[1]


# -- renew and release ------------------------------------------------------------------------------------------------


def test_a_set_is_renewed_and_released_with_one_request_each(world: World) -> None:
    me = Host(world, "me")
    take_all(me, "abc")
    world.sent.clear()
    world.now += 1.0

    assert isinstance(me.run(me.operations.renewing.renew_all(leases(me, "abc"), Heartbeat())), Renewed)
    assert release_all(me, "abc") == [Released()] * 3

    assert world.actions() == ["TransactWriteItems"] * 2
    assert holders(world, "abc") == {"a": [], "b": [], "c": []}


def test_without_server_time_a_set_is_renewed_with_one_request_by_the_process_that_wrote_it(
    make_world: Callable[..., World],
) -> None:
    """Each heartbeat requires a version, which another process has to read first."""
    world = make_world(dates=False)
    me, other = Host(world, "me"), Host(world, "other")
    take_all(me, "ab")
    other.clock.answered = True
    world.sent.clear()

    for host, actions in (
        (me, ["TransactWriteItems"]),
        (me, ["TransactWriteItems"]),
        (other, ["GetItem", "UpdateItem"] * 2),
        (other, ["TransactWriteItems"]),
        (me, ["TransactWriteItems", "UpdateItem", "UpdateItem", "UpdateItem", "UpdateItem"]),
        (me, ["TransactWriteItems"]),
    ):
        assert isinstance(
            host.run(host.operations.renewing.renew_all(leases(me, "ab"), Heartbeat())), Renewed
        )
        assert world.actions() == actions
        world.sent.clear()


def test_a_set_is_lost_if_one_of_its_leases_is_lost(world: World) -> None:
    me, person = Host(world, "me"), Host(world, "person")
    take_all(me, "abc")
    person.run(person.operations.admin.break_("b", "me"))

    assert isinstance(me.run(me.operations.renewing.renew_all(leases(me, "abc"), Heartbeat())), Lost)
    assert [type(each) for each in release_all(me, "abc")] == [Released, Lost, Released]


def test_a_heartbeat_of_a_set_keeps_all_of_them_alive(world: World) -> None:
    me = Host(world, "me")
    take_all(me, "ab")
    for _ in range(6):
        world.now += 15.0
        assert isinstance(me.run(me.operations.renewing.renew_all(leases(me, "ab"), Heartbeat())), Renewed)

    assert isinstance(take_all(Host(world, "other"), "b"), Busy)


@pytest.mark.parametrize("fate", [LOST, LOST_THEN_RETRIED, UNSENT])
def test_a_release_of_a_set_whose_answer_is_lost_is_a_release(world: World, fate: str) -> None:
    me = Host(world, "me")
    take_all(me, "ab")
    world.faults.append(fate)

    assert release_all(me, "ab") == [Released()] * 2
    assert holders(world, "ab") == {"a": [], "b": []}


def test_of_a_set_only_leases_with_processes_inside_are_drained(world: World) -> None:
    me = Host(world, "me")
    take_all(me, "ab")
    me.run(me.operations.renewing.renew("b", "me", 15_000, Enter("pid-1")))

    outcomes = release_all(me, "ab")

    assert [type(each) for each in outcomes] == [Released, Draining]


def test_the_heartbeat_task_of_a_set_renews_the_remaining_leases(world: World) -> None:
    me = Host(world, "me")
    take_all(me, "ab")
    heartbeats = me.start(me.operations.renewing.keep_for_processes(leases(me, "ab"), 10.0))
    heartbeats.step().step()
    me.run(me.operations.renewing.renew("b", "me", 15_000, Enter("pid-1")))
    release_all(me, "a")
    while world.now < 100.0:
        heartbeats.step()
    assert isinstance(take_all(Host(world, "other"), "b"), Busy)

    release_all(me, "b")

    assert isinstance(heartbeats.finish(), Draining)


def test_the_rest_of_a_set_is_released_if_one_lock_is_lost_before_the_confirmation(world: World) -> None:
    me, person, thief = (Host(world, name) for name in ("me", "person", "thief"))
    taking = me.start(me.operations.attempting.try_acquire_all(claims(me, "ab"), owns_lease_id=True)).step()
    person.run(person.operations.admin.break_("b", "me"))
    take_all(thief, "b")

    assert isinstance(taking.finish(), Busy)

    assert holders(world, "ab") == {"a": [], "b": ["thief"]}


def test_a_late_undo_of_a_set_does_not_release_the_grants_of_the_next_attempt(world: World) -> None:
    me, person, thief = (Host(world, name) for name in ("me", "person", "thief"))
    acquiring = me.start(
        me.operations.acquiring.acquire_all(
            claims(me, "ab"), now=me.now(), timeout=None, poll_interval=1.0, owns_lease_id=True
        )
    ).step()
    person.run(person.operations.admin.break_("b", "me"))
    take_all(thief, "b")
    undo = acquiring.step().until("TransactWriteItems").request
    acquiring.interrupt(LockUnavailableError("not answered in time", maybe_applied=True))
    until_waiting(acquiring)
    release_all(thief, "b")
    granted = acquiring.finish()

    me.send(undo)

    assert holders(world, "ab") == {key: [granted[0].claim.lease_id] for key in "ab"}


def test_a_damaged_record_does_not_affect_the_other_locks_of_a_set(world: World) -> None:
    me = Host(world, "me")
    take_all(me, "ab")
    world.client.update_item(
        TableName="locks",
        Key={"key": {"S": "a"}, "entry": {"S": "lock"}},
        UpdateExpression="SET #available = :text",
        ExpressionAttributeNames={"#available": "available"},
        ExpressionAttributeValues={":text": {"S": "many"}},
    )
    heartbeats = me.start(me.operations.renewing.keep_for_processes(leases(me, "ab"), 10.0))
    while world.now < 100.0:
        heartbeats.step()
    assert isinstance(take_all(Host(world, "other"), "b"), Busy), "the other lease is kept"

    with pytest.raises(LockRecordError, match="'a'"):
        release_all(me, "ab")
    assert holders(world, "b") == {"b": []}


def test_tickets_grow_even_after_a_record_was_deleted(world: World) -> None:
    holder, first, second = (Host(world, name) for name in ("holder", "first", "second"))
    take_all(holder, "ab")
    one = waiting_for(first, "ab")
    for key in "ab":
        world.delete(key)
    world.now += 1.0
    take_all(holder, "a", fair=False)
    two = waiting_for(second, "ba")
    release_all(holder, "a")

    assert woken(two) is None
    assert woken(one) is not None


def test_a_waiter_that_looks_at_its_set_reads_the_queue_of_the_busy_lock_only(world: World) -> None:
    host = Host(world)
    take_all(Host(world, "other"), "c")
    waits = waiting_for(host, "abc")
    actions = []
    waits.step()
    while isinstance(waits.effect, Request):
        actions.append(waits.effect.action)
        waits.step()
    assert actions == ["Query", "BatchGetItem"]


def test_a_waiter_that_was_removed_from_the_queue_of_another_lock_of_its_set_ends(world: World) -> None:
    """The poller reads only the lock that it waits for, "a"."""
    host = Host(world)
    take_all(Host(world, "other"), "a")
    waits = waiting_for(host, "ab")
    person = Host(world, "person")
    person.run(person.operations.admin.remove_waiter("b", host.name, Decision("anna", "a drill")))
    began = world.now

    with pytest.raises(LockRemovedError, match="a drill"):
        waits.finish()

    assert world.now - began <= 12.0
    reader = Host(world, "reader")
    assert [reader.run(reader.queue.reader.waiters(key)) for key in "ab"] == [[], []]


@pytest.mark.parametrize(
    ("keys", "options", "seconds"),
    [
        ("ab", {}, 10.0),
        ("ab", {"timeout": 60.0}, 10.0),
        ("ab", {"timeout": 5.0}, 5.0),
        ("ab", {"fair": False}, None),
        ("a", {}, None),
    ],
)
def test_a_waiter_in_the_queues_of_several_locks_tries_again_although_it_was_not_woken(
    world: World, keys: str, options: dict[str, Any], seconds: float | None
) -> None:
    take_all(Host(world, "other"), "ab")
    waits = waiting_for(Host(world), keys, **options)
    assert isinstance(waits.effect, WaitForSlots)
    assert waits.effect.seconds == seconds
