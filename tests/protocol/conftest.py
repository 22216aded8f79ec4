"""A fresh simulated world for each test of the protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import boto3
import pytest
from moto import mock_aws

from tests.simulation import TABLE, World


@pytest.fixture(scope="package")
def moto_client() -> Iterator[Any]:
    """moto in this process. It is not atomic between threads, so these tests have one thread."""
    with mock_aws():
        yield boto3.client("dynamodb", region_name="eu-central-1")


@pytest.fixture
def make_world(moto_client: Any) -> Iterator[Callable[..., World]]:
    """Makes the world, on a table of its own that is gone afterwards."""
    moto_client.create_table(
        TableName=TABLE,
        AttributeDefinitions=[{"AttributeName": name, "AttributeType": "S"} for name in ("key", "entry")],
        KeySchema=[
            {"AttributeName": "key", "KeyType": "HASH"},
            {"AttributeName": "entry", "KeyType": "RANGE"},
        ],
        BillingMode="PAY_PER_REQUEST",
    )
    yield lambda **options: World(moto_client, **options)
    moto_client.delete_table(TableName=TABLE)


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    """A world as AWS's: with ``Date`` headers, and refused writes that show the item."""
    return make_world()
