"""The simulated network and transactions: it may deliver one twice, refuse one, and show half of one to a read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from botocore.exceptions import ClientError, ReadTimeoutError

from proof.simulator.dynamodb import Table
from proof.simulator.network import TABLE, FaultRates, Network, Sdk
from proof.simulator.world import Process, World

BOTH = ("lock", "waiter/1")


class Scene:
    """A table, and processes that send requests to it.

    :ivar applied: the entries that were written, in order.
    """

    def __init__(self, fault_rates: FaultRates | None = None, seed: int = 1) -> None:
        self.world, self.applied = World(seed), list[str]()
        self.network = Network(
            self.world, Table(max_staleness=3.0), self._applied, dates=True, shows_refused=True, apart=0.0
        )
        self.network.fault_rates = fault_rates or FaultRates()

    def _applied(self, process: Process, params: Any, before: Any, after: Any) -> None:
        self.applied.append(params["Key"]["entry"]["S"])

    def do(self, work: Callable[[Sdk], Awaitable[Any]]) -> list[Any]:
        """Start the work in a new process, and return a list that receives its result or its exception."""
        process, results = self.world.process("a process"), list[Any]()

        async def until_done() -> None:
            try:
                results.append(await work(Sdk(self.network, process)))
            except Exception as failure:
                results.append(failure)

        process.start(until_done())
        return results

    def after(self, work: Callable[[Sdk], Awaitable[Any]], seconds: float = 200.0) -> Any:
        """Do the work, wait until all requests have arrived, and return its result or its exception."""
        results = self.do(work)
        self.world.run(lambda: False, self.world.now + seconds)
        return results[0]

    def counts(self) -> list[int]:
        """Return the counters of the two entries."""
        items = [self.network.table.get(_key(entry)) for entry in BOTH]
        return [int(item["n"]["N"]) if item else 0 for item in items]


def test_a_transaction_is_carried_out_once_however_often_it_arrives() -> None:
    for fault_rates in (FaultRates(late=1.0), FaultRates(answer_lost=1.0)):
        scene = Scene(fault_rates)
        assert isinstance(scene.after(increment), ReadTimeoutError)
        assert scene.world.faults["request retried by the SDK"] == 1
        assert scene.counts() == [1, 1]
        assert scene.applied == list(BOTH)


def test_a_transaction_that_the_sdk_sends_again_succeeds() -> None:
    scene = Scene(FaultRates(answer_lost=0.5), seed=4)
    output = scene.after(increment)
    assert output["ResponseMetadata"]["RetryAttempts"] == 1
    assert scene.counts() == [1, 1]


def test_each_call_is_a_transaction_of_its_own() -> None:
    scene = Scene()
    scene.after(increment)
    scene.after(increment)
    assert scene.counts() == [2, 2]


def test_a_refused_transaction_has_a_reason_for_each_item() -> None:
    scene = Scene()
    scene.after(increment)
    refused = scene.after(lambda sdk: increment(sdk, condition="#n = :zero"))
    assert isinstance(refused, ClientError)
    assert refused.response["Error"]["Code"] == "TransactionCanceledException"
    reasons: Any = refused.response["CancellationReasons"]
    assert [each["Code"] for each in reasons] == ["ConditionalCheckFailed"] * 2
    assert [each["Item"]["entry"]["S"] for each in reasons] == list(BOTH)
    assert scene.counts() == [1, 1]


def test_in_a_conflict_nothing_is_written() -> None:
    scene = Scene()
    assert "ResponseMetadata" in scene.after(increment)
    assert "ResponseMetadata" in scene.after(lambda sdk: sdk.update_item(**_increment("alone")))
    scene.network.fault_rates = FaultRates(conflicted=1.0)

    conflict = scene.after(increment)
    assert conflict.response["Error"]["Code"] == "TransactionCanceledException"
    codes = [each["Code"] for each in conflict.response["CancellationReasons"]]
    assert sorted(codes) == ["None", "TransactionConflict"]

    conflict = scene.after(lambda sdk: sdk.update_item(**_increment("lock")))
    assert conflict.response["Error"]["Code"] == "TransactionConflictException"
    assert scene.counts() == [1, 1]

    assert "ResponseMetadata" in scene.after(lambda sdk: sdk.update_item(**_increment("alone")))


def test_an_applied_transaction_that_arrives_again_has_no_conflict() -> None:
    scene = Scene()
    scene.after(lambda sdk: increment(sdk, token="mine"))
    scene.network.fault_rates = FaultRates(conflicted=1.0)
    assert "ResponseMetadata" in scene.after(lambda sdk: increment(sdk, token="mine"))
    assert scene.counts() == [1, 1]


def test_a_consistent_query_may_show_half_a_transaction_but_nothing_from_before_it_was_sent() -> None:
    def shown(seed: int) -> tuple[int, ...]:
        """Return the counters that a query shows while a transaction increments both from 1."""
        scene = Scene(FaultRates(slow=0.5), seed)
        once = scene.do(increment)
        scene.world.run(lambda: bool(once), 10.0)
        scene.do(increment)
        output = scene.after(query)
        return tuple(int(item["n"]["N"]) for item in output["Items"])

    assert set(map(shown, range(100))) == {(1, 1), (1, 2), (2, 1), (2, 2)}


async def increment(sdk: Sdk, condition: str | None = None, token: str | None = None) -> Any:
    """Increment the counters of both entries in a transaction."""
    updates = [{"Update": _increment(entry, condition)} for entry in BOTH]
    given = {"ClientRequestToken": token} if token else {}
    return await sdk.transact_write_items(TransactItems=updates, **given)


async def query(sdk: Sdk) -> Any:
    """Read both entries by a consistent query."""
    return await sdk.query(
        TableName=TABLE,
        KeyConditionExpression="#key = :key",
        ExpressionAttributeNames={"#key": "key"},
        ExpressionAttributeValues={":key": {"S": "k"}},
        ConsistentRead=True,
    )


def _increment(entry: str, condition: str | None = None) -> dict[str, Any]:
    return {
        "TableName": TABLE,
        "Key": _key(entry),
        "UpdateExpression": "SET #n = if_not_exists(#n, :zero) + :one",
        "ExpressionAttributeNames": {"#n": "n"},
        "ExpressionAttributeValues": {":zero": {"N": "0"}, ":one": {"N": "1"}},
        "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
        **({"ConditionExpression": condition} if condition else {}),
    }


def _key(entry: str) -> dict[str, Any]:
    return {"key": {"S": "k"}, "entry": {"S": entry}}
