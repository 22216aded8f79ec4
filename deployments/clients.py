"""Lock clients on an engine. Both kinds have the interface of `LockClient`, so that one test covers both."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, Self, TypeVar, cast
from unittest.mock import patch

import boto3
from aiobotocore.session import get_session

from airflow_dynamo_lock import AsyncLockClient, Lease, LockClient, LockRecord, sdk_config
from airflow_dynamo_lock.client.session import ClientCore
from airflow_dynamo_lock.core.foreign.registry import NATIVE, service_of
from airflow_dynamo_lock.core.model import arguments
from deployments.engines import REGION
from deployments.patience import PATIENCE

T = TypeVar("T")

KINDS = ("sync", "async")
TABLE = "locks"
#: The default table, or bucket, of the library of each foreign format.
FOREIGN_TABLES = {
    "amazon-lock-client": "lockTable",
    "python-dynamodb-lock": "DynamoDBLockTable",
    "dyndbmutex": "Mutex",
    "awsflock": "awsflock",
    "s3": "aws-s3-lock",
}
_async_session: Any = get_session()  # shared, because creating the first client of a session is slow


def any_clock_skew() -> AbstractContextManager[object]:
    """Allow any ``max_clock_skew`` for the clients that are created in this context.

    The lower bound is not needed, because an engine on this machine has the same clock as its clients.
    """
    return patch.object(arguments, "MIN_CLOCK_SKEW", 0.0)


#: SDK settings for tests that count requests, or in which no request may fail. On a busy machine an answer may take
#: longer than the usual two seconds; the SDK would send the request again, and then give it up.
SLOW = {"read_timeout": PATIENCE}


@asynccontextmanager
async def async_lock_client(
    endpoint_url: str,
    *,
    table: str = TABLE,
    sdk: dict[str, Any] | None = None,
    streams: bool = False,
    **options: Any,
) -> AsyncIterator[AsyncLockClient]:
    """Create an `AsyncLockClient`, for callers that run in an event loop.

    :param sdk: SDK settings that override those of a lock client.
    :param streams: also read the table's stream, at the same endpoint.
    :param options: options of `AsyncLockClient`.
    """
    settings: dict[str, Any] = {"endpoint_url": endpoint_url, "config": sdk_config(**(sdk or {}))}
    settings["region_name"] = REGION
    service = service_of(options.get("table_format", NATIVE))
    async with _async_session.create_client(service, **settings) as aws, AsyncExitStack() as stack:
        stream_client = None
        if streams:
            stream_client = await stack.enter_async_context(
                _async_session.create_client("dynamodbstreams", **settings)
            )
        with any_clock_skew():
            client = AsyncLockClient(aws, table=table, streams=stream_client, **options)
        yield client


@contextmanager
def lock_client(
    kind: str,
    endpoint_url: str,
    *,
    table: str = TABLE,
    sdk: dict[str, Any] | None = None,
    streams: bool = False,
    **options: Any,
) -> Iterator[LockClient]:
    """Create a client of either kind, with the interface of `LockClient`.

    :param kind: ``"sync"`` for a `LockClient`, ``"async"`` for an `AsyncLockClient` that runs in a thread.
    :param sdk: SDK settings that override those of a lock client.
    :param streams: also read the table's stream, at the same endpoint.
    :param options: options of the client.
    """
    if kind == "sync":
        settings: dict[str, Any] = {"endpoint_url": endpoint_url, "config": sdk_config(**(sdk or {}))}
        create_client: Any = boto3.client
        aws = create_client(service_of(options.get("table_format", NATIVE)), region_name=REGION, **settings)
        stream_client = boto3.client("dynamodbstreams", region_name=REGION, **settings) if streams else None
        with any_clock_skew():
            locks = LockClient(aws, table=table, streams=stream_client, **options)
        yield locks
    else:
        with AsyncClientInThread(endpoint_url, table=table, sdk=sdk, streams=streams, **options) as client:
            yield cast(LockClient, client)


def core_of(client: LockClient) -> ClientCore:
    """Return the core of a client that `lock_client` has created."""
    inner = client.client if isinstance(client, AsyncClientInThread) else client
    core = inner._core
    assert isinstance(core, ClientCore)
    return core


class EventLoop:
    """An event loop in a thread of its own, which runs during the `with` block."""

    def __enter__(self) -> Self:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="event loop", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._cancel_all())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the event loop and return its result. An interrupt cancels the coroutine."""
        running = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return running.result()
        except BaseException:
            running.cancel()
            raise

    async def _cancel_all(self) -> None:
        # A cancelled task may start others, to remove its queue entry for example.
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class AsyncClientInThread(EventLoop):
    """An `AsyncLockClient` with the interface of a `LockClient`: each call waits for its coroutine."""

    client: AsyncLockClient

    def __init__(self, endpoint_url: str, **options: Any) -> None:
        self._client = async_lock_client(endpoint_url, **options)

    def __enter__(self) -> Self:
        super().__enter__()
        self.client = self.run(self._client.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._client.__aexit__(None, None, None))
        super().__exit__()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.client, name)
        return lambda *args, **options: self.run(method(*args, **options))

    @contextmanager
    def lock(self, key: Any, **options: Any) -> Iterator[Any]:
        """Acquire a lock for the `with` block, as `LockClient.lock` does."""
        block = self.client.lock(key, **options)
        lease = self.run(block.__aenter__())
        try:
            yield lease
        except BaseException as raised:
            if not self.run(block.__aexit__(type(raised), raised, raised.__traceback__)):
                raise
        else:
            self.run(block.__aexit__(None, None, None))

    def keep_alive(self, lease: Lease, **options: Any) -> _TaskKeepAlive:
        """Start heartbeats in the event loop, as `LockClient.keep_alive` does in a thread."""

        async def start() -> asyncio.Task[Any]:
            return self.client.keep_alive(lease, **options)

        return _TaskKeepAlive(self, self.run(start()))

    def list_locks(self, prefix: str = "", **options: Any) -> Iterator[LockRecord]:
        """List the locks, as `LockClient.list_locks` does, but read all pages first."""

        async def collect() -> Sequence[LockRecord]:
            return [record async for record in self.client.list_locks(prefix, **options)]

        return iter(self.run(collect()))


class _TaskKeepAlive:
    """The interface of `KeepAlive` for the asyncio task that sends heartbeats."""

    def __init__(self, event_loop: EventLoop, task: asyncio.Task[Any]) -> None:
        self._event_loop, self._task = event_loop, task

    def stop(self) -> None:
        self._event_loop.loop.call_soon_threadsafe(self._task.cancel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
