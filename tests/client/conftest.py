"""Engines and clients for the contract tests.

`make test` runs them on moto: the contract with both clients (`BOTH_KINDS`), all others with `LockClient`. `make proof`
runs the others with `AsyncLockClient` too, and all of them on DynamoDB Local.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.retries.standard import ExponentialBackoff

from airflow_dynamo_lock import LockClient
from deployments.clients import KINDS, lock_client
from deployments.engines import DynamoDBLocal, Engine, MotoServer
from deployments.proxy import Proxy

#: The files whose tests `make test` runs with both clients.
BOTH_KINDS = ("test_contract.py", "test_heartbeats.py", "test_parity.py", "test_smoke.py")

#: Makes a client: `make_client()` on the engine, `make_client(proxy)` through the proxy; options as in `lock_client`.
MakeClient = Callable[..., LockClient]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        callspec = getattr(item, "callspec", None)
        is_async = callspec is not None and callspec.params.get("kind") == "async"
        if is_async and item.path.parent == Path(__file__).parent and item.path.name not in BOTH_KINDS:
            item.add_marker(pytest.mark.proof)


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(MotoServer, id=MotoServer.name),
        pytest.param(DynamoDBLocal, id=DynamoDBLocal.name, marks=pytest.mark.proof),
    ],
)
def engine(request: pytest.FixtureRequest) -> Engine:
    """A served DynamoDB with a lock table. One that cannot start fails the tests."""
    served: Engine = request.getfixturevalue(request.param.name.replace("-", "_"))
    with lock_client("sync", served.endpoint_url) as client:
        client.create_table()
    return served


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK's own retries come without the pause of up to a second before each: they do the same, sooner."""
    monkeypatch.setattr(ExponentialBackoff, "delay_amount", lambda *_: 0.0)


@pytest.fixture
def shows_refused(engine: Engine) -> bool:
    """Whether the engine shows the item of a refused write, as DynamoDB does."""
    return isinstance(engine, MotoServer)


@pytest.fixture
def sends_dates(engine: Engine) -> bool:
    """Whether the engine sends ``Date`` headers, as DynamoDB does."""
    return isinstance(engine, MotoServer)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of client."""
    return str(request.param)


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    """A lock of the test's own."""
    return str(request.node.name)


@pytest.fixture
def proxy(engine: Engine) -> Iterator[Proxy]:
    """A proxy before the engine."""
    with Proxy(engine.endpoint_url) as proxy:
        yield proxy


@pytest.fixture
def make_client(engine: Engine, kind: str) -> Iterator[MakeClient]:
    """Makes clients that last as long as the test."""
    with ExitStack() as stack:

        def make(through: Proxy | None = None, **options: Any) -> LockClient:
            url = (through or engine).endpoint_url
            return stack.enter_context(lock_client(kind, url, **options))

        yield make


@pytest.fixture
def elsewhere(make_client: MakeClient) -> LockClient:
    """Another client, of another process as it were."""
    return make_client(owner="elsewhere")


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    """For those who wait."""
    with ThreadPoolExecutor(20) as pool:
        yield pool


@pytest.fixture
def client(make_client: MakeClient) -> LockClient:
    """A client that talks to the engine directly."""
    return make_client()


@pytest.fixture
def sdk_client(engine: Engine) -> Any:
    """The SDK's own client, to look behind the lock's."""
    return boto3.client("dynamodb", endpoint_url=engine.endpoint_url)
