"""Each role of docs/permissions.md has the permissions that it needs, and no more. The policies are read from the page.

`policies.Guarded` enforces actions, resources and leading keys. moto's IAM enforces the actions once more.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import boto3
import pytest
from moto import mock_aws
from moto.core import enable_iam_authentication

from airflow_dynamo_lock import Lease, LockAccessError, LockClient
from airflow_dynamo_lock.core.effects import WaitForSlots
from airflow_dynamo_lock.core.model.record import Waiter
from airflow_dynamo_lock.core.table.native import NativeFormat
from airflow_dynamo_lock.core.wait.poller import WaiterHandle
from tests.pages import ROOT
from tests.security.policies import Guarded, is_allowed

PAGE = ROOT / "docs" / "permissions.md"
TABLE = "airflow_locks"
REGION = "eu-central-1"
TEAM = "Holder of a team's own keys"
STREAM = "Stream reader"

SEVERAL = "try_acquire of several"

Call = Callable[[LockClient, str, Lease], Any]

#: Calls of the clients, with the actions that each one uses.
CALLS: dict[str, tuple[Call, set[str]]] = {
    "create_table": (
        lambda locks, _, __: locks.create_table(),
        {"CreateTable", "DescribeTable", "DescribeTimeToLive", "UpdateTimeToLive"},
    ),
    "check_table": (lambda locks, _, __: locks.check_table(), {"DescribeTable", "DescribeTimeToLive"}),
    "try_acquire": (lambda locks, key, _: locks.try_acquire(f"{key}/free"), {"UpdateItem"}),
    SEVERAL: (
        lambda locks, key, _: locks.try_acquire([f"{key}/a", f"{key}/b"]),
        {"UpdateItem", "BatchGetItem"},
    ),
    "acquire, waiting": (
        # As a task: with a lease id with which another process may have waited.
        lambda locks, key, _: _until_polled(
            locks, lambda timeout: locks.acquire(key, timeout=timeout, poll_interval=0.01, lease_id="ti")
        ),
        {"UpdateItem", "BatchGetItem", "Query", "PutItem", "DeleteItem"},
    ),
    "acquire, waiting outside the queue": (
        lambda locks, key, _: _until_polled(
            locks, lambda timeout: locks.acquire(key, timeout=timeout, poll_interval=0.01, fair=False)
        ),
        {"UpdateItem", "BatchGetItem"},
    ),
    # A process that has not received an answer yet requests server time first.
    "renew": (lambda locks, _, lease: locks.renew(lease), {"GetItem", "UpdateItem"}),
    "enter": (lambda locks, _, lease: locks.enter(lease, "p"), {"GetItem", "UpdateItem"}),
    "leave": (lambda locks, _, lease: locks.leave(lease, "p"), {"UpdateItem"}),
    "release": (lambda locks, _, lease: locks.release(lease), {"UpdateItem"}),
    "wait": (
        lambda locks, key, _: _until_polled(
            locks, lambda timeout: locks.wait(key, timeout=timeout, poll_interval=0.01)
        ),
        {"GetItem", "BatchGetItem"},
    ),
    "look": (lambda locks, key, _: locks.look(key), {"GetItem"}),
    "get": (lambda locks, key, _: locks.get(key), {"GetItem"}),
    "waiters": (lambda locks, key, _: locks.waiters(key), {"Query", "BatchGetItem"}),
    "list": (lambda locks, _, __: list(locks.list_locks()), {"Scan"}),
    "break_lock": (
        lambda locks, key, lease: locks.break_lock(key, lease.lease_id),
        {"GetItem", "UpdateItem"},
    ),
    "remove_waiter": (
        lambda locks, key, _: locks.remove_waiter(key, "their lease"),
        {"Query", "GetItem", "UpdateItem", "DeleteItem"},
    ),
    "survey": (lambda locks, _, __: locks.survey(), {"Scan"}),
    "set_capacity": (lambda locks, key, _: locks.set_capacity(f"{key}/free", 3), {"GetItem", "UpdateItem"}),
}
_HOLDS = {
    *("try_acquire", SEVERAL, "acquire, waiting", "acquire, waiting outside the queue"),
    *("renew", "enter", "leave", "release"),
}
_WAITS = {"wait", "look", "get"}

# A refused write returns the item, so these calls read nothing. If an engine does not return it, they use `GetItem`,
# which holders may use because they wait.
#: Calls that each role is for. `MORE` contains what its permissions allow besides.
ROLES = {
    "Holder": _HOLDS | _WAITS,
    "Waiter": _WAITS,
    "Reader": {"get", "look", "list", "survey", "waiters"},
    "Administrator": {
        *("create_table", "check_table", "get", "look", "list", "survey", "waiters"),
        *("break_lock", "remove_waiter", "set_capacity"),
    },
    TEAM: _HOLDS | _WAITS,
}
#: No policy can allow writing a lease but not breaking one: both are `UpdateItem`. See docs/security.md.
MORE = {
    "Holder": {"break_lock", "remove_waiter", "set_capacity", "waiters"},
    TEAM: {"break_lock", "remove_waiter", "set_capacity", "waiters"},
    "Reader": {"wait"},
    "Administrator": _HOLDS - {"acquire, waiting"} | {"wait"},
}


def policy_of(role: str) -> dict[str, Any]:
    """Return the policy below the role's heading."""
    _, _, below = PAGE.read_text().partition(f"\n## {role}\n")
    (block,) = re.findall(r"^```json\n(.*?)^```$", below.partition("\n## ")[0], re.M | re.S)
    policy: dict[str, Any] = json.loads(block)
    return policy


def actions_of(role: str) -> set[str]:
    statements = policy_of(role)["Statement"]
    return {action.removeprefix("dynamodb:") for each in statements for action in each["Action"]}


def _until_polled(locks: LockClient, wait: Callable[[float], object]) -> None:
    """Wait for a held lock until the client has polled it. On a busy machine that takes longer than a short timeout.

    :param wait: waits for this number of seconds.
    """
    sdk, polled = locks._client, threading.Event()
    read = sdk.batch_get_item

    def batch_get_item(**params: Any) -> Any:
        polled.set()
        return read(**params)

    timeout = 0.05
    with patch.object(sdk, "batch_get_item", batch_get_item):
        while not polled.is_set():
            with suppress(TimeoutError):
                wait(timeout)
            timeout *= 2


@pytest.fixture(scope="module")
def sdk() -> Iterator[Any]:
    """An SDK client of moto in this process, without authentication, with a lock table and another table."""
    with mock_aws():
        client = boto3.client("dynamodb", region_name=REGION)
        for table in (TABLE, "others_locks"):
            LockClient(client, table=table).create_table()
        yield client


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    """Key of a lock of the team that only this test uses."""
    return f"team-a/{request.node.name}"


def held(sdk: Any, key: str, table: str = TABLE) -> Lease:
    """Acquire a lock, and add a waiter that has sent no heartbeat for long. Return the lease."""
    lease = LockClient(sdk, table=table).try_acquire(key)
    assert lease is not None
    waiter = Waiter(key, "place", "their lease", "them", 1, 1, 0, 0, None, "waiting:them", "v", 1)
    sdk.put_item(**NativeFormat(table).put_entry(waiter).params)
    return lease


def is_refused(name: str, locks: LockClient, lease: Lease) -> bool:
    call, _ = CALLS[name]
    try:
        call(locks, lease.key, lease)
    except LockAccessError:
        return True
    return False


def may(role: str, name: str) -> bool:
    return name in ROLES[role] | MORE.get(role, set())


@pytest.mark.proof
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", CALLS)
def test_a_role_can_do_what_it_is_for_and_no_more(sdk: Any, key: str, role: str, name: str) -> None:
    locks = LockClient(Guarded(sdk, policy_of(role)), table=TABLE)
    assert is_refused(name, locks, held(sdk, key)) != may(role, name)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_uses_exactly_these_actions(sdk: Any, key: str, name: str) -> None:
    everything = {"Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}
    guarded = Guarded(sdk, everything)
    call, actions = CALLS[name]
    table = "new_locks" if name == "create_table" else TABLE
    call(LockClient(guarded, table=table), key, held(sdk, key))
    assert guarded.used == actions


@pytest.mark.parametrize("role", ROLES)
def test_a_role_has_no_unused_action(role: str) -> None:
    used = set().union(*(CALLS[name][1] for name in ROLES[role]))
    assert actions_of(role) == used


@pytest.mark.proof
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", CALLS)
def test_no_role_reaches_another_table(sdk: Any, key: str, role: str, name: str) -> None:
    locks = LockClient(Guarded(sdk, policy_of(role)), table="others_locks")
    assert is_refused(name, locks, held(sdk, key, "others_locks"))


@pytest.mark.proof
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("foreign", ["team-b/", "team-a", "team-ab/", "xteam-a/", "TEAM-A/"])
def test_a_team_reaches_only_its_own_keys(sdk: Any, name: str, foreign: str) -> None:
    locks = LockClient(Guarded(sdk, policy_of(TEAM)), table=TABLE)
    assert is_refused(name, locks, held(sdk, f"{foreign}{name}"))


def test_one_foreign_key_refuses_the_whole_batch() -> None:
    def batch(*keys: str) -> dict[str, Any]:
        wanted = [{"key": {"S": key}, "entry": {"S": "lock"}} for key in keys]
        return {"RequestItems": {TABLE: {"Keys": wanted}}}

    policy = policy_of(TEAM)
    assert is_allowed(policy, "BatchGetItem", batch("team-a/orders", "team-a/customers"))
    assert not is_allowed(policy, "BatchGetItem", batch("team-a/orders", "team-b/orders"))


def test_a_team_can_renew_the_presence_of_its_processes() -> None:
    """The keys of these leases do not have the prefix of the team."""
    policy = policy_of(TEAM)
    for key, allowed in (("waiting:5f0b", True), ("waiting", False), ("team-b/waiting:", False)):
        write = {"TableName": TABLE, "Key": {"key": {"S": key}, "entry": {"S": "lock"}}}
        assert is_allowed(policy, "UpdateItem", write) == allowed


def test_a_request_without_keys_is_refused_even_if_its_action_is_added() -> None:
    """`ForAllValues` is true without values. `Null` is the condition that excludes a scan."""
    policy = policy_of(TEAM)
    statement = policy["Statement"][0]
    statement["Action"].append("dynamodb:Scan")
    assert not is_allowed(policy, "Scan", {"TableName": TABLE})
    del statement["Condition"]["Null"]
    assert is_allowed(policy, "Scan", {"TableName": TABLE})


# -- the stream -----------------------------------------------------------------------------------------------------


def follows(sdk: Any, policy: dict[str, Any], table: str = "streamed_locks") -> tuple[bool, Guarded, Guarded]:
    """Return whether a client with this policy can follow a table's stream, and its two guarded SDK clients."""
    LockClient(sdk, table=table).create_table(streams=True)
    guarded = Guarded(sdk, policy), Guarded(boto3.client("dynamodbstreams", region_name=REGION), policy)
    locks = LockClient(guarded[0], table=table, streams=guarded[1])
    poller = locks._core.poller
    waiter = WaiterHandle(WaitForSlots("k", 1, True, 1.0, None), lambda _: None)
    poller.add(waiter)
    pauses = iter(range(3))

    def sleep(_: float, since: float) -> None:
        if next(pauses) == 2:
            poller.remove(waiter)

    locks._run(locks._core.stream_reader.follow(), sleep)
    return poller._reported_until > -math.inf, *guarded


def _for(policy: dict[str, Any], table: str) -> dict[str, Any]:
    changed: dict[str, Any] = json.loads(json.dumps(policy).replace(TABLE, table))
    return changed


def test_a_stream_reader_can_follow_the_stream_and_has_no_unused_action(sdk: Any) -> None:
    can, table, stream = follows(sdk, _for(policy_of(STREAM), "streamed_locks"))
    assert can
    assert table.used | stream.used == actions_of(STREAM)
    assert table.refused | stream.refused == set()


@pytest.mark.parametrize("action", sorted(actions_of(STREAM)))
def test_without_one_of_its_actions_the_stream_is_not_followed(sdk: Any, action: str) -> None:
    policy = _for(policy_of(STREAM), "streamed_locks")
    for statement in policy["Statement"]:
        statement["Action"] = [each for each in statement["Action"] if each != f"dynamodb:{action}"]
    can, table, stream = follows(sdk, policy)
    assert not can
    assert table.refused | stream.refused == {action}


def test_a_stream_reader_cannot_read_the_stream_of_another_table(sdk: Any) -> None:
    policy = policy_of(STREAM)
    can, table, _ = follows(sdk, policy)
    assert not can
    assert table.refused == {"DescribeTable"}
    arn = "arn:aws:dynamodb:eu-central-1:111122223333:table/{}/stream/2026-11-21T00:00:00.000"
    for action, parameter, ending in (
        ("DescribeStream", "StreamArn", ""),
        ("GetShardIterator", "StreamArn", ""),
        ("GetRecords", "ShardIterator", "|1|AAAA"),
    ):
        assert is_allowed(policy, action, {parameter: arn.format(TABLE) + ending})
        assert not is_allowed(policy, action, {parameter: arn.format("others_locks") + ending})
        assert not is_allowed(policy, action, {parameter: arn.format(TABLE + "_2") + ending})


@pytest.fixture(scope="module")
def users(sdk: Any) -> dict[str, LockClient]:
    """A client for each role, with a user of moto's IAM, which treats all DynamoDB resources as ``*``."""
    iam = boto3.client("iam", region_name=REGION)
    clients = {}
    for number, role in enumerate(role for role in ROLES if role != TEAM):
        policy = policy_of(role)
        policy["Statement"][0]["Resource"] = "*"
        name = f"user-{number}"
        iam.create_user(UserName=name)
        iam.put_user_policy(UserName=name, PolicyName="locks", PolicyDocument=json.dumps(policy))
        key = iam.create_access_key(UserName=name)["AccessKey"]
        aws = boto3.client(
            "dynamodb",
            region_name=REGION,
            aws_access_key_id=key["AccessKeyId"],
            aws_secret_access_key=key["SecretAccessKey"],
        )
        clients[role] = LockClient(aws, table=TABLE)
    return clients


@pytest.mark.proof
@pytest.mark.parametrize("role", [role for role in ROLES if role != TEAM])
# moto requires an action with the name of the transaction, which AWS does not have.
@pytest.mark.parametrize("name", [name for name in CALLS if name != SEVERAL])
def test_the_iam_of_moto_agrees_about_actions(
    sdk: Any, users: dict[str, LockClient], key: str, role: str, name: str
) -> None:
    lease = held(sdk, key)
    with enable_iam_authentication():
        refused = is_refused(name, users[role], lease)
    assert refused != may(role, name)
