"""The outcomes of operations on a lock. A lost race is an outcome, not an error: the caller decides what it means."""

from __future__ import annotations

from dataclasses import dataclass

from airflow_dynamo_lock.core.model.claim import Claim
from airflow_dynamo_lock.core.model.record import Holder, LockRecord, Waiter
from airflow_dynamo_lock.core.model.text import readable


@dataclass(frozen=True)
class Granted:
    """The claim holds the lock.

    :ivar token: the fencing token.
    :ivar stamped_at: when the stamp of the write was made, monotonic seconds: the lease counts from then.
    :ivar took_over: slots came from a dead holder that may have left its work half done.
    :ivar reclaimed: the dead holders whose slots this grant took over.
    :ivar usual_ms: how long leases of the lock are usually held, milliseconds; None if unknown.
    """

    claim: Claim
    token: int
    acquired_at_ms: int
    stamped_at: float
    took_over: bool = False
    reclaimed: tuple[Holder, ...] = ()
    usual_ms: int | None = None


@dataclass(frozen=True)
class Busy:
    """The lock has no slots for the claim: holders have them (`record`), or earlier waiters get them (`ahead`).

    :ivar undone: leases of this attempt were released. That release may arrive late, so the next attempt needs another
        lease id (R7, one lease id per attempt).
    """

    record: LockRecord
    ahead: tuple[Waiter, ...] = ()
    undone: bool = False

    def describe(self) -> str:
        """The holders, or the first of the earlier waiters, for an error or a log line."""
        if not self.ahead:
            return self.record.describe()
        first, more = readable(self.ahead[0].owner), len(self.ahead) - 1
        return (
            f"{self.record.describe()}; {first} waits for it"
            + (f", with {more} more," if more else "")
            + " already"
        )


@dataclass(frozen=True)
class Renewed:
    """The heartbeat was written.

    :ivar holder: the lease as the record shows it now; it may be `draining`.
    :ivar stamped_at: when the stamp of the write was made, monotonic seconds: the lease counts from then.
    """

    holder: Holder
    stamped_at: float


@dataclass(frozen=True)
class Lost:
    """The lease is not, or no longer, among the holders; or it was released, and cools down.

    :ivar record: the lock as it is now; None if it has no record.
    :ivar lease_id: id of the lease.
    """

    record: LockRecord | None
    lease_id: str = ""

    def __bool__(self) -> bool:
        """False. Of the outcomes of a release, only `Released` is true."""
        return False

    def describe(self) -> str:
        """What happened to the lease, for an error message."""
        loss = None if self.record is None else self.record.loss_of(self.lease_id)
        how = "it was released, broken or reclaimed" if loss is None else loss.describe()
        if self.record is None or not self.record.holders:
            return f"{how}, and the lock is not locked now"
        return f"{how}. {self.record.describe()}"


@dataclass(frozen=True)
class Released:
    """The slots are free again.

    :ivar hold_until_ms: the slots are free only from then on because of `min_hold`, epoch milliseconds; None: now.
    """

    hold_until_ms: int | None = None


@dataclass(frozen=True)
class StillHeld:
    """The lease goes on: it is re-entrant and needs further releases, or this process is a fork of its holder.

    :ivar times: the number of releases left; 1 in a fork, whose releases do not count.
    """

    times: int

    def __bool__(self) -> bool:
        """False. Of the outcomes of a release, only `Released` is true."""
        return False


@dataclass(frozen=True)
class CapacitySet:
    """The capacity of the lock was set.

    :ivar record: the lock as it is now.
    """

    record: LockRecord


@dataclass(frozen=True)
class Draining:
    """The lease drains: it was shortened to its grace, and no process may enter (R8, drain before release).

    :ivar holder: the lease as the record shows it now.
    """

    holder: Holder

    def __bool__(self) -> bool:
        """False. Of the outcomes of a release, only `Released` is true."""
        return False


@dataclass(frozen=True)
class Broken:
    """A person removed the lease of `holder`. Its processes learn it from their next heartbeat."""

    holder: Holder
