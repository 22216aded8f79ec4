# Generated from client/_async by scripts/facades.py: change that file, and run the script.
"""The methods that both clients have: arguments in, one operation, its result out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, overload

from airflow_dynamo_lock.client.clock import monotonic
from airflow_dynamo_lock.client.options import (
    AcquireOptions,
    AnyLease,
    ClaimOptions,
    HoldOptions,
    Keys,
    Mode,
    OnDanger,
    OnLost,
)
from airflow_dynamo_lock.client.session import lost_in_use
from airflow_dynamo_lock.client.threads import ThreadRuntime
from airflow_dynamo_lock.core.model import arguments
from airflow_dynamo_lock.core.model.arguments import Seconds, seconds
from airflow_dynamo_lock.core.model.errors import LockError, LockRecordError, LockValueError
from airflow_dynamo_lock.core.model.lease import Lease, LeaseSet
from airflow_dynamo_lock.core.model.outcomes import Draining, Lost, Released, Renewed, StillHeld
from airflow_dynamo_lock.core.model.record import Holder, LockRecord, QueuePosition, Waiter
from airflow_dynamo_lock.core.table import schema
from airflow_dynamo_lock.log import log

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Locks(ThreadRuntime):
    """The locks of one table.

    Every method may raise `LockUnavailableError` (network, throttling), `LockAccessError` (permissions, credentials),
    and `LockTableError` (no such table, other keys, a damaged record, or one of a newer version).
    """

    @property
    def table(self) -> str:
        """The name of the lock table, or of the bucket."""
        return self._core.table

    @property
    def region_name(self) -> str | None:
        """The AWS region of the SDK client."""
        region: str | None = self._client.meta.region_name
        return region

    # -- the table ----------------------------------------------------------------------------------------------

    def create_table(self, *, timeout: Seconds = 60.0, streams: bool = False) -> None:
        """Create the lock table (on-demand, TTL on), and wait until it is active. An existing table is only checked.

        :param timeout: seconds to wait for the table.
        :param streams: with a stream of its changes, for clients with `streams`.
        :raises LockTableError: it is not active in time, or exists with other keys or without the stream.
        """
        patience = seconds("timeout", timeout)
        self._run(schema.create(self._core.format, now=monotonic(), timeout=patience, streams=streams))

    def check_table(self) -> None:
        """Check that the table exists and can hold locks.

        :raises LockTableError: it cannot; the message says what was expected and what was found.
        """
        self._run(schema.check(self._core.format))

    def describe_table(self) -> Mapping[str, Any]:
        """DynamoDB's description of the table (``DescribeTable``)."""
        return self._run(schema.describe(self._core.table))

    # -- acquire ------------------------------------------------------------------------------------------------

    @overload
    def try_acquire(self, key: str, **claim: Unpack[ClaimOptions]) -> Lease | None: ...

    @overload
    def try_acquire(
        self, key: list[str] | tuple[str, ...], **claim: Unpack[ClaimOptions]
    ) -> LeaseSet | None: ...

    def try_acquire(self, key: Keys, **claim: Unpack[ClaimOptions]) -> Lease | LeaseSet | None:
        """Acquire the lock if it is free or its holder is dead, and nobody waits for it. One request if it is free.

        No heartbeats are sent for the lease: see `renew`, `keep_alive` and `lock`.

        :param key: the lock; or a list of up to 100 locks, acquired together, all or none, in two requests.
        :returns: the lease; None if the lock is taken.
        :raises CapacityMismatchError: the lock is in use with another capacity, or in another mode.
        """
        return self._run(self._core.try_acquire(key, claim))

    @overload
    def acquire(
        self,
        key: str,
        **options: Unpack[AcquireOptions],
    ) -> Lease: ...

    @overload
    def acquire(
        self,
        key: list[str] | tuple[str, ...],
        **options: Unpack[AcquireOptions],
    ) -> LeaseSet: ...

    def acquire(
        self,
        key: Keys,
        *,
        timeout: Seconds | None = None,
        poll_interval: Seconds = 1.0,
        on_busy: Callable[[LockRecord], None] | None = None,
        on_position: Callable[[QueuePosition], None] | None = None,
        **claim: Unpack[ClaimOptions],
    ) -> Lease | LeaseSet:
        """Wait until the lock is free or its holder is dead, and acquire it. Waiters are granted in arrival order.

        :param key: the lock; or a list of up to 100 locks, acquired together, all or none. A waiter for several locks
            queues for each of them, and the waiters behind it in one queue wait until it has them all.
        :param timeout: seconds to wait at most; 0 tries once, None waits without end.
        :param poll_interval: seconds between reads of the table, which all waiters of this client share.
        :param on_busy: called with the record each time that a try found the lock taken.
        :param on_position: called with this waiter's position in the queue each time that it changes. If a waiter of
            another process gives up, that takes 10 s, and longer in a process that waits for more than ten locks. It
            must not block. An exception that it raises is logged.
        :raises LockTimeoutError: the lock was not free in time; the message names the holders.
        :raises CapacityMismatchError: the lock is in use with another capacity, or in another mode.
        """
        try:
            return self._run(self._core.acquire(key, timeout, poll_interval, on_busy, on_position, claim))
        finally:
            self._maintain_queue_entries()

    def wait(
        self,
        key: str,
        *,
        slots: int = 1,
        mode: Mode = "exclusive",
        timeout: Seconds | None = None,
        poll_interval: Seconds = 1.0,
    ) -> LockRecord | None:
        """Wait until slots could be acquired, without acquiring them or queueing.

        :param key: the lock.
        :param slots: number of slots that must be free.
        :param mode: ``"shared"`` waits until a reader could acquire the lock.
        :param timeout: seconds to wait at most; 0 looks once, None waits without end.
        :param poll_interval: seconds between reads of the table.
        :returns: the lock as it is then; None if it was never used.
        :raises LockTimeoutError: the slots were not free in time.
        """
        return self._run(self._core.wait(key, slots, mode, timeout, poll_interval))

    @overload
    def lock(
        self,
        key: str,
        **options: Unpack[HoldOptions],
    ) -> AbstractContextManager[Lease]: ...

    @overload
    def lock(
        self,
        key: list[str] | tuple[str, ...],
        **options: Unpack[HoldOptions],
    ) -> AbstractContextManager[LeaseSet]: ...

    def lock(self, key: Keys, **options: Any) -> AbstractContextManager[Any]:
        """Hold the lock for the length of a ``with`` block, with heartbeats in the background.

        An exception raised in the block leaves it unchanged.

        :raises LockTimeoutError: the lock was not free in time.
        :raises LockLostError: when the block ends: the lease was lost while it ran, so its work may have overlapped
            with a successor's. Call ``lease.check()`` in the block to learn of a loss sooner.
        """
        return self._lock(key, **options)

    @contextmanager
    def _lock(
        self,
        key: Any,
        *,
        on_lost: OnLost | None = None,
        on_danger: OnDanger | None = None,
        safe_time: Seconds | None = None,
        **options: Any,
    ) -> Iterator[Any]:
        lease = self.acquire(key, **options)
        try:
            heartbeats = self.keep_alive(lease, on_lost=on_lost, on_danger=on_danger, safe_time=safe_time)
        except LockValueError:  # an option that cannot be, for this lease
            self._release_at_last(lease)
            raise
        try:
            yield lease
            lease.check()
        except BaseException:
            heartbeats.stop()
            try:
                self._release_at_last(lease)
            except LockError as failure:
                log.warning("Could not release %r, it will run out: %s", key, failure)
            raise
        heartbeats.stop()
        if isinstance(outcome := self._release_at_last(lease), Lost):
            raise lost_in_use(key, lease, outcome)

    # -- hold ---------------------------------------------------------------------------------------------------

    def renew(
        self, lease: AnyLease, *, duration: Seconds | None = None, data: Mapping[str, Any] | None = None
    ) -> AnyLease:
        """Send one heartbeat.

        :param lease: a lease, or a set of leases.
        :param duration: how long the lease lasts after each heartbeat from now on, in seconds: longer than before.
        :param data: data to keep with the lock instead of what is there; an empty map removes that.
        :returns: the lease as it is now.
        :raises LockLostError: the lease is no longer among the holders, or has run out by this process's clock.
        :raises LockValueError: the lease lasts longer than `duration` already.
        """
        return self._run(self._core.renew(lease, duration, data))

    def enter(self, lease: Lease, process: str) -> Lease:
        """Note in the record that a process works under the lease (R8), and send a heartbeat.

        :param lease: the lease.
        :param process: a unique id of the process.
        :returns: the lease as that process may count on it: for the release grace at most, renewed by `keep_alive`.
        :raises LockLostError: the lease is lost or draining; the process must not start.
        """
        return self._run(self._core.enter(lease, process))

    def leave(self, lease: Lease, process: str) -> Released | Renewed | Lost:
        """Note in the record that a process has ended. The last process to leave a draining lease releases it.

        :param lease: the lease.
        :param process: the id that it entered with.
        :returns: `Released` if that released the lock; `Renewed` if the lease goes on; `Lost` if it was gone already.
        """
        outcome = self._run(self._core.leave(lease, process))
        self._notify_end(lease, outcome)
        return outcome

    # -- release ------------------------------------------------------------------------------------------------

    def release(
        self, lease: Lease | LeaseSet, *, retry_for: Seconds | None = 0
    ) -> Released | Draining | StillHeld | Lost:
        """Release the lock.

        :param lease: a lease, or a set of leases that were acquired together.
        :param retry_for: seconds to retry while DynamoDB cannot be reached, or while access is denied (then for the
            length of a lease at most); None retries without end.
        :returns: what became of the lease; of a set, the worst of them. Only `Released` is true: the slots are free.
            `Draining`: processes are still inside, and the lock is free when they have left. `StillHeld`: a re-entrant
            lease was acquired more often than it was released. `Lost`: the lease was gone already.
        :raises LockUnavailableError: DynamoDB could not be reached in time; the lease runs out by itself.
        """
        outcome = self._run(self._core.release(lease, retry_for))
        self._notify_end(lease, outcome)
        return outcome

    def close(self, *, release: bool = False) -> None:
        """Stop the heartbeats of all leases.

        :param release: release the leases that heartbeats were sent for; else they run out. Only for leases that
            nothing works under any more.
        """
        leases = self._stop_heartbeats()
        failure: LockError | None = None
        for lease in leases if release else ():
            try:
                while isinstance(self.release(lease), StillHeld):
                    pass
            except LockError as failed:
                failure = failure or failed  # release the others all the same
        if failure is not None:
            raise failure

    # -- administer ---------------------------------------------------------------------------------------------

    def forget(self, key: str) -> bool:
        """Delete the record of a lock. Without this, DynamoDB deletes it a week after its last use.

        The call waits until `max_clock_skew` + 3 s after the last grant, 13 s by default, so that the next token is
        larger than the last one.

        :param key: the lock.
        :returns: True if there is no record any more; False if somebody holds the lock or waits for it.
        """
        return self._run(self._core.forget(key))

    def break_lock(self, key: str, lease_id: str) -> Holder:
        """Take a lease away from its holder: for people who know that its work must not go on, or does not.

        Until the holder notices, at its next heartbeat, its work and a successor's may overlap.

        :param key: the lock.
        :param lease_id: the lease, as the record shows it.
        :returns: the holder as it was.
        :raises LockNotHeldError: that lease is not among the holders.
        """
        return self._run(self._core.break_lock(key, lease_id))

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
        return self._run(self._core.set_capacity(key, capacity))

    # -- look ---------------------------------------------------------------------------------------------------

    def get(self, key: str) -> LockRecord | None:
        """The lock as it is now; None if it was never used or its record was deleted.

        :param key: the lock.
        """
        return self._run(self._core.operations.get(self._core.format.checked_key(key)))

    def find(self, key: str, lease_id: str) -> Lease:
        """The lease of that id, for a program that knows no more of it. Its token is the last one of the lock. It is
        not valid before it was renewed here.

        :param key: the lock.
        :param lease_id: the lease.
        :raises LockNotHeldError: that lease is not among the holders.
        """
        return self._run(self._core.find(key, lease_id))

    def look(self, key: str, *, slots: int = 1, mode: Mode = "exclusive") -> tuple[LockRecord | None, bool]:
        """The lock as it is now, and whether slots could be acquired: free ones, or those of dead holders.

        :param key: the lock.
        :param slots: number of slots.
        :param mode: ``"shared"`` asks for a reader.
        """
        return self._run(self._core.look(key, slots, mode))

    def waiters(self, key: str) -> list[Waiter]:
        """The lock's queue of waiters, the next one first.

        :param key: the lock.
        """
        return self._run(self._core.queue.reader.waiters(self._core.format.checked_key(key)))

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
            records, cursor = self._run(self._core.operations.page(cursor, prefix, on_damaged))
            for record in records:
                yield record
            if not cursor:
                return
