"""All kinds of locks, as users see them: queues, shared locks, semaphores, sets, reentrant locks and `min_hold`."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest

from airflow_dynamo_lock import (
    AsyncLockClient,
    CapacityMismatchError,
    Lease,
    LeaseSet,
    LockClient,
    LockLostError,
    LockTimeoutError,
    LockValueError,
    QueuePosition,
)
from deployments.clients import SLOW
from deployments.engines import Engine, MotoServer
from deployments.patience import PATIENCE, wait_until
from deployments.proxy import Proxy
from tests.client.conftest import MakeClient


@pytest.fixture
def kind(engine: Engine) -> str:
    """One kind of client per engine, because each of these tests takes seconds."""
    return "sync" if isinstance(engine, MotoServer) else "async"


def start_waiter(
    threads: ThreadPoolExecutor, client: LockClient, key: Any, **options: Any
) -> Future[Lease | LeaseSet]:
    """Start a waiter in a thread. It is queued when this returns."""
    watched = key if isinstance(key, str) else key[0]
    before = len(client.waiters(watched))
    acquire: Any = client.acquire
    waiting: Future[Any] = threads.submit(acquire, key, **{"poll_interval": 0.2, **options})
    wait_until(lambda: len(client.waiters(watched)) > before)
    return waiting


# -- queues -----------------------------------------------------------------------------------------------------------


def test_processes_are_granted_the_lock_in_arrival_order(
    make_client: MakeClient, elsewhere: LockClient, threads: ThreadPoolExecutor, key: str
) -> None:
    held = elsewhere.acquire(key)
    clients = [make_client(owner=f"process {number}") for number in range(4)]
    waiting = [start_waiter(threads, each, key, timeout=PATIENCE) for each in clients]
    waiters = elsewhere.waiters(key)
    assert [each.owner for each in waiters] == [f"process {number}" for number in range(4)]
    assert all(each.until is not None and each.since < each.until for each in waiters)
    elsewhere.release(held)

    tokens = []
    for client, each in zip(clients, waiting, strict=True):
        lease = each.result(PATIENCE)
        assert isinstance(lease, Lease)
        tokens.append(lease.token)
        assert elsewhere.try_acquire(key) is None
        client.release(lease)

    assert tokens == sorted(tokens)
    wait_until(lambda: elsewhere.waiters(key) == [])


def test_a_higher_priority_goes_first_and_positions_are_reported(
    make_client: MakeClient, elsewhere: LockClient, threads: ThreadPoolExecutor, key: str
) -> None:
    held = elsewhere.acquire(key)
    positions: list[QueuePosition] = []
    usual = make_client(owner="usual")
    one = start_waiter(threads, usual, key, on_position=positions.append)
    wait_until(lambda: positions)
    assert positions[-1].describe() == "1st of 1"
    urgent = make_client(owner="urgent")
    two = start_waiter(threads, urgent, key, priority=5)
    wait_until(lambda: positions[-1].number == 2)
    assert positions[-1].describe() == "2nd of 2, behind urgent"
    elsewhere.release(held)

    lease = two.result(PATIENCE)
    wait_until(lambda: positions[-1].number == 1)
    urgent.release(lease)
    assert one.result(PATIENCE)
    assert all(before != after for before, after in pairwise(positions)), (
        "no position is reported twice in a row"
    )


def test_waiters_behind_one_that_times_out_receive_their_new_positions(
    make_client: MakeClient,
    elsewhere: LockClient,
    threads: ThreadPoolExecutor,
    key: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("airflow_dynamo_lock.core.wait.positions._QUEUE_EVERY", 1.0)
    held = elsewhere.acquire(key)
    first = start_waiter(threads, make_client(owner="first"), key)
    second = start_waiter(threads, make_client(owner="second"), key, timeout=15)
    positions: list[QueuePosition] = []
    third = start_waiter(threads, make_client(owner="third"), key, on_position=positions.append)
    wait_until(lambda: positions)
    assert positions[-1].describe() == "3rd of 3, behind second"

    with pytest.raises(LockTimeoutError):
        second.result(PATIENCE)
    wait_until(lambda: positions[-1].describe() == "2nd of 2, behind first")

    elsewhere.release(held)
    for each in (first, third):
        lease = each.result(PATIENCE)
        assert isinstance(lease, Lease)
        elsewhere.break_lock(key, lease.lease_id)


def test_an_unfair_waiter_sends_only_attempts_and_reads(
    make_client: MakeClient, elsewhere: LockClient, proxy: Proxy, key: str
) -> None:
    elsewhere.acquire(key)
    with pytest.raises(LockTimeoutError):
        make_client(proxy).acquire(key, fair=False, timeout=0.5, poll_interval=0.2)
    assert set(proxy.whats()) <= {"acquire", "GetItem", "BatchGetItem"}


def test_the_refusal_of_a_free_lock_names_the_first_waiter(
    make_client: MakeClient, elsewhere: LockClient, threads: ThreadPoolExecutor, key: str
) -> None:
    held = elsewhere.acquire(key)
    slow = start_waiter(threads, make_client(owner="prod/etl"), key, poll_interval=5)
    elsewhere.release(held)

    with pytest.raises(LockTimeoutError, match="Not locked; prod/etl waits for it already"):
        elsewhere.acquire(key, timeout=0)
    assert slow.result(PATIENCE)


def test_the_next_waiter_in_the_same_process_does_not_wait_for_its_poll(
    client: LockClient, threads: ThreadPoolExecutor, key: str
) -> None:
    held = client.acquire(key)
    waiting = start_waiter(threads, client, key, poll_interval=600)
    client.release(held)

    assert waiting.result(PATIENCE)


# -- shared locks and semaphores --------------------------------------------------------------------------------------


def test_readers_share_a_lock_and_a_writer_excludes_them(
    client: LockClient, elsewhere: LockClient, key: str
) -> None:
    with client.lock(key, mode="shared"), elsewhere.lock(key, mode="shared") as shared:
        record = client.get(key)
        assert record
        assert (record.mode, len(record.holders)) == ("shared", 2)
        assert shared.token == record.token
        with pytest.raises(LockTimeoutError):
            client.acquire(key, timeout=0)
        assert client.look(key, mode="shared")[1]
        assert not client.look(key)[1]
    with client.lock(key):
        assert elsewhere.try_acquire(key, mode="shared") is None
        assert not elsewhere.look(key, mode="shared")[1]


def test_the_capacity_of_a_semaphore_is_set_while_it_is_held(
    client: LockClient, elsewhere: LockClient, key: str
) -> None:
    first = client.acquire(key, capacity=2, slots=2)
    assert elsewhere.try_acquire(key, capacity=2) is None

    record = elsewhere.set_capacity(key, 3)

    assert (record.capacity, record.available, record.capacity_pinned) == (3, 1, True)
    second = elsewhere.try_acquire(key, capacity=2)
    assert second
    assert elsewhere.set_capacity(key, 1).available == -2
    assert client.release(first)
    assert elsewhere.try_acquire(key, capacity=2) is None
    assert elsewhere.release(second)
    assert client.set_capacity(key, None).capacity_pinned is False


# -- sets -------------------------------------------------------------------------------------------------------------


def test_several_locks_are_held_together(client: LockClient, elsewhere: LockClient, key: str) -> None:
    keys = [f"{key}/{name}" for name in "abc"]
    with client.lock(keys) as leases:
        assert [lease.key for lease in leases] == keys
        assert leases[keys[1]].token > 0
        leases.check()
        assert leases.remaining() > 10
        for each in keys:
            assert elsewhere.try_acquire(each) is None
        with pytest.raises(LockTimeoutError, match=rf"{re.escape(keys[1])}' was not free"):
            elsewhere.acquire([keys[1], f"{key}/d"], timeout=0)
        assert elsewhere.get(f"{key}/d") is None
    for each in keys:
        assert elsewhere.try_acquire(each)


def test_a_set_is_three_requests_and_one_for_each_heartbeat(
    make_client: MakeClient, proxy: Proxy, key: str
) -> None:
    client = make_client(proxy, sdk=SLOW)
    client.release(client.acquire(key))  # now it knows server time, or that the engine sends no dates
    first = len(proxy.whats())
    leases = client.acquire([f"{key}/{name}" for name in "abcde"])
    client.renew(leases)
    assert client.release(leases)

    transaction = "TransactWriteItems"
    assert proxy.whats()[first:] == [transaction, "BatchGetItem", transaction, transaction]


@pytest.mark.proof
def test_sets_that_overlap_take_turns_whatever_their_order(
    make_client: MakeClient, threads: ThreadPoolExecutor, key: str
) -> None:
    names = [f"{key}/{name}" for name in "abc"]
    inside: list[str] = []

    def work(client: LockClient, keys: list[str]) -> None:
        for _ in range(4):
            with client.lock(keys, poll_interval=0.1, timeout=120):
                assert not set(keys) & set(inside)
                inside.extend(keys)
                for each in keys:
                    inside.remove(each)

    orders = [names, names[::-1], names[1:], [names[2], names[0]], names[:1]]
    working = [threads.submit(work, make_client(), keys) for keys in orders]
    for each in working:
        each.result(PATIENCE)


def test_a_set_is_lost_if_one_of_its_leases_is_broken(
    client: LockClient, elsewhere: LockClient, key: str
) -> None:
    keys = [f"{key}/a", f"{key}/b"]
    leases = client.acquire(keys)
    elsewhere.break_lock(keys[0], leases[keys[0]].lease_id)

    with pytest.raises(LockLostError, match=re.escape(keys[0])):
        client.renew(leases)
    assert leases.remaining() == 0
    assert not client.release(leases)
    assert elsewhere.try_acquire(keys)


# -- reentrant locks, min_hold, dead holders --------------------------------------------------------------------------


def test_a_reentrant_acquire_returns_the_owners_lease(
    client: LockClient, elsewhere: LockClient, key: str
) -> None:
    with client.lock(key, reentrant=True) as outer:
        with client.lock(key, reentrant=True) as inner:
            assert inner is outer
        assert client.try_acquire(key) is None, "the second acquire is not reentrant"
        assert client.try_acquire(key, reentrant=True, owner="another") is None
        assert elsewhere.try_acquire(key, reentrant=True) is None
        outer.check()
        with pytest.raises(LockValueError, match="1 of 1 slots"):
            client.try_acquire(key, reentrant=True, capacity=3)
    assert elsewhere.try_acquire(key)


def test_min_hold_delays_the_next_grant(client: LockClient, elsewhere: LockClient, key: str) -> None:
    begun = time.monotonic()
    with client.lock(key, min_hold=2.5):
        pass
    with elsewhere.lock(key, poll_interval=0.2, timeout=30) as lease:
        # Server time has whole seconds.
        assert time.monotonic() - begun > 1.4
        assert not lease.took_over


def test_a_lease_that_reclaims_is_marked_took_over(
    make_client: MakeClient, elsewhere: LockClient, key: str
) -> None:
    make_client(lease=1.0).acquire(key)
    lease = elsewhere.acquire(key, poll_interval=0.2, timeout=PATIENCE)
    assert lease.took_over
    assert Lease.from_dict(lease.as_dict()).took_over
    elsewhere.release(lease)
    again = elsewhere.try_acquire(key)
    assert again
    assert not again.took_over


# -- refused arguments ------------------------------------------------------------------------------------------------


def _nested(levels: int) -> list[Any]:
    return [_nested(levels - 1)] if levels else []


WRONG = [
    ({"slots": 3, "capacity": 2}, "3 slots can never be free in a lock with a capacity of 2"),
    ({"mode": "shared", "slots": 2, "capacity": 5}, "A shared lock has no slots to count"),
    ({"mode": "shared", "capacity": 5}, "A shared lock has no slots to count"),
    ({"mode": "read"}, "mode must be 'shared' or 'exclusive', not 'read'"),
    ({"priority": "high"}, "priority must be a whole number from -999 to 999, not 'high'"),
    ({"priority": 1000}, "priority must be a whole number from -999 to 999, not 1000"),
    ({"priority": True}, "priority must be a whole number"),
    ({"fair": "no"}, "fair must be True or False, not 'no'"),
    ({"reentrant": 1}, "reentrant must be True or False, not 1"),
    ({"min_hold": -1}, "min_hold must be a finite time"),
    ({"lease": 0.005, "timeout": 0}, "lease must be at least 0.1 s, not 0.005 s"),
    ({"release_grace": timedelta(milliseconds=99)}, "release_grace must be at least 0.1 s, not 0.099 s"),
    ({"on_busy": "x"}, "on_busy must be a function, not 'x'"),
    ({"on_position": 5}, "on_position must be a function, not 5"),
    ({"owner": "x" * 1025}, "The owner has 1 to 1024 bytes, and .* has 1025"),
    ({"owner": ""}, "The owner has 1 to 1024 bytes, and '' has 0"),
    ({"owner": 5}, "The owner must be text, not 5"),
]


@pytest.mark.parametrize(("options", "says"), WRONG)
def test_bad_input_is_refused_before_anything_is_sent(
    make_client: MakeClient, proxy: Proxy, key: str, options: dict[str, Any], says: str
) -> None:
    client = make_client(proxy, sdk=SLOW)
    for each in (key, [key, f"{key}/b"]):
        with pytest.raises(LockValueError, match=says):
            client.acquire(each, **options)
    assert proxy.whats() == []


@pytest.mark.parametrize("client_class", [LockClient, AsyncLockClient])
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lease": 0.099}, "lease must be at least 0.1 s, not 0.099 s"),
        ({"release_grace": 0.001}, "release_grace must be at least 0.1 s, not 0.001 s"),
        ({"owner": "ü" * 513}, "The owner has 1 to 1024 bytes, and .* has 1026"),
        ({"owner": ""}, "The owner has 1 to 1024 bytes, and '' has 0"),
        ({"owner": 5}, "The owner must be text, not 5"),
    ],
)
def test_a_wrong_default_of_a_client_is_refused(
    client_class: Any, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(LockValueError, match=says):
        client_class(None, table="locks", **options)


def test_the_shortest_lease_is_a_tenth_of_a_second() -> None:
    LockClient(None, table="locks", lease=0.1, release_grace=timedelta(milliseconds=100))


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (["a", "b", "a"], "name 'a' twice"),
        ([f"k{number}" for number in range(101)], "101 locks cannot be acquired together.*at most 100"),
        ([], "needs a key, which must be text or a list of texts, not"),
        (["a", ""], "must not be empty"),
        (["a", 5], "must be text, not 5"),
        ("waiting:me", "must not begin with 'waiting:'"),
        ({"a"}, "must be text or a list of texts, not {'a'}"),
        (5, "must be text or a list of texts, not 5"),
    ],
)
def test_bad_keys_are_refused_before_anything_is_sent(
    make_client: MakeClient, proxy: Proxy, keys: Any, says: str
) -> None:
    client = make_client(proxy, sdk=SLOW)
    with pytest.raises(LockValueError, match=says):
        client.try_acquire(keys)
    assert proxy.whats() == []


def test_an_unknown_option_is_refused_with_those_of_the_method(client: LockClient, key: str) -> None:
    wrong: dict[str, Any] = {"wait_time": 3}
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: client.try_acquire(key, **wrong), ""),
        (lambda: client.acquire(key, **wrong), ", timeout, poll_interval, on_busy, on_position, holding"),
        (
            lambda: client.lock(key, **wrong).__enter__(),
            ", timeout, poll_interval, on_busy, on_position, holding, on_lost, on_danger, safe_time",
        ),
    ]
    for call, further in calls:
        with pytest.raises(LockValueError) as refused:
            call()
        assert str(refused.value).startswith("There is no option 'wait_time' for a lock; there are slots, ")
        assert str(refused.value).endswith(f", reentrant, only_existing{further}.")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"a": {1}}, "The lock's data has a value of type set, which DynamoDB cannot store: use text, "),
        ({"a": _nested(31)}, "The lock's data has more than 31 levels of lists and maps"),
        ({"a": 10**39 + 1}, "The lock's data has a number .*: round it, or store it as text"),
        ({"": 1}, "The lock's data or `about` has a key that is not text, or empty"),
        (
            {"a": "\ud800"},
            "The lock's data or `about` has a text that is not valid Unicode: remove the lone surrogate",
        ),
        ({"\ud800": 1}, "The lock's data or `about` has a key that is not valid Unicode"),
    ],
)
def test_data_that_cannot_be_stored_is_named_with_advice(
    client: LockClient, key: str, data: dict[str, Any], says: str
) -> None:
    with pytest.raises(LockValueError, match=says):
        client.try_acquire(key, data=data)


def test_a_set_cannot_be_reentrant(client: LockClient, key: str) -> None:
    with pytest.raises(LockValueError, match="reentrant is for one key"):
        client.try_acquire([key, f"{key}/b"], reentrant=True)


def test_a_mode_that_differs_from_how_the_lock_is_used_is_an_error(
    client: LockClient, elsewhere: LockClient, key: str
) -> None:
    with (
        elsewhere.lock(key, capacity=3),
        pytest.raises(
            CapacityMismatchError, match="as a semaphore with a capacity of 3, not as a shared lock"
        ),
    ):
        client.try_acquire(key, mode="shared")
