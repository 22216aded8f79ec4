"""What stands between a process and DynamoDB: an SDK that sends a request up to twice, a network that delays and loses,
and servers that throttle, fail, and disagree about the time.
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
from proof.simulator.dynamodb import Cancelled, Moment, Place, Refused, Table, Throttled, Written, place
from proof.simulator.expressions import InvalidExpression, Item
from proof.simulator.world import BEGIN, Process, World

TABLE = "locks"
ENDPOINT = "the simulated DynamoDB"
#: As `wire.SDK_SETTINGS` has it: seconds, and how often in all.
READ_TIMEOUT, ATTEMPTS = 2.0, 2

#: Told of every item written: who sent it, with which parameters, the item before and after. A transaction's items come
#: one after the other, at the same moment, each with its own parameters.
Applied = Callable[[Process, Mapping[str, Any], "Item | None", "Item | None"], None]


@dataclass(frozen=True)
class Weather:
    """How likely what is to befall a request. The rest arrive and are answered within some milliseconds.

    :ivar slow: takes up to a second.
    :ivar lost: never arrives.
    :ivar unheard: is carried out, and its answer is lost.
    :ivar late: the SDK gives it up, and it arrives later all the same.
    :ivar reset: the connection breaks, before or after it was carried out.
    :ivar throttled, failed, denied: DynamoDB says so; a failed one may have been carried out.
    :ivar conflicted: when it arrives, another transaction is at work on the same item. It befalls transactions, and
        other writes to an item that one has written.
    """

    slow: float = 0.0
    lost: float = 0.0
    unheard: float = 0.0
    late: float = 0.0
    reset: float = 0.0
    throttled: float = 0.0
    failed: float = 0.0
    denied: float = 0.0
    conflicted: float = 0.0


CALM = Weather()
#: What may befall any request.
KINDS = tuple(kind for kind in Weather.__dataclass_fields__ if kind != "conflicted")


#: Told of every request that arrives, before it is answered: which task has sent it, the action and its parameters, and
#: when it was sent.
Arrived = Callable[[object, str, Mapping[str, Any], float], None]


class Network:
    """The way of all processes to one table.

    :param dates: whether answers have a ``Date``. DynamoDB's have, DynamoDB Local's have not.
    :param shows_refused: whether a refused write shows the item, outside a transaction. DynamoDB does, DynamoDB Local
        does not.
    :ivar arrived: is told of each request.
    :ivar apart: by how much the clocks of its servers may differ, seconds.
    :ivar tokens: for the transactions that the SDK sends.
    """

    def __init__(
        self, world: World, table: Table, applied: Applied, *, dates: bool, shows_refused: bool, apart: float
    ) -> None:
        self.world, self.table, self.applied = world, table, applied
        self.dates, self.shows_refused, self.apart = dates, shows_refused, apart
        self.weather = CALM
        self.arrived: Arrived = lambda *_: None
        self.tokens = map(str, count(1))
        self._transacted: set[Place] = set()

    def send(
        self, process: Process, action: str, params: Mapping[str, Any], sender: object
    ) -> asyncio.Future[Any]:
        """Send a request once, for a task or a thread. The answer is what DynamoDB said, or an SDK's exception."""
        world, chance, sent = self.world, self.world.random, process.here
        answer = process.create_future()
        kind = self._kind()
        if not process.reaches:
            kind = "late" if chance.random() < 0.5 else "lost"
        elif not process.hears and kind not in ("lost", "late", "reset"):
            kind = "unheard"
        if kind:
            world.faults[f"request {kind}"] += 1
            world.story(f"{_what(action, params)} will be {kind}", process)
        arrives = sent + chance.uniform(0.001, 0.015)
        gives_up = sent + READ_TIMEOUT / process.machine.rate

        def carry_out(respond: bool) -> None:
            self.arrived(sender, action, params, sent)
            response = self.answer(process, action, params, sent)
            if respond:
                back = world.now + chance.uniform(0.001, 0.015)
                world.at(back, process, answer_with, answer, response)

        match kind:
            case "":
                world.at(arrives, None, carry_out, True)
            case "slow":
                world.at(sent + chance.uniform(0.015, 1.0), None, carry_out, True)
            case "lost" | "unheard" | "late":
                if kind == "unheard":
                    world.at(arrives, None, carry_out, False)
                elif kind == "late":
                    latest = chance.choice([0.1, 0.25, 1.0]) * world.assumptions.late
                    arrives = sent + READ_TIMEOUT + chance.random() * (latest - READ_TIMEOUT)
                    world.at(arrives, None, carry_out, False)
                timeout = aws.ReadTimeoutError(endpoint_url=ENDPOINT)
                world.at(gives_up, process, answer_with, answer, timeout)
            case "reset":
                if chance.random() < 0.5:
                    world.at(arrives, None, carry_out, False)
                closed = aws.ConnectionClosedError(endpoint_url=ENDPOINT)
                world.at(arrives + 0.01, process, answer_with, answer, closed)
            case "throttled":
                world.at(arrives, process, answer_with, answer, _error(action, "ThrottlingException", 400))
            case "denied":
                world.at(arrives, process, answer_with, answer, _error(action, "AccessDeniedException", 400))
            case "failed":
                if chance.random() < 0.5:
                    world.at(arrives, None, carry_out, False)
                world.at(
                    arrives + 0.01, process, answer_with, answer, _error(action, "InternalServerError", 500)
                )
        return answer

    def _kind(self) -> str:
        weather = self.weather
        if weather is CALM:
            return ""
        draw = self.world.random.random()
        for kind in KINDS:
            draw -= getattr(weather, kind)
            if draw < 0:
                return kind
        return ""

    def answer(self, process: Process, action: str, params: Mapping[str, Any], sent: float) -> Any:
        """What DynamoDB does when a request arrives, and answers; an exception as botocore's if it refuses."""
        world, chance = self.world, self.world.random
        metadata: dict[str, Any] = {"HTTPStatusCode": 200, "HTTPHeaders": {}}
        if self.dates and not process.undated:
            server = world.now + chance.choice((-0.5, 0.0, 0.5)) * self.apart
            metadata["HTTPHeaders"] = {"date": _date(int(BEGIN + server))}
        try:
            match action:
                case "UpdateItem" | "PutItem" | "DeleteItem":
                    output = self._write(process, action, params)
                case "TransactWriteItems":
                    output = self._transact(process, params)
                case "GetItem":
                    item = self.table.get(
                        params["Key"], None if params.get("ConsistentRead") else self._stale()
                    )
                    output = {"Item": item} if item else {}
                case "BatchGetItem":
                    wanted = params["RequestItems"][TABLE]
                    output = {
                        "Responses": {TABLE: self.table.batch_get(wanted["Keys"], self._moment(wanted, sent))}
                    }
                case "Query":
                    output = self.table.query(params, self._moment(params, sent))
                case _:
                    raise NotImplementedError(action)
        except _Failure as failure:
            return _error(action, failure.code, 400, metadata, failure.more, failure.message)
        except Throttled:
            world.faults["partition throttled"] += 1
            return _error(action, "ThrottlingException", 400, metadata)
        except InvalidExpression as invalid:
            world.mistakes.append(f"{invalid}: {params}")
            return _error(action, "ValidationException", 400, metadata, message=str(invalid))
        return {**output, "ResponseMetadata": metadata}

    def _write(self, process: Process, action: str, params: Mapping[str, Any]) -> dict[str, Any]:
        if self._conflict([place(params)]) is not None:
            raise _Failure("TransactionConflictException")
        try:
            written = self.table.write(action.removesuffix("Item"), params, self.world.now)
        except Refused as refused:
            self.world.story(f"{_what(action, params)} is refused", process)
            shown = _shown(params, refused) if self.shows_refused else {}
            raise _Failure("ConditionalCheckFailedException", shown) from None
        self._tell(process, action, [written])
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
        held: dict[str, Any] = {"Code": "None"}
        resent = self.table.has_done(token, self.world.now)
        conflict = None if resent else self._conflict([place(write) for write in writes], transaction=True)
        if conflict is not None:
            reasons = [held] * len(items)
            reasons[conflict] = {
                "Code": "TransactionConflict",
                "Message": "Transaction is ongoing for the item",
            }
            raise _cancelled(reasons)
        try:
            written = self.table.transact(items, token, self.world.now)
        except Cancelled as cancelled:
            self.world.story(f"{_what('TransactWriteItems', params)} is refused", process)
            raise _cancelled(
                [
                    held
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
        self._tell(process, "in a transaction", written)
        return {}

    def _conflict(self, places: list[Place], *, transaction: bool = False) -> int | None:
        """On which of these another transaction is at work just now, as DynamoDB says. No chance is drawn where no
        transactions are used."""
        chance, likely = self.world.random, self.weather.conflicted
        if not likely or not (transaction or places[0] in self._transacted) or chance.random() >= likely:
            return None
        self.world.faults["request conflicted"] += 1
        return chance.randrange(len(places))

    def _tell(self, process: Process, action: str, written: Iterable[Written]) -> None:
        for each in written:
            if self.world.tell is not None:
                done = f"{_what(action, each.params)} is carried out"
                self.world.story(f"{done}: {_short(each.after)}", process)
            self.applied(process, each.params, each.before, each.after)

    # -- which past a read shows ------------------------------------------------------------------------------

    def _moment(self, params: Mapping[str, Any], sent: float) -> Moment:
        """Of a consistent read of several items, each is as it was at a moment of its own since the request was sent:
        one may be from before a transaction, and another from after it."""
        if params.get("ConsistentRead"):
            return lambda: self.world.random.uniform(sent, self.world.now)
        return self._stale

    def _stale(self) -> float | None:
        chance = self.world.random
        stale = chance.random() < 0.3
        return self.world.now - chance.random() * self.world.assumptions.stale if stale else None


class _Failure(Exception):
    """DynamoDB refuses a request."""

    def __init__(self, code: str, more: Mapping[str, Any] | None = None, message: str | None = None) -> None:
        self.code, self.more, self.message = code, more, message or code


def _cancelled(reasons: list[dict[str, Any]]) -> _Failure:
    codes = ", ".join(reason["Code"] for reason in reasons)
    message = f"Transaction cancelled, please refer cancellation reasons for specific reasons [{codes}]"
    return _Failure("TransactionCanceledException", {"CancellationReasons": reasons}, message)


def _shown(params: Mapping[str, Any], refused: Refused) -> dict[str, Any]:
    """The item, if there is one, and if it was asked for."""
    wanted = params.get("ReturnValuesOnConditionCheckFailure") == "ALL_OLD"
    return {"Item": refused.item} if wanted and refused.item else {}


class Sdk:
    """An aiobotocore client, as far as `AsyncLockClient` uses one: exceptions, retries and metadata as botocore's."""

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
        # As botocore does: so DynamoDB knows what it has carried out already, when the SDK sends it again.
        token = {"ClientRequestToken": next(self._network.tokens)}
        return await self._call("TransactWriteItems", token | params)

    async def get_item(self, **params: Any) -> Any:
        return await self._call("GetItem", params)

    async def batch_get_item(self, **params: Any) -> Any:
        return await self._call("BatchGetItem", params)

    async def query(self, **params: Any) -> Any:
        return await self._call("Query", params)

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
                self._network.world.faults["sent again by the SDK"] += 1
                await asyncio.sleep(self._network.world.random.random())
        raise answer


def answer_with(answer: asyncio.Future[Any], response: Any) -> None:
    """It arrives; too late, perhaps."""
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


def _what(action: str, params: Mapping[str, Any]) -> str:
    """A request in a few words."""
    if "TransactItems" in params:
        writes = [_what(*write) for item in params["TransactItems"] for write in item.items()]
        return f"transaction ({', '.join(writes)})"
    if "UpdateExpression" not in params or place(params)[1] != LOCK_ENTRY:
        return f"{action} {place(params)[1]}" if "Key" in params or "Item" in params else action
    update, names = params["UpdateExpression"], params["ExpressionAttributeNames"]
    for part, what in (
        ("#holders = :holders", "take idle"),
        ("#holders.#me = :me, #available = #available - ", "take room"),
        ("#dead0", "reclaim"),
        ("#token = :token", "put right"),
        ("#token = #token", "take again"),
        ("#draining = ", "abandon"),
        ("#process = ", "enter"),
        ("REMOVE #holders.#me.#processes.#process", "leave"),
        ("#available = ", "release"),
        ("", "heartbeat"),
    ):
        if part in update:
            return f"{what} {names.get('#me', '')} {names.get('#process', '')}".strip()
    return "?"


def _short(item: Item | None) -> str:
    """An item in one line."""
    if item is None:
        return "nothing is left"
    if item["entry"]["S"] != LOCK_ENTRY:
        return str(item)
    holders = ", ".join(
        f"{name}{'!' if 'draining' in each['M'] else ''}"
        f"[{each['M']['slots']['N']}, {int(each['M']['lease_ms']['N']) / 1000:g} s, "
        f"{(int(each['M']['renewed_at']['N']) / 1000 - BEGIN) if 'renewed_at' in each['M'] else float('nan'):.1f}, "
        f"{each['M']['version']['S']}{''.join(' +' + who for who in each['M']['processes']['M'])}]"
        for name, each in item["holders"]["M"].items()
    )
    return f"{item['available']['N']}/{item['capacity']['N']} free, token {item['token']['N']}, {holders or 'idle'}"
