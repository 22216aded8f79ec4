"""Usual hold times: the mean that releases write to the record, and the waits that queued claimants expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from airflow_dynamo_lock.client.leases import lease_of
from airflow_dynamo_lock.core.model.errors import LockValueError
from airflow_dynamo_lock.core.model.hold import Hold
from airflow_dynamo_lock.core.model.lease import Lease
from airflow_dynamo_lock.core.model.limits import ESTIMATES_DIFFER_MS, LAST_MS, SHARED
from airflow_dynamo_lock.core.model.outcomes import Busy, Draining, Granted, Lost, Released
from airflow_dynamo_lock.core.model.record import Holder, LockRecord, QueuePosition, Waiter
from airflow_dynamo_lock.core.model.text import duration
from airflow_dynamo_lock.core.queue.estimate import with_expected_waits
from airflow_dynamo_lock.core.queue.view import queue_positions
from proof.simulator.stepped import KEY, LOST, TABLE, Host, World, a_holder
from tests.core.test_queue import waiting

MIN = 60_000
NOW = 1_795_000_000_000

# -- the mean in the record -----------------------------------------------------------------------------------------


def release(host: Host, granted: Granted) -> Released | Draining | Lost:
    """Release a lease as the clients do."""
    lease = lease_of(granted, host.term())
    return host.run(host.operations.releasing.release_all([lease], confirmed=True))[0]


def hold(world: World, host: Host, minutes: float, **options: Any) -> None:
    """Acquire the lock, hold it for this many minutes, and release it."""
    granted = host.take(**options)
    world.now += minutes * 60
    host.heartbeat()
    assert isinstance(release(host, granted), Released)


def usual(world: World) -> float | None:
    """The mean in the record, in minutes; times of this world's servers are exact to a second."""
    usual_ms = world.record().usual_ms
    return None if usual_ms is None else round(usual_ms / MIN, 1)


@pytest.fixture
def host(world: World) -> Host:
    return Host(world, "a")


def test_the_first_release_writes_how_long_the_lease_was_held(world: World, host: Host) -> None:
    hold(world, host, 4)
    assert usual(world) == 4


def test_each_further_release_moves_the_mean_by_an_eighth(world: World, host: Host) -> None:
    hold(world, host, 4)
    hold(world, host, 12)
    assert usual(world) == 5
    hold(world, host, 5)
    assert usual(world) == 5
    for _ in range(30):
        hold(world, host, 20)
    assert usual(world) == pytest.approx(20, abs=1)


def test_a_free_lock_that_was_never_released_has_no_mean(world: World, host: Host) -> None:
    assert host.take().usual_ms is None
    assert world.record().usual_ms is None


def test_the_mean_costs_no_request(world: World, host: Host) -> None:
    hold(world, host, 4)
    world.sent.clear()

    granted = host.take()
    assert isinstance(Host(world, "b").take(), Busy)
    world.now += 1.0
    host.heartbeat()
    release(host, granted)

    assert world.actions() == ["UpdateItem"] * 4


def test_no_condition_names_the_mean(world: World, host: Host) -> None:
    hold(world, host, 4)
    hold(world, host, 4, min_hold_ms=5 * MIN)
    conditions = [each.params.get("ConditionExpression", "") for each in world.sent]
    assert [each for each in conditions if "usual" in each] == []


def test_a_lease_that_drains_counts_until_its_last_process_has_left(world: World, host: Host) -> None:
    granted = host.take()
    host.enter("pid-1")
    world.now += 60
    assert isinstance(release(host, granted), Draining)
    assert world.record().usual_ms is None
    world.now += 10

    assert host.leave("pid-1") == Released()

    assert world.record().usual_ms == pytest.approx(70_000, abs=2000)


def test_a_lease_that_cools_down_counts_until_its_slots_are_free(world: World, host: Host) -> None:
    granted = host.take(min_hold_ms=5 * MIN)
    world.now += 60
    outcome = release(host, granted)
    assert isinstance(outcome, Released)
    assert outcome.hold_until_ms
    assert usual(world) == 5


def test_a_release_without_an_answer_counts_once(world: World, host: Host) -> None:
    hold(world, host, 4)
    granted = host.take()
    world.now += 12 * 60
    host.heartbeat()
    world.faults.append(LOST)

    assert release(host, granted) == Released()

    assert usual(world) == 5


def test_leases_that_end_in_another_way_do_not_count(world: World, host: Host) -> None:
    host.take()
    world.now += 600
    host.run(host.operations.admin.break_(KEY, "a"))  # a person ends it
    assert world.record().usual_ms is None
    host.take("b", lease_ms=1000)
    world.now += 600
    host.take("c", lease_ms=1000)
    host.run(host.operations.attempting.undo([host.claim("c")]))  # no caller has received it
    assert list(world.record().holders) == []
    assert world.record().usual_ms is None


def test_the_leases_of_a_set_count_each_for_its_own_lock(world: World, host: Host) -> None:
    keys = (KEY, "another")
    granted = host.run(
        host.operations.attempting.try_acquire_all(
            [host.claim("set", key=key) for key in keys], owns_lease_id=True
        )
    )
    assert not isinstance(granted, Busy)
    world.now += 60
    leases = [lease_of(each, host.term()) for each in granted]
    host.run(host.operations.releasing.release_all(leases, confirmed=True))
    assert [world.record(key).usual_ms for key in keys] == pytest.approx([60_000] * 2, abs=2000)


def test_a_release_by_an_older_version_keeps_the_mean(world: World, host: Host) -> None:
    hold(world, host, 4)
    host.take()
    world.now += 600
    host.heartbeat()

    assert host.release() == Released(), "without a hold time, as older versions release"

    assert usual(world) == 4


@pytest.mark.parametrize(
    "damaged",
    [{"S": "4 min"}, {"N": "-1"}, {"N": "0.5"}, {"N": str(LAST_MS + 1)}, {"BOOL": True}, {"M": {}}],
    ids=str,
)
def test_a_damaged_mean_counts_as_unknown_and_is_replaced(world: World, host: Host, damaged: Any) -> None:
    hold(world, host, 4)
    world.client.put_item(TableName=TABLE, Item={**(world.item() or {}), "usual_ms": damaged})
    assert world.record().usual_ms is None

    hold(world, host, 12)

    assert usual(world) == 12


def test_impossible_times_do_not_change_the_mean() -> None:
    assert Hold("me", NOW, 4 * MIN).mean(NOW - ESTIMATES_DIFFER_MS - 1) is None
    assert Hold("me", NOW, None).mean(NOW) == 0
    assert Hold("me", NOW, 8).mean(NOW) == 7


def test_a_short_lease_that_seems_to_end_before_its_grant_counts_as_0() -> None:
    assert Hold("me", NOW, 8).mean(NOW - ESTIMATES_DIFFER_MS) == 7


def test_a_lease_carries_the_mean_to_the_process_that_releases_it(world: World, host: Host) -> None:
    hold(world, host, 4)
    lease = lease_of(host.take(), host.term())
    assert lease.usual_ms == pytest.approx(4 * MIN, abs=2000)
    assert Lease.from_dict(lease.as_dict()) == lease


def test_a_lease_that_an_older_version_has_stored_has_no_mean(world: World, host: Host) -> None:
    values = lease_of(host.take(), host.term()).as_dict()
    del values["usual_ms"]
    assert Lease.from_dict(values).usual_ms is None
    with pytest.raises(LockValueError, match="usual_ms must be a whole number"):
        Lease.from_dict({**values, "usual_ms": "long"})


# -- expected waits -------------------------------------------------------------------------------------------------


def holder(since: float = 0, **changed: Any) -> Holder:
    """A holder that has held its slots for this many minutes."""
    return a_holder(**{"acquired_at_ms": NOW - round(since * MIN), **changed})


def record(
    *holders: Holder, capacity: int = 1, usual_minutes: float | None = 4, **changed: Any
) -> LockRecord:
    """A lock with these holders."""
    return LockRecord(
        KEY,
        capacity,
        capacity - sum(each.slots for each in holders),
        {str(number): each for number, each in enumerate(holders)},
        1,
        usual_ms=None if usual_minutes is None else round(usual_minutes * MIN),
        **changed,
    )


def waiter(slots: int = 1, capacity: int = 1, number: int = 1) -> Waiter:
    return Waiter(KEY, f"0999/{number}/a", "w", "w", slots, capacity, 0, NOW, None, "p", "v", NOW)


def expected(lock: LockRecord | None, waiters: Sequence[Waiter]) -> list[float | None]:
    """The expected waits in minutes."""
    waits = [each.expected_wait_ms for each in with_expected_waits(lock, waiters, NOW)]
    return [None if each is None else each / MIN for each in waits]


READER = waiter(1, SHARED)


@pytest.mark.parametrize(
    ("lock", "waiters", "waits"),
    [
        (record(holder()), [waiter()] * 3, [4, 8, 12]),
        (record(holder(since=3)), [waiter()] * 3, [1, 5, 9]),
        # A holder that has held the lock for longer than usual may release it at any moment.
        (record(holder(since=9)), [waiter()] * 3, [None, 4, 8]),
        # The first waiter for a free lock may be granted it at any moment.
        (record(), [waiter()] * 2, [None, 4]),
        # No hold time is known.
        (record(holder(), usual_minutes=None), [waiter()] * 2, [None, None]),
        (None, [waiter()], [None]),
        (record(holder()), [], []),
        # A grant that seems to lie in the future has just been made; so has one of an unknown time.
        (record(holder(since=-1)), [waiter()], [4]),
        (record(holder(acquired_at_ms=None)), [waiter()], [4]),
        # `min_hold` keeps the slots for longer than usual.
        (record(holder(since=1, hold_until_ms=NOW + 9 * MIN)), [waiter()] * 2, [9, 13]),
        # Two of three slots are free at once, and each slot serves one waiter after the other.
        (record(holder(3), holder(1), holder(2), capacity=3), [waiter(1, 3)] * 5, [1, 2, 3, 5, 6]),
        (record(holder(3), capacity=3), [waiter(2, 3)] * 2 + [waiter(1, 3)], [None, 4, 4]),
        # A waiter for all slots makes those behind it wait.
        (record(holder(3), holder(1), capacity=3), [waiter(3, 3), waiter(1, 3)], [3, 7]),
        # Readers are granted together, before and after a writer.
        (record(holder()), [READER, READER, waiter(), READER, READER], [4, 4, 8, 12, 12]),
        (record(holder(3), holder(1), capacity=SHARED), [waiter(), READER], [3, 7]),
        # A pinned capacity counts for all, also if it was set below what is held.
        (record(holder(), capacity=2, capacity_pinned=True), [waiter(1, 5), waiter(5, 5)], [None, 4]),
        (record(holder(3), holder(1), capacity=1, capacity_pinned=True), [waiter(1, 2)], [3]),
    ],
)
def test_expected_waits_assume_the_usual_hold_time(
    lock: LockRecord | None, waiters: Sequence[Waiter], waits: list[float | None]
) -> None:
    assert expected(lock, waiters) == waits


def test_the_expected_waits_never_become_shorter_along_a_long_queue() -> None:
    lock = record(*[holder(since) for since in range(7)], capacity=7, usual_minutes=5)
    waits = expected(lock, [waiter(1 + number % 3, 7) for number in range(300)])
    known = [each for each in waits if each is not None]
    assert known == sorted(known)
    # Six hundred slots, seven at a time, for five minutes each.
    assert known[-1] == pytest.approx(600 / 7 * 5, rel=0.2)


def test_the_queue_is_read_with_the_lock_in_one_request(world: World) -> None:
    host, reader = Host(world, "a"), Host(world, "reader")
    hold(world, host, 4)
    host.take()
    paused = [waiting(Host(world, name)) for name in ("b", "c")]
    world.sent.clear()

    found = reader.run(reader.queue.reader.waiters(KEY))

    assert world.actions() == ["Query"]
    assert [each.expected_wait_ms for each in found] == pytest.approx([4 * MIN, 8 * MIN], abs=2000)
    assert all(each.effect for each in paused)
    positions = [each.describe() for each in queue_positions(found).values()]
    assert positions == ["1st of 2, about 4 min", "2nd of 2, about 8 min, behind b"]


def test_a_position_without_an_expected_wait_is_described() -> None:
    assert QueuePosition(KEY, 3, 5, None).describe() == "3rd of 5"
    assert QueuePosition(KEY, 3, 5, None, 12 * MIN).describe() == "3rd of 5, about 12 min"


def test_a_position_that_differs_only_in_its_expected_wait_is_the_same() -> None:
    assert QueuePosition(KEY, 3, 5, None, 12 * MIN) == QueuePosition(KEY, 3, 5, None, 11 * MIN)


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (0, "1 s"),
        (1_400, "1 s"),
        (59_700, "60 s"),
        (119_999, "120 s"),
        (2 * MIN, "2 min"),
        (12 * MIN + 29_000, "12 min"),
        (119 * MIN, "119 min"),
        (120 * MIN, "2 h"),
        (47 * 60 * MIN, "47 h"),
        (48 * 60 * MIN, "2 days"),
        (LAST_MS, "2932897 days"),
    ],
)
def test_a_duration_has_the_largest_unit_of_which_there_are_two(milliseconds: int, text: str) -> None:
    assert duration(milliseconds) == text
