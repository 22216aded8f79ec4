"""`AsyncLockClient`: the lock on aiobotocore, with tasks."""

from __future__ import annotations

import asyncio

from airflow_dynamo_lock.client._async.leases import AsyncLeases
from airflow_dynamo_lock.client._async.tables import AsyncTable
from airflow_dynamo_lock.client.leases import one_lease
from airflow_dynamo_lock.core.model import arguments
from airflow_dynamo_lock.core.model.arguments import Seconds, seconds
from airflow_dynamo_lock.core.model.errors import LockAccessError, LockUnavailableError
from airflow_dynamo_lock.core.model.lease import Lease, LeaseSet
from airflow_dynamo_lock.core.model.outcomes import Draining, Lost
from airflow_dynamo_lock.core.table.features import Feature
from airflow_dynamo_lock.core.wait.poller import EndListener
from airflow_dynamo_lock.log import log


class AsyncLockClient(AsyncLeases, AsyncTable):
    """Locks in one DynamoDB table, for one event loop. A fork of its process cannot use it.

    :param client: an aiobotocore DynamoDB client.
    :param streams: an aiobotocore ``dynamodbstreams`` client, with which waiters notice a release sooner.

    The other parameters, the methods and their errors are those of `LockClient`. But `keep_alive` returns an
    `asyncio.Task`, and `list_locks` is an asynchronous generator. Callbacks are plain functions, not coroutines.
    """

    async def keep_for_processes(self, lease: Lease | LeaseSet, *, interval: Seconds) -> Draining | Lost:
        """Send heartbeats on behalf of processes that work under the lease elsewhere, until it is lost or drains.

        :param lease: a lease, or a set of leases, which ends when all of its leases have ended.
        :param interval: seconds between heartbeats.
        :returns: the outcome of the lease that ended last.
        :raises LockAccessError: DynamoDB has denied access for the length of the lease.
        """
        return await self._run(self._core.keep_for_processes(lease, interval))

    async def until_gone(self, lease: Lease, *, poll_interval: Seconds = 1.0) -> None:
        """Wait until the lease is no longer among the holders, or is draining.

        The shared poller reads the locks, so any number of leases costs one read per hundred keys.

        :param lease: the lease.
        :param poll_interval: seconds between reads of the table.
        """
        lease = one_lease(lease)
        reports: asyncio.Queue[bool] = asyncio.Queue()
        listener = EndListener(
            lease.key, lease.lease_id, seconds("poll_interval", poll_interval), reports.put_nowait
        )
        self._queue(listener)
        try:
            while not await _any_certain(reports):
                # The poller's read may be older than the lease itself, so read once more, consistently.
                try:
                    record = await self.get(lease.key)
                except (LockAccessError, LockUnavailableError) as failure:
                    log.warning("Cannot read whether a lease has ended, trying again: %s", failure)
                    continue  # the poller reports it again
                if record is None or not record.is_held(lease.lease_id):
                    return
        finally:
            self._core.poller.remove(listener)

    async def leave_queue(self, key: str, lease_id: str) -> None:
        """Remove the queue entry of a cancelled `acquire` that had a `lease_id`. Without this, the entry stays for a
        while, because another process may continue in it.

        :param key: the lock.
        :param lease_id: the lease id that was given to `acquire`.
        """
        lease_id = arguments.checked_id("A lease id", lease_id)
        key = self._core.format.checked_key(key)
        if Feature.QUEUE in self._core.format.features:
            await self._run(self._core.queue.dequeue_attempt(key, lease_id))
            self._maintain_queue_entries()


async def _any_certain(reports: asyncio.Queue[bool]) -> bool:
    """Wait for a report of the poller. Whether one of those that have arrived is certain."""
    certain = await reports.get()
    while not reports.empty():
        certain |= reports.get_nowait()
    return certain
