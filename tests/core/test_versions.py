"""Deployments of different versions on one table (R13): no record is damaged, whichever is upgraded first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from airflow_dynamo_lock.core.model.errors import LockVersionError
from airflow_dynamo_lock.core.model.outcomes import Busy, Granted, Released, Renewed
from airflow_dynamo_lock.core.table import version
from airflow_dynamo_lock.core.table.native import NativeFormat
from proof.simulator.stepped import KEY, TABLE, Host, World

#: Operations on a record of a newer version, by name.
OPERATIONS: dict[str, Callable[[Host], Any]] = {
    "acquire": lambda host: host.take(),
    "acquire slots": lambda host: host.take(capacity=3),
    "wait": lambda host: host.start_acquire(timeout=5.0).finish(),
    "heartbeat": lambda host: host.heartbeat("newer"),
    "enter": lambda host: host.enter("pid-1", "newer"),
    "leave": lambda host: host.leave("pid-1", "newer"),
    "release": lambda host: host.release("newer"),
    "break": lambda host: host.run(host.operations.admin.break_(KEY, "newer")),
    "set the capacity": lambda host: host.run(host.operations.admin.set_capacity(KEY, 5)),
    "forget": lambda host: host.run(host.operations.admin.forget(KEY)),
    "read": lambda host: host.run(host.operations.requests.get(KEY)),
    "read the queue": lambda host: host.run(host.queue.reader.waiters(KEY)),
}


@contextmanager
def release_of_the_package(*, knows: int, writes: int) -> Iterator[None]:
    """Run the package as a release that knows and writes these versions of the format."""
    with patch.object(version, "KNOWN", knows), patch.object(version, "WRITTEN", writes):
        yield


def first_release() -> Any:
    return release_of_the_package(knows=1, writes=1)


def release_that_reads_the_next() -> Any:
    return release_of_the_package(knows=2, writes=1)


def release_that_writes_the_next() -> Any:
    return release_of_the_package(knows=2, writes=2)


def version_of(world: World) -> str:
    item = world.item()
    assert item is not None
    return str(item["format_version"]["N"])


def test_each_item_has_its_version(world: World) -> None:
    Host(world, "holder").take()
    Host(world, "waiter").start_acquire(timeout=60.0).until("PutItem").step()

    items = world.client.query(**NativeFormat(TABLE).read_queue(KEY, None, None).params)["Items"]
    assert [item["format_version"] for item in items] == [{"N": "1"}, {"N": "1"}]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_record_of_a_newer_version_is_refused_before_anything_is_written(
    world: World, operation: str
) -> None:
    with release_that_writes_the_next():
        Host(world, "newer").take()
    before = world.item()

    with pytest.raises(LockVersionError, match=r"format version 2, .* knows versions up to 1: upgrade"):
        OPERATIONS[operation](Host(world, "older"))

    assert world.item() == before


def test_a_write_that_was_built_before_the_upgrade_is_refused_after_it(world: World) -> None:
    older, newer = Host(world, "older"), Host(world, "newer")
    Host(world, "earlier").take("earlier")
    Host(world, "earlier").release("earlier")
    acquiring = older.start_acquire(timeout=0.0)
    with release_that_writes_the_next():
        newer.take()
        newer.release()
    before = world.item()

    with pytest.raises(LockVersionError):
        acquiring.finish()
    assert world.item() == before


def test_deployments_take_turns_while_one_has_the_release_that_reads_the_next_version(world: World) -> None:
    upgraded, other = Host(world, "upgraded"), Host(world, "other")
    for _ in range(2):
        with release_that_reads_the_next():
            assert isinstance(upgraded.take(), Granted)
        with first_release():
            assert isinstance(other.take(), Busy)
        with release_that_reads_the_next():
            assert isinstance(upgraded.heartbeat(), Renewed)
            assert upgraded.release() == Released()
        with first_release():
            assert isinstance(other.take(), Granted)
            assert other.release() == Released()
    assert version_of(world) == "1"


def test_a_release_that_writes_the_next_version_uses_older_records(world: World) -> None:
    with first_release():
        Host(world, "before").take("before", capacity=2)
    with release_that_writes_the_next():
        beside = Host(world, "beside").take("beside", capacity=2)
    assert isinstance(beside, Granted)
    assert version_of(world) == "1", "a record that others hold keeps its version"

    with first_release():
        assert Host(world, "before").release("before") == Released()
    with release_that_reads_the_next():
        assert Host(world, "beside").release("beside") == Released()
    with release_that_writes_the_next():
        assert isinstance(Host(world, "after").take("after", capacity=2), Granted)
    assert version_of(world) == "2", "an idle record is written in the new version"
    with release_that_reads_the_next():
        assert isinstance(Host(world, "other").take("other", capacity=2), Granted)


def test_an_upgrade_in_the_wrong_order_stops_the_older_deployment_and_damages_nothing(world: World) -> None:
    older, newer = Host(world, "older"), Host(world, "newer")
    with first_release():
        held = older.take()
    assert isinstance(held, Granted)
    with release_that_writes_the_next():
        assert isinstance(newer.take(), Busy), "the lease of the older deployment counts"
    with first_release():
        assert older.release() == Released(), "the record still has the older version"
    with release_that_writes_the_next():
        assert isinstance(newer.take(), Granted)
    with first_release(), pytest.raises(LockVersionError):
        older.take()
    with release_that_writes_the_next():
        assert newer.release() == Released()


def test_an_attribute_of_a_later_release_is_kept(world: World) -> None:
    host = Host(world)
    host.take()
    world.store(**(world.item() or {}) | {"colour": {"S": "red"}})

    host.heartbeat()
    host.release()
    host.take()

    assert (world.item() or {})["colour"] == {"S": "red"}
