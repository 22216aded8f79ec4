"""aws_s3_lock 0.1, from the package aws-ops-alpha, which includes it. Its locks are objects in S3.

It has no heartbeats and cannot wait. The adapter retries once per poll interval.
"""

from __future__ import annotations

import time

import boto3
from aws_ops_alpha.vendor.aws_s3_lock import AlreadyLockedError, Vault
from aws_ops_alpha.vendor.aws_s3_lock import Lock as Held

from airflow_dynamo_lock import sdk_config
from bench.adapters.worker import Lock, Settings, serve

BUCKET = "aws-s3-lock"


class AwsS3Lock:
    """The library, with an S3 client.

    Option: ``wait``: argument of `Vault`, in seconds.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.client = boto3.client("s3", config=sdk_config(**settings.sdk))

    def create_table(self) -> None:
        here = {"LocationConstraint": self.client.meta.region_name}
        self.client.create_bucket(Bucket=BUCKET, CreateBucketConfiguration=here)

    def lock(self, key: str) -> Lock:
        return _Lock(self, key)


class _Lock:
    def __init__(self, library: AwsS3Lock, key: str) -> None:
        self._library = library
        wait = library.settings.options.get("wait", 1.0)
        self._vault = Vault(BUCKET, key, expire=round(library.settings.lease), wait=wait)
        self._held: Held | None = None

    def acquire(self) -> None:
        while True:
            try:
                self._held = self._vault.acquire(self._library.client)
            except AlreadyLockedError:
                time.sleep(self._library.settings.poll or 1.0)
            else:
                return

    def release(self) -> None:
        assert self._held is not None
        self._vault.release(self._library.client, self._held)


if __name__ == "__main__":
    serve(AwsS3Lock)
