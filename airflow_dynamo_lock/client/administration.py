"""What a client does with locks that it does not hold: look, wait, find or break a lease, set a capacity, forget."""

from __future__ import annotations

from dataclasses import dataclass

from airflow_dynamo_lock.client.clock import monotonic
from airflow_dynamo_lock.core.effects import Operation, ServerClock
from airflow_dynamo_lock.core.lock.operations import Operations
from airflow_dynamo_lock.core.model import arguments
from airflow_dynamo_lock.core.model.arguments import Seconds, seconds
from airflow_dynamo_lock.core.model.claim import Mode
from airflow_dynamo_lock.core.model.decisions import Decision
from airflow_dynamo_lock.core.model.errors import LockNotHeldError
from airflow_dynamo_lock.core.model.lease import Lease
from airflow_dynamo_lock.core.model.record import Holder, LockRecord, Waiter
from airflow_dynamo_lock.core.model.text import readable
from airflow_dynamo_lock.core.table.features import Feature, require
from airflow_dynamo_lock.core.table.format import Format
from airflow_dynamo_lock.events import notify
from airflow_dynamo_lock.log import log


@dataclass(frozen=True)
class Administration:
    """Checks arguments, makes the operation, and logs its outcome. `LockClient` documents the methods."""

    format: Format
    operations: Operations
    clock: ServerClock

    def wait(
        self, key: str, slots: int, mode: Mode, timeout: Seconds | None, poll_interval: Seconds
    ) -> Operation[LockRecord | None]:
        """Wait until slots are available, without acquiring them. Returns the lock then; None if it has no record."""
        slots, capacity = _wanted(slots, mode)
        return self.operations.acquiring.wait(
            self.format.checked_key(key),
            slots,
            capacity,
            now=monotonic(),
            timeout=None if timeout is None else seconds("timeout", timeout, zero=True),
            poll_interval=seconds("poll_interval", poll_interval),
        )

    def find(self, key: str, lease_id: str) -> Operation[Lease]:
        """The lease with this id, read from the record. It is not valid in this process before a renewal."""
        arguments.checked_id("A lease id", lease_id)
        record = yield from self.operations.requests.get(self.format.checked_key(key))
        holder = record.holders.get(lease_id) if record else None
        if record is None or holder is None or holder.acquired_at_ms is None:
            loss = None if record is None else record.loss_of(lease_id)
            how = "" if loss is None else f": {loss.describe()}"
            raise LockNotHeldError(
                f"The lease {lease_id} does not hold the lock {key!r}{how}. "
                f"{record.describe() if record else 'Not locked'}."
            )
        return Lease(
            key=key,
            lease_id=lease_id,
            token=record.token,
            owner=holder.owner,
            slots=holder.slots,
            capacity=max(holder.slots, record.capacity),
            lease_ms=holder.lease_ms,
            grace_ms=holder.grace_ms,
            acquired_at_ms=holder.acquired_at_ms,
            took_over=holder.took_over,
            usual_ms=record.usual_ms,
        )

    def look(self, key: str, slots: int, mode: Mode) -> Operation[tuple[LockRecord | None, bool]]:
        """Read the lock once, and tell whether this number of slots is available."""
        slots, capacity = _wanted(slots, mode)
        return self.operations.acquiring.look(self.format.checked_key(key), slots, capacity)

    def break_lock(self, key: str, lease_id: str, by: str | None, reason: str | None) -> Operation[Holder]:
        """End a lease although it is valid, and log the risk."""
        arguments.checked_id("A lease id", lease_id)
        decision = _decision(by, reason)
        broken = yield from self.operations.admin.break_(self.format.checked_key(key), lease_id, decision)
        notify("broken", key)
        log.warning(
            "Broke the lock %r, held by %s (lease %s): until that holder notices, at its next heartbeat, its work and "
            "a successor's may overlap.",
            key,
            broken.holder.describe(self.clock.at(monotonic())),
            lease_id,
        )
        return broken.holder

    def remove_waiter(self, key: str, lease_id: str, by: str | None, reason: str | None) -> Operation[Waiter]:
        """Remove a waiter from the queue, and log that."""
        require(self.format, Feature.QUEUE)
        arguments.checked_id("A lease id", lease_id)
        decision = _decision(by, reason)
        waiter = yield from self.operations.admin.remove_waiter(
            self.format.checked_key(key), lease_id, decision
        )
        log.warning(
            "Removed %s (lease %s) from the queue of the lock %r.", readable(waiter.owner), lease_id, key
        )
        return waiter

    def forget(self, key: str) -> Operation[bool]:
        """Delete the record of a lock without holders and waiters."""
        return self.operations.admin.forget(self.format.checked_key(key))

    def set_capacity(self, key: str, capacity: int | None) -> Operation[LockRecord]:
        """Pin the capacity of a semaphore; None lets claims decide again."""
        require(self.format, Feature.SLOTS)
        if capacity is not None:
            arguments.checked_slots(1, capacity)
        outcome = yield from self.operations.admin.set_capacity(self.format.checked_key(key), capacity)
        if capacity is None:
            log.warning("Unset the capacity of the lock %r: claims decide again.", key)
        else:
            log.warning("Set the capacity of the lock %r to %d.", key, capacity)
        return outcome.record


def _decision(by: str | None, reason: str | None) -> Decision:
    """Who decided, and why: texts that are short enough for the record."""
    return Decision(
        by=arguments.checked_note("by", by) if by else None,
        reason=arguments.checked_note("The reason", reason) if reason else None,
    )


def _wanted(slots: int, mode: Mode) -> tuple[int, int | None]:
    """Slots and capacity to look for. The capacity is None in exclusive mode: any lock with these slots will do."""
    if mode == "shared":
        return arguments.checked_mode(mode, slots, slots)
    return arguments.checked_mode(mode, slots, slots)[0], None
