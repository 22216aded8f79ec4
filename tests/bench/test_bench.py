"""The parts of the benchmarks, on moto: the workers execute their commands, and the meter counts requests and units."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise

import pytest

from bench import page
from bench.__main__ import RESULTS
from bench.adapters.worker import Settings
from bench.contestants import (
    FLOOR,
    OURS,
    OURS_UNFAIR,
    OURS_WITH_HEARTBEATS,
    OURS_WITH_STREAMS,
    Contestant,
    WorkerError,
    create_tables,
)
from bench.measure import handover
from bench.meter import Meter, engine_client, item_size
from deployments.engines import Engine, MotoServer

pytestmark = pytest.mark.proof

CYCLES = 3


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """moto, with the tables of the contestants."""
    with MotoServer() as engine:
        create_tables([FLOOR, OURS, OURS_WITH_STREAMS], engine.endpoint_url)
        yield engine


@pytest.mark.parametrize(
    "contestant", [FLOOR, OURS, OURS_WITH_HEARTBEATS], ids=lambda contestant: contestant.name
)
def test_a_cycle_is_two_requests_and_two_write_units(contestant: Contestant, engine: Engine) -> None:
    with Meter(engine.endpoint_url) as meter, contestant.worker(meter.endpoint_url) as worker:
        result = worker.do("cycles", key=contestant.name, count=CYCLES)
        used = meter.take().per(CYCLES)

    assert len(result["acquires"]) == len(result["cycles"]) == CYCLES
    assert used == {"requests": 2, "write_units": 2, "read_units": 0, "actions": {"UpdateItem": 2}}


@pytest.mark.parametrize(
    "contestant", [OURS, OURS_UNFAIR, OURS_WITH_STREAMS], ids=lambda contestant: contestant.name
)
def test_a_waiter_is_granted_the_lock_that_another_worker_releases(
    contestant: Contestant, engine: Engine
) -> None:
    with (
        contestant.worker(engine.endpoint_url) as holder,
        contestant.worker(engine.endpoint_url, Settings(poll=0.1)) as waiter,
    ):
        holder.do("acquire", key=contestant.name)
        waiter.send("acquire", key=contestant.name)
        released, _ = holder.do("release", key=contestant.name)
        _, granted = waiter.receive()

    assert granted > released


def test_the_stream_reads_of_a_hand_over_are_counted_apart(engine: Engine) -> None:
    result = handover.two(OURS_WITH_STREAMS, engine.endpoint_url, rounds=2)

    used = result["per_handover"]
    assert used["stream_reads"] >= 2
    assert used["actions"]["GetRecords"] <= used["stream_reads"] < used["requests"]
    # The release; a refused acquire, a ticket and the queue entry; a read of the queue, the acquire and the dequeue.
    assert {"UpdateItem": 4, "PutItem": 1, "Query": 1, "DeleteItem": 1}.items() <= used["actions"].items()


def test_members_of_a_worker_take_turns(engine: Engine) -> None:
    with OURS.worker(engine.endpoint_url, Settings(poll=0.05)) as worker:
        turns = sorted(worker.do("turns", key="turns", members=3, hold=0.01))

    assert len(turns) == 3
    assert all(granted < releasing < done for granted, releasing, done in turns)
    assert all(later[0] > earlier[1] for earlier, later in pairwise(turns))


def test_a_failed_command_raises_its_error(engine: Engine) -> None:
    with OURS.worker(engine.endpoint_url) as worker, pytest.raises(WorkerError, match="ours: LockValueError"):
        worker.do("acquire", key="")


def test_reads_and_large_items_cost_what_dynamodb_documents(engine: Engine) -> None:
    with Meter(engine.endpoint_url) as meter:
        client = engine_client(meter.endpoint_url)
        key = {"key": {"S": "large"}}
        client.put_item(TableName="floor", Item={**key, "data": {"S": "x" * 5000}})
        assert meter.take().per(1)["write_units"] == 5
        client.get_item(TableName="floor", Key=key, ConsistentRead=True)
        assert meter.take().per(1)["read_units"] == 2
        other = {"key": {"S": "not there"}}
        client.batch_get_item(RequestItems={"floor": {"Keys": [key, other]}})
        assert meter.take().per(1)["read_units"] == 1.5
        with pytest.raises(client.exceptions.ConditionalCheckFailedException):
            client.delete_item(TableName="floor", Key=key, ConditionExpression="attribute_exists(nothing)")
        assert meter.take().per(1)["write_units"] == 5
        client.delete_item(TableName="floor", Key=key)
        assert meter.take().per(1)["write_units"] == 5
        put = {"Put": {"TableName": "floor", "Item": {**key, "data": {"S": "x" * 1500}}}}
        absent = {"TableName": "floor", "Key": other, "ConditionExpression": "attribute_not_exists(nothing)"}
        client.transact_write_items(TransactItems=[put, {"ConditionCheck": absent}])
        assert meter.take().per(1)["write_units"] == 2 * (2 + 1)
        client.query(
            TableName="floor",
            KeyConditionExpression="#key = :key",
            ExpressionAttributeNames={"#key": "key"},
            ExpressionAttributeValues={":key": key["key"]},
            ConsistentRead=True,
        )
        assert meter.take().per(1)["read_units"] == 1
        client.describe_table(TableName="floor")
        assert meter.take().per(1) == {
            "requests": 1,
            "write_units": 0,
            "read_units": 0,
            "actions": {"DescribeTable": 1},
        }


def test_the_page_shows_what_was_measured() -> None:
    assert page.PAGE.read_text() == page.text(json.loads(RESULTS.read_text()))


def test_an_items_size_is_that_of_its_names_and_values() -> None:
    item = {
        "key": {"S": "abc"},
        "n": {"N": "1234"},
        "m": {"M": {"x": {"BOOL": True}}},
        "none": {"NULL": True},
    }

    assert item_size(item) == (3 + 3) + (1 + 3) + (1 + 3 + 1 + 1 + 1) + (4 + 1)
