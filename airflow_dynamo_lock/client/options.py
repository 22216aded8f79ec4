"""The options of acquiring, waiting for and holding a lock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict, TypeVar

from airflow_dynamo_lock.core.model.arguments import Seconds
from airflow_dynamo_lock.core.model.errors import LockLostError
from airflow_dynamo_lock.core.model.lease import Lease, LeaseSet
from airflow_dynamo_lock.core.model.record import LockRecord, QueuePosition

#: Called when a lease is lost: with the lease, and the error that says why.
OnLost = Callable[[Lease, LockLostError], None]

#: Called when a lease is in danger: with the lease, and for how many seconds it can still be counted on.
OnDanger = Callable[[Lease, float], None]


class ClaimOptions(TypedDict, total=False):
    """The options of every way to acquire a lock.

    ``lease_id`` names the grant attempt; without one it gets a random one. Give one only if it is unique to the attempt
    and a second try with it is meant to find the first one's lease (rule R7). ``about`` and ``attempt_of`` describe the
    holder in detail (see `protocol.model`); ``lease``, ``release_grace`` and ``owner`` default to the client's.

    ``data`` take the place of what is kept with the lock, an empty map of all of it; without them that stays.

    With ``only_existing=True`` a lock of which there is no record is a `LockNotFoundError`.

    ``slots`` of ``capacity`` make it a semaphore. ``mode="shared"`` takes the lock together with others who share it,
    and in turn with those who do not. A released lock is not handed on sooner than ``min_hold`` after it was acquired.
    ``fair=False`` neither waits in line nor minds those who do, and costs least; who is in line comes the sooner the
    larger his ``priority`` is. With ``reentrant=True`` an owner who holds the lock through this client, and took it so,
    gets the same lease again, and has to release it as often.
    """

    lease_id: str | None
    slots: int
    capacity: int
    data: Mapping[str, Any] | None
    lease: Seconds | None
    release_grace: Seconds | None
    owner: str | None
    about: Mapping[str, str]
    attempt_of: str | None
    mode: Mode
    min_hold: Seconds | None
    fair: bool
    priority: int
    reentrant: bool
    only_existing: bool


Mode = Literal["shared", "exclusive"]

#: One lock, or several to be taken together.
Keys = str | list[str] | tuple[str, ...]

AnyLease = TypeVar("AnyLease", Lease, LeaseSet)


class AcquireOptions(ClaimOptions, total=False):
    """The options of waiting for a lock as well. See `LockClient.acquire`."""

    timeout: Seconds | None
    poll_interval: Seconds
    on_busy: Callable[[LockRecord], None] | None
    on_position: Callable[[QueuePosition], None] | None


class HoldOptions(AcquireOptions, total=False):
    """Those of holding it. See `LockClient.lock`."""

    on_lost: OnLost | None
    on_danger: OnDanger | None
    safe_time: Seconds | None
