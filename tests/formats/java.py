"""A model of AmazonDynamoDBLockClient, according to the description of its format; no Java runs here.

It has the same items and conditions, and waits in the same way: it observes a lock for the lease that the item shows.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from botocore.exceptions import ClientError

from tests.formats.conftest import Place


@dataclass
class JavaClient:
    """A client for locks without a sort key.

    :ivar deletes: whether a release deletes the item, which is the default.
    """

    place: Place
    owner: str = "a Java program"
    lease: float = 20.0
    refresh: float = 0.1
    deletes: bool = True
    version: str = field(default="", init=False)

    def acquire(self, key: str, *, timeout: float = 60.0) -> bool:
        """Acquire the lock. Return whether that succeeded within the timeout."""
        deadline = time.monotonic() + timeout
        seen, since, lease = "", 0.0, 0.0
        while True:
            item = self._get(key)
            if item is None:
                done = self._put(key, "attribute_not_exists(#pk)")
            elif item.get("isReleased") == {"S": "1"}:
                done = self._put(
                    key,
                    "attribute_exists(#pk) AND #released = :one",
                    {":one": "1"},
                    {"#released": "isReleased"},
                )
            else:
                version = item["recordVersionNumber"]["S"]
                if version != seen:
                    seen, since, lease = version, time.monotonic(), int(item["leaseDuration"]["S"]) / 1000
                done = time.monotonic() - since > lease and self._put(
                    key,
                    "attribute_exists(#pk) AND #version = :seen",
                    {":seen": seen},
                    {"#version": "recordVersionNumber"},
                )
            if done:
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(self.refresh)

    def heartbeat(self, key: str) -> bool:
        """Renew the lease. Return whether the client still held the lock."""
        fresh = str(uuid.uuid4())
        held = self._write_if_held(
            "update_item",
            key,
            {
                "UpdateExpression": "SET #version = :new, leaseDuration = :lease",
                "more": {":new": fresh, ":lease": str(round(self.lease * 1000))},
            },
        )
        self.version = fresh if held else self.version
        return held

    def release(self, key: str) -> bool:
        """Release the lock. Return whether the client held it."""
        if self.deletes:
            return self._write_if_held("delete_item", key, {})
        update = {"UpdateExpression": "SET isReleased = :one", "more": {":one": "1"}}
        return self._write_if_held("update_item", key, update)

    def _write_if_held(self, method: str, key: str, params: dict[str, Any]) -> bool:
        values = {":mine": self.version, ":me": self.owner, **params.pop("more", {})}
        return self._call(
            method,
            Key={"key": {"S": key}},
            ConditionExpression="attribute_exists(#pk) AND #version = :mine AND ownerName = :me",
            ExpressionAttributeNames={"#pk": "key", "#version": "recordVersionNumber"},
            ExpressionAttributeValues={name: {"S": value} for name, value in values.items()},
            **params,
        )

    def _put(
        self,
        key: str,
        condition: str,
        values: dict[str, str] | None = None,
        names: dict[str, str] | None = None,
    ) -> bool:
        version = str(uuid.uuid4())
        item = {
            "key": key,
            "ownerName": self.owner,
            "leaseDuration": str(round(self.lease * 1000)),
            "recordVersionNumber": version,
        }
        given = (
            {"ExpressionAttributeValues": {name: {"S": each} for name, each in values.items()}}
            if values
            else {}
        )
        done = self._call(
            "put_item",
            Item={name: {"S": value} for name, value in item.items()},
            ConditionExpression=condition,
            ExpressionAttributeNames={"#pk": "key", **(names or {})},
            **given,
        )
        self.version = version if done else self.version
        return done

    def _get(self, key: str) -> Any:
        found = self.place.sdk.get_item(
            TableName=self.place.table, Key={"key": {"S": key}}, ConsistentRead=True
        )
        return found.get("Item")

    def _call(self, method: str, **params: Any) -> bool:
        try:
            getattr(self.place.sdk, method)(TableName=self.place.table, **params)
        except ClientError as refused:
            if refused.response["Error"]["Code"] != "ConditionalCheckFailedException":
                raise
            return False
        return True
