"""Fixtures: a table of each foreign format on moto and, in `make proof`, on each engine that has the service."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import boto3
import pytest

from airflow_dynamo_lock import LockClient
from airflow_dynamo_lock.core.foreign.registry import FORMATS, NATIVE, service_of
from deployments.clients import FOREIGN_TABLES, lock_client
from deployments.engines import REGION, DynamoDBLocal, Engine, MotoServer

FOREIGN = tuple(name for name in FORMATS if name != NATIVE)

MakeClient = Callable[..., LockClient]


@dataclass
class Place:
    """A table or a bucket with locks of one format.

    :ivar sdk: a boto3 client, to write what another library writes.
    :ivar kind: kind of the client under test, sync or async.
    """

    format: str
    engine: Engine
    sdk: Any
    kind: str = "sync"

    @property
    def table(self) -> str:
        return FOREIGN_TABLES[self.format]

    @property
    def sends_dates(self) -> bool:
        """Return whether the answers of the engine have a ``Date``, as those of AWS do."""
        return isinstance(self.engine, MotoServer)


def places(*formats: str, engine: str | None = None) -> pytest.MarkDecorator:
    """Run a test only in these formats, and only on one engine if it is named."""
    chosen = [each for each in _PLACES if (not formats or each[0] in formats) and engine in (None, each[1])]
    return pytest.mark.parametrize("place", _params(chosen), indirect=True)


def _params(places: Sequence[tuple[str, str, str]]) -> list[Any]:
    """Return parameters; `make test` runs each format with one client on one engine."""
    proof = pytest.mark.proof
    return [
        pytest.param(each, id="-".join(each), marks=() if each[1:] == ("moto", "sync") else proof)
        for each in places
    ]


# Each format has one of the clients on each engine. S3, which only one engine has, has both.
_PLACES = [(name, "moto", "sync") for name in FOREIGN]
_PLACES += [(name, "dynamodb_local", "async") for name in FOREIGN if name != "s3"] + [("s3", "moto", "async")]


@pytest.fixture(params=_params(_PLACES))
def place(request: pytest.FixtureRequest) -> Place:
    """A table that our client has created, or a bucket."""
    name, engine, kind = request.param
    return replace(make_place(name, request.getfixturevalue(engine)), kind=kind)


@cache
def make_place(name: str, engine: Engine) -> Place:
    """Create the table or the bucket of a format on an engine."""
    make: Any = boto3.client
    sdk = make(service_of(name), region_name=REGION, endpoint_url=engine.endpoint_url)
    place = Place(name, engine, sdk)
    if name != "s3":
        LockClient(sdk, table=place.table, table_format=name).create_table()
        if name == "awsflock" and isinstance(engine, DynamoDBLocal):
            # DynamoDB Local may delete a lock in the second in which it expires, and with it the trace of its
            # holder. AWS takes minutes or days.
            off = {"Enabled": False, "AttributeName": "expiration_time"}
            sdk.update_time_to_live(TableName=place.table, TimeToLiveSpecification=off)
    else:
        sdk.create_bucket(Bucket=place.table, CreateBucketConfiguration={"LocationConstraint": REGION})
    return place


@pytest.fixture
def make_client(place: Place) -> Iterator[MakeClient]:
    """Creates clients that are closed when the test ends."""
    with ExitStack() as stack:

        def make(**options: Any) -> LockClient:
            given = {"table": place.table, "table_format": place.format} | options
            return stack.enter_context(lock_client(place.kind, place.engine.endpoint_url, **given))

        yield make


@pytest.fixture
def client(make_client: MakeClient) -> LockClient:
    return make_client(lease=30.0)


@pytest.fixture
def elsewhere(make_client: MakeClient) -> LockClient:
    """Another client, as if of another process."""
    return make_client(owner="elsewhere")


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    """Key of a lock that only this test uses."""
    return str(request.node.name)


@pytest.fixture(autouse=True)
def short_settle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the wait after which the client reads a lock in S3 again, from 1 s."""
    monkeypatch.setattr("airflow_dynamo_lock.core.foreign.s3_requests.SETTLE", 0.02)
