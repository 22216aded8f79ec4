"""What a caller wants to hold, and what a renewal changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow_dynamo_lock.core.model.record import Holder, Waiter


@dataclass(frozen=True)
class Claim:
    """What somebody wants to hold, and as whom.

    :ivar min_hold_ms: a released lock is not handed on sooner than so long after it was acquired, milliseconds.
    :ivar fair: it does not overtake those who wait, and waits in line itself (`protocol.line`).
    :ivar priority: whose waiting is how urgent: larger is sooner.
    :ivar only_existing: it is for a lock of which there is a record.
    :ivar former: lease ids of this very claim, whose writes may have been applied or may still be (rule R5).
    :ivar attempt_of: names the thing of which this is one attempt (in Airflow: one task of one run). An earlier
        attempt's lease (smaller lease id) is given up for the later one (rule R8). Kept in the holder's ``about``.
    """

    key: str
    lease_id: str
    owner: str
    lease_ms: int
    grace_ms: int
    slots: int = 1
    capacity: int = 1
    data: Mapping[str, Any] | None = field(default=None, repr=False)
    about: Mapping[str, str] = field(default_factory=dict)
    attempt_of: str | None = None
    min_hold_ms: int = 0
    fair: bool = True
    priority: int = 0
    only_existing: bool = False
    former: frozenset[str] = frozenset()

    def supersedes(self, holder: Holder | Waiter) -> bool:
        """Whether `holder` is an earlier attempt at the same thing."""
        return holder.lease_id in self.former or (
            self.attempt_of is not None
            and holder.about.get("attempt_of") == self.attempt_of
            and holder.lease_id < self.lease_id
        )


@dataclass(frozen=True)
class Change:
    """What a heartbeat changes besides.

    :ivar lease_ms: how long the lease lasts from then on, milliseconds; None if that stays. Never less than before:
        somebody may count on it.
    :ivar data: the lock's data; None if they stay, empty if there are to be none.
    """

    lease_ms: int | None = None
    data: Mapping[str, Any] | None = field(default=None, repr=False)
