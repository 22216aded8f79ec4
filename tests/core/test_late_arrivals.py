"""Writes that arrive long after they were sent, when the lock has moved on: they change nothing.

A network may keep a request for as long as it likes, while its sender has given it up and tried again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from airflow_dynamo_lock.core.effects import Reply, Request
from airflow_dynamo_lock.core.model.edits import Change, Drain, Enter, Heartbeat
from airflow_dynamo_lock.core.model.errors import LockUnavailableError
from airflow_dynamo_lock.core.model.outcomes import Busy, Granted, Renewed
from proof.simulator.stepped import HOURS, KEY, LOST_THEN_RETRIED, Host, Paused, World


@pytest.fixture
def host(world: World) -> Host:
    return Host(world, "a")


# -- signs of life --------------------------------------------------------------------------------------------------


SIGNS_OF_LIFE: dict[str, Callable[[Host], Request]] = {
    "a heartbeat": lambda host: host.operations.requests.format.renew(
        KEY, "a", 30_000, host.stamp(), Heartbeat()
    ),
    "a keeper's": lambda host: host.operations.requests.format.renew(
        KEY, "a", 30_000, host.stamp(), Change()
    ),
    "an enter": lambda host: host.operations.requests.format.renew(
        KEY, "a", 15_000, host.stamp(), Enter("pid-1")
    ),
    "an abandon": lambda host: host.operations.requests.format.renew(KEY, "a", 15_000, host.stamp(), Drain()),
}


@pytest.mark.parametrize("sign_of_life", SIGNS_OF_LIFE.values(), ids=SIGNS_OF_LIFE.keys())
def test_a_sign_of_life_that_newer_ones_have_overtaken_changes_nothing(
    world: World, host: Host, sign_of_life: Callable[[Host], Request]
) -> None:
    host.take()
    late = sign_of_life(host)
    world.now += 10.0
    host.heartbeat()
    before = world.item()

    assert host.send(late).refused
    assert world.item() == before


def test_a_late_heartbeat_does_not_make_a_live_holder_look_dead(world: World, host: Host) -> None:
    """It put a stamp of 41 s ago in the place of one of a second ago."""
    host.take()
    late = host.operations.requests.format.renew(KEY, "a", 30_000, host.stamp(), Heartbeat())
    for _ in range(2):
        world.now += 20.0
        host.heartbeat()
    host.send(late)
    world.now += 1.0

    assert isinstance(Host(world, "b").take(), Busy)


def test_two_whose_estimates_differ_by_less_than_two_seconds_need_one_request_each(
    world: World, host: Host
) -> None:
    host.take()
    other = _behind(world, "b", 1.5)
    world.sent.clear()

    assert isinstance(other.heartbeat("a"), Renewed)
    assert isinstance(host.heartbeat("a"), Renewed)
    assert world.actions() == ["UpdateItem"] * 2


def test_a_beat_whose_clock_is_behind_the_last_writers_is_written_again_and_counts(
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


def test_a_beat_counts_although_the_servers_that_answer_it_stay_behind(world: World, host: Host) -> None:
    host.take()
    world.server_clock_offset = lambda: -8.0
    other = _behind(world, "b", 8.0)

    assert isinstance(other.heartbeat("a"), Renewed)
    assert world.record().holders["a"].version == other.stamps[-1].version


def test_after_a_process_without_the_servers_time_has_entered_the_next_beat_restores_the_stamp(
    world: World, host: Host
) -> None:
    host.take()
    _undated(world, "process").enter("pid-1", "a")
    assert world.record().holders["a"].renewed_at_ms is None
    world.sent.clear()

    assert isinstance(host.heartbeat(), Renewed)
    assert world.actions() == ["UpdateItem"] * 2
    assert world.record().holders["a"].renewed_at_ms == pytest.approx(world.server_ms, abs=1_500)

    assert isinstance(host.heartbeat(), Renewed)
    assert world.actions() == ["UpdateItem"] * 3, "now there is one to compare with again"


def test_a_first_write_that_arrives_twice_does_not_bring_its_version_back(world: World) -> None:
    """Else a late beat that is conditional on that version would succeed. (Found by a simulated history.)"""
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


def test_a_late_heartbeat_does_not_stamp_what_has_no_stamp(world: World, host: Host) -> None:
    """Its version is the newest, but its stamp would be that of long ago."""
    host.take()
    late = host.operations.requests.format.renew(KEY, "a", 30_000, host.stamp(), Heartbeat())
    world.now += 20.0
    host.heartbeat()
    _undated(world, "process").enter("pid-1", "a")
    before = world.item()

    assert host.send(late).refused
    assert world.item() == before


@pytest.mark.parametrize("shows_refused", [True, False])
def test_a_beat_written_again_and_sent_twice_by_the_sdk_is_a_beat(
    make_world: Callable[..., World], shows_refused: bool
) -> None:
    """Its first attempt changed the version that both are conditional on."""
    world = make_world(shows_refused=shows_refused)
    host = Host(world, "a")
    host.take()
    _undated(world, "process").enter("pid-1", "a")
    beating = host.start(host.operations.renewing.renew(KEY, "a", 30_000, Heartbeat())).step()
    while isinstance(beating.effect, Request) and beating.effect.action == "GetItem":
        beating.step()
    world.faults.append(LOST_THEN_RETRIED)

    renewed = beating.finish()

    assert isinstance(renewed, Renewed)
    assert renewed.holder.version == host.stamps[-1].version == world.record().holders["a"].version
    assert len(host.stamps) == 3, "the take's and two beats': there was no need of a third"


@pytest.mark.parametrize("shows_refused", [True, False])
def test_the_time_that_a_beat_has_is_for_all_of_its_requests_together(
    make_world: Callable[..., World], shows_refused: bool
) -> None:
    world = make_world(shows_refused=shows_refused)
    host = Host(world, "a")
    host.take()
    given: list[float | None] = []
    beating = host.start(
        host.operations.renewing.renew(KEY, "a", 30_000, Heartbeat(), until=host.now() + 7.0)
    )

    with pytest.raises(LockUnavailableError, match="other writes to the lease came first each time"):
        _contend(world, beating, given, answers_take=2.0)

    assert given == pytest.approx([7.0, 5.0, 3.0, 1.0])


def test_one_who_is_beaten_to_each_beat_is_told_so_in_the_end(world: World, host: Host) -> None:
    host.take()
    given: list[float | None] = []
    beating = host.start(host.operations.renewing.renew(KEY, "a", 30_000, Heartbeat()))

    with pytest.raises(
        LockUnavailableError, match="other writes to the lease came first each time"
    ) as unavailable:
        _contend(world, beating, given)

    assert not unavailable.value.maybe_applied
    assert given == [None] * 8


def _contend(
    world: World, beating: Paused[Any], given: list[float | None], *, answers_take: float = 0.0
) -> None:
    """Let another, each time a new one without the server's time, beat just before each request of `beating`; note how
    long it would have waited for each."""
    while isinstance(beating.effect, Request):
        given.append(beating.effect.within)
        _undated(world, f"rival-{len(given)}").heartbeat("a")
        world.now += answers_take
        beating.step()


# -- acquires -------------------------------------------------------------------------------------------------------


ENDS: dict[str, Callable[[Host], object]] = {
    "released": lambda host: host.release(),
    "broken": lambda host: host.run(host.operations.admin.break_(KEY, "a")),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
@pytest.mark.parametrize("looked", [True, False])
def test_an_acquire_that_arrives_after_its_sender_has_held_and_gone_takes_nothing(
    world: World, host: Host, end: Callable[[Host], object], looked: bool
) -> None:
    """Nobody would hear of that lease; and a keeper that still goes would keep it for ever."""
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
def test_an_acquire_of_a_part_that_arrives_after_its_sender_has_gone_takes_nothing(
    world: World, host: Host, end: Callable[[Host], object]
) -> None:
    Host(world, "other").take(capacity=2)
    host.run(host.operations.requests.get(KEY))  # it has heard of the server's time
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
    Host(world, "b").take(slots=3, capacity=4)  # in the place of all three
    before = world.item()
    assert world.record().available == 1

    assert host.send(late).refused
    assert world.item() == before


def test_whoever_takes_a_holder_away_notes_when(world: World, host: Host) -> None:
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
def test_a_process_whose_estimate_is_behind_takes_a_lock_just_vacated_with_one_more_request(
    world: World, host: Host, capacity: int
) -> None:
    """The refusal shows when the last holder went, and that this is known is as good as being later."""
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
def test_where_no_answer_is_dated_wrong_host_clocks_keep_nobody_from_the_lock(
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
    """One whose answers so far had no ``Date``, so that it does not ask for one."""
    host = Host(world, name)
    host.clock.answered = True
    return host


def _behind(world: World, name: str, seconds: float) -> Host:
    """A host that knows of the server's time, and is behind it."""
    host = Host(world, name)
    host.clock.note(Reply({}, host.now(), host.now(), server_ms=world.server_ms - round(seconds * 1000)))
    return host
