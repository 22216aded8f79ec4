"""When a holder is dead (rule R3), to the millisecond: by observation, by the server's time, and by nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from airflow_dynamo_lock.core import liveness as staleness
from airflow_dynamo_lock.core.effects import Reply
from airflow_dynamo_lock.core.liveness import MAX_CLOCK_SKEW, Observer
from airflow_dynamo_lock.core.model.limits import MARGIN
from airflow_dynamo_lock.core.model.outcomes import Busy, Granted
from airflow_dynamo_lock.core.model.record import LockRecord
from proof.simulator.stepped import BEGIN_MS, HOURS, KEY, Host, World, a_holder

LEASE_MS = 30_000


def _record(
    version: str = "v1", *, renewed_at_ms: int | None = None, key: str = KEY, lease_ms: int = LEASE_MS
) -> LockRecord:
    holder = a_holder(lease_ms=lease_ms, version=version, renewed_at_ms=renewed_at_ms)
    return LockRecord(key, 1, 0, {"a": holder}, token=1)


def _seen(sent_at: float, received_at: float | None = None, *, server_ms: int | None = None) -> Reply:
    return Reply({}, sent_at, sent_at if received_at is None else received_at, server_ms)


# -- (a) observation ------------------------------------------------------------------------------------------------


def test_a_holder_is_dead_when_its_version_has_not_changed_for_its_lease() -> None:
    observer = Observer()
    assert observer.see(_record(), _seen(100.0)) == []
    assert observer.see(_record(), _seen(129.999)) == []
    assert observer.see(_record(), _seen(130.0)) == [_record().holders["a"]]


def test_what_nobody_has_seen_before_is_alive() -> None:
    assert Observer().see(_record(), _seen(1_000_000.0)) == []


def test_silence_counts_from_when_the_first_answer_arrived_to_when_the_last_question_was_sent() -> None:
    """A slow answer must not make a holder older than it is, at either end."""
    observer = Observer()
    observer.see(_record(), _seen(100.0, 103.0))

    assert observer.see(_record(), _seen(132.999, 140.0)) == []
    assert observer.see(_record(), _seen(133.0, 140.0)) != []


def test_a_new_version_starts_the_count_afresh() -> None:
    observer = Observer()
    observer.see(_record("v1"), _seen(100.0))
    observer.see(_record("v2"), _seen(129.0))

    assert observer.see(_record("v2"), _seen(158.999)) == []
    assert observer.see(_record("v2"), _seen(159.0)) != []


def test_an_eventually_consistent_read_that_goes_back_in_time_only_delays() -> None:
    observer = Observer()
    observer.see(_record("v1"), _seen(100.0))
    observer.see(_record("v2"), _seen(110.0))
    observer.see(_record("v1"), _seen(111.0))  # from a replica that lags

    assert observer.see(_record("v2"), _seen(130.0)) == []
    assert observer.see(_record("v2"), _seen(160.0)) != []


def test_a_stale_read_of_a_beating_holder_never_leads_to_a_reclaim(make_world: Callable[..., World]) -> None:
    """It may look dead in a lagging replica; the write that reclaims names the version that was seen."""
    world = make_world(dates=False)
    holder, observer = Host(world, "a"), Host(world, "b")
    holder.take()
    stale = observer.take().record
    observer.observer.see(stale, _seen(observer.now()))
    world.now += 29.0
    holder.heartbeat()
    world.now += 2.0

    dead = observer.observer.see(stale, _seen(observer.now()))
    assert [each.lease_id for each in dead] == ["a"], "so it seems"
    reclaim = observer.operations.requests.format.reclaim(observer.claim(), stale, dead, observer.stamp())
    assert observer.send(reclaim).refused

    assert isinstance(observer.take(), Busy)


def test_what_another_thread_has_seen_since_is_no_error_to_one_with_an_older_record() -> None:
    observer, newer = Observer(), replace(_record(), holders={"b": a_holder("b", lease_ms=LEASE_MS)})
    observer.see(_record(), _seen(100.0))
    observer.see(newer, _seen(101.0))

    assert observer.next_death(_record(), _seen(100.0)) == math.inf
    assert observer.next_death(newer, _seen(101.0)) == 131.0


def test_a_holder_that_came_back_with_another_lease_is_another_holder() -> None:
    observer = Observer()
    observer.see(_record(), _seen(100.0))
    observer.see(LockRecord(KEY, 1, 1, {}, token=1), _seen(120.0))

    assert observer.see(_record(), _seen(130.0)) == []


def test_each_holder_is_observed_by_its_own_lease() -> None:
    observer = Observer()
    short, long = a_holder("short", lease_ms=10_000), a_holder("long", lease_ms=60_000)
    record = LockRecord(KEY, 2, 0, {"short": short, "long": long}, token=1)
    observer.see(record, _seen(0.0))

    assert observer.see(record, _seen(10.0)) == [short]
    assert observer.see(record, _seen(60.0)) == [short, long]


def test_a_lease_that_never_runs_out_is_never_silent() -> None:
    """Foreign formats have holders whose record names no lease."""
    observer, record = Observer(), _record(lease_ms=0)
    observer.see(record, _seen(100.0))
    assert observer.see(record, _seen(1_000_000.0)) == []
    assert observer.next_death(record, _seen(99.0)) == math.inf


def test_the_shortest_lease_runs_out() -> None:
    observer, record = Observer(), _record(lease_ms=1)
    observer.see(record, _seen(100.0))
    assert observer.next_death(record, _seen(100.0)) == 100.001
    assert observer.see(record, _seen(100.002)) != []


def test_who_was_seen_to_beat_within_a_lease_is_alive_whatever_time_an_answer_gives() -> None:
    observer = Observer()
    observer.see(_record("v1", renewed_at_ms=BEGIN_MS), _seen(100.0))
    observer.see(_record("v2", renewed_at_ms=BEGIN_MS), _seen(101.0))
    beaten = _record("v2", renewed_at_ms=BEGIN_MS)
    assert observer.see(beaten, _seen(129.9, server_ms=BEGIN_MS + 3_600_000)) == []
    assert observer.see(beaten, _seen(130.0, server_ms=BEGIN_MS + 3_600_000)) != []


def test_the_memory_of_observations_is_bounded_and_forgets_the_longest_unseen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staleness, "_REMEMBERED", 3)
    observer = Observer()
    for key in ("one", "two", "three", "one", "four"):
        observer.see(_record(key=key), _seen(0.0))

    assert observer.see(_record(key="one"), _seen(30.0)) != [], "seen again, so kept"
    assert observer.see(_record(key="two"), _seen(30.0)) == [], "forgotten: observed from now on"


def test_a_lock_that_is_free_is_not_remembered() -> None:
    observer = Observer()
    observer.see(_record(), _seen(0.0))
    observer.see(LockRecord(KEY, 1, 1, {}, token=1), _seen(1.0))

    assert not observer._sightings


# -- (b) the server's time ------------------------------------------------------------------------------------------


def test_a_newcomer_knows_a_holder_dead_when_the_server_is_past_its_lease_and_the_skew() -> None:
    limit = BEGIN_MS + LEASE_MS + int(MAX_CLOCK_SKEW * 1000)
    record = _record(renewed_at_ms=BEGIN_MS)

    assert Observer().see(record, _seen(0.0, server_ms=limit)) == []
    assert Observer().see(record, _seen(0.0, server_ms=limit + 1)) != []


def test_the_skew_can_be_set() -> None:
    record = _record(renewed_at_ms=BEGIN_MS)
    reply = _seen(0.0, server_ms=BEGIN_MS + LEASE_MS + 2_001)

    assert Observer(max_clock_skew=2.0).see(record, reply) != []
    assert Observer(max_clock_skew=3.0).see(record, reply) == []


@pytest.mark.parametrize(("renewed_at_ms", "server_ms"), [(None, BEGIN_MS), (BEGIN_MS, None), (None, None)])
def test_without_a_stamp_or_a_date_only_observation_counts(
    renewed_at_ms: int | None, server_ms: int | None
) -> None:
    assert Observer().see(_record(renewed_at_ms=renewed_at_ms), _seen(0.0, server_ms=server_ms)) == []


def test_a_stamp_in_the_future_does_not_keep_a_holder_alive_that_is_seen_to_be_silent() -> None:
    record = _record(renewed_at_ms=BEGIN_MS + 10**9)
    observer = Observer()
    observer.see(record, _seen(0.0, server_ms=BEGIN_MS))

    assert observer.see(record, _seen(30.0, server_ms=BEGIN_MS + 30_000)) != []


def test_a_process_that_looks_only_once_takes_a_corpse_at_once(world: World) -> None:
    """peers.md, 7: with observation alone, a process that looks once and goes away can never take it."""
    Host(world, "dead").take()  # killed before its first heartbeat
    world.now += 30.0 + MAX_CLOCK_SKEW + 1.0

    assert isinstance(Host(world, "sensor").take(), Granted)


def test_processes_that_look_only_once_leave_a_living_holder_alone(world: World) -> None:
    holder = Host(world, "a")
    holder.take()
    for _ in range(60):
        world.now += 29.0
        assert isinstance(Host(world, "sensor").take(), Busy)
        holder.heartbeat()


def test_without_dates_a_newcomer_observes_for_one_lease(make_world: Callable[..., World]) -> None:
    world = make_world(dates=False)
    Host(world, "dead").take()
    world.now += 10 * HOURS
    newcomer = Host(world, "b")

    assert isinstance(newcomer.take(), Busy)
    world.now += 29.9
    assert isinstance(newcomer.take(), Busy)
    world.now += 0.1
    assert isinstance(newcomer.take(), Granted)


# -- the holder gives up before others may take (R4) ----------------------------------------------------------------


@pytest.mark.parametrize("dates", [True, False])
@pytest.mark.parametrize("rate", [1 - MARGIN / 2, 1.0, 1 + MARGIN / 2])
def test_a_holder_whose_beats_fail_has_given_up_before_anybody_takes_over(
    make_world: Callable[..., World], dates: bool, rate: float
) -> None:
    """Also where its clock runs faster or slower than the observer's, by half the margin."""
    world = make_world(dates=dates)
    holder, observer = Host(world, "a", clock_rate=rate), Host(world, "b", booted=0.0)
    term = holder.term()
    term.renewed(holder.take().stamped_at, LEASE_MS)
    for _ in range(3):
        world.now += 5.0
        term.renewed(holder.heartbeat().stamped_at, LEASE_MS)

    taken = observer.start_acquire(poll_interval=0.25).finish()

    assert taken.reclaimed[0].lease_id == "a"
    assert term.remaining() == 0.0
    assert world.now <= 15.0 + 30.0 + MAX_CLOCK_SKEW + 1.5
