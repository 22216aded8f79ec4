"""The format of dyndbmutex 0.4.0.

An item has the name of its holder, and the time after which any dyndbmutex client may take the lock, by its
own clock. There is neither a heartbeat nor a fencing token.

- **Holders of this package** write a time that is `max_clock_skew` later than the time until which they rely
  on the lease. So a client whose clock is ahead by less than that does not take a lock that is held.
- **Holders of dyndbmutex** are dead when server time is `max_clock_skew` past their time. If responses have
  no ``Date``, they count as alive until the lock is broken by hand. A holder whose clock is further behind
  may lose its lock early, as it may to other dyndbmutex clients.

Two dyndbmutex clients with the same name hold the same lock. So the name of a holder of this package contains
its lease id, which no other client has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from airflow_dynamo_lock.core.effects import Stamp
from airflow_dynamo_lock.core.foreign.dynamodb import ForeignTable
from airflow_dynamo_lock.core.foreign.item import Expiry
from airflow_dynamo_lock.core.foreign.values import milliseconds, text, their_holder
from airflow_dynamo_lock.core.model.record import Holder

# The holder in the item of a free lock.
_NO_HOLDER = "__empty__"
# How long after the end of the lease DynamoDB may delete the item, in seconds.
_TWO_DAYS = 2 * 24 * 3600


class DynDBMutex(ForeignTable):
    """The items of dyndbmutex. The mark is the holder's name, which a heartbeat does not change."""

    name = "dyndbmutex"
    mark_attribute = "holder"
    heartbeat_changes_mark = False
    default_partition_key = "lockname"
    ttl_attribute = "ttl"
    free_condition = ("attribute_not_exists(#pk) OR #holder = :no_holder", {":no_holder": _NO_HOLDER})

    def foreign_holder(self, values: Mapping[str, Any]) -> Holder | None:
        """The holder that the item names, with the end of its lease; None if the lock is free.

        The length of the lease is unknown, so the holder gets a length of 0, for which observation proves
        nothing.
        """
        owner = text(values, "holder")
        if owner == _NO_HOLDER:
            return None
        ends_ms = milliseconds(values, "expire_ts")
        return their_holder(owner, 0, f"{values['expire_ts']} {owner}", expires_at_ms=ends_ms)

    def unchanged_condition(self, holder: Holder) -> tuple[str, Mapping[str, Any]]:
        """Condition that the item has the same holder and the same end. The version contains both."""
        condition = "#holder = :seen_holder AND #expire_ts = :seen_end"
        end, _, _ = holder.version.partition(" ")
        return condition, {":seen_holder": holder.owner, ":seen_end": json.loads(end)}

    def new_mark(self, owner: str, lease_id: str, stamp: Stamp) -> str:
        """The owner and the lease id. Unlike the owner alone, no other client has both."""
        return f"{owner} {lease_id}"

    def expiries(self, stamp: Stamp) -> Sequence[Expiry]:
        """The end of the lease, later by `max_clock_skew`, in epoch milliseconds; and two days later the end
        of the item, in epoch seconds."""
        return (
            Expiry("expire_ts", stamp.best_ms + self.max_clock_skew_ms, 1),
            Expiry("ttl", stamp.best_ms // 1000 + _TWO_DAYS, 1000),
        )

    def released_attributes(self, stamp: Stamp) -> Mapping[str, Any]:
        """A free lock keeps its item, without a holder, for two days."""
        return {"holder": _NO_HOLDER, "expire_ts": 0, "ttl": stamp.best_ms // 1000 + _TWO_DAYS}
