"""The tables of these tests: moto in this process for volume, DynamoDB Local for the grammar of AWS.

``FUZZ=20 pytest tests/fuzz`` runs twenty times as many examples, with new ones each time. Without it, every run has the
same examples, so that a failure is due to a change.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import boto3
import pytest
from botocore.config import Config
from hypothesis import HealthCheck, settings
from moto import mock_aws

from deployments.engines import DynamoDBLocal
from tests.fuzz.judge import TABLE, Served, Table

MORE = float(os.environ.get("FUZZ", "1"))
_ONCE = Config(retries={"total_max_attempts": 1})


def examples(count: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a test that runs with `count` examples, times ``FUZZ``. It is part of the proof."""
    chosen = settings(
        max_examples=round(count * MORE),
        deadline=None,
        derandomize=MORE == 1,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    return lambda test: pytest.mark.proof(chosen(test))


def _make_table(client: Any) -> None:
    """Create a lock table, but without time to live: items of these tests may have expired long ago."""
    client.create_table(
        TableName=TABLE,
        AttributeDefinitions=[{"AttributeName": name, "AttributeType": "S"} for name in ("key", "entry")],
        KeySchema=[
            {"AttributeName": "key", "KeyType": "HASH"},
            {"AttributeName": "entry", "KeyType": "RANGE"},
        ],
        BillingMode="PAY_PER_REQUEST",
    )


@pytest.fixture(scope="package")
def moto_table() -> Iterator[Table]:
    """A lock table of moto in this process."""
    with mock_aws():
        client = boto3.client("dynamodb", region_name="eu-central-1", config=_ONCE)
        _make_table(client)
        yield Table(Served(client))


@pytest.fixture(scope="package")
def local_table() -> Iterator[Table]:
    """A lock table of DynamoDB Local."""
    with DynamoDBLocal() as engine:
        client = boto3.client("dynamodb", endpoint_url=engine.endpoint_url, config=_ONCE)
        _make_table(client)
        yield Table(client)


@pytest.fixture(autouse=True, scope="package")
def quiet() -> Iterator[None]:
    """Suppress the warnings about thousands of damaged records."""
    log = logging.getLogger("airflow_dynamo_lock")
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(logging.NOTSET)
