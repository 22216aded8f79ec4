"""dyndbmutex 0.4. It has no heartbeats and never waits: who wants to wait tries again, here once per poll interval.

A mutex makes two SDK clients when it is made. Each is made once for a key and used again, which is the best that can
be done for it: made anew for each use, as in its documentation, every cycle would take tenths of a second longer.
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
    """See `bench.adapters.worker.Library`."""

    def __init__(self, settings: Settings) -> None:
        # It makes its SDK clients itself: this is how they get the settings that all others have.
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
