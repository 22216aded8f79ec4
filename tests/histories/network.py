"""What stands between a process and DynamoDB: an SDK that sends a request up to twice, a network that delays and loses,
and servers that throttle, fail, and disagree about the time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from botocore import exceptions as aws

from tests.histories.dynamodb import Refused, Table
from tests.histories.expressions import InvalidExpression, Item
from tests.histories.world import BEGIN, Process, World

TABLE = "locks"
ENDPOINT = "the simulated DynamoDB"
#: As `wire.SDK_SETTINGS` has it: seconds, and how often in all.
READ_TIMEOUT, ATTEMPTS = 2.0, 2

#: Told of every write: who sent it, with which parameters, the item before and after.
Applied = Callable[[Process, Mapping[str, Any], "Item | None", Item], None]


@dataclass(frozen=True)
class Weather:
    """How likely what is to befall a request. The rest arrive and are answered within some milliseconds.

    :ivar slow: takes up to a second.
    :ivar lost: never arrives.
    :ivar unheard: is carried out, and its answer is lost.
    :ivar late: the SDK gives it up, and it arrives later all the same.
    :ivar reset: the connection breaks, before or after it was carried out.
    :ivar throttled, failed, denied: DynamoDB says so; a failed one may have been carried out.
    """

    slow: float = 0.0
    lost: float = 0.0
    unheard: float = 0.0
    late: float = 0.0
    reset: float = 0.0
    throttled: float = 0.0
    failed: float = 0.0
    denied: float = 0.0


CALM = Weather()
_KINDS = tuple(Weather.__dataclass_fields__)


class Network:
    """The way of all processes to one table.

    :param dates: whether answers have a ``Date``. DynamoDB's have, DynamoDB Local's have not.
    :param shows_refused: whether a refused write shows the item. DynamoDB does, DynamoDB Local does not.
    :ivar apart: by how much the clocks of its servers may differ, seconds.
    """

    def __init__(
        self, world: World, table: Table, applied: Applied, *, dates: bool, shows_refused: bool, apart: float
    ) -> None:
        self.world, self.table, self.applied = world, table, applied
        self.dates, self.shows_refused, self.apart = dates, shows_refused, apart
        self.weather = CALM

    def send(self, process: Process, action: str, params: Mapping[str, Any]) -> asyncio.Future[Any]:
        """Send a request once. The answer is what DynamoDB said, or an SDK's exception."""
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
            response = self._carry_out(process, action, params)
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
        for kind in _KINDS:
            draw -= getattr(weather, kind)
            if draw < 0:
                return kind
        return ""

    def _carry_out(self, process: Process, action: str, params: Mapping[str, Any]) -> Any:
        """What DynamoDB does when a request arrives."""
        world, chance = self.world, self.world.random
        metadata: dict[str, Any] = {"HTTPStatusCode": 200, "HTTPHeaders": {}}
        if self.dates:
            server = world.now + chance.choice((-0.5, 0.0, 0.5)) * self.apart
            metadata["HTTPHeaders"] = {"date": _date(int(BEGIN + server))}
        match action:
            case "UpdateItem":
                try:
                    before, after = self.table.update(params, world.now)
                except Refused as refused:
                    world.story(f"{_what(action, params)} is refused", process)
                    shown = {"Item": refused.item} if refused.item and self.shows_refused else {}
                    return _error(action, "ConditionalCheckFailedException", 400, metadata, shown)
                except InvalidExpression as invalid:
                    world.mistakes.append(f"{invalid}: {params}")
                    return _error(action, "ValidationException", 400, metadata)
                if world.tell is not None:
                    world.story(f"{_what(action, params)} is carried out: {_short(after)}", process)
                self.applied(process, params, before, after)
                return {"Attributes": after, "ResponseMetadata": metadata}
            case "GetItem":
                item = self.table.get(params["Key"])
                return {**({"Item": item} if item else {}), "ResponseMetadata": metadata}
            case "BatchGetItem":
                found = []
                for key in params["RequestItems"][TABLE]["Keys"]:
                    stale = chance.random() < 0.3
                    as_of = world.now - chance.random() * world.assumptions.stale if stale else None
                    if (item := self.table.get(key, as_of)) is not None:
                        found.append(item)
                return {"Responses": {TABLE: found}, "ResponseMetadata": metadata}
        raise NotImplementedError(action)


class Sdk:
    """An aiobotocore client, as far as `AsyncLockClient` uses one: exceptions, retries and metadata as botocore's."""

    meta = SimpleNamespace(region_name="nowhere")

    def __init__(self, network: Network, process: Process) -> None:
        self._network, self._process = network, process

    async def update_item(self, **params: Any) -> Any:
        return await self._call("UpdateItem", params)

    async def get_item(self, **params: Any) -> Any:
        return await self._call("GetItem", params)

    async def batch_get_item(self, **params: Any) -> Any:
        return await self._call("BatchGetItem", params)

    async def _call(self, action: str, params: Mapping[str, Any]) -> Any:
        for attempt in range(ATTEMPTS):
            answer = await self._network.send(self._process, action, params)
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
    action: str, code: str, status: int, metadata: Any = None, more: Mapping[str, Any] | None = None
) -> Exception:
    metadata = {"HTTPHeaders": {}, **(metadata or {}), "HTTPStatusCode": status}
    response: Any = {"Error": {"Code": code, "Message": code}, "ResponseMetadata": metadata, **(more or {})}
    return aws.ClientError(response, action)


@lru_cache(maxsize=4096)
def _date(epoch: int) -> str:
    return formatdate(epoch, usegmt=True)


def _what(action: str, params: Mapping[str, Any]) -> str:
    """A request in a few words."""
    if action != "UpdateItem":
        return action
    update, names = params["UpdateExpression"], params["ExpressionAttributeNames"]
    for part, what in (
        ("#holders = :holders", "take idle"),
        ("#holders.#me = :me, #available = #available - ", "take room"),
        ("#dead0", "reclaim"),
        ("#token = :token", "put right"),
        ("#token = #token", "take again"),
        ("#ending = ", "abandon"),
        ("#process = ", "enter"),
        ("REMOVE #holders.#me.#inside.#process", "leave"),
        ("#available = ", "release"),
        ("", "heartbeat"),
    ):
        if part in update:
            return f"{what} {names.get('#me', '')} {names.get('#process', '')}".strip()
    return "?"


def _short(item: Item) -> str:
    """A record in one line."""
    holders = ", ".join(
        f"{name}{'!' if 'ending' in each['M'] else ''}"
        f"[{each['M']['slots']['N']}, {int(each['M']['lease_ms']['N']) / 1000:g} s, "
        f"{(int(each['M']['renewed_at']['N']) / 1000 - BEGIN) if 'renewed_at' in each['M'] else float('nan'):.1f}, "
        f"{each['M']['version']['S']}{''.join(' +' + who for who in each['M']['inside']['M'])}]"
        for name, each in item["holders"]["M"].items()
    )
    return f"{item['available']['N']}/{item['capacity']['N']} free, token {item['token']['N']}, {holders or 'idle'}"
