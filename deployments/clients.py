"""Both clients behind one face, so that each contract test is written once."""

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
from deployments.patience import PATIENCE

T = TypeVar("T")

KINDS = ("sync", "async")
TABLE = "locks"
REGION = "eu-central-1"
#: The table, or bucket, of each foreign format, as its library names it by default.
FOREIGN_TABLES = {
    "amazon-lock-client": "lockTable",
    "python-dynamodb-lock": "DynamoDBLockTable",
    "dyndbmutex": "Mutex",
    "awsflock": "awsflock",
    "s3": "aws-s3-lock",
}
_async_session: Any = get_session()  # one for all, because the first client of a session is slow to make


def any_clock_skew() -> AbstractContextManager[object]:
    """Let clients be made with a ``max_clock_skew`` below the bound: an engine here has this machine's clock."""
    return patch.object(arguments, "MIN_CLOCK_SKEW", 0.0)


#: For tests that count requests. On a busy machine an answer may take longer than the usual two seconds, and the SDK
#: would send the request again.
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
    """An asynchronous client, for those who are coroutines themselves."""
    settings: dict[str, Any] = {"endpoint_url": endpoint_url, "config": sdk_config(**(sdk or {}))}
    settings["region_name"] = REGION
    service = service_of(options.get("table_format", NATIVE))
    async with _async_session.create_client(service, **settings) as aws, AsyncExitStack() as stack:
        follows = None
        if streams:
            follows = await stack.enter_async_context(
                _async_session.create_client("dynamodbstreams", **settings)
            )
        with any_clock_skew():
            client = AsyncLockClient(aws, table=table, streams=follows, **options)
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
    """A client of that kind. An `AsyncLockClient` runs in an event loop in a thread, and looks like a `LockClient`.

    :param sdk: overrides of the recommended SDK settings.
    :param streams: it reads the table's stream, at the same endpoint.
    """
    if kind == "sync":
        settings: dict[str, Any] = {"endpoint_url": endpoint_url, "config": sdk_config(**(sdk or {}))}
        make: Any = boto3.client
        aws = make(service_of(options.get("table_format", NATIVE)), region_name=REGION, **settings)
        follows = boto3.client("dynamodbstreams", region_name=REGION, **settings) if streams else None
        with any_clock_skew():
            made = LockClient(aws, table=table, streams=follows, **options)
        yield made
    else:
        with AsyncClientInThread(endpoint_url, table=table, sdk=sdk, streams=streams, **options) as client:
            yield cast(LockClient, client)


def core_of(client: LockClient) -> ClientCore:
    """The inside of either client."""
    inner = client.client if isinstance(client, AsyncClientInThread) else client
    core = inner._core
    assert isinstance(core, ClientCore)
    return core


class EventLoop:
    """An event loop in a thread of its own, for the length of a ``with`` block."""

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
        """Run a coroutine there and wait for it."""
        running = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return running.result()
        except BaseException:
            running.cancel()
            raise

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class AsyncClientInThread(EventLoop):
    """An `AsyncLockClient` with the face of a `LockClient`."""

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
        """See `LockClient.lock`."""
        block = self.client.lock(key, **options)
        lease = self.run(block.__aenter__())
        try:
            yield lease
        except BaseException as raised:
            if not self.run(block.__aexit__(type(raised), raised, raised.__traceback__)):
                raise
        else:
            self.run(block.__aexit__(None, None, None))

    def keep_alive(self, lease: Lease, **options: Any) -> _Beats:
        """See `LockClient.keep_alive`."""

        async def start() -> asyncio.Task[Any]:
            return self.client.keep_alive(lease, **options)

        return _Beats(self, self.run(start()))

    def list_locks(self, prefix: str = "", **options: Any) -> Iterator[LockRecord]:
        """See `LockClient.list_locks`."""

        async def collect() -> Sequence[LockRecord]:
            return [record async for record in self.client.list_locks(prefix, **options)]

        return iter(self.run(collect()))


class _Beats:
    """The face of a `KeepAlive` for the task that sends heartbeats."""

    def __init__(self, loop: EventLoop, task: asyncio.Task[Any]) -> None:
        self._loop, self._task = loop, task

    def stop(self) -> None:
        self._loop.loop.call_soon_threadsafe(self._task.cancel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
