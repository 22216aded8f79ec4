"""Between the AWS SDK and `core`: settings of the SDK, and the meaning of its responses and exceptions.

R6 (typed errors): whatever is not a known success becomes a typed error, with one sentence that says what to do.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Any

from botocore import exceptions as aws
from botocore.config import Config

from airflow_dynamo_lock.client.clock import monotonic
from airflow_dynamo_lock.core.effects import Reply, Request
from airflow_dynamo_lock.core.model.errors import (
    LockAccessError,
    LockConflictError,
    LockError,
    LockRecordError,
    LockTableError,
    LockUnavailableError,
    LockValueError,
)
from airflow_dynamo_lock.core.model.text import readable
from airflow_dynamo_lock.core.table.schema import TableExistsError, TableMissingError
from airflow_dynamo_lock.core.wait.stream import STREAM_ACTIONS, StreamGoneError

#: Settings of the SDK for locks. Its defaults wait a minute for a response; a holder that cannot reach DynamoDB must
#: know within seconds.
SDK_SETTINGS: Mapping[str, Any] = {
    "connect_timeout": 1,
    "read_timeout": 2,
    "tcp_keepalive": True,
    "retries": {"mode": "standard", "total_max_attempts": 2},
    "max_pool_connections": 50,
    "parameter_validation": False,  # requests are built from checked arguments
}


def sdk_config(**overrides: Any) -> Config:
    """`SDK_SETTINGS` with `overrides`, for ``boto3.client("dynamodb", config=sdk_config())``."""
    return Config(**{**SDK_SETTINGS, **overrides})


# A condition did not hold; in S3 also: the object does not exist, or another client writes it at the moment.
_REFUSED = {
    "ConditionalCheckFailedException",
    "PreconditionFailed",
    "ConditionalRequestConflict",
    "NoSuchKey",
}

# Another write to the item is in progress: a transaction, or a request in another region of a global table.
_CONFLICTS = ("TransactionConflictException", "ReplicatedWriteConflictException")
_UNAVAILABLE = {  # error code → whether the write may have been applied
    "ProvisionedThroughputExceededException": False,
    "ThrottlingException": False,
    "Throttling": False,
    "RequestLimitExceeded": False,
    "LimitExceededException": False,
    "TransactionInProgressException": False,
    **dict.fromkeys(_CONFLICTS, False),
    "TransactionCanceledException": False,
    "InternalServerError": True,
    "InternalFailure": True,
    "ServiceUnavailable": True,
    "ServiceUnavailableException": True,
    "RequestTimeout": True,
    "SlowDown": False,
}
_NO_ACCESS = {
    "AccessDeniedException",
    "AccessDenied",
    "UnrecognizedClientException",
    "InvalidClientTokenId",
    "ExpiredTokenException",
    "ExpiredToken",
    "MissingAuthenticationToken",
    "MissingAuthenticationTokenException",
    "IncompleteSignature",
    "IncompleteSignatureException",
    "InvalidSignatureException",
    "SignatureDoesNotMatch",
    "OptInRequired",
    "KMSAccessDeniedException",
}

# An iterator of a stream cannot be used any more.
_STREAM_GONE = {"ResourceNotFoundException", "ExpiredIteratorException", "TrimmedDataAccessException"}

# In a ValidationException: the keys of the request are not the table's. From DynamoDB, DynamoDB Local and moto.
_OTHER_KEYS = (
    "key element does not match the schema",
    "Missing the key",
    "number of conditions on the keys",
    "required keys was not given",
    "Type mismatch for key",
    "Type mismatch for attribute to update",
)
# Where AWS's answer to a wrong signature begins to repeat the request, with the session token (R12).
_SIGNED_TEXT = "The Canonical String"
# In a ValidationException: DynamoDB cannot store a value of the request.
_BAD_VALUE = re.compile(r"ExpressionAttributeValues contains invalid value: (.*?)\.? for key :(\w+)")
# The argument that a value comes from, by its placeholder. All other values come from this package.
_ARGUMENTS = {"data": "`data`", "holders": "`about`", "me": "`about`"}
_PARSERS = ("botocore.parsers", "aiobotocore.parsers")
_NO_CREDENTIALS = (
    aws.NoCredentialsError,
    aws.PartialCredentialsError,
    aws.CredentialRetrievalError,
    aws.TokenRetrievalError,
    aws.SSOError,
)


def reply(output: Mapping[str, Any], sent_at: float, *, refused: bool = False) -> Reply:
    """A response of the SDK as a `Reply`.

    :param sent_at: when the request was sent, monotonic seconds.
    :raises LockUnavailableError: the connection was closed in the middle of the response. boto3 returns an empty one
        then, which would mean that the lock has no record.
    """
    metadata = output.get("ResponseMetadata", {})
    length = metadata.get("HTTPHeaders", {}).get("content-length", "0")
    if output.keys() <= {"ResponseMetadata"} and length.isdigit() and int(length) > len("{}"):
        raise LockUnavailableError(f"AWS's answer, of {length} bytes, was cut off.", maybe_applied=True)
    return Reply(
        output=output,
        sent_at=sent_at,
        received_at=monotonic(),
        server_ms=_date_ms(metadata.get("HTTPHeaders", {}).get("date")),
        refused=refused,
        retried=metadata.get("RetryAttempts", 0) > 0,
    )


def answer_to(failure: Exception, request: Request, sent_at: float) -> Reply:
    """An exception of the SDK as a `Reply`, if it is a refused write.

    :raises LockError: any other failure.
    """
    if isinstance(failure, aws.ClientError):
        if failure.response["Error"]["Code"] in _REFUSED or _is_refused(failure):
            return reply(failure.response, sent_at, refused=True)
        raise _service_error(failure, request) from (None if _SIGNED_TEXT in str(failure) else failure)
    error = _sdk_error(failure, request)
    # R12: a traceback shows the cause's text, so the cause is only kept if the error shows all of that text.
    raise error from (failure if str(failure) in str(error) else None)


def _is_refused(failure: aws.ClientError) -> bool:
    """Whether a transaction was refused because the condition of one of its writes did not hold."""
    reasons: Any = failure.response.get("CancellationReasons", ())
    codes = {reason.get("Code") for reason in reasons}
    return "ConditionalCheckFailed" in codes and codes <= {
        "None",
        "ConditionalCheckFailed",
        "TransactionConflict",
    }


def not_answered(request: Request) -> LockUnavailableError:
    """The error of a request that was not answered within its timeout."""
    return LockUnavailableError(
        f"{_service(request)} did not answer {request.action} within {request.within or 0:.1f} s.",
        maybe_applied=True,
    )


def _service_error(failure: aws.ClientError, request: Request) -> LockError:
    code = str(failure.response["Error"]["Code"])
    # On one line: a proxy may answer with a page of its own.
    message = str(failure.response["Error"].get("Message") or code).partition(_SIGNED_TEXT)[0]
    message = readable(" ".join(message.split()))
    metadata = failure.response.get("ResponseMetadata", {})
    status = metadata.get("HTTPStatusCode", 0)
    table = _table_of(request)
    if code in _NO_ACCESS or status == 403:
        return LockAccessError(
            f"AWS does not allow {request.action} on the lock table {table!r} ({code}: {message}): "
            "check the credentials and the IAM policy."
        )
    if request.action in STREAM_ACTIONS and code in _STREAM_GONE:
        return StreamGoneError(f"The stream of the lock table {table!r} has moved on ({code}: {message}).")
    if code == "NoSuchBucket":
        return TableMissingError(
            f"The bucket {table!r} does not exist: create it, or check its name and the region."
        )
    if code == "ResourceNotFoundException":
        return TableMissingError(
            f"The lock table {table!r} does not exist in this account and region: "
            "create it with client.create_table() or `dynamo-lock table create`, or check its name and the region."
        )
    if code in ("ResourceInUseException", "TableAlreadyExistsException"):
        return TableExistsError(f"The table {table!r} exists already or is being changed just now.")
    if code == "ValidationException":
        if any(part in message for part in _OTHER_KEYS):
            return LockTableError(
                f"The table {table!r} is not a lock table, its keys differ ({message}): "
                "check its name; client.check_table() says what is expected and what was found."
            )
        if "Item size" in message:
            return LockValueError(
                f"The record of the lock {_lock_of(request.params)} "
                f"would be too large ({message}): a DynamoDB item has at most 400 KB; store less in `data`."
            )
        if bad := _BAD_VALUE.search(message):
            return LockValueError(
                f"DynamoDB does not store a value in {_ARGUMENTS.get(bad[2], repr(':' + bad[2]))} of the lock "
                f"{_keys_of(request)} ({bad[1]}): change that value or leave it out."
            )
        if request.action == "TransactWriteItems":
            return LockRecordError(
                f"One of the records of the locks {_keys_of(request)} in table {table!r} cannot be updated "
                f"({message}): another program may have damaged it; check the items before you correct or delete one."
            )
        if request.action == "UpdateItem":
            return LockRecordError(
                f"The record of the lock {_lock_of(request.params)} in table {table!r} cannot be updated "
                f"({message}): another program may have damaged it; check the item before you correct or delete it."
            )
    if code.isdigit():  # the SDK could not parse the response
        return _unreadable(request, f"HTTP status {status}")
    if code in _UNAVAILABLE or status >= 500:
        kind = LockConflictError if code in _CONFLICTS else LockUnavailableError
        return kind(
            f"{_service(request)} did not serve {request.action} on table {table!r} ({code}: {message}).",
            # An earlier attempt may have been applied, even if the last one was not.
            maybe_applied=metadata.get("RetryAttempts", 0) > 0 or _UNAVAILABLE.get(code, True),
        )
    return LockError(f"{_service(request)} refused {request.action} on table {table!r} ({code}: {message}).")


def without_password(text: str) -> str:
    """A text of the SDK without the user name and the password of a URL in it (R12)."""
    # To the last @, which a password may contain too.
    shorter, found = re.subn("//.*@", "//…@", text, flags=re.DOTALL)
    return shorter if found else re.sub(r"\S*:.*@", "…@", text, flags=re.DOTALL)


def _unreadable(request: Request, why: str) -> LockUnavailableError:
    """The error of a response that is not shown: it may be a record with its `data` (R12)."""
    return LockUnavailableError(
        f"{_service(request)}'s answer to {request.action} on table {_table_of(request)!r} cannot be read ({why}).",
        maybe_applied=True,
    )


def _is_from_parser(failure: Exception) -> bool:
    """Whether the SDK raised this while it parsed a response, such as a proxy's page in another encoding."""
    return any(
        frame.f_globals.get("__name__") in _PARSERS for frame, _ in traceback.walk_tb(failure.__traceback__)
    )


def _sdk_error(failure: Exception, request: Request) -> LockError:
    if _is_from_parser(failure):
        return _unreadable(request, type(failure).__name__)
    text = without_password(str(failure))
    if isinstance(failure, _NO_CREDENTIALS):
        return LockAccessError(
            f"There are no usable AWS credentials ({text}): configure them for this process."
        )
    if isinstance(failure, aws.NoRegionError):
        return LockAccessError("No AWS region is configured: set region_name, or AWS_DEFAULT_REGION.")
    if isinstance(failure, (aws.EndpointConnectionError, aws.ConnectTimeoutError, aws.ProxyConnectionError)):
        # This is the SDK's last attempt. An earlier one may have been applied.
        return LockUnavailableError(f"{_service(request)} cannot be reached ({text}).", maybe_applied=True)
    if type(failure) is aws.HTTPClientError:
        # R12: only the type is shown, because the text may contain the request's headers, with the session token.
        unhandled = failure.kwargs.get("error")
        if isinstance(unhandled, ValueError):
            return LockAccessError(
                f"{request.action} cannot be sent to {_service(request)} ({type(unhandled).__name__}): correct the AWS "
                "credentials if they contain a character that HTTP does not allow, such as a newline, or else the "
                "endpoint URL."
            )
        if isinstance(unhandled, (FileNotFoundError, PermissionError)):
            return LockAccessError(
                f"{request.action} cannot be sent to {_service(request)} ({unhandled.strerror}): correct the path of "
                "the SDK's CA bundle (`verify`, AWS_CA_BUNDLE) or client certificate."
            )
        if isinstance(unhandled, (AttributeError, RuntimeError, TypeError)):
            # aiobotocore has no error of its own for this.
            return _broken(
                request,
                f"{type(unhandled).__name__}; if the ``async with`` block of the SDK client has ended, make a new one",
            )
        return _broken(request, type(unhandled).__name__)
    if isinstance(failure, (aws.HTTPClientError, aws.ConnectionError)):
        return _broken(request, text)
    if isinstance(failure, aws.BotoCoreError):
        return LockError(f"The AWS SDK could not send {request.action}: {text}")
    if isinstance(failure, (ValueError, OSError)):
        # Such as a port out of range, or a missing `credential_process`. The text may be a piece of a secret (R12).
        return LockError(
            f"The AWS SDK could not send {request.action} ({type(failure).__name__}): check the endpoint URL, the AWS "
            "credentials and the other settings of the SDK."
        )
    raise failure  # a programming error, which no setting would mend


def _broken(request: Request, why: str) -> LockUnavailableError:
    return LockUnavailableError(
        f"The connection to {_service(request)} broke during {request.action} ({why}).", maybe_applied=True
    )


def _service(request: Request) -> str:
    return "S3" if "Bucket" in request.params else "DynamoDB"


def _table_of(request: Request) -> str:
    params = request.params
    if "TransactItems" in params:
        ((_, params),) = params["TransactItems"][0].items()
    if request.action in STREAM_ACTIONS:
        # A stream's ARN contains the name of its table, and an iterator begins with the ARN.
        named = re.search(":table/([^/]+)/stream/", params.get("StreamArn") or params["ShardIterator"])
        return named[1] if named else "?"
    if "Bucket" in params:
        return str(params["Bucket"])
    return str(params.get("TableName") or next(iter(params.get("RequestItems", {"?": None}))))


def _keys_of(request: Request) -> str:
    """The locks that a write, or a transaction, is about."""
    if "TransactItems" not in request.params:
        return _lock_of(request.params)
    writes = [params for item in request.params["TransactItems"] for params in item.values()]
    return ", ".join(dict.fromkeys(_lock_of({"Key": each.get("Key") or each["Item"]}) for each in writes))


def _lock_of(params: Mapping[str, Any]) -> str:
    """The lock that a write is about: by its partition key, which comes first."""
    return repr(next(iter(params["Key"].values()))["S"])


@lru_cache(maxsize=16)  # responses within one second have the same Date
def _date_ms(header: str | None) -> int | None:
    if not header:
        return None
    try:
        moment = parsedate_to_datetime(header)
    except ValueError:
        return None
    # HTTP dates are in GMT. Without a zone, Python would read them as the host's local time.
    return int(moment.replace(tzinfo=moment.tzinfo or UTC).timestamp() * 1000)
