"""The path from a process to DynamoDB: the SDK, which retries a request once; a network that delays and loses
requests and answers; and servers that throttle requests, fail, and have clocks that differ.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from functools import lru_cache
from itertools import count
from types import SimpleNamespace
from typing import Any

from botocore import exceptions as aws

from airflow_dynamo_lock.core.table.expressions import LOCK_ENTRY
from proof.simulator.dynamodb import (
    Cancelled,
    ItemKey,
    ReadTime,
    Refused,
    Table,
    Throttled,
    Written,
    item_key,
)
from proof.simulator.expressions import InvalidExpression, Item
from proof.simulator.streams import Stream, StreamGone
from proof.simulator.world import BEGIN, Process, World

TABLE = "locks"
ENDPOINT = "the simulated DynamoDB"
#: The SDK's read timeout in seconds, and how often it sends a request in all: as in `sdk.SDK_SETTINGS`.
READ_TIMEOUT, ATTEMPTS = 2.0, 2

#: Called for each item that a write has changed: with the sender, the parameters, and the item before and
#: after the write. A transaction makes one call for each of its items, at the same time, each with the
#: parameters of that item.
OnWrite = Callable[[Process, Mapping[str, Any], "Item | None", "Item | None"], None]


@dataclass(frozen=True)
class FaultRates:
    """The probability of each fault of a request. A request without a fault is answered within 30 ms.

    :ivar slow: the request takes up to a second to arrive.
    :ivar lost: the request never arrives.
    :ivar answer_lost: the request is applied, and its answer is lost.
    :ivar late: the request arrives after the SDK has timed out.
    :ivar reset: the connection is reset, before or after the request is applied.
    :ivar throttled: DynamoDB throttles the request.
    :ivar failed: DynamoDB answers with an internal error; the request may have been applied.
    :ivar denied: DynamoDB denies access.
    :ivar conflicted: another transaction works on the same item when the request arrives. Only transactions,
        and other writes to an item that a transaction has written before, have this fault.
    """

    slow: float = 0.0
    lost: float = 0.0
    answer_lost: float = 0.0
    late: float = 0.0
    reset: float = 0.0
    throttled: float = 0.0
    failed: float = 0.0
    denied: float = 0.0
    conflicted: float = 0.0


#: No faults.
NO_FAULTS = FaultRates()
#: The faults that any request may have. A random number chooses by position, so the order determines the
#: histories.
REQUEST_FAULTS = tuple(fault for fault in FaultRates.__dataclass_fields__ if fault != "conflicted")
#: How reports and logs name each fault.
LABELS = {
    "slow": "request slow",
    "lost": "request lost",
    "answer_lost": "answer lost",
    "late": "request late",
    "reset": "connection reset",
    "throttled": "request throttled",
    "failed": "request failed",
    "denied": "request denied",
    "conflicted": "transaction conflict",
}


#: Called for each request that arrives, before it is answered: with the task or thread that sent it, the
#: action, its parameters, and the true time at which it was sent.
OnArrival = Callable[[object, str, Mapping[str, Any], float], None]


class Network:
    """The path from all processes to one table, and the servers of the table.

    :param on_write: called for each item that a write has changed.
    :param dates: whether answers have a ``Date`` header. DynamoDB sends one, DynamoDB Local does not.
    :param shows_refused: whether the answer to a refused write contains the item, outside a transaction.
        DynamoDB returns it, DynamoDB Local does not.
    :param apart: greatest difference between the clocks of two servers, in seconds.
    :ivar fault_rates: the present probabilities of faults.
    :ivar on_arrival: called for each request that arrives.
    :ivar tokens: idempotency tokens for the transactions that the SDK sends.
    :ivar stream: the table's stream; None if it has none.
    """

    def __init__(
        self, world: World, table: Table, on_write: OnWrite, *, dates: bool, shows_refused: bool, apart: float
    ) -> None:
        self.world, self.table, self.on_write = world, table, on_write
        self.dates, self.shows_refused, self.apart = dates, shows_refused, apart
        self.fault_rates = NO_FAULTS
        self.on_arrival: OnArrival = lambda *_: None
        self.tokens = map(str, count(1))
        self.stream: Stream | None = None
        self._transacted: set[ItemKey] = set()

    def send(
        self, process: Process, action: str, params: Mapping[str, Any], sender: object
    ) -> asyncio.Future[Any]:
        """Send a request once.

        :param sender: the task or thread that sends it.
        :returns: future of DynamoDB's answer, or of an exception of the SDK.
        """
        world, rng, sent = self.world, self.world.random, process.true_now
        answer = process.create_future()
        fault = self._draw_fault()
        if not process.can_send:
            fault = "late" if rng.random() < 0.5 else "lost"
        elif not process.can_receive and fault not in ("lost", "late", "reset"):
            fault = "answer_lost"
        if fault:
            world.faults[LABELS[fault]] += 1
            world.log(f"{_what(action, params)}: {LABELS[fault]}", process)
        arrives = sent + rng.uniform(0.001, 0.015)
        times_out = sent + READ_TIMEOUT / process.machine.rate

        def carry_out(respond: bool) -> None:
            self.on_arrival(sender, action, params, sent)
            response = self.answer(process, action, params, sent)
            if respond:
                answered = world.now + rng.uniform(0.001, 0.015)
                world.at(answered, process, resolve, answer, response)

        match fault:
            case "":
                world.at(arrives, None, carry_out, True)
            case "slow":
                world.at(sent + rng.uniform(0.015, 1.0), None, carry_out, True)
            case "lost" | "answer_lost" | "late":
                if fault == "answer_lost":
                    world.at(arrives, None, carry_out, False)
                elif fault == "late":
                    latest = rng.choice([0.1, 0.25, 1.0]) * world.assumptions.late
                    arrives = sent + READ_TIMEOUT + rng.random() * (latest - READ_TIMEOUT)
                    world.at(arrives, None, carry_out, False)
                timeout = aws.ReadTimeoutError(endpoint_url=ENDPOINT)
                world.at(times_out, process, resolve, answer, timeout)
            case "reset":
                if rng.random() < 0.5:
                    world.at(arrives, None, carry_out, False)
                closed = aws.ConnectionClosedError(endpoint_url=ENDPOINT)
                world.at(arrives + 0.01, process, resolve, answer, closed)
            case "throttled":
                world.at(arrives, process, resolve, answer, _error(action, "ThrottlingException", 400))
            case "denied":
                world.at(arrives, process, resolve, answer, _error(action, "AccessDeniedException", 400))
            case "failed":
                if rng.random() < 0.5:
                    world.at(arrives, None, carry_out, False)
                world.at(arrives + 0.01, process, resolve, answer, _error(action, "InternalServerError", 500))
        return answer

    def _draw_fault(self) -> str:
        """Choose the fault of a request at random; empty for none."""
        rates = self.fault_rates
        if rates is NO_FAULTS:
            return ""
        draw = self.world.random.random()
        for fault in REQUEST_FAULTS:
            draw -= getattr(rates, fault)
            if draw < 0:
                return fault
        return ""

    def answer(self, process: Process, action: str, params: Mapping[str, Any], sent: float) -> Any:
        """Carry out a request that has arrived.

        :param sent: true time at which the request was sent.
        :returns: DynamoDB's answer, or a `ClientError` if DynamoDB refuses the request.
        """
        world, rng = self.world, self.world.random
        metadata: dict[str, Any] = {"HTTPStatusCode": 200, "HTTPHeaders": {}}
        if self.dates and not process.strips_date:
            server = world.now + rng.choice((-0.5, 0.0, 0.5)) * self.apart
            metadata["HTTPHeaders"] = {"date": _date(int(BEGIN + server))}
        try:
            match action:
                case "UpdateItem" | "PutItem" | "DeleteItem":
                    output = self._write(process, action, params)
                case "TransactWriteItems":
                    output = self._transact(process, params)
                case "GetItem":
                    item = self.table.get(
                        params["Key"], None if params.get("ConsistentRead") else self._stale_time()
                    )
                    output = {"Item": item} if item else {}
                case "BatchGetItem":
                    wanted = params["RequestItems"][TABLE]
                    items = self.table.batch_get(wanted["Keys"], self._read_times(wanted, sent))
                    output = {"Responses": {TABLE: items}}
                case "Query":
                    output = self.table.query(params, self._read_times(params, sent))
                case "DescribeTable":
                    output = {"Table": {} if self.stream is None else self.stream.description()}
                case _:
                    assert self.stream is not None
                    output = self.stream.answer(action, params, faulty=self.fault_rates is not NO_FAULTS)
        except StreamGone as gone:
            return _error(action, str(gone), 400, metadata)
        except _Failure as failure:
            return _error(action, failure.code, 400, metadata, failure.more, failure.message)
        except Throttled:
            world.faults["partition throttled"] += 1
            return _error(action, "ThrottlingException", 400, metadata)
        except InvalidExpression as invalid:
            world.errors.append(f"{invalid}: {params}")
            return _error(action, "ValidationException", 400, metadata, message=str(invalid))
        return {**output, "ResponseMetadata": metadata}

    def _write(self, process: Process, action: str, params: Mapping[str, Any]) -> dict[str, Any]:
        if self._conflict([item_key(params)]) is not None:
            raise _Failure("TransactionConflictException")
        try:
            written = self.table.write(action.removesuffix("Item"), params, self.world.now)
        except Refused as refused:
            self.world.log(f"{_what(action, params)}: refused", process)
            shown = _shown(params, refused) if self.shows_refused else {}
            raise _Failure("ConditionalCheckFailedException", shown) from None
        self._report(process, action, [written])
        match params.get("ReturnValues"):
            case "ALL_NEW":
                returned = written.after
            case "ALL_OLD":
                returned = written.before
            case _:
                returned = None
        return {} if returned is None else {"Attributes": returned}

    def _transact(self, process: Process, params: Mapping[str, Any]) -> dict[str, Any]:
        items, token = params["TransactItems"], params["ClientRequestToken"]
        writes = [write for item in items for write in item.values()]
        no_reason: dict[str, Any] = {"Code": "None"}
        resent = self.table.has_committed(token, self.world.now)
        conflict = None if resent else self._conflict([item_key(write) for write in writes], transaction=True)
        if conflict is not None:
            reasons = [no_reason] * len(items)
            reasons[conflict] = {
                "Code": "TransactionConflict",
                "Message": "Transaction is ongoing for the item",
            }
            raise _cancelled(reasons)
        try:
            written = self.table.transact(items, token, self.world.now)
        except Cancelled as cancelled:
            self.world.log(f"{_what('TransactWriteItems', params)}: refused", process)
            raise _cancelled(
                [
                    no_reason
                    if refused is None
                    else {
                        "Code": "ConditionalCheckFailed",
                        "Message": "The conditional request failed",
                        **_shown(write, refused),
                    }
                    for write, refused in zip(writes, cancelled.refusals, strict=True)
                ]
            ) from None
        self._transacted.update(each.at for each in written)
        self._report(process, "in a transaction", written)
        return {}

    def _conflict(self, keys: list[ItemKey], *, transaction: bool = False) -> int | None:
        """Choose at random whether another transaction works on one of these items at present.

        Without transactions no random number is drawn.

        :returns: index of the item in conflict, or None.
        """
        rng, probability = self.world.random, self.fault_rates.conflicted
        may_conflict = transaction or keys[0] in self._transacted
        if not probability or not may_conflict or rng.random() >= probability:
            return None
        self.world.faults[LABELS["conflicted"]] += 1
        return rng.randrange(len(keys))

    def _report(self, process: Process, action: str, written: Iterable[Written]) -> None:
        """Log the items that a write has changed, and pass them to `on_write`."""
        for each in written:
            if self.world.log_line is not None:
                self.world.log(f"{_what(action, each.params)}: applied: {_short(each.after)}", process)
            self.on_write(process, each.params, each.before, each.after)

    # -- the time as of which a read shows an item ------------------------------------------------------------

    def _read_times(self, params: Mapping[str, Any], sent: float) -> ReadTime:
        """Return the function that chooses this time for each item of a read of several items.

        A consistent read shows each item as of another time since the request was sent. So it may show one
        item from before a transaction and another one from after it.
        """
        if params.get("ConsistentRead"):
            return lambda: self.world.random.uniform(sent, self.world.now)
        return self._stale_time

    def _stale_time(self) -> float | None:
        """Choose the time for an eventually consistent read; None for the present."""
        rng = self.world.random
        stale = rng.random() < 0.3
        return self.world.now - rng.random() * self.world.assumptions.stale if stale else None


class _Failure(Exception):
    """DynamoDB refuses a request, with this error code, and with these further fields in its answer."""

    def __init__(self, code: str, more: Mapping[str, Any] | None = None, message: str | None = None) -> None:
        self.code, self.more, self.message = code, more, message or code


def _cancelled(reasons: list[dict[str, Any]]) -> _Failure:
    codes = ", ".join(reason["Code"] for reason in reasons)
    message = f"Transaction cancelled, please refer cancellation reasons for specific reasons [{codes}]"
    return _Failure("TransactionCanceledException", {"CancellationReasons": reasons}, message)


def _shown(params: Mapping[str, Any], refused: Refused) -> dict[str, Any]:
    """Return the item in the answer to a refused write, if the write asked for it and there is one."""
    wanted = params.get("ReturnValuesOnConditionCheckFailure") == "ALL_OLD"
    return {"Item": refused.item} if wanted and refused.item else {}


class Sdk:
    """An aiobotocore client with the methods that `AsyncLockClient` uses. Its exceptions, retries and
    metadata are those of botocore.

    :param sender: the thread that sends the requests; None for the present asyncio task.
    """

    meta = SimpleNamespace(region_name="nowhere")

    def __init__(self, network: Network, process: Process, sender: object = None) -> None:
        self._network, self._process, self._sender = network, process, sender

    async def update_item(self, **params: Any) -> Any:
        return await self._call("UpdateItem", params)

    async def put_item(self, **params: Any) -> Any:
        return await self._call("PutItem", params)

    async def delete_item(self, **params: Any) -> Any:
        return await self._call("DeleteItem", params)

    async def transact_write_items(self, **params: Any) -> Any:
        # botocore adds the token too. It lets DynamoDB recognize a retry of a transaction that it has
        # applied.
        token = {"ClientRequestToken": next(self._network.tokens)}
        return await self._call("TransactWriteItems", token | params)

    async def get_item(self, **params: Any) -> Any:
        return await self._call("GetItem", params)

    async def batch_get_item(self, **params: Any) -> Any:
        return await self._call("BatchGetItem", params)

    async def query(self, **params: Any) -> Any:
        return await self._call("Query", params)

    async def describe_table(self, **params: Any) -> Any:
        return await self._call("DescribeTable", params)

    async def describe_stream(self, **params: Any) -> Any:
        return await self._call("DescribeStream", params)

    async def get_shard_iterator(self, **params: Any) -> Any:
        return await self._call("GetShardIterator", params)

    async def get_records(self, **params: Any) -> Any:
        return await self._call("GetRecords", params)

    async def _call(self, action: str, params: Mapping[str, Any]) -> Any:
        for attempt in range(ATTEMPTS):
            answer = await self._network.send(
                self._process, action, params, self._sender or asyncio.current_task()
            )
            if not isinstance(answer, Exception):
                answer["ResponseMetadata"]["RetryAttempts"] = attempt
                return answer
            if isinstance(answer, aws.ClientError):
                answer.response["ResponseMetadata"]["RetryAttempts"] = attempt
                if answer.response["Error"]["Code"] not in ("ThrottlingException", "InternalServerError"):
                    raise answer
            if attempt + 1 < ATTEMPTS:
                self._network.world.faults["request retried by the SDK"] += 1
                await asyncio.sleep(self._network.world.random.random())
        raise answer


def resolve(answer: asyncio.Future[Any], response: Any) -> None:
    """Set the result of a future, unless it is done already."""
    if not answer.done():
        answer.set_result(response)


def _error(
    action: str,
    code: str,
    status: int,
    metadata: Any = None,
    more: Mapping[str, Any] | None = None,
    message: str | None = None,
) -> Exception:
    metadata = {"HTTPHeaders": {}, **(metadata or {}), "HTTPStatusCode": status}
    error = {"Code": code, "Message": message or code}
    response: Any = {"Error": error, "ResponseMetadata": metadata, **(more or {})}
    return aws.ClientError(response, action)


@lru_cache(maxsize=4096)
def _date(epoch: int) -> str:
    return formatdate(epoch, usegmt=True)


#: Name of each write to a lock's item (docs/protocol.md), by a part of its update expression. The first match
#: counts.
_WRITES = (
    ("#last_ticket = ", "take a ticket"),
    ("#holders = :holders, #available = :left", "acquire"),
    ("#holders.#me = :me, #available = #available - ", "acquire free slots"),
    ("#holders.#me = :me", "reclaim"),
    ("#holders.#dead0", "remove dead holders"),
    ("REMOVE #capacity_pinned", "unpin the capacity"),
    ("#capacity_pinned = ", "pin the capacity"),
    ("#token = :token", "correct a grant"),
    ("#token = #token", "reacquire"),
    ("#cooling_down = ", "cool down"),
    ("#draining = ", "drain"),
    ("#process = ", "enter"),
    ("REMOVE #holders.#me.#processes.#process", "leave"),
    ("#available = ", "release"),
    ("#queue_head = :place", "lower the head"),
    ("#queue_head = :after", "advance the head"),
    ("REMOVE #queue_head", "clear the head"),
    ("#lease_ms = ", "change"),
    ("#version = ", "heartbeat"),
)


def _what(action: str, params: Mapping[str, Any]) -> str:
    """Return a short description of a request, for the log."""
    if "TransactItems" in params:
        writes = [_what(*write) for item in params["TransactItems"] for write in item.items()]
        return f"transaction ({', '.join(writes)})"
    if "UpdateExpression" not in params or item_key(params)[1] != LOCK_ENTRY:
        return f"{action} {item_key(params)[1]}" if "Key" in params or "Item" in params else action
    update, names = params["UpdateExpression"], params["ExpressionAttributeNames"]
    for part, write in _WRITES:
        if part in update:
            if write == "release" and "#processes" not in params["ConditionExpression"]:
                write = "break"  # has the same update, and does not depend on the processes inside
            return f"{write} {names.get('#me', '')} {names.get('#process', '')}".strip()
    return action


def _short(item: Item | None) -> str:
    """Return one line about an item, for the log. Of each holder it shows the lease id (with `!` if it
    drains), the slots, the lease, the time of the last heartbeat, the version, and `+` each process
    inside."""
    if item is None:
        return "no item"
    if item["entry"]["S"] != LOCK_ENTRY:
        return str(item)
    holders = ", ".join(_short_holder(name, each["M"]) for name, each in item["holders"]["M"].items())
    return (
        f"{item['available']['N']}/{item['capacity']['N']} free, token {item['token']['N']}, "
        f"{holders or 'no holders'}"
    )


def _short_holder(lease_id: str, holder: Item) -> str:
    draining = "!" if "draining" in holder else ""
    lease = int(holder["lease_ms"]["N"]) / 1000
    renewed_at = int(holder["renewed_at"]["N"]) / 1000 - BEGIN if "renewed_at" in holder else float("nan")
    processes = "".join(f" +{process}" for process in holder["processes"]["M"])
    slots, version = holder["slots"]["N"], holder["version"]["S"]
    return f"{lease_id}{draining}[{slots}, {lease:g} s, {renewed_at:.1f}, {version}{processes}]"
