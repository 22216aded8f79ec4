"""A process that forks while it holds, or waits for, a lock. The fork releases nothing of its parent's, and the client
works in both processes.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from airflow_dynamo_lock import LockClient
from deployments.clients import lock_client
from deployments.engines import Engine, MotoServer
from deployments.patience import PATIENCE
from tests.client.child import Child

pytestmark = [
    pytest.mark.proof,
    # One engine is enough: these tests try processes.
    pytest.mark.parametrize("engine", [MotoServer], indirect=True, ids=["moto"]),
]

ENDINGS = ["sys.exit", "exception", "end of the block"]


@pytest.fixture
def child(engine: Engine) -> Iterator[Child]:
    with Child("sync", engine.endpoint_url) as child:
        yield child


@pytest.fixture
def client(engine: Engine) -> Iterator[LockClient]:
    """A client in the process of the test."""
    with lock_client("sync", engine.endpoint_url) as client:
        yield client


def is_held(client: LockClient, key: str) -> bool:
    record = client.get(key)
    return record is not None and bool(record.holders)


# -- the fork releases nothing of its parent's ----------------------------------------------------------------------


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_fork_that_leaves_the_block_does_not_release_the_lock(
    child: Child, client: LockClient, key: str, ending: str
) -> None:
    child.do("enter_block", key=key)
    assert child.do("fork_in_block", ending=ending) == 0
    assert is_held(client, key)

    child.do("leave_block")
    assert not is_held(client, key)


@pytest.mark.parametrize("ending", ["sys.exit", "end of the block"])
def test_a_fork_that_leaves_the_block_of_a_coroutine_does_not_release_the_lock(
    child: Child, engine: Engine, client: LockClient, key: str, ending: str
) -> None:
    child.do("fork_in_async_block", endpoint_url=engine.endpoint_url, key=key, ending=ending)
    assert is_held(client, key)


def test_a_fork_cannot_release_the_lock_of_its_parent(child: Child, client: LockClient, key: str) -> None:
    child.do("take", key=key)
    child.do("fork", what="release", about="released")
    assert child.receive("released") is False
    assert is_held(client, key)
    assert child.do("release") is True


def test_a_fork_cannot_leave_a_lease_that_its_parent_has_entered(
    child: Child, client: LockClient, key: str
) -> None:
    lease = child.do("take", key=key)
    child.do("enter")
    child.do("fork", what="leave", about="left")
    assert child.receive("left") == "LockValueError"
    record = client.get(key)
    assert record
    assert list(record.holders[lease["lease_id"]].processes) == ["process"]


def test_a_fork_that_closes_the_client_does_not_release_the_lock_of_its_parent(
    child: Child, client: LockClient, key: str
) -> None:
    child.do("enter_block", key=key)
    child.do("fork", what="close", about="closed")
    assert child.receive("closed") is None
    assert is_held(client, key)


def test_a_fork_in_an_operation_does_not_remove_the_queue_entries_of_its_parent(
    child: Child, client: LockClient, key: str
) -> None:
    client.acquire(key)
    child.do("wait_in_thread", key=key)
    child.do("fork_in_operation", key=key)
    assert len(client.waiters(key)) == 1


def test_a_fork_does_not_reenter_its_parents_lock(child: Child, client: LockClient, key: str) -> None:
    child.do("enter_block", key=key, reentrant=True)
    child.do("fork", what="take", about="taken", key=key, reentrant=True)
    assert child.receive("taken") is None


# -- the client works in both processes -----------------------------------------------------------------------------


def test_a_fork_waits_for_a_lock_while_its_parent_waits_for_another(
    child: Child, client: LockClient, key: str
) -> None:
    client.acquire(f"{key}/parent")
    lease = client.acquire(key)
    child.do("wait_in_thread", key=f"{key}/parent")
    pid = child.do("fork", what="acquire", about="acquired", key=key, timeout=PATIENCE, poll_interval=0.1)
    assert child.receive("waiting") == pid
    client.release(lease)
    assert child.receive("acquired").endswith(f":{pid}"), (
        "the fork has acquired the lock, as an owner of its own"
    )


def test_forks_of_one_process_queue_as_processes_of_their_own(
    child: Child, client: LockClient, key: str
) -> None:
    """Their parent has waited before, so it has an id as a waiter. The forks must not share it."""
    lease = client.acquire(key)
    child.do("wait_in_thread", key=key)
    client.release(lease)
    child.do("join_threads")
    client.break_lock(key, next(iter(record.holders)) if (record := client.get(key)) else "")

    lease = client.acquire(key)
    pids = set()
    for _ in range(2):
        pids.add(
            child.do("fork", what="acquire", about="acquired", key=key, timeout=PATIENCE, poll_interval=0.1)
        )
        assert child.receive("waiting") in pids
    assert len({waiter.process for waiter in client.waiters(key)}) == 2

    client.release(lease)
    first = child.receive("acquired")
    assert len(client.waiters(key)) == 1, "the first has not discarded the entry of the second"
    client.break_lock(key, next(iter(record.holders)) if (record := client.get(key)) else "")
    assert {first.rpartition(":")[2], child.receive("acquired").rpartition(":")[2]} == set(map(str, pids))


def test_a_fork_does_not_share_connections_with_its_parent(child: Child, key: str) -> None:
    before = child.do("connections", key=key)
    child.do("fork", what="connections", about="connected", key=key)
    own = child.receive("connected")
    after = child.do("connections", key=key)

    assert own
    assert before == after, "the parent keeps its own connections"
    assert not [each for each in own if each in before]
