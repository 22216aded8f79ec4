"""The reads of a lock table, common to all formats on DynamoDB."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from airflow_dynamo_lock.core.effects import Request
from airflow_dynamo_lock.core.model.errors import LockRecordError
from airflow_dynamo_lock.core.model.record import LockRecord

#: Maximum number of items that BatchGetItem reads.
BATCH = 100


class TableReads(ABC):
    """Builds the reads. A format defines what its items are."""

    table: str

    @abstractmethod
    def item_key(self, key: str) -> Mapping[str, Any]:
        """The key of a lock's item."""

    @abstractmethod
    def name_of(self, item: Mapping[str, Any]) -> str:
        """The lock that an item, or the key of an item, belongs to."""

    @abstractmethod
    def record(self, item: Mapping[str, Any], server_ms: int | None) -> LockRecord:
        """The lock that an item shows.

        :raises LockRecordError: the item is not a lock, or is damaged.
        """

    def get(self, key: str) -> Request:
        """Read one lock, consistently."""
        return Request(
            "GetItem", {"TableName": self.table, "Key": self.item_key(key), "ConsistentRead": True}
        )

    def batch_get(self, keys: Iterable[str], *, consistent: bool = False) -> list[Request]:
        """Read many locks, 100 per request.

        :param consistent: read the latest state. Without it a read costs half, and a stale result only wakes a waiter
            for nothing, or one poll later (R11).
        """
        wanted = [self.item_key(key) for key in keys]
        how = {"ConsistentRead": True} if consistent else {}
        return [
            Request("BatchGetItem", {"RequestItems": {self.table: {"Keys": wanted[i : i + BATCH], **how}}})
            for i in range(0, len(wanted), BATCH)
        ]

    def asked_for(self, request: Request) -> set[str]:
        """The locks that a `batch_get` reads."""
        return {self.name_of(each) for each in request.params["RequestItems"][self.table]["Keys"]}

    def batch_records(self, output: Mapping[str, Any], server_ms: int | None) -> list[LockRecord]:
        """The locks in the response to a `batch_get`. Damaged ones are left out; an attempt to acquire reports them."""
        records = []
        for item in output.get("Responses", {}).get(self.table, ()):
            try:
                records.append(self.record(item, server_ms))
            except LockRecordError:
                continue
        return records

    def unprocessed_keys(self, output: Mapping[str, Any]) -> set[str]:
        """The locks that DynamoDB left out of the response to a `batch_get`."""
        left = output.get("UnprocessedKeys", {}).get(self.table, {}).get("Keys", ())
        return {self.name_of(item) for item in left}
