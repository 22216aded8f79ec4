"""`AsyncLockClient`: the lock on aiobotocore. The same methods as `LockClient`, as coroutines."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from botocore import xform_name

from airflow_dynamo_lock.client.core import ClaimOptions, ClientCore, OnLost
from airflow_dynamo_lock.client.wire import answer_to, monotonic, not_answered, reply
from airflow_dynamo_lock.protocol import limits, table
from airflow_dynamo_lock.protocol.effects import Operation, Reply, Request, Sleep, T, WaitForRoom
from airflow_dynamo_lock.protocol.errors import LockError, LockLostError, LockUnavailableError
from airflow_dynamo_lock.protocol.limits import Seconds, seconds
from airflow_dynamo_lock.protocol.model import (
    Abandoned,
    Ending,
    Holder,
    Lease,
    LockRecord,
    Lost,
    Released,
    Renewed,
)
from airflow_dynamo_lock.protocol.staleness import MAX_CLOCK_SKEW
from airflow_dynamo_lock.protocol.watch import Sight, Ticket

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger("airflow_dynamo_lock")


class AsyncLockClient:
    """Locks in one DynamoDB table, for one event loop. Parameters, results and errors as in `LockClient`.

    :param client: an aiobotocore DynamoDB client.
    """

    def __init__(
        self,
        client: Any,
        *,
        table: str,
        owner: str | None = None,
        lease: Seconds = 30.0,
        heartbeat: Seconds | None = None,
        release_grace: Seconds = limits.RELEASE_GRACE,
        max_clock_skew: Seconds = MAX_CLOCK_SKEW,
    ) -> None:
        self._client = client
        self._core = ClientCore(table, owner, lease, heartbeat, release_grace, max_clock_skew)
        self._poller: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()

    @property
    def region_name(self) -> str | None:
        """The AWS region that its SDK client talks to."""
        region: str | None = self._client.meta.region_name
        return region

    # -- the table ----------------------------------------------------------------------------------------------

    async def create_table(self, *, timeout: Seconds = 60.0) -> None:  # noqa: ASYNC109 - the same name as LockClient's
        """See `LockClient.create_table`."""
        await self._run(table.create(self._core.table, now=monotonic(), timeout=seconds("timeout", timeout)))

    async def check_table(self) -> None:
        """See `LockClient.check_table`."""
        await self._run(table.check(self._core.table))

    async def describe_table(self) -> Mapping[str, Any]:
        """See `LockClient.describe_table`."""
        return await self._run(table.describe(self._core.table))

    # -- take ---------------------------------------------------------------------------------------------------

    async def try_acquire(self, key: str, **claim: Unpack[ClaimOptions]) -> Lease | None:
        """See `LockClient.try_acquire`."""
        return await self._run(self._core.try_acquire(key, claim))

    async def acquire(
        self,
        key: str,
        *,
        timeout: Seconds | None = None,  # noqa: ASYNC109
        poll_interval: Seconds = 1.0,
        on_busy: Callable[[LockRecord], None] | None = None,
        **claim: Unpack[ClaimOptions],
    ) -> Lease:
        """See `LockClient.acquire`."""
        return await self._run(self._core.acquire(key, timeout, poll_interval, on_busy, claim))

    async def wait(
        self,
        key: str,
        *,
        slots: int = 1,
        timeout: Seconds | None = None,  # noqa: ASYNC109
        poll_interval: Seconds = 1.0,
    ) -> LockRecord | None:
        """See `LockClient.wait`."""
        return await self._run(self._core.wait(key, slots, timeout, poll_interval))

    @asynccontextmanager
    async def lock(
        self,
        key: str,
        *,
        timeout: Seconds | None = None,  # noqa: ASYNC109
        poll_interval: Seconds = 1.0,
        on_lost: OnLost | None = None,
        **claim: Unpack[ClaimOptions],
    ) -> AsyncIterator[Lease]:
        """See `LockClient.lock`."""
        lease = await self.acquire(key, timeout=timeout, poll_interval=poll_interval, **claim)
        beats = self.keep_alive(lease, on_lost=on_lost)
        try:
            yield lease
            lease.check()
        except BaseException:
            beats.cancel()
            try:
                await self.give_back(lease)
            except LockError as failure:
                log.warning(
                    "Could not release %r (lease %s), it will run out: %s", key, lease.lease_id, failure
                )
            raise
        beats.cancel()
        if isinstance(outcome := await self.give_back(lease), Lost):
            raise LockLostError(
                f"The lock {key!r} (lease {lease.lease_id}) was lost while it was in use: {outcome.describe()}."
            )

    # -- keep ---------------------------------------------------------------------------------------------------

    async def renew(self, lease: Lease) -> Lease:
        """See `LockClient.renew`."""
        return await self._run(self._core.renew(lease))

    def keep_alive(
        self, lease: Lease, *, interval: Seconds | None = None, on_lost: OnLost | None = None
    ) -> asyncio.Task[None]:
        """Send heartbeats from a task of the lease's own, which this returns. Cancel it to stop them."""
        lease = self._core.with_term(lease)
        every = self._core.interval(lease) if interval is None else seconds("interval", interval)
        limits.checked_heartbeat(every, lease.lease_ms / 1000)
        return asyncio.create_task(
            self._beat(lease, every, on_lost), name=f"dynamo-lock heartbeat {lease.key}"
        )

    async def _beat(self, lease: Lease, every: float, on_lost: OnLost | None) -> None:
        try:
            await self._run(self._core.keep_alive(lease, every))
        except Exception:
            log.exception("The heartbeats of %r (lease %s) ended.", lease.key, lease.lease_id)
            if lease.term is not None:
                lease.term.lose("its heartbeats ended with an error")
        if on_lost is not None:
            try:
                lease.check()
            except LockLostError as lost:
                on_lost(lease, lost)

    async def keep(self, lease: Lease, *, interval: Seconds) -> Ending | Lost:
        """Send heartbeats for those who work under the lease elsewhere, until it is gone or was abandoned."""
        every = limits.checked_heartbeat(seconds("interval", interval), lease.lease_ms / 1000)
        lease = lease.checked()
        return await self._run(self._core.operations.keep(lease.key, lease.lease_id, lease.lease_ms, every))

    async def until_gone(self, lease: Lease, *, poll_interval: Seconds = 1.0) -> None:
        """Wait until the lease is no longer among the holders, or was abandoned.

        It looks through the shared poller, so any number of leases cost one read for each hundred keys.
        """
        lease = lease.checked()
        seen: asyncio.Queue[bool] = asyncio.Queue()
        sight = Sight(lease.key, lease.lease_id, seconds("poll_interval", poll_interval), seen.put_nowait)
        self._queue(sight)
        try:
            while not await _latest(seen):
                # The poller's reads may be older than the lease itself: ask once more, consistently.
                try:
                    record = await self.get(lease.key)
                except LockUnavailableError:
                    continue  # the poller goes on, and shows it again
                holder = record.holders.get(lease.lease_id) if record else None
                if holder is None or holder.ending:
                    return
        finally:
            self._core.watch.remove(sight)

    async def enter(self, lease: Lease, process: str) -> Lease:
        """See `LockClient.enter`."""
        return await self._run(self._core.enter(lease, process))

    # -- give back ----------------------------------------------------------------------------------------------

    async def leave(self, lease: Lease, process: str) -> Released | Renewed | Lost:
        """See `LockClient.leave`."""
        outcome = await self._run(self._core.leave(lease, process))
        self._tell_keeper(lease, outcome)
        return outcome

    async def release(self, lease: Lease) -> bool:
        """See `LockClient.release`."""
        return isinstance(await self.give_back(lease), Released)

    async def give_back(self, lease: Lease, *, patience: Seconds | None = 0) -> Released | Abandoned | Lost:
        """See `LockClient.give_back`."""
        outcome = await self._run(self._core.give_back(lease, patience))
        self._tell_keeper(lease, outcome)
        return outcome

    async def break_lock(self, key: str, lease_id: str) -> Holder:
        """See `LockClient.break_lock`."""
        return await self._run(self._core.break_lock(key, lease_id))

    # -- look ---------------------------------------------------------------------------------------------------

    async def get(self, key: str) -> LockRecord | None:
        """See `LockClient.get`."""
        return await self._run(self._core.operations.get(limits.checked_key(key)))

    async def look(self, key: str, *, slots: int = 1) -> tuple[LockRecord | None, bool]:
        """See `LockClient.look`."""
        limits.checked_slots(slots, slots)
        return await self._run(self._core.operations.room(limits.checked_key(key), slots))

    async def list(self) -> AsyncIterator[LockRecord]:
        """See `LockClient.list`; to be used with ``async for``."""
        cursor: Mapping[str, Any] | None = None
        while True:
            records, cursor = await self._run(self._core.operations.page(cursor))
            for record in records:
                yield record
            if not cursor:
                return

    # -- how operations are carried out -------------------------------------------------------------------------

    async def _run(
        self, operation: Operation[T], sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> T:
        place: Ticket | None = None
        woken: asyncio.Queue[Exception | None] = asyncio.Queue()
        answer: Any = None
        failure: BaseException | None = None
        try:
            while True:
                try:
                    effect = operation.send(answer) if failure is None else operation.throw(failure)
                except StopIteration as end:
                    result: T = end.value
                    return result
                answer = failure = None
                try:
                    match effect:
                        case Request():
                            answer = await self._send(effect)
                        case Sleep():
                            await sleep(effect.seconds)
                            answer = monotonic()
                        case WaitForRoom():
                            if place is None:
                                # Kept until the operation ends, so that a waiter keeps its turn while it tries.
                                place = Ticket(effect, woken.put_nowait)
                                self._queue(place)
                            await _woken(woken, effect.seconds)
                            answer = monotonic()
                except BaseException as raised:
                    failure = raised
        finally:
            if place is not None:
                self._core.watch.remove(place)

    async def _send(self, request: Request) -> Reply:
        sent_at = monotonic()
        try:
            call = getattr(self._client, xform_name(request.action))(**request.params)
            answer = reply(await asyncio.wait_for(call, request.within), sent_at)
        except TimeoutError:
            raise not_answered(request) from None
        except Exception as failure:
            answer = answer_to(failure, request, sent_at)
        self._core.clock.note(answer)
        return answer

    def _queue(self, place: Ticket | Sight) -> None:
        if self._core.watch.add(place):
            self._hurry.set()
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll(), name="dynamo-lock poller")

    async def _poll(self) -> None:
        async def doze(seconds: float) -> None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), seconds)
            self._hurry.clear()

        try:
            await self._run(self._core.watch.poll(random.random), doze)
        except Exception as broken:
            log.exception("The poller ended.")
            self._core.watch.fail(broken)

    def _tell_keeper(self, lease: Lease, outcome: Released | Abandoned | Renewed | Lost) -> None:
        if not isinstance(outcome, Renewed):
            self._core.watch.ended(lease.key, lease.lease_id)


async def _latest(seen: asyncio.Queue[bool]) -> bool:
    certain = await seen.get()
    while not seen.empty():
        certain |= seen.get_nowait()
    return certain


async def _woken(woken: asyncio.Queue[Exception | None], within: float | None) -> None:
    try:
        failures = [await asyncio.wait_for(woken.get(), within)]
    except TimeoutError:
        return
    while not woken.empty():
        failures.append(woken.get_nowait())
    for failure in filter(None, failures):
        raise failure
