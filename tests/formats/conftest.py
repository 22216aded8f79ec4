"""A table of each foreign format on moto, and for `make proof` on each engine that has the service."""

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
    """Where locks of one format are.

    :ivar sdk: a boto3 client, to do there what another library does.
    :ivar kind: of the client that is tried there.
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
        """Whether the engine tells its time, as AWS does."""
        return isinstance(self.engine, MotoServer)


def places(*formats: str, engine: str | None = None) -> pytest.MarkDecorator:
    """Have a test run in these formats only, and on that engine if one is named."""
    chosen = [each for each in _PLACES if (not formats or each[0] in formats) and engine in (None, each[1])]
    return pytest.mark.parametrize("place", _params(chosen), indirect=True)


def _params(places: Sequence[tuple[str, str, str]]) -> list[Any]:
    """`make test` has each format with one client on one engine."""
    proof = pytest.mark.proof
    return [
        pytest.param(each, id="-".join(each), marks=() if each[1:] == ("moto", "sync") else proof)
        for each in places
    ]


# Each with one of the clients on each engine, and with both in S3, which only one engine has.
_PLACES = [(name, "moto", "sync") for name in FOREIGN]
_PLACES += [(name, "dynamodb_local", "async") for name in FOREIGN if name != "s3"] + [("s3", "moto", "async")]


@pytest.fixture(params=_params(_PLACES))
def place(request: pytest.FixtureRequest) -> Place:
    """A table, made by our own client; or a bucket."""
    name, engine, kind = request.param
    return replace(make_place(name, request.getfixturevalue(engine)), kind=kind)


@cache
def make_place(name: str, engine: Engine) -> Place:
    """A table of that format there."""
    make: Any = boto3.client
    sdk = make(service_of(name), region_name=REGION, endpoint_url=engine.endpoint_url)
    place = Place(name, engine, sdk)
    if name != "s3":
        LockClient(sdk, table=place.table, table_format=name).create_table()
        if name == "awsflock" and isinstance(engine, DynamoDBLocal):
            # It may remove a lock in the second in which it expires, where AWS takes minutes, or days; and with it
            # what tells that there was a holder.
            off = {"Enabled": False, "AttributeName": "expiration_time"}
            sdk.update_time_to_live(TableName=place.table, TimeToLiveSpecification=off)
    else:
        sdk.create_bucket(Bucket=place.table, CreateBucketConfiguration={"LocationConstraint": REGION})
    return place


@pytest.fixture
def make_client(place: Place) -> Iterator[MakeClient]:
    """Makes clients that last as long as the test."""
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
    """Another client, of another process as it were."""
    return make_client(owner="elsewhere")


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    """A lock of the test's own."""
    return str(request.node.name)


@pytest.fixture(autouse=True)
def settles_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock in S3 is looked at once more, but not a second later."""
    monkeypatch.setattr("airflow_dynamo_lock.core.foreign.s3_requests.SETTLE", 0.02)
