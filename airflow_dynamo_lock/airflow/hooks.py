"""The connection: where the lock table is, and clients for it.

One process has one asynchronous client per table, shared by all its triggers, so that all who wait there share one
poller (rule R11).
"""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from airflow_dynamo_lock.airflow.provider_info import FIELDS, HIDDEN_FIELDS
from airflow_dynamo_lock.airflow.versions import (
    AirflowNotFoundException,
    BaseHook,
    conf,
    in_thread,
    with_connection_form,
)
from airflow_dynamo_lock.core.foreign.registry import FORMATS, NATIVE, service_of
from airflow_dynamo_lock.core.model.arguments import seconds
from airflow_dynamo_lock.core.model.errors import LockAccessError, LockError, LockValueError
from airflow_dynamo_lock.defaults import DEFAULT_CONN_ID, DEFAULT_LEASE, DEFAULT_TABLE

if TYPE_CHECKING:
    from airflow_dynamo_lock.client.async_client import AsyncLockClient
    from airflow_dynamo_lock.client.sync_client import LockClient


@dataclass(frozen=True)
class LockSettings:
    """What a connection, or else the ``[dynamo_lock]`` section of the configuration, says.

    :ivar table: the lock table.
    :ivar aws_conn_id: the ``aws`` connection with the credentials. If there is none, the SDK searches by itself.
    :ivar lease: the default lease, seconds.
    :ivar deployment: this deployment's name, for people who read who holds a lock.
    :ivar botocore_config: settings of the SDK client that replace ours (`client.wire.SDK_SETTINGS`).
    :ivar streams: triggerers read the table's stream.
    :ivar format: the table's, see `LockClient`; for ``s3``, `table` is a bucket.
    :ivar partition_key: how a foreign table names that key, if not as its library does.
    :ivar sort_key: the same.
    """

    table: str = DEFAULT_TABLE
    aws_conn_id: str = "aws_default"
    region_name: str | None = None
    endpoint_url: str | None = None
    lease: float = DEFAULT_LEASE
    deployment: str = "airflow"
    botocore_config: Mapping[str, Any] = field(
        default_factory=dict, repr=False
    )  # a proxy's password may be in it
    streams: bool = False
    format: str = NATIVE
    partition_key: str | None = None
    sort_key: str | None = None

    @property
    def client_options(self) -> dict[str, Any]:
        """What both kinds of client are made with."""
        return {
            "table": self.table,
            "lease": self.lease,
            "table_format": self.format,
            "partition_key": self.partition_key,
            "sort_key": self.sort_key,
        }

    @classmethod
    def of(cls, values: Mapping[str, Any], *, source: str) -> LockSettings:
        """Settings from a connection's extra or a section of the configuration; what is missing there is the default.

        :param source: names where they come from, for the error.
        :raises LockValueError: a value that cannot be.
        """
        given = {name: value for name, value in values.items() if value not in (None, "")}
        # None of these errors shows what was given: a secret may have got into the wrong field (rule R12).
        try:
            lease = seconds("lease", float(given.get("lease", DEFAULT_LEASE)))
        except (TypeError, ValueError):
            raise LockValueError(f"The lease of {source} must be a number of seconds, more than 0.") from None
        config = given.get("botocore_config", {})
        try:
            config = json.loads(config) if isinstance(config, str) else config
        except ValueError:
            config = None
        if not isinstance(config, Mapping):
            raise LockValueError(f"The botocore_config of {source} must be a JSON object.")
        streams = given.get("streams", False)
        if isinstance(streams, str):
            streams = {"true": True, "false": False}.get(streams.lower())
        if not isinstance(streams, bool):
            raise LockValueError(f"The streams of {source} must be true or false.")
        if (name := given.get("format", NATIVE)) not in FORMATS:
            raise LockValueError(f"The format of {source} must be one of {', '.join(FORMATS)}.")
        if streams and name != NATIVE:
            raise LockValueError(f"The streams of {source} are for the format 'native': leave them out.")
        if "@" in urlsplit(str(given.get("endpoint_url", ""))).netloc:
            raise LockValueError(
                f"The endpoint_url of {source} has a user's name in it: put no credentials there, for errors show it."
            )
        return cls(
            table=given.get("table", DEFAULT_TABLE),
            aws_conn_id=given.get("aws_conn_id", "aws_default"),
            region_name=given.get("region_name"),
            endpoint_url=given.get("endpoint_url"),
            lease=lease,
            deployment=given.get("deployment", conf.get("api", "instance_name", fallback="") or "airflow"),
            botocore_config=config,
            streams=streams,
            format=name,
            partition_key=given.get("partition_key"),
            sort_key=given.get("sort_key"),
        )


@with_connection_form(FIELDS, HIDDEN_FIELDS)
class DynamoLockHook(BaseHook):
    """Clients for the lock table that a ``dynamo_lock`` connection names.

    Without a connection `dynamo_lock_default`, the ``[dynamo_lock]`` section of Airflow's configuration counts.

    :param dynamo_lock_conn_id: the connection.
    """

    conn_name_attr = "dynamo_lock_conn_id"
    default_conn_name = DEFAULT_CONN_ID
    conn_type = "dynamo_lock"
    hook_name = "DynamoDB Lock"

    def __init__(self, dynamo_lock_conn_id: str = DEFAULT_CONN_ID) -> None:
        super().__init__()
        self.dynamo_lock_conn_id = dynamo_lock_conn_id

    @cached_property
    def settings(self) -> LockSettings:
        """What the connection says.

        :raises LockValueError: there is no such connection, or it is of no use.
        """
        try:
            extra = self.get_connection(self.dynamo_lock_conn_id).extra_dejson
        except AirflowNotFoundException as missing:
            return self._configured(missing)
        return self._connected(extra)

    async def aget_settings(self) -> LockSettings:
        """`settings`, looked up without blocking the event loop."""
        return await in_thread(lambda: self.settings)

    def get_conn(self) -> LockClient:
        """A client for use in a task. It is the caller's own, made anew at each call."""
        from airflow_dynamo_lock.client.sync_client import LockClient

        return LockClient(self.sdk(service_of(self.settings.format)), **self.settings.client_options)

    def sdk(self, service: str) -> Any:
        """A boto3 client, as the connection says.

        :raises LockAccessError: none can be made.
        """
        with _sdk_errors():
            (aws,) = _aws_clients(self.settings, service, deferrable=False)
        return aws

    @asynccontextmanager
    async def async_client(self) -> AsyncIterator[tuple[AsyncLockClient, LockSettings]]:
        """This process's client for the table, and the settings. Shared by all who use it at the same time."""
        settings = await self.aget_settings()
        name = (id(asyncio.get_running_loop()), json.dumps(asdict(settings), sort_keys=True))
        shared = _shared.get(name)
        if shared is None:
            shared = _shared[name] = _SharedClient(settings, forget=lambda: _shared.pop(name, None))
        with shared.used():
            # Shielded, since the others wait for it too.
            yield await asyncio.shield(shared.opening), settings

    def test_connection(self) -> tuple[bool, str]:
        """What the connection form's test button does: look at the table."""
        try:
            self.get_conn().check_table()
        except LockError as failure:
            return False, str(failure)
        return True, f"The lock table {self.settings.table!r} is ready."

    def _connected(self, extra: Mapping[str, Any]) -> LockSettings:
        return LockSettings.of(extra, source=f"the connection {self.dynamo_lock_conn_id!r}")

    def _configured(self, missing: Exception) -> LockSettings:
        if self.dynamo_lock_conn_id != DEFAULT_CONN_ID:
            raise LockValueError(
                f"There is no connection {self.dynamo_lock_conn_id!r}: create it with the type 'dynamo_lock', "
                f"or leave dynamo_lock_conn_id out to use the [dynamo_lock] section of the configuration."
            ) from missing
        section = {name: conf.get("dynamo_lock", name, fallback=None) for name in FIELDS}
        settings = LockSettings.of(section, source="the configuration section [dynamo_lock]")
        self.log.info(
            "There is no connection %r; using the lock table %r, as [dynamo_lock] says.",
            self.dynamo_lock_conn_id,
            settings.table,
        )
        return settings


# For how long a client that nobody uses is kept, in seconds. The next trigger mostly comes within moments.
_LINGER = 60.0


class _SharedClient:
    """A client that all who need one at the same time use together.

    :param forget: called when it is about to be closed, so that nobody takes it up any more.
    """

    def __init__(self, settings: LockSettings, forget: Callable[[], object]) -> None:
        self._forget = forget
        self._users = 0
        self._stack = AsyncExitStack()
        self._closing: asyncio.Task[None] | None = None
        self.opening = asyncio.ensure_future(self._open(settings))

    @contextmanager
    def used(self) -> Iterator[None]:
        """For as long as this lasts, and a while after it, the client stays open."""
        self._users += 1
        if self._closing is not None:
            self._closing.cancel()
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._closing = asyncio.ensure_future(self._close_later())

    async def _open(self, settings: LockSettings) -> AsyncLockClient:
        from asgiref.sync import sync_to_async

        with _sdk_errors():
            # In a thread: loading the SDK takes half a second, in which other triggers want to go on.
            client_type, making = await sync_to_async(_prepare)(settings)
            aws, *streams = [await self._stack.enter_async_context(client) for client in making]
        return client_type(aws, streams=streams[0] if streams else None, **settings.client_options)

    async def _close_later(self) -> None:
        failed = self.opening.done() and (self.opening.cancelled() or self.opening.exception() is not None)
        try:
            await asyncio.sleep(0 if failed else _LINGER)
        except asyncio.CancelledError:
            if self._users:
                return
        self._forget()
        await asyncio.gather(self.opening, return_exceptions=True)
        await self._stack.aclose()


_shared: dict[tuple[int, str], _SharedClient] = {}


def _aws_clients(settings: LockSettings, *services: str, deferrable: bool) -> list[Any]:
    """A client of each service with the credentials of the ``aws`` connection; made ready for aiobotocore if
    `deferrable`."""
    from airflow.providers.amazon.aws.hooks.base_aws import AwsBaseHook
    from botocore.config import Config

    from airflow_dynamo_lock.client.sdk import sdk_config

    hook = AwsBaseHook(
        aws_conn_id=settings.aws_conn_id, region_name=settings.region_name, client_type="dynamodb"
    )
    session: Any = hook.get_session(region_name=settings.region_name, deferrable=deferrable)
    config = sdk_config()
    try:
        ours = Config(**settings.botocore_config)
    except Exception:  # whatever the SDK makes of it
        raise LockValueError(
            f"The SDK does not take the connection's botocore_config: one of {sorted(settings.botocore_config)} "
            "is unknown to it, or has a value that cannot be."
        ) from None
    for more in (hook.conn_config.botocore_config, ours):
        config = config.merge(more) if more else config
    if deferrable:
        # Its models are read here, in a thread, and not when the event loop makes the client.
        loader = session.get_component("data_loader")
        loader.load_data("endpoints")
        for service in services:
            for model in ("service-2", "endpoint-rule-set-1"):
                loader.load_service_model(service, model)
    make = session.create_client if deferrable else session.client
    return [
        make(
            service,
            region_name=hook.region_name,
            endpoint_url=settings.endpoint_url or hook.conn_config.get_service_endpoint_url(service),
            config=config,
            verify=hook.verify,
        )
        for service in services
    ]


def _prepare(settings: LockSettings) -> tuple[type[AsyncLockClient], list[Any]]:
    """All of the making of an asynchronous client, and of the SDK's for it, that does not need its event loop."""
    # What is loaded now stays for the life of the process. Looking for garbage in it meanwhile would hold up the event
    # loop as well, for longer than Airflow lets pass without a warning.
    collecting = gc.isenabled()
    gc.disable()
    try:
        from airflow_dynamo_lock.client.async_client import AsyncLockClient

        services = [service_of(settings.format), *(["dynamodbstreams"] if settings.streams else [])]
        return AsyncLockClient, _aws_clients(settings, *services, deferrable=True)
    finally:
        if collecting:
            gc.enable()


class _sdk_errors:
    """What goes wrong while a client is made, as one of our errors."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, failure: BaseException | None, traceback: object) -> None:
        from botocore.exceptions import BotoCoreError

        if isinstance(failure, (BotoCoreError, TypeError, ValueError)) and not isinstance(failure, LockError):
            raise LockAccessError(
                f"No DynamoDB client can be made from the connection ({failure}): "
                "check its region, its endpoint URL and the credentials of its aws connection."
            ) from failure
