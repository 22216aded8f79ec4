"""The least that a lock can cost: one conditional write to take it and one to give it back, with boto3 alone.

It is no lock: it waits by trying, knows no lease, and whoever dies with it keeps it.
"""

from __future__ import annotations

import time
import uuid

import boto3

from airflow_dynamo_lock import sdk_config
from bench.adapters.worker import Lock, Settings, serve

TABLE = "floor"


class Floor:
    """See `bench.adapters.worker.Library`."""

    def __init__(self, settings: Settings) -> None:
        self.poll = settings.poll or 1.0
        self.client = boto3.client("dynamodb", config=sdk_config(**settings.sdk))

    def create_table(self) -> None:
        self.client.create_table(
            TableName=TABLE,
            BillingMode="PAY_PER_REQUEST",
            AttributeDefinitions=[{"AttributeName": "key", "AttributeType": "S"}],
            KeySchema=[{"AttributeName": "key", "KeyType": "HASH"}],
        )

    def lock(self, key: str) -> Lock:
        return _Lock(self, key)


class _Lock:
    def __init__(self, floor: Floor, key: str) -> None:
        self._client, self._poll, self._key = floor.client, floor.poll, key
        self._me = str(uuid.uuid4())

    def acquire(self) -> None:
        while True:
            try:
                self._client.update_item(
                    TableName=TABLE,
                    Key={"key": {"S": self._key}},
                    UpdateExpression="SET holder = :me",
                    ConditionExpression="attribute_not_exists(holder)",
                    ExpressionAttributeValues={":me": {"S": self._me}},
                )
                return
            except self._client.exceptions.ConditionalCheckFailedException:
                time.sleep(self._poll)

    def release(self) -> None:
        self._client.update_item(
            TableName=TABLE,
            Key={"key": {"S": self._key}},
            UpdateExpression="REMOVE holder",
            ConditionExpression="holder = :me",
            ExpressionAttributeValues={":me": {"S": self._me}},
        )


if __name__ == "__main__":
    serve(Floor)
