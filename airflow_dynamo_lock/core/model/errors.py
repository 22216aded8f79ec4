"""The errors of this package. A message is one sentence: what was wrong, with what, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_dynamo_lock.core.model.text import readable

if TYPE_CHECKING:
    from airflow_dynamo_lock.core.model.decisions import Removal
    from airflow_dynamo_lock.core.model.record import LockRecord


class LockError(Exception):
    """Base class of all errors of this package."""


class LockValueError(LockError, ValueError):
    """An argument can never work: an empty key, a negative time, more slots than capacity."""


class LockTimeoutError(LockError, TimeoutError):
    """The lock was not free in time. The message names its holders.

    :ivar record: the lock as it was last read, or None if no read succeeded.
    """

    def __init__(self, message: str, record: LockRecord | None = None) -> None:
        super().__init__(message)
        self.record = record


@dataclass(frozen=True)
class CycleMember:
    """A member of a deadlock.

    :ivar wait: unique id of its wait.
    :ivar owner: name of the holder, for people to read.
    :ivar holds: the locks that it holds and others of the cycle wait for.
    :ivar waits_for: the locks that it waits for.
    """

    wait: str
    owner: str
    holds: tuple[str, ...]
    waits_for: tuple[str, ...]

    def describe(self) -> str:
        """``north/etl/… holds 'a' and waits for 'b'``"""
        return f"{readable(self.owner)} holds {_names(self.holds)} and waits for {_names(self.waits_for)}"


class LockDeadlockError(LockError):
    """Waiting for the lock would never end: its holders wait, directly or through others, for what the waiter holds.

    Of a cycle, exactly one member ends with this error: the last one that began to wait. The others go on waiting.

    :ivar cycle: the members, the one that has ended first.
    """

    def __init__(self, message: str, cycle: tuple[CycleMember, ...] = ()) -> None:
        super().__init__(message)
        self.cycle = cycle

    @classmethod
    def of(cls, cycle: tuple[CycleMember, ...]) -> LockDeadlockError:
        """The error for a cycle."""
        if len(cycle) == 1:
            owner, holds = readable(cycle[0].owner), _names(cycle[0].holds)
            return cls(
                f"{owner} would wait without end for the lock {_names(cycle[0].waits_for)}, because it holds {holds} "
                "itself: acquire a lock once, and release it before you acquire it again.",
                cycle,
            )
        return cls(
            f"This wait would never end, because {', '.join(each.describe() for each in cycle[:-1])}, and "
            f"{cycle[-1].describe()}: acquire these locks in the same order everywhere, or together as a list.",
            cycle,
        )


def _names(keys: tuple[str, ...]) -> str:
    return ", ".join(repr(each) for each in keys)


class LockRemovedError(LockError):
    """A person removed the waiter from the queue (R15)."""

    @classmethod
    def of(cls, key: str, removal: Removal) -> LockRemovedError:
        """The error of the removed waiter."""
        return cls(
            f"This wait for the lock {key!r} was ended{removal.decision.describe()}: ask there before you run it again."
            if removal.decision.by
            else f"This wait for the lock {key!r} was ended by hand{removal.decision.describe()}."
        )


class LockNotWaitingError(LockError):
    """The waiter to be removed is not in the queue of the lock."""


class LockLostError(LockError):
    """The lease ended while its holder relied on it: it expired, or was reclaimed, broken or drained."""


class LockNotFoundError(LockError):
    """The lock has no record, and the caller set `only_existing`."""

    @classmethod
    def of(cls, key: str) -> LockNotFoundError:
        """The error for that lock."""
        return cls(
            f"There is no record of the lock {key!r}, and the claim is for existing locks only: check its name, or "
            "acquire the lock once without that option."
        )


class LockNotHeldError(LockError):
    """The lease to be renewed or broken is not among the holders of the lock."""


class CapacityMismatchError(LockError):
    """The lock is in use with another capacity than the one asked for."""


class LockTableError(LockError):
    """The lock table is missing, not ready, or not a lock table."""


class LockRecordError(LockTableError):
    """A record in the lock table is not a lock: another program wrote or damaged it."""


class LockVersionError(LockRecordError):
    """A newer version of this package wrote the record in a format that this version does not know (R13)."""


class LockAccessError(LockError):
    """AWS refused the request: missing permission, missing or expired credentials, no region."""


class LockUnavailableError(LockError):
    """DynamoDB could not be reached or did not serve the request: network, throttling, a server error.

    :ivar maybe_applied: the write may have taken effect; only the record shows it.
    """

    def __init__(self, message: str, *, maybe_applied: bool) -> None:
        super().__init__(message)
        self.maybe_applied = maybe_applied


class LockConflictError(LockUnavailableError):
    """DynamoDB refused the request because another write to the same record was in progress. A retry succeeds."""
