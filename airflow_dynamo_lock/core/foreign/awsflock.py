"""The format of awsflock 0.2.0, a command line.

An item has a lease id that changes with each renewal, an owner, the length of the lease in seconds, and its
end. There is neither a heartbeat other than the renewal nor a fencing token. Any awsflock client may take the
lock when its own clock is five seconds past the end. The end is the item's time to live as well, so DynamoDB
may delete the item from then on. A free lock has no item.

- **Holders of this package** write an end that is `max_clock_skew` later than the time until which they rely
  on the lease. So neither DynamoDB nor a client whose clock is ahead by less than that takes a lock that is
  held.
- **Holders of awsflock** are dead when server time is `max_clock_skew` past the end, or when this process has
  seen the same lease id for the length of the lease (R3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from airflow_dynamo_lock.core.effects import Stamp
from airflow_dynamo_lock.core.foreign.dynamodb import ForeignTable
from airflow_dynamo_lock.core.foreign.item import Expiry
from airflow_dynamo_lock.core.foreign.values import milliseconds, rounded_up, text, their_holder
from airflow_dynamo_lock.core.model.record import Holder


class AwsFlock(ForeignTable):
    """The items of awsflock. The mark is the lease id."""

    name = "awsflock"
    mark_attribute = "lease_id"
    default_partition_key = "lock_id"
    ttl_attribute = "expiration_time"

    def foreign_holder(self, values: Mapping[str, Any]) -> Holder | None:
        """The holder that the item names, with the end of its lease. Its lease id is its version as well."""
        lease_id, owner = text(values, "lease_id"), text(values, "owner")
        lease_ms = max(1, milliseconds(values, "lease_duration", 1000))
        ends_ms = milliseconds(values, "expiration_time", 1000)
        acquired_at_ms = max(0, ends_ms - lease_ms)
        return their_holder(
            owner,
            lease_ms,
            lease_id,
            lease_id=lease_id,
            acquired_at_ms=acquired_at_ms,
            expires_at_ms=ends_ms,
        )

    def new_mark(self, owner: str, lease_id: str, stamp: Stamp) -> str:
        """The version of the stamp: a new lease id for each renewal, as awsflock writes it."""
        return stamp.version

    def owner_attributes(self, owner: str) -> Mapping[str, Any]:
        """The owner."""
        return {"owner": owner}

    def lease_attributes(self, lease_ms: int) -> Mapping[str, Any]:
        """The length of the lease in seconds, rounded up."""
        return {"lease_duration": rounded_up(lease_ms)}

    def expiries(self, stamp: Stamp) -> Sequence[Expiry]:
        """The end of the lease, later by `max_clock_skew`, in epoch seconds."""
        return (Expiry("expiration_time", rounded_up(stamp.best_ms + self.max_clock_skew_ms), 1000),)
