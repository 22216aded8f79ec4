"""The results of operations on a lock."""

from __future__ import annotations

from dataclasses import dataclass

from airflow_dynamo_lock.core.model.claim import Claim
from airflow_dynamo_lock.core.model.record import Holder, LockRecord, Waiter
from airflow_dynamo_lock.core.model.text import readable


@dataclass(frozen=True)
class Granted:
    """The lock is ours. `sent_at` is when the write that took it was about to be sent: the lease counts from then."""

    claim: Claim
    token: int
    acquired_at_ms: int
    sent_at: float
    took_over: bool = False
    reclaimed: tuple[Holder, ...] = ()


@dataclass(frozen=True)
class Busy:
    """The lock is taken; `record` says by whom. Or it is `ahead` who are to have it first."""

    record: LockRecord
    ahead: tuple[Waiter, ...] = ()

    def describe(self) -> str:
        """Who is in the way."""
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
    """The heartbeat was written. `holder` is the lease as it stands now (it may be `draining`)."""

    holder: Holder
    sent_at: float


@dataclass(frozen=True)
class Lost:
    """The lease is not among the holders (any more). `record` shows who is, None if there is no record."""

    record: LockRecord | None

    def __bool__(self) -> bool:
        """False: the slots are not free. Only `Released` is true."""
        return False

    def describe(self) -> str:
        """What became of the lock, for an error message."""
        if self.record is None or not self.record.holders:
            return "it was released, broken or reclaimed, and nobody holds the lock now"
        return f"it was released, broken or reclaimed. {self.record.describe()}"


@dataclass(frozen=True)
class Released:
    """The slots are free again; or will be at `hold_until_ms`, epoch milliseconds, if they are to be held so long."""

    hold_until_ms: int | None = None


@dataclass(frozen=True)
class StillHeld:
    """The lease was acquired `times` more often than it was given back, by an owner that asked for that."""

    times: int

    def __bool__(self) -> bool:
        """False: the slots are not free. Only `Released` is true."""
        return False


@dataclass(frozen=True)
class CapacitySet:
    """The lock has another capacity; `record` is how it stands now."""

    record: LockRecord


@dataclass(frozen=True)
class Draining:
    """Processes are still inside, so the lease was shortened to a grace and no process may enter (R8)."""

    holder: Holder

    def __bool__(self) -> bool:
        """False: the slots are not free. Only `Released` is true."""
        return False


@dataclass(frozen=True)
class Broken:
    """A person took the lease away from `holder`, whose processes may not know it yet."""

    holder: Holder
