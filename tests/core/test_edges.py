"""Edges of the protocol: many dead holders, limits of settings, and processes that receive no ``Date`` header."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import EndpointConnectionError

from airflow_dynamo_lock import LockClient
from airflow_dynamo_lock.client.options import ClaimOptions
from airflow_dynamo_lock.core.effects import Sleep
from airflow_dynamo_lock.core.model.edits import Enter, Heartbeat
from airflow_dynamo_lock.core.model.errors import (
    LockLostError,
    LockTimeoutError,
    LockUnavailableError,
    LockValueError,
)
from airflow_dynamo_lock.core.model.lease import Term
from airflow_dynamo_lock.core.model.limits import SHARED
from airflow_dynamo_lock.core.model.outcomes import Busy, Granted, Released, Renewed
from proof.simulator.stepped import HOURS, KEY, TABLE, Host, World, a_lease
from tests.core.test_queue import waiting, woken

#: DynamoDB's limit for the text of an expression, in bytes.
EXPRESSION = 4096


def dead_holders(world: World, number: int, capacity: int = SHARED) -> None:
    """Store a record with this number of holders, and wait until they are dead."""
    first = Host(world, "holder-0")
    first.take(capacity=capacity)
    item = world.item()
    assert item is not None
    holder = item["holders"]["M"]["holder-0"]
    names = [f"holder-{each}" for each in range(number)]
    item["holders"] = {"M": {f"{name}-{'x' * 36}": holder for name in names}}
    item["available"] = {"N": str(capacity - number)}
    world.client.put_item(TableName=TABLE, Item=item)
    world.now += 60.0


def longest_expression(world: World) -> int:
    return max(
        len(value)
        for request in world.sent
        for name, value in request.params.items()
        if name.endswith("Expression")
    )


# -- many dead holders ------------------------------------------------------------------------------------------------


def test_a_writer_removes_any_number_of_dead_readers(world: World) -> None:
    dead_holders(world, 130)

    granted = Host(world, "writer").take()

    assert isinstance(granted, Granted)
    assert granted.took_over
    assert set(world.record().holders) == {"writer"}
    assert longest_expression(world) <= EXPRESSION


def test_a_semaphore_of_another_capacity_removes_any_number_of_dead_holders(world: World) -> None:
    dead_holders(world, 130, capacity=130)

    assert isinstance(Host(world, "etl").take(capacity=200), Granted)
    assert set(world.record().holders) == {"etl"}
    assert longest_expression(world) <= EXPRESSION


def test_a_claim_of_many_slots_removes_the_dead_holders_that_it_needs(world: World) -> None:
    dead_holders(world, 130, capacity=130)

    assert isinstance(Host(world, "etl").take(slots=130, capacity=130), Granted)
    assert longest_expression(world) <= EXPRESSION


def test_a_reader_removes_all_dead_readers(world: World) -> None:
    dead_holders(world, 30)

    granted = Host(world, "reader").take(capacity=SHARED)

    assert isinstance(granted, Granted)
    assert not granted.took_over, "a dead reader leaves no half-done work"
    assert set(world.record().holders) == {"reader"}


def test_a_heartbeat_while_other_holders_are_removed_keeps_the_lock(world: World) -> None:
    dead_holders(world, 130)
    late = sorted(world.record().holders)[-1]
    writer = Host(world, "writer")
    writing = writer.start(writer.operations.attempting.try_acquire(writer.claim(), owns_lease_id=False))
    writing.step()  # refused: the lock is taken
    assert writing.effect is not None
    world.client.update_item(
        TableName=TABLE,
        Key={"key": {"S": KEY}, "entry": {"S": "lock"}},
        UpdateExpression="SET #holders.#late.#version = :renewed",
        ExpressionAttributeNames={"#holders": "holders", "#late": late, "#version": "version"},
        ExpressionAttributeValues={":renewed": {"S": "renewed"}},
    )

    assert isinstance(writing.finish(), Busy)
    assert late in world.record().holders


# -- processes without a Date -----------------------------------------------------------------------------------------


def undated(world: World, wall_clock_offset: float) -> Host:
    """A host whose answers have no ``Date``, because a proxy removes it."""
    host = Host(world, "undated", wall_clock_offset)

    def send(request: object) -> object:
        world.dates = False
        try:
            reply = world.answer(request, host.now)  # type: ignore[arg-type]
        finally:
            world.dates = True
        host.clock.note(reply)
        return reply

    host.send = send  # type: ignore[method-assign,assignment]
    return host


def test_a_grant_without_a_date_is_not_reclaimed_by_a_process_with_dates(world: World) -> None:
    holder = undated(world, -60.0)
    assert isinstance(holder.take(), Granted)
    world.now += 1.0

    assert isinstance(Host(world, "other").take(), Busy)


def test_later_grants_without_a_date_are_as_safe_and_need_one_request(world: World) -> None:
    holder = undated(world, -60.0)
    holder.take()
    holder.release()
    requests = len(world.sent)
    assert isinstance(holder.take("again"), Granted)
    assert len(world.sent) == requests + 1
    world.now += 1.0

    assert isinstance(Host(world, "other").take(), Busy)


def test_a_token_granted_without_a_date_is_never_lowered(world: World) -> None:
    holder = undated(world, 3600.0)
    token = holder.take().token
    holder.release()

    assert Host(world, "other").take().token > token


def test_a_dead_holder_without_a_date_is_found_by_observation(world: World) -> None:
    undated(world, 3600.0).take()
    other = Host(world, "other")
    assert isinstance(other.take(), Busy)
    world.now += 31.0
    assert isinstance(other.take(), Granted)


def test_a_record_that_was_made_during_a_suspend_is_not_forgotten_at_once(world: World) -> None:
    """The host's clock gains a minute in a week, which is more than the age that the last token must have. (Found by a
    simulated history, seed 60093.)"""
    host, other = Host(world, "host", clock_rate=1.0001), Host(world, "other")
    other.take()
    other.release()
    forget = host.start(host.operations.admin.forget(KEY)).step()
    assert isinstance(forget.effect, Sleep)
    world.now += 7 * 24 * HOURS
    assert other.run(other.operations.admin.forget(KEY))
    other.take("next")
    other.release("next")
    released = world.now

    forget.effect = Sleep(0.0)  # its time passed during the week
    assert forget.finish()

    assert world.now > released + 10.0


def test_forget_without_a_date_uses_the_host_clock(world: World) -> None:
    """Without dates, a record may be deleted only if the hosts' clocks are right (docs/protocol.md)."""
    first = undated(world, 2.0)
    token = first.take().token
    first.release()
    waited = world.now

    host = undated(world, -2.0)
    assert host.run(host.operations.admin.forget(KEY))

    assert world.now - waited > 10.0
    assert undated(world, -2.0).take("next").token > token


# -- min_hold -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wall_clock_offset", [-3600.0, 3600.0])
def test_min_hold_is_kept_by_a_process_whose_first_request_is_the_release(
    world: World, wall_clock_offset: float
) -> None:
    holder = Host(world, "holder")
    holder.take(min_hold_ms=20_000)
    world.now += 5.0

    outcome = Host(world, "another process", wall_clock_offset).release("holder")

    assert isinstance(outcome, Released)
    assert outcome.hold_until_ms is not None
    world.now += 13.0
    assert isinstance(Host(world, "other").take(), Busy)


@pytest.mark.parametrize("wall_clock_offset", [-3600.0, 3600.0])
def test_a_first_request_releases_a_lock_that_was_held_long_enough(
    world: World, wall_clock_offset: float
) -> None:
    Host(world, "holder").take(min_hold_ms=20_000)
    world.now += 22.0
    requests = len(world.sent)

    assert Host(world, "another process", wall_clock_offset).release("holder") == Released()

    assert world.record().holders == {}
    assert len(world.sent) == requests + 2, "it reads the server's time first"


def test_a_first_request_releases_a_lock_without_min_hold_at_once(world: World) -> None:
    Host(world, "holder").take()
    requests = len(world.sent)

    assert Host(world, "another process", 3600.0).release("holder") == Released()

    assert len(world.sent) == requests + 1


# -- answers that come late -------------------------------------------------------------------------------------------


class Slow:
    """An SDK client whose answers take as long as `seconds` says, on a simulated clock."""

    def __init__(self, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.client, self.now, self.failures = client, 1000.0, 0
        self.seconds: Iterator[float] = iter(())
        self.meanwhile: Callable[[], None] = lambda: None
        monkeypatch.setattr("airflow_dynamo_lock.client.clock._clock", lambda: self.now)
        # The client waits for the thread of a request for this long, on the same clock.
        monkeypatch.setattr("airflow_dynamo_lock.core.lock.acquire._ANSWER_WITHIN", 60.0)

    def update_item(self, **params: Any) -> Any:
        if self.failures:
            self.failures -= 1
            raise EndpointConnectionError(endpoint_url="http://127.0.0.1")
        answer = self.client.update_item(**params)
        self.meanwhile()
        self.now += next(self.seconds, 0.1)
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)


@pytest.fixture
def slow(world: World, monkeypatch: pytest.MonkeyPatch) -> Slow:
    return Slow(world.client, monkeypatch)


def test_a_lease_that_ran_out_before_its_answer_is_released_and_acquired_again(slow: Slow) -> None:
    locks = LockClient(slow, table=TABLE, lease=10)
    slow.seconds = iter([11.0])

    lease = locks.acquire(KEY, timeout=60)

    assert lease.remaining() > 8
    assert len(locks.get(KEY).holders) == 1  # type: ignore[union-attr]


def test_an_acquire_times_out_without_a_lease_if_every_answer_is_late(slow: Slow) -> None:
    locks = LockClient(slow, table=TABLE, lease=10)
    slow.seconds = repeat(11.0)

    with pytest.raises(LockTimeoutError, match="its answer came after the lease's end"):
        locks.acquire(KEY, timeout=60)

    assert not locks.get(KEY).holders  # type: ignore[union-attr]


def test_try_acquire_retries_once_if_the_answer_is_late(slow: Slow) -> None:
    locks = LockClient(slow, table=TABLE, lease=10)
    slow.seconds = iter([11.0])
    lease = locks.try_acquire(KEY)
    assert lease is not None
    assert lease.remaining() > 8

    slow.seconds = repeat(11.0)
    for lease_id, left in ((None, []), ("mine", ["mine"])):
        with pytest.raises(LockUnavailableError, match="acquire it with a longer lease") as raised:
            locks.try_acquire("another", lease_id=lease_id)
        assert list(locks.get("another").holders) == left  # type: ignore[union-attr]
        assert raised.value.maybe_applied == bool(left)


def test_a_late_grant_with_the_callers_lease_id_is_not_released(slow: Slow) -> None:
    """Another process may work under that id. The next attempt finds its lease."""
    locks = LockClient(slow, table=TABLE, lease=10)
    slow.seconds = iter([11.0])

    lease = locks.acquire(KEY, timeout=60, lease_id="mine")

    assert lease.remaining() > 8
    assert list(locks.get(KEY).holders) == ["mine"]  # type: ignore[union-attr]


def test_a_process_enters_for_as_long_as_its_lease_lasts_without_a_heartbeat(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only for the grace, which is shorter: it limits how long the process relies on one heartbeat."""

    def pause(seconds: float) -> None:
        slow.now += seconds

    monkeypatch.setattr("airflow_dynamo_lock.client.threads.time", SimpleNamespace(sleep=pause))
    locks = LockClient(slow, table=TABLE, lease=30, release_grace=6)
    lease = locks.acquire(KEY)
    slow.failures = 25
    begun = slow.now

    entered = locks.enter(lease, "pid-1")

    assert slow.now - begun > 25
    assert 5 < entered.remaining() < 6

    slow.failures = 100
    begun = slow.now
    with pytest.raises(LockUnavailableError):
        locks.enter(lease, "pid-2")
    assert 28 < slow.now - begun < 30


def test_a_lease_is_lost_before_its_release_is_sent(slow: Slow) -> None:
    locks = LockClient(slow, table=TABLE, lease=30)
    lease = locks.acquire(KEY)
    left: list[float] = []
    slow.meanwhile = lambda: left.append(lease.remaining())

    locks.release(lease)

    assert left == [0.0]
    with pytest.raises(LockLostError, match="it was released"):
        lease.check()


def test_a_lease_is_lost_before_a_leave_that_releases_it_is_sent(slow: Slow) -> None:
    locks = LockClient(slow, table=TABLE, lease=30)
    lease = locks.enter(locks.acquire(KEY), "pid-1")
    left: list[float] = []
    slow.meanwhile = lambda: left.append(lease.remaining())

    locks.leave(lease, "pid-1", release=True)

    assert left == [0.0]


def test_a_release_that_fails_can_be_repeated(slow: Slow) -> None:
    locks = LockClient(slow, table=TABLE, lease=30)
    lease = locks.acquire(KEY)
    slow.failures = 2
    with pytest.raises(LockUnavailableError):
        locks.release(lease)

    assert lease.remaining() == 0
    assert locks.release(lease)


def test_a_reentrant_lease_is_not_returned_while_another_thread_releases_it(slow: Slow) -> None:
    locks = LockClient(slow, table=TABLE, lease=30)
    core, options = locks._core, ClaimOptions(reentrant=True)

    def clock() -> float:
        """Called while the lease is looked up. It gives the other thread half a second to release the lease."""
        if releasing.ident is None:
            releasing.start()
            releasing.join(0.5)
        return slow.now

    def release() -> None:
        if core.reentrant.count_release(lease) is None:
            term.lose("it was released")

    releasing, term = threading.Thread(target=release), Term(clock)
    lease = replace(locks.acquire(KEY, **options), term=term)
    term.renewed(slow.now, 30_000)
    core.reentrant.add(lease)

    again = core.reentrant.again(core.claims.of(KEY, options)[0])

    releasing.join()
    assert again is not None
    assert again.remaining()


# -- an outdated server time ------------------------------------------------------------------------------------------

WEEK = 7 * 24 * 3600.0


@pytest.mark.parametrize("what", ["enter", "heartbeat", "drain", "the heartbeat of a set"])
def test_a_process_suspended_for_a_week_reads_server_time_before_it_writes(world: World, what: str) -> None:
    """Its clock is slow by 5 %, so its estimate of server time is hours behind."""
    sleeper, holder = Host(world, "sleeper", clock_rate=0.95), Host(world, "holder")
    for key in (KEY, "b"):
        holder.run(holder.operations.attempting.try_acquire(holder.claim(key=key), owns_lease_id=False))
    if what == "drain":
        holder.enter("another process")
    lease = a_lease("holder")
    sleeper.run(sleeper.operations.requests.get(KEY))
    world.now += WEEK  # all hosts are suspended

    match what:
        case "enter":
            operation: Any = sleeper.operations.renewing.renew(KEY, "holder", 15_000, Enter("process"))
        case "heartbeat":
            operation = sleeper.operations.renewing.renew(KEY, "holder", 30_000, Heartbeat())
        case "drain":
            operation = sleeper.operations.releasing.release(KEY, "holder", 1, 15_000, confirmed=True)
        case _:
            operation = sleeper.operations.renewing.renew_all([lease, replace(lease, key="b")], Heartbeat())
    sleeper.run(operation)

    assert isinstance(Host(world, "other").take(), Busy)


# -- the head of a queue --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("priority", [0, -1, -5])
def test_a_grant_does_not_advance_the_head_past_a_new_waiter(world: World, priority: int) -> None:
    """The next waiter has a lower priority, so the position of a new waiter may be before it."""
    holder, first, last, new = (Host(world, name) for name in ("holder", "first", "last", "new"))
    holder.take()
    one = waiting(first)
    waiting(last, priority=-5)
    holder.release()
    one.step().step()  # it has read the queue, and is about to take the lock
    waiting(new, priority=priority)

    assert woken(one) is not None

    queue = holder.run(holder.queue.reader.waiters(KEY))
    assert [each.owner for each in queue] == (["new", "last"] if priority > -5 else ["last", "new"])
    head = world.record().queue_head
    assert head is not None
    assert head <= queue[0].place


# -- limits on settings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skew", [0, 4.9])
def test_a_max_clock_skew_below_the_minimum_is_refused(skew: float) -> None:
    with pytest.raises(LockValueError, match="max_clock_skew must be at least 5 s"):
        LockClient(None, table="locks", max_clock_skew=skew)


@pytest.mark.parametrize("slots", [1, 2])
def test_a_lease_of_a_semaphore_lasts_no_longer_than_a_record_is_kept(slots: int) -> None:
    """Also a lease of all slots: `set_capacity` may add slots while it is held."""
    client = LockClient(None, table="locks", lease=8 * 86_400)
    for lease in ({}, {"lease": 9 * 86_400}):
        with pytest.raises(
            LockValueError, match="lease must be at most 604800 s for a lock with several holders"
        ):
            client.try_acquire(KEY, slots=slots, capacity=2, **lease)  # type: ignore[call-overload]


@pytest.mark.parametrize("option", ["release_grace", "min_hold"])
def test_no_option_lasts_longer_than_a_record_is_kept(option: str) -> None:
    with pytest.raises(LockValueError, match=f"{option} must be .* at most 604800 s"):
        LockClient(None, table="locks").try_acquire(KEY, **{option: 8 * 86_400})  # type: ignore[call-overload]


# -- a wrong Date -----------------------------------------------------------------------------------------------------


def an_observer(world: World, after: float) -> Host:
    """Return a host that read the lock this many seconds before the holder's last heartbeat."""
    holder, other = Host(world, "holder"), Host(world, "other")
    holder.take()
    other.take()
    world.now += after
    holder.heartbeat()
    return other


def test_a_holder_with_an_observed_heartbeat_is_not_dead_by_a_wrong_date(world: World) -> None:
    other = an_observer(world, after=5.0)
    world.server_clock_offset = lambda: 120.0

    assert isinstance(other.take(), Busy)
    world.now += 31.0
    assert isinstance(other.take(), Granted), "no heartbeat for a whole lease"


def test_a_holder_that_died_long_after_the_last_read_is_reclaimed_at_once(world: World) -> None:
    other = an_observer(world, after=25.0)
    world.now += 3600.0

    assert isinstance(other.take(), Granted)


def test_a_heartbeat_whose_answers_have_lost_their_date_is_an_error(world: World) -> None:
    holder = Host(world, "holder")
    holder.take()
    world.dates = False
    world.now += 31.0

    with pytest.raises(LockUnavailableError, match="removes the header Date"):
        holder.heartbeat()
    world.dates = True
    assert isinstance(holder.heartbeat(), Renewed)
