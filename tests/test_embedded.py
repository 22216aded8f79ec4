"""The server of the embedded DynamoDB. All other tests show that locks work on it."""

from __future__ import annotations

import socket
import threading
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from airflow_dynamo_lock import embedded
from deployments.engines import Engine


class Moto:
    def __init__(self) -> None:
        self.executed: list[tuple[Any, ...]] = []

    def execute(self, *request: Any) -> Any:
        self.executed.append(request)
        raise ConnectionError


def test_an_incomplete_request_of_a_killed_client_is_not_executed() -> None:
    moto = Moto()
    with embedded._Server(("127.0.0.1", 0), moto) as server:  # type: ignore[arg-type]
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        try:
            with socket.create_connection(server.server_address) as client:  # type: ignore[arg-type]
                client.sendall(b'POST / HTTP/1.1\r\nContent-Length: 100\r\n\r\n{"TableName": "lo')
                client.shutdown(socket.SHUT_WR)
                assert client.recv(1) == b""
        finally:
            server.shutdown()
    assert moto.executed == []


def test_an_unknown_region_is_named_in_an_error(moto: Engine) -> None:
    client = boto3.client(
        "dynamodb",
        endpoint_url=moto.endpoint_url,
        region_name="local",
        aws_access_key_id="test",
        aws_secret_access_key="test-secret",
    )
    for _ in range(2):  # the connection stays open
        with pytest.raises(ClientError, match="There is no region 'local'") as raised:
            client.list_tables()
        assert raised.value.response["Error"]["Code"] == "InvalidSignatureException"
        assert raised.value.response["ResponseMetadata"]["HTTPStatusCode"] == 400
