"""Administration of locks by people who do not hold them: break a lease, set a capacity, forget a record, list."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from airflow_dynamo_lock.core.effects import Operation, Reply, Sleep
from airflow_dynamo_lock.core.liveness import Observer
from airflow_dynamo_lock.core.lock.requests import ROUNDS, Requests
from airflow_dynamo_lock.core.model.decisions import UNKNOWN, Decision, Removal
from airflow_dynamo_lock.core.model.errors import (
    CapacityMismatchError,
    LockNotHeldError,
    LockNotWaitingError,
    LockRecordError,
    LockUnavailableError,
)
from airflow_dynamo_lock.core.model.kind import Kind
from airflow_dynamo_lock.core.model.outcomes import Broken, CapacitySet
from airflow_dynamo_lock.core.model.record import LockRecord, Waiter
from airflow_dynamo_lock.core.queue.queue import WaitQueue
from airflow_dynamo_lock.core.table.features import Feature, require
from airflow_dynamo_lock.core.table.lease_writes import ESTIMATE_BEHIND_MS

# How far a token may be ahead of the time, milliseconds. A record with a token further ahead is not deleted, because
# `forget` would have to wait too long.
_AHEAD_MS = 5_000
# How long the record keeps the notes of removed waiters, in milliseconds, and the maximum number of them. A waiter
# reads its note within seconds, unless its process is stopped or cut off.
_REMEMBERED_MS, _MAX_REMOVALS = 3_600_000, 20


@dataclass(frozen=True)
class Admin:
    """Administers the locks of one table."""

    requests: Requests
    observer: Observer
    queue: WaitQueue

    def break_(self, key: str, lease_id: str, decision: Decision = UNKNOWN) -> Operation[Broken]:
        """Remove a lease, even if its holder is alive.

        :param decision: who breaks it, and why; the record keeps that until the next loss.
        :raises LockNotHeldError: the lease is not among the holders.
        """
        record = yield from self.requests.get(key)
        retried = False
        for _ in range(ROUNDS):
            holder = record.holders.get(lease_id) if record else None
            if holder is None:
                break
            last = holder
            reply: Reply = yield self.requests.format.break_(key, holder, self.requests.stamp(), decision)
            if not reply.refused:
                return Broken(holder)
            retried |= reply.retried
            # In some formats a heartbeat changes the lease id.
            record, _ = yield from self.requests.record_after(key, reply, None)
        if retried and (record is None or lease_id not in record.holders):
            return Broken(last)  # an earlier attempt of the SDK was applied (R5)
        raise LockNotHeldError(
            f"The lease {lease_id} does not hold the lock {key!r}, so there is nothing to break. "
            f"{record.describe() if record else 'Not locked'}."
        )

    def remove_waiter(self, key: str, lease_id: str, decision: Decision) -> Operation[Waiter]:
        """Remove a waiter from the queue of a lock. Its wait ends with `LockRemovedError` (R15).

        :param lease_id: the lease id of its claim, as the queue shows it.
        :param decision: who removes it, and why.
        :returns: the waiter as it was.
        :raises LockNotWaitingError: no entry of the queue has this lease id, or it has just been granted the lock.
        """
        entries = yield from self.queue.reader.entries_of(key, lease_id, None)
        record = yield from self.requests.get(key)
        if entries and record is not None:
            removal = Removal(self.requests.stamp().best_ms, decision)
            outdated = _outdated(record, lease_id, removal.at_ms)
            reply: Reply = yield self.requests.format.note_removal(key, lease_id, removal, outdated)
            if not reply.refused:
                yield from self.queue.dequeue(entries, None, granted=False)
                return entries[0]
            record, _ = yield from self.requests.record_after(key, reply, None)
        raise LockNotWaitingError(
            f"The claim {lease_id} does not wait for the lock {key!r}, so there is nothing to remove. "
            f"{record.describe() if record else 'Not locked'}."
        )

    def set_capacity(self, key: str, capacity: int | None) -> Operation[CapacitySet]:
        """Pin the capacity of a semaphore, which may have holders; or, with None, let claims decide again.

        :raises CapacityMismatchError: the lock is in use as a plain or shared lock, or it is in use and `capacity` is
            None.
        """
        record: LockRecord | None = None
        for _ in range(ROUNDS):
            record = yield from self.requests.get(key)
            stamp = self.requests.stamp()
            if record is None or (capacity is None and not record.capacity_pinned):
                if capacity is None:
                    return CapacitySet(record or LockRecord(key, 1, 1, {}, token=0))
                write = self.requests.format.create(key, capacity, stamp)
            elif record.capacity_pinned and record.capacity == capacity:
                return CapacitySet(record)
            elif record.holders and capacity is None:
                raise CapacityMismatchError(
                    f"The capacity of the lock {key!r} cannot be unset while the lock is held, because claims may have "
                    f"another capacity than {record.capacity}: set it to the capacity of the claims, or try again when "
                    f"the lock is free. {record.describe()}."
                )
            elif record.holders and record.kind is not Kind.SEMAPHORE and not record.capacity_pinned:
                raise CapacityMismatchError(
                    f"The lock {key!r} is in use as {record.kind.describe(record.capacity)}, so its capacity "
                    f"cannot be set: its holders do not expect to share it. {record.describe()}."
                )
            else:
                write = self.requests.format.set_capacity(key, capacity, record, stamp)
            reply: Reply = yield write
            if not reply.refused:
                return CapacitySet(self.requests.format.record(reply.output["Attributes"], reply.server_ms))
        raise LockUnavailableError(
            f"The capacity of the lock {key!r} was not set, because other writes to the lock came first each time.",
            maybe_applied=False,
        )

    def forget(self, key: str, *, at_once: bool = False) -> Operation[bool]:
        """Delete the record of a lock without holders and waiters. Returns whether the record is gone.

        The first token of the next record is another process's estimate of the time, and must be larger than the last
        token (R10). So this waits until the last token is old enough.

        :param at_once: do not wait; the next token may be smaller than the last one.
        """
        require(self.requests.format, Feature.FORGET)
        token_age_ms = ESTIMATE_BEHIND_MS + self.observer.max_clock_skew_ms
        record = yield from self.requests.get(key)  # the response has the server's time, too
        for _ in range(ROUNDS):
            if record is None:
                return True
            if record.holders or record.queue_head is not None:
                return False
            latest_token = None
            if not at_once:
                now_ms = self.requests.stamp().best_ms
                if record.token > now_ms + _AHEAD_MS:
                    return False
                if (early_ms := record.token + token_age_ms - now_ms) > 0:
                    yield Sleep(early_ms / 1000)
                # The machine may have been suspended meanwhile, and the next record may already be in use.
                stamp = yield from self.requests.fresh_stamp(key, token_age_ms, None)
                latest_token = stamp.best_ms - token_age_ms
            reply: Reply = yield self.requests.format.forget(key, latest_token)
            if not reply.refused:
                return True
            record = yield from self.requests.get(key)
        return False

    def page(
        self,
        cursor: Mapping[str, Any] | None,
        prefix: str = "",
        on_damaged: Callable[[LockRecordError], None] | None = None,
    ) -> Operation[tuple[list[LockRecord], Mapping[str, Any] | None]]:
        """One page of the locks whose keys begin with the prefix, and the cursor of the next page; None after the last.

        :param cursor: cursor of this page; None for the first.
        :param on_damaged: called with the error of each damaged record, which is left out; the default logs it.
        """
        reply: Reply = yield self.requests.format.scan(cursor, prefix)
        records = self.requests.scanned(reply, on_damaged)
        return list(filter(self.requests.is_lock, records)), reply.output.get("LastEvaluatedKey")


def _outdated(record: LockRecord, lease_id: str, now_ms: int) -> list[str]:
    """The lease ids of notes to delete with the write of a new one: those that are old, and all but the latest 20. At
    most 20 at once, because expressions are limited."""
    others = {name: each.at_ms for name, each in record.removals.items() if name != lease_id}
    recent = [name for name, at_ms in others.items() if now_ms - at_ms < _REMEMBERED_MS]
    kept = sorted(recent, key=others.__getitem__, reverse=True)[:_MAX_REMOVALS]
    return [name for name in others if name not in kept][:_MAX_REMOVALS]
