"""Locks of every kind, as their users see them: in line, shared, by slots, in sets, again, and for a while at least."""

from __future__ import annotations

import re
import time
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest

from airflow_dynamo_lock import (
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
    """Each engine with one of the clients: these tests take seconds each."""
    return "sync" if isinstance(engine, MotoServer) else "async"


def waits(
    threads: ThreadPoolExecutor, client: LockClient, key: Any, **options: Any
) -> Future[Lease | LeaseSet]:
    """Let somebody wait for the lock; he stands in line when this returns."""
    watched = key if isinstance(key, str) else key[0]
    before = len(client.waiters(watched))
    acquire: Any = client.acquire
    waiting: Future[Any] = threads.submit(acquire, key, **{"poll_interval": 0.2, **options})
    wait_until(lambda: len(client.waiters(watched)) > before)
    return waiting


# -- in line ----------------------------------------------------------------------------------------------------------


def test_processes_get_the_lock_in_the_order_in_which_they_came(
    make_client: MakeClient, elsewhere: LockClient, threads: ThreadPoolExecutor, key: str
) -> None:
    held = elsewhere.acquire(key)
    clients = [make_client(owner=f"process {number}") for number in range(4)]
    waiting = [waits(threads, each, key, timeout=60) for each in clients]
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


def test_the_urgent_come_first_and_each_is_told_its_place(
    make_client: MakeClient, elsewhere: LockClient, threads: ThreadPoolExecutor, key: str
) -> None:
    held = elsewhere.acquire(key)
    told: list[QueuePosition] = []
    usual = make_client(owner="usual")
    one = waits(threads, usual, key, on_position=told.append)
    wait_until(lambda: told)
    assert told[-1].describe() == "1st of 1"
    urgent = make_client(owner="urgent")
    two = waits(threads, urgent, key, priority=5)
    wait_until(lambda: told[-1].number == 2)
    assert told[-1].describe() == "2nd of 2, behind urgent"
    elsewhere.release(held)

    lease = two.result(PATIENCE)
    wait_until(lambda: told[-1].number == 1)
    urgent.release(lease)
    assert one.result(PATIENCE)
    assert all(before != after for before, after in pairwise(told)), "nothing twice in a row"


def test_those_behind_one_who_gives_up_are_told_their_new_place(
    make_client: MakeClient,
    elsewhere: LockClient,
    threads: ThreadPoolExecutor,
    key: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("airflow_dynamo_lock.core.wait.poller._QUEUE_EVERY", 1.0)
    held = elsewhere.acquire(key)
    first = waits(threads, make_client(owner="first"), key)
    second = waits(threads, make_client(owner="second"), key, timeout=4)
    told: list[QueuePosition] = []
    third = waits(threads, make_client(owner="third"), key, on_position=told.append)
    wait_until(lambda: told)
    assert told[-1].describe() == "3rd of 3, behind second"

    with pytest.raises(LockTimeoutError):
        second.result(20)
    wait_until(lambda: told[-1].describe() == "2nd of 2, behind first")

    elsewhere.release(held)
    for each in (first, third):
        lease = each.result(20)
        assert isinstance(lease, Lease)
        elsewhere.break_lock(key, lease.lease_id)


def test_who_does_not_stand_in_line_costs_nothing_but_looks(
    make_client: MakeClient, elsewhere: LockClient, proxy: Proxy, key: str
) -> None:
    elsewhere.acquire(key)
    with pytest.raises(LockTimeoutError):
        make_client(proxy).acquire(key, fair=False, timeout=0.5, poll_interval=0.2)
    assert set(proxy.whats()) <= {"acquire", "GetItem", "BatchGetItem"}


def test_a_newcomer_is_told_who_is_to_have_a_free_lock_first(
    make_client: MakeClient, elsewhere: LockClient, threads: ThreadPoolExecutor, key: str
) -> None:
    held = elsewhere.acquire(key)
    slow = waits(threads, make_client(owner="prod/etl"), key, poll_interval=5)
    elsewhere.release(held)

    with pytest.raises(LockTimeoutError, match="Not locked; prod/etl waits for it already"):
        elsewhere.acquire(key, timeout=0)
    assert slow.result(PATIENCE)


def test_the_next_in_line_in_the_same_process_need_not_wait_for_a_poll(
    client: LockClient, threads: ThreadPoolExecutor, key: str
) -> None:
    held = client.acquire(key)
    waiting = waits(threads, client, key, poll_interval=600)
    client.release(held)

    assert waiting.result(PATIENCE)


# -- shared, by slots -------------------------------------------------------------------------------------------------


def test_many_share_a_lock_and_one_excludes_all(client: LockClient, elsewhere: LockClient, key: str) -> None:
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


# -- in sets ----------------------------------------------------------------------------------------------------------


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


def test_a_set_is_four_requests_and_one_for_each_heartbeat(
    make_client: MakeClient, proxy: Proxy, key: str
) -> None:
    client = make_client(proxy, sdk=SLOW)
    client.release(client.acquire(key))  # it knows the server's time now, or that the server does not tell it
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


def test_a_set_of_which_one_is_taken_away_is_lost(
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


# -- again, for a while at least, from the dead -----------------------------------------------------------------------


def test_the_same_owner_gets_its_lock_again_if_it_asks_for_that(
    client: LockClient, elsewhere: LockClient, key: str
) -> None:
    with client.lock(key, reentrant=True) as outer:
        with client.lock(key, reentrant=True) as inner:
            assert inner is outer
        assert client.try_acquire(key) is None, "who does not ask for it is not given it"
        assert client.try_acquire(key, reentrant=True, owner="another") is None
        assert elsewhere.try_acquire(key, reentrant=True) is None
        outer.check()
        with pytest.raises(LockValueError, match="1 of 1 slots"):
            client.try_acquire(key, reentrant=True, capacity=3)
    assert elsewhere.try_acquire(key)


def test_a_lock_is_held_for_a_while_at_least(client: LockClient, elsewhere: LockClient, key: str) -> None:
    begun = time.monotonic()
    with client.lock(key, min_hold=2.5):
        pass
    with elsewhere.lock(key, poll_interval=0.2, timeout=30) as lease:
        # The server's time has whole seconds.
        assert time.monotonic() - begun > 1.4
        assert not lease.took_over


def test_who_takes_over_from_the_dead_is_told_so(
    make_client: MakeClient, elsewhere: LockClient, key: str
) -> None:
    make_client(lease=1.0).acquire(key)
    lease = elsewhere.acquire(key, poll_interval=0.2, timeout=60)
    assert lease.took_over
    assert Lease.from_dict(lease.as_dict()).took_over
    elsewhere.release(lease)
    again = elsewhere.try_acquire(key)
    assert again
    assert not again.took_over


# -- what can never work ----------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (["a", "b", "a"], "name 'a' twice"),
        ([f"k{number}" for number in range(101)], "101 locks cannot be acquired together.*at most 100"),
        ([], "needs a key, text or a list of texts, not"),
        (["a", ""], "must not be empty"),
        (["a", 5], "must be text, not 5"),
        ("waiting:me", "must not begin with 'waiting:'"),
    ],
)
def test_bad_keys_are_refused_before_anything_is_sent(
    make_client: MakeClient, proxy: Proxy, keys: Any, says: str
) -> None:
    client = make_client(proxy, sdk=SLOW)
    with pytest.raises(LockValueError, match=says):
        client.try_acquire(keys)
    assert proxy.whats() == []


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
