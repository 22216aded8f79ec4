"""The seam between the lock and a table format: the requests that a format builds, and the items that it reads.

`native.NativeFormat` implements all of it. The formats of other lock libraries (`core.foreign`) implement the part for
a lock with one holder, and refuse the rest with a `LockValueError`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from airflow_dynamo_lock.core.effects import Operation, Reply, Request, Stamp, T
from airflow_dynamo_lock.core.model.claim import Change, Claim
from airflow_dynamo_lock.core.model.record import Holder, LockRecord, Waiter
from airflow_dynamo_lock.core.table.lease_writes import _NONE


@dataclass(frozen=True)
class HeadUpdate:
    """What a write that takes a lock says of the line of those who wait (`protocol.line`).

    :ivar condition: what must hold of it.
    :ivar next: who is first from then on: a place; None if nobody, ``""`` if that does not change.
    :ivar values: what the condition compares with.
    """

    condition: str = ""
    next: str | None = ""
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def set_head(self) -> str:
        return ", #queue_head = :next_head" if self.next else ""

    @property
    def remove(self) -> list[str]:
        return ["#queue_head"] if self.next is None else []

    @property
    def and_condition(self) -> str:
        return f" AND {self.condition}" if self.condition else ""


#: There is no line: for those who come new and do not overtake.
QUEUE_EMPTY = HeadUpdate("attribute_not_exists(#queue_head)")


#: For those who do not mind.
QUEUE_IGNORED = HeadUpdate()


class Format(Protocol):
    """Builds the requests on one table, and reads its items. `native.NativeFormat` says what each of them is for."""

    @property
    def table(self) -> str: ...

    @property
    def service(self) -> str:
        """The AWS service that the requests are for, as the SDK names it."""
        ...

    @property
    def keys(self) -> Sequence[tuple[str, str, str]]:
        """The table's keys: name, role and type of each."""
        ...

    @property
    def ttl_attribute(self) -> str | None:
        """By which records expire; None if they do not."""
        ...

    @property
    def has_queue(self) -> bool:
        """Whether those who wait can stand in line."""
        ...

    def checked_key(self, key: str) -> str:
        """A lock's name, as this format can have one.

        :raises LockValueError: it cannot.
        """
        ...

    def checked_claim(self, claim: Claim) -> Claim:
        """The claim as this format can fulfil it.

        :raises LockValueError: it cannot.
        """
        ...

    def checked_set(self) -> None:
        """Whether several locks can be taken together.

        :raises LockValueError: they cannot.
        """
        ...

    def checked_capacity(self) -> None:
        """Whether a lock may have a capacity.

        :raises LockValueError: it has one slot.
        """
        ...

    def carry_out(self, operation: Operation[T]) -> Operation[T]:
        """The operation, with requests that only this format knows put into the service's own."""
        ...

    # A lock with one holder.
    def acquire_idle(
        self, claim: Claim, stamp: Stamp, seen: LockRecord | None = None, turn: HeadUpdate = QUEUE_EMPTY
    ) -> Request: ...
    def reacquire(self, claim: Claim, mine: Holder, stamp: Stamp) -> Request: ...
    def reclaim(
        self,
        claim: Claim,
        record: LockRecord,
        dead: Sequence[Holder],
        stamp: Stamp,
        turn: HeadUpdate = QUEUE_EMPTY,
        leave: int = 0,
    ) -> Request: ...
    def correct_grant(self, claim: Claim, seen: LockRecord, token: int, stamp: Stamp) -> Request: ...
    def heartbeat(
        self, key: str, lease_id: str, lease_ms: int, stamp: Stamp, seen: str | None = None
    ) -> Request: ...
    def heartbeat_unless_draining(
        self,
        key: str,
        lease_id: str,
        lease_ms: int,
        stamp: Stamp,
        seen: str | None = None,
        change: Change = _NONE,
    ) -> Request: ...
    def enter(
        self, key: str, lease_id: str, process: str, lease_ms: int, stamp: Stamp, seen: str | None = None
    ) -> Request: ...
    def leave(self, key: str, lease_id: str, process: str, lease_ms: int, stamp: Stamp) -> Request: ...
    def release(self, key: str, lease_id: str, slots: int, stamp: Stamp, *, confirmed: bool) -> Request: ...
    def drain(
        self, key: str, lease_id: str, grace_ms: int, stamp: Stamp, seen: str | None = None
    ) -> Request: ...
    def break_(self, key: str, holder: Holder, stamp: Stamp) -> Request: ...
    def forget(self, key: str, latest_token: int | None) -> Request: ...
    def get(self, key: str) -> Request: ...
    def batch_get(self, keys: Iterable[str], *, consistent: bool = False) -> list[Request]: ...
    def asked_for(self, request: Request) -> set[str]: ...
    def batch_records(self, output: Mapping[str, Any], server_ms: int | None) -> list[LockRecord]: ...
    def unprocessed_keys(self, output: Mapping[str, Any]) -> set[str]: ...
    def scan(self, cursor: Mapping[str, Any] | None, prefix: str = "") -> Request: ...
    def record(self, item: Mapping[str, Any], server_ms: int | None) -> LockRecord: ...

    # Several, sets of locks, and lines.
    def acquire_slots(
        self, claim: Claim, stamp: Stamp, seen: LockRecord, turn: HeadUpdate = QUEUE_EMPTY, leave: int = 0
    ) -> Request: ...
    def remove_dead(self, key: str, dead: Sequence[Holder], stamp: Stamp) -> Request: ...
    def cool_down(self, key: str, holder: Holder, rest_ms: int, stamp: Stamp) -> Request: ...
    def set_capacity(self, key: str, capacity: int | None, seen: LockRecord, stamp: Stamp) -> Request: ...
    def create(self, key: str, capacity: int, stamp: Stamp) -> Request: ...
    def transaction(self, requests: Sequence[Request]) -> Request: ...
    def take_ticket(self, key: str, priority: int, seen: LockRecord, stamp: Stamp) -> Request: ...
    def take_exact_ticket(self, claim: Claim, seen: LockRecord | None, stamp: Stamp) -> Request: ...
    def lower_head(self, key: str, place: str) -> Request: ...
    def clear_head(self, key: str, place: str) -> Request: ...
    def advance_head(self, key: str, place: str) -> Request: ...
    def put_entry(self, waiter: Waiter) -> Request: ...
    def hand_over_entry(self, key: str, place: str, process: str, stamp: Stamp) -> Request: ...
    def delete_entry(self, key: str, place: str) -> Request: ...
    def read_queue(self, key: str, limit: int | None, cursor: Mapping[str, Any] | None) -> Request: ...
    def lock_in(self, reply: Reply) -> LockRecord | None: ...
    def waiters(self, output: Mapping[str, Any]) -> list[Waiter]: ...
