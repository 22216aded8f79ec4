"""Renewing a lease: heartbeats, until when its holder may rely on it, and how the holder detects that it is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from airflow_dynamo_lock.core.effects import Request
from airflow_dynamo_lock.core.model.edits import Heartbeat
from airflow_dynamo_lock.core.model.errors import LockAccessError, LockLostError, LockUnavailableError
from airflow_dynamo_lock.core.model.lease import Lease, Term
from airflow_dynamo_lock.core.model.limits import MARGIN
from airflow_dynamo_lock.core.model.outcomes import Draining, Lost, Renewed
from proof.simulator.stepped import CONFLICT, DENIED, KEY, LOST, UNSENT, Host, Paused, World, a_lease


@pytest.fixture
def host(world: World) -> Host:
    return Host(world, "a")


def test_a_heartbeat_is_one_write_that_changes_the_version_and_the_time(world: World, host: Host) -> None:
    host.take()
    before = world.record().holders["a"]
    world.sent.clear()
    world.now += 5

    renewed = host.heartbeat()

    assert isinstance(renewed, Renewed)
    assert world.actions() == ["UpdateItem"]
    after = world.record().holders["a"]
    assert after.version != before.version
    assert after.renewed_at_ms is not None
    assert before.renewed_at_ms is not None
    assert 4_000 <= after.renewed_at_ms - before.renewed_at_ms <= 6_000
    assert after.acquired_at_ms == before.acquired_at_ms


def test_every_heartbeat_has_a_new_version(world: World, host: Host) -> None:
    host.take()
    versions = {world.record().holders["a"].version}
    for _ in range(5):
        host.heartbeat()
        versions.add(world.record().holders["a"].version)

    assert len(versions) == 6


def test_a_process_asks_for_server_time_before_its_first_heartbeat(world: World) -> None:
    Host(world, "a").take()
    world.now += 20.0
    world.sent.clear()
    host = Host(world, "a")

    host.heartbeat()
    assert world.actions() == ["GetItem", "UpdateItem"]
    assert world.record().holders["a"].renewed_at_ms == pytest.approx(world.server_ms, abs=1_500)

    world.now += 1.0
    host.heartbeat()
    assert world.actions() == ["GetItem", "UpdateItem", "UpdateItem"]


def test_a_heartbeat_without_server_time_removes_the_previous_stamp(
    world: World,
) -> None:
    dated, dateless = Host(world, "a"), Host(world, "a")
    dateless.clock.answered = True  # by answers without a date
    dated.take()
    assert world.record().holders["a"].renewed_at_ms is not None

    seen = world.record().holders["a"]
    dateless.send(
        dateless.operations.requests.format.renew(KEY, "a", 30_000, dateless.stamp(), Heartbeat(), seen)
    )

    assert world.record().holders["a"].renewed_at_ms is None


def test_a_heartbeat_of_a_lease_that_is_not_held_reports_it_as_lost_and_changes_nothing(
    world: World, host: Host
) -> None:
    host.take("other")
    before = world.item()

    lost = host.heartbeat("mine")

    assert isinstance(lost, Lost)
    assert lost.record is not None
    assert list(lost.record.holders) == ["other"]
    assert "a since" in lost.describe()
    assert world.item() == before


def test_a_heartbeat_never_creates_a_record(world: World, host: Host) -> None:
    assert host.heartbeat("mine") == Lost(None, "mine")
    assert world.item() is None


def test_processes_that_enter_and_leave_are_recorded(world: World, host: Host) -> None:
    host.take()

    assert isinstance(host.enter("pid-1"), Renewed)
    assert isinstance(host.enter("pid-2"), Renewed)
    assert set(world.record().holders["a"].processes) == {"pid-1", "pid-2"}

    assert isinstance(host.leave("pid-1"), Renewed)
    assert set(world.record().holders["a"].processes) == {"pid-2"}


def test_entering_twice_is_entering_once(world: World, host: Host) -> None:
    host.take()
    host.enter("pid-1")
    host.enter("pid-1")

    host.leave("pid-1")

    assert world.record().holders["a"].processes == {}


def test_an_enter_is_also_a_heartbeat(world: World, host: Host) -> None:
    host.take()
    before = world.record().holders["a"].version

    host.enter("pid-1")

    assert world.record().holders["a"].version != before


def test_no_process_enters_a_draining_lease(world: World, host: Host) -> None:
    host.take()
    host.enter("pid-1")
    host.release()
    before = world.item()
    world.now += 1.0

    draining = host.enter("pid-2")

    assert isinstance(draining, Draining)
    assert world.item() == before


def test_no_process_enters_a_lease_that_is_gone(world: World, host: Host) -> None:
    host.take()
    host.release()
    before = world.item()

    assert isinstance(host.enter("pid-1"), Lost)
    assert world.item() == before


# -- the holder's own clock -----------------------------------------------------------------------------------------


def test_a_lease_counts_from_when_the_write_was_sent_less_a_margin() -> None:
    now = 100.0
    term = Term(lambda: now)
    term.renewed(stamped_at=98.0, lease_ms=30_000)

    assert term.remaining() == pytest.approx(98.0 + 30.0 * (1 - MARGIN) - 100.0)


def test_the_time_left_never_goes_below_zero() -> None:
    now = 100.0
    term = Term(lambda: now)
    assert term.remaining() == 0.0
    term.renewed(stamped_at=0.0, lease_ms=30_000)
    assert term.remaining() == 0.0


def test_a_late_answer_does_not_shorten_the_time() -> None:
    term = Term(lambda: 0.0)
    term.renewed(stamped_at=10.0, lease_ms=30_000)
    term.renewed(stamped_at=5.0, lease_ms=30_000)

    assert term.until == 10.0 + 30.0 * (1 - MARGIN)


def test_a_lost_lease_stays_lost_and_keeps_its_first_reason() -> None:
    term = Term(lambda: 0.0)
    term.renewed(stamped_at=0.0, lease_ms=30_000)
    term.lose("it was broken")
    term.lose("it was released")
    term.renewed(stamped_at=1.0, lease_ms=30_000)

    assert term.remaining() == 0.0
    assert term.lost == "it was broken"


def test_the_loss_of_each_lock_of_a_set_is_reported_once() -> None:
    term = Term(lambda: 0.0)
    assert [term.is_first_report(key) for key in ("a", "b", "a", "b")] == [True, True, False, False]


def test_a_check_of_a_lost_lease_says_why_it_is_lost() -> None:
    now = 0.0
    term = Term(lambda: now)
    term.renewed(stamped_at=0.0, lease_ms=30_000)
    lease = Lease(KEY, "id-1", 7, "me", 1, 1, 30_000, 15_000, 0, term=term)
    lease.check()

    now = 27.0
    with pytest.raises(LockLostError, match=f"'{KEY}'.*id-1.*no heartbeat has succeeded in time"):
        lease.check()

    term.lose("it was broken by hand")
    with pytest.raises(LockLostError, match="broken by hand"):
        lease.check()


def test_a_lease_survives_json_and_is_not_valid_until_it_is_renewed() -> None:
    term = Term(lambda: 0.0)
    term.renewed(stamped_at=0.0, lease_ms=30_000)
    lease = Lease(KEY, "id-1", 7, "me", 1, 1, 30_000, 15_000, 0, term=term)

    copy = Lease.from_dict(lease.as_dict())

    assert copy == lease
    assert (lease.remaining() > 0, copy.remaining()) == (True, 0.0)


# -- entering ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [UNSENT, LOST, CONFLICT])
def test_a_process_enters_when_dynamodb_answers_again(world: World, host: Host, fault: str) -> None:
    host.take()
    world.faults.extend([fault] * 20)

    entered = host.enter("pid-1", retry_for=30.0)

    assert not world.faults
    assert isinstance(entered, Renewed)
    assert entered.stamped_at == host.now(), "the process relies on the attempt that was answered"
    assert list(world.record().holders["a"].processes) == ["pid-1"]


def test_entering_is_tried_again_after_a_second(world: World, host: Host) -> None:
    host.take()
    world.faults.extend([UNSENT] * 3)

    host.enter("pid-1", retry_for=30.0)

    assert world.now == 3.0


def test_a_process_that_enters_gives_up_after_its_time(world: World, host: Host) -> None:
    host.take()
    world.faults.extend([UNSENT] * 1000)

    with pytest.raises(LockUnavailableError):
        host.enter("pid-1", retry_for=10.0)

    assert world.now == 9.0, "another second would be its end"


def test_a_process_that_is_denied_access_does_not_try_again(world: World, host: Host) -> None:
    host.take()
    world.faults.append(DENIED)

    with pytest.raises(LockAccessError):
        host.enter("pid-1", retry_for=30.0)

    assert world.now == 0.0


def test_no_process_enters_a_lease_that_was_broken_while_dynamodb_did_not_answer(
    world: World, host: Host
) -> None:
    host.take()
    world.faults.extend([UNSENT] * 3)
    entering = host.start_enter("pid-1", retry_for=30.0)
    while world.faults:
        entering.step()
    Host(world, "person").run(host.operations.admin.break_(KEY, "a"))

    assert isinstance(entering.finish(), Lost)


# -- the heartbeat loop ---------------------------------------------------------------------------------------------


def _keep_alive(host: Host, term: Term, *, interval: float = 5.0) -> Paused[None]:
    return host.start(host.operations.renewing.keep_alive([a_lease("a")], interval, term))


def test_heartbeats_are_sent_at_their_interval_until_the_lease_is_lost(world: World, host: Host) -> None:
    term = _held(host)
    beating = _keep_alive(host, term)
    for _ in range(4):
        beating.step().step()
    assert world.now == 20.0
    assert world.actions().count("UpdateItem") == 1 + 4
    assert term.remaining() == pytest.approx(27.0)

    Host(world, "person").run(host.operations.admin.break_(KEY, "a"))
    beating.finish()
    assert term.lost is not None
    assert "broken" in term.lost
    assert world.now == 25.0, "detected by the next heartbeat"


def test_a_failed_heartbeat_is_retried_until_the_network_recovers(world: World, host: Host) -> None:
    term = _held(host)
    beating = _keep_alive(host, term)
    world.faults.extend([UNSENT] * 15)

    while world.faults:
        beating.step()
    assert 0 < term.remaining() < 10, "not renewed meanwhile"
    beating.step().step()

    assert term.remaining() == pytest.approx(27.0, abs=1.5)
    assert term.lost is None


def test_a_heartbeat_whose_answer_is_lost_is_sent_again_within_a_second(world: World, host: Host) -> None:
    term = _held(host)
    beating = _keep_alive(host, term)
    world.faults.append(LOST)

    beating.step().step().step().step()

    assert world.now == 6.0
    assert term.until == host.now() + 27.0


def test_without_any_answer_the_lease_is_lost_at_its_own_deadline(world: World, host: Host) -> None:
    term = _held(host)
    world.faults.extend([UNSENT] * 1000)

    _keep_alive(host, term).finish()

    assert world.now == pytest.approx(27.0, abs=0.01)
    assert term.lost == "no heartbeat has succeeded in time"


def test_a_heartbeat_times_out_at_the_end_of_the_lease(world: World, host: Host) -> None:
    term = _held(host)
    beating = _keep_alive(host, term).step()

    assert world.now == 5.0
    assert isinstance(beating.effect, Request)
    assert beating.effect.within == pytest.approx(22.0)


def test_a_process_inside_a_draining_lease_renews_it_for_the_grace_only(world: World, host: Host) -> None:
    term = _held(host)
    host.enter("pid-1")
    host.release(grace_ms=6_000)
    beating = _keep_alive(host, term, interval=2.0)

    for _ in range(20):
        beating.step().step()

    assert world.record().holders["a"].draining
    assert term.until - host.now() <= 6.0 * (1 - MARGIN)


@pytest.mark.parametrize("interval", [0.1, 5.0, 14.9])
def test_a_lease_never_runs_out_while_heartbeats_succeed(
    make_world: Callable[..., World], interval: float
) -> None:
    world = make_world()
    host = Host(world, "a")
    term = _held(host)
    beating = _keep_alive(host, term, interval=interval)

    for _ in range(50):
        beating.step()
        assert term.remaining() > 0
        beating.step()


# -- the heartbeat task, which renews for other processes -----------------------------------------------------------


def _keep_for_processes(host: Host) -> Paused[Draining | Lost]:
    return host.start(host.operations.renewing.keep_for_processes([a_lease("a")], 10.0))


def test_a_heartbeat_task_renews_at_once_and_then_at_its_interval(world: World, host: Host) -> None:
    host.take()
    world.now += 1.0
    keeping = _keep_for_processes(host)
    for _ in range(5):
        version = world.record().holders["a"].version
        keeping.step()
        assert world.record().holders["a"].version != version
        keeping.step()

    assert world.now == 51.0


def test_a_heartbeat_task_does_not_renew_a_draining_lease_and_stops(world: World, host: Host) -> None:
    host.take()
    host.enter("pid-1")
    keeping = _keep_for_processes(host).step()
    host.release()
    before = world.item()
    while keeping.effect is not None and world.now < 100.0:
        keeping.step()

    assert keeping.effect is None
    assert isinstance(keeping.finish(), Draining)
    assert world.item() == before


def test_a_heartbeat_task_stops_when_the_lease_is_gone(world: World, host: Host) -> None:
    host.take()
    keeping = _keep_for_processes(host).step().step()
    host.release()
    Host(world, "b").take()
    before = world.item()

    assert isinstance(keeping.finish(), Lost)
    assert world.item() == before


def test_a_heartbeat_task_continues_after_an_outage_of_any_length(world: World, host: Host) -> None:
    """As long as the record shows the lease, a process may be working under it."""
    host.take()
    keeping = _keep_for_processes(host)
    world.faults.extend([UNSENT, LOST] * 50)
    while world.faults:
        keeping.step()
    version = world.record().holders["a"].version

    keeping.step().step().step()  # sleeps, asks for server time, and renews

    assert world.now > 90.0
    assert world.record().holders["a"].version != version


def test_a_heartbeat_task_that_is_denied_continues_for_a_lease(world: World, host: Host) -> None:
    """Credentials expire, and are then replaced."""
    host.take()
    keeping = _keep_for_processes(host)
    world.faults.extend([DENIED] * 29)
    while world.faults:
        keeping.step()
    version = world.record().holders["a"].version

    keeping.step().step()

    assert 28.0 <= world.now <= 30.0
    assert world.record().holders["a"].version != version


def test_a_heartbeat_task_that_is_denied_for_longer_fails(world: World, host: Host) -> None:
    host.take()
    keeping = _keep_for_processes(host)
    world.faults.extend([DENIED] * 1000)

    with pytest.raises(LockAccessError):
        keeping.finish()

    assert 30.0 <= world.now <= 31.0


def test_a_heartbeat_task_that_is_denied_at_times_does_not_end(world: World, host: Host) -> None:
    host.take()
    world.now += 1.0
    keeping = _keep_for_processes(host)
    for _ in range(5):
        world.faults.extend([DENIED] * 20)
        while world.faults:
            keeping.step()
        keeping.step().step().step()
    assert keeping.effect is not None


def _held(host: Host) -> Term:
    term = host.term()
    term.renewed(host.take("a").stamped_at, 30_000)
    return term
