"""A lock table and connections for tests of the Airflow layer that need no running Airflow."""

from __future__ import annotations

import json

import pytest

from airflow_dynamo_lock import LockClient
from deployments.engines import Engine


@pytest.fixture(scope="session")
def locks(moto: Engine) -> LockClient:
    """Return a client of a lock table on a server."""
    client = LockClient(moto.client(), table="locks", owner="the tests")
    client.create_table()
    return client


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch, locks: LockClient) -> None:
    """Define connections to that table in the environment, without an endpoint."""
    extra = {"table": "locks", "region_name": "eu-central-1"}
    monkeypatch.setenv("AWS_ENDPOINT_URL_DYNAMODB", locks._client.meta.endpoint_url)
    monkeypatch.setenv("_AIRFLOW_PROCESS_CONTEXT", "client")
    monkeypatch.setenv(
        "AIRFLOW_CONN_DYNAMO_LOCK_DEFAULT", json.dumps({"conn_type": "dynamo_lock", "extra": extra})
    )
    monkeypatch.setenv(
        "AIRFLOW_CONN_AWS_DEFAULT", '{"conn_type": "aws", "login": "test", "password": "test-secret"}'
    )
