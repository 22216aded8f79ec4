"""`AsyncLockClient`: the lock on aiobotocore, with tasks."""

from __future__ import annotations

import asyncio

from airflow_dynamo_lock.client._async.leases import AsyncLeases
from airflow_dynamo_lock.client._async.tables import AsyncTable
from airflow_dynamo_lock.core.model import arguments
from airflow_dynamo_lock.core.model.arguments import Seconds, seconds
from airflow_dynamo_lock.core.model.errors import LockAccessError, LockUnavailableError
from airflow_dynamo_lock.core.model.lease import Lease, LeaseSet
from airflow_dynamo_lock.core.model.outcomes import Draining, Lost
from airflow_dynamo_lock.core.table.features import Feature
from airflow_dynamo_lock.core.wait.poller import EndListener


class AsyncLockClient(AsyncLeases, AsyncTable):
    """Locks in one DynamoDB table, for one event loop. A fork of its process cannot use it.

    :param client: an aiobotocore DynamoDB client.
    :param streams: an aiobotocore ``dynamodbstreams`` client: waiters learn of a release from the table's stream.

    The other parameters, the methods and their errors are those of `LockClient`.
    """

    async def keep(self, lease: Lease | LeaseSet, *, interval: Seconds) -> Draining | Lost:
        """Send heartbeats for processes that work under the lease elsewhere, until it is gone or draining; for a set of
        leases, until all of them are.

        :param lease: a lease, or a set of leases.
        :param interval: seconds between heartbeats.
        :returns: what became of the last lease.
        """
        return await self._run(self._core.keep(lease, interval))

    async def until_gone(self, lease: Lease, *, poll_interval: Seconds = 1.0) -> None:
        """Wait until the lease is no longer among the holders, or is draining.

        The shared poller looks, so any number of leases cost one read for each hundred keys.

        :param lease: the lease.
        :param poll_interval: seconds between reads of the table.
        """
        lease = lease.checked()
        seen: asyncio.Queue[bool] = asyncio.Queue()
        sight = EndListener(
            lease.key, lease.lease_id, seconds("poll_interval", poll_interval), seen.put_nowait
        )
        self._queue(sight)
        try:
            while not await _latest(seen):
                # The poller's reads may be older than the lease itself: ask once more, consistently.
                try:
                    record = await self.get(lease.key)
                except (LockAccessError, LockUnavailableError):
                    continue  # the poller goes on, and shows it again
                holder = record.holders.get(lease.lease_id) if record else None
                if holder is None or holder.draining:
                    return
        finally:
            self._core.poller.remove(sight)

    async def leave_queue(self, key: str, lease_id: str) -> None:
        """Remove the queue entry of an `acquire` that was cancelled. With a lease id of the caller, the entry stays
        for a while, because another process may continue in it: this says that none will.

        :param key: the lock.
        :param lease_id: the lease id that was given to `acquire`.
        """
        lease_id = arguments.checked_id("A lease id", lease_id)
        key = self._core.format.checked_key(key)
        if Feature.QUEUE in self._core.format.features:
            await self._run(self._core.queue.dequeue_attempt(key, lease_id))
            self._maintain_queue_entries()


async def _latest(seen: asyncio.Queue[bool]) -> bool:
    certain = await seen.get()
    while not seen.empty():
        certain |= seen.get_nowait()
    return certain
