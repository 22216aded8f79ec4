"""The hook: reads a ``dynamo_lock`` connection, and creates clients for its lock table.

All triggers of a process share one asynchronous client per connection, so that they share one poller (R11,
shared poller).
"""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict
from functools import cached_property, partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from airflow_dynamo_lock.airflow import metrics
from airflow_dynamo_lock.airflow.provider_info import CONN_TYPE, FIELDS, HIDDEN_FIELDS
from airflow_dynamo_lock.airflow.settings import LockSettings, check_is_unset
from airflow_dynamo_lock.airflow.sharing import SharedClient, SharedLookups
from airflow_dynamo_lock.airflow.versions import (
    AirflowNotFoundException,
    BaseHook,
    conf,
    with_connection_form,
)
from airflow_dynamo_lock.core.foreign.registry import service_of
from airflow_dynamo_lock.core.model.errors import LockAccessError, LockError, LockValueError
from airflow_dynamo_lock.defaults import DEFAULT_CONN_ID

if TYPE_CHECKING:
    from airflow_dynamo_lock.client.async_client import AsyncLockClient
    from airflow_dynamo_lock.client.sync_client import LockClient


@with_connection_form(FIELDS, HIDDEN_FIELDS)
class DynamoLockHook(BaseHook):
    """Creates clients for the lock table of a ``dynamo_lock`` connection.

    If there is no connection ``dynamo_lock_default``, the hook uses the ``[dynamo_lock]`` section of
    Airflow's configuration instead.

    :param dynamo_lock_conn_id: id of the connection.
    """

    conn_name_attr = "dynamo_lock_conn_id"
    default_conn_name = DEFAULT_CONN_ID
    conn_type = CONN_TYPE
    hook_name = "DynamoDB Lock"

    def __init__(self, dynamo_lock_conn_id: str = DEFAULT_CONN_ID) -> None:
        super().__init__()
        self.dynamo_lock_conn_id = dynamo_lock_conn_id

    @cached_property
    def settings(self) -> LockSettings:
        """The settings of the connection, or of the configuration section.

        :raises LockValueError: there is no such connection, or it is not valid.
        :raises LockUnavailableError: a secrets backend or Airflow's API server could not look it up.
        """
        try:
            connection = self.get_connection(self.dynamo_lock_conn_id)
        except AirflowNotFoundException as missing:
            check_is_unset(self.dynamo_lock_conn_id)
            if self.dynamo_lock_conn_id != DEFAULT_CONN_ID:
                raise LockValueError(
                    f"There is no connection {self.dynamo_lock_conn_id!r}: "
                    "create it with the type 'dynamo_lock', "
                    "or leave dynamo_lock_conn_id out to use the [dynamo_lock] section of the configuration."
                ) from missing
            return self._settings_of_section()
        return LockSettings.of_connection(connection, self.dynamo_lock_conn_id)

    async def aget_settings(self) -> LockSettings:
        """Return `settings` without blocking the event loop. Raises the same errors.

        A process looks them up once in `sharing.KEPT_SECONDS`.
        """
        return (await self._shared_settings())[0]

    def get_conn(self) -> LockClient:
        """Create a client for use in a task. Each call returns a new one.

        :raises LockValueError: the connection is missing or not valid.
        :raises LockAccessError: the SDK cannot create a client from the connection.
        """
        settings = self.settings
        with _without_garbage_collection():
            from airflow_dynamo_lock.client.sync_client import LockClient

            return LockClient(self.sdk(service_of(settings.format)), **settings.client_options)

    def sdk(self, service: str) -> Any:
        """Create a boto3 client with the settings and credentials of the connection.

        :param service: name of the AWS service, such as ``dynamodb``.
        :raises LockValueError: the connection is missing or not valid.
        :raises LockAccessError: the SDK cannot create a client from the connection.
        """
        with _as_access_error(self.dynamo_lock_conn_id):
            (aws,) = _aws_clients(self.dynamo_lock_conn_id, self.settings, service, deferrable=False)
        return aws

    @asynccontextmanager
    async def async_client(self) -> AsyncIterator[tuple[AsyncLockClient, LockSettings]]:
        """Use this process's shared asynchronous client for the connection.

        Yields the client and the settings.

        :raises LockValueError: the connection is missing or not valid.
        :raises LockAccessError: the SDK cannot create a client from the connection.
        """
        settings, credentials = await self._shared_settings()
        name = (id(asyncio.get_running_loop()), json.dumps(asdict(settings), sort_keys=True), credentials)
        shared = _shared_clients.get(name)
        if shared is None:
            shared = _shared_clients[name] = SharedClient(
                partial(_create_async_client, self.dynamo_lock_conn_id, settings),
                retire=partial(_retire, name),
            )
        with shared.in_use():
            try:
                # Shielded: cancelling one user must not cancel the creation for the others.
                yield await asyncio.shield(shared.client), settings
            except LockAccessError:
                # The credentials may have been replaced where this process does not look: in a file, for example.
                _lookups.forget()
                _retire(name, shared)
                raise

    async def _shared_settings(self) -> tuple[LockSettings, str]:
        """The settings, and a digest of the ``aws`` connection, so that a client is used only while both are the same.

        They are at most `sharing.KEPT_SECONDS` old.
        """

        def look_up() -> tuple[LockSettings, str]:
            settings = type(self)(self.dynamo_lock_conn_id).settings
            return settings, _digest(settings.aws_conn_id)

        return await _lookups.get(self.dynamo_lock_conn_id, look_up)

    def test_connection(self) -> tuple[bool, str]:
        """Check the lock table, for the *Test* button of the connection form.

        :returns: whether the table can be used, and a message for the user.
        """
        try:
            self.get_conn().check_table()
        except LockError as failure:
            return False, str(failure)
        return True, f"The lock table {self.settings.table!r} is ready."

    def _settings_of_section(self) -> LockSettings:
        """The settings of the configuration section. Logs that they replace the missing connection."""
        section = {name: conf.get("dynamo_lock", name, fallback=None) for name in FIELDS}
        settings = LockSettings.of(section, source="the configuration section [dynamo_lock]")
        self.log.info(
            "There is no connection %r; using the lock table %r from the [dynamo_lock] section.",
            self.dynamo_lock_conn_id,
            settings.table,
        )
        return settings


metrics.start()

_Name = tuple[int, str, str]  # id of the event loop, settings as JSON, digest of the aws connection
_shared_clients: dict[_Name, SharedClient] = {}
_lookups: SharedLookups[tuple[LockSettings, str]] = SharedLookups()


def _retire(name: _Name, client: SharedClient) -> None:
    """Let no further trigger use a client. The present ones go on with it, and it is closed after them."""
    if _shared_clients.get(name) is client:
        del _shared_clients[name]


def _digest(aws_conn_id: str) -> str:
    """A digest of an ``aws`` connection with its credentials; empty if there is no such connection."""
    try:
        connection = BaseHook.get_connection(aws_conn_id)
    except AirflowNotFoundException:
        return ""
    return sha256(connection.get_uri().encode()).hexdigest()


def _aws_clients(conn_id: str, settings: LockSettings, *services: str, deferrable: bool) -> list[Any]:
    """Create an SDK client for each service, with the credentials of the ``aws`` connection.

    :param conn_id: id of the ``dynamo_lock`` connection, for errors.
    :param deferrable: create aiobotocore clients. They are returned as asynchronous context managers.
    :raises LockValueError: `botocore_config` is not valid.
    """
    from airflow.providers.amazon.aws.hooks.base_aws import AwsBaseHook

    hook = AwsBaseHook(
        aws_conn_id=settings.aws_conn_id, region_name=settings.region_name, client_type="dynamodb"
    )
    session: Any = hook.get_session(region_name=settings.region_name, deferrable=deferrable)
    config = _merged_config(hook, conn_id, settings)
    if deferrable:
        _load_models(session, services)
    create = session.create_client if deferrable else session.client
    return [
        create(
            service,
            region_name=hook.region_name,
            endpoint_url=settings.endpoint_url or hook.conn_config.get_service_endpoint_url(service),
            config=config,
            verify=hook.verify,
        )
        for service in services
    ]


def _merged_config(hook: Any, conn_id: str, settings: LockSettings) -> Any:
    """Merge the SDK settings of the package, the ``aws`` connection and the lock connection; the last wins.

    :raises LockValueError: `botocore_config` is not valid.
    """
    from botocore.config import Config

    from airflow_dynamo_lock.client.sdk import sdk_config

    config = sdk_config()
    try:
        overrides = Config(**settings.botocore_config)
    # botocore raises errors of many types; their text may show the values (R12, no secrets).
    except Exception:
        raise LockValueError(
            f"The SDK rejects the botocore_config of the connection {conn_id!r}: one of "
            f"{sorted(settings.botocore_config)} is unknown to it or has an invalid value; correct it."
        ) from None
    for more in (hook.conn_config.botocore_config, overrides):
        config = config.merge(more) if more else config
    return config


def _load_models(session: Any, services: Iterable[str]) -> None:
    """Read the SDK's service models in this thread, so that reading them does not block the event loop."""
    loader = session.get_component("data_loader")
    loader.load_data("endpoints")
    for service in services:
        for model in ("service-2", "endpoint-rule-set-1"):
            loader.load_service_model(service, model)


async def _create_async_client(
    conn_id: str, settings: LockSettings, stack: AsyncExitStack
) -> AsyncLockClient:
    """Create an asynchronous client, whose SDK clients are closed with `stack`."""
    from asgiref.sync import sync_to_async

    with _as_access_error(conn_id):
        # In a thread: loading the SDK takes half a second, and would block the other triggers.
        client_type, contexts = await sync_to_async(_load_async_clients)(conn_id, settings)
        aws, *streams = [await stack.enter_async_context(context) for context in contexts]
    return client_type(aws, streams=streams[0] if streams else None, **settings.client_options)


def _load_async_clients(conn_id: str, settings: LockSettings) -> tuple[type[AsyncLockClient], list[Any]]:
    """Do the slow part of creating an asynchronous client, for which no event loop is needed.

    :returns: the client's class, and one asynchronous context manager for each SDK client.
    """
    with _without_garbage_collection():
        from airflow_dynamo_lock.client.async_client import AsyncLockClient

        services = [service_of(settings.format), *(["dynamodbstreams"] if settings.streams else [])]
        return AsyncLockClient, _aws_clients(conn_id, settings, *services, deferrable=True)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Suspend garbage collection while the SDK is loaded, whose objects stay for the life of the process.

    A guarded task starts 0.1 s sooner without it. In the triggerer, a collection blocks the event loop, for longer
    than Airflow tolerates without a warning.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _as_access_error(conn_id: str) -> Iterator[None]:
    """Raise an error of the SDK while a client is created as a `LockAccessError`."""
    try:
        yield
    except LockError:
        raise
    except Exception as failure:
        from botocore.exceptions import BotoCoreError

        if not isinstance(failure, (BotoCoreError, TypeError, ValueError)):
            raise
        from airflow_dynamo_lock.client.sdk import without_password

        text = without_password(str(failure))
        raise LockAccessError(
            f"No client can be created for the connection {conn_id!r} ({text}): "
            "check its region, its endpoint URL and the credentials of its aws connection."
        ) from (failure if text == str(failure) else None)
