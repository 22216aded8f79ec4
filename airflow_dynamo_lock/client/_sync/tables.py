# Generated from client/_async by scripts/facades.py: change that file, and run the script.
"""Look at locks, administer them, set up their table: the methods that both clients have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from airflow_dynamo_lock.client.clock import monotonic
from airflow_dynamo_lock.client.threads import ThreadRuntime
from airflow_dynamo_lock.core.lock.survey import survey
from airflow_dynamo_lock.core.model import arguments
from airflow_dynamo_lock.core.model.arguments import Seconds, seconds
from airflow_dynamo_lock.core.model.claim import Mode
from airflow_dynamo_lock.core.model.errors import LockRecordError
from airflow_dynamo_lock.core.model.lease import Lease
from airflow_dynamo_lock.core.model.record import Holder, LockRecord, Waiter
from airflow_dynamo_lock.core.model.state import LockState
from airflow_dynamo_lock.core.table import schema


class Table(ThreadRuntime):
    """Looks at the locks of one table and administers them."""

    @property
    def table(self) -> str:
        """The name of the lock table, or of the bucket."""
        return self._core.table

    @property
    def region_name(self) -> str | None:
        """The AWS region of the SDK client."""
        region: str | None = self._client.meta.region_name
        return region

    def create_table(self, *, timeout: Seconds = 60.0, streams: bool = False) -> None:
        """Create the lock table (on-demand, TTL on), and wait until it is active. An existing table is
        checked, and its TTL turned on if it is off.

        :param timeout: seconds to wait for the table.
        :param streams: with a stream of its changes, for clients with `streams`.
        :raises LockTableError: it is not active in time, or exists with other keys or without the stream.
        """
        within = seconds("timeout", timeout)
        self._run(schema.create(self._core.format, now=monotonic(), timeout=within, streams=streams))

    def check_table(self) -> None:
        """Check that the table exists and can hold locks.

        :raises LockTableError: it cannot; the message says what was expected and what was found.
        """
        self._run(schema.check(self._core.format))

    def describe_table(self) -> Mapping[str, Any]:
        """DynamoDB's description of the table (``DescribeTable``)."""
        return self._run(schema.describe(self._core.table))

    def forget(self, key: str) -> bool:
        """Delete the record of a lock. Without this, DynamoDB deletes it a week after its last use.

        The next record takes its first token from the time, and that token must be larger than the last one. So the
        call waits until the last token is `max_clock_skew` + 3 s behind the time: 18 s at most by default, and usually
        not at all.

        :param key: the lock.
        :returns: True if there is no record any more; False if the lock has holders or waiters, or if its last token is
            more than 5 s ahead of the time.
        """
        return self._run(self._core.administration.forget(key))

    def break_lock(
        self, key: str, lease_id: str, *, by: str | None = None, reason: str | None = None
    ) -> Holder:
        """Remove a lease from the record although it is valid. Use this if its work has ended, or must not continue.

        Until the holder notices, at its next heartbeat, its work and a successor's may overlap.

        :param key: the lock.
        :param lease_id: the lease, as the record shows it.
        :param by: who breaks it. The record keeps this and the reason, and the holder's error shows them. Each has at
            most 500 bytes.
        :param reason: why.
        :returns: the holder as it was.
        :raises LockNotHeldError: that lease is not among the holders.
        """
        return self._run(self._core.administration.break_lock(key, lease_id, by, reason))

    def remove_waiter(
        self, key: str, lease_id: str, *, by: str | None = None, reason: str | None = None
    ) -> Waiter:
        """Remove a waiter from the queue of a lock. Its wait ends with `LockRemovedError`, which shows who removed it,
        and why.

        :param key: the lock.
        :param lease_id: the waiter's lease id, as `waiters` shows it.
        :param by: who removes it. Each of this and the reason has at most 500 bytes.
        :param reason: why.
        :returns: the waiter as it was.
        :raises LockNotWaitingError: it is not in the queue, or has just been granted the lock.
        """
        return self._run(self._core.administration.remove_waiter(key, lease_id, by, reason))

    def set_capacity(self, key: str, capacity: int | None) -> LockRecord:
        """Set the capacity of a semaphore, also while it is held. It overrides the capacity of all claims until the
        record is deleted, a week after its last use.

        If the capacity is less than what is held, no holder loses its lease: new ones are granted when enough slots
        were released.

        :param key: the lock.
        :param capacity: the number of slots; None lets the claims decide again.
        :returns: the lock as it is now.
        :raises CapacityMismatchError: the lock is in use, and not as a semaphore; or it is in use, and `capacity` is
            None.
        """
        return self._run(self._core.administration.set_capacity(key, capacity))

    def get(self, key: str) -> LockRecord | None:
        """The lock as it is now; None if it was never used or its record was deleted.

        :param key: the lock.
        """
        return self._run(self._core.operations.requests.get(self._core.format.checked_key(key)))

    def find(self, key: str, lease_id: str) -> Lease:
        """Return the lease with this id as the record shows it, for a program that does not have the lease itself.

        Renew it before you rely on it. Its token is the last token of the lock, which may belong to a later grant.

        :param key: the lock.
        :param lease_id: the lease.
        :raises LockNotHeldError: that lease is not among the holders.
        """
        return self._run(self._core.administration.find(key, lease_id))

    def look(self, key: str, *, slots: int = 1, mode: Mode = "exclusive") -> tuple[LockRecord | None, bool]:
        """The lock as it is now, and whether slots could be acquired: free ones, or those of dead holders.

        :param key: the lock.
        :param slots: number of slots.
        :param mode: ``"shared"`` asks for a reader.
        :returns: the lock as it is now, or None if it has no record; and whether the slots could be acquired.
        """
        return self._run(self._core.administration.look(key, slots, mode))

    def waiters(self, key: str) -> list[Waiter]:
        """The lock's queue of waiters, the next one first, with about how long each still waits, if that is known.

        :param key: the lock.
        """
        return self._run(self._core.queue.reader.waiters(self._core.format.checked_key(key)))

    def survey(
        self, prefix: str = "", *, on_damaged: Callable[[LockRecordError], None] | None = None
    ) -> list[LockState]:
        """All locks of the table with their queues, by name. Reads the whole table once.

        :param prefix: only keys that begin with this.
        :param on_damaged: called with the error of each record that cannot be read; by default it is logged.
        """
        arguments.checked_text("The prefix", prefix)
        return self._run(survey(self._core.operations.requests, prefix, on_damaged))

    def list_locks(
        self, prefix: str = "", *, on_damaged: Callable[[LockRecordError], None] | None = None
    ) -> Iterator[LockRecord]:
        """All locks of the table, held and free. Reads the whole table.

        :param prefix: only keys that begin with this.
        :param on_damaged: called with the error of each record that cannot be read; by default it is logged.
        """
        arguments.checked_text("The prefix", prefix)
        cursor: Mapping[str, Any] | None = None
        while True:
            records, cursor = self._run(self._core.operations.admin.page(cursor, prefix, on_damaged))
            for record in records:
                yield record
            if not cursor:
                return
