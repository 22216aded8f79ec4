"""The seam between the lock and a table format: the requests that a format builds, and the items that it reads.

`core.table.native` implements all of it. The formats of other lock libraries (`core.foreign`) implement the part for
locks with one holder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from airflow_dynamo_lock.core.effects import Operation, Reply, Request, Stamp, T
from airflow_dynamo_lock.core.model.claim import Claim
from airflow_dynamo_lock.core.model.decisions import Decision, Removal
from airflow_dynamo_lock.core.model.edits import Edit
from airflow_dynamo_lock.core.model.errors import LockVersionError
from airflow_dynamo_lock.core.model.hold import Hold
from airflow_dynamo_lock.core.model.record import Holder, LockRecord, Waiter
from airflow_dynamo_lock.core.model.waits import Wait
from airflow_dynamo_lock.core.table.features import HasFeatures


@dataclass(frozen=True)
class HeadUpdate:
    """What a grant requires of the head of the queue, and how it changes the head.

    :ivar condition: condition on the head; empty for none.
    :ivar next: the new head; None removes it, ``""`` keeps it.
    :ivar values: values of the condition.
    :ivar waiter: lease id in the claim's entry, if it has one; it may differ from that of the claim.
    """

    condition: str = ""
    next: str | None = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    waiter: str = ""

    @property
    def set_head(self) -> str:
        """The assignment of the new head, for a SET clause."""
        return ", #queue_head = :next_head" if self.next else ""

    @property
    def remove(self) -> list[str]:
        """The paths for a REMOVE clause."""
        return ["#queue_head"] if self.next is None else []

    @property
    def and_condition(self) -> str:
        """The condition, to follow others."""
        return f" AND {self.condition}" if self.condition else ""


#: The queue must be empty: for a claim without a place in the queue that does not overtake.
QUEUE_EMPTY = HeadUpdate("attribute_not_exists(#queue_head)")

#: The queue does not matter: for a claim that overtakes.
QUEUE_IGNORED = HeadUpdate()


class Format(HasFeatures, Protocol):
    """Builds the requests on one table and reads its items.

    `NativeFormat` documents the requests. A format without `Feature.SLOTS`, `Feature.SETS`, `Feature.QUEUE` or
    `Feature.WAITS` is never asked for the second group of them.
    """

    @property
    def table(self) -> str:
        """Name or ARN of the table; in the format ``s3``, of the bucket."""
        ...

    @property
    def service(self) -> str:
        """The AWS service that the requests are for, as the SDK names it."""
        ...

    @property
    def keys(self) -> Sequence[tuple[str, str, str]]:
        """Name, role and type of each key of the table; empty for a bucket."""
        ...

    @property
    def ttl_attribute(self) -> str | None:
        """The attribute by which DynamoDB expires records; None if it must not."""
        ...

    def checked_key(self, key: str) -> str:
        """Return the name of a lock if this format can store it.

        :raises LockValueError: it cannot.
        """
        ...

    def carry_out(self, operation: Operation[T]) -> Operation[T]:
        """Run an operation, translating requests of this format's own into requests of the service."""
        ...

    # Locks with one holder.
    def acquire_idle(
        self,
        claim: Claim,
        stamp: Stamp,
        seen: LockRecord | None = None,
        head_update: HeadUpdate = QUEUE_EMPTY,
    ) -> Request: ...
    def reacquire(self, claim: Claim, mine: Holder, stamp: Stamp, last: Holder | None) -> Request: ...
    def reclaim(
        self,
        claim: Claim,
        record: LockRecord,
        dead: Sequence[Holder],
        stamp: Stamp,
        head_update: HeadUpdate = QUEUE_EMPTY,
        reserved: int = 0,
    ) -> Request: ...
    def correct_grant(
        self, claim: Claim, seen: LockRecord, token: int, stamp: Stamp, last: Holder | None
    ) -> Request: ...
    def renew(
        self, key: str, lease_id: str, lease_ms: int, stamp: Stamp, edit: Edit, seen: Holder | None = None
    ) -> Request: ...
    def leave(self, key: str, lease_id: str, process: str, lease_ms: int, stamp: Stamp) -> Request: ...
    def release(
        self,
        key: str,
        lease_id: str,
        slots: int,
        stamp: Stamp,
        *,
        confirmed: bool,
        hold: Hold | None = None,
        leaving: str | None = None,
    ) -> Request: ...
    def break_(self, key: str, holder: Holder, stamp: Stamp, decision: Decision | None = None) -> Request: ...
    def forget(self, key: str, latest_token: int | None) -> Request: ...
    def get(self, key: str) -> Request: ...
    def batch_get(self, keys: Iterable[str], *, consistent: bool = False) -> list[Request]: ...
    def asked_for(self, request: Request) -> set[str]: ...
    def batch_records(self, output: Mapping[str, Any], server_ms: int | None) -> list[LockRecord]: ...
    def unprocessed_keys(self, output: Mapping[str, Any]) -> set[str]: ...
    def scan(
        self, cursor: Mapping[str, Any] | None, prefix: str = "", *, waiters: bool = False
    ) -> Request: ...
    def lock_items(self, output: Mapping[str, Any]) -> list[Mapping[str, Any]]: ...
    def record(self, item: Mapping[str, Any], server_ms: int | None) -> LockRecord: ...

    # Several holders, sets of locks, queues, notes of waits.
    def acquire_slots(
        self,
        claim: Claim,
        stamp: Stamp,
        seen: LockRecord,
        head_update: HeadUpdate = QUEUE_EMPTY,
        reserved: int = 0,
    ) -> Request: ...
    def remove_dead(self, key: str, dead: Sequence[Holder], stamp: Stamp) -> Request: ...
    def set_capacity(self, key: str, capacity: int | None, seen: LockRecord, stamp: Stamp) -> Request: ...
    def create(self, key: str, capacity: int, stamp: Stamp) -> Request: ...
    def transaction(self, requests: Sequence[Request]) -> Request: ...
    def take_ticket(self, key: str, priority: int, seen: LockRecord, stamp: Stamp) -> Request: ...
    def take_exact_ticket(self, claim: Claim, seen: LockRecord | None, stamp: Stamp) -> Request: ...
    def note_removal(self, key: str, lease_id: str, removal: Removal, outdated: Sequence[str]) -> Request: ...
    def lower_head(self, key: str, place: str) -> Request: ...
    def clear_head(self, key: str, place: str) -> Request: ...
    def advance_head(self, key: str, place: str) -> Request: ...
    def put_entry(self, waiter: Waiter) -> Request: ...
    def hand_over_entry(self, key: str, place: str, process: str, stamp: Stamp) -> Request: ...
    def delete_entry(self, key: str, place: str) -> Request: ...
    def read_queue(self, key: str, limit: int | None, cursor: Mapping[str, Any] | None) -> Request: ...
    def lock_in(self, reply: Reply) -> LockRecord | None: ...
    def waiters(
        self, output: Mapping[str, Any], on_newer: Callable[[LockVersionError], None] | None = None
    ) -> list[Waiter]: ...
    def note_wait(self, key: str, lease_id: str, wait: Wait) -> Request: ...
    def erase_wait(self, key: str, lease_id: str, wait_id: str) -> Request: ...
