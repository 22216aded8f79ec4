"""The options of a lock (`LockSpec`), and one attempt to acquire it (`Claim`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from airflow_dynamo_lock.core.model import arguments
from airflow_dynamo_lock.core.model.arguments import Seconds, milliseconds
from airflow_dynamo_lock.core.model.kind import Kind
from airflow_dynamo_lock.core.model.record import Holder, Waiter

Mode = Literal["shared", "exclusive"]


class LockOptions(TypedDict, total=False):
    """The options of a lock that the clients and the DAGs have in common."""

    #: Number of slots to acquire, 1 by default.
    slots: int
    #: Number of slots that the lock has, 1 by default. More than one make it a semaphore.
    capacity: int
    #: ``"shared"`` acquires the lock together with other readers, ``"exclusive"`` (the default) without them.
    mode: Mode
    #: How long the lease lasts after a heartbeat, in seconds. Default the client's.
    lease: Seconds | None
    #: How long a drained lease lasts while processes are inside, in seconds. Default the client's.
    release_grace: Seconds | None
    #: Shortest time from acquisition to the next grant of the slots, in seconds.
    min_hold: Seconds | None
    #: False neither queues nor respects the queue. True by default.
    fair: bool
    #: From -999 to 999, 0 by default. A waiter with a higher priority is granted first.
    priority: int


@dataclass(frozen=True)
class LockSpec:
    """`LockOptions` with all defaults, checked. Times are in seconds."""

    slots: int = 1
    capacity: int = 1
    mode: Mode = "exclusive"
    lease: float | None = None
    release_grace: float | None = None
    min_hold: float | None = None
    fair: bool = True
    priority: int = 0

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> LockSpec:
        """Check options.

        :param options: `LockOptions`; the others are left alone.
        :raises LockValueError: an option can never work.
        """
        given = vars(_DEFAULTS) | {
            name: options[name] for name in LockOptions.__annotations__ if name in options
        }
        _, capacity = arguments.checked_mode(given["mode"], given["slots"], given["capacity"])
        lease, grace, min_hold = given["lease"], given["release_grace"], given["min_hold"]
        return cls(
            slots=given["slots"],
            capacity=given["capacity"],
            mode=given["mode"],
            lease=None if lease is None else arguments.checked_lease("lease", lease, capacity),
            release_grace=None if grace is None else arguments.seconds("release_grace", grace),
            min_hold=None if min_hold is None else arguments.seconds("min_hold", min_hold),
            fair=arguments.checked_flag("fair", given["fair"]),
            priority=arguments.checked_priority(given["priority"]),
        )


_DEFAULTS = LockSpec()


@dataclass(frozen=True)
class Claim:
    """One attempt to acquire slots of one lock.

    :ivar lease_id: new for each attempt (R7, one lease id per attempt). With `attempt_of`, a later attempt has a
        larger id: `supersedes` relies on it.
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

    @classmethod
    def of(cls, spec: LockSpec, *, lease: float, release_grace: float, **others: Any) -> Claim:
        """A claim with these options.

        :param lease: length of the lease if the options do not say it, seconds.
        :param release_grace: length of a drained lease if the options do not say it, seconds.
        :param others: the fields of a claim that are not options of a lock.
        :raises LockValueError: the default lease is too long for a lock with several holders.
        """
        slots, capacity = arguments.checked_mode(spec.mode, spec.slots, spec.capacity)
        if spec.lease is None:
            lease = arguments.checked_lease("lease", lease, capacity)
        return cls(
            slots=slots,
            capacity=capacity,
            lease_ms=milliseconds(lease if spec.lease is None else spec.lease),
            grace_ms=milliseconds(release_grace if spec.release_grace is None else spec.release_grace),
            min_hold_ms=0 if spec.min_hold is None else milliseconds(spec.min_hold),
            fair=spec.fair,
            priority=spec.priority,
            **others,
        )

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
