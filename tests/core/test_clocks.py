"""Times in the record: the estimate of server time, wrong host clocks, fencing tokens (R10), and the expiry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from airflow_dynamo_lock.core.effects import Reply, Request, ServerClock, Stamp
from airflow_dynamo_lock.core.model.edits import Change, Drain, Edit, Enter, Heartbeat
from airflow_dynamo_lock.core.model.errors import LockUnavailableError
from airflow_dynamo_lock.core.model.outcomes import Busy, Granted, Lost
from airflow_dynamo_lock.core.table.expressions import RETENTION_MS
from proof.simulator.stepped import BEGIN_MS, HOURS, KEY, LOST, LOST_THEN_RETRIED, Host, World

DAYS = 24 * HOURS


def test_server_time_is_the_last_date_plus_the_time_since() -> None:
    clock = ServerClock()
    assert clock.at(100.0) is None
    clock.note(Reply({}, sent_at=100.0, received_at=100.0, server_ms=BEGIN_MS))

    assert clock.at(100.0) == BEGIN_MS
    assert clock.at(107.5) == BEGIN_MS + 7_500


def test_an_answer_without_a_date_leaves_the_estimate_as_it_was() -> None:
    clock = ServerClock()
    clock.note(Reply({}, 100.0, 100.0, server_ms=BEGIN_MS))
    clock.note(Reply({}, 200.0, 200.0, server_ms=None))

    assert clock.at(200.0) == BEGIN_MS + 100_000


def test_a_slow_answer_does_not_put_the_estimate_behind() -> None:
    """An early stamp makes a live holder look dead. Even after a slow answer, a stamp is at most one second early."""
    clock = ServerClock()
    # Sent at 100, dated by the server at once or at the very end, received five seconds later.
    for dated_after in (0.0, 5.0):
        true_ms = BEGIN_MS + round(dated_after * 1000)
        clock.note(Reply({}, sent_at=100.0, received_at=105.0, server_ms=true_ms // 1000 * 1000))
        at_receipt = clock.at(105.0)
        assert at_receipt is not None
        assert at_receipt > BEGIN_MS + 5_000 - 1_000


def test_a_pause_before_a_request_is_sent_does_not_move_the_estimate_ahead() -> None:
    """A late stamp would end `min_hold` early."""
    clock = ServerClock()
    clock.note(Reply({}, sent_at=100.0, received_at=100.02, server_ms=BEGIN_MS))
    clock.note(Reply({}, sent_at=110.0, received_at=150.0, server_ms=BEGIN_MS + 50_000))

    assert clock.at(150.0) == BEGIN_MS + 50_000 + 5_000, "a tenth of the 50 s, by which the clock may be slow"
    clock.note(Reply({}, sent_at=151.0, received_at=151.01, server_ms=BEGIN_MS + 51_000))
    clock.note(Reply({}, sent_at=111.0, received_at=151.02, server_ms=BEGIN_MS + 51_000))
    assert clock.at(152.0) == pytest.approx(BEGIN_MS + 52_000, abs=20)
    assert clock.told_at == 151.0, "an answer to an earlier request makes the estimate no older"


@pytest.mark.parametrize("wrong_by", [-3 * HOURS, 3 * HOURS])
def test_a_wrong_date_is_corrected_by_the_next_answer(wrong_by: float) -> None:
    clock = ServerClock()
    clock.note(Reply({}, 100.0, 100.02, server_ms=BEGIN_MS + round(wrong_by * 1000)))
    clock.note(Reply({}, 101.0, 101.02, server_ms=BEGIN_MS + 1000))
    assert clock.at(101.0) == pytest.approx(BEGIN_MS + 1000, abs=20)


@pytest.mark.parametrize("wrong_by", [-3 * HOURS, -5.0, -3.0, 3.0, 5.0, 3 * HOURS])
def test_a_grant_by_a_wrong_host_clock_is_corrected_before_it_returns(world: World, wrong_by: float) -> None:
    granted = Host(world, "a", wall_clock_offset=wrong_by).take()

    assert isinstance(granted, Granted)
    assert world.actions() == ["UpdateItem", "UpdateItem"]
    record = world.record()
    assert granted.token == record.token
    assert -1_500 <= record.token - world.server_ms <= 6_500, "a little ahead does no harm"
    assert record.holders["a"].renewed_at_ms == pytest.approx(world.server_ms, abs=1_500)
    assert (
        granted.acquired_at_ms
        == record.holders["a"].acquired_at_ms
        == pytest.approx(world.server_ms, abs=1_500)
    )
    assert record.expires_at == pytest.approx((world.server_ms + 30_000 + RETENTION_MS) / 1000, abs=2)


@pytest.mark.parametrize("wrong_by", [-0.9, -0.1, 0.0, 0.1, 0.9])
def test_a_host_clock_that_is_about_right_costs_no_second_write(world: World, wrong_by: float) -> None:
    Host(world, "a", wall_clock_offset=wrong_by).take()

    assert world.actions() == ["UpdateItem"]


def test_a_wrong_host_clock_does_not_change_an_existing_token(world: World) -> None:
    first = Host(world, "a").take()
    Host(world, "a").release()

    second = Host(world, "b", wall_clock_offset=-3 * HOURS).take()

    assert second.token == world.record().token == first.token + 1


def test_a_first_token_that_only_seems_wrong_is_not_lowered(world: World) -> None:
    """Servers' clocks differ. A token that seems wrong by one server's ``Date`` may be right by another's."""
    host = Host(world, "a")
    first = host.take()
    host.release()
    host.clock.note(Reply({}, host.now(), host.now(), server_ms=first.token - 1))
    world.server_clock_offset = lambda: -5.0

    second = host.take("again")

    assert world.actions()[-2:] == ["UpdateItem", "UpdateItem"], "the grant was corrected"
    assert second.token == first.token + 1


def test_a_token_from_a_wrong_clock_is_corrected_after_a_lost_reply_too(world: World) -> None:
    world.faults.append(LOST_THEN_RETRIED)

    granted = Host(world, "a", wall_clock_offset=-30 * DAYS).take()

    assert granted.token == world.record().token == pytest.approx(world.server_ms, abs=1_500)


def test_a_holder_reclaimed_before_it_corrects_its_stamp_is_refused(world: World) -> None:
    """Until a host whose clock is hours behind corrects its stamp, it looks like a dead holder."""
    slow = Host(world, "a", wall_clock_offset=-3 * HOURS)
    about_to_correct = slow.start(
        slow.operations.attempting.try_acquire(slow.claim(), owns_lease_id=True)
    ).step()

    assert isinstance(Host(world, "b").take(), Granted)

    assert isinstance(about_to_correct.finish(), Busy), "its caller has not received the grant"
    assert list(world.record().holders) == ["b"]


def test_a_correction_is_made_although_another_grant_precedes_it(world: World) -> None:
    slow = Host(world, "a", wall_clock_offset=-3 * HOURS)
    about_to_correct = slow.start(
        slow.operations.attempting.try_acquire(slow.claim(capacity=2), owns_lease_id=True)
    ).step()
    Host(world, "b", wall_clock_offset=-3 * HOURS).take(capacity=2)

    granted = about_to_correct.finish()

    assert isinstance(granted, Granted)
    assert granted.token == world.record().token, (
        "the correction is the last grant, so its token is the largest"
    )
    assert world.record().holders["a"].renewed_at_ms == pytest.approx(world.server_ms, abs=1_500)
    assert world.record().available == 0


def test_a_machine_that_was_suspended_writes_no_outdated_stamp(world: World) -> None:
    host = Host(world, "a")
    host.take()
    host.release()
    world.now += 3 * HOURS
    host.booted -= 3 * HOURS  # its clocks have stood still

    host.take("later")

    assert world.record().holders["later"].renewed_at_ms == pytest.approx(world.server_ms, abs=1_500)


@pytest.mark.parametrize("dates", [True, False])
def test_host_clocks_hours_apart_change_nothing(make_world: Callable[..., World], dates: bool) -> None:
    """The same history, with right and with wrong clocks, has the same outcomes at the same times."""

    def history(offs: tuple[float, float, float]) -> list[str]:
        world = make_world(dates=dates)
        key = f"{KEY}/{offs}"
        a, b, c = (Host(world, name, wall_clock_offset=off) for name, off in zip("abc", offs, strict=True))
        outcomes = []

        def note(what: object) -> None:
            outcomes.append(f"{world.now:.0f} {type(what).__name__}")

        def take(host: Host) -> None:
            note(host.run(host.operations.attempting.try_acquire(host.claim(key=key), owns_lease_id=True)))

        def heartbeat(host: Host) -> None:
            note(host.run(host.operations.renewing.renew(key, host.name, 30_000, Heartbeat())))

        take(a)
        take(b)
        for _ in range(4):
            world.now += 20.0
            heartbeat(a)
            take(b)
            take(c)
        world.now += 29.0
        take(b)
        world.now += 13.0
        take(c)  # `a` is proven dead now
        take(b)
        heartbeat(a)
        return outcomes

    outcomes = history((0.0, 0.0, 0.0))
    assert history((5 * HOURS, -5 * HOURS, 0.0)) == outcomes
    assert history((-5 * HOURS, 5 * HOURS, -1.5)) == outcomes
    assert outcomes[-3:] == ["122 Granted", "122 Busy", "122 Lost"]


# -- fencing tokens -------------------------------------------------------------------------------------------------


def test_tokens_grow_with_every_grant(world: World) -> None:
    tokens = []
    for name in ("a", "b", "c"):
        host = Host(world, name)
        tokens.append(host.take(capacity=2).token)
        tokens.append(host.take(f"{name}2", capacity=2).token)
        host.release()
        world.now += 100.0
    assert tokens == sorted(set(tokens))


def test_a_token_is_larger_than_any_before_the_record_was_deleted(world: World) -> None:
    host = Host(world, "a")
    for _ in range(20):
        last = host.take()
        host.release()
    world.now += RETENTION_MS / 1000 + 30.0
    world.delete()

    assert Host(world, "b").take().token > last.token


def test_heartbeats_do_not_use_up_tokens(world: World) -> None:
    host = Host(world, "a")
    granted = host.take()
    host.heartbeat()
    host.enter("pid-1")
    host.leave("pid-1")

    assert world.record().token == granted.token


# -- first tokens from a host's clock ---------------------------------------------------------------------------------


WRONG = pytest.mark.parametrize("wrong_by", [-30 * DAYS, -20.0, 20.0, 30 * DAYS])


def _take_without_an_answer(world: World, wrong_by: float) -> None:
    """Take the lock by a write whose answer is lost, so that no caller receives the token."""
    world.faults.append(LOST)
    with pytest.raises(LockUnavailableError):
        Host(world, "gone", wall_clock_offset=wrong_by).take(capacity=2)
    assert world.record().unverified


@WRONG
@pytest.mark.parametrize("how", ["beside it", "in its place", "after a break"])
def test_the_next_grant_corrects_a_wrong_token_that_no_caller_received(
    world: World, wrong_by: float, how: str
) -> None:
    _take_without_an_answer(world, wrong_by)
    host = Host(world, "a")
    if how == "after a break":
        host.run(host.operations.admin.break_(KEY, "gone"))

    granted = host.start_acquire(slots=2 if how == "in its place" else 1, capacity=2).finish()

    assert granted.token == world.record().token
    assert -1_500 <= granted.token - world.server_ms <= 12_000
    assert not world.record().unverified


def test_a_grant_has_a_larger_token_than_one_that_corrected_it(world: World) -> None:
    ahead = Host(world, "a", wall_clock_offset=30 * DAYS)
    about_to_correct = ahead.start(
        ahead.operations.attempting.try_acquire(ahead.claim(capacity=2), owns_lease_id=True)
    ).step()
    others = Host(world, "b").take(capacity=2)

    granted = about_to_correct.finish()

    assert isinstance(granted, Granted)
    assert others.token < granted.token == world.record().token <= world.server_ms + 1_500


def test_a_confirmed_token_is_not_lowered_by_a_server_that_is_behind(world: World) -> None:
    confirmed = Host(world, "a").take(capacity=2)
    assert world.record().unverified
    world.server_clock_offset = lambda: -9.0

    granted = Host(world, "b").take(capacity=2)

    assert granted.token == confirmed.token + 1


def test_an_unverified_token_from_long_ago_is_raised(world: World) -> None:
    confirmed = Host(world, "a").take(capacity=3)
    world.now += HOURS

    granted = Host(world, "b").take(capacity=3)

    assert granted.token > confirmed.token + 3_000_000
    assert not world.record().unverified
    assert Host(world, "c").take(capacity=3).token == granted.token + 1, "the token base is verified now"


def test_a_release_by_the_holder_verifies_the_token_base(world: World) -> None:
    host = Host(world, "a")
    granted = host.take()
    assert world.record().unverified
    host.release()
    assert not world.record().unverified
    world.now += HOURS
    world.sent.clear()

    assert host.take("later").token == granted.token + 1
    assert world.actions() == ["UpdateItem"]


def test_a_release_without_server_time_does_not_verify_the_token_base(world: World) -> None:
    Host(world, "a").take()

    Host(world, "another process").release("a")

    assert world.record().unverified


def test_the_read_of_server_time_for_a_correction_takes_no_longer_than_the_attempt(world: World) -> None:
    host = Host(world, "a", wall_clock_offset=-60.0)
    attempt = host.operations.attempting.try_acquire(host.claim(), within=5.0, owns_lease_id=False)
    request = next(attempt)
    assert isinstance(request, Request)
    reply = host.send(request)
    world.now += 15.0

    read = attempt.send(replace(reply, received_at=host.now()))

    assert isinstance(read, Request)
    assert (read.action, read.within) == ("GetItem", 5.0)


def test_an_undo_does_not_verify_the_token_base(world: World) -> None:
    ahead = Host(world, "a", wall_clock_offset=30 * DAYS)
    attempt = ahead.start(ahead.operations.attempting.try_acquire(ahead.claim(), owns_lease_id=True))
    assert isinstance(attempt.effect, Request)
    ahead.send(attempt.effect)
    with pytest.raises(KeyboardInterrupt):
        attempt.interrupt(KeyboardInterrupt()).finish()
    assert world.record().holders == {}

    assert Host(world, "b").take().token == pytest.approx(world.server_ms, abs=1_500)


def test_ending_an_earlier_attempt_verifies_no_token_base(world: World) -> None:
    world.faults.append(LOST)
    with pytest.raises(LockUnavailableError):
        Host(world, wall_clock_offset=30 * DAYS).take("attempt-1", attempt_of="dag/run/task")

    granted = Host(world).take("attempt-2", attempt_of="dag/run/task")

    assert list(world.record().holders) == ["attempt-2"]
    assert granted.token == pytest.approx(world.server_ms, abs=1_500)


def test_a_machine_that_was_suspended_writes_no_outdated_first_token(world: World) -> None:
    host = Host(world, "a")
    host.run(host.operations.requests.get(KEY))
    world.now += 3 * HOURS
    host.booted -= 3 * HOURS  # its clocks have stood still

    granted = host.take()

    assert granted.token == world.record().token == pytest.approx(world.server_ms, abs=1_500)


def test_a_token_from_an_old_estimate_is_corrected_by_the_next_grant(world: World) -> None:
    """The machine is suspended between two attempts of the SDK, and the holder dies before it corrects the token.

    A simulated history found this.
    """
    host = Host(world, "a")
    host.run(host.operations.requests.get(KEY))
    take = host.operations.requests.format.acquire_idle(host.claim("dead"), host.stamp())
    world.now += 200 * HOURS
    host.send(take)
    assert world.record().unverified

    granted = Host(world, "b").take()

    assert granted.token == pytest.approx(world.server_ms, abs=1_500)
    assert not world.record().unverified


# -- expiry ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong_by", [-30 * DAYS, 30 * DAYS])
def test_a_write_without_server_time_does_not_change_the_expiry(world: World, wrong_by: float) -> None:
    """With an expiry by a clock that is behind, DynamoDB would delete a record in use."""
    host = Host(world, "a")
    host.take()
    right = world.record().expires_at

    def stamp() -> Stamp:
        return Host(world, "new", wall_clock_offset=wrong_by).stamp()

    def renew(edit: Edit) -> Request:
        return writes.renew(KEY, "a", 30_000, stamp(), edit, world.record().holders["a"])

    writes = host.operations.requests.format
    requests: tuple[Callable[[], Request], ...] = (
        lambda: renew(Heartbeat()),
        lambda: renew(Change()),
        lambda: renew(Enter("pid-1")),
        lambda: renew(Drain()),
        lambda: writes.leave(KEY, "a", "pid-1", 15_000, stamp()),
        lambda: writes.release(KEY, "a", 1, stamp(), confirmed=True),
    )
    for request in requests:
        assert not host.send(request()).refused
        assert world.record().expires_at == right
    host.take()
    right = world.record().expires_at
    assert not host.send(writes.break_(KEY, world.record().holders["a"], stamp())).refused
    assert world.record().expires_at == right


def test_every_write_with_server_time_moves_the_expiry_ahead(world: World) -> None:
    """Other lock libraries have used a TTL in the wrong unit, and one that falls within the lease."""
    host = Host(world, "a")
    writes: list[tuple[str, Callable[[], object]]] = [
        ("acquire", lambda: host.take(capacity=2)),
        ("acquire the other slot", lambda: host.take("b", capacity=2)),
        ("heartbeat", host.heartbeat),
        ("enter", lambda: host.enter("pid-1")),
        ("leave", lambda: host.leave("pid-1")),
        ("enter again", lambda: host.enter("pid-1")),
        ("drain", host.release),
        ("release", lambda: host.release("b")),
        ("break", lambda: host.run(host.operations.admin.break_(KEY, "a"))),
        ("acquire again", lambda: host.take("c", capacity=2)),
        ("reacquire", lambda: host.take("c", capacity=2)),
    ]
    for what, write in writes:
        world.now += 60.0
        assert not isinstance(write(), Busy | Lost), what
        expires_at = world.record().expires_at
        assert expires_at is not None
        ahead = expires_at - world.server_ms / 1000
        assert RETENTION_MS / 1000 - 2 <= ahead <= RETENTION_MS / 1000 + 32, what


def test_a_reclaim_moves_the_expiry_ahead(world: World) -> None:
    Host(world, "dead").take()
    world.now += 3 * DAYS

    Host(world, "b").take()

    expires_at = world.record().expires_at
    assert expires_at is not None
    assert expires_at - world.server_ms / 1000 >= RETENTION_MS / 1000


def test_a_record_renewed_for_a_month_never_comes_near_its_expiry(world: World) -> None:
    host = Host(world, "a")
    host.take(lease_ms=int(DAYS * 1000))
    for _ in range(31):
        world.now += DAYS / 2
        host.heartbeat(lease_ms=int(DAYS * 1000))
        expires_at = world.record().expires_at
        assert expires_at is not None
        assert expires_at - world.server_ms / 1000 > 7 * DAYS


@pytest.mark.parametrize("max_clock_skew", [5.0, 10.0, 30.0])
def test_a_record_is_forgotten_when_every_server_would_grant_a_larger_token(
    world: World, max_clock_skew: float
) -> None:
    host = Host(world, max_clock_skew=max_clock_skew)
    token = host.take().token
    host.release()

    assert host.run(host.operations.admin.forget(KEY))

    # A server's clock may be behind by `max_clock_skew`, and a process's estimate of it by 3 s more.
    assert world.server_ms - max_clock_skew * 1000 - 3000 >= token
    assert world.item() is None
