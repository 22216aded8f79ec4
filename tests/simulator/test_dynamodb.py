"""The simulated table behaves like DynamoDB Local, AWS's own engine: random requests have the same outcome in both."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, ClassVar

import pytest
from botocore import xform_name
from botocore.exceptions import ClientError

from airflow_dynamo_lock import LockClient
from airflow_dynamo_lock.core.effects import Request, Stamp
from airflow_dynamo_lock.core.model.claim import Claim
from airflow_dynamo_lock.core.model.edits import Change, Drain, Enter, Heartbeat
from airflow_dynamo_lock.core.model.record import Holder, LockRecord
from airflow_dynamo_lock.core.table.native import NativeFormat
from deployments.engines import DynamoDBLocal
from proof.simulator.sdk import SimulatedClient

pytestmark = pytest.mark.proof

TABLE = "locks"
WRITES, REQUESTS = 800, 600


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    """Start DynamoDB Local with a lock table, and return a client."""
    with DynamoDBLocal() as db:
        client = db.client()
        LockClient(client, table=TABLE).create_table()
        yield client


class Writer:
    """Builds random writes of the protocol. Most of them fit the current record, and some do not."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.format = NativeFormat(TABLE)
        self._versions = 0

    def next(self, record: LockRecord | None) -> Request:
        chance, form = self.chance, self.format
        holders = list(record.holders.values()) if record else []
        unknown = Holder(f"lease{chance.randrange(3)}", "me", 1, 30_000, 15_000, "v?", 0)
        holder = chance.choice([*holders, *holders, unknown])
        stamp = self.stamp()
        # A renewal without server time needs to know the holder.
        seen = holder if stamp.server_ms is None else chance.choice([None, holder])
        claim = Claim(
            key="k",
            lease_id=chance.choice(["lease0", "lease1", "lease.2#:"]),
            owner="me",
            lease_ms=30_000,
            grace_ms=15_000,
            slots=chance.randint(1, 2),
            capacity=chance.choice([3, 3, 3, 2]),
            data=chance.choice([None, None, {"at": 1}]),
        )
        known = record or LockRecord("k", 3, 3, {}, 0)
        writes: list[Callable[[], Request]] = [
            lambda: form.acquire_idle(claim, stamp, chance.choice([None, known])),
            lambda: form.acquire_slots(claim, stamp, known),
            lambda: form.reacquire(claim, holder, stamp, chance.choice([None, holder])),
            lambda: form.renew("k", holder.lease_id, 30_000, stamp, Heartbeat(), seen),
            lambda: form.renew("k", holder.lease_id, 30_000, stamp, Change(), seen),
            lambda: form.renew("k", holder.lease_id, 30_000, stamp, Enter(f"p{chance.randrange(3)}"), seen),
            lambda: form.leave("k", holder.lease_id, f"p{chance.randrange(3)}", 30_000, stamp),
            lambda: form.release("k", holder.lease_id, holder.slots, stamp, confirmed=chance.random() < 0.5),
            lambda: form.release(
                "k",
                holder.lease_id,
                holder.slots,
                stamp,
                confirmed=True,
                leaving=f"p{chance.randrange(3)}",
            ),
            lambda: form.break_("k", holder, stamp),
            lambda: form.renew("k", holder.lease_id, 15_000, stamp, Drain(), seen),
        ]
        if holders:
            dead = chance.sample(holders, chance.randint(1, len(holders)))
            if claim.lease_id not in [each.lease_id for each in dead]:
                writes += [lambda: form.reclaim(claim, known, dead, stamp)] * 2
            if claim.lease_id in known.holders:
                last = chance.choice([None, holder])
                writes.append(lambda: form.correct_grant(claim, known, known.token + 5, stamp, last))
        return chance.choice(writes)()

    def stamp(self) -> Stamp:
        self._versions += 1
        time = 1_800_000_000_000 + self.chance.choice([0, 1000, 5000, 90_000])
        return Stamp(f"v{self._versions}", self.chance.choice([time, time, None]), time, 0.0)


class RandomRequests:
    """Builds random requests of all kinds on a few items, with random conditions. Most are valid, and some are not."""

    KEYS = ("a", "b")
    ENTRIES = ("lock", "waiter/1", "waiter/10", "waiter/é", "waiter/𝄞", "waiter0")
    VALUES: ClassVar[dict[str, list[Any]]] = {
        "n": [{"N": "1"}, {"N": "2"}, {"N": "10"}],
        "m": [{"N": "1"}, {"N": "2"}, {"S": "1"}],
        "s": [{"S": "ab"}, {"S": "abc"}, {"S": "b"}],
        "l": [{"L": []}, {"L": [{"S": "b"}, {"N": "1"}]}],
        "t": [{"SS": ["ab", "b"]}, {"BOOL": True}],
        "x": [{"M": {}}, {"M": {"n": {"N": "2"}}}],
    }

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self._transactions: list[Request] = []

    def next(self) -> Request:
        match self.chance.choices(["write", "transaction", "query", "batch"], [5, 4, 3, 1])[0]:
            case "write":
                kind, params = self._write(
                    self._key(), self.chance.choice(["Update", "Put", "Put", "Delete"])
                )
                if kind == "Update":
                    params["ReturnValues"] = "ALL_NEW"
                elif self.chance.random() < 0.5:
                    params["ReturnValues"] = "ALL_OLD"
                return Request(f"{kind}Item", params)
            case "transaction":
                if self._transactions and self.chance.random() < 0.15:
                    return self.chance.choice(self._transactions[-3:])  # as if the SDK sent it again
                self._transactions.append(self._transaction())
                return self._transactions[-1]
            case "query":
                return Request("Query", self._query())
        keys = self.chance.sample([self._key(key, entry) for key in self.KEYS for entry in self.ENTRIES], 5)
        return Request("BatchGetItem", {"RequestItems": {TABLE: {"Keys": keys, "ConsistentRead": True}}})

    def _transaction(self) -> Request:
        chance, items = self.chance, []
        for entry in chance.sample(self.ENTRIES, chance.randint(1, 4)):
            kinds = ["Update", "Put", "Delete", "ConditionCheck"]
            kind, params = self._write(self._key(entry=entry), chance.choice(kinds))
            if chance.random() < 0.7 and "ConditionExpression" in params:
                params["ReturnValuesOnConditionCheckFailure"] = "ALL_OLD"
            items.append({kind: params})
        return Request(
            "TransactWriteItems", {"TransactItems": items, "ClientRequestToken": f"{chance.random()}"}
        )

    def _write(self, key: dict[str, Any], kind: str) -> tuple[str, dict[str, Any]]:
        chance, terms = self.chance, _Terms()
        params: dict[str, Any] = {"TableName": TABLE}
        if kind == "Put":
            names = chance.sample(list(self.VALUES), chance.randint(2, 6))
            params["Item"] = {**key, **{name: chance.choice(self.VALUES[name]) for name in names}}
        else:
            params["Key"] = key
        if kind == "Update":
            params["UpdateExpression"] = self._update(terms)
        if kind == "ConditionCheck" or chance.random() < 0.7:
            params["ConditionExpression"] = self._condition(terms, 2)
        return kind, {**params, **terms.params()}

    def _update(self, terms: _Terms) -> str:
        name, value, one = terms.name, terms.value, {"N": "1"}
        return self._one_of(
            lambda: f"SET {name('n')} = if_not_exists({name('m')}, {value(one)}) + {value(one)}",
            lambda: (
                f"SET {name('n')} = if_not_exists({name('n')}, {name('m')}), {name('s')} = {value({'S': 'ab'})}"
            ),
            lambda: f"SET {name('n')} = {name('n')} - {value(one)} REMOVE {name('m')}",
            lambda: f"SET {name('x')}.{name('n')} = {value(one)}",
            lambda: f"REMOVE {name('x')}.{name('n')}, {name('l')}",
        )

    def _condition(self, terms: _Terms, depth: int) -> str:
        chance, name = self.chance, terms.name
        if depth and chance.random() < 0.4:
            shapes = ["{} AND {}", "{} OR {}", "NOT {}", "NOT {} AND {}", "{} OR {} AND {}", "{} OR NOT {}"]
            shape = chance.choice(shapes)
            parts = [self._condition(terms, depth - 1) for _ in range(shape.count("{}"))]
            compound = (" AND ", " OR ", "NOT ")
            return shape.format(
                *(f"({part})" if any(each in part for each in compound) else part for part in parts)
            )
        subject = chance.choice(["n", "m", "s", "x.n"])
        other = chance.choice([each for each in "nmsx" if each != subject])
        comparator = chance.choice(["=", "<>", "<", "<=", ">", ">="])

        def path() -> str:
            return ".".join(map(name, subject.split(".")))

        def some(kind: str) -> str:
            return terms.value(chance.choice(self.VALUES[kind]))

        return self._one_of(
            lambda: f"attribute_exists({path()})",
            lambda: f"attribute_not_exists({name('key')})",
            lambda: f"attribute_type({path()}, {terms.value({'S': chance.choice('NSM')})})",
            lambda: f"begins_with({path()}, {some('s')})",
            lambda: f"begins_with({name('s')}, {some('s')})",
            lambda: f"contains({name(chance.choice('slt'))}, {some('s')})",
            lambda: f"contains({name(chance.choice('sl'))}, {some('n')})",
            lambda: f"{path()} {comparator} {some(chance.choice('nms'))}",
            lambda: f"{path()} {comparator} {name(other)}",
            lambda: f"size({name(chance.choice('slx'))}) {comparator} {some('n')}",
            lambda: f"{path()} IN ({some('n')}, {some('s')}, {name(other)})",
            lambda: f"{path()} BETWEEN {terms.value({'N': '1'})} AND {terms.value({'N': '2'})}",
        )

    def _query(self) -> dict[str, Any]:
        chance, terms = self.chance, _Terms()
        in_pages = chance.random() < 0.5
        # If a page ends exactly at the bound of its range, DynamoDB does not specify whether there is another page.
        bounds = ["1", "l", "waiter", "waiter/", "waiter/15", "x"]
        if not in_pages:
            bounds += self.ENTRIES
        low, high = ({"S": each} for each in sorted(chance.sample(bounds, 2)))
        entry = terms.name("entry")
        condition = self._one_of(
            lambda: f"begins_with({entry}, {terms.value(low)})",
            lambda: f"{entry} >= {terms.value(low)}",
            lambda: f"{entry} BETWEEN {terms.value(low)} AND {terms.value(high)}",
        )
        key = self._key()
        params: dict[str, Any] = {
            "TableName": TABLE,
            "KeyConditionExpression": f"{terms.name('key')} = {terms.value(key['key'])} AND {condition}",
            "ConsistentRead": chance.random() < 0.5,
            "ScanIndexForward": chance.random() < 0.5,
            **terms.params(),
        }
        if in_pages:
            params["Limit"] = chance.randint(1, 3)
            if chance.random() < 0.7:
                params["ExclusiveStartKey"] = key
        return params

    def _one_of(self, *ways: Callable[[], str]) -> str:
        return self.chance.choice(ways)()

    def _key(self, key: str | None = None, entry: str | None = None) -> dict[str, Any]:
        chance = self.chance
        return {
            "key": {"S": key or chance.choice(self.KEYS)},
            "entry": {"S": entry or chance.choice(self.ENTRIES)},
        }


class _Terms:
    """The placeholders in the expressions of a request: DynamoDB requires exactly those that are used."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._values: dict[str, Any] = {}

    def name(self, name: str) -> str:
        self._names[f"#{name}"] = name
        return f"#{name}"

    def value(self, value: Any) -> str:
        placeholder = f":v{len(self._values)}"
        self._values[placeholder] = value
        return placeholder

    def params(self) -> dict[str, Any]:
        terms = {"ExpressionAttributeNames": self._names, "ExpressionAttributeValues": self._values}
        return {kind: each for kind, each in terms.items() if each}


def outcome(send: Callable[[Request], Any], request: Request) -> tuple[str, Any]:
    """Return the outcome of a request, without what DynamoDB does not specify: batch order and message texts."""
    try:
        output = send(request)
    except ClientError as failure:
        reasons = failure.response.get("CancellationReasons", ())
        return failure.response["Error"]["Code"], [(each["Code"], each.get("Item")) for each in reasons]
    if request.action == "BatchGetItem":
        found = output["Responses"][TABLE]
        return "done", sorted(found, key=lambda item: (item["key"]["S"], item["entry"]["S"]))
    return "done", {part: output.get(part) for part in ("Attributes", "Items", "LastEvaluatedKey")}


def test_every_write_has_the_same_outcome_on_the_real_engine(engine: Any) -> None:
    writer, simulated = Writer(7), SimulatedClient(shows_refused=False)
    record, outcomes = None, set()
    for _ in range(WRITES):
        request = writer.next(record)
        real = outcome(partial(send, engine), request)
        assert outcome(partial(send, simulated), request) == real, request
        outcomes.add(real[0])
        item = simulated.table.get(request.params["Key"])
        record = writer.format.record(item, None) if item else None
    assert outcomes == {"done", "ConditionalCheckFailedException"}
    assert items_of(engine, "k") == simulated.table.items


def test_every_request_has_the_same_outcome_on_the_real_engine(engine: Any) -> None:
    requests, simulated = RandomRequests(7), SimulatedClient(shows_refused=False)
    outcomes = set()
    for _ in range(REQUESTS):
        request = requests.next()
        real = outcome(partial(send, engine), request)
        assert outcome(partial(send, simulated), request) == real, request
        outcomes.add((request.action, real[0]))
    assert outcomes == {
        *((action, "done") for action in ("UpdateItem", "PutItem", "DeleteItem", "TransactWriteItems")),
        *((action, "ConditionalCheckFailedException") for action in ("UpdateItem", "PutItem", "DeleteItem")),
        ("TransactWriteItems", "TransactionCanceledException"),
        *((action, "ValidationException") for action in ("UpdateItem", "TransactWriteItems", "Query")),
        *((action, "done") for action in ("Query", "BatchGetItem")),
    }
    assert items_of(engine, RandomRequests.KEYS) == simulated.table.items


def send(engine: Any, request: Request) -> Any:
    return getattr(engine, xform_name(request.action))(**request.params)


def items_of(engine: Any, keys: Iterable[str]) -> dict[tuple[str, str], Any]:
    """Return all items in the table with these keys."""
    items = engine.scan(TableName=TABLE, ConsistentRead=True)["Items"]
    places = {(item["key"]["S"], item["entry"]["S"]): item for item in items}
    return {place: item for place, item in places.items() if place[0] in keys}
