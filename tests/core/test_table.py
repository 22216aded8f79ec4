"""Creating the table: what the creation waits for, for how long, and what happens if two create it at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from airflow_dynamo_lock.core.effects import Reply, Request, Sleep
from airflow_dynamo_lock.core.model.errors import LockAccessError, LockError, LockTableError
from airflow_dynamo_lock.core.table import schema as table
from airflow_dynamo_lock.core.table.native import NativeFormat
from proof.simulator.stepped import Host, Paused, World

NAME = "new-table"


@pytest.fixture
def client(moto_client: Any) -> Any:
    """Return the client of moto: the simulated table cannot create tables."""
    return moto_client


@pytest.fixture
def host(world: World) -> Iterator[Host]:
    yield Host(world)
    if NAME in world.client.list_tables()["TableNames"]:
        world.client.delete_table(TableName=NAME)


def _creating(host: Host) -> Paused[None]:
    return host.start(table.create(NativeFormat(NAME), now=host.now(), timeout=10.0))


def _describes(status: str) -> Reply:
    keys = [{"AttributeName": "key", "KeyType": "HASH"}, {"AttributeName": "entry", "KeyType": "RANGE"}]
    output: dict[str, Any] = {"Table": {"TableStatus": status, "KeySchema": keys}}
    return Reply(output, 0.0, 0.0)


def test_a_table_is_created_checked_and_completed(world: World, host: Host) -> None:
    _creating(host).finish()

    assert [action for action in world.actions() if not action.startswith("Describe")] == [
        "CreateTable",
        "UpdateTimeToLive",
    ]
    host.run(table.check(NativeFormat(NAME)))


def test_the_creation_waits_until_the_table_is_active() -> None:
    """DescribeTable is eventually consistent: at first it may not find the table, and then it is not active."""
    creating = table.create(NativeFormat(NAME), now=0.0, timeout=10.0)
    next(creating)
    effect = creating.send(Reply({}, 0.0, 0.0))
    assert isinstance(effect, Request)
    assert isinstance(creating.throw(table.TableMissingError("unknown")), Sleep)
    assert creating.send(0.5) == effect
    assert isinstance(creating.send(_describes("CREATING")), Sleep)
    assert creating.send(1.0) == effect
    after = creating.send(_describes("ACTIVE"))

    assert isinstance(after, Request)


def test_a_table_that_does_not_become_active_in_time_is_an_error() -> None:
    creating = table.create(NativeFormat(NAME), now=0.0, timeout=10.0)
    next(creating)
    creating.send(Reply({}, 0.0, 0.0))
    creating.send(_describes("CREATING"))
    creating.send(10.0)

    with pytest.raises(LockTableError, match=f"'{NAME}' is CREATING after 10 s"):
        creating.send(_describes("CREATING"))


@pytest.mark.parametrize("status", ["CREATING", "DELETING", "ARCHIVED"])
def test_a_table_that_is_not_active_is_refused(status: str) -> None:
    checking = table.check(NativeFormat(NAME))
    next(checking)

    with pytest.raises(LockTableError, match=f"is {status}, not ACTIVE"):
        checking.send(_describes(status))


def test_it_is_no_error_if_another_process_has_enabled_ttl_first(host: Host) -> None:
    late = _creating(host).until("UpdateTimeToLive")
    _creating(host).finish()

    late.interrupt(LockError("TimeToLive is already enabled")).finish()


def test_a_denied_permission_to_enable_ttl_is_an_error(host: Host) -> None:
    refused = _creating(host).until("UpdateTimeToLive")

    with pytest.raises(LockAccessError, match="not for you"):
        refused.interrupt(LockAccessError("not for you")).finish()


def test_a_table_that_another_process_has_just_created_is_used(host: Host) -> None:
    late = _creating(host)
    _creating(host).finish()

    late.finish()
