"""The simulated table decides as AWS's own engine does: the same random writes, put to both, have the same outcome."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from airflow_dynamo_lock import LockClient, sdk_config
from airflow_dynamo_lock.protocol.effects import Request, Stamp
from airflow_dynamo_lock.protocol.model import Claim, Holder, LockRecord
from airflow_dynamo_lock.protocol.native import NativeFormat
from tests.engines import DynamoDBLocal
from tests.histories.dynamodb import Refused, Table
from tests.histories.expressions import InvalidExpression

TABLE = "locks"
WRITES = 800


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    """DynamoDB Local, with a lock table."""
    with DynamoDBLocal() as db:
        client = boto3.client(
            "dynamodb",
            region_name="us-east-1",
            endpoint_url=db.endpoint_url,
            aws_access_key_id="test",
            aws_secret_access_key="test",
            config=sdk_config(),
        )
        LockClient(client, table=TABLE).create_table()
        yield client


class Writer:
    """Writes as the protocol makes them, at random: most fit the record as it is, some do not."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.format = NativeFormat(TABLE)
        self._versions = 0

    def next(self, record: LockRecord | None) -> Request:
        chance, form = self.chance, self.format
        holders = list(record.holders.values()) if record else []
        anybody = Holder(f"lease{chance.randrange(3)}", "me", 1, 30_000, 15_000, "v?", 0)
        who = chance.choice([*holders, *holders, anybody])
        seen = chance.choice([None, who.version])
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
            lambda: form.take_idle(claim, self.stamp(), chance.choice([None, known])),
            lambda: form.take_room(claim, self.stamp(), known),
            lambda: form.take_again(claim, who, self.stamp()),
            lambda: form.heartbeat("k", who.lease_id, 30_000, self.stamp(), seen),
            lambda: form.heartbeat_unless_ending("k", who.lease_id, 30_000, self.stamp(), seen),
            lambda: form.enter("k", who.lease_id, f"p{chance.randrange(3)}", 30_000, self.stamp(), seen),
            lambda: form.leave("k", who.lease_id, f"p{chance.randrange(3)}", 30_000, self.stamp()),
            lambda: form.release("k", who.lease_id, who.slots, self.stamp(), heard=chance.random() < 0.5),
            lambda: form.break_("k", who.lease_id, who.slots, self.stamp()),
            lambda: form.abandon("k", who.lease_id, 15_000, self.stamp(), seen),
        ]
        if holders:
            dead = chance.sample(holders, chance.randint(1, len(holders)))
            if claim.lease_id not in [each.lease_id for each in dead]:
                writes += [lambda: form.reclaim(claim, known, dead, self.stamp())] * 2
            if claim.lease_id in known.holders:
                writes.append(lambda: form.put_right(claim, known, known.token + 5, self.stamp()))
        return chance.choice(writes)()

    def stamp(self) -> Stamp:
        self._versions += 1
        time = 1_800_000_000_000 + self.chance.choice([0, 1000, 5000, 90_000])
        return Stamp(f"v{self._versions}", self.chance.choice([time, time, None]), time, 0.0)


def test_every_write_has_the_same_outcome_on_the_real_engine(engine: Any) -> None:
    writer, table = Writer(7), Table()
    record, outcomes = None, set()
    for _ in range(WRITES):
        request = writer.next(record)
        real, simulated = _on_engine(engine, request), _on_table(table, request)
        kind, _ = real
        outcomes.add(kind)
        assert simulated == real, request
        item = table.get(request.params["Key"])
        assert item == engine.get_item(TableName=TABLE, Key=request.params["Key"]).get("Item")
        record = writer.format.record(item, None) if item else None
    assert outcomes == {"written", "refused"}


def _on_engine(engine: Any, request: Request) -> tuple[str, Any]:
    try:
        return "written", engine.update_item(**request.params)["Attributes"]
    except ClientError as failure:
        invalid = failure.response["Error"]["Code"] == "ValidationException"
        return "invalid" if invalid else "refused", None


def _on_table(table: Table, request: Request) -> tuple[str, Any]:
    try:
        return "written", table.update(request.params, 0.0)[1]
    except Refused:
        return "refused", None
    except InvalidExpression:
        return "invalid", None
