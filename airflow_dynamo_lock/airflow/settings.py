"""The settings of a lock table: what a ``dynamo_lock`` connection or the configuration has, checked."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from airflow_dynamo_lock.airflow.provider_info import CONN_TYPE, FIELDS
from airflow_dynamo_lock.airflow.versions import conf, why_not_found
from airflow_dynamo_lock.core.foreign.registry import FORMATS, NATIVE
from airflow_dynamo_lock.core.model.arguments import seconds
from airflow_dynamo_lock.core.model.errors import LockUnavailableError, LockValueError
from airflow_dynamo_lock.core.model.text import shown
from airflow_dynamo_lock.defaults import DEFAULT_LEASE, DEFAULT_TABLE

# Fields of other connection types in which a table's name may be by mistake. The form hides them.
_OUTSIDE_OF_EXTRA = ("host", "schema")


@dataclass(frozen=True)
class LockSettings:
    """The settings of a connection, or of the ``[dynamo_lock]`` section of the configuration.

    :ivar table: name of the lock table; with the format ``s3``, of a bucket.
    :ivar aws_conn_id: id of the ``aws`` connection with the credentials. If there is no such connection, the
        SDK uses its default credential chain.
    :ivar region_name: the table's AWS region. Default the ``aws`` connection's.
    :ivar endpoint_url: URL of another endpoint than AWS's own; with the format ``s3``, of S3.
    :ivar lease: default lease, in seconds.
    :ivar deployment: name of this deployment, which a lock record shows as part of the holder's name.
    :ivar botocore_config: settings of the SDK client. They override those of `client.sdk.sdk_config` and of the
        ``aws`` connection.
    :ivar streams: whether triggerers read the table's stream.
    :ivar format: table format: ``native``, or that of another lock library.
    :ivar partition_key: name of a foreign table's partition key, if not its library's default.
    :ivar sort_key: name of a foreign table's sort key, if not its library's default.
    """

    table: str = DEFAULT_TABLE
    aws_conn_id: str = "aws_default"
    region_name: str | None = None
    endpoint_url: str | None = None
    lease: float = DEFAULT_LEASE
    deployment: str = "airflow"
    # Not in the repr: it may contain the password of a proxy.
    botocore_config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    streams: bool = False
    format: str = NATIVE
    partition_key: str | None = None
    sort_key: str | None = None

    @property
    def client_options(self) -> dict[str, Any]:
        """The keyword arguments of `LockClient` and of `AsyncLockClient`."""
        return {
            "table": self.table,
            "lease": self.lease,
            "table_format": self.format,
            "partition_key": self.partition_key,
            "sort_key": self.sort_key,
        }

    @classmethod
    def of_connection(cls, connection: Any, conn_id: str) -> LockSettings:
        """Check a connection, and read its extra.

        A malformed connection never gets the default table: its deployment would not exclude the others.

        :param connection: the connection, of Airflow's Task SDK or of its database.
        :param conn_id: its id.
        :raises LockValueError: it has another type, or its extra is not valid.
        """
        source = f"the connection {conn_id!r}"
        if connection.conn_type != CONN_TYPE:
            hint = (
                "correct it, or use another connection"
                if connection.conn_type
                else "as a URI, write dynamo-lock://"
            )
            raise LockValueError(f"The type of {source} must be {CONN_TYPE!r}: {hint}.")
        if outside := [name for name in _OUTSIDE_OF_EXTRA if getattr(connection, name, None)]:
            raise LockValueError(
                f"The {' and the '.join(outside)} of {source} would not be used: remove it, and give the fields of a "
                'lock table in the extra, such as {"table": "airflow_locks"}.'
            )
        try:
            is_object = isinstance(json.loads(connection.extra or "{}"), dict)
        except ValueError:
            is_object = False
        if not is_object:
            raise LockValueError(
                f'The extra of {source} must be a JSON object, such as {{"table": "airflow_locks"}}.'
            )
        # This property also tells Airflow to mask the secrets of the extra in logs.
        return cls.of(connection.extra_dejson, source=source)

    @classmethod
    def of(cls, values: Mapping[str, Any], *, source: str) -> LockSettings:
        """Check the values of a connection's extra or of a configuration section.

        :param values: name → value. If a value is missing, None or "", its default is used.
        :param source: where the values come from, for the error message.
        :raises LockValueError: a name is unknown, or a value is not valid.
        """
        given = {name: value for name, value in values.items() if value not in (None, "")}
        for name in given:
            if name not in FIELDS:
                raise LockValueError(
                    f"The field {shown(name)} of {source} is unknown: "
                    f"correct it to one of {', '.join(FIELDS)}, or remove it."
                )
        lease = _lease(given, source)
        botocore_config = _botocore_config(given, source)
        streams = _streams(given, source)
        table_format = given.get("format", NATIVE)
        if table_format not in FORMATS:
            raise LockValueError(f"The format of {source} must be one of {', '.join(FORMATS)}.")
        if streams and table_format != NATIVE:
            raise LockValueError(f"The streams of {source} need the format 'native': leave streams out.")
        endpoint_url = _endpoint_url(given, source)
        return cls(
            table=given.get("table", DEFAULT_TABLE),
            aws_conn_id=given.get("aws_conn_id", "aws_default"),
            region_name=given.get("region_name"),
            endpoint_url=endpoint_url,
            lease=lease,
            deployment=given.get("deployment", conf.get("api", "instance_name", fallback="") or "airflow"),
            botocore_config=botocore_config,
            streams=streams,
            format=table_format,
            partition_key=given.get("partition_key"),
            sort_key=given.get("sort_key"),
        )


# The errors of these functions do not show the value: a secret may be in the wrong field (R12, no secrets).


def _lease(given: Mapping[str, Any], source: str) -> float:
    lease = given.get("lease", DEFAULT_LEASE)
    try:
        # Text because the form has no field for numbers before Airflow 3.2. Python counts True as 1.
        return seconds("lease", lease if isinstance(lease, bool) else float(lease))
    except (TypeError, ValueError, OverflowError):
        raise LockValueError(f"The lease of {source} must be a number of seconds, at least 0.1.") from None


def _botocore_config(given: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    config = given.get("botocore_config", {})
    try:
        config = json.loads(config) if isinstance(config, str) else config
    except ValueError:
        config = None
    if not isinstance(config, Mapping):
        raise LockValueError(f"The botocore_config of {source} must be a JSON object.")
    return config


def _streams(given: Mapping[str, Any], source: str) -> bool:
    streams = given.get("streams", False)
    if isinstance(streams, str):
        streams = {"true": True, "false": False}.get(streams.lower())
    if not isinstance(streams, bool):
        raise LockValueError(f"The streams of {source} must be true or false.")
    return streams


def _endpoint_url(given: Mapping[str, Any], source: str) -> str | None:
    url: str | None = given.get("endpoint_url")
    try:
        urlsplit(url or "")
    except (AttributeError, TypeError, ValueError):
        raise LockValueError(
            f"The endpoint_url of {source} must be a URL, such as http://127.0.0.1:8000."
        ) from None
    if url and "@" in url:
        raise LockValueError(
            f"The endpoint_url of {source} contains a user name: remove the credentials, "
            "because errors show the URL."
        )
    return url


def check_is_unset(conn_id: str) -> None:
    """Check that a connection that Airflow does not find is missing, not malformed or out of reach.

    Airflow reports that there is no connection also if it cannot parse its environment variable, or if a secrets
    backend or the API server does not answer.

    :param conn_id: id of the connection.
    :raises LockValueError: the environment has a value for it.
    :raises LockUnavailableError: Airflow could not look it up everywhere.
    """
    variable = f"AIRFLOW_CONN_{conn_id}".upper()
    if os.environ.get(variable):
        raise LockValueError(
            f"Airflow cannot read a connection from the environment variable {variable}: correct it, for example to "
            f'{{"conn_type": "{CONN_TYPE}", "extra": {{"table": "airflow_locks"}}}}, with all fields inside of extra.'
        )
    if why := why_not_found(conn_id):
        raise LockUnavailableError(
            f"Airflow could not look up the connection {conn_id!r} ({why}): check the secrets backend, the API server, "
            "and whether the value of the connection is valid.",
            maybe_applied=False,
        )
