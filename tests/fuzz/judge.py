"""Every public operation on a lock, and what each may do to an item.

The rule: a client answers with a typed error or a correct action, and never destroys what it does not understand. An
item that `get` reports as damaged stays unchanged. On a record that it understands, an operation changes what its row
in docs/protocol.md says, and nothing else: unknown attributes survive, and other holders stay unchanged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from airflow_dynamo_lock import AsyncLockClient, Lease, LockClient, LockError, LockRecord
from airflow_dynamo_lock.core.model.errors import (
    CapacityMismatchError,
    LockLostError,
    LockNotHeldError,
    LockRecordError,
    LockTimeoutError,
)
from airflow_dynamo_lock.core.model.outcomes import Lost
from airflow_dynamo_lock.core.table.codec import decode
from airflow_dynamo_lock.core.table.items import ATTRIBUTES
from airflow_dynamo_lock.core.table.native import NativeFormat
from tests.fuzz.items import Item

TABLE = "locks"
#: The process that enters and leaves in these tests.
PROCESS = "host:1:[#]. \u202e💡"


# -- the table ----------------------------------------------------------------------------------------------------


class Served:
    """An SDK client that turns exceptions inside the engine into an error 500, as a served engine would."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        def call(**params: Any) -> Any:
            try:
                return method(**params)
            except (ClientError, BotoCoreError):
                raise
            except Exception as broken:
                error = {"Code": "InternalServerError", "Message": f"the engine broke down: {broken!r}"}
                answer: Any = {"Error": error, "ResponseMetadata": {"HTTPStatusCode": 500}}
                raise ClientError(answer, name) from broken

        return call


class Awaited:
    """The same client for an `AsyncLockClient`: its methods are coroutines."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        async def call(**params: Any) -> Any:
            await asyncio.sleep(0)
            return getattr(self._client, name)(**params)

        return call


@dataclass
class Table:
    """A lock table, accessed by the SDK."""

    client: Any

    def store(self, key: str, item: Item, entry: str = "lock") -> bool:
        """Write an item unchanged. Returns False if the engine refuses it."""
        try:
            self.client.put_item(TableName=TABLE, Item={**item, "key": {"S": key}, "entry": {"S": entry}})
        except ClientError as refused:
            if refused.response["Error"]["Code"] != "ValidationException":
                raise
            return False
        return True

    def item(self, key: str, entry: str = "lock") -> Item | None:
        """Return the stored item."""
        found: Item | None = self.client.get_item(
            TableName=TABLE, Key={"key": {"S": key}, "entry": {"S": entry}}, ConsistentRead=True
        ).get("Item")
        return found

    def delete(self, key: str, entry: str = "lock") -> None:
        """Delete an item."""
        self.client.delete_item(TableName=TABLE, Key={"key": {"S": key}, "entry": {"S": entry}})

    def locks(self, **options: Any) -> LockClient:
        """Return a client that has not read any record yet."""
        return LockClient(self.client, table=TABLE, owner="fuzz", **options)

    def async_locks(self) -> AsyncLockClient:
        """Return an asynchronous client that has not read any record yet."""
        return AsyncLockClient(Awaited(self.client), table=TABLE, owner="fuzz")


def understood(item: Item | None) -> LockRecord | None:
    """Return the lock that an item describes, or None if the item is damaged or does not exist."""
    if item is None:
        return None
    try:
        return NativeFormat(TABLE).record(item, None)
    except LockRecordError:
        return None


# -- the operations -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Move:
    """One operation, and what it may change.

    :ivar attributes: attributes of the record that it may change, besides `holders`.
    :ivar mine: attributes of its own lease's holder that it may change.
    :ivar takes: whether it may add a holder.
    :ivar removes: whether it may remove the holder of its own lease.
    :ivar writes_blind: whether it writes for a holder without having read the record.
    """

    name: str
    run: Callable[[Table, str, Lease], Any]
    attributes: frozenset[str] = frozenset()
    mine: frozenset[str] = frozenset()
    takes: bool = False
    removes: bool = False
    writes_blind: bool = False


def _async(run: Callable[[AsyncLockClient, str, Lease], Coroutine[Any, Any, Any]]) -> Any:
    def in_a_loop(table: Table, key: str, lease: Lease) -> Any:
        async def main() -> Any:
            client = table.async_locks()
            # Some operations run until the lease ends.
            with suppress(TimeoutError):
                return await asyncio.wait_for(run(client, key, lease), 0.03)

        return asyncio.run(main())

    return in_a_loop


async def _list(client: AsyncLockClient) -> list[LockRecord]:
    return [record async for record in client.list_locks()]


# The attributes of a record that this package writes. Each of the other sets omits those that an operation must keep.
_OURS = frozenset(ATTRIBUTES) - {"key", "entry"}
_NOT_SLOTS = _OURS - {"capacity", "available", "token", "data"}
_TICKETS = frozenset({"last_ticket", "queue_head"})
_RENEWED = frozenset({"version", "renewed_at"})
_ACQUIRES: dict[str, Any] = {"attributes": _OURS, "mine": _RENEWED | {"acquired_at"}, "takes": True}
_RELEASES: dict[str, Any] = {"attributes": _NOT_SLOTS | {"available"}, "removes": True}

_CAPACITY = frozenset({"capacity", "available", "capacity_pinned", "expires_at"})

_MOVES = [
    Move("get", lambda table, key, _: table.locks().get(key)),
    Move("look", lambda table, key, _: table.locks().look(key)),
    Move("list", lambda table, _, __: list(table.locks().list_locks())),
    Move("wait", lambda table, key, _: table.locks().wait(key, timeout=0)),
    Move("look, shared", lambda table, key, _: table.locks().look(key, mode="shared")),
    Move("waiters", lambda table, key, _: table.locks().waiters(key)),
    Move("try_acquire", lambda table, key, _: table.locks().try_acquire(key), **_ACQUIRES),
    Move(
        "try_acquire of many slots",
        lambda table, key, _: table.locks().try_acquire(key, slots=3, capacity=4, data={"a": 1}),
        **_ACQUIRES,
    ),
    Move(
        "try_acquire as before",
        lambda table, key, lease: table.locks().try_acquire(
            key, lease_id=lease.lease_id, slots=lease.slots, capacity=max(lease.slots, lease.capacity)
        ),
        **_ACQUIRES,
    ),
    Move(
        "try_acquire, shared",
        lambda table, key, _: table.locks().try_acquire(key, mode="shared"),
        **_ACQUIRES,
    ),
    Move(
        "try_acquire, unfair",
        lambda table, key, _: table.locks().try_acquire(key, fair=False, min_hold=60),
        **_ACQUIRES,
    ),
    Move("acquire", lambda table, key, _: table.locks().acquire(key, timeout=0), **_ACQUIRES),
    Move(
        "acquire and wait",
        lambda table, key, _: table.locks().acquire(key, timeout=0.02, poll_interval=0.005, capacity=2),
        **_ACQUIRES,
    ),
    Move(
        "renew",
        lambda table, _, lease: table.locks().renew(lease),
        attributes=_NOT_SLOTS,
        mine=_RENEWED,
        writes_blind=True,
    ),
    Move(
        "enter",
        lambda table, _, lease: table.locks().enter(lease, PROCESS),
        attributes=_NOT_SLOTS,
        mine=_RENEWED | {"processes"},
        writes_blind=True,
    ),
    Move(
        "leave",
        lambda table, _, lease: table.locks().leave(lease, PROCESS),
        mine=frozenset({"processes"}) | _RENEWED | {"draining", "cooling_down", "lease_ms"},
        writes_blind=True,
        **_RELEASES,
    ),
    Move(
        "release",
        lambda table, _, lease: table.locks().release(lease),
        mine=_RENEWED | {"draining", "cooling_down", "lease_ms"},
        writes_blind=True,
        **_RELEASES,
    ),
    Move("set_capacity", lambda table, key, _: table.locks().set_capacity(key, 2), attributes=_CAPACITY),
    Move(
        "set_capacity to none",
        lambda table, key, _: table.locks().set_capacity(key, None),
        attributes=_CAPACITY,
    ),
    Move("break_lock", lambda table, key, lease: table.locks().break_lock(key, lease.lease_id), **_RELEASES),
    Move("async get", _async(lambda client, key, _: client.get(key))),
    Move("async list", _async(lambda client, _, __: _list(client))),
    Move("async try_acquire", _async(lambda client, key, _: client.try_acquire(key)), **_ACQUIRES),
    Move(
        "async keep",
        _async(lambda client, _, lease: client.keep_for_processes(lease, interval=lease.lease_ms / 4000)),
        attributes=_NOT_SLOTS,
        mine=_RENEWED,
        writes_blind=True,
    ),
    Move("async until_gone", _async(lambda client, _, lease: client.until_gone(lease, poll_interval=0.005))),
]

MOVES = {move.name: move for move in _MOVES}


@dataclass
class Played:
    """The result of an operation, with the item before and after it."""

    before: Item | None
    after: Item | None
    outcome: Any = None
    failure: Exception | None = None


def play(table: Table, key: str, move: Move, lease: Lease) -> Played:
    """Run an operation, and read the item before and after it."""
    played = Played(table.item(key), None)
    try:
        played.outcome = move.run(table, key, lease)
    except Exception as failure:
        played.failure = failure
    played.after = table.item(key)
    return played


def lease_of(item: Item, key: str, choose: Callable[[list[str]], str]) -> Lease:
    """Return a lease of the item as its holder has it, or a lease that the item does not contain."""
    held = item.get("holders", {}).get("M", {})
    lease_id = choose([*held, "nobody's"])
    values = held.get(lease_id, {}).get("M", {})
    slots = _count(values.get("slots")) or 1
    capacity = max(slots, _count(item.get("capacity")) or 1)
    lease_ms = _count(values.get("lease_ms")) or 30_000
    return Lease(key, lease_id, 17, "fuzz", slots, capacity, lease_ms, 15_000, 0)


def _count(attribute: Any) -> int | None:
    value = decode(attribute) if attribute and "N" in attribute else None
    return value if isinstance(value, int) and 1 <= value <= 10**9 else None


# -- the verdict --------------------------------------------------------------------------------------------------


def judge(key: str, move: Move, lease: Lease, played: Played, *, strict: bool = True) -> None:
    """Fail if an operation has violated the rule.

    :param strict: whether a holder must leave its damaged record unchanged. If not, its writes may change its own
        entry.
    """
    _judge_error(key, lease, played.failure)
    before, after = played.before, played.after
    if before is None:
        assert after is None or move.takes
        return
    assert after is not None, "the item is gone"
    record = understood(before)
    if record is None:
        if move.writes_blind and not strict:
            _judge_change(move, lease.lease_id, before, after, may_remove=())
            return
        # A list omits the item, with a warning in the log: one item must not hide all the others.
        may_succeed = (
            move.name.startswith("async")
            or isinstance(played.outcome, Lost)
            or (isinstance(played.outcome, list) and key not in [each.key for each in played.outcome])
        )
        assert played.failure is not None or may_succeed, f"the answer was {played.outcome!r}"
        assert after == before, "a damaged record was changed"
        return
    assert understood(after) is not None, "the record was damaged"
    if isinstance(played.outcome, Lease) and move.takes:
        _judge_grant(move, played.outcome, record, before, after)
    else:
        # A waiter takes a ticket, which changes nothing else.
        same = after == before or (move.name == "acquire and wait" and _differ(before, after) <= _TICKETS)
        assert not move.takes or same or move.name.startswith("async"), (
            "a refused acquire has changed the record"
        )
        refused = played.failure is not None and not isinstance(played.failure, LockLostError)
        assert not refused or same, "a failed operation has changed the record"
        _judge_change(move, lease.lease_id, before, after, may_remove=tuple(record.holders))


def _judge_error(key: str, lease: Lease, failure: Exception | None) -> None:
    if failure is None:
        return
    if not isinstance(failure, LockError):
        raise AssertionError(f"not a LockError: {failure!r}") from failure
    message = str(failure)
    assert message
    # Lease ids are shown as the caller gave them.
    assert len(message.replace(lease.lease_id, "…").splitlines()) == 1, message
    assert len(message) < 20_000
    if isinstance(failure, (LockRecordError, LockTimeoutError, LockNotHeldError, CapacityMismatchError)):
        assert repr(key) in message, message
    if isinstance(failure, LockRecordError):
        assert repr(TABLE) in message, message


def _judge_grant(move: Move, lease: Lease, record: LockRecord, before: Item, after: Item) -> None:
    now = understood(after)
    assert now is not None
    assert now.token == lease.token
    # An unverified token base comes from a host's clock. No caller has received its tokens if they are ahead of time.
    assert lease.token > record.token or (record.unverified and record.token > lease.acquired_at_ms)
    assert now.holders[lease.lease_id].slots == lease.slots
    reclaimed = {holder.lease_id for holder in lease.reclaimed}
    # No process works under a lease that is cooling down.
    reclaimed |= {holder.lease_id for holder in record.holders.values() if holder.cooling_down}
    _judge_change(move, lease.lease_id, before, after, may_remove=tuple(reclaimed))


def _judge_change(
    move: Move, lease_id: str, before: Item, after: Item, *, may_remove: tuple[str, ...]
) -> None:
    changed = _differ(before, after)
    assert changed <= move.attributes | {"holders"}, f"changed {changed}"
    if "holders" not in changed:
        return
    old, new = (item["holders"]["M"] for item in (before, after))
    for name in _differ(old, new):
        assert name == lease_id or (move.takes and name in may_remove) or move.name == "async try_acquire"
        if name in old and name in new:
            parts = _differ(old[name]["M"], new[name]["M"])
            assert parts <= move.mine, f"changed {parts} of the holder"
        else:
            assert move.takes if name in new else move.removes or move.takes


def _differ(before: Item, after: Item) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
