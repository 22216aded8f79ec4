"""What the table shows: a lock's record, its holders, its waiters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from airflow_dynamo_lock.core.model.limits import SHARED
from airflow_dynamo_lock.core.model.text import readable, utc


@dataclass(frozen=True)
class Holder:
    """One lease as the record shows it.

    :ivar lease_ms: how long it lasts after a heartbeat, milliseconds.
    :ivar grace_ms: how long it lasts once it is abandoned (rule R8), milliseconds: its processes count on no more.
    :ivar version: changes with every sign of life.
    :ivar acquired_at_ms: when it was granted, epoch milliseconds, for people to read; None where a foreign format does
        not tell.
    :ivar renewed_at_ms: the last heartbeat in *server* time, epoch milliseconds; None if the writer did not know it.
    :ivar processes: the guarded processes that have entered and not left: process id → when it entered, epoch ms.
    :ivar draining: it was abandoned (rule R8): nobody may enter any more.
    :ivar hold_until_ms: it is not handed on before that time, epoch milliseconds; None if its holder asked for nothing
        of the kind.
    :ivar cooling_down: it was released before then. Nobody works under it any more; it runs out when the time is over.
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
    processes: Mapping[str, int] = field(default_factory=dict)
    draining: bool = False
    hold_until_ms: int | None = None
    cooling_down: bool = False
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
        if self.processes:
            text += f", {len(self.processes)} process{'es' if len(self.processes) > 1 else ''} inside"
        if self.cooling_down and self.hold_until_ms is not None:
            text += f", released, and not handed on before {utc(self.hold_until_ms):%H:%M:%S} UTC"
        elif self.draining:
            text += ", draining"
        return text


@dataclass(frozen=True)
class LockRecord:
    """A lock as the table shows it.

    :ivar capacity: slots in all. A mutex has 1; a lock that is held in shared mode has `limits.SHARED`.
    :ivar available: slots free; less than none, after the capacity was reduced below what is held.
    :ivar capacity_pinned: somebody has set the capacity: it counts, whatever claims say.
    :ivar last_ticket: how many have ever joined the line of those who wait (`protocol.line`).
    :ivar queue_head: nobody stands in line before this place; None if there is no line.
    :ivar holders: lease id → holder.
    :ivar token: the last fencing token handed out; 0 in a format that has none.
    :ivar last_freed_at_ms: when a holder last went (released, broken or reclaimed), epoch milliseconds, as its writer
        estimated the time.
    :ivar token_base: whether the time that the first token was taken from is ``unverified`` or ``verified``.
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
    last_freed_at_ms: int | None = None
    token_base: str | None = None
    capacity_pinned: bool = False
    last_ticket: int = 0
    queue_head: str | None = None

    @property
    def mode(self) -> str:
        """``"shared"`` while it is held by some who share it, else ``"exclusive"``."""
        return "shared" if self.holders and self.capacity == SHARED else "exclusive"

    @property
    def unproven(self) -> bool:
        """Whether nobody has compared the time that the first token was taken from with the server's."""
        return self.token_base == "unverified"  # noqa: S105 - no password

    def describe(self) -> str:
        """``Locked by …``: who holds it, since when, when last heard of."""
        if not self.holders:
            return "Not locked"
        shown = [holder.describe(self.read_at_ms) for holder in list(self.holders.values())[:_DESCRIBED]]
        more = len(self.holders) - len(shown)
        return "Locked by " + "; ".join(shown) + (f"; and {more} more" if more else "")


# So many of a lock's holders are named. Semaphores may have hundreds.
_DESCRIBED = 10


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
class QueuePosition:
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
