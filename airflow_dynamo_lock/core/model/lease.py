"""A lease: one grant of a lock, and how long its holder may rely on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any, final

from airflow_dynamo_lock.core.model.arguments import (
    checked_flag,
    checked_id,
    checked_key,
    checked_slots,
    checked_whole,
)
from airflow_dynamo_lock.core.model.errors import LockLostError, LockValueError
from airflow_dynamo_lock.core.model.limits import MARGIN
from airflow_dynamo_lock.core.model.record import Holder
from airflow_dynamo_lock.core.model.text import utc


class Term:
    """How long a lease is valid by the clock of its own process (R4, the holder gives up first).

    All objects of one process that hold or renew the same lease share its term.

    :ivar process: id of the process that acquired the lease. A fork has a copy of the term, but may not release.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.process = os.getpid()
        self._now = now
        self._until = float("-inf")
        self._lost: str | None = None
        self._reported: set[str] = set()

    @property
    def until(self) -> float:
        """The end of the lease, monotonic seconds."""
        return self._until

    @property
    def lost(self) -> str | None:
        """Why the lease is lost; None if it is not."""
        return self._lost

    def renewed(self, stamped_at: float, lease_ms: int) -> None:
        """Extend the term: a heartbeat whose stamp was made at `stamped_at` (monotonic seconds) has succeeded."""
        self._until = max(self._until, stamped_at + lease_ms / 1000 * (1 - MARGIN))

    def lose(self, why: str) -> None:
        """End the lease at once and for good. The first reason is kept."""
        self._lost = self._lost or why

    def is_first_report(self, key: str) -> bool:
        """Whether no operation of this process has reported the loss of this lock's lease before."""
        first = key not in self._reported
        self._reported.add(key)
        return first

    def remaining(self) -> float:
        """Remaining time in seconds; 0 if the lease is lost."""
        return 0.0 if self._lost else max(0.0, self._until - self._now())


@final
@dataclass(frozen=True)
class Lease:
    """One grant of a lock.

    :ivar key: name of the lock.
    :ivar lease_id: unique id of the attempt that acquired the lease.
    :ivar token: fencing token, larger than that of any earlier grant of this key (R10). 0 in a table format without
        fencing tokens.
    :ivar owner: name of the holder, for people to read.
    :ivar slots: number of slots that the lease holds.
    :ivar capacity: number of slots that the lock has.
    :ivar lease_ms: how long the lease lasts after a heartbeat, milliseconds.
    :ivar grace_ms: how long a drained lease lasts while processes are inside (R8), milliseconds.
    :ivar acquired_at_ms: time of the grant, epoch milliseconds.
    :ivar took_over: slots came from a dead holder that may have left its work half done.
    :ivar usual_ms: how long leases of the lock were usually held when this one was granted, milliseconds; None if
        unknown.
    :ivar reclaimed: the dead holders whose slots this grant took over.
    :ivar term: validity in this process; None in a lease that was made from an XCom.
    """

    key: str
    lease_id: str
    token: int
    owner: str
    slots: int
    capacity: int
    lease_ms: int
    grace_ms: int
    acquired_at_ms: int
    took_over: bool = False
    usual_ms: int | None = None
    reclaimed: tuple[Holder, ...] = ()
    term: Term | None = field(default=None, compare=False, repr=False)

    @property
    def acquired_at(self) -> datetime:
        """Time of the grant."""
        return utc(self.acquired_at_ms)

    def remaining(self) -> float:
        """Seconds for which this process may rely on the lease; 0 if it is lost or was never renewed here."""
        return self.term.remaining() if self.term else 0.0

    def check(self) -> None:
        """Return if the lease is valid. Sends no request.

        :raises LockLostError: the lease is lost or has run out.
        """
        if self.remaining() <= 0:
            why = (self.term.lost if self.term else None) or "no heartbeat has succeeded in time"
            raise LockLostError(f"The lock {self.key!r} (lease {self.lease_id}) is lost: {why}.")

    def as_dict(self) -> dict[str, Any]:
        """The lease as JSON values, for example for an XCom. `from_dict` reads them."""
        return {name: getattr(self, name) for name in _LEASE_VALUES}

    def checked(self) -> Lease:
        """Return the lease if its values are valid; an XCom may have been changed.

        :raises LockValueError: a value is not valid.
        """
        checked_key(self.key)
        checked_id("A lease id", self.lease_id)
        checked_slots(self.slots, self.capacity)
        for name, least in (("token", None), ("acquired_at_ms", 0), ("lease_ms", 1), ("grace_ms", 1)):
            checked_whole(name, getattr(self, name), least)
        if self.usual_ms is not None:
            checked_whole("usual_ms", self.usual_ms, 0)
        checked_flag("took_over", self.took_over)
        return self

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], term: Term | None = None) -> Lease:
        """A lease from the values of `as_dict`. Without a `term` it is not valid in this process before a renewal.

        :raises LockValueError: the values do not describe a lease.
        """
        try:
            # A version that did not know `usual_ms` may have written the XCom.
            known = {"usual_ms": None, **values}
            return cls(**{name: known[name] for name in _LEASE_VALUES}, term=term).checked()
        except (KeyError, TypeError) as wrong:
            raise LockValueError(
                f"This is not the result of a task that acquires a lock, but of type {type(values).__name__}, "
                f"with something missing or wrong: {wrong}."
            ) from None


@final
@dataclass(frozen=True)
class LeaseSet:
    """The leases of several locks that were acquired together, and are renewed and released together.

    :ivar leases: the leases, in the order of the requested keys.
    """

    leases: tuple[Lease, ...]

    def __iter__(self) -> Iterator[Lease]:
        return iter(self.leases)

    def __len__(self) -> int:
        return len(self.leases)

    def __getitem__(self, key: str) -> Lease:
        """The lease of the lock `key`.

        :raises KeyError: the set has no lease of that lock.
        """
        return {lease.key: lease for lease in self.leases}[key]

    def __str__(self) -> str:
        """``'a', 'b' (lease …)``"""
        return f"{', '.join(repr(each.key) for each in self.leases)} (lease {self.leases[0].lease_id})"

    def remaining(self) -> float:
        """Seconds for which this process may rely on all leases."""
        return min(lease.remaining() for lease in self.leases)

    def check(self) -> None:
        """Return if all leases are valid. Sends no request.

        :raises LockLostError: a lease is lost or has run out.
        """
        for lease in self.leases:
            lease.check()


_LEASE_VALUES = tuple(each.name for each in fields(Lease) if each.name not in ("reclaimed", "term"))
