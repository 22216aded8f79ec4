"""Writes that arrive long after they were sent, or twice, change nothing if the lock has changed meanwhile.

A network may delay a request for any time, while its sender has timed out and retried. An SDK that gets no answer sends
the same request again, and the process may be stopped in between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from airflow_dynamo_lock.core.effects import Reply, Request
from airflow_dynamo_lock.core.lock import requests
from airflow_dynamo_lock.core.model.edits import Change, CoolDown, Drain, Edit, Enter, Heartbeat
from airflow_dynamo_lock.core.model.errors import LockUnavailableError
from airflow_dynamo_lock.core.model.limits import SHARED
from airflow_dynamo_lock.core.model.outcomes import Busy, Granted, Lost, Released, Renewed
from proof.simulator.stepped import HOURS, KEY, LOST_THEN_RETRIED, Host, Paused, World


@pytest.fixture
def host(world: World) -> Host:
    return Host(world, "a")


# -- renewals -------------------------------------------------------------------------------------------------------


RENEWALS: dict[str, Callable[[Host], Request]] = {
    "a heartbeat": lambda host: host.operations.requests.format.renew(
        KEY, "a", 30_000, host.stamp(), Heartbeat()
    ),
    "a heartbeat task's": lambda host: host.operations.requests.format.renew(
        KEY, "a", 30_000, host.stamp(), Change()
    ),
    "an enter": lambda host: host.operations.requests.format.renew(
        KEY, "a", 15_000, host.stamp(), Enter("pid-1")
    ),
    "a drain": lambda host: host.operations.requests.format.renew(KEY, "a", 15_000, host.stamp(), Drain()),
}


@pytest.mark.parametrize("renewal", RENEWALS.values(), ids=RENEWALS.keys())
def test_a_renewal_that_arrives_after_newer_ones_changes_nothing(
    world: World, host: Host, renewal: Callable[[Host], Request]
) -> None:
    host.take()
    late = renewal(host)
    world.now += 10.0
    host.heartbeat()
    before = world.item()

    assert host.send(late).refused
    assert world.item() == before


def test_a_late_heartbeat_does_not_make_a_live_holder_look_dead(world: World, host: Host) -> None:
    """It would replace a stamp of a second ago by one of 41 s ago."""
    host.take()
    late = host.operations.requests.format.renew(KEY, "a", 30_000, host.stamp(), Heartbeat())
    for _ in range(2):
        world.now += 20.0
        host.heartbeat()
    host.send(late)
    world.now += 1.0

    assert isinstance(Host(world, "b").take(), Busy)


@pytest.mark.parametrize("behind", [0.0, 1.5, 8.0])
@pytest.mark.parametrize("renewal", RENEWALS.values(), ids=RENEWALS.keys())
def test_a_renewal_that_arrives_twice_does_not_restore_its_version(
    world: World, host: Host, renewal: Callable[[Host], Request], behind: float
) -> None:
    """Whichever of the two senders has the estimate that is behind."""
    host.take()
    world.now += 1.0
    twice = renewal(host)
    assert not host.send(twice).refused
    world.now += 1.0
    _behind(world, "b", behind).heartbeat("a")
    before = world.item()

    assert host.send(twice).refused
    assert world.item() == before


def test_of_two_renewals_with_the_same_stamp_the_first_is_not_restored(world: World, host: Host) -> None:
    host.take()
    world.now += 1.0
    host.heartbeat()
    twice = world.sent[-1]
    host.heartbeat()
    before = world.item()

    assert host.send(twice).refused
    assert world.item() == before


@pytest.mark.parametrize("edit", [Heartbeat(), Change(), Enter("pid-1"), Drain()])
def test_a_renewal_without_server_time_that_arrives_twice_does_not_restore_its_version(
    make_world: Callable[..., World], edit: Edit
) -> None:
    world = make_world(dates=False)
    host = Host(world, "a")
    host.take()
    host.run(host.operations.renewing.renew(KEY, "a", 30_000, edit))
    twice = world.sent[-1]
    Host(world, "b").heartbeat("a")
    before = world.item()

    assert host.send(twice).refused
    assert world.item() == before


@pytest.mark.parametrize("dates", [True, False])
def test_a_heartbeat_that_arrives_twice_does_not_let_an_observer_take_the_lock(
    make_world: Callable[..., World], dates: bool
) -> None:
    """The observer has seen its version, and was stopped until the second copy arrived. (Found by chaos: the process
    inside was stopped between two attempts of the SDK.)"""
    world = make_world(dates=dates)
    process = Host(world, "process")
    process.take("a", lease_ms=15_000)
    world.now += 1.0
    process.heartbeat("a", lease_ms=15_000)
    twice = world.sent[-1]
    observer = Host(world, "observer")
    assert isinstance(observer.take(), Busy)
    world.now += 1.9
    process.heartbeat("a", lease_ms=15_000)
    relied_on_until = world.now + 13.5
    process.send(twice)
    world.now = relied_on_until - 0.1

    assert isinstance(observer.take(), Busy)


def test_after_renewals_with_and_without_server_time_none_restores_an_earlier_version(world: World) -> None:
    """The first one has an estimate that is ahead of the last one's."""
    host = Host(world, "a")
    host.take()
    world.now += 1.0
    twice = host.operations.requests.format.renew(KEY, "a", 30_000, host.stamp(), Heartbeat())
    assert not host.send(twice).refused
    _undated(world, "process").enter("pid-1", "a")
    world.server_clock_offset = lambda: -3.0
    _behind(world, "b", 3.0).heartbeat("a")
    before = world.item()

    assert host.send(twice).refused
    assert world.item() == before


def test_a_grant_that_is_continued_beside_a_heartbeat_with_a_later_time_needs_no_correction(
    world: World, host: Host
) -> None:
    """A second triggerer continues it. The time of the heartbeat stays, which is ahead of the `Date` of the answer."""
    host.take()
    _behind(world, "b", -5.0).heartbeat("a")
    later = world.record().holders["a"].renewed_at_ms
    world.sent.clear()

    assert isinstance(Host(world, "second").take("a", owns_lease_id=True), Granted)
    assert world.actions() == ["UpdateItem"] * 2
    assert world.record().holders["a"].renewed_at_ms == later


@pytest.mark.parametrize("continued", [True, False])
def test_a_correction_does_not_lower_the_time_of_a_heartbeat(
    world: World, host: Host, continued: bool
) -> None:
    host.take()
    seen = world.record()
    last = seen.holders["a"]
    stamp = _behind(world, "b", 1.5).stamp()
    correct = host.operations.requests.format.correct_grant(
        host.claim(), seen, seen.token, stamp, last if continued else None
    )

    assert not host.send(correct).refused
    assert world.record().holders["a"].renewed_at_ms == (last.renewed_at_ms if continued else stamp.server_ms)


@pytest.mark.parametrize("ahead", [5.0, 60.0, 8760 * HOURS])
def test_a_grant_whose_process_died_before_it_corrected_a_time_ahead_is_corrected_by_the_next(
    world: World, ahead: float
) -> None:
    """By the heartbeat after it at the latest, if the time could be that of a heartbeat."""
    host = Host(world, "a", wall_clock_offset=ahead)
    host.start(host.operations.attempting.try_acquire(host.claim(), owns_lease_id=True)).step()
    assert world.record().holders["a"].renewed_at_ms == pytest.approx(world.server_ms + ahead * 1000)

    second = Host(world, "second")
    assert isinstance(second.take("a", owns_lease_id=True), Granted)
    world.now += 10.0
    second.heartbeat("a")

    assert world.record().holders["a"].renewed_at_ms == pytest.approx(world.server_ms, abs=1_500)


def test_slots_of_several_semaphores_that_were_granted_by_a_wrong_clock_have_the_right_time(
    world: World,
) -> None:
    """A second write gives each of them a token, and must not keep the time of the first one."""
    host = Host(world, "a", wall_clock_offset=8760 * HOURS)
    claims = [host.claim(key=key, capacity=2) for key in ("a", "b")]
    host.run(host.operations.attempting.try_acquire_all(claims, owns_lease_id=False))

    times = [world.record(key).holders["a"].renewed_at_ms for key in ("a", "b")]
    assert times == pytest.approx([world.server_ms] * 2, abs=1_500)


def test_a_lease_cools_down_from_the_time_of_its_release(world: World, host: Host) -> None:
    """Whatever the last heartbeat says. Otherwise its slots would stay taken for longer than `min_hold`."""
    host.take(min_hold_ms=60_000)
    stamp = _behind(world, "b", 1.5).stamp()
    cool_down = host.operations.requests.format.renew(
        KEY, "a", 50_000, stamp, CoolDown(), world.record().holders["a"]
    )

    assert not host.send(cool_down).refused
    assert world.record().holders["a"].renewed_at_ms == stamp.server_ms


@pytest.mark.parametrize("applied_before", [True, False])
def test_a_heartbeat_that_arrives_after_a_cool_down_changes_nothing(
    world: World, host: Host, applied_before: bool
) -> None:
    """The cool-down may have set an earlier time. So the heartbeat would be in order again, restore its version if it
    was applied before, and keep the slots for longer than `min_hold`. (Found by a simulated history, seed 11424.)"""
    host.take(min_hold_ms=60_000)
    ahead = _behind(world, "a", -3.0)
    late = ahead.operations.requests.format.renew(KEY, "a", 30_000, ahead.stamp(), Heartbeat())
    if applied_before:
        assert not host.send(late).refused
    assert isinstance(host.release(), Released)
    before = world.item()
    assert world.record().holders["a"].cooling_down

    assert host.send(late).refused
    assert world.item() == before


def test_the_heartbeat_of_a_lease_that_was_released_within_min_hold_is_answered_by_lost(
    world: World, host: Host
) -> None:
    """As if the release had freed the slots: another process has released the lease by its id."""
    host.take(min_hold_ms=60_000)
    Host(world, "b").release("a")
    world.sent.clear()

    assert isinstance(host.heartbeat(), Lost)
    assert len(world.sent) == 1


def test_heartbeats_in_the_order_of_their_stamps_take_one_request_each(world: World, host: Host) -> None:
    host.take()
    other = _behind(world, "b", 1.5)
    world.sent.clear()
    for sender in (other, host, other):
        world.now += 2.0
        assert isinstance(sender.heartbeat("a"), Renewed)

    assert world.actions() == ["UpdateItem"] * 3


@pytest.mark.parametrize("dates", [True, False])
def test_heartbeats_of_one_process_take_one_request_each(
    make_world: Callable[..., World], dates: bool
) -> None:
    """Also without server time, and with an estimate of it that goes back: the process has written the last version."""
    world = make_world(dates=dates)
    host = Host(world, "a")
    host.take()
    world.sent.clear()
    for _ in range(3):
        host.clock = replace(host.clock, _ahead_ms=(host.clock._ahead_ms or 0.0) - 2000 if dates else None)
        assert isinstance(host.heartbeat(), Renewed)

    assert world.actions() == ["UpdateItem"] * 3


def test_the_number_of_written_holders_is_bounded_and_the_oldest_are_forgotten(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heartbeat of a forgotten one takes one request more, and is as safe."""
    monkeypatch.setattr(requests, "_REMEMBERED", 2)
    world = make_world(dates=False)
    host = Host(world)
    for lease_id in ("one", "two"):
        host.take(lease_id, capacity=SHARED)
    host.heartbeat("one")
    host.take("three", capacity=SHARED)
    world.sent.clear()
    for lease_id in ("one", "three", "two"):
        assert isinstance(host.heartbeat(lease_id), Renewed)

    assert world.actions() == ["UpdateItem", "UpdateItem", "GetItem", "UpdateItem"]


def test_after_a_wrong_time_was_corrected_a_heartbeat_does_not_bring_it_back(world: World) -> None:
    host = Host(world, "a", wall_clock_offset=8760 * HOURS)
    host.take()
    world.now += 5.0
    host.heartbeat()

    assert world.record().holders["a"].renewed_at_ms == pytest.approx(world.server_ms, abs=1_500)


def test_a_heartbeat_with_an_older_stamp_keeps_the_later_time(world: World, host: Host) -> None:
    host.take()
    later = world.record().holders["a"].renewed_at_ms
    world.sent.clear()

    renewed = _behind(world, "b", 1.5).heartbeat("a")

    assert world.actions() == ["UpdateItem"] * 2
    assert isinstance(renewed, Renewed)
    assert renewed.holder.renewed_at_ms == later == world.record().holders["a"].renewed_at_ms


def test_a_heartbeat_of_a_host_behind_the_last_writer_is_written_again_and_counts(
    world: World, host: Host
) -> None:
    host.take()
    other = _behind(world, "b", 8.0)
    world.now += 5.0
    world.sent.clear()

    renewed = other.heartbeat("a")

    assert isinstance(renewed, Renewed)
    assert world.actions() == ["UpdateItem"] * 2
    first, second = other.stamps
    assert (renewed.holder, renewed.stamped_at) == (world.record().holders["a"], second.at)
    assert renewed.holder.version == second.version != first.version
    assert renewed.holder.renewed_at_ms == pytest.approx(world.server_ms, abs=1_500)


def test_a_heartbeat_counts_although_the_servers_that_answer_stay_behind(world: World, host: Host) -> None:
    host.take()
    world.server_clock_offset = lambda: -8.0
    other = _behind(world, "b", 8.0)

    assert isinstance(other.heartbeat("a"), Renewed)
    assert world.record().holders["a"].version == other.stamps[-1].version


def test_after_a_process_without_server_time_has_entered_no_heartbeat_writes_a_stamp(
    world: World, host: Host
) -> None:
    """It could be older than that of an earlier heartbeat, which would succeed when it arrives once more."""
    host.take()
    _undated(world, "process").enter("pid-1", "a")
    assert world.record().holders["a"].renewed_at_ms is None
    world.sent.clear()

    assert isinstance(host.heartbeat(), Renewed)
    assert world.actions() == ["UpdateItem"] * 2
    assert world.record().holders["a"].version == host.stamps[-1].version
    assert world.record().holders["a"].renewed_at_ms is None


def test_a_first_write_that_arrives_twice_does_not_restore_its_version(world: World) -> None:
    """Otherwise a late heartbeat that requires that version would succeed. (Found by a simulated history.)"""
    Host(world, "a").take()
    process = Host(world, "process")
    entering = process.start(process.operations.renewing.renew(KEY, "a", 15_000, Enter("pid-1")))
    entering.step()
    assert isinstance(entering.effect, Request)
    enter = entering.effect
    entering.finish()
    world.now += 5.0
    process.heartbeat("a", lease_ms=15_000)
    before = world.item()

    assert process.send(enter).refused
    assert world.item() == before


def test_a_late_heartbeat_does_not_stamp_a_holder_without_a_stamp(world: World, host: Host) -> None:
    """Its version would be the newest, but its stamp is old."""
    host.take()
    late = host.operations.requests.format.renew(KEY, "a", 30_000, host.stamp(), Heartbeat())
    world.now += 20.0
    host.heartbeat()
    _undated(world, "process").enter("pid-1", "a")
    before = world.item()

    assert host.send(late).refused
    assert world.item() == before


@pytest.mark.parametrize("shows_refused", [True, False])
def test_a_heartbeat_written_again_and_sent_twice_by_the_sdk_counts(
    make_world: Callable[..., World], shows_refused: bool
) -> None:
    """Its first attempt changed the version that both attempts require."""
    world = make_world(shows_refused=shows_refused)
    host = Host(world, "a")
    host.take()
    _undated(world, "process").enter("pid-1", "a")
    renewing = host.start(host.operations.renewing.renew(KEY, "a", 30_000, Heartbeat())).step()
    while isinstance(renewing.effect, Request) and renewing.effect.action == "GetItem":
        renewing.step()
    world.faults.append(LOST_THEN_RETRIED)

    renewed = renewing.finish()

    assert isinstance(renewed, Renewed)
    assert renewed.holder.version == host.stamps[-1].version == world.record().holders["a"].version
    assert len(host.stamps) == 3, "of the acquire and of two heartbeats: a third was not needed"


@pytest.mark.parametrize("shows_refused", [True, False])
def test_the_time_limit_of_a_heartbeat_is_for_all_of_its_requests_together(
    make_world: Callable[..., World], shows_refused: bool
) -> None:
    world = make_world(shows_refused=shows_refused)
    host = Host(world, "a")
    host.take()
    given: list[float | None] = []
    renewing = host.start(
        host.operations.renewing.renew(KEY, "a", 30_000, Heartbeat(), until=host.now() + 7.0)
    )

    with pytest.raises(LockUnavailableError, match="other writes to the lease came first each time"):
        _contend(world, renewing, given, answers_take=2.0)

    assert given == pytest.approx([7.0, 5.0, 3.0, 1.0])


def test_a_heartbeat_that_other_writes_always_precede_fails_in_the_end(world: World, host: Host) -> None:
    host.take()
    given: list[float | None] = []
    renewing = host.start(host.operations.renewing.renew(KEY, "a", 30_000, Heartbeat()))

    with pytest.raises(
        LockUnavailableError, match="other writes to the lease came first each time"
    ) as unavailable:
        _contend(world, renewing, given)

    assert not unavailable.value.maybe_applied
    assert given == [None] * 8


def _contend(
    world: World, renewing: Paused[Any], given: list[float | None], *, answers_take: float = 0.0
) -> None:
    """Before each request of a renewal, let another process without server time renew the lease first.

    :param given: receives the time limit of each request of the renewal, in seconds.
    """
    while isinstance(renewing.effect, Request):
        given.append(renewing.effect.within)
        _undated(world, f"rival-{len(given)}").heartbeat("a")
        world.now += answers_take
        renewing.step()


# -- acquires -------------------------------------------------------------------------------------------------------


ENDS: dict[str, Callable[[Host], object]] = {
    "released": lambda host: host.release(),
    "broken": lambda host: host.run(host.operations.admin.break_(KEY, "a")),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
@pytest.mark.parametrize("looked", [True, False])
def test_an_acquire_that_arrives_after_its_sender_has_released_takes_nothing(
    world: World, host: Host, end: Callable[[Host], object], looked: bool
) -> None:
    """No process would use that lease, and a heartbeat task that still runs would keep it for ever."""
    host.take()
    host.release()
    late = host.operations.requests.format.acquire_idle(
        host.claim(), host.stamp(), world.record() if looked else None
    )
    world.now += 3.0
    host.take()
    world.now += 3.0
    end(host)
    before = world.item()

    assert host.send(late).refused
    assert world.item() == before


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
def test_an_acquire_of_a_slot_that_arrives_after_its_sender_released_takes_nothing(
    world: World, host: Host, end: Callable[[Host], object]
) -> None:
    Host(world, "other").take(capacity=2)
    host.run(host.operations.requests.get(KEY))  # so that the host knows server time
    late = host.operations.requests.format.acquire_slots(host.claim(capacity=2), host.stamp(), world.record())
    world.now += 3.0
    host.take(capacity=2)
    world.now += 3.0
    end(host)
    before = world.item()

    assert host.send(late).refused
    assert world.item() == before


def test_an_acquire_that_arrives_after_its_sender_was_reclaimed_takes_nothing(
    world: World, host: Host
) -> None:
    Host(world, "other").take(capacity=4)
    host.run(host.operations.requests.get(KEY))
    late = host.operations.requests.format.acquire_slots(host.claim(capacity=4), host.stamp(), world.record())
    host.take(capacity=4)
    host.take("big", slots=2, capacity=4)
    world.now += 41.5
    Host(world, "b").take(slots=3, capacity=4)  # replaces all three
    before = world.item()
    assert world.record().available == 1

    assert host.send(late).refused
    assert world.item() == before


def test_each_write_that_frees_slots_records_when(world: World, host: Host) -> None:
    host.take()
    assert world.record().last_freed_at_ms is None
    for what, vacate in (
        ("release", host.release),
        ("break", lambda: host.run(host.operations.admin.break_(KEY, "a"))),
        ("reclaim", lambda: Host(world, "b").take()),
    ):
        world.now += 60.0
        vacate()
        assert world.record().last_freed_at_ms == pytest.approx(world.server_ms, abs=1_500), what
        if what != "reclaim":
            host.take()


@pytest.mark.parametrize("capacity", [1, 2])
def test_a_process_with_an_estimate_behind_takes_a_just_freed_lock_with_two_requests(
    world: World, host: Host, capacity: int
) -> None:
    """The refusal shows when the last slot was freed, and a sender that knows of that release is not late."""
    if capacity == 2:
        host.take("other", capacity=capacity)
    host.take(capacity=capacity)
    host.release()
    world.server_clock_offset = lambda: -8.0
    behind = _behind(world, "b", 8.0)
    world.sent.clear()

    assert isinstance(behind.take(capacity=capacity), Granted)
    assert world.actions() == ["UpdateItem"] * 2


@pytest.mark.parametrize("shows_refused", [True, False])
@pytest.mark.parametrize("ahead", [-5 * HOURS, 5 * HOURS])
def test_without_dates_wrong_host_clocks_keep_no_process_from_the_lock(
    make_world: Callable[..., World], shows_refused: bool, ahead: float
) -> None:
    world = make_world(dates=False, shows_refused=shows_refused)
    hosts = [
        Host(world, "a", wall_clock_offset=ahead),
        Host(world, "b"),
        Host(world, "c", wall_clock_offset=-ahead),
    ]
    last = 0
    for _ in range(2):
        for host in hosts:
            granted = host.take()
            assert isinstance(granted, Granted)
            assert granted.token > last
            last = granted.token
            host.heartbeat()
            host.release()
            world.now += 5.0


def _undated(world: World, name: str) -> Host:
    """Return a host whose answers have no ``Date``."""
    host = Host(world, name, dates=False)
    host.clock.answered = True
    return host


def _behind(world: World, name: str, seconds: float) -> Host:
    """Return a host whose estimate of server time is behind by some seconds."""
    host = Host(world, name)
    host.clock.note(Reply({}, host.now(), host.now(), server_ms=world.server_ms - round(seconds * 1000)))
    return host
