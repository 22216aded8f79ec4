"""The lower bound for the cost of a lock: one conditional write to acquire and one to release, with plain boto3.

It is not a usable lock: it has no lease, so a holder that dies blocks the key for ever. Waiters retry the write.
"""

from __future__ import annotations

import time
import uuid

import boto3

from airflow_dynamo_lock import sdk_config
from bench.adapters.worker import Lock, Settings, serve

TABLE = "floor"


class Floor:
    """An SDK client, and a table of its own."""

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
        self._holder = str(uuid.uuid4())

    def acquire(self) -> None:
        while True:
            try:
                self._client.update_item(
                    TableName=TABLE,
                    Key={"key": {"S": self._key}},
                    UpdateExpression="SET holder = :holder",
                    ConditionExpression="attribute_not_exists(holder)",
                    ExpressionAttributeValues={":holder": {"S": self._holder}},
                )
                return
            except self._client.exceptions.ConditionalCheckFailedException:
                time.sleep(self._poll)

    def release(self) -> None:
        self._client.update_item(
            TableName=TABLE,
            Key={"key": {"S": self._key}},
            UpdateExpression="REMOVE holder",
            ConditionExpression="holder = :holder",
            ExpressionAttributeValues={":holder": {"S": self._holder}},
        )


if __name__ == "__main__":
    serve(Floor)
