"""When a holder is dead (rule R3), to the millisecond: by observation or by server time only."""

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


def _reply(sent_at: float, received_at: float | None = None, *, server_ms: int | None = None) -> Reply:
    return Reply({}, sent_at, sent_at if received_at is None else received_at, server_ms)


# -- (a) observation ------------------------------------------------------------------------------------------------


def test_a_holder_is_dead_when_its_version_has_not_changed_for_its_lease() -> None:
    observer = Observer()
    assert observer.see(_record(), _reply(100.0)) == []
    assert observer.see(_record(), _reply(129.999)) == []
    assert observer.see(_record(), _reply(130.0)) == [_record().holders["a"]]


def test_a_holder_that_was_not_observed_before_is_alive() -> None:
    assert Observer().see(_record(), _reply(1_000_000.0)) == []


def test_an_observation_lasts_from_the_first_answer_to_the_last_request() -> None:
    """A slow answer must not make an observation longer than it was, at either end."""
    observer = Observer()
    observer.see(_record(), _reply(100.0, 103.0))

    assert observer.see(_record(), _reply(132.999, 140.0)) == []
    assert observer.see(_record(), _reply(133.0, 140.0)) != []


def test_a_new_version_restarts_the_observation() -> None:
    observer = Observer()
    observer.see(_record("v1"), _reply(100.0))
    observer.see(_record("v2"), _reply(129.0))

    assert observer.see(_record("v2"), _reply(158.999)) == []
    assert observer.see(_record("v2"), _reply(159.0)) != []


def test_an_eventually_consistent_read_of_an_older_version_only_delays() -> None:
    observer = Observer()
    observer.see(_record("v1"), _reply(100.0))
    observer.see(_record("v2"), _reply(110.0))
    observer.see(_record("v1"), _reply(111.0))  # from a lagging replica

    assert observer.see(_record("v2"), _reply(130.0)) == []
    assert observer.see(_record("v2"), _reply(160.0)) != []


def test_a_stale_read_of_a_live_holder_never_leads_to_a_reclaim(make_world: Callable[..., World]) -> None:
    """A holder may look dead in a lagging replica, but the reclaim requires the version that was read."""
    world = make_world(dates=False)
    holder, observer = Host(world, "a"), Host(world, "b")
    holder.take()
    stale = observer.take().record
    observer.observer.see(stale, _reply(observer.now()))
    world.now += 29.0
    holder.heartbeat()
    world.now += 2.0

    dead = observer.observer.see(stale, _reply(observer.now()))
    assert [each.lease_id for each in dead] == ["a"], "it looks dead"
    reclaim = observer.operations.requests.format.reclaim(observer.claim(), stale, dead, observer.stamp())
    assert observer.send(reclaim).refused

    assert isinstance(observer.take(), Busy)


def test_a_thread_may_have_an_older_record_than_the_observer() -> None:
    observer, newer = Observer(), replace(_record(), holders={"b": a_holder("b", lease_ms=LEASE_MS)})
    observer.see(_record(), _reply(100.0))
    observer.see(newer, _reply(101.0))

    assert observer.next_death(_record(), _reply(100.0)) == math.inf
    assert observer.next_death(newer, _reply(101.0)) == 131.0


def test_a_holder_that_released_and_returned_is_observed_anew() -> None:
    observer = Observer()
    observer.see(_record(), _reply(100.0))
    observer.see(LockRecord(KEY, 1, 1, {}, token=1), _reply(120.0))

    assert observer.see(_record(), _reply(130.0)) == []


def test_each_holder_is_observed_for_its_own_lease() -> None:
    observer = Observer()
    short, long = a_holder("short", lease_ms=10_000), a_holder("long", lease_ms=60_000)
    record = LockRecord(KEY, 2, 0, {"short": short, "long": long}, token=1)
    observer.see(record, _reply(0.0))

    assert observer.see(record, _reply(10.0)) == [short]
    assert observer.see(record, _reply(60.0)) == [short, long]


def test_a_holder_whose_lease_never_ends_is_never_dead() -> None:
    """Foreign formats have holders whose record has no lease time."""
    observer, record = Observer(), _record(lease_ms=0)
    observer.see(record, _reply(100.0))
    assert observer.see(record, _reply(1_000_000.0)) == []
    assert observer.next_death(record, _reply(99.0)) == math.inf


def test_the_shortest_lease_runs_out() -> None:
    observer, record = Observer(), _record(lease_ms=1)
    observer.see(record, _reply(100.0))
    assert observer.next_death(record, _reply(100.0)) == 100.001
    assert observer.see(record, _reply(100.002)) != []


def test_a_holder_that_renewed_within_a_lease_is_alive_at_any_server_time() -> None:
    observer = Observer()
    observer.see(_record("v1", renewed_at_ms=BEGIN_MS), _reply(100.0))
    observer.see(_record("v2", renewed_at_ms=BEGIN_MS), _reply(101.0))
    renewed = _record("v2", renewed_at_ms=BEGIN_MS)
    assert observer.see(renewed, _reply(129.9, server_ms=BEGIN_MS + 3_600_000)) == []
    assert observer.see(renewed, _reply(130.0, server_ms=BEGIN_MS + 3_600_000)) != []


def test_the_number_of_observations_is_bounded_and_the_oldest_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staleness, "_REMEMBERED", 3)
    observer = Observer()
    for key in ("one", "two", "three", "one", "four"):
        observer.see(_record(key=key), _reply(0.0))

    assert observer.see(_record(key="one"), _reply(30.0)) != [], "seen again, so kept"
    assert observer.see(_record(key="two"), _reply(30.0)) == [], "forgotten: observed from now on"


def test_a_free_lock_is_not_observed() -> None:
    observer = Observer()
    observer.see(_record(), _reply(0.0))
    observer.see(LockRecord(KEY, 1, 1, {}, token=1), _reply(1.0))

    assert not observer._sightings


# -- (b) server time ------------------------------------------------------------------------------------------------


def test_a_holder_is_dead_when_server_time_is_past_its_lease_and_the_skew() -> None:
    limit = BEGIN_MS + LEASE_MS + int(MAX_CLOCK_SKEW * 1000)
    record = _record(renewed_at_ms=BEGIN_MS)

    assert Observer().see(record, _reply(0.0, server_ms=limit)) == []
    assert Observer().see(record, _reply(0.0, server_ms=limit + 1)) != []


def test_the_skew_can_be_set() -> None:
    record = _record(renewed_at_ms=BEGIN_MS)
    reply = _reply(0.0, server_ms=BEGIN_MS + LEASE_MS + 2_001)

    assert Observer(max_clock_skew=2.0).see(record, reply) != []
    assert Observer(max_clock_skew=3.0).see(record, reply) == []


@pytest.mark.parametrize(("renewed_at_ms", "server_ms"), [(None, BEGIN_MS), (BEGIN_MS, None), (None, None)])
def test_without_a_stamp_or_a_date_only_observation_counts(
    renewed_at_ms: int | None, server_ms: int | None
) -> None:
    assert Observer().see(_record(renewed_at_ms=renewed_at_ms), _reply(0.0, server_ms=server_ms)) == []


def test_a_stamp_in_the_future_does_not_keep_a_silent_holder_alive() -> None:
    record = _record(renewed_at_ms=BEGIN_MS + 10**9)
    observer = Observer()
    observer.see(record, _reply(0.0, server_ms=BEGIN_MS))

    assert observer.see(record, _reply(30.0, server_ms=BEGIN_MS + 30_000)) != []


def test_a_process_that_reads_only_once_reclaims_a_dead_holder_at_once(world: World) -> None:
    """With observation alone, a process that reads once and exits can never take the lock."""
    Host(world, "dead").take()  # killed before its first heartbeat
    world.now += 30.0 + MAX_CLOCK_SKEW + 1.0

    assert isinstance(Host(world, "sensor").take(), Granted)


def test_processes_that_read_only_once_do_not_reclaim_a_live_holder(world: World) -> None:
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


# -- the holder stops before others may reclaim (R4) ----------------------------------------------------------------


@pytest.mark.parametrize("dates", [True, False])
@pytest.mark.parametrize("rate", [1 - MARGIN / 2, 1.0, 1 + MARGIN / 2])
def test_a_holder_whose_heartbeats_fail_has_stopped_before_a_reclaim(
    make_world: Callable[..., World], dates: bool, rate: float
) -> None:
    """Also if its clock runs faster or slower than the observer's, by half the margin."""
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
