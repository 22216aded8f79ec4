"""The method of an SDK client that sends a request. A client of the wrong kind is refused before it sends any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from botocore import xform_name
from botocore.client import BaseClient

from airflow_dynamo_lock.core.effects import Request
from airflow_dynamo_lock.core.model.errors import LockValueError
from airflow_dynamo_lock.core.model.text import shown
from airflow_dynamo_lock.core.wait.stream import STREAM_ACTIONS


def method_of(client: Any, request: Request) -> Callable[..., Any]:
    """The method of a boto3 client that sends the request.

    :raises LockValueError: this is no boto3 client of the service.
    """
    method: Callable[..., Any] | None = getattr(client, xform_name(request.action), None)
    if method is None or _is_asynchronous(client):
        raise LockValueError(
            f"LockClient cannot use {shown(client)}: "
            f"give it boto3.client({_service(request)!r}, config=sdk_config())."
        )
    return method


def asynchronous_method_of(client: Any, request: Request) -> Callable[..., Any]:
    """The method of an aiobotocore client that sends the request.

    :raises LockValueError: this is no aiobotocore client of the service.
    """
    method: Callable[..., Any] | None = getattr(client, xform_name(request.action), None)
    # boto3 sends the request before its answer fails to be awaited. A wrapper of a client may be no `BaseClient`.
    if method is None or (isinstance(client, BaseClient) and not _is_asynchronous(client)):
        raise LockValueError(
            f"AsyncLockClient cannot use {shown(client)}: give it the client of ``async with "
            f"aiobotocore.session.get_session().create_client({_service(request)!r}, config=sdk_config())``."
        )
    return method


def _is_asynchronous(client: Any) -> bool:
    """Whether this is an aiobotocore client, without importing aiobotocore, which may not be installed."""
    # `__class__`, because that of a transparent proxy such as wrapt's is the client's.
    return any(each.__module__ == "aiobotocore.client" for each in client.__class__.__mro__)


def _service(request: Request) -> str:
    """The AWS service of the request, as the SDK names it."""
    if request.action in STREAM_ACTIONS:
        return "dynamodbstreams"
    return "s3" if "Bucket" in request.params else "dynamodb"
