"""The options that all commands share, and the parameter type for durations."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import TYPE_CHECKING, Any

import click

from airflow_dynamo_lock.core.foreign.registry import FORMATS, NATIVE, service_of
from airflow_dynamo_lock.core.model.errors import (
    LockAccessError,
    LockRecordError,
    LockUnavailableError,
    LockValueError,
)
from airflow_dynamo_lock.core.model.limits import LONGEST_TIME
from airflow_dynamo_lock.defaults import DEFAULT_TABLE

if TYPE_CHECKING:
    from airflow_dynamo_lock.airflow.hooks import DynamoLockHook
    from airflow_dynamo_lock.client.sync_client import LockClient


_UNITS = {
    "s": 1,
    "sec": 1,
    "second": 1,
    "m": 60,
    "min": 60,
    "minute": 60,
    "h": 3600,
    "hr": 3600,
    "hour": 3600,
}
_UNITS |= {"d": 86_400, "day": 86_400}

# Airflow denies tasks its database by an address with this prefix, with which their child processes cannot import
# Airflow.
_DATABASE, _NO_DATABASE = "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN", "airflow-db-not-allowed:"
# An address that Airflow accepts. No connection is read from a database here.
_UNUSED_DATABASE = "sqlite:////dev/null"


class Duration(click.ParamType):  # type: ignore[type-arg]
    """A duration such as ``90``, ``300s``, ``15m``, ``3 minutes``, ``100hrs`` or ``1 day``, in seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, (int, float)):
            return float(value)
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", value.lower())
        number, unit = found.groups() if found else ("", "")
        factor = 1 if not unit else _UNITS.get(unit) or _UNITS.get(unit.removesuffix("s"))
        if not number or factor is None:
            self.fail(
                f"{value!r} is not a duration: write '90', '300s', '15m', '3 minutes', '2 hours' or '1 day'."
            )
        if float(number) * factor > LONGEST_TIME:
            self.fail(f"{value!r} is too long.")
        return float(number) * factor


DURATION = Duration()


@dataclass(frozen=True)
class Settings:
    """The lock table that a command works on, and the form of the output.

    :ivar table: name of the table; in the format ``s3``, of the bucket.
    :ivar sdk: returns the boto3 client of a service, each time the same: creating one takes 0.25 s.
    :ivar as_json: print JSON, for programs.
    :ivar format: name of the table format.
    :ivar partition_key: name of the table's partition key; None for the default of the format's library.
    :ivar sort_key: name of the table's sort key; None for the default of the format's library.
    """

    table: str
    sdk: Callable[[str], Any]
    as_json: bool
    format: str = NATIVE
    partition_key: str | None = None
    sort_key: str | None = None

    @property
    def aws(self) -> Any:
        """The boto3 client of the service that stores the locks: DynamoDB or S3.

        :raises LockAccessError: the client cannot be created.
        """
        return self.sdk(service_of(self.format))

    def locks(self, **options: Any) -> LockClient:
        """A lock client of the table.

        :param options: further options of `LockClient`.
        :raises LockAccessError: the boto3 client cannot be created.
        """
        from airflow_dynamo_lock.client.sync_client import LockClient

        return LockClient(
            self.aws,
            table=self.table,
            table_format=self.format,
            partition_key=self.partition_key,
            sort_key=self.sort_key,
            **options,
        )


def check_keys(locks: LockClient) -> None:
    """Check the keys of a table in which no lock was found. Without this, a table with other keys looks empty.

    Reads one lock: the policy of a reader allows that, but not `DescribeTable`.

    :raises LockTableError: the table has other keys.
    """
    # A role may have no other permission than to list; some formats do not accept this key.
    with suppress(LockAccessError, LockRecordError, LockValueError):
        locks.get("any")


def settings(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that all commands share.

    :param command: a function that takes `Settings` first.
    :returns: the function with the options.
    """

    @wraps(command)
    def called(as_json: bool, verbose: bool, **options: Any) -> Any:
        handler = logging.StreamHandler()
        if not verbose:
            handler.addFilter(_outages_once())
        logging.basicConfig(
            level=logging.INFO if verbose else logging.WARNING,
            format="%(asctime)s %(message)s",
            datefmt="%H:%M:%S",
            handlers=[handler],
        )
        where, others = settings_from(options, as_json=as_json, verbose=verbose)
        return command(where, **others)

    for option in (
        click.option("-v", "--verbose", is_flag=True, help="Log each step to stderr."),
        click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs."),
    ):
        called = option(called)
    return table_options(called)


def settings_from(
    options: Mapping[str, Any], *, as_json: bool = False, verbose: bool = False
) -> tuple[Settings, dict[str, Any]]:
    """The settings from the values of `table_options`, and the values of the other options.

    :raises click.UsageError: the values exclude each other.
    :raises LockValueError: Airflow is not installed, or does not know the connection.
    """
    others = dict(options)
    table, conn_id, region, profile, endpoint_url, table_format, partition_key, sort_key = (
        others.pop(name) for name in _TABLE_OPTIONS
    )
    if table is None:
        table = os.environ.get("DYNAMO_LOCK_TABLE")  # click takes an empty variable for a missing one
    if conn_id is None:
        if os.environ.get("DYNAMO_LOCK_CONN_ID") == "":
            raise click.UsageError(
                "The variable DYNAMO_LOCK_CONN_ID is empty: unset it, or set the id of a connection."
            )
        sdk = cache(partial(_by_sdk, region, profile, endpoint_url))
        table = DEFAULT_TABLE if table is None else table
        where = Settings(table, sdk, as_json, table_format, partition_key, sort_key)
        return where, others
    if region or profile or endpoint_url or table_format != NATIVE or partition_key or sort_key:
        raise click.UsageError(
            "--conn-id excludes --region, --profile, --endpoint-url, --format, --partition-key and --sort-key: the "
            "connection has these settings."
        )
    hook = airflow_hook(conn_id, verbose=verbose)
    connected = hook.settings
    where = Settings(
        connected.table if table is None else table,
        cache(hook.sdk),
        as_json,
        connected.format,
        connected.partition_key,
        connected.sort_key,
    )
    return where, others


_TABLE_OPTIONS = (
    "table",
    "conn_id",
    "region",
    "profile",
    "endpoint_url",
    "table_format",
    "partition_key",
    "sort_key",
)


def table_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that select a lock table. `settings_from` reads their values."""
    for option in (
        click.option(
            "--sort-key", help="Name of the sort key of another library's table, if not the default."
        ),
        click.option(
            "--partition-key",
            help="Name of the partition key of another library's table, if not the default.",
        ),
        click.option(
            *("--format", "table_format"),
            type=click.Choice(FORMATS),
            default=NATIVE,
            show_default=True,
            envvar="DYNAMO_LOCK_FORMAT",
            show_envvar=True,
            help="Format of the table: native, or another library's. With s3, the table is a bucket.",
        ),
        click.option("--endpoint-url", help="URL of a DynamoDB server other than AWS's."),
        click.option("--profile", help="Profile of the AWS configuration."),
        click.option("--region", help="AWS region of the table."),
        click.option(
            "--conn-id",
            envvar="DYNAMO_LOCK_CONN_ID",
            show_envvar=True,
            help="Airflow connection that has all these settings. Needs Airflow.",
        ),
        click.option(
            *("--table", "--tablename"),
            "table",
            envvar="DYNAMO_LOCK_TABLE",
            show_envvar=True,
            help=f"Name of the lock table.  [default: {DEFAULT_TABLE}]",
        ),
    ):
        command = option(command)
    return command


def _outages_once() -> Callable[[logging.LogRecord], bool]:
    """A log filter that passes errors and, of the warnings, only those about an outage, each message once.

    While a command retries, these warnings are its only output.
    """
    messages: set[str] = set()

    def passes(record: logging.LogRecord) -> bool:
        if record.levelno > logging.WARNING:
            return True
        outage = any(isinstance(each, (LockUnavailableError, LockAccessError)) for each in record.args or ())
        new = record.msg not in messages
        messages.add(record.msg)
        return outage and new

    return passes


def _by_sdk(region: str | None, profile: str | None, endpoint_url: str | None, service: str) -> Any:
    import boto3
    from botocore.exceptions import BotoCoreError

    from airflow_dynamo_lock.client.sdk import sdk_config, without_password

    try:
        session: Any = boto3.Session(profile_name=profile, region_name=region)
        client = session.client(service, endpoint_url=endpoint_url, config=sdk_config())
    except (BotoCoreError, OSError, ValueError) as wrong:  # OSError: there is no such `credential_process`
        raise LockAccessError(
            f"The DynamoDB client cannot be created ({without_password(str(wrong)).rstrip('.')}): "
            "check the AWS credentials and configuration, --region, --profile and --endpoint-url."
        ) from None  # whose text may contain a password
    used: str = client.meta.endpoint_url  # also that of an environment variable or of the AWS configuration
    if without_password(used) != used:
        raise LockValueError(
            "The endpoint URL contains a user name: remove the credentials, because errors show the URL."
        )
    return client


def airflow_hook(conn_id: str, *, verbose: bool = False) -> DynamoLockHook:
    """Import Airflow, and return the hook of a connection. stdout is for the output of the command, so what Airflow
    prints on import goes to stderr.

    :param conn_id: id of the connection.
    :param verbose: keep the log level of Airflow; otherwise it logs only errors.
    :raises LockValueError: Airflow is not installed.
    """
    settings = {} if verbose else {"AIRFLOW__LOGGING__LOGGING_LEVEL": "ERROR"}
    if os.environ.get(_DATABASE, "").startswith(_NO_DATABASE):
        settings[_DATABASE] = _UNUSED_DATABASE
    try:
        with redirect_stdout(sys.stderr), _environment(settings):
            from airflow_dynamo_lock.airflow.hooks import DynamoLockHook
    except ImportError as missing:
        raise LockValueError(f"--conn-id needs Airflow, which is not installed ({missing}).") from None
    return DynamoLockHook(conn_id)


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables within the block. Not for longer, because the command of `run` inherits them."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
