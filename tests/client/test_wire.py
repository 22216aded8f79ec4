"""How the answers and exceptions of the SDK are interpreted (R6): only a success counts as one, and each error says
what to do.
"""

from __future__ import annotations

import traceback
from typing import Any

import botocore.parsers
import pytest
from botocore import exceptions as aws

from airflow_dynamo_lock import (
    LockAccessError,
    LockError,
    LockRecordError,
    LockTableError,
    LockUnavailableError,
    LockValueError,
    sdk_config,
)
from airflow_dynamo_lock.client import sdk
from airflow_dynamo_lock.client.clock import monotonic
from airflow_dynamo_lock.core.effects import Request
from airflow_dynamo_lock.core.model.errors import LockConflictError
from airflow_dynamo_lock.core.table.schema import TableExistsError, TableMissingError
from airflow_dynamo_lock.core.wait.stream import StreamGoneError

UPDATE = Request(
    "UpdateItem", {"TableName": "locks", "Key": {"key": {"S": "orders"}, "entry": {"S": "lock"}}}
)
BATCH = Request("BatchGetItem", {"RequestItems": {"locks": {"Keys": []}}})
STREAM = "arn:aws:dynamodb:eu-central-1:111122223333:table/locks/stream/2026-11-21T00:00:00.000"
URL = "http://127.0.0.1:1"


def _refusal(
    code: str, message: str = "", *, status: int = 400, attempts: int = 0, **more: Any
) -> aws.ClientError:
    metadata = {"HTTPStatusCode": status, "RetryAttempts": attempts, "HTTPHeaders": {}}
    return aws.ClientError(
        {"Error": {"Code": code, "Message": message}, "ResponseMetadata": metadata, **more},  # type: ignore[typeddict-item]
        "UpdateItem",
    )


def _error(failure: Exception, request: Request = UPDATE) -> LockError:
    with pytest.raises(LockError) as raised:
        sdk.answer_to(failure, request, 0.0)
    return raised.value


def test_a_failed_condition_is_an_answer_and_shows_the_item() -> None:
    item = {"key": {"S": "orders"}}
    reply = sdk.answer_to(_refusal("ConditionalCheckFailedException", attempts=1, Item=item), UPDATE, 5.0)

    assert reply.refused
    assert reply.retried
    assert reply.output["Item"] == item
    assert reply.sent_at == 5.0


@pytest.mark.parametrize(
    ("code", "maybe_applied"),
    [
        ("ProvisionedThroughputExceededException", False),
        ("ThrottlingException", False),
        ("RequestLimitExceeded", False),
        ("InternalServerError", True),
        ("ServiceUnavailable", True),
        ("AnErrorNobodyKnows", True),
    ],
)
def test_a_request_that_dynamodb_did_not_serve_is_unavailable(code: str, maybe_applied: bool) -> None:
    status = 500 if maybe_applied else 400
    error = _error(_refusal(code, "slow down", status=status))

    assert type(error) is LockUnavailableError
    assert error.maybe_applied is maybe_applied
    assert "'locks'" in str(error)
    assert "slow down" in str(error)


@pytest.mark.parametrize("code", ["TransactionConflictException", "ReplicatedWriteConflictException"])
def test_a_conflict_with_another_write_is_a_conflict_error(code: str) -> None:
    error = _error(_refusal(code))

    assert isinstance(error, LockConflictError)
    assert not error.maybe_applied


def test_an_attempt_before_the_throttled_one_may_have_been_applied() -> None:
    error = _error(_refusal("ThrottlingException", attempts=1))

    assert isinstance(error, LockUnavailableError)
    assert error.maybe_applied


@pytest.mark.parametrize(
    "code",
    [
        "AccessDeniedException",
        "UnrecognizedClientException",
        "ExpiredTokenException",
        "InvalidSignatureException",
    ],
)
def test_no_permission_is_an_error_that_names_the_action_and_the_table(code: str) -> None:
    error = _error(_refusal(code, "User: bob is not authorized"))

    assert type(error) is LockAccessError
    for part in ("UpdateItem", "'locks'", "bob is not authorized", "IAM policy"):
        assert part in str(error)


@pytest.mark.parametrize(
    "failure",
    [
        aws.NoCredentialsError(),
        aws.PartialCredentialsError(provider="env", cred_var="secret"),
        aws.CredentialRetrievalError(provider="custom-process", error_msg="exit 1"),
        aws.TokenRetrievalError(provider="sso", error_msg="expired"),
        aws.UnauthorizedSSOTokenError(),
        aws.NoRegionError(),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_no_credentials_or_no_region_is_an_access_error(failure: Exception) -> None:
    assert type(_error(failure)) is LockAccessError


@pytest.mark.parametrize(
    ("action", "params"),
    [
        ("DescribeStream", {"StreamArn": f"{STREAM}"}),
        ("GetShardIterator", {"StreamArn": f"{STREAM}", "ShardId": "shard"}),
        ("GetRecords", {"ShardIterator": f"{STREAM}|1|AAAA"}),
        ("GetRecords", {"ShardIterator": f"000|{STREAM}|AAAA"}),
    ],
)
def test_errors_of_a_stream_name_the_table(action: str, params: dict[str, str]) -> None:
    request = Request(action, params)
    for code, error in (
        ("ExpiredIteratorException", StreamGoneError),
        ("TrimmedDataAccessException", StreamGoneError),
        ("ResourceNotFoundException", StreamGoneError),
        ("AccessDeniedException", LockAccessError),
        ("LimitExceededException", LockUnavailableError),
        ("ThrottlingException", LockUnavailableError),
        ("ValidationException", LockError),
    ):
        raised = _error(_refusal(code, "because"), request)
        assert type(raised) is error
        assert "'locks'" in str(raised)
        assert "because" in str(raised)


def test_the_error_for_a_missing_table_says_how_to_create_it() -> None:
    error = _error(_refusal("ResourceNotFoundException", "Requested resource not found"))

    assert type(error) is TableMissingError
    assert isinstance(error, LockTableError)
    assert "'locks' does not exist" in str(error)
    assert "create_table()" in str(error)


def test_an_existing_table_is_a_table_exists_error() -> None:
    assert type(_error(_refusal("ResourceInUseException"))) is TableExistsError


@pytest.mark.parametrize(
    "message",
    [
        "The provided key element does not match the schema",
        "One of the required keys was not given a value: Missing the key entry in the item",
    ],
)
@pytest.mark.parametrize("request_", [UPDATE, BATCH], ids=["UpdateItem", "BatchGetItem"])
def test_a_table_with_other_keys_is_a_table_error(message: str, request_: Request) -> None:
    error = _error(_refusal("ValidationException", message), request_)

    assert type(error) is LockTableError
    assert "check_table()" in str(error)


def test_an_update_that_does_not_fit_the_item_points_to_a_damaged_record() -> None:
    error = _error(
        _refusal("ValidationException", "An operand in the update expression has an incorrect data type")
    )

    assert type(error) is LockRecordError
    assert "'orders'" in str(error)
    assert "incorrect data type" in str(error)


def test_data_that_is_too_large_is_not_taken_for_a_damaged_record() -> None:
    error = _error(
        _refusal("ValidationException", "Item size to update has exceeded the maximum allowed size")
    )

    assert type(error) is LockValueError
    assert "400 KB" in str(error)


@pytest.mark.parametrize("action", ["UpdateItem", "TransactWriteItems"])
@pytest.mark.parametrize(
    ("placeholder", "what"),
    [("data", "`data`"), ("holders", "`about`"), ("me", "`about`"), ("now", "':now'")],
)
def test_a_value_that_dynamodb_refuses_is_not_taken_for_a_damaged_record(
    action: str, placeholder: str, what: str
) -> None:
    message = (
        "ExpressionAttributeValues contains invalid value: One or more parameter values were invalid: "
        f"An AttributeValue may not contain a null or empty binary type. for key :{placeholder}"
    )
    update = {"Update": UPDATE.params}
    request = UPDATE if action == "UpdateItem" else Request(action, {"TransactItems": [update, update]})
    error = _error(_refusal("ValidationException", message), request)

    assert type(error) is LockValueError
    for part in (what, "'orders'", "may not contain a null or empty binary type"):
        assert part in str(error)


@pytest.mark.parametrize(
    "failure",
    [
        aws.EndpointConnectionError(endpoint_url=URL),
        aws.ConnectTimeoutError(endpoint_url=URL),
        aws.ReadTimeoutError(endpoint_url=URL),
        aws.ConnectionClosedError(endpoint_url=URL),
        aws.SSLError(endpoint_url=URL, error=OSError("x")),
        aws.HTTPClientError(error="x"),
        aws.ProxyConnectionError(proxy_url=URL),
        aws.ResponseStreamingError(error="x"),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_a_broken_network_leaves_open_whether_the_write_was_applied(failure: Exception) -> None:
    """Also if the last attempt did not connect: the SDK does not show whether an earlier one was sent."""
    error = _error(failure)

    assert type(error) is LockUnavailableError
    assert error.maybe_applied


def test_a_header_that_http_does_not_allow_is_an_access_error_without_the_header() -> None:
    error = _error(aws.HTTPClientError(error=ValueError("Invalid header value b'IQoJ-session-token\\nx'")))

    assert type(error) is LockAccessError
    assert "a character that HTTP does not allow, such as a newline" in str(error)
    assert "IQoJ" not in "".join(traceback.format_exception(error))


def test_an_error_of_the_http_client_is_named_by_its_type_because_its_text_may_contain_headers() -> None:
    error = _error(aws.HTTPClientError(error=RuntimeError("b'IQoJ-session-token' was not sent")))

    assert type(error) is LockUnavailableError
    assert "(RuntimeError; if the ``async with`` block of the SDK client has ended, make a new one)" in str(
        error
    )
    assert "IQoJ" not in "".join(traceback.format_exception(error))


def test_a_missing_ca_bundle_is_an_access_error() -> None:
    """aiobotocore reads the file when it sends the first request."""
    error = _error(aws.HTTPClientError(error=FileNotFoundError(2, "No such file or directory")))

    assert type(error) is LockAccessError
    assert "(No such file or directory): correct the path of the SDK's CA bundle" in str(error)


def test_an_answer_that_the_sdk_cannot_decode_may_have_been_applied() -> None:
    """Such as the page of a proxy that does not use UTF-8."""
    page = {"status_code": 400, "headers": {}, "body": "<html>réessayez</html>".encode("latin-1")}
    shape: Any = None
    with pytest.raises(UnicodeDecodeError) as raised:
        botocore.parsers.create_parser("json").parse(page, shape)
    error = _error(raised.value)

    assert type(error) is LockUnavailableError
    assert error.maybe_applied
    assert "answer to UpdateItem on table 'locks' cannot be read (UnicodeDecodeError)" in str(error)


def test_a_refused_signature_does_not_show_the_request_that_aws_repeats() -> None:
    message = (
        "The request signature we calculated does not match the signature you provided.\n\nThe Canonical String for "
        "this request should have been\n'POST\n/\n\nx-amz-security-token:IQoJ-session-token\n'"
    )
    error = _error(_refusal("InvalidSignatureException", message))

    assert type(error) is LockAccessError
    assert "does not match the signature you provided" in str(error)
    assert "IQoJ" not in "".join(traceback.format_exception(error))


def test_the_cause_of_a_broken_connection_is_kept() -> None:
    failure = aws.ReadTimeoutError(endpoint_url=URL)
    assert _error(failure).__cause__ is failure


def test_a_request_that_the_sdk_cannot_send_is_an_error() -> None:
    assert type(_error(aws.ParamValidationError(report="bad"))) is LockError


@pytest.mark.parametrize(
    "failure",
    [ValueError("Port could not be cast to integer value as 'hunter2'"), PermissionError(13, "hunter2")],
    ids=lambda failure: type(failure).__name__,
)
def test_wrong_settings_that_the_sdk_reports_by_python_errors_are_a_lock_error(failure: Exception) -> None:
    error = _error(failure)

    assert type(error) is LockError
    for part in ("UpdateItem", type(failure).__name__, "check the endpoint URL"):
        assert part in str(error)
    # The text is a piece of the settings, which may be a secret.
    assert "hunter2" not in "".join(traceback.format_exception(error))


@pytest.mark.parametrize(
    "failure",
    [
        aws.EndpointConnectionError(endpoint_url="http://u:hunter2@127.0.0.1:1/"),
        aws.ReadTimeoutError(endpoint_url="http://u:hunter@2@127.0.0.1:1/"),
        aws.InvalidEndpointConfigurationError(msg="http://u:hunt/er2@127.0.0.1:1/"),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_an_error_does_not_show_the_password_in_the_endpoint_url(failure: Exception) -> None:
    error = _error(failure)

    assert "http://…@127.0.0.1:1/" in str(error)
    assert "hunt" not in "".join(traceback.format_exception(error))


@pytest.mark.parametrize(
    "failure",
    [RuntimeError("Session is closed"), TypeError("x"), AttributeError("x")],
    ids=lambda failure: type(failure).__name__,
)
def test_a_programming_error_passes_through_unchanged(failure: Exception) -> None:
    with pytest.raises(type(failure)) as raised:
        sdk.answer_to(failure, UPDATE, 0.0)
    assert raised.value is failure


def test_an_unknown_refusal_is_an_error() -> None:
    assert type(_error(_refusal("SomethingNewException", "no"))) is LockError


# -- answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("date", "server_ms"),
    [
        ("Thu, 01 Jan 2026 00:00:01 GMT", 1_767_225_601_000),
        (None, None),
        ("", None),
        ("yesterday", None),
        ("1767225601", None),
    ],
)
def test_the_date_header_is_the_servers_time(date: str | None, server_ms: int | None) -> None:
    headers = {} if date is None else {"date": date}
    reply = sdk.reply({"ResponseMetadata": {"HTTPHeaders": headers, "RetryAttempts": 0}}, 1.0)

    assert (reply.server_ms, reply.retried, reply.refused) == (server_ms, False, False)


def test_the_clock_never_goes_back() -> None:
    before = monotonic()
    assert monotonic() >= before


# -- settings -------------------------------------------------------------------------------------------------------


def test_the_recommended_sdk_settings_have_short_timeouts_and_can_be_overridden() -> None:
    config: Any = sdk_config(read_timeout=7, region_name="eu-north-1")

    assert (config.connect_timeout, config.read_timeout, config.tcp_keepalive) == (1, 7, True)
    assert config.retries == {"mode": "standard", "total_max_attempts": 2}
    assert config.region_name == "eu-north-1"
