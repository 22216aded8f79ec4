"""The package's own table format.

The record of the lock `key` is the item ``{key, entry: "lock"}``; its waiters are items under the same key,
``{key, entry: "waiter/…"}``. Every write to the record is one `UpdateItem` whose condition names what must still be
true (R1). A refused write returns the item as it stands (``ALL_OLD``), so the loser learns in the same request who
won (R2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from airflow_dynamo_lock.core.effects import Operation, Request, T
from airflow_dynamo_lock.core.model.arguments import checked_key
from airflow_dynamo_lock.core.model.limits import WAITING_PREFIX
from airflow_dynamo_lock.core.model.record import LockRecord
from airflow_dynamo_lock.core.table.codec import encode
from airflow_dynamo_lock.core.table.expressions import (
    LOCK_ENTRY,
    PARTITION_KEY,
    SORT_KEY,
    lock_item_key,
    placeholders,
)
from airflow_dynamo_lock.core.table.features import ALL_FEATURES, Feature
from airflow_dynamo_lock.core.table.grant_writes import GrantWrites
from airflow_dynamo_lock.core.table.items import read_lock
from airflow_dynamo_lock.core.table.lease_writes import LeaseWrites
from airflow_dynamo_lock.core.table.queue_writes import QueueWrites

TTL_ATTRIBUTE = "expires_at"


@dataclass(frozen=True)
class NativeFormat(GrantWrites, LeaseWrites, QueueWrites):
    """Builds the requests on one lock table and reads its items."""

    table: str
    service: str = field(default="dynamodb", init=False)
    keys: tuple[tuple[str, str, str], ...] = field(
        default=((PARTITION_KEY, "HASH", "S"), (SORT_KEY, "RANGE", "S")), init=False
    )
    ttl_attribute: str = field(default=TTL_ATTRIBUTE, init=False)
    name: str = field(default="native", init=False)
    features: frozenset[Feature] = field(default=ALL_FEATURES, init=False)

    def checked_key(self, key: str) -> str:
        """Return the name of a lock if DynamoDB can store it."""
        return checked_key(key)

    def check_data(self, data: Mapping[str, Any]) -> None:
        """All data that DynamoDB can store. The write checks that."""

    def carry_out(self, operation: Operation[T]) -> Operation[T]:
        """Run an operation as it is: all requests are DynamoDB's own."""
        return operation

    def transaction(self, requests: Sequence[Request]) -> Request:
        """Apply all of these writes or none. A refusal has the items of the refused writes, as single writes would."""
        items = []
        for request in requests:
            params = {name: value for name, value in request.params.items() if name != "ReturnValues"}
            items.append({request.action.removesuffix("Item"): params})
        return Request("TransactWriteItems", {"TransactItems": items})

    def item_key(self, key: str) -> Mapping[str, Any]:
        """The key of a lock's item."""
        return lock_item_key(key)

    def name_of(self, item: Mapping[str, Any]) -> str:
        """The lock that an item, or the key of an item, belongs to."""
        return str(item[PARTITION_KEY]["S"])

    def scan(self, cursor: Mapping[str, Any] | None, prefix: str = "", *, waiters: bool = False) -> Request:
        """Read one page of all locks whose names begin with the prefix.

        :param cursor: ``LastEvaluatedKey`` of the page before; None for the first.
        :param waiters: return the waiters' entries too, and the leases of their processes. That costs no more.
        """
        conditions = [] if waiters else ["#entry = :lock"]
        if prefix:
            named = "begins_with(#key, :prefix)"
            conditions.append(f"({named} OR begins_with(#key, :waiting))" if waiters else named)
        condition = " AND ".join(conditions)
        used = placeholders(condition)
        names = {"#entry": SORT_KEY, "#key": PARTITION_KEY}
        values = {":lock": LOCK_ENTRY, ":prefix": prefix, ":waiting": WAITING_PREFIX}
        expression = {
            "FilterExpression": condition,
            "ExpressionAttributeNames": {alias: name for alias, name in names.items() if alias in used},
            "ExpressionAttributeValues": {
                alias: encode(value) for alias, value in values.items() if alias in used
            },
        }
        params = {"TableName": self.table, "ConsistentRead": True, **(expression if condition else {})}
        return Request("Scan", params | ({"ExclusiveStartKey": cursor} if cursor else {}))

    def lock_items(self, output: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The items of locks in the response to `scan`."""
        return [each for each in output.get("Items", ()) if each[SORT_KEY] == encode(LOCK_ENTRY)]

    def record(self, item: Mapping[str, Any], server_ms: int | None) -> LockRecord:
        """The lock that an item shows.

        :raises LockRecordError: the item is not a lock, or is damaged.
        """
        return read_lock(item, self.table, server_ms)
