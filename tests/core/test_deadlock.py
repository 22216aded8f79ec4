"""R14 (deadlocks end): exactly one member of a cycle of waits ends its wait, with an error that names the cycle."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from airflow_dynamo_lock.core.effects import Reply, Request
from airflow_dynamo_lock.core.lock.nested import LOOK_EVERY
from airflow_dynamo_lock.core.lock.requests import ROUNDS
from airflow_dynamo_lock.core.model.cycle import WaitGraph
from airflow_dynamo_lock.core.model.errors import (
    CapacityMismatchError,
    LockAccessError,
    LockDeadlockError,
    LockError,
    LockNotFoundError,
    LockTimeoutError,
)
from airflow_dynamo_lock.core.model.lease import Lease
from airflow_dynamo_lock.core.model.limits import SHARED
from airflow_dynamo_lock.core.model.outcomes import Granted
from airflow_dynamo_lock.core.model.record import LockRecord
from airflow_dynamo_lock.core.model.waits import Wait
from airflow_dynamo_lock.core.table.native import NativeFormat
from proof.simulator.stepped import CONFLICT, DENIED, LOST, TABLE, UNSENT, Host, Paused, World, a_holder

Options = dict[str, Any]


class Locker:
    """A host that holds a lock, and waits for another one."""

    def __init__(self, world: World, name: str, holds: str, **options: Any) -> None:
        self.world, self.name = world, name
        self.host = Host(world, name)
        slots, capacity = options.get("slots", 1), options.get("capacity", 1)
        assert isinstance(self.host.take(f"{name}/{holds}", key=holds, **options), Granted)
        self.leases = [Lease(holds, f"{name}/{holds}", 1, name, slots, capacity, 30_000, 15_000, 0)]
        self.failure: LockDeadlockError | None = None
        self.waits: Paused[Granted] | None = None

    def wait_for(self, key: str, **options: Any) -> None:
        self.waits = self.host.start_acquire(f"{self.name}/{key}", key=key, holding=self.leases, **options)

    def run(self, until: float) -> None:
        """Run the acquire until that time."""
        assert self.waits is not None
        while self.world.now < until and self.waits.effect is not None and self.failure is None:
            try:
                self.waits.step()
            except LockDeadlockError as deadlock:
                self.failure = deadlock

    @property
    def granted(self) -> bool:
        return self.failure is None and self.waits is not None and self.waits.effect is None

    def release(self) -> None:
        for lease in self.leases:
            release = self.host.operations.releasing.release
            self.host.run(release(lease.key, lease.lease_id, lease.slots, 15_000, confirmed=True))


def run_all(world: World, lockers: Sequence[Locker], seconds: float) -> None:
    """Run the acquires side by side. Each one advances the true time, so it is set back for the next one."""
    end = world.now + seconds
    while world.now < end:
        now = world.now
        for each in lockers:
            world.now = now
            each.run(now + 0.5)
        world.now = now + 0.5


def ring(world: World, number: int) -> list[Locker]:
    """Return lockers that each hold a lock and wait for that of the next locker."""
    keys = [f"k{index}" for index in range(number)]
    lockers = [Locker(world, f"host{index}", key) for index, key in enumerate(keys)]
    for index, each in enumerate(lockers):
        world.now += 0.1
        each.wait_for(keys[(index + 1) % number])
        each.run(world.now + 0.01)
    return lockers


def before_the_second_note(world: World) -> tuple[Locker, Locker, Paused[Granted]]:
    """Return two lockers that wait for each other, the second one, with its acquire, just before it notes its wait."""
    a, b = Locker(world, "a", "x"), Locker(world, "b", "y")
    a.wait_for("y")
    a.run(world.now + 0.01)
    world.now += 0.1
    b.wait_for("x")
    assert b.waits is not None
    return a, b, b.waits.until("PutItem").step()


@pytest.mark.parametrize("number", [2, 3, 5])
def test_only_the_last_waiter_of_a_cycle_ends_and_names_all(world: World, number: int) -> None:
    lockers = ring(world, number)

    run_all(world, lockers, 5.0)

    assert [each.failure is not None for each in lockers] == [False] * (number - 1) + [True]
    failure = lockers[-1].failure
    assert failure is not None
    for index in range(number):
        assert f"host{index} holds 'k{index}' and waits for 'k{(index + 1) % number}'" in str(failure)
    assert failure.cycle[0].owner == lockers[-1].name

    lockers[-1].release()
    run_all(world, lockers, 3.0)
    assert lockers[-2].granted
    assert not world.record(lockers[-2].leases[0].key).holders[lockers[-2].leases[0].lease_id].waits


def test_a_chain_is_no_cycle_however_long(world: World) -> None:
    lockers = [Locker(world, f"host{index}", f"k{index}") for index in range(6)]
    for index, each in enumerate(lockers[:-1]):
        each.wait_for(f"k{index + 1}")

    run_all(world, lockers[:-1], 20.0)

    assert not any(each.failure for each in lockers)
    assert len(world.record("k0").holders["host0/k0"].waits) == 1


def test_a_waiter_that_is_behind_a_cycle_is_no_member_of_it(world: World) -> None:
    behind, a = Locker(world, "behind", "other"), Locker(world, "a", "x")
    behind.wait_for("x")
    behind.run(world.now + 0.01)
    b = Locker(world, "b", "y")
    for each, key in ((a, "y"), (b, "x")):
        world.now += 0.1
        each.wait_for(key)
        each.run(world.now + 0.01)

    run_all(world, [a, behind], 5.0)
    (note,) = world.record("other").holders["behind/other"].waits.values()
    assert note.seen == set()

    run_all(world, [a, b, behind], 5.0)
    assert [each.failure is not None for each in (a, b, behind)] == [False, True, False]


def test_a_stale_wait_note_makes_no_cycle(world: World) -> None:
    a, _ = Locker(world, "a", "x"), Locker(world, "b", "y")
    stale = Wait("ended", 1, ("x",), 1, 1)
    world.answer(NativeFormat(TABLE).note_wait("y", "b/y", stale), lambda: 0.0)
    a.wait_for("y")

    run_all(world, [a], 30.0)

    assert a.failure is None


def test_a_stale_wait_note_does_not_hide_a_cycle(world: World) -> None:
    a, b = Locker(world, "a", "x"), Locker(world, "b", "y")
    world.answer(NativeFormat(TABLE).note_wait("y", "b/y", Wait("ended", 2**42, ("x",), 1, 1)), lambda: 0.0)
    a.wait_for("y")
    a.run(world.now + 0.01)
    world.now += 0.1
    b.wait_for("x")

    run_all(world, [a, b], 5.0)

    assert (a.failure is None, b.failure is None) == (True, False)


def test_a_holder_that_has_died_is_no_member(world: World) -> None:
    _, b = ring(world, 2)  # `a` waits for the lock of `b`, and never continues
    run_all(world, [b], 80.0)

    assert b.failure is None
    assert b.granted


def test_a_member_that_has_died_since_it_saw_the_cycle_blocks_nothing(world: World) -> None:
    a, b = ring(world, 2)
    run_all(world, [a], 3.0)
    (note,) = world.record("k0").holders["host0/k0"].waits.values()
    assert len(note.seen) == 2

    world.now += 100.0
    run_all(world, [b], 3.0)

    assert b.failure is None
    assert b.granted


def test_failed_requests_are_retried_until_the_cycle_is_found(world: World) -> None:
    a, b, _ = before_the_second_note(world)
    world.faults.extend([LOST, UNSENT, UNSENT, UNSENT])

    run_all(world, [a, b], 8.0)

    assert (a.failure is None, b.failure is None) == (True, False)


def test_the_chain_ends_at_a_lock_that_cannot_be_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = Locker(world, "a", "x"), Locker(world, "b", "y")
    keys = ("secret", "", "waiting:not a lock", "x" * 3000, "z")
    world.answer(NativeFormat(TABLE).note_wait("y", "b/y", Wait("w", 1, keys, 1, 1)), lambda: 0.0)
    answer, read = world.answer, list[set[str]]()

    def deny(request: Request, clock: Callable[[], float]) -> Reply:
        if request.action == "BatchGetItem":
            read.append(NativeFormat(TABLE).asked_for(request))
            if "secret" in read[-1]:
                raise LockAccessError("Denied.")
        return answer(request, clock)

    monkeypatch.setattr(world, "answer", deny)
    a.wait_for("y")
    run_all(world, [a], 3.0)

    assert (a.failure, a.granted) == (None, False)
    assert read[:4] == [{"y"}, {"secret", "z"}, {"secret"}, {"z"}]
    assert read[4:]
    assert all(each == {"y", "z"} for each in read[4:])
    assert b.granted is False


@pytest.mark.parametrize("fault", [DENIED, LOST], ids=["denied", "reply lost"])
def test_a_wait_note_that_is_denied_or_whose_reply_is_lost_hides_no_cycle(world: World, fault: str) -> None:
    a, b, waits = before_the_second_note(world)
    waits.until("UpdateItem")
    world.faults.append(fault)
    waits.step()  # the note

    run_all(world, [a, b], 5.0)

    assert (a.failure is None, b.failure is None) == (True, False)


def test_a_cycle_is_confirmed_once(world: World) -> None:
    a, _ = ring(world, 2)  # the other waiter, which would have to end, does not continue
    run_all(world, [a], 3.0)
    assert len(world.record("k0").holders["host0/k0"].waits["host0/k1"].seen) == 2
    world.sent.clear()

    run_all(world, [a], 3.0)

    notes = [each for each in world.sent if ":wait" in each.params.get("ExpressionAttributeValues", {})]
    assert notes == []


def test_a_lock_whose_read_was_denied_once_is_read_again_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = Locker(world, "a", "x"), Locker(world, "b", "y")
    answer, denied = world.answer, list[Request]()

    def deny_once(request: Request, clock: Callable[[], float]) -> Reply:
        if (
            request.action == "BatchGetItem"
            and NativeFormat(TABLE).asked_for(request) == {"y"}
            and not denied
        ):
            denied.append(request)
            raise LockAccessError("Denied.")
        return answer(request, clock)

    a.wait_for("y")
    a.run(world.now + 0.01)
    world.now += 0.1
    monkeypatch.setattr(world, "answer", deny_once)
    b.wait_for("x")
    run_all(world, [b], 2.0)
    assert denied

    run_all(world, [a, b], 12.0)

    assert (a.failure is None, b.failure is None) == (True, False)


def test_a_lease_that_cannot_have_a_note_does_not_end_the_wait(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    a, b = Locker(world, "a", "x"), Locker(world, "b", "y")
    a.leases.append(replace(a.leases[0], key="in another table"))
    a.wait_for("y")
    assert a.waits is not None
    a.waits.until("PutItem").step()
    world.faults.append(DENIED)
    run_all(world, [a], 3.0)
    assert (a.failure, a.granted) == (None, False)
    assert "(lease a/x) is found: it is not among the holders" in caplog.text

    b.release()
    run_all(world, [a], 3.0)
    assert a.granted


@pytest.mark.parametrize("timeout", [None, 5.0])
def test_a_wait_for_an_own_lock_is_an_error_at_once(world: World, timeout: float | None) -> None:
    a = Locker(world, "a", "x")
    world.sent.clear()
    a.wait_for("x", timeout=timeout)
    a.waits = a.host.start_acquire("again", key="x", holding=a.leases, timeout=timeout)

    with pytest.raises(LockDeadlockError, match="because it holds 'x' itself"):
        a.waits.finish()

    assert world.now == 0
    assert world.actions() == ["UpdateItem"]


def test_a_single_try_of_an_own_lock_is_refused_as_any_other(world: World) -> None:
    a = Locker(world, "a", "x")
    with pytest.raises(LockTimeoutError):
        a.host.start_acquire("again", key="x", holding=a.leases, timeout=0.0).finish()


@pytest.mark.parametrize(
    ("held", "wanted"),
    [
        ({"slots": 2, "capacity": 3}, {"slots": 2, "capacity": 3}),
        ({"capacity": SHARED}, {}),
        ({}, {"capacity": SHARED}),
    ],
    ids=["too many slots", "a reader that writes", "a writer that reads"],
)
def test_slots_that_the_claimant_itself_holds_are_never_free(
    world: World, held: Options, wanted: Options
) -> None:
    a = Locker(world, "a", "x", **held)
    waits = a.host.start_acquire("again", key="x", holding=a.leases, **wanted)
    with pytest.raises(LockDeadlockError):
        waits.finish()


def test_a_claimant_may_wait_for_another_slot_of_a_semaphore(world: World) -> None:
    a = Locker(world, "a", "x", capacity=2)
    other = Locker(world, "other", "x", capacity=2)
    a.wait_for("x", capacity=2)
    a.waits = a.host.start_acquire("again", key="x", holding=a.leases, capacity=2)
    run_all(world, [a], 5.0)
    assert not a.granted
    assert a.failure is None

    other.release()
    run_all(world, [a], 3.0)
    assert a.granted


def test_a_semaphore_is_blocked_only_if_no_slot_can_become_free(world: World) -> None:
    a, free = (Locker(world, name, "x", capacity=2) for name in ("a", "free"))
    b = Locker(world, "b", "y")
    a.wait_for("y")
    a.run(world.now + 0.01)
    world.now += 0.1
    b.wait_for("x", capacity=2)
    run_all(world, [a, b], 5.0)
    assert (a.failure, b.failure) == (None, None)

    world.now += 0.1
    free.wait_for("y")
    run_all(world, [a, b, free], 5.0)
    assert [each.failure is not None for each in (a, b, free)] == [False, False, True]


def test_a_wait_for_a_set_is_blocked_by_one_of_its_locks(world: World) -> None:
    a, b = Locker(world, "a", "x"), Locker(world, "b", "y")
    claims = [b.host.claim("b/set", key=key) for key in ("free", "x")]
    a.wait_for("y")
    a.run(world.now + 0.01)
    world.now += 0.1
    acquire_all = b.host.operations.acquiring.acquire_all
    now = b.host.now()
    options: Options = {"timeout": None, "poll_interval": 1.0, "owns_lease_id": True, "holding": b.leases}
    b.waits = b.host.start(acquire_all(claims, now=now, **options))  # type: ignore[arg-type]

    run_all(world, [a, b], 5.0)

    assert (a.failure is None, b.failure is None) == (True, False)


def test_without_nesting_no_request_changes(make_world: Callable[..., World], world: World) -> None:
    holder, waiter = Host(world, "holder"), Host(world, "waiter")
    holder.take()
    world.sent.clear()
    waits = waiter.start_acquire()
    while world.now < 2.0:
        waits.step()
    assert world.actions() == ["UpdateItem", "UpdateItem", "PutItem", "Query"]
    assert not any(
        "wait" in name for each in world.sent for name in each.params.get("ExpressionAttributeNames", {})
    )


def test_a_nested_wait_costs_two_writes_and_a_read_per_second(world: World) -> None:
    a, b = Locker(world, "a", "x"), Locker(world, "b", "y")
    world.sent.clear()
    a.wait_for("y", timeout=4.0, poll_interval=100.0)
    assert a.waits is not None
    with pytest.raises(LockTimeoutError):
        a.waits.finish()
    reads = round(4.0 / LOOK_EVERY)
    assert world.actions()[:5] == ["UpdateItem", "UpdateItem", "PutItem", "UpdateItem", "BatchGetItem"]
    assert world.actions().count("BatchGetItem") == reads
    assert not world.record("x").holders["a/x"].waits
    assert b.granted is False


def test_a_slow_look_does_not_lengthen_the_wait(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    a, _ = Locker(world, "a", "x"), Locker(world, "b", "y")
    answer = world.answer

    def read_slowly(request: Request, clock: Callable[[], float]) -> Reply:
        if request.action == "BatchGetItem":
            world.now += 2.0
        return answer(request, clock)

    monkeypatch.setattr(world, "answer", read_slowly)
    a.wait_for("y", timeout=1.5, poll_interval=100.0)
    assert a.waits is not None
    with pytest.raises(LockTimeoutError):
        a.waits.finish()
    assert world.now == pytest.approx(2.0)


@pytest.mark.parametrize("seed", range(50))
def test_the_cycle_of_plain_locks_is_the_chain_that_leads_back(seed: int) -> None:
    """Each claimant holds a lock, and most claimants wait for that of another one."""
    rng = Random(seed)
    number = rng.randint(2, 7)
    waits_for = {
        each: rng.choice([None, *(other for other in range(number) if other != each)])
        for each in range(number)
    }
    records, dead = {}, set[tuple[str, str]]()
    for each, other in waits_for.items():
        waits = (
            {} if other is None else {f"w{each}": Wait(f"w{each}", rng.randint(0, 3), (f"k{other}",), 1, 1)}
        )
        holder = a_holder(f"l{each}", owner=f"host{each}", waits=waits, draining=rng.random() < 0.1)
        records[f"k{each}"] = LockRecord(f"k{each}", 1, 0, {holder.lease_id: holder}, token=1)
        if rng.random() < 0.1:
            dead.add((f"k{each}", f"l{each}"))
        if holder.draining or (f"k{each}", f"l{each}") in dead:
            waits_for[each] = None
    graph = WaitGraph(records, dead)
    for each in waits_for:
        chain, at = [each], waits_for[each]
        while at is not None and at not in chain:
            chain.append(at)
            at = waits_for[at]
        expected = {f"w{member}" for member in chain} if at == each else set()
        assert graph.suspects(f"w{each}") == expected
        assert graph.proven(f"w{each}") == set(), "no other waiter has noted it"
        if expected:
            members = graph.members(f"w{each}", expected)
            assert [member.owner for member in members] == [f"host{member}" for member in chain]
            assert [member.holds for member in members] == [(f"k{member}",) for member in chain]


def entries_of(world: World, key: str) -> list[str]:
    """Return the entries in the queue of a lock."""
    items = world.client.query(
        TableName=TABLE,
        KeyConditionExpression="#key = :key",
        ExpressionAttributeNames={"#key": "key"},
        ExpressionAttributeValues={":key": {"S": key}},
    )["Items"]
    return [each["entry"]["S"] for each in items if each["entry"]["S"] != "lock"]


def before_a_note_is_removed(locker: Locker) -> Paused[Granted]:
    """Continue the acquire, and return it just before the write that removes a wait note."""
    assert locker.waits is not None
    while not (
        isinstance(locker.waits.effect, Request)
        and locker.waits.effect.params.get("UpdateExpression", "").startswith("REMOVE #holders.#me.#wait")
    ):
        locker.waits.step()
    return locker.waits


def test_an_interrupt_while_the_note_is_removed_leaves_no_queue_entry(world: World) -> None:
    a, _ = Locker(world, "a", "x"), Locker(world, "b", "y")
    a.wait_for("y", timeout=3.0)
    waits = before_a_note_is_removed(a)

    with pytest.raises(KeyboardInterrupt):
        waits.interrupt(KeyboardInterrupt()).finish()

    assert entries_of(world, "y") == []
    assert not a.host.queue.own.ids


def test_an_exception_from_a_callback_or_a_signal_handler_leaves_no_note_and_no_queue_entry(
    world: World,
) -> None:
    a, _ = Locker(world, "a", "x"), Locker(world, "b", "y")
    a.wait_for("y")
    a.run(world.now + 2.0)
    assert world.record("x").holders["a/x"].waits
    assert a.waits is not None

    with pytest.raises(TimeoutError):
        a.waits.interrupt(TimeoutError()).finish()

    assert not world.record("x").holders["a/x"].waits
    assert entries_of(world, "y") == []


def test_in_an_outage_only_the_removal_of_the_first_note_is_waited_for(world: World) -> None:
    a, _ = Locker(world, "a", "x"), Locker(world, "b", "y")
    a.leases += Locker(world, "a", "w").leases + Locker(world, "a", "v").leases
    a.wait_for("y")
    a.run(world.now + 2.0)
    assert a.waits is not None
    a.waits.interrupt(KeyboardInterrupt())
    waits = before_a_note_is_removed(a)

    world.faults.append(UNSENT)
    with pytest.raises(KeyboardInterrupt):
        waits.step()


def test_a_granted_waiter_outside_of_the_queue_leaves_no_note(world: World) -> None:
    a, b = Locker(world, "a", "x"), Locker(world, "b", "y")
    a.wait_for("y", fair=False)
    a.run(world.now + 2.0)
    assert world.record("x").holders["a/x"].waits

    b.release()
    a.run(world.now + 2.0)

    assert a.granted
    assert not world.record("x").holders["a/x"].waits


@pytest.mark.parametrize("faults", [[DENIED], [CONFLICT] * ROUNDS], ids=["denied", "conflicts"])
def test_a_note_that_cannot_be_removed_does_not_keep_the_others(world: World, faults: list[str]) -> None:
    a, b = Locker(world, "a", "x"), Locker(world, "b", "y")
    a.leases += Locker(world, "a", "w").leases
    a.wait_for("y")
    a.run(world.now + 2.0)
    b.release()
    waits = before_a_note_is_removed(a)
    world.faults.extend(faults)
    waits.finish()

    assert world.record("x").holders["a/x"].waits
    assert not world.record("w").holders["a/w"].waits


def test_the_removal_of_a_note_is_repeated_after_a_conflict(world: World) -> None:
    a, b = Locker(world, "a", "x"), Locker(world, "b", "y")
    a.wait_for("y")
    a.run(world.now + 2.0)
    b.release()
    waits = before_a_note_is_removed(a)
    world.faults.append(CONFLICT)
    waits.finish()
    assert not world.record("x").holders["a/x"].waits


def test_a_cycle_that_cannot_be_noted_for_a_moment_does_not_end_the_wait(world: World) -> None:
    a, b = ring(world, 2)
    assert a.waits is not None
    while not (isinstance(a.waits.effect, Request) and "seen" in str(a.waits.effect.params)):
        a.waits.step()
    world.faults.append(DENIED)
    run_all(world, [a, b], 5.0)
    assert (a.failure is None, b.failure is None) == (True, False)


def test_a_short_cycle_is_found_beside_more_locks_than_can_be_read(world: World) -> None:
    a, b = Locker(world, "a", "x"), Locker(world, "b", "zz")
    keys = [f"n{number:02}" for number in range(11)]
    for key in keys:
        holder = Host(world, key)
        holder.take(key=key, lease_ms=10**8)
        others = tuple(f"m/{key}/{number:02}" for number in range(20))
        for other in others:
            holder.take(f"holder of {other}", key=other, lease_ms=10**8)
        holder.send(holder.queue.format.note_wait(key, key, Wait(f"wait of {key}", 1, others, 1, 1)))
    claims = [a.host.claim("a/set", key=key) for key in ("zz", *keys)]
    options: Options = {"timeout": None, "poll_interval": 1.0, "owns_lease_id": True, "holding": a.leases}
    a.waits = a.host.start(a.host.operations.acquiring.acquire_all(claims, now=a.host.now(), **options))  # type: ignore[arg-type]
    a.run(world.now + 0.01)
    world.now += 0.1
    b.wait_for("x")
    run_all(world, [a, b], 10.0)
    assert (a.failure is None, b.failure is None) == (True, False)


@pytest.mark.parametrize("ends_with", [CapacityMismatchError, LockAccessError, LockNotFoundError])
def test_a_wait_that_ends_with_an_error_leaves_no_note_and_no_queue_entry(
    world: World, ends_with: type[LockError]
) -> None:
    a, b = Locker(world, "a", "x"), Locker(world, "b", "y")
    a.wait_for("y", only_existing=ends_with is LockNotFoundError)
    run_all(world, [a], 2.0)
    assert world.record("x").holders["a/x"].waits
    b.release()
    match ends_with.__name__:
        case "CapacityMismatchError":
            Host(world, "c").take(key="y", capacity=2, fair=False)
        case "LockAccessError":
            world.faults.extend([DENIED, DENIED])  # the search for a cycle, and the next attempt
        case "LockNotFoundError":
            world.delete("y")

    assert a.waits is not None
    with pytest.raises(ends_with):
        a.waits.finish()

    assert not world.record("x").holders["a/x"].waits
    assert entries_of(world, "y") == []


def test_a_holder_that_waits_is_described(world: World) -> None:
    a, _ = Locker(world, "a", "x"), Locker(world, "b", "y")
    a.wait_for("y")
    run_all(world, [a], 1.0)
    assert world.record("x").describe().endswith("waiting for 'y'")
