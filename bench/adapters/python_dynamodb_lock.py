"""python-dynamodb-lock 0.9: a port of AWS's Java client. One client sends the heartbeats of all locks of a process."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import boto3
from python_dynamodb_lock.python_dynamodb_lock import DynamoDBLock, DynamoDBLockClient

from airflow_dynamo_lock import sdk_config
from bench.adapters.worker import Lock, Settings, serve


class PythonDynamoDBLock:
    """The library's client, with the lease and the heartbeat interval of the settings."""

    def __init__(self, settings: Settings) -> None:
        config = sdk_config(**settings.sdk)
        self._sdk = boto3.client("dynamodb", config=config)
        times: dict[str, Any] = {
            "lease_duration": timedelta(seconds=settings.lease),
            "safe_period": timedelta(
                seconds=settings.lease * 2 / 3
            ),  # the ratio of its defaults, 20 s of 30 s
        }
        if settings.heartbeat is not None:
            times["heartbeat_period"] = timedelta(seconds=settings.heartbeat)
        self.client = DynamoDBLockClient(boto3.resource("dynamodb", config=config), **times)
        self.retry = None if settings.poll is None else timedelta(seconds=settings.poll)

    def create_table(self) -> None:
        DynamoDBLockClient.create_dynamodb_table(self._sdk)

    def lock(self, key: str) -> Lock:
        return _Lock(self, key)


class _Lock:
    def __init__(self, library: PythonDynamoDBLock, key: str) -> None:
        self._library, self._key = library, key
        self._held: DynamoDBLock | None = None

    def acquire(self) -> None:
        self._held = self._library.client.acquire_lock(
            self._key, retry_period=self._library.retry, retry_timeout=timedelta(hours=1)
        )

    def release(self) -> None:
        assert self._held is not None
        self._held.release(best_effort=False)


if __name__ == "__main__":
    serve(PythonDynamoDBLock)
