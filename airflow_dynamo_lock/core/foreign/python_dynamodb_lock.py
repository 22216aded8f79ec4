"""The format of python-dynamodb-lock (read at its version 0.9.1), which is that of the library for Java with other
names.

It has: a version that each heartbeat changes, the length of the lease in seconds, an owner's name, and a sort key,
which is ``-`` unless somebody wants another. It goes by silence and by no clock, but `expiry_time`, an hour ahead, by
which DynamoDB may delete the item. So do we, for a holder of theirs; one that is ours shows when it was last heard of
as well, and is taken at once.

It has no fencing token and keeps no data, and a free lock has no item.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from airflow_dynamo_lock.core.effects import Stamp
from airflow_dynamo_lock.core.foreign.dynamodb import ForeignTable
from airflow_dynamo_lock.core.foreign.item import Expiry
from airflow_dynamo_lock.core.foreign.values import milliseconds, text
from airflow_dynamo_lock.core.model.record import Holder

# How long an item outlives its lease, seconds.
_HOUR = 3600


class PythonDynamoDBLock(ForeignTable):
    """See above."""

    name = "python-dynamodb-lock"
    mark = "record_version_number"
    default_partition_key = "lock_key"
    default_sort_key = "sort_key"
    ttl_attribute = "expiry_time"

    def foreign(self, values: Mapping[str, Any]) -> Holder | None:
        """See `ForeignTable`."""
        lease_ms = max(1, milliseconds(values, "lease_duration", 1000))
        owner, version = text(values, "owner_name"), text(values, "record_version_number")
        return Holder(owner, owner, 1, lease_ms, lease_ms, version, acquired_at_ms=None, ours=False)

    def marked(self, owner: str, lease_id: str, stamp: Stamp) -> str:
        """See `ForeignTable`."""
        return stamp.version

    def taken(self, owner: str, lease_ms: int) -> Mapping[str, Any]:
        """See `ForeignTable`."""
        return {"owner_name": owner}

    def lasting(self, lease_ms: int) -> Mapping[str, Any]:
        """See `ForeignTable`."""
        return {"lease_duration": lease_ms / 1000}

    def expiries(self, stamp: Stamp) -> Sequence[Expiry]:
        """See `ForeignTable`."""
        return (Expiry("expiry_time", stamp.best_ms // 1000 + _HOUR, 1000),)
