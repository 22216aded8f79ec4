"""The nouns: the record of a lock, its holders, a lease, and the outcomes of operations."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, final

from airflow_dynamo_lock.protocol.errors import LockLostError, LockValueError
from airflow_dynamo_lock.protocol.limits import (
    MARGIN,
    SHARED,
    checked_flag,
    checked_id,
    checked_key,
    checked_slots,
    checked_whole,
)


def utc(epoch_ms: int) -> datetime:
    """Epoch milliseconds as an aware datetime."""
    return datetime.fromtimestamp(epoch_ms / 1000, UTC)


def readable(text: str) -> str:
    """What somebody else wrote into the table, for a log or an error: on one line, and not without end."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:_READABLE])
    return shown if len(text) <= _READABLE else f"{shown}…"


# Longer than an owner's name ever needs to be, in characters.
_READABLE = 1000


#: The capacities of a plain lock, and of one that is held in shared mode. All others are semaphores'.
ONE_OR_ALL = frozenset({1, SHARED})


def alike(capacity: int, other: int) -> bool:
    """Whether claims with these capacities can hold a lock together, if it has room."""
    return capacity == other or not ONE_OR_ALL & {capacity, other}


@dataclass(frozen=True)
class Holder:
    """One lease as the record shows it.

    :ivar lease_ms: how long it lasts after a heartbeat, milliseconds.
    :ivar grace_ms: how long it lasts once it is abandoned (rule R8), milliseconds: its processes count on no more.
    :ivar version: changes with every sign of life.
    :ivar acquired_at_ms: when it was granted, epoch milliseconds, for people to read; None where a foreign format does
        not tell.
    :ivar renewed_at_ms: the last heartbeat in *server* time, epoch milliseconds; None if the writer did not know it.
    :ivar inside: the guarded processes that have entered and not left: process id → when it entered, epoch ms.
    :ivar ending: it was abandoned (rule R8): nobody may enter any more.
    :ivar hold_until_ms: it is not handed on before that time, epoch milliseconds; None if its holder asked for nothing
        of the kind.
    :ivar resting: it was released before then. Nobody works under it any more; it runs out when the time is over.
    :ivar took_over: it was taken from a dead holder.
    :ivar about: who the holder is, in detail (in Airflow: dag, run, task, …).
    :ivar expires_at_ms: when the lease of another library's client runs out by that client's clock, epoch milliseconds;
        None where that is not what counts.
    :ivar ours: False for a holder that is another library's.
    """

    lease_id: str
    owner: str
    slots: int
    lease_ms: int
    grace_ms: int
    version: str
    acquired_at_ms: int | None
    renewed_at_ms: int | None = None
    inside: Mapping[str, int] = field(default_factory=dict)
    ending: bool = False
    hold_until_ms: int | None = None
    resting: bool = False
    took_over: bool = False
    about: Mapping[str, str] = field(default_factory=dict)
    expires_at_ms: int | None = None
    ours: bool = True

    @property
    def acquired_at(self) -> datetime | None:
        return None if self.acquired_at_ms is None else utc(self.acquired_at_ms)

    @property
    def renewed_at(self) -> datetime | None:
        return None if self.renewed_at_ms is None else utc(self.renewed_at_ms)

    def describe(self, now_ms: int | None) -> str:
        """Who holds it, for an error or a log: ``prod/etl/… since 03:12 UTC, last heartbeat 4 s ago``."""
        text = readable(self.owner)
        if (since := self.acquired_at) is not None:
            same_day = now_ms is not None and utc(now_ms).date() == since.date()
            text += f" since {since:{'%H:%M' if same_day else '%Y-%m-%d %H:%M'}} UTC"
        if self.expires_at_ms is not None:
            text += f", until {utc(self.expires_at_ms):%Y-%m-%d %H:%M:%S} UTC"
        if now_ms is not None and self.renewed_at_ms is not None:
            text += f", last heartbeat {max(0, now_ms - self.renewed_at_ms) / 1000:.0f} s ago"
        if self.inside:
            text += f", {len(self.inside)} process{'es' if len(self.inside) > 1 else ''} inside"
        if self.resting and self.hold_until_ms is not None:
            text += f", released, and not handed on before {utc(self.hold_until_ms):%H:%M:%S} UTC"
        elif self.ending:
            text += ", ending"
        return text


@dataclass(frozen=True)
class LockRecord:
    """A lock as the table shows it.

    :ivar capacity: slots in all. A mutex has 1; a lock that is held in shared mode has `limits.SHARED`.
    :ivar available: slots free; less than none, after the capacity was reduced below what is held.
    :ivar fixed: somebody has set the capacity: it counts, whatever claims say.
    :ivar tickets: how many have ever joined the line of those who wait (`protocol.line`).
    :ivar first: nobody stands in line before this place; None if there is no line.
    :ivar holders: lease id → holder.
    :ivar token: the last fencing token handed out; 0 in a format that has none.
    :ivar vacated_at_ms: when a holder last went (released, broken or reclaimed), epoch milliseconds, as its writer
        estimated the time.
    :ivar seed: whether the time that the first token was taken from is ``guessed`` or ``checked``; None if that is not
        recorded.
    :ivar data: the user's own map, None if there is none.
    :ivar expires_at: epoch seconds after which DynamoDB may delete an idle record.
    :ivar read_at_ms: server time of the response that showed the record, epoch milliseconds; None if not known.
    """

    key: str
    capacity: int
    available: int
    holders: Mapping[str, Holder]
    token: int
    data: Mapping[str, Any] | None = field(default=None, repr=False)  # it may be a secret (rule R12)
    expires_at: int | None = None
    read_at_ms: int | None = field(default=None, compare=False)  # says nothing of the lock
    vacated_at_ms: int | None = None
    seed: str | None = None
    fixed: bool = False
    tickets: int = 0
    first: str | None = None

    @property
    def mode(self) -> str:
        """``"shared"`` while it is held by some who share it, else ``"exclusive"``."""
        return "shared" if self.holders and self.capacity == SHARED else "exclusive"

    @property
    def unproven(self) -> bool:
        """Whether nobody has compared the time that the first token was taken from with the server's."""
        return self.seed == "guessed"

    def describe(self) -> str:
        """``Locked by …``: who holds it, since when, when last heard of."""
        if not self.holders:
            return "Not locked"
        shown = [holder.describe(self.read_at_ms) for holder in list(self.holders.values())[:_DESCRIBED]]
        more = len(self.holders) - len(shown)
        return "Locked by " + "; ".join(shown) + (f"; and {more} more" if more else "")


# So many of a lock's holders are named. Semaphores may have hundreds.
_DESCRIBED = 10


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


@dataclass(frozen=True)
class Claim:
    """What somebody wants to hold, and as whom.

    :ivar min_hold_ms: a released lock is not handed on sooner than so long after it was acquired, milliseconds.
    :ivar fair: it does not overtake those who wait, and waits in line itself (`protocol.line`).
    :ivar priority: whose waiting is how urgent: larger is sooner.
    :ivar only_existing: it is for a lock of which there is a record.
    :ivar former: lease ids of this very claim, whose writes may have been applied or may still be (rule R5).
    :ivar attempt_of: names the thing of which this is one attempt (in Airflow: one task of one run). An earlier
        attempt's lease (smaller lease id) is given up for the later one (rule R8). Kept in the holder's ``about``.
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

    def supersedes(self, holder: Holder | Waiter) -> bool:
        """Whether `holder` is an earlier attempt at the same thing."""
        return holder.lease_id in self.former or (
            self.attempt_of is not None
            and holder.about.get("attempt_of") == self.attempt_of
            and holder.lease_id < self.lease_id
        )


@dataclass(frozen=True)
class Change:
    """What a heartbeat changes besides.

    :ivar lease_ms: how long the lease lasts from then on, milliseconds; None if that stays. Never less than before:
        somebody may count on it.
    :ivar data: the lock's data; None if they stay, empty if there are to be none.
    """

    lease_ms: int | None = None
    data: Mapping[str, Any] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Waiter:
    """Somebody who waits for a lock, in line with others.

    :ivar place: where: earlier places sort before later ones, and those of more urgent waiters before others.
    :ivar since_ms: since when, epoch milliseconds.
    :ivar until_ms: when it gives up, epoch milliseconds; None if never.
    :ivar process: the process that waits, by the name that it shows its life under; None if none does at the moment.
    :ivar version: changes with every sign of life of its own.
    :ivar renewed_at_ms: the last one, in *server* time, epoch milliseconds; None if that is not known.
    """

    key: str
    place: str
    lease_id: str
    owner: str
    slots: int
    capacity: int
    priority: int
    since_ms: int
    until_ms: int | None
    process: str | None
    version: str
    renewed_at_ms: int | None
    about: Mapping[str, str] = field(default_factory=dict)

    @property
    def mode(self) -> str:
        """``"shared"`` or ``"exclusive"``."""
        return "shared" if self.capacity == SHARED else "exclusive"

    @property
    def since(self) -> datetime:
        return utc(self.since_ms)

    @property
    def until(self) -> datetime | None:
        return None if self.until_ms is None else utc(self.until_ms)


@dataclass(frozen=True)
class Standing:
    """Where somebody stands in line.

    :ivar key: for which lock.
    :ivar number: 1 is the first.
    :ivar length: how many stand there in all.
    :ivar behind: who stands just before; None for the first.
    """

    key: str
    number: int
    length: int
    behind: Waiter | None

    def describe(self) -> str:
        """``3rd of 5, behind prod/…``"""
        suffix = {1: "st", 2: "nd", 3: "rd"}.get(self.number % 10 * (self.number % 100 // 10 != 1), "th")
        who = f", behind {readable(self.behind.owner)}" if self.behind is not None else ""
        return f"{self.number}{suffix} of {self.length}{who}"


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
    """The heartbeat was written. `holder` is the lease as it stands now (it may be `ending`)."""

    holder: Holder
    sent_at: float


@dataclass(frozen=True)
class Lost:
    """The lease is not among the holders (any more). `record` shows who is, None if there is no record."""

    record: LockRecord | None

    def describe(self) -> str:
        """What became of the lock, for an error message."""
        if self.record is None or not self.record.holders:
            return "it was released, broken or reclaimed, and nobody holds the lock now"
        return f"it was released, broken or reclaimed. {self.record.describe()}"


@dataclass(frozen=True)
class Ending:
    """Nobody may enter any more: the lease was abandoned (rule R8)."""

    holder: Holder


@dataclass(frozen=True)
class Released:
    """The slots are free again; or will be at `hold_until_ms`, epoch milliseconds, if they are to be held so long."""

    hold_until_ms: int | None = None


@dataclass(frozen=True)
class StillHeld:
    """The lease was acquired `times` more often than it was given back, by an owner that asked for that."""

    times: int


@dataclass(frozen=True)
class CapacitySet:
    """The lock has another capacity; `record` is how it stands now."""

    record: LockRecord


@dataclass(frozen=True)
class Abandoned:
    """Processes were still inside, so the lease was shortened instead of released (rule R8)."""

    holder: Holder


@dataclass(frozen=True)
class Broken:
    """A person took the lease away from `holder`, whose processes may not know it yet."""

    holder: Holder
