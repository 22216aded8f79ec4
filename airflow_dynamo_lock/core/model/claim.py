"""A claim: one attempt to acquire slots of a lock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow_dynamo_lock.core.model.kind import Kind
from airflow_dynamo_lock.core.model.record import Holder, Waiter


@dataclass(frozen=True)
class Claim:
    """One attempt to acquire slots of one lock.

    :ivar lease_id: new for each attempt (R7, one lease id per attempt). A later attempt has a larger id.
    :ivar owner: name of the holder, for people to read.
    :ivar lease_ms: how long the lease lasts after a heartbeat, milliseconds.
    :ivar grace_ms: how long a drained lease lasts while processes are inside (R8), milliseconds.
    :ivar data: the lock's data from then on; None keeps what is there.
    :ivar about: details of the holder (in Airflow: DAG, run, task, try).
    :ivar attempt_of: names the work that this is one attempt at (in Airflow: one task of one run). A later attempt
        supersedes the lease of an earlier one (R8). Stored in the holder's ``about``.
    :ivar min_hold_ms: shortest time from acquisition to the next grant of the slots, milliseconds.
    :ivar fair: waits in the queue and does not overtake other waiters.
    :ivar priority: position in the queue; a higher priority is granted first.
    :ivar only_existing: the lock must have a record already.
    :ivar former: earlier lease ids of this claim whose writes may have been applied, or may still be (R5).
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

    @property
    def kind(self) -> Kind:
        """The kind of lock that the claim is for."""
        return Kind.of(self.capacity)

    def supersedes(self, holder: Holder | Waiter) -> bool:
        """Whether `holder` is an earlier attempt at the same work."""
        return holder.lease_id in self.former or (
            self.attempt_of is not None
            and holder.about.get("attempt_of") == self.attempt_of
            and holder.lease_id < self.lease_id
        )
