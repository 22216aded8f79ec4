"""The nouns: the record of a lock, its holders, a lease, and the outcomes of operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any

from airflow_dynamo_lock.protocol.errors import LockLostError, LockValueError
from airflow_dynamo_lock.protocol.limits import MARGIN, checked_id, checked_key, checked_slots, checked_whole


def utc(epoch_ms: int) -> datetime:
    """Epoch milliseconds as an aware datetime."""
    return datetime.fromtimestamp(epoch_ms / 1000, UTC)


def readable(text: str) -> str:
    """What somebody else wrote into the table, for a log or an error: on one line, and not without end."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:_READABLE])
    return shown if len(text) <= _READABLE else f"{shown}…"


# Longer than an owner's name ever needs to be, in characters.
_READABLE = 1000


@dataclass(frozen=True)
class Holder:
    """One lease as the record shows it.

    :ivar lease_ms: how long it lasts after a heartbeat, milliseconds.
    :ivar grace_ms: how long it lasts once it is abandoned (rule R8), milliseconds: its processes count on no more.
    :ivar version: changes with every sign of life.
    :ivar acquired_at_ms: when it was granted, epoch milliseconds, for people to read.
    :ivar renewed_at_ms: the last heartbeat in *server* time, epoch milliseconds; None if the writer did not know it.
    :ivar inside: the guarded processes that have entered and not left: process id → when it entered, epoch ms.
    :ivar ending: it was abandoned (rule R8): nobody may enter any more.
    :ivar about: who the holder is, in detail (in Airflow: dag, run, task, …).
    """

    lease_id: str
    owner: str
    slots: int
    lease_ms: int
    grace_ms: int
    version: str
    acquired_at_ms: int
    renewed_at_ms: int | None = None
    inside: Mapping[str, int] = field(default_factory=dict)
    ending: bool = False
    about: Mapping[str, str] = field(default_factory=dict)

    @property
    def acquired_at(self) -> datetime:
        return utc(self.acquired_at_ms)

    @property
    def renewed_at(self) -> datetime | None:
        return None if self.renewed_at_ms is None else utc(self.renewed_at_ms)

    def describe(self, now_ms: int | None) -> str:
        """Who holds it, for an error or a log: ``prod/etl/… since 03:12 UTC, last heartbeat 4 s ago``."""
        since = self.acquired_at
        same_day = now_ms is not None and utc(now_ms).date() == since.date()
        text = f"{readable(self.owner)} since {since:{'%H:%M' if same_day else '%Y-%m-%d %H:%M'}} UTC"
        if now_ms is not None and self.renewed_at_ms is not None:
            text += f", last heartbeat {max(0, now_ms - self.renewed_at_ms) / 1000:.0f} s ago"
        if self.inside:
            text += f", {len(self.inside)} process{'es' if len(self.inside) > 1 else ''} inside"
        if self.ending:
            text += ", ending"
        return text


@dataclass(frozen=True)
class LockRecord:
    """A lock as the table shows it.

    :ivar capacity: slots in all. A mutex has 1.
    :ivar available: slots free.
    :ivar holders: lease id → holder.
    :ivar token: the last fencing token handed out.
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
    read_at_ms: int | None = None
    vacated_at_ms: int | None = None
    seed: str | None = None

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
    """

    def __init__(self, now: Callable[[], float]) -> None:
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


@dataclass(frozen=True)
class Lease:
    """One grant of a lock.

    :ivar key: the locked resource.
    :ivar lease_id: unique to this grant attempt.
    :ivar token: the fencing token: larger than that of any earlier grant of this key (rule R10).
    :ivar owner: who holds it, for people to read.
    :ivar acquired_at_ms: when, epoch milliseconds.
    :ivar lease_ms: how long it lasts after a heartbeat, milliseconds.
    :ivar grace_ms: how long it lasts once it was given back while processes were inside (rule R8), milliseconds.
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
        return self

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], term: Term | None = None) -> Lease:
        """A lease from `as_dict`'s values. Without a `term` it names a lease, but is not valid until renewed.

        :raises LockValueError: these do not describe one.
        """
        try:
            return cls(**{name: values[name] for name in _LEASE_VALUES}, term=term).checked()
        except (KeyError, TypeError) as wrong:
            raise LockValueError(
                f"This is not what a task that acquires a lock has as its result, but of type {type(values).__name__}, "
                f"with something missing or wrong: {wrong}."
            ) from None


_LEASE_VALUES = tuple(each.name for each in fields(Lease) if each.name not in ("reclaimed", "term"))


@dataclass(frozen=True)
class Claim:
    """What somebody wants to hold, and as whom.

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
    former: frozenset[str] = frozenset()

    def supersedes(self, holder: Holder) -> bool:
        """Whether `holder` is an earlier attempt at the same thing."""
        return holder.lease_id in self.former or (
            self.attempt_of is not None
            and holder.about.get("attempt_of") == self.attempt_of
            and holder.lease_id < self.lease_id
        )


@dataclass(frozen=True)
class Granted:
    """The lock is ours. `sent_at` is when the write that took it was about to be sent: the lease counts from then."""

    claim: Claim
    token: int
    acquired_at_ms: int
    sent_at: float
    reclaimed: tuple[Holder, ...] = ()


@dataclass(frozen=True)
class Busy:
    """The lock is taken; `record` says by whom."""

    record: LockRecord


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
    """The slots are free again."""


@dataclass(frozen=True)
class Abandoned:
    """Processes were still inside, so the lease was shortened instead of released (rule R8)."""

    holder: Holder


@dataclass(frozen=True)
class Broken:
    """A person took the lease away from `holder`, whose processes may not know it yet."""

    holder: Holder
