"""Lost replies (rule R5): whatever happened to a write on its way, no lease is lost or granted twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from airflow_dynamo_lock.core.effects import Request
from airflow_dynamo_lock.core.model.errors import LockError, LockTimeoutError, LockUnavailableError
from airflow_dynamo_lock.core.model.outcomes import Busy, Granted, Lost, Released, Renewed
from proof.simulator.stepped import CONFLICT, DENIED, KEY, LOST, LOST_THEN_RETRIED, UNSENT, Host, World


@pytest.fixture(params=[True, False], ids=["refusal shows the item", "refusal hides the item"])
def world(request: pytest.FixtureRequest, make_world: Callable[..., World]) -> World:
    return make_world(shows_refused=request.param)


def test_an_acquire_that_the_sdk_sent_twice_finds_its_own_lease(world: World) -> None:
    host = Host(world, "a")
    world.faults.append(LOST_THEN_RETRIED)

    granted = host.take()

    assert isinstance(granted, Granted)
    assert list(world.record().holders) == ["a"]
    assert granted.token == world.record().token
    first, *_, last = host.stamps
    assert world.record().holders["a"].version == last.version != first.version, "renewed when it was found"


def test_a_lease_found_again_gets_a_new_token_and_counts_from_then(world: World) -> None:
    """Other processes may have taken slots since the lost reply, so the token of that time is unknown."""
    host, other = Host(world, "a"), Host(world, "b")
    world.faults.append(LOST)
    with pytest.raises(LockUnavailableError):
        host.take(capacity=2)
    others = other.take(capacity=2)
    world.now += 20.0

    granted = host.take(capacity=2)

    assert isinstance(granted, Granted)
    assert granted.token > others.token
    assert granted.stamped_at == host.now()
    assert world.record().available == 0, "its slot was not taken a second time"
    holder = world.record().holders["a"]
    assert holder.version == host.stamps[-1].version


@pytest.mark.parametrize("beaten_by", ["nobody", "a reclaim"])
def test_an_acquire_retried_with_the_same_lease_id_is_one_lease(world: World, beaten_by: str) -> None:
    host = Host(world, "a")
    world.faults.append(LOST)
    with pytest.raises(LockUnavailableError):
        host.take()
    if beaten_by == "a reclaim":
        world.now += 100.0
        assert isinstance(Host(world, "b").take(), Granted)
        assert isinstance(host.take(), Busy)
    else:
        assert isinstance(host.take(), Granted)
    assert len(world.record().holders) == 1


def test_a_reclaim_whose_answer_is_lost_finds_its_lease(world: World) -> None:
    Host(world, "dead").take()
    world.now += 41.0
    host = Host(world, "a")
    reclaiming = host.start(host.operations.attempting.try_acquire(host.claim(), owns_lease_id=False)).step()
    if isinstance(reclaiming.effect, Request) and reclaiming.effect.action == "GetItem":
        reclaiming.step()
    world.faults.append(LOST_THEN_RETRIED)

    assert isinstance(reclaiming.finish(), Granted)
    assert list(world.record().holders) == ["a"]


def test_a_heartbeat_that_the_sdk_sent_twice_is_a_heartbeat(world: World) -> None:
    host = Host(world, "a")
    host.take()
    world.faults.append(LOST_THEN_RETRIED)

    assert isinstance(host.heartbeat(), Renewed)


def test_a_heartbeat_whose_answer_is_lost_keeps_the_lease_alive_for_all_others(world: World) -> None:
    host = Host(world, "a")
    host.take()
    world.now += 29.0
    world.faults.append(LOST)
    with pytest.raises(LockUnavailableError):
        host.heartbeat()
    world.now += 29.0

    assert isinstance(Host(world, "b").take(), Busy)
    assert isinstance(host.heartbeat(), Renewed)


@pytest.mark.parametrize("fate", [LOST, LOST_THEN_RETRIED])
def test_a_release_whose_answer_is_lost_is_a_release(world: World, fate: str) -> None:
    host = Host(world, "a")
    host.take(capacity=2)
    world.faults.append(fate)

    assert host.release() == Released()
    assert world.record().available == 2


def test_a_release_sent_again_does_not_free_the_successors_lock(world: World) -> None:
    host = Host(world, "a")
    host.take("first")
    releasing = host.start(host.operations.releasing.release(KEY, "first", 1, 15_000, confirmed=True))
    world.faults.append(LOST)
    releasing.step()
    Host(world, "b").take("second")

    assert releasing.finish() == Released()
    assert list(world.record().holders) == ["second"]


def test_a_release_that_never_arrived_is_not_sent_again(world: World) -> None:
    host = Host(world, "a")
    host.take()
    world.faults.append(UNSENT)

    with pytest.raises(LockUnavailableError):
        host.release()
    assert "a" in world.record().holders


@pytest.mark.parametrize("fate", [LOST, LOST_THEN_RETRIED])
def test_entering_and_leaving_survive_a_lost_reply(world: World, fate: str) -> None:
    host = Host(world, "a")
    host.take()
    for step in (host.enter, host.leave):
        world.faults.append(fate)
        if fate == LOST:
            with pytest.raises(LockUnavailableError):
                step("pid-1")
        assert isinstance(step("pid-1"), Renewed)
    assert world.record().holders["a"].processes == {}


# -- giving up on an acquire of unknown fate ------------------------------------------------------------------------


def test_an_acquire_of_unknown_fate_is_undone_when_its_caller_gives_up(world: World) -> None:
    host = Host(world, "a")
    world.faults.append(LOST)

    with pytest.raises(LockUnavailableError):
        host.take(owns_lease_id=True)

    assert world.actions() == ["UpdateItem", "UpdateItem"]
    assert world.record().holders == {}
    assert isinstance(Host(world, "b").take(), Granted)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, asyncio.CancelledError])
def test_an_acquire_interrupted_by_its_caller_is_undone(
    world: World, interruption: type[BaseException]
) -> None:
    host = Host(world, "a")
    attempt = host.start(host.operations.attempting.try_acquire(host.claim(), owns_lease_id=True))
    host.send(attempt.effect)  # type: ignore[arg-type]

    with pytest.raises(interruption):
        attempt.interrupt(interruption()).finish()

    assert world.record().holders == {}


def test_the_undo_of_an_acquire_has_a_time_limit(world: World) -> None:
    host = Host(world, "a")
    attempt = host.start(host.operations.attempting.try_acquire(host.claim(), owns_lease_id=True))

    undo = attempt.interrupt(KeyboardInterrupt()).effect

    assert isinstance(undo, Request)
    assert undo.within == 3.0


def test_an_acquire_that_never_arrived_needs_no_undo(world: World) -> None:
    world.faults.append(UNSENT)

    with pytest.raises(LockUnavailableError):
        Host(world, "a").take(owns_lease_id=True)
    assert world.actions() == ["UpdateItem"]


def test_a_lease_id_that_another_process_may_be_using_is_never_undone(world: World) -> None:
    host, twin = Host(world, "a"), Host(world, "b")
    twin.take("ti.id")
    world.faults.append(LOST_THEN_RETRIED)
    host.take("ti.id")
    world.faults.append(LOST)

    with pytest.raises(LockUnavailableError):
        host.take("ti.id", owns_lease_id=False)

    assert list(world.record().holders) == ["ti.id"]


def test_a_failing_undo_does_not_hide_why_the_acquire_failed(world: World) -> None:
    world.faults.extend([LOST, UNSENT])

    with pytest.raises(LockUnavailableError, match="connection to DynamoDB broke"):
        Host(world, "a").take(owns_lease_id=True)


@pytest.mark.parametrize("fault", [DENIED, CONFLICT, UNSENT])
def test_a_grant_whose_confirmation_fails_is_undone(make_world: Callable[..., World], fault: str) -> None:
    """Whether it is undone depends on the write that granted the lease, not on the request that failed later."""
    world = make_world()
    host = Host(world, "a", wall_clock_offset=-60.0)  # its first grant needs a correction
    world.faults.extend(["", fault])

    with pytest.raises(LockError):
        host.take(owns_lease_id=True)

    assert world.record().holders == {}


@pytest.mark.parametrize("fault", [DENIED, UNSENT])
def test_a_set_whose_grants_cannot_be_read_is_released(world: World, fault: str) -> None:
    host = Host(world, "a")
    world.faults.extend(["", fault])

    with pytest.raises(LockError):
        host.run(
            host.operations.attempting.try_acquire_all(
                [host.claim(key=key) for key in "xy"], owns_lease_id=True
            )
        )

    assert [world.record(key).holders for key in "xy"] == [{}, {}]


def test_a_lease_that_an_earlier_attempt_of_the_sdk_acquired_is_released(world: World) -> None:
    """The SDK repeated the write, and no request shows whether its first attempt succeeded."""
    host = Host(world, "a")
    world.faults.extend([LOST_THEN_RETRIED, DENIED])

    with pytest.raises(LockError):
        host.take(owns_lease_id=True)

    assert world.record().holders == {}


# -- waiting through failures ---------------------------------------------------------------------------------------


def test_a_waiting_acquire_continues_after_lost_replies_and_never_blocks_itself(world: World) -> None:
    host = Host(world, "a")
    world.faults.extend([LOST, UNSENT, LOST, LOST])

    granted = host.start_acquire().finish()

    assert isinstance(granted, Granted)
    assert list(world.record().holders) == [granted.claim.lease_id]
    assert world.record().available == 0
    assert world.now < 5.0


def test_a_late_undo_does_not_release_the_grant_of_the_next_attempt(world: World) -> None:
    """The answer to the first attempt is lost, and its undo arrives after the second attempt."""
    host = Host(world, "a")
    attempt = host.start_acquire()
    world.faults.append(LOST)
    undo = attempt.step().effect
    assert isinstance(undo, Request)
    attempt.interrupt(LockUnavailableError("not answered in time", maybe_applied=True))
    granted = attempt.finish()

    host.send(undo)

    assert list(world.record().holders) == [granted.claim.lease_id]
    assert isinstance(Host(world, "b").take(), Busy)


def test_a_lease_id_given_by_the_caller_stays_the_same_in_all_attempts(world: World) -> None:
    host = Host(world, "a")
    world.faults.extend([UNSENT, LOST, UNSENT])

    granted = host.start_acquire(owns_lease_id=False).finish()

    assert granted.claim.lease_id == "a"
    assert list(world.record().holders) == ["a"]


def test_an_acquire_that_never_reaches_dynamodb_fails_at_its_timeout(world: World) -> None:
    host = Host(world, "a")
    world.faults.extend([UNSENT] * 100)

    with pytest.raises(LockUnavailableError):
        host.start_acquire(timeout=10.0).finish()
    assert world.now <= 10.0


@pytest.mark.parametrize("poll_interval", [1.0, 3600.0])
@pytest.mark.parametrize("takes", [True, False])
def test_the_time_of_failed_requests_counts_towards_the_timeout(
    world: World, takes: bool, poll_interval: float
) -> None:
    host = Host(world, "a")
    how: dict[str, Any] = {"now": host.now(), "timeout": 20.0, "poll_interval": poll_interval}
    operations = host.operations
    operation: Any = (
        operations.acquiring.acquire(host.claim(), owns_lease_id=False, **how)
        if takes
        else operations.acquiring.wait(KEY, 1, **how)
    )
    waiting, tries = host.start(operation), 0

    def fail_all() -> None:
        nonlocal tries
        while isinstance(waiting.effect, Request):
            assert waiting.effect.within is not None
            world.now += min(7.0, waiting.effect.within)
            tries += 1
            waiting.interrupt(LockUnavailableError("No answer.", maybe_applied=False)).step()

    with pytest.raises(LockUnavailableError):
        fail_all()
    assert 20.0 <= world.now <= 23.0
    assert tries >= 2


def test_every_request_of_an_acquire_has_the_remaining_time_but_at_least_a_second(world: World) -> None:
    """A waiter that is woken just before its deadline reports a held lock, not a missing answer."""
    Host(world, "other").take()
    host = Host(world, "a")

    with pytest.raises(LockTimeoutError):
        host.start_acquire(timeout=5.0).finish()

    given = [request.within for request in world.sent if request.within is not None]
    assert given[0] == 5.0
    assert min(given) >= 1.0


def test_waiting_for_free_slots_continues_after_a_failed_read(world: World) -> None:
    Host(world, "other").take()
    host = Host(world, "a")
    waiting = host.start(
        host.operations.acquiring.wait(KEY, 1, now=host.now(), timeout=None, poll_interval=1.0)
    )
    waiting.step().step()
    world.faults.append(UNSENT)
    waiting.step()
    Host(world, "other").release()

    record = waiting.finish()

    assert record is not None
    assert record.available == 1


def test_waiting_for_free_slots_without_dynamodb_fails_at_its_timeout(world: World) -> None:
    host = Host(world, "a")
    world.faults.extend([UNSENT] * 100)

    with pytest.raises(LockUnavailableError):
        host.run(host.operations.acquiring.wait(KEY, 1, now=host.now(), timeout=3.0, poll_interval=1.0))
    assert world.now <= 3.0


def test_an_unknown_error_is_never_a_grant(world: World) -> None:
    """In another library, a lock counted as taken after any failure but that of the condition."""
    host = Host(world, "a")
    attempt = host.start(host.operations.attempting.try_acquire(host.claim(), owns_lease_id=False))

    with pytest.raises(RuntimeError):
        attempt.interrupt(RuntimeError("something new"))


def test_a_release_of_a_lost_lease_is_not_reported_as_a_release(world: World) -> None:
    host = Host(world, "a")
    host.take("first")
    world.now += 100.0
    Host(world, "b").take("second")
    before = world.item()

    assert isinstance(host.release("first"), Lost)
    assert world.item() == before
