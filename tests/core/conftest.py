"""Fixtures of the core's tests: a new simulated world for each test, on the simulated table.

`make proof` runs each test on moto as well. A conditional write takes 9 ms on moto and 0.02 ms on the simulated table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import boto3
import pytest
from moto import mock_aws

from proof.simulator.sdk import SimulatedClient
from proof.simulator.stepped import TABLE, World


@pytest.fixture(scope="package")
def moto_client() -> Iterator[Any]:
    """A client of moto in this process. moto is not atomic between threads, so these tests use one thread."""
    with mock_aws():
        yield boto3.client("dynamodb", region_name="eu-central-1")


@pytest.fixture(params=["simulated", pytest.param("moto", marks=pytest.mark.proof)])
def client(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A boto3 client with an empty lock table, which is deleted after the test."""
    if request.param == "simulated":
        yield SimulatedClient()
        return
    moto = request.getfixturevalue("moto_client")
    moto.create_table(
        TableName=TABLE,
        AttributeDefinitions=[{"AttributeName": name, "AttributeType": "S"} for name in ("key", "entry")],
        KeySchema=[
            {"AttributeName": "key", "KeyType": "HASH"},
            {"AttributeName": "entry", "KeyType": "RANGE"},
        ],
        BillingMode="PAY_PER_REQUEST",
    )
    yield moto
    moto.delete_table(TableName=TABLE)


@pytest.fixture
def make_world(client: Any) -> Callable[..., World]:
    """A function that creates a world with the table."""
    return lambda **options: World(client, **options)


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    """A world like AWS: answers have ``Date`` headers, and those to refused writes contain the item."""
    return make_world()
