"""dyndbmutex 0.4. It has no heartbeats and cannot wait. The adapter retries once per poll interval.

The constructor of a mutex creates two SDK clients. The adapter creates one mutex per key and reuses it, which is in the
library's favour: a new mutex for each use, as in its documentation, makes each cycle some tenths of a second slower.
"""

from __future__ import annotations

import os
import time

import boto3
import botocore.session
from dyndbmutex.dyndbmutex import DynamoDbMutex

from airflow_dynamo_lock import sdk_config
from bench.adapters.worker import Lock, Settings, serve


class DynDbMutex:
    """The library, set up with the SDK settings of the other libraries."""

    def __init__(self, settings: Settings) -> None:
        # The library creates its SDK clients itself. They take their settings from the default session.
        session = botocore.session.get_session()
        session.set_default_client_config(sdk_config(**settings.sdk))
        boto3.setup_default_session(botocore_session=session)
        self._settings = settings

    def create_table(self) -> None:
        self._mutex("any")

    def lock(self, key: str) -> Lock:
        return _Lock(self._mutex(key), self._settings.poll or 1.0)

    def _mutex(self, key: str) -> DynamoDbMutex:
        return DynamoDbMutex(
            key, timeoutms=round(self._settings.lease * 1000), region_name=os.environ["AWS_DEFAULT_REGION"]
        )


class _Lock:
    def __init__(self, mutex: DynamoDbMutex, poll: float) -> None:
        self._mutex, self._poll = mutex, poll

    def acquire(self) -> None:
        while not self._mutex.lock():
            time.sleep(self._poll)

    def release(self) -> None:
        self._mutex.release()
        assert not self._mutex.is_locked()


if __name__ == "__main__":
    serve(DynDbMutex)
