"""What people decided about a lock, and how its last lease was lost, as the record shows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from airflow_dynamo_lock.core.model.text import iso, readable, utc


@dataclass(frozen=True)
class Decision:
    """Who decided that a lease or a wait ends, and why.

    :ivar by: name of the person or program; None if it is not known.
    :ivar reason: the reason; None if none was given.
    """

    by: str | None = None
    reason: str | None = None

    def describe(self) -> str:
        """`` by anna (the host is gone)``, to follow a verb such as "broken"; empty if nothing is known."""
        by = f" by {readable(self.by)}" if self.by else ""
        return by + (f" ({readable(self.reason)})" if self.reason else "")


#: A decision of which nothing is known.
UNKNOWN = Decision()


@dataclass(frozen=True)
class Loss:
    """The last lease of a lock that its holder did not release.

    :ivar lease_id: id of the lease.
    :ivar owner: name of the holder, for people to read.
    :ivar at_ms: when the lease was removed, epoch milliseconds.
    :ivar broken: a person broke the lease. False: its heartbeats had stopped, and a later acquire removed it.
    :ivar decision: who broke it, and why.
    """

    lease_id: str
    owner: str
    at_ms: int
    broken: bool
    decision: Decision = UNKNOWN

    def describe(self) -> str:
        """``it was broken by anna (the host is gone) at 2026-11-25 03:12:09 UTC``"""
        at = f"at {utc(self.at_ms):%Y-%m-%d %H:%M:%S} UTC"
        if self.broken:
            return f"it was broken{self.decision.describe()} {at}"
        return f"it was reclaimed {at}, because its heartbeats had stopped"

    def as_dict(self) -> dict[str, Any]:
        """The loss as values for JSON, with its time as text in ISO 8601."""
        return {
            "lease_id": self.lease_id,
            "owner": self.owner,
            "at": iso(utc(self.at_ms)),
            "broken": self.broken,
            "by": self.decision.by,
            "reason": self.decision.reason,
        }


@dataclass(frozen=True)
class Removal:
    """A waiter that a person has removed from the queue.

    :ivar at_ms: when, epoch milliseconds.
    :ivar decision: who removed it, and why.
    """

    at_ms: int
    decision: Decision = UNKNOWN
