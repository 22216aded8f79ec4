"""Acquire, hold and release locks: the methods that both clients have."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, overload

from airflow_dynamo_lock.client import nesting
from airflow_dynamo_lock.client.claims import checked_options
from airflow_dynamo_lock.client.leases import lost_in_use
from airflow_dynamo_lock.client.options import (
    AcquireOptions,
    AnyLease,
    ClaimOptions,
    HoldOptions,
    Keys,
    OnDanger,
    OnLost,
)
from airflow_dynamo_lock.client.tasks import AsyncRuntime
from airflow_dynamo_lock.core.model import arguments
from airflow_dynamo_lock.core.model.arguments import Seconds, seconds
from airflow_dynamo_lock.core.model.claim import Mode
from airflow_dynamo_lock.core.model.errors import LockError, LockValueError
from airflow_dynamo_lock.core.model.lease import Lease, LeaseSet
from airflow_dynamo_lock.core.model.outcomes import Draining, Lost, Released, Renewed, StillHeld
from airflow_dynamo_lock.core.model.record import LockRecord, QueuePosition
from airflow_dynamo_lock.log import log

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AsyncLeases(AsyncRuntime):
    """Acquires, holds and releases the locks of one table."""

    @overload
    async def try_acquire(self, key: str, **claim: Unpack[ClaimOptions]) -> Lease | None: ...

    @overload
    async def try_acquire(
        self, key: list[str] | tuple[str, ...], **claim: Unpack[ClaimOptions]
    ) -> LeaseSet | None: ...

    async def try_acquire(self, key: Keys, **claim: Unpack[ClaimOptions]) -> Lease | LeaseSet | None:
        """Acquire the lock if it is free or its holder is dead, and there is no queue. One request if it is free.

        No heartbeats are sent for the lease: see `renew`, `keep_alive` and `lock`.

        :param key: the lock; or a list of up to 100 locks, acquired together, all or none, in two requests.
        :returns: the lease; None if the lock is taken.
        :raises CapacityMismatchError: the lock is in use with another capacity, or in another mode.
        """
        return await self._run(self._core.try_acquire(key, claim))

    @overload
    async def acquire(
        self,
        key: str,
        **options: Unpack[AcquireOptions],
    ) -> Lease: ...

    @overload
    async def acquire(
        self,
        key: list[str] | tuple[str, ...],
        **options: Unpack[AcquireOptions],
    ) -> LeaseSet: ...

    async def acquire(
        self,
        key: Keys,
        *,
        timeout: Seconds | None = None,  # noqa: ASYNC109
        poll_interval: Seconds = 1.0,
        on_busy: Callable[[LockRecord], None] | None = None,
        on_position: Callable[[QueuePosition], None] | None = None,
        holding: Lease | LeaseSet | Sequence[Lease | LeaseSet] = (),
        **claim: Unpack[ClaimOptions],
    ) -> Lease | LeaseSet:
        """Wait until the lock is free or its holder is dead, and acquire it. Waiters are granted in arrival order.

        If the call is interrupted or cancelled, it leaves the queue before it ends, for which it takes 3 s at most.
        With a `lease_id`, it leaves the queue in the background, because another process may go on waiting for it.

        :param key: the lock; or a list of up to 100 locks, acquired together, all or none. A waiter for several locks
            queues for each of them, and the waiters behind it in one queue wait until it has them all.
        :param timeout: maximum time to wait, in seconds or as timedelta; 0 tries once, None (the default) waits without
            a limit.
        :param poll_interval: seconds between reads of the table, which all waiters of this client share.
        :param on_busy: called with the record each time that a try found the lock taken.
        :param on_position: called with this waiter's position in the queue each time that it changes. If a waiter of
            another process gives up, that takes 10 s, and longer in a process that waits for more than ten locks. The
            position says about how long this waiter still waits, if that is known; a new estimate alone is no call. The
            function must not block. An exception that it raises is logged.
        :param holding: a lease, or a list of leases, that the caller does not release before this call ends, such as
            those of another task that waits for this one. Leases of `lock` blocks of this client around the call are
            added. With them, the wait is part of the search for deadlocks.
        :raises LockTimeoutError: the lock was not free in time; the message names the holders.
        :raises LockRemovedError: a person removed the waiter.
        :raises LockNotFoundError: `only_existing` is set, and the lock has no record.
        :raises LockDeadlockError: the holders wait, directly or through others, for what the caller holds, and the
            caller was the last one to begin waiting. The message names all locks and holders.
        :raises CapacityMismatchError: the lock is in use with another capacity, or in another mode.
        """
        try:
            return await self._run(
                self._core.acquire(key, timeout, poll_interval, on_busy, on_position, claim, holding)
            )
        finally:
            self._maintain_queue_entries()

    async def wait(
        self,
        key: str,
        *,
        slots: int = 1,
        mode: Mode = "exclusive",
        timeout: Seconds | None = None,  # noqa: ASYNC109
        poll_interval: Seconds = 1.0,
    ) -> LockRecord | None:
        """Wait until slots could be acquired, without acquiring them or queueing.

        :param key: the lock.
        :param slots: number of slots that must be free.
        :param mode: ``"shared"`` waits until a reader could acquire the lock.
        :param timeout: maximum time to wait, in seconds or as timedelta; 0 looks once, None (the default) waits without
            a limit.
        :param poll_interval: seconds between reads of the table.
        :returns: the lock as it is then; None if it was never used.
        :raises LockTimeoutError: the slots were not free in time.
        """
        return await self._run(self._core.administration.wait(key, slots, mode, timeout, poll_interval))

    @overload
    def lock(
        self,
        key: str,
        **options: Unpack[HoldOptions],
    ) -> AbstractAsyncContextManager[Lease]: ...

    @overload
    def lock(
        self,
        key: list[str] | tuple[str, ...],
        **options: Unpack[HoldOptions],
    ) -> AbstractAsyncContextManager[LeaseSet]: ...

    def lock(self, key: Keys, **options: Any) -> AbstractAsyncContextManager[Any]:
        """Hold the lock for the length of a ``with`` block, with heartbeats in the background.

        An exception raised in the block leaves it unchanged.

        :param key: the lock; or a list of up to 100 locks, acquired together, all or none.
        :param options: those of `acquire`, and `on_lost`, `on_danger` and `safe_time` of `keep_alive`.
        :raises LockTimeoutError: the lock was not free in time.
        :raises LockRemovedError: a person removed the waiter.
        :raises LockNotFoundError: `only_existing` is set, and the lock has no record.
        :raises LockDeadlockError: this wait and others would never end.
        :raises LockLostError: when the block ends: the lease was lost while it ran, so its work may have overlapped
            with a successor's. Call ``lease.check()`` in the block to learn of a loss sooner.
        """
        return self._lock(key, **options)

    @asynccontextmanager
    async def _lock(
        self,
        key: Any,
        *,
        on_lost: OnLost | None = None,
        on_danger: OnDanger | None = None,
        safe_time: Seconds | None = None,
        **options: Any,
    ) -> AsyncIterator[Any]:
        checked_options(options, HoldOptions)
        arguments.checked_callbacks(on_lost=on_lost, on_danger=on_danger)
        if safe_time is not None:
            length = seconds("lease", options.get("lease") or self._core.lease)
            arguments.checked_safe_time(seconds("safe_time", safe_time), length)
        lease = await self.acquire(key, **options)
        try:
            heartbeats = self.keep_alive(lease, on_lost=on_lost, on_danger=on_danger, safe_time=safe_time)
        except LockValueError:  # `safe_time` does not suit the lease that `reentrant` has found
            await self._release_at_block_end(lease)
            raise
        try:
            with nesting.block(self._core, lease):
                yield lease
            lease.check()
        except BaseException:
            heartbeats.cancel()
            try:
                await self._release_at_block_end(lease)
            except LockError as failure:
                log.warning("Could not release %r, it will run out: %s", key, failure)
            raise
        heartbeats.cancel()
        if isinstance(outcome := await self._release_at_block_end(lease), Lost):
            raise lost_in_use(key, lease, outcome)

    async def renew(
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
        return await self._run(self._core.renew(lease, duration, data))

    async def enter(self, lease: Lease, process: str) -> Lease:
        """Note in the record that a process works under the lease (R8), and send a heartbeat.

        That is repeated while DynamoDB does not answer, for as long as the lease lasts without a heartbeat.

        :param lease: the lease.
        :param process: a unique id of the process.
        :returns: the lease as that process may count on it: for the release grace at most, renewed by `keep_alive`.
        :raises LockLostError: the lease is lost or draining; the process must not start.
        :raises LockUnavailableError: DynamoDB has not answered for that long.
        """
        return await self._run(self._core.enter(lease, process))

    async def leave(
        self, lease: Lease, process: str, *, release: bool = False
    ) -> Released | Renewed | Draining | Lost:
        """Note in the record that a process has ended. The last process to leave a draining lease releases it.

        :param lease: the lease.
        :param process: the id that it entered with.
        :param release: release the lock too, in the same request if no other process is inside. If others are inside,
            the lease drains.
        :returns: `Released` if that released the lock; `Renewed` if the lease goes on; `Draining` if it was to be
            released, and other processes are inside; `Lost` if it was gone already.
        :raises LockUnavailableError: DynamoDB could not be reached; the lease runs out by itself.
        """
        outcome = await self._run(self._core.leave(lease, process, release=release))
        self._notify_end(lease, outcome)
        return outcome

    async def release(
        self, lease: Lease | LeaseSet, *, retry_for: Seconds | None = 0
    ) -> Released | Draining | StillHeld | Lost:
        """Release the lock.

        :param lease: a lease, or a set of leases that were acquired together.
        :param retry_for: seconds to retry while DynamoDB cannot be reached, or while access is denied (then for the
            length of a lease at most); None retries without end.
        :returns: what became of the lease; of a set, the worst of them. Only `Released` is true: the slots are free, or
            will be at the end of `min_hold`. `Draining`: processes are still inside, and the lock is free when they
            have left. `StillHeld`: a re-entrant lease was acquired more often than it was released, or this process is
            a fork of its holder. `Lost`: the lease was gone already.
        :raises LockUnavailableError: DynamoDB could not be reached in time; the lease runs out by itself.
        """
        outcome = await self._run(self._core.release(lease, retry_for))
        self._notify_end(lease, outcome)
        return outcome

    async def close(self, *, release: bool = False) -> None:
        """Stop the heartbeats of all leases.

        :param release: release the leases that heartbeats were sent for; else they run out. Only for leases that
            nothing works under any more.
        """
        leases = self._stop_heartbeats()
        failure: LockError | None = None
        for lease in leases if release else ():
            try:
                while isinstance(await self.release(lease), StillHeld):
                    pass
            except LockError as failed:
                failure = failure or failed  # release the others all the same
        if failure is not None:
            raise failure
