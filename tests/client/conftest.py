"""Engines and clients for the contract tests.

`make test` runs them on moto: the contract with both clients (`BOTH_KINDS`), others with `LockClient`. `make proof`
runs the others with `AsyncLockClient` too, and all of them on DynamoDB Local. Files of the proof alone say so in their
`pytestmark`.
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
from deployments.clients import KINDS, SLOW, lock_client
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
    """A running engine with a lock table. If it cannot start, the tests fail."""
    served: Engine = request.getfixturevalue(request.param.name.replace("-", "_"))
    with lock_client("sync", served.endpoint_url) as client:
        client.create_table()
    return served


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the SDK's pause of up to a second before each retry, which only costs time."""
    monkeypatch.setattr(ExponentialBackoff, "delay_amount", lambda *_: 0.0)


@pytest.fixture
def shows_refused(engine: Engine) -> bool:
    """Whether the engine returns the item with a refused write, as DynamoDB does."""
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
    """A lock key that no other test uses."""
    return str(request.node.name)


@pytest.fixture
def proxy(engine: Engine) -> Iterator[Proxy]:
    """A proxy in front of the engine."""
    with Proxy(engine.endpoint_url) as proxy:
        yield proxy


@pytest.fixture
def make_client(engine: Engine, kind: str) -> Iterator[MakeClient]:
    """Makes clients, which are closed when the test ends."""
    with ExitStack() as stack:

        def make(through: Proxy | None = None, **options: Any) -> LockClient:
            url = (through or engine).endpoint_url
            if through is None:
                options.setdefault("sdk", SLOW)
            return stack.enter_context(lock_client(kind, url, **options))

        yield make


@pytest.fixture
def elsewhere(make_client: MakeClient) -> LockClient:
    """A second client. It stands for another process."""
    return make_client(owner="elsewhere")


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    """Threads in which waiters can run."""
    with ThreadPoolExecutor(20) as pool:
        yield pool


@pytest.fixture
def client(make_client: MakeClient) -> LockClient:
    """A client that sends its requests to the engine directly, not through the proxy."""
    return make_client()


@pytest.fixture
def sdk_client(engine: Engine) -> Any:
    """An SDK client, to read and write items without the lock client."""
    return boto3.client("dynamodb", endpoint_url=engine.endpoint_url)
