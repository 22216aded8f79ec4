"""The format of python-dynamodb-lock 0.9.1. It is that of `amazon_lock_client` with other names.

An item has a version that changes with each heartbeat, the length of the lease in seconds, the name of the
owner, and a sort key, ``-`` by default. There is no fencing token and no data. A free lock has no item. A
client that wants a lock watches it for the length of the lease, and takes the lock if the version has not
changed. DynamoDB may delete an item after its `expiry_time`, which each heartbeat sets to one hour from now.

- **Holders of that library** are dead when this process has seen the same version for the length of the lease
  (R3).
- **Holders of this package** store the server time of their last heartbeat as well, so clients of this
  package also prove their death by server time, in one attempt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from airflow_dynamo_lock.core.effects import Stamp
from airflow_dynamo_lock.core.foreign.dynamodb import ForeignTable
from airflow_dynamo_lock.core.foreign.item import Expiry
from airflow_dynamo_lock.core.foreign.values import milliseconds, text, their_holder
from airflow_dynamo_lock.core.model.record import Holder

# How long after the end of the lease DynamoDB may delete the item, in seconds.
_HOUR = 3600


class PythonDynamoDBLock(ForeignTable):
    """The items of python-dynamodb-lock. The mark is the record version number."""

    name = "python-dynamodb-lock"
    mark_attribute = "record_version_number"
    default_partition_key = "lock_key"
    default_sort_key = "sort_key"
    ttl_attribute = "expiry_time"

    def foreign_holder(self, values: Mapping[str, Any]) -> Holder | None:
        """The holder that the item names. Its owner is its lease id as well."""
        lease_ms = max(1, milliseconds(values, "lease_duration", 1000))
        owner, version = text(values, "owner_name"), text(values, "record_version_number")
        return their_holder(owner, lease_ms, version)

    def new_mark(self, owner: str, lease_id: str, stamp: Stamp) -> str:
        """The version of the stamp: like the library, this package writes a new one with each heartbeat."""
        return stamp.version

    def owner_attributes(self, owner: str) -> Mapping[str, Any]:
        """The name of the owner."""
        return {"owner_name": owner}

    def lease_attributes(self, lease_ms: int) -> Mapping[str, Any]:
        """The length of the lease in seconds."""
        return {"lease_duration": lease_ms / 1000}

    def expiries(self, stamp: Stamp) -> Sequence[Expiry]:
        """The end of the item in epoch seconds, an hour after the end of the lease."""
        return (Expiry("expiry_time", stamp.best_ms // 1000 + _HOUR, 1000),)
