"""What both clients do alike on both engines: acquire, share, wait, hand on, break, drain and refuse."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from itertools import dropwhile
from typing import Any

import aiobotocore.session
import boto3
import pytest

from airflow_dynamo_lock import (
    AsyncLockClient,
    CapacityMismatchError,
    Lease,
    LeaseSet,
    LockClient,
    LockLostError,
    LockNotHeldError,
    LockRecordError,
    LockTimeoutError,
    LockValueError,
)
from airflow_dynamo_lock.core.model.outcomes import Draining, Lost, Released, Renewed, StillHeld
from deployments.clients import SLOW, TABLE, core_of, lock_client
from deployments.engines import DynamoDBLocal, Engine
from deployments.patience import PATIENCE, wait_until
from deployments.proxy import Proxy
from tests.client.conftest import MakeClient
from tests.commands import output_of


def test_a_lock_is_acquired_read_and_released(make_client: MakeClient, key: str) -> None:
    client = make_client(owner="me")
    assert client.get(key) is None

    lease = client.try_acquire(key, data={"offset": 17}, about={"dag": "etl"})

    assert lease
    assert lease.remaining() > 20
    record = client.get(key)
    assert record
    holder = record.holders[lease.lease_id]
    assert (holder.owner, holder.slots, holder.about) == ("me", 1, {"dag": "etl"})
    assert (record.capacity, record.available, record.token) == (1, 0, lease.token)
    assert record.data == {"offset": 17}
    assert client.try_acquire(key) is None
    assert client.release(lease)
    assert lease.remaining() == 0
    assert isinstance(client.release(lease), Lost)


def test_a_lease_is_found_by_its_id(make_client: MakeClient, key: str) -> None:
    client, other = make_client(), make_client()
    lease = client.acquire(key, slots=2, capacity=3, lease=45)

    found = other.find(key, lease.lease_id)

    assert found.as_dict() == lease.as_dict()
    assert other.renew(found).remaining() > 0
    assert other.release(found)
    with pytest.raises(LockNotHeldError, match=f"{lease.lease_id} does not hold the lock"):
        other.find(key, lease.lease_id)


def test_a_semaphore_is_granted_up_to_its_capacity(
    client: LockClient, elsewhere: LockClient, key: str
) -> None:
    two = client.acquire(key, slots=2, capacity=3)
    one = elsewhere.try_acquire(key, capacity=3)
    assert one
    assert one.token > two.token
    assert elsewhere.try_acquire(key, capacity=3) is None

    client.release(two)
    assert elsewhere.try_acquire(key, slots=2, capacity=3)


def test_another_capacity_while_the_lock_is_in_use_is_refused(
    client: LockClient, elsewhere: LockClient, key: str
) -> None:
    elsewhere.acquire(key, capacity=2)
    with pytest.raises(CapacityMismatchError, match="capacity of 2, not 3"):
        client.try_acquire(key, capacity=3)
    with pytest.raises(CapacityMismatchError):
        client.acquire(key, capacity=3, timeout=0)


def test_a_heartbeat_lengthens_a_lease_and_replaces_the_data(
    client: LockClient, elsewhere: LockClient, key: str
) -> None:
    lease = client.acquire(key, lease=30, data={"offset": 1})

    longer = client.renew(lease, duration=90, data={"offset": 2})

    assert longer.remaining() > 60
    assert elsewhere.find(key, lease.lease_id).lease_ms == longer.lease_ms == 90_000
    record = elsewhere.get(key)
    assert record
    assert record.data == {"offset": 2}
    with pytest.raises(LockValueError, match="lasts 90 s and cannot be made shorter"):
        client.renew(lease, duration=45)
    with pytest.raises(LockValueError, match="data must be a map"):
        client.renew(lease, data=["secret"])  # type: ignore[arg-type]
    client.renew(longer, data={})
    record = elsewhere.get(key)
    assert record
    assert record.data is None


def test_a_heartbeat_changes_all_leases_of_a_set(client: LockClient, elsewhere: LockClient, key: str) -> None:
    keys = [f"{key}/a", f"{key}/b"]
    leases = client.acquire(keys, lease=30)

    longer = client.renew(leases, duration=90, data={"by": "me"})

    assert [each.lease_ms for each in longer] == [90_000, 90_000]
    for each in keys:
        record = elsewhere.get(each)
        assert record
        assert (record.data, record.holders[longer[each].lease_id].lease_ms) == ({"by": "me"}, 90_000)


def test_all_locks_of_the_table_can_be_listed(
    client: LockClient, engine: Engine, kind: str, key: str
) -> None:
    table = f"list-{kind}"
    with lock_client(kind, engine.endpoint_url, table=table) as lister:
        lister.create_table()
        assert list(lister.list_locks()) == []
        leases = {name: lister.acquire(name, data={"filler": "x" * 50_000}) for name in map(str, range(30))}
        lister.release(leases["7"])

        records = {record.key: record for record in lister.list_locks()}
        assert {record.key for record in lister.list_locks("2")} == {"2", *map(str, range(20, 30))}
        assert list(lister.list_locks("x")) == []

    assert set(records) == set(leases), "they take more than a page, which is a megabyte"
    assert {name for name, record in records.items() if not record.holders} == {"7"}


def test_a_waiter_is_granted_the_lock_that_another_process_releases(
    client: LockClient, elsewhere: LockClient, threads: ThreadPoolExecutor, key: str
) -> None:
    held = elsewhere.acquire(key)
    waiting = threads.submit(client.acquire, key, poll_interval=0.2, timeout=PATIENCE)
    wait_until(lambda: core_of(client).poller)
    elsewhere.release(held)

    assert waiting.result(PATIENCE).token == held.token + 1


def test_wait_returns_when_a_slot_is_free_and_takes_nothing(
    client: LockClient, elsewhere: LockClient, threads: ThreadPoolExecutor, key: str
) -> None:
    held = elsewhere.acquire(key)
    waiting = threads.submit(client.wait, key, poll_interval=0.1, timeout=PATIENCE)
    wait_until(lambda: core_of(client).poller)
    assert not waiting.done()
    elsewhere.release(held)

    record = waiting.result(PATIENCE)

    assert record
    assert (record.available, record.holders, record.token) == (1, {}, held.token)
    assert client.get(key) == record


def test_wait_returns_at_once_for_a_lock_without_a_record(client: LockClient, key: str) -> None:
    assert client.wait(key, timeout=0) is None


def test_wait_names_the_holder_at_its_timeout(client: LockClient, elsewhere: LockClient, key: str) -> None:
    elsewhere.acquire(key, slots=2, capacity=3)
    with pytest.raises(LockTimeoutError, match="elsewhere"):
        client.wait(key, slots=2, timeout=0.2, poll_interval=0.1)

    assert client.wait(key, slots=1, timeout=0)


def test_wait_returns_when_the_holder_is_dead(client: LockClient, elsewhere: LockClient, key: str) -> None:
    elsewhere.acquire(key, lease=0.5)

    record = client.wait(key, timeout=PATIENCE, poll_interval=0.1)

    assert record
    assert len(record.holders) == 1, "the dead holder is still in the record"


def test_a_lease_can_be_renewed_and_released_by_another_process(
    client: LockClient, elsewhere: LockClient, key: str
) -> None:
    handed_on = Lease.from_dict(json.loads(json.dumps(client.acquire(key).as_dict())))
    assert handed_on.remaining() == 0

    renewed = elsewhere.renew(handed_on)

    assert renewed.remaining() > 0
    assert elsewhere.release(renewed)
    with pytest.raises(LockLostError):
        client.renew(handed_on)


def test_a_lock_is_broken_by_its_lease_id_only(client: LockClient, elsewhere: LockClient, key: str) -> None:
    lease = elsewhere.acquire(key)
    with pytest.raises(LockNotHeldError, match="Locked by elsewhere"):
        client.break_lock(key, "some other lease")

    assert client.break_lock(key, lease.lease_id).owner == "elsewhere"

    with pytest.raises(LockLostError):
        elsewhere.renew(lease)
    assert client.try_acquire(key)


def test_a_release_with_processes_inside_drains_and_the_last_one_frees(
    client: LockClient, elsewhere: LockClient, key: str
) -> None:
    lease = client.acquire(key, release_grace=20)
    inside = [elsewhere.enter(lease, process) for process in ("pid-1", "pid-2")]
    assert all(10 < each.remaining() <= 20 for each in inside), "a process inside relies on the grace only"

    outcome = client.release(lease)

    assert isinstance(outcome, Draining)
    assert set(outcome.holder.processes) == {"pid-1", "pid-2"}
    with pytest.raises(LockLostError, match="being released"):
        elsewhere.enter(lease, "pid-3")
    elsewhere.renew(inside[1])
    assert isinstance(elsewhere.leave(inside[0], "pid-1"), Renewed)
    assert client.try_acquire(key) is None
    assert elsewhere.leave(inside[1], "pid-2") == Released()
    assert isinstance(elsewhere.leave(inside[1], "pid-2"), Lost)
    assert client.try_acquire(key)


def test_the_last_process_can_release_as_it_leaves(
    client: LockClient, elsewhere: LockClient, key: str
) -> None:
    lease = client.acquire(key)
    inside = [elsewhere.enter(lease, f"pid-{number}") for number in (1, 2)]

    assert isinstance(elsewhere.leave(inside[0], "pid-1", release=True), Draining)
    with pytest.raises(LockLostError, match="released"):
        inside[0].check()
    assert client.try_acquire(key) is None
    assert elsewhere.leave(inside[1], "pid-2", release=True) == Released()
    assert client.try_acquire(key)


def test_a_later_attempt_of_the_same_task_replaces_the_earlier_one(
    client: LockClient, elsewhere: LockClient, key: str
) -> None:
    client.acquire(key, lease_id="0001", attempt_of="dag/run/task")

    assert elsewhere.try_acquire(key, lease_id="0002", attempt_of="dag/run/task")
    assert client.try_acquire(key, lease_id="0001", attempt_of="dag/run/task") is None


def test_a_wait_for_several_slots_reclaims_several_dead_holders(
    client: LockClient, elsewhere: LockClient, key: str
) -> None:
    dead = [elsewhere.acquire(key, capacity=3, lease=0.5) for _ in range(2)]
    living = elsewhere.acquire(key, capacity=3)

    lease = client.acquire(key, slots=2, capacity=3, timeout=PATIENCE, poll_interval=0.1)

    assert {each.lease_id for each in lease.reclaimed} == {each.lease_id for each in dead}
    record = client.get(key)
    assert record
    assert set(record.holders) == {living.lease_id, lease.lease_id}
    assert record.available == 0


@pytest.mark.parametrize(
    "damaged",
    [
        {},
        {"LockID": {"S": "terraform"}},
        {"holders": {"S": "what?"}, "capacity": {"N": "1"}, "available": {"N": "1"}, "token": {"N": "1"}},
        {"holders": {"M": {}}, "capacity": {"N": "1"}, "available": {"N": "1"}, "token": {"S": "one"}},
        {"holders": {"M": {}}, "capacity": {"S": "1"}, "available": {"S": "1"}, "token": {"N": "1"}},
        {
            "holders": {"M": {"a": {"S": "b"}}},
            "capacity": {"N": "1"},
            "available": {"N": "0"},
            "token": {"N": "1"},
        },
    ],
    ids=["empty", "foreign", "holders", "token", "counters", "holder"],
)
def test_a_damaged_record_is_an_error_and_left_as_it_is(
    client: LockClient, sdk_client: Any, key: str, damaged: dict[str, object]
) -> None:
    item = {"key": {"S": key}, "entry": {"S": "lock"}, **damaged}
    sdk_client.put_item(TableName=TABLE, Item=item)

    for use in (client.try_acquire, client.get, lambda key: client.acquire(key, timeout=0)):
        with pytest.raises(LockRecordError, match="damaged"):
            use(key)
    unknown = Lease(key, "id", 1, "me", 1, 1, 30_000, 15_000, 0)
    for write in (client.renew, lambda lease: client.enter(lease, "pid-1"), client.release):
        with pytest.raises(LockRecordError, match="damaged"):
            write(unknown)

    stored = sdk_client.get_item(TableName=TABLE, Key={"key": {"S": key}, "entry": {"S": "lock"}})
    assert stored["Item"] == item


def test_bad_input_sends_nothing(make_client: MakeClient, proxy: Proxy, key: str) -> None:
    client = make_client(proxy, sdk=SLOW)
    for bad in (
        lambda: client.try_acquire(""),
        lambda: client.acquire(key, timeout=-1),
        lambda: client.acquire(key, slots=2),
        lambda: client.lock(key, lease=float("nan")).__enter__(),
        lambda: client.wait(key, slots=0),
        lambda: client.get("x" * 3000),
        lambda: client.break_lock("", "id"),
    ):
        with pytest.raises(LockValueError):
            bad()

    assert proxy.seen == []


def test_data_that_is_too_large_for_an_item_is_refused(client: LockClient, key: str) -> None:
    with pytest.raises(LockValueError, match="400 KB"):
        client.try_acquire(key, data={"blob": "x" * 410_000})


@pytest.mark.parametrize("engine", [DynamoDBLocal], indirect=True, ids=["dynamodb-local"])
def test_a_value_that_dynamodb_does_not_store_is_an_error_about_data(client: LockClient, key: str) -> None:
    """This DynamoDB Local stores no empty binary. AWS and moto do."""
    data = {"state": {"parts": [b""]}}
    for keys in (key, [key, f"{key} too"]):
        with pytest.raises(LockValueError, match=r"a value in `data` of the lock '.*empty binary"):
            client.try_acquire(keys, data=data)
    lease = client.acquire(key, data={"state": b"a"})
    with pytest.raises(LockValueError, match="a value in `data`"):
        client.renew(lease, data=data)
    assert client.release(lease)


def test_each_key_is_a_lock_of_its_own(client: LockClient, key: str) -> None:
    names = [
        f"{key}{end}" for end in ("", " ", "/a.b", "#x", ":y", "💡", "\n", "x" * 1000, "\u00e9", "e\u0301")
    ]
    leases = [client.acquire(name) for name in names]

    for name, lease in zip(names, leases, strict=True):
        record = client.get(name)
        assert record
        assert list(record.holders) == [lease.lease_id]


def test_grants_releases_reclaims_and_losses_are_logged_without_data(
    client: LockClient, elsewhere: LockClient, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "airflow_dynamo_lock")
    dead = elsewhere.acquire(key, lease=1.5, data={"password": "hunter2"})
    lease = client.acquire(key, timeout=PATIENCE, poll_interval=0.1)
    assert client.release(lease)
    assert not elsewhere.release(dead)

    ours = [record for record in caplog.records if record.name == "airflow_dynamo_lock"]
    logged = [record.getMessage() for record in ours if record.levelno >= logging.INFO]
    # On a busy machine, an earlier grant may have come too late for such a short lease.
    logged = list(dropwhile(lambda line: dead.lease_id not in line, logged))
    assert [line.split(key)[0] for line in logged] == [
        "Acquired the lock '",
        "Reclaimed the lock '",
        "Acquired the lock '",
        "Released the lock '",
        "The lock '",
    ]
    for line, expected in zip(logged, (dead, dead, lease, lease, dead), strict=True):
        assert expected.lease_id in line
    assert str(lease.token) in logged[2]
    assert "hunter2" not in "".join(record.getMessage() for record in ours)


# -- a wrong SDK client ---------------------------------------------------------------------------------------------

WRONG_CLIENTS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "a table's name": lambda: TABLE,
    "a resource": lambda: boto3.resource("dynamodb"),
    "a session": boto3.Session,
    "another service": lambda: boto3.client("s3"),
    "no client yet": lambda: aiobotocore.session.get_session().create_client("dynamodb"),
}


async def use(kind: str, sdk: Any, key: str, **options: Any) -> None:
    """Make a client of this kind on an SDK client, and try to acquire a lock."""
    if kind == "async":
        await AsyncLockClient(sdk, table=TABLE, **options).try_acquire(key)
    else:
        LockClient(sdk, table=TABLE, **options).try_acquire(key)


@pytest.mark.parametrize("wrong", WRONG_CLIENTS.values(), ids=WRONG_CLIENTS.keys())
async def test_what_is_no_client_of_the_service_is_refused(
    kind: str, key: str, wrong: Callable[[], Any]
) -> None:
    sdk = wrong()
    with pytest.raises(
        LockValueError, match=r"LockClient cannot use .*client\('dynamodb', config=sdk_config"
    ):
        await use(kind, sdk, key)
    if coroutine := getattr(sdk, "_coro", None):  # of the client that is not made
        coroutine.close()


async def test_a_client_of_dynamodb_is_refused_for_locks_in_s3(kind: str, key: str) -> None:
    with pytest.raises(LockValueError, match=r"cannot use .*client\('s3', config=sdk_config"):
        await use(kind, boto3.client("dynamodb"), key, table_format="s3")


async def test_a_client_of_the_other_sdk_is_refused_before_it_sends_anything(
    client: LockClient, engine: Engine, kind: str, key: str
) -> None:
    session: Any = aiobotocore.session.get_session()
    async with session.create_client("dynamodb", endpoint_url=engine.endpoint_url) as asynchronous:
        synchronous = boto3.client("dynamodb", endpoint_url=engine.endpoint_url)
        with pytest.raises(LockValueError, match=r"LockClient cannot use <.*client\('dynamodb', config="):
            await use(kind, synchronous if kind == "async" else asynchronous, key)
    assert client.get(key) is None


class Transparent:
    """A proxy that also shows the class of what it wraps, as those of wrapt do."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self._wrapped.__class__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


async def test_a_transparent_proxy_of_a_client_is_used_like_the_client(
    engine: Engine, kind: str, key: str
) -> None:
    session: Any = aiobotocore.session.get_session()
    async with session.create_client("dynamodb", endpoint_url=engine.endpoint_url) as asynchronous:
        synchronous = boto3.client("dynamodb", endpoint_url=engine.endpoint_url)
        right, wrong = (asynchronous, synchronous) if kind == "async" else (synchronous, asynchronous)
        await use(kind, Transparent(right), key)
        with pytest.raises(LockValueError, match="LockClient cannot use"):
            await use(kind, Transparent(wrong), key)


# -- what is no lease -----------------------------------------------------------------------------------------------

NO_LEASES: dict[str, Any] = {
    "None": None,
    "a lease id": "id",
    "a map": Lease("k", "id", 1, "me", 1, 1, 30_000, 15_000, 0).as_dict(),
    "an empty set": LeaseSet(()),
    "a set of other values": LeaseSet(("id",)),  # type: ignore[arg-type]
}
WITH_A_LEASE: dict[str, Callable[[LockClient, Any], object]] = {
    "release": lambda client, lease: client.release(lease),
    "renew": lambda client, lease: client.renew(lease),
    "keep_alive": lambda client, lease: client.keep_alive(lease),
    "enter": lambda client, lease: client.enter(lease, "process"),
    "leave": lambda client, lease: client.leave(lease, "process"),
}
WITH_A_LEASE_IN_TASKS: dict[str, Callable[[AsyncLockClient, Any], Coroutine[Any, Any, object]]] = {
    "until_gone": lambda client, lease: client.until_gone(lease),
    "keep_for_processes": lambda client, lease: client.keep_for_processes(lease, interval=1.0),
}


@pytest.mark.parametrize("method", WITH_A_LEASE)
@pytest.mark.parametrize("wrong", NO_LEASES)
def test_what_is_no_lease_is_refused(client: LockClient, method: str, wrong: str) -> None:
    with pytest.raises(LockValueError, match=r"the lease that acquire returned, not .*: try_acquire returns"):
        WITH_A_LEASE[method](client, NO_LEASES[wrong])


@pytest.mark.parametrize("method", WITH_A_LEASE_IN_TASKS)
@pytest.mark.parametrize("wrong", NO_LEASES)
async def test_what_is_no_lease_is_refused_by_the_methods_of_tasks(method: str, wrong: str) -> None:
    client = AsyncLockClient(None, table=TABLE)
    with pytest.raises(LockValueError, match=r"the lease that acquire returned, not .*: try_acquire returns"):
        await WITH_A_LEASE_IN_TASKS[method](client, NO_LEASES[wrong])


def test_a_lease_set_is_refused_by_the_methods_for_one_lease(client: LockClient, key: str) -> None:
    leases = client.acquire([key, f"{key}/b"])
    for method in ("enter", "leave"):
        with pytest.raises(LockValueError, match="needs the lease of one lock, not of 2"):
            WITH_A_LEASE[method](client, leases)
    assert client.release(leases)


def test_a_wrong_retry_for_leaves_the_lease_held(client: LockClient, key: str) -> None:
    lease = client.acquire(key, reentrant=True)
    client.acquire(key, reentrant=True)
    for wrong in ("5", -1, float("nan")):
        with pytest.raises(LockValueError, match="retry_for must be"):
            client.release(lease, retry_for=wrong)  # type: ignore[arg-type]
    assert lease.remaining() > 0
    assert client.release(lease) == StillHeld(1)
    with pytest.raises(LockValueError, match="retry_for must be"):
        client.release(lease, retry_for="5")  # type: ignore[arg-type]
    assert lease.remaining() > 0
    assert client.release(lease) == Released()


# -- the package ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["LockClient", "AsyncLockClient", "Lease", "LockTimeoutError", "sdk_config"])
def test_importing_a_client_imports_no_airflow(name: str) -> None:
    program = (
        f"import sys; from airflow_dynamo_lock import {name}\n"
        "print([name for name in sys.modules if name.split('.')[0] == 'airflow'])"
    )
    assert output_of(sys.executable, "-c", program).strip() == "[]"


def test_importing_the_protocol_imports_no_sdk() -> None:
    program = (
        "import sys, airflow_dynamo_lock.core.lock.admin, airflow_dynamo_lock.core.wait.poller\n"
        "import airflow_dynamo_lock.core.table.schema\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('boto3', 'botocore', 'aiobotocore', 'airflow')])"
    )
    assert output_of(sys.executable, "-c", program).strip() == "[]"
