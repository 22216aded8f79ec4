"""The options of acquiring, waiting for and holding a lock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from airflow_dynamo_lock.core.model.arguments import Seconds
from airflow_dynamo_lock.core.model.claim import LockOptions
from airflow_dynamo_lock.core.model.errors import LockLostError
from airflow_dynamo_lock.core.model.lease import Lease, LeaseSet
from airflow_dynamo_lock.core.model.record import LockRecord, QueuePosition

#: Called when a lease is lost, with the lease and the error.
OnLost = Callable[[Lease, LockLostError], None]

#: Called when a lease is in danger, with the lease and the remaining seconds.
OnDanger = Callable[[Lease, float], None]


class ClaimOptions(LockOptions, total=False):
    """The options of all methods that acquire a lock."""

    #: Id of this attempt, random by default. Give your own only if a repeated call has to return the lease of the first
    #: one; it must be unique to the attempt (R7).
    lease_id: str | None
    #: Data to store with the lock: a map of text to text, bytes, numbers, True, False, None, lists and maps. An empty
    #: map removes them; without this option they stay.
    data: Mapping[str, Any] | None
    #: Name of the holder, for people to read, of 1 to 1,024 bytes. Default the client's.
    owner: str | None
    #: Details of the holder, for people to read.
    about: Mapping[str, str]
    #: Id of the work that this is one attempt at. The attempt with the larger lease id supersedes the other, so give
    #: lease ids that grow with time, such as UUIDv7.
    attempt_of: str | None
    #: If the owner holds the lock through this client already, acquired with this option, it gets the same lease again,
    #: and has to release it as often as it acquired it.
    reentrant: bool
    #: Raise `LockNotFoundError` if the lock has no record.
    only_existing: bool


#: One lock, or several that are acquired together.
Keys = str | list[str] | tuple[str, ...]

AnyLease = TypeVar("AnyLease", Lease, LeaseSet)


class AcquireOptions(ClaimOptions, total=False):
    """The options of methods that wait for the lock."""

    #: Maximum time to wait, in seconds or as timedelta; 0 tries once, None (the default) waits without a limit.
    timeout: Seconds | None
    #: Seconds between reads of the table, which all waiters of the client share. 1 by default.
    poll_interval: Seconds
    #: Called with the lock after each attempt that found it busy.
    on_busy: Callable[[LockRecord], None] | None
    #: Called with the position in the queue whenever it has changed.
    on_position: Callable[[QueuePosition], None] | None
    #: Leases that the caller does not release before the acquire ends, in addition to those of the client's `lock`
    #: blocks around it. They are searched for deadlocks.
    holding: Lease | LeaseSet | Sequence[Lease | LeaseSet]


class HoldOptions(AcquireOptions, total=False):
    """The options of `LockClient.lock`, which also sends heartbeats."""

    #: Called with the lease and the `LockLostError`, once per lost lease.
    on_lost: OnLost | None
    #: Called with the lease and the remaining seconds, each time that less than `safe_time` remains.
    on_danger: OnDanger | None
    #: Remaining time below which a lease is in danger, in seconds. Default a third of the lease.
    safe_time: Seconds | None
