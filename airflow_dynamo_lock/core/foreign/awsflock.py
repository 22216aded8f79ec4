"""The format of awsflock (read at its version 0.2.0), a command line.

It has: a lease id that each renewal changes, an owner, the length of the lease in seconds, and a time, five seconds
after which anybody may take the lock, by his own clock. It has no heartbeat but the renewal, and no fencing token. The
same time is the item's time to live, so that DynamoDB may delete it as soon as it is over: a free lock has no item.

So what we write there is `max_clock_skew` later than we count on: neither DynamoDB nor a client of theirs whose clock
is ahead by less than that takes a lock that is held. A holder of theirs is dead for us when DynamoDB's own time has
passed his by as much, or when he has stayed as he was for the length of his lease under our eyes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from airflow_dynamo_lock.core.effects import Stamp
from airflow_dynamo_lock.core.foreign.dynamodb import ForeignTable
from airflow_dynamo_lock.core.foreign.item import Expiry
from airflow_dynamo_lock.core.foreign.values import milliseconds, text
from airflow_dynamo_lock.core.model.record import Holder


class AwsFlock(ForeignTable):
    """See above."""

    name = "awsflock"
    mark = "lease_id"
    default_partition_key = "lock_id"
    ttl_attribute = "expiration_time"

    def foreign(self, values: Mapping[str, Any]) -> Holder | None:
        """See `ForeignTable`."""
        lease_id, owner = text(values, "lease_id"), text(values, "owner")
        lease_ms = max(1, milliseconds(values, "lease_duration", 1000))
        ends_ms = milliseconds(values, "expiration_time", 1000)
        return Holder(
            lease_id,
            owner,
            1,
            lease_ms,
            lease_ms,
            lease_id,
            acquired_at_ms=max(0, ends_ms - lease_ms),
            expires_at_ms=ends_ms,
            ours=False,
        )

    def marked(self, owner: str, lease_id: str, stamp: Stamp) -> str:
        """See `ForeignTable`."""
        return stamp.version

    def taken(self, owner: str, lease_ms: int) -> Mapping[str, Any]:
        """See `ForeignTable`."""
        return {"owner": owner}

    def lasting(self, lease_ms: int) -> Mapping[str, Any]:
        """See `ForeignTable`."""
        return {"lease_duration": -(-lease_ms // 1000)}

    def expiries(self, stamp: Stamp) -> Sequence[Expiry]:
        """See `ForeignTable`."""
        return (Expiry("expiration_time", -(-(stamp.best_ms + self.max_clock_skew_ms) // 1000), 1000),)
