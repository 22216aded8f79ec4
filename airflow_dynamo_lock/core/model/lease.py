"""A lease: one grant of a lock, and how long its holder may count on it."""

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
    """How long a lease can be counted on, by its holder's own clock (rule R4).

    Shared by everything that holds or renews one lease, in one process.

    :ivar process: id of the process that made it. A fork of that process has a copy, and may not release the lease.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.process = os.getpid()
        self._now = now
        self._until = float("-inf")
        self._lost: str | None = None

    @property
    def until(self) -> float:
        """The monotonic moment up to which the lease is valid."""
        return self._until

    @property
    def lost(self) -> str | None:
        """Why the lease is lost for good, or None."""
        return self._lost

    def renewed(self, sent_at: float, lease_ms: int) -> None:
        """A write that proves us alive was *sent* at `sent_at` and has succeeded."""
        self._until = max(self._until, sent_at + lease_ms / 1000 * (1 - MARGIN))

    def lose(self, why: str) -> None:
        """The lease is gone, whatever time is left. Once lost, always lost."""
        self._lost = self._lost or why

    def remaining(self) -> float:
        """Seconds for which the lease is still valid; 0 if it is lost."""
        return 0.0 if self._lost else max(0.0, self._until - self._now())


@final
@dataclass(frozen=True)
class Lease:
    """One grant of a lock.

    :ivar key: the locked resource.
    :ivar lease_id: unique to this grant attempt.
    :ivar token: the fencing token: larger than that of any earlier grant of this key (rule R10). 0 in a format that has
        none, where it fences nothing.
    :ivar owner: who holds it, for people to read.
    :ivar acquired_at_ms: when, epoch milliseconds.
    :ivar lease_ms: how long it lasts after a heartbeat, milliseconds.
    :ivar grace_ms: how long it lasts once it was given back while processes were inside (rule R8), milliseconds.
    :ivar took_over: it was taken from a holder that died, and may have left its work half done.
    :ivar reclaimed: the dead holders whose slots this grant took over.
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
    reclaimed: tuple[Holder, ...] = ()
    term: Term | None = field(default=None, compare=False, repr=False)

    @property
    def acquired_at(self) -> datetime:
        return utc(self.acquired_at_ms)

    def remaining(self) -> float:
        """Seconds for which this process may still count on the lease. 0 when it is lost or was never renewed here."""
        return self.term.remaining() if self.term else 0.0

    def check(self) -> None:
        """Return if the lease is valid, without asking anyone.

        :raises LockLostError: it is lost, or its time has run out.
        """
        if self.remaining() <= 0:
            why = (self.term.lost if self.term else None) or "no heartbeat has succeeded in time"
            raise LockLostError(f"The lock {self.key!r} (lease {self.lease_id}) is lost: {why}.")

    def as_dict(self) -> dict[str, Any]:
        """The lease as plain JSON values, e.g. for an XCom. `from_dict` is the way back."""
        return {name: getattr(self, name) for name in _LEASE_VALUES}

    def checked(self) -> Lease:
        """Itself, if requests can be made of it. One that was made from an XCom may have been changed on the way.

        :raises LockValueError: it could never name a lease.
        """
        checked_key(self.key)
        checked_id("A lease id", self.lease_id)
        checked_slots(self.slots, self.capacity)
        for name, least in (("token", None), ("acquired_at_ms", 0), ("lease_ms", 1), ("grace_ms", 1)):
            checked_whole(name, getattr(self, name), least)
        checked_flag("took_over", self.took_over)
        return self

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], term: Term | None = None) -> Lease:
        """A lease from `as_dict`'s values. Without a `term` it names a lease, but is not valid until renewed.

        :raises LockValueError: these do not describe one.
        """
        try:
            given = {
                name: values[name] for name in _LEASE_VALUES if name in values or name not in _LEASE_OPTIONAL
            }
            return cls(**given, term=term).checked()
        except (KeyError, TypeError) as wrong:
            raise LockValueError(
                f"This is not what a task that acquires a lock has as its result, but of type {type(values).__name__}, "
                f"with something missing or wrong: {wrong}."
            ) from None


@final
@dataclass(frozen=True)
class LeaseSet:
    """The grants of several locks that were taken together, and are kept and given back together.

    :ivar leases: in the order of the keys that were asked for.
    """

    leases: tuple[Lease, ...]

    def __iter__(self) -> Iterator[Lease]:
        return iter(self.leases)

    def __len__(self) -> int:
        return len(self.leases)

    def __getitem__(self, key: str) -> Lease:
        """The lease of that key."""
        return {lease.key: lease for lease in self.leases}[key]

    def __str__(self) -> str:
        """``'a', 'b' (lease …)``"""
        return f"{', '.join(repr(each.key) for each in self.leases)} (lease {self.leases[0].lease_id})"

    def remaining(self) -> float:
        """Seconds for which this process may still count on all of them."""
        return min(lease.remaining() for lease in self.leases)

    def check(self) -> None:
        """Return if all of them are valid, without asking anyone.

        :raises LockLostError: one is lost, or its time has run out.
        """
        for lease in self.leases:
            lease.check()


_LEASE_VALUES = tuple(each.name for each in fields(Lease) if each.name not in ("reclaimed", "term"))


# Leases of a version that did not know it yet are read all the same.
_LEASE_OPTIONAL = ("took_over",)
