"""Release, leave, drain (rule R8: drain before release) and break. No process is inside a released lease."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from airflow_dynamo_lock.client import session
from airflow_dynamo_lock.client.session import ClientCore
from airflow_dynamo_lock.core.model.errors import (
    LockAccessError,
    LockConflictError,
    LockNotHeldError,
    LockUnavailableError,
)
from airflow_dynamo_lock.core.model.lease import Lease, LeaseSet
from airflow_dynamo_lock.core.model.outcomes import Broken, Busy, Draining, Granted, Lost, Released, Renewed
from proof.simulator.stepped import (
    BEGIN_MS,
    CONFLICT,
    DENIED,
    KEY,
    LOST,
    LOST_THEN_RETRIED,
    TABLE,
    UNSENT,
    Host,
    World,
    a_lease,
)


@pytest.fixture
def host(world: World) -> Host:
    return Host(world, "a")


def test_a_release_is_one_write_after_which_the_lock_is_free(world: World, host: Host) -> None:
    host.take()
    world.sent.clear()

    assert host.release() == Released()

    assert world.actions() == ["UpdateItem"]
    assert (world.record().available, world.record().holders) == (1, {})


def test_a_release_frees_its_own_slots_only(world: World, host: Host) -> None:
    host.take(slots=2, capacity=3)
    host.take("b", capacity=3)

    host.release(slots=2)

    assert world.record().available == 2
    assert list(world.record().holders) == ["b"]


def test_the_record_and_its_token_outlive_the_release(world: World, host: Host) -> None:
    granted = host.take()
    host.release()

    assert world.record().token == granted.token


def test_a_late_release_leaves_the_successors_lock_alone(world: World, host: Host) -> None:
    host.take("first")
    world.now += 100
    assert isinstance(Host(world, "b").take("second"), Granted)
    before = world.item()

    lost = host.release("first")

    assert isinstance(lost, Lost)
    assert lost.record is not None
    assert list(lost.record.holders) == ["second"]
    assert world.item() == before


def test_releasing_a_lock_never_acquired_creates_no_record(world: World, host: Host) -> None:
    assert host.release() == Lost(None, "a")
    assert world.item() is None


def test_releasing_twice_frees_once(world: World, host: Host) -> None:
    host.take(capacity=2)
    assert host.release() == Released()
    assert isinstance(host.release(), Lost)
    assert world.record().available == 2


def test_a_release_while_processes_are_inside_drains_the_lease(world: World, host: Host) -> None:
    host.take()
    host.enter("pid-1")
    version = world.record().holders["a"].version

    outcome = host.release(grace_ms=7_000)

    assert isinstance(outcome, Draining)
    holder = world.record().holders["a"]
    assert (holder.draining, holder.lease_ms) == (True, 7_000)
    assert holder.version != version, "observations of the grace start from now"
    assert world.record().available == 0


def test_a_lease_is_drained_only_once(world: World, host: Host) -> None:
    host.take()
    host.enter("pid-1")
    host.release(grace_ms=7_000)
    before = world.item()
    world.now += 5

    outcome = host.release(grace_ms=7_000)

    assert isinstance(outcome, Draining)
    assert world.item() == before, "a second drain would restart the grace"


def test_the_last_process_to_leave_a_draining_lease_releases_it(world: World, host: Host) -> None:
    host.take()
    host.enter("pid-1")
    host.enter("pid-2")
    host.release()

    assert isinstance(host.leave("pid-1"), Renewed)
    assert "a" in world.record().holders
    assert host.leave("pid-2") == Released()
    assert (world.record().available, world.record().holders) == (1, {})


def test_the_last_process_to_leave_a_lease_that_is_not_draining_keeps_it_held(
    world: World, host: Host
) -> None:
    host.take()
    host.enter("pid-1")

    assert isinstance(host.leave("pid-1"), Renewed)
    assert world.record().available == 0


def test_the_last_process_leaves_and_releases_with_one_write(world: World, host: Host) -> None:
    host.take()
    host.enter("pid-1")
    world.sent.clear()

    assert host.leave("pid-1", release=True) == Released()
    assert world.actions() == ["UpdateItem"]
    assert (world.record().available, world.record().holders) == (1, {})


def test_a_leave_that_would_release_drains_while_another_process_is_inside(world: World, host: Host) -> None:
    host.take()
    host.enter("pid-1")
    host.enter("pid-2")

    assert isinstance(host.leave("pid-1", release=True), Draining)
    assert set(world.record().holders["a"].processes) == {"pid-2"}
    assert world.record().available == 0
    assert host.leave("pid-2") == Released()


def test_the_last_process_of_a_draining_lease_leaves_and_releases_with_one_write(
    world: World, host: Host
) -> None:
    host.take()
    host.enter("pid-1")
    host.release()
    world.sent.clear()

    assert host.leave("pid-1", release=True) == Released()
    assert world.actions() == ["UpdateItem"]


def test_a_process_that_is_not_inside_drains_if_another_is(world: World, host: Host) -> None:
    """Its `enter` may never have arrived, and another process is inside."""
    host.take()
    host.enter("pid-1")

    assert isinstance(host.leave("pid-2", release=True), Draining)
    assert set(world.record().holders["a"].processes) == {"pid-1"}


def test_a_process_whose_enter_never_arrived_still_releases(world: World, host: Host) -> None:
    host.take()

    assert host.leave("pid-1", release=True) == Released()
    assert world.record().holders == {}


def test_a_leave_that_releases_keeps_the_slots_for_min_hold(world: World, host: Host) -> None:
    host.take(min_hold_ms=60_000)
    host.enter("pid-1")
    world.now += 20

    outcome = host.leave("pid-1", release=True)

    assert outcome == Released(BEGIN_MS + 60_000)
    assert world.record().available == 0
    world.now += 39
    assert isinstance(Host(world, "b").take(), Busy)
    world.now += 2
    assert isinstance(Host(world, "b").take(), Granted)


@pytest.mark.parametrize("fate", [LOST, LOST_THEN_RETRIED])
def test_a_leave_that_released_but_whose_answer_is_lost_is_a_release(
    world: World, host: Host, fate: str
) -> None:
    host.take()
    host.enter("pid-1")
    world.faults.append(fate)

    assert host.leave("pid-1", release=True) == Released()
    assert world.record().holders == {}


def test_a_late_leave_that_releases_leaves_the_successors_lock_alone(world: World, host: Host) -> None:
    host.take("first")
    host.enter("pid-1", "first")
    world.now += 100
    assert isinstance(Host(world, "b").take("second"), Granted)
    before = world.item()

    assert isinstance(host.leave("pid-1", "first", release=True), Lost)
    assert world.item() == before


def test_a_process_that_enters_before_the_leave_arrives_keeps_the_lease(world: World, host: Host) -> None:
    host.take()
    host.enter("pid-1")
    leaving = host.start_leave("pid-1", release=True)
    host.enter("pid-2")

    assert isinstance(leaving.finish(), Draining)
    assert set(world.record().holders["a"].processes) == {"pid-2"}


def test_a_leave_that_releases_frees_its_own_slots_only(world: World, host: Host) -> None:
    host.take(slots=2, capacity=3)
    host.take("b", capacity=3)
    host.enter("pid-1")

    assert host.leave("pid-1", slots=2, release=True) == Released()
    assert world.record().available == 2
    assert list(world.record().holders) == ["b"]


def test_a_leave_does_not_change_the_version_that_others_observe(world: World, host: Host) -> None:
    host.take()
    host.enter("pid-1")
    version = world.record().holders["a"].version

    host.leave("pid-1")

    assert world.record().holders["a"].version == version, (
        "a leave does not show that other processes are alive"
    )


def test_leaving_a_lease_that_is_gone_is_reported_and_changes_nothing(world: World, host: Host) -> None:
    host.take("other")
    before = world.item()

    assert isinstance(host.leave("pid-1", "mine"), Lost)
    assert world.item() == before


def test_the_lock_is_free_if_the_last_process_leaves_between_a_refused_release_and_its_drain(
    world: World, host: Host
) -> None:
    host.take()
    host.enter("pid-1")
    refused = host.start(host.operations.releasing.release(KEY, "a", 1, 15_000, confirmed=True)).step()
    host.leave("pid-1")  # sees no draining flag, and so does not release

    assert refused.finish() == Released()
    assert world.record().holders == {}


def test_a_lease_that_the_last_process_releases_before_the_drain_counts_as_lost(
    world: World, host: Host
) -> None:
    host.take()
    host.enter("pid-1")
    refused = host.start(host.operations.releasing.release(KEY, "a", 1, 15_000, confirmed=True)).step()
    host.release()
    host.leave("pid-1")

    assert isinstance(refused.finish(), Lost)


def test_after_a_process_inside_is_killed_the_lock_is_free_a_grace_after_its_heartbeat(
    make_world: Callable[..., World],
) -> None:
    world = make_world(dates=False)
    host, waiter = Host(world, "a"), Host(world, "b")
    host.take()
    host.enter("pid-1")  # its first and last heartbeat
    host.release(grace_ms=15_000)

    granted = waiter.start_acquire().finish()

    assert granted.reclaimed[0].lease_id == "a"
    assert 15.0 <= world.now <= 17.0


def test_a_process_that_was_killed_long_ago_delays_the_next_by_at_most_a_grace(
    world: World, host: Host
) -> None:
    host.take()
    host.enter("killed")
    for _ in range(100):
        world.now += 10.0
        host.heartbeat()  # of the heartbeat task
    assert isinstance(host.release(), Draining)
    other = Host(world, "other")
    assert isinstance(other.take(), Busy)

    world.now += 15.0 + 1.0

    assert isinstance(other.take(), Granted)


def test_a_draining_lease_stays_held_while_a_process_inside_sends_heartbeats(
    make_world: Callable[..., World],
) -> None:
    world = make_world(dates=False)
    host, waiter = Host(world, "a"), Host(world, "b")
    host.take()
    host.enter("pid-1")
    host.release(grace_ms=15_000)

    for _ in range(20):
        world.now += 5
        host.heartbeat(lease_ms=15_000)
        assert isinstance(waiter.take(), Busy)
    host.leave("pid-1")

    assert isinstance(waiter.take(), Granted)


def test_an_attempt_whose_own_lease_is_draining_waits_like_any_other(world: World, host: Host) -> None:
    host.take()
    host.enter("pid-1")
    host.release()

    assert isinstance(host.take(), Busy)
    assert world.record().holders["a"].draining


@pytest.mark.parametrize("what", ["enter", "release", "drain", "leave", "cool down"])
def test_a_write_is_retried_after_a_conflicting_transaction(world: World, host: Host, what: str) -> None:
    host.take(min_hold_ms=60_000 if what == "cool down" else 0)
    if what in ("leave", "drain"):
        host.enter("pid-1")
    write = _write(host, what)
    # These two begin with a release that is refused.
    world.faults.extend([*([""] if what in ("cool down", "drain") else []), CONFLICT, CONFLICT])
    begun = world.now

    outcome = write()

    assert type(outcome).__name__ == {
        "cool down": "Released",
        "release": "Released",
        "drain": "Draining",
    }.get(what, "Renewed")
    assert 0 < world.now - begun < 1
    assert not world.faults


@pytest.mark.parametrize("what", ["enter", "release", "leave"])
def test_a_write_fails_if_it_conflicts_every_time(world: World, host: Host, what: str) -> None:
    host.take()
    host.enter("pid-1")
    write = _write(host, what)
    world.faults.extend([CONFLICT] * 100)

    with pytest.raises(LockConflictError):
        write()

    assert world.now < 5


@pytest.mark.parametrize("what", ["enter", "release", "leave"])
def test_a_write_that_never_arrived_is_not_sent_again(world: World, host: Host, what: str) -> None:
    host.take()
    host.enter("pid-1")
    world.sent.clear()
    write = _write(host, what)
    world.faults.append(UNSENT)

    with pytest.raises(LockUnavailableError):
        write()

    assert len(world.sent) == 1


def test_a_lease_is_broken_even_with_processes_inside(world: World, host: Host) -> None:
    host.take()
    host.enter("pid-1")

    broken = host.run(host.operations.admin.break_(KEY, "a"))

    assert isinstance(broken, Broken)
    assert (broken.holder.owner, set(broken.holder.processes)) == ("a", {"pid-1"})
    assert (world.record().available, world.record().holders) == (1, {})


def test_breaking_frees_the_slots_of_the_lease(world: World, host: Host) -> None:
    host.take("big", slots=2, capacity=3)
    host.take("small", capacity=3)

    host.run(host.operations.admin.break_(KEY, "big"))

    assert world.record().available == 2


def test_the_next_heartbeat_detects_a_broken_lease(world: World, host: Host) -> None:
    host.take()
    host.run(host.operations.admin.break_(KEY, "a"))

    assert isinstance(host.heartbeat(), Lost)


def test_breaking_a_lease_that_is_not_held_names_the_holder_of_the_lock(world: World, host: Host) -> None:
    host.take("other")
    before = world.item()

    with pytest.raises(
        LockNotHeldError, match=f"lease mine does not hold the lock '{KEY}'.*Locked by a since"
    ):
        host.run(host.operations.admin.break_(KEY, "mine"))
    with pytest.raises(LockNotHeldError, match="Not locked"):
        host.run(host.operations.admin.break_("never seen", "mine"))
    assert world.item() == before


def test_a_lease_released_just_before_it_is_broken_was_not_broken(world: World, host: Host) -> None:
    host.take()
    about_to_break = host.start(host.operations.admin.break_(KEY, "a")).step()
    host.release()

    with pytest.raises(LockNotHeldError):
        about_to_break.finish()
    assert world.record().available == 1


def test_a_break_that_the_sdk_sent_twice_is_a_break(world: World, host: Host) -> None:
    host.take()
    about_to_break = host.start(host.operations.admin.break_(KEY, "a")).step()
    world.faults.append(LOST_THEN_RETRIED)

    assert isinstance(about_to_break.finish(), Broken)
    assert world.record().available == 1


# -- if DynamoDB does not answer ------------------------------------------------------------------------------------


@pytest.fixture
def release(world: World, host: Host, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return the release of a lease of 30 s as both clients run it, with a time to retry for in seconds."""
    monkeypatch.setattr(session, "monotonic", host.now)
    client = ClientCore(TABLE, "a", 30.0, None, 15.0, 10.0)
    host.take()
    lease = Lease(KEY, "a", 1, "a", 1, 1, 30_000, 15_000, 0)
    return lambda retry_for: host.run(client.release(lease, retry_for))


def test_a_set_whose_release_is_retried_is_released_if_each_lock_was(
    world: World, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "monotonic", host.now)
    client = ClientCore(TABLE, "a", 30.0, None, 15.0, 10.0)
    keys = ("one", "two", "three")
    for key in keys:
        host.take(key=key)
    world.faults.extend([UNSENT, "", UNSENT])  # the transaction, the first release, the second one

    outcome = host.run(client.release(LeaseSet(tuple(a_lease("a", key) for key in keys)), None))

    assert outcome == Released()
    assert [world.record(key).holders for key in keys] == [{}] * 3


def test_a_lost_lease_of_a_set_does_not_count_as_released_without_an_answer(
    world: World, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "monotonic", host.now)
    client = ClientCore(TABLE, "a", 30.0, None, 15.0, 10.0)
    host.take(key="two")
    world.faults.extend([UNSENT, "", "", LOST, LOST])

    outcome = host.run(client.release(LeaseSet((a_lease("a", "one"), a_lease("a", "two"))), None))

    assert isinstance(outcome, Lost)


def test_a_release_without_retries_fails_at_once(world: World, release: Callable[..., Any]) -> None:
    for fate, failure in ((UNSENT, LockUnavailableError), (DENIED, LockAccessError)):
        world.faults.append(fate)
        with pytest.raises(failure):
            release(0)
    assert world.now == 0.0
    assert release(0) == Released()


def test_a_release_is_retried_for_the_given_time(world: World, release: Callable[..., Any]) -> None:
    world.faults.extend([UNSENT] * 1000)
    with pytest.raises(LockUnavailableError):
        release(5)
    assert world.now == 5.0


def test_a_release_without_a_limit_is_retried_until_dynamodb_answers(
    world: World, release: Callable[..., Any]
) -> None:
    world.faults.extend([UNSENT] * 500)

    assert release(None) == Released()
    assert world.now == 500.0
    assert world.record().holders == {}


def test_a_retried_release_that_was_applied_without_an_answer_is_a_release(
    world: World, release: Callable[..., Any]
) -> None:
    world.faults.extend([LOST, LOST, UNSENT, DENIED])

    assert release(None) == Released()


@pytest.mark.parametrize("fault", [UNSENT, DENIED])
def test_a_release_that_was_applied_before_it_failed_is_a_release(
    world: World, release: Callable[..., Any], fault: str
) -> None:
    world.faults.extend([LOST, fault])

    assert release(None) == Released()


def test_a_release_is_retried_while_credentials_are_expired(
    world: World, release: Callable[..., Any]
) -> None:
    world.faults.extend([DENIED] * 29)

    assert release(None) == Released()


def test_a_release_that_is_denied_for_a_whole_lease_fails(world: World, release: Callable[..., Any]) -> None:
    world.faults.extend([DENIED] * 1000)

    with pytest.raises(LockAccessError):
        release(None)
    assert world.now == 30.0


def test_the_time_of_denials_counts_from_the_first_of_them_in_a_row(
    world: World, release: Callable[..., Any]
) -> None:
    world.faults.extend([UNSENT] * 100 + [DENIED] * 20 + [UNSENT] + [DENIED] * 20)

    assert release(None) == Released()
    assert world.now == 141.0


def _write(host: Host, what: str) -> Callable[[], Any]:
    match what:
        case "enter":
            return lambda: host.enter("pid-2")
        case "leave":
            return lambda: host.leave("pid-1")
    return host.release
