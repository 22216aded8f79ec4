"""The format of dyndbmutex (read at its version 0.4.0).

It has: a holder's name, and a time after which anybody may take the lock, by his own clock. It has no heartbeat, no
fencing token, and nothing else.

So what we write there is `max_clock_skew` later than we count on: a client of theirs whose clock is ahead by less than
that does not take a lock that is held. And a holder of theirs is dead for us when DynamoDB's own time has passed his
by as much; where an engine tells no time, he is alive until somebody breaks the lock. A holder whose clock is behind
by more than that may lose his lock early, as among themselves.

Whoever has the same name holds the same lock there. Ours has the lease id in its name, so that nobody else has it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from airflow_dynamo_lock.core.effects import Stamp
from airflow_dynamo_lock.core.foreign.dynamodb import ForeignTable
from airflow_dynamo_lock.core.foreign.item import Expiry
from airflow_dynamo_lock.core.foreign.values import milliseconds, text
from airflow_dynamo_lock.core.model.record import Holder

_NOBODY = "__empty__"
# How long DynamoDB keeps a lock that nobody uses, seconds.
_TWO_DAYS = 2 * 24 * 3600


class DynDBMutex(ForeignTable):
    """See above."""

    name = "dyndbmutex"
    mark = "holder"
    renewed = False
    default_partition_key = "lockname"
    ttl_attribute = "ttl"
    free = ("attribute_not_exists(#pk) OR #holder = :nobody", {":nobody": _NOBODY})

    def foreign(self, values: Mapping[str, Any]) -> Holder | None:
        """See `ForeignTable`."""
        owner = text(values, "holder")
        if owner == _NOBODY:
            return None
        ends_ms = milliseconds(values, "expire_ts")
        return Holder(
            owner,
            owner,
            1,
            0,
            0,
            f"{values['expire_ts']} {owner}",
            acquired_at_ms=None,
            expires_at_ms=ends_ms,
            ours=False,
        )

    def unchanged(self, dead: Holder) -> tuple[str, Mapping[str, Any]]:
        """See `ForeignTable`."""
        condition = "#holder = :seen_holder AND #expire_ts = :seen_end"
        ends, _, _ = dead.version.partition(" ")
        return condition, {":seen_holder": dead.owner, ":seen_end": json.loads(ends)}

    def marked(self, owner: str, lease_id: str, stamp: Stamp) -> str:
        """See `ForeignTable`."""
        return f"{owner} {lease_id}"

    def expiries(self, stamp: Stamp) -> Sequence[Expiry]:
        """See `ForeignTable`."""
        return (
            Expiry("expire_ts", stamp.best_ms + self.max_clock_skew_ms, 1),
            Expiry("ttl", stamp.best_ms // 1000 + _TWO_DAYS, 1000),
        )

    def emptied(self, stamp: Stamp) -> Mapping[str, Any]:
        """See `ForeignTable`."""
        return {"holder": _NOBODY, "expire_ts": 0, "ttl": stamp.best_ms // 1000 + _TWO_DAYS}
