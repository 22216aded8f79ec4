"""The table formats by name: the native one, and those of five other lock libraries."""

from __future__ import annotations

from airflow_dynamo_lock.core.foreign.dynamodb import ForeignTable
from airflow_dynamo_lock.core.model.arguments import checked_table
from airflow_dynamo_lock.core.model.errors import LockValueError
from airflow_dynamo_lock.core.model.text import shown
from airflow_dynamo_lock.core.table.format import Format
from airflow_dynamo_lock.core.table.native import NativeFormat

NATIVE = NativeFormat.name

#: The names of all formats.
FORMATS = (NATIVE, "amazon-lock-client", "python-dynamodb-lock", "dyndbmutex", "awsflock", "s3")


def format_of(
    name: str,
    table: str,
    max_clock_skew_ms: int,
    *,
    partition_key: str | None = None,
    sort_key: str | None = None,
) -> Format:
    """The table format called `name`, for one table.

    :param table: name or ARN of the table; in the format ``s3``, name of the bucket.
    :param max_clock_skew_ms: the client's `max_clock_skew`, milliseconds.
    :param partition_key: name of the table's partition key; None for the default of the format's library.
    :param sort_key: name of the table's sort key; None for the default of the format's library.
    :raises LockValueError: there is no such format, its keys cannot be named, or the name of the table is not
        valid.
    """
    if name == NATIVE and not (partition_key or sort_key):
        return NativeFormat(checked_table(table))
    if name == "s3" and not (partition_key or sort_key):
        from airflow_dynamo_lock.core.foreign.aws_s3_lock import S3Objects

        return S3Objects(checked_table(table), max_clock_skew_ms)
    if name in (NATIVE, "s3"):
        raise LockValueError(
            f"The names of the keys are fixed in the format {name!r}: give no partition_key and no sort_key."
        )
    return _table_format(name)(checked_table(table), max_clock_skew_ms, partition_key or "", sort_key or "")


def service_of(name: str) -> str:
    """The AWS service on which a format stores its locks, as the SDK names it."""
    return "s3" if name == "s3" else "dynamodb"


def _table_format(name: str) -> type[ForeignTable]:
    """The class of a foreign format on DynamoDB.

    :raises LockValueError: there is no such format.
    """
    # Imported on demand, because most processes use the native format only.
    match name:
        case "amazon-lock-client":
            from airflow_dynamo_lock.core.foreign.amazon_lock_client import AmazonLockClient

            return AmazonLockClient
        case "python-dynamodb-lock":
            from airflow_dynamo_lock.core.foreign.python_dynamodb_lock import PythonDynamoDBLock

            return PythonDynamoDBLock
        case "dyndbmutex":
            from airflow_dynamo_lock.core.foreign.dyndbmutex import DynDBMutex

            return DynDBMutex
        case "awsflock":
            from airflow_dynamo_lock.core.foreign.awsflock import AwsFlock

            return AwsFlock
    raise LockValueError(f"There is no table format {shown(name)}: use one of {', '.join(FORMATS)}.")
