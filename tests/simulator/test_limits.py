"""All engines have the limits of DynamoDB. AWS's own engine, DynamoDB Local, confirms them."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.exceptions import ClientError

from airflow_dynamo_lock import LockClient
from deployments import limits
from deployments.engines import Engine
from proof.simulator.dynamodb import Table, Throttled
from proof.simulator.expressions import InvalidExpression

TABLE = "limits"


def _comparisons(number: int) -> str:
    """Return a condition with this number of comparisons, with an OR between two."""
    return " OR ".join(["#n = :n"] * number)


def _of_bytes(size: int) -> str:
    """Return a condition of this number of bytes."""
    return "#n = :n".ljust(size)


LIMITS = {
    "4,096 bytes of an expression": (_of_bytes(4096), True),
    "4,097 bytes of an expression": (_of_bytes(4097), False),
    "299 operators": (_comparisons(150), True),
    "301 operators": (_comparisons(151), False),
    "parentheses within a condition": ("#n = :n AND (#n = :n OR (#n = :n AND #n = :n))", True),
    "redundant parentheses": ("((#n = :n))", False),
    "redundant parentheses after AND": ("#n = :n AND ((#n = :n))", False),
    "redundant parentheses after NOT": ("NOT ((#n = :n))", False),
    "parentheses of a function": ("attribute_exists (#n) AND (attribute_exists(#n))", True),
}


def _update(condition: str) -> dict[str, Any]:
    return {
        "TableName": TABLE,
        "Key": {"key": {"S": "a"}, "entry": {"S": "lock"}},
        "UpdateExpression": "SET #n = :n",
        "ConditionExpression": condition,
        "ExpressionAttributeNames": {"#n": "n"},
        "ExpressionAttributeValues": {":n": {"N": "1"}},
    }


@pytest.fixture(params=["moto", pytest.param("dynamodb_local", marks=pytest.mark.proof)])
def engine(request: pytest.FixtureRequest) -> Any:
    """Return a client of an engine with a lock table."""
    served: Engine = request.getfixturevalue(request.param)
    client = served.client()
    LockClient(client, table=TABLE).create_table()
    client.put_item(TableName=TABLE, Item={"key": {"S": "a"}, "entry": {"S": "lock"}, "n": {"N": "1"}})
    return client


@pytest.mark.parametrize(("condition", "accepted"), LIMITS.values(), ids=LIMITS)
def test_an_engine_refuses_an_invalid_expression(engine: Any, condition: str, accepted: bool) -> None:
    if accepted:
        engine.update_item(**_update(condition))
    else:
        with pytest.raises(ClientError, match="ValidationException"):
            engine.update_item(**_update(condition))


@pytest.mark.parametrize(("condition", "accepted"), LIMITS.values(), ids=LIMITS)
def test_the_simulated_table_refuses_an_invalid_expression(condition: str, accepted: bool) -> None:
    table = Table()
    table.write("Put", {"Item": {"key": {"S": "a"}, "entry": {"S": "lock"}, "n": {"N": "1"}}}, 0.0)
    if accepted:
        table.write("Update", _update(condition), 0.0)
    else:
        with pytest.raises(InvalidExpression):
            table.write("Update", _update(condition), 0.0)


@pytest.mark.parametrize("condition", ["attribute_exists((#n))", "size ((#n)) > :n", "#n IN ((:n))"])
def test_parentheses_within_those_of_a_function_or_of_in_are_not_redundant(condition: str) -> None:
    limits.check("UpdateItem", _update(condition))


def test_the_simulated_table_refuses_an_item_that_is_too_large() -> None:
    item = {"key": {"S": "a"}, "entry": {"S": "lock"}, "data": {"S": "x" * limits.ITEM_BYTES}}
    with pytest.raises(InvalidExpression, match="Item size"):
        Table().write("Put", {"Item": item}, 0.0)


def test_the_simulated_table_throttles_a_partition() -> None:
    table = Table()
    item = {"key": {"S": "a"}, "entry": {"S": "lock"}, "data": {"S": "x" * 99 * 1024}}
    for _ in range(10):
        table.write("Put", {"Item": item}, 0.0)
    with pytest.raises(Throttled):
        table.write("Put", {"Item": item}, 0.9)
    table.write("Put", {"Item": item}, 1.0)
