"""What the table shows of a lock: its record, its holders and its waiters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from airflow_dynamo_lock.core.model.decisions import Loss, Removal
from airflow_dynamo_lock.core.model.kind import Kind
from airflow_dynamo_lock.core.model.text import duration, iso, readable, utc
from airflow_dynamo_lock.core.model.waits import Wait


@dataclass(frozen=True)
class Holder:
    """One lease as the record shows it.

    :ivar lease_id: unique id of the attempt that acquired the lease.
    :ivar owner: name of the holder, for people to read.
    :ivar slots: number of slots that the lease holds.
    :ivar lease_ms: how long the lease lasts after a heartbeat, milliseconds.
    :ivar grace_ms: how long it lasts once it is drained (R8), milliseconds. Its processes never rely on more.
    :ivar version: changes with each heartbeat.
    :ivar acquired_at_ms: time of the grant, epoch milliseconds, for people to read; None if a foreign format does not
        store it.
    :ivar renewed_at_ms: time of the last heartbeat in *server* time, epoch milliseconds; None if the writer did not
        know it.
    :ivar processes: guarded processes inside the lock: process id → time of entry, epoch milliseconds.
    :ivar draining: the lease ends with its grace, and no process may enter (R8).
    :ivar hold_until_ms: the slots stay taken until then because of `min_hold`, epoch milliseconds; None: no limit.
    :ivar cooling_down: released before `hold_until_ms`. No process works under the lease; it ends by itself.
    :ivar took_over: slots came from a dead holder that may have left its work half done.
    :ivar about: details of the holder (in Airflow: DAG, run, task, try).
    :ivar expires_at_ms: end of the lease by the clock of another library's client, epoch milliseconds; None where the
        format does not store it.
    :ivar ours: False for a holder of another library.
    :ivar waits: what the holder waits for while it holds the lease (R14): id → wait. A wait may have ended.
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
    waits: Mapping[str, Wait] = field(default_factory=dict)

    @property
    def acquired_at(self) -> datetime | None:
        """Time of the grant; None if a foreign format does not store it."""
        return None if self.acquired_at_ms is None else utc(self.acquired_at_ms)

    @property
    def renewed_at(self) -> datetime | None:
        """Time of the last heartbeat; None if unknown."""
        return None if self.renewed_at_ms is None else utc(self.renewed_at_ms)

    def as_dict(self) -> dict[str, Any]:
        """The holder as values for JSON, with times as text in ISO 8601."""
        return {
            "lease_id": self.lease_id,
            "owner": self.owner,
            "slots": self.slots,
            "lease_seconds": self.lease_ms / 1000,
            "acquired_at": iso(self.acquired_at),
            "renewed_at": iso(self.renewed_at),
            "processes": sorted(self.processes),
            "draining": self.draining,
            "took_over": self.took_over,
            "about": dict(self.about),
        }

    def describe(self, now_ms: int | None) -> str:
        """The holder for an error or a log line: ``prod/etl/… since 03:12 UTC, last heartbeat 4 s ago``.

        :param now_ms: server time when the record was read, epoch milliseconds; None if unknown.
        """
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
        if keys := sorted({key for wait in self.waits.values() for key in wait.keys}):
            text += f", waiting for {', '.join(map(repr, keys[:_DESCRIBED_KEYS]))}"
        return text


@dataclass(frozen=True)
class LockRecord:
    """A lock as the table shows it.

    :ivar key: name of the lock.
    :ivar capacity: number of slots. A plain lock has 1, a lock in shared mode `limits.SHARED`.
    :ivar available: number of free slots; negative after the capacity was set below what is held.
    :ivar holders: lease id → holder.
    :ivar token: last fencing token granted; 0 in a table format without fencing tokens.
    :ivar data: the user's map; None if there is none.
    :ivar expires_at: time after which DynamoDB may delete an idle record, epoch seconds.
    :ivar read_at_ms: server time of the response that showed the record, epoch milliseconds; None if unknown.
    :ivar last_freed_at_ms: time at which a slot was last freed (released, broken or reclaimed) as its writer estimated
        it, epoch milliseconds.
    :ivar token_base: whether the time from which tokens count is ``unverified`` or ``verified`` (R10).
    :ivar capacity_pinned: the capacity was set with `set_capacity`, and overrides the capacity of claims.
    :ivar last_ticket: number of tickets that the queue has given out.
    :ivar queue_head: place of the first waiter, or a place before it; None if the queue is empty.
    :ivar usual_ms: how long leases are usually held, milliseconds: a running mean; None if unknown.
    :ivar previous_owner: name of the holder that last released a lease, or whose lease was last broken; None if
        unknown.
    :ivar last_loss: the last lease that its holder did not release; None if there was none.
    :ivar removals: lease id → removal, of waiters that people have recently removed from the queue (R15).
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
    usual_ms: int | None = None
    previous_owner: str | None = None
    last_loss: Loss | None = None
    removals: Mapping[str, Removal] = field(default_factory=dict)

    @property
    def kind(self) -> Kind:
        """The kind of lock that the record's capacity makes it."""
        return Kind.of(self.capacity)

    @property
    def mode(self) -> str:
        """``"shared"`` while readers hold the lock, else ``"exclusive"``."""
        return self.kind.mode if self.holders else "exclusive"

    @property
    def unverified(self) -> bool:
        """Whether no response has confirmed the time from which the first token counts (R10)."""
        return self.token_base == "unverified"  # noqa: S105 - no password

    @property
    def state(self) -> str:
        """Free, held, shared with the number of holders, or the number of slots that are held, for people."""
        if self.kind is Kind.SHARED and self.holders:
            return f"shared by {len(self.holders)}"
        if self.kind is not Kind.SEMAPHORE and not self.capacity_pinned:
            return "held" if self.holders else "free"
        return f"{self.capacity - self.available} of {self.capacity} slots"

    def is_held(self, lease_id: str) -> bool:
        """Whether the record shows a lease as held: it has it, and the lease is not draining."""
        holder = self.holders.get(lease_id)
        return holder is not None and not holder.draining

    def loss_of(self, lease_id: str) -> Loss | None:
        """How a lease was lost; None if the record does not tell."""
        loss = self.last_loss
        return loss if loss is not None and loss.lease_id == lease_id else None

    def as_dict(self) -> dict[str, Any]:
        """The lock as values for JSON. A shared lock has neither a capacity nor available slots."""
        shared = self.kind is Kind.SHARED
        return {
            "key": self.key,
            "held": bool(self.holders),
            "mode": self.mode,
            "capacity": None if shared else self.capacity,
            "capacity_pinned": self.capacity_pinned,
            "available": None if shared else self.available,
            "token": self.token or None,
            "data": self.data,
            "previous_owner": self.previous_owner,
            "last_freed_at": None if self.last_freed_at_ms is None else iso(utc(self.last_freed_at_ms)),
            "last_loss": None if self.last_loss is None else self.last_loss.as_dict(),
            "holders": [holder.as_dict() for holder in self.holders.values()],
        }

    def describe(self) -> str:
        """``Locked by …`` with each holder's name, time of acquisition and last heartbeat."""
        if not self.holders:
            return "Not locked"
        shown = [holder.describe(self.read_at_ms) for holder in list(self.holders.values())[:_DESCRIBED]]
        more = len(self.holders) - len(shown)
        return "Locked by " + "; ".join(shown) + (f"; and {more} more" if more else "")


# Maximum number of holders in a description, and of the locks that one of them waits for. Semaphores may have hundreds.
_DESCRIBED, _DESCRIBED_KEYS = 10, 3


@dataclass(frozen=True)
class Waiter:
    """A waiter in the queue of a lock.

    :ivar key: name of the lock.
    :ivar place: place in the queue. Places sort as text: by priority, then by ticket (`core.table.position`).
    :ivar lease_id: lease id of the claim.
    :ivar owner: name of the waiter, for people to read.
    :ivar slots: number of slots that it needs.
    :ivar capacity: capacity that it claims.
    :ivar priority: a higher priority is granted first.
    :ivar since_ms: when it began to wait, epoch milliseconds.
    :ivar until_ms: when it gives up, epoch milliseconds; None if never.
    :ivar process: name of the waiting process, whose own lease proves that it is alive; None while the waiter is
        between two processes.
    :ivar version: changes whenever the waiter writes its entry.
    :ivar renewed_at_ms: time of the last write of the entry in *server* time, epoch milliseconds; None if unknown.
    :ivar about: details of the waiter (in Airflow: DAG, run, task, try).
    :ivar set_size: number of locks that it waits for together.
    :ivar expected_wait_ms: about how much longer it waits, milliseconds, if leases are held for as long as usual; None
        if unknown.
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
    set_size: int = 1
    expected_wait_ms: int | None = field(default=None, compare=False)  # changes with the time

    @property
    def mode(self) -> str:
        """``"shared"`` or ``"exclusive"``."""
        return Kind.of(self.capacity).mode

    @property
    def since(self) -> datetime:
        """When it began to wait."""
        return utc(self.since_ms)

    @property
    def until(self) -> datetime | None:
        """When it gives up; None if never."""
        return None if self.until_ms is None else utc(self.until_ms)

    def as_dict(self) -> dict[str, Any]:
        """The waiter as values for JSON, with times as text in ISO 8601."""
        return {
            "owner": self.owner,
            "lease_id": self.lease_id,
            "since": iso(self.since),
            "until": iso(self.until),
            "mode": self.mode,
            "slots": self.slots,
            "capacity": None if Kind.of(self.capacity) is Kind.SHARED else self.capacity,
            "priority": self.priority,
            "expected_wait_seconds": None if self.expected_wait_ms is None else self.expected_wait_ms / 1000,
            "about": dict(self.about),
        }


@dataclass(frozen=True)
class QueuePosition:
    """The position of a waiter in the queue of a lock.

    :ivar key: name of the lock.
    :ivar number: position, from 1.
    :ivar length: length of the queue.
    :ivar behind: the waiter just before; None for the first.
    :ivar expected_wait_ms: about how much longer the waiter waits, milliseconds, if leases are held for as long as
        usual; None if unknown. Two positions that differ only in this are equal.
    """

    key: str
    number: int
    length: int
    behind: Waiter | None
    expected_wait_ms: int | None = field(default=None, compare=False)  # changes with the time

    def describe(self) -> str:
        """``3rd of 5, about 12 min, behind prod/…``; without a time if none is known."""
        suffix = {1: "st", 2: "nd", 3: "rd"}.get(self.number % 10 * (self.number % 100 // 10 != 1), "th")
        when = f", about {duration(self.expected_wait_ms)}" if self.expected_wait_ms is not None else ""
        who = f", behind {readable(self.behind.owner)}" if self.behind is not None else ""
        return f"{self.number}{suffix} of {self.length}{when}{who}"
