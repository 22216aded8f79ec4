"""Every error that this package raises on purpose, one sentence each: what was wrong, with what, what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from airflow_dynamo_lock.core.model.record import LockRecord


class LockError(Exception):
    """Base of all errors of this package."""


class LockValueError(LockError, ValueError):
    """An argument that can never work: an empty key, a negative time, more slots than capacity."""


class LockTimeoutError(LockError, TimeoutError):
    """The lock was not free in time. The message names who holds it.

    :ivar record: the lock as it was last seen, or None if it never could be read.
    """

    def __init__(self, message: str, record: LockRecord | None = None) -> None:
        super().__init__(message)
        self.record = record


class LockLostError(LockError):
    """The lease ended while its holder still counted on it: expired, reclaimed, broken or draining."""


class LockNotFoundError(LockError):
    """There is no record of the lock, and it was to be taken only if there is one."""

    @classmethod
    def of(cls, key: str) -> LockNotFoundError:
        """The error for that lock."""
        return cls(
            f"There is no record of the lock {key!r}, and it was to be taken only if there is one: check its name, or "
            "make it with an acquire of the usual kind."
        )


class LockNotHeldError(LockError):
    """The lease that was to be renewed or broken is not among the holders of the lock."""


class CapacityMismatchError(LockError):
    """The lock is in use with another capacity than the one asked for."""


class LockTableError(LockError):
    """The lock table is missing, not ready, or not a lock table."""


class LockRecordError(LockTableError):
    """A record in the lock table does not look like a lock: another program wrote or damaged it."""


class LockVersionError(LockRecordError):
    """A newer version of this package wrote the record, in a format that this version does not know (R13)."""


class LockAccessError(LockError):
    """AWS refused the call or could not tell who calls: no permission, no or expired credentials, no region."""


class LockUnavailableError(LockError):
    """DynamoDB could not be reached, or did not serve the request: network, throttling, an error of its own.

    :ivar maybe_applied: the write may have taken effect all the same; only the record can tell.
    """

    def __init__(self, message: str, *, maybe_applied: bool) -> None:
        super().__init__(message)
        self.maybe_applied = maybe_applied


class LockConflictError(LockUnavailableError):
    """Another write to the record was on its way, such as a heartbeat for a set of locks: over in a moment."""
