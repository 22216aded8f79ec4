"""A home for Airflow and a lock table, for tests of the Airflow layer that need no running Airflow."""

from __future__ import annotations

from collections.abc import Iterator

import boto3
import pytest

from airflow_dynamo_lock import LockClient, sdk_config
from tests.engines import MotoServer


@pytest.fixture(scope="session")
def locks() -> Iterator[LockClient]:
    """A client of a served lock table."""
    with MotoServer() as engine:
        aws = boto3.client("dynamodb", endpoint_url=engine.endpoint_url, config=sdk_config())
        client = LockClient(aws, table="locks", owner="the tests")
        client.create_table()
        yield client
