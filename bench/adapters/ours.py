"""This project's `LockClient`.

Options:

- ``heartbeats``: send heartbeats in the background, as a ``with`` block does. Without it, the adapter only calls
  `acquire` and `release`.
- ``streams``: waiters read the table's stream. The table is then another one, which has a stream.
- All other options are arguments of `LockClient.acquire`.
"""

from __future__ import annotations

from typing import Any

import boto3

from airflow_dynamo_lock import Lease, LockClient, sdk_config
from airflow_dynamo_lock.client.threads import KeepAlive
from bench.adapters.worker import Lock, Settings, serve

TABLE = "airflow_locks"
TABLE_WITH_STREAM = "airflow_locks_with_stream"


class Ours:
    """A `LockClient`, and the arguments for its `acquire`."""

    def __init__(self, settings: Settings) -> None:
        self.claim: dict[str, Any] = dict(settings.options)
        self.heartbeats = bool(self.claim.pop("heartbeats", False))
        self.streams = bool(self.claim.pop("streams", False))
        if settings.poll is not None:
            self.claim["poll_interval"] = settings.poll
        config = sdk_config(**settings.sdk)
        self.client = LockClient(
            boto3.client("dynamodb", config=config),
            table=TABLE_WITH_STREAM if self.streams else TABLE,
            lease=settings.lease,
            heartbeat=settings.heartbeat,
            streams=boto3.client("dynamodbstreams", config=config) if self.streams else None,
        )

    def create_table(self) -> None:
        self.client.create_table(streams=self.streams)

    def lock(self, key: str) -> Lock:
        return _Lock(self, key)


class _Lock:
    def __init__(self, ours: Ours, key: str) -> None:
        self._ours, self._key = ours, key
        self._lease: Lease | None = None
        self._heartbeats: KeepAlive | None = None

    def acquire(self) -> None:
        self._lease = self._ours.client.acquire(self._key, **self._ours.claim)
        if self._ours.heartbeats:
            self._heartbeats = self._ours.client.keep_alive(self._lease)

    def release(self) -> None:
        assert self._lease is not None
        if self._heartbeats is not None:
            self._heartbeats.stop()
        assert self._ours.client.release(self._lease)


if __name__ == "__main__":
    serve(Ours)
