"""`AsyncLockClient`: the lock on aiobotocore. The same methods as `LockClient`, as coroutines."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, overload

from botocore import xform_name

from airflow_dynamo_lock.client.clock import monotonic, pieces
from airflow_dynamo_lock.client.sdk import answer_to, not_answered, reply
from airflow_dynamo_lock.client.session import (
    AcquireOptions,
    AnyLease,
    ClaimOptions,
    ClientCore,
    HoldOptions,
    Keys,
    Mode,
    OnDanger,
    OnLost,
    end_by_error,
    in_same_process,
    is_inherited,
    leases_of,
    lost_in_use,
    name_of,
)
from airflow_dynamo_lock.core.effects import Callback, Operation, Reply, Request, Sleep, T, WaitForSlots
from airflow_dynamo_lock.core.foreign.registry import NATIVE
from airflow_dynamo_lock.core.liveness import MAX_CLOCK_SKEW
from airflow_dynamo_lock.core.model import arguments
from airflow_dynamo_lock.core.model.arguments import Seconds, seconds
from airflow_dynamo_lock.core.model.errors import (
    LockAccessError,
    LockError,
    LockLostError,
    LockRecordError,
    LockUnavailableError,
    LockValueError,
)
from airflow_dynamo_lock.core.model.lease import Lease, LeaseSet
from airflow_dynamo_lock.core.model.limits import RELEASE_GRACE
from airflow_dynamo_lock.core.model.outcomes import Draining, Lost, Released, Renewed, StillHeld
from airflow_dynamo_lock.core.model.record import Holder, LockRecord, QueuePosition, Waiter
from airflow_dynamo_lock.core.table import schema as table
from airflow_dynamo_lock.core.wait.poller import EndListener, WaiterHandle
from airflow_dynamo_lock.core.wait.stream import STREAM_ACTIONS
from airflow_dynamo_lock.log import log

if TYPE_CHECKING:
    from typing_extensions import Unpack


# What one who is cancelled while he releases still spends on it, in seconds.
_RELEASE_WITHIN = 3.0


class AsyncLockClient:
    """Locks in one DynamoDB table, for one event loop, and not for a fork of its process. Parameters, results and
    errors as in `LockClient`.

    :param client: an aiobotocore DynamoDB client.
    :param streams: an aiobotocore ``dynamodbstreams`` client, see `LockClient`.
    """

    def __init__(
        self,
        client: Any,
        *,
        table: str,
        owner: str | None = None,
        lease: Seconds = 30.0,
        heartbeat: Seconds | None = None,
        release_grace: Seconds = RELEASE_GRACE,
        max_clock_skew: Seconds = MAX_CLOCK_SKEW,
        streams: Any = None,
        table_format: str = NATIVE,
        partition_key: str | None = None,
        sort_key: str | None = None,
    ) -> None:
        self._client = client
        self._streams = streams
        self._core = ClientCore(
            table,
            owner,
            lease,
            heartbeat,
            release_grace,
            max_clock_skew,
            table_format,
            partition_key,
            sort_key,
            streams=streams is not None,
        )
        self._beating: dict[asyncio.Task[None], Lease | LeaseSet] = {}
        self._poller: asyncio.Task[None] | None = None
        self._maintainer: asyncio.Task[None] | None = None
        self._stream_reader: asyncio.Task[None] | None = None
        self._wake_up = asyncio.Event()
        self._core.poller.wake_up = self._wake_up.set

    @property
    def table(self) -> str:
        """The name of its lock table."""
        return self._core.table

    @property
    def region_name(self) -> str | None:
        """The AWS region that its SDK client talks to."""
        region: str | None = self._client.meta.region_name
        return region

    # -- the table ----------------------------------------------------------------------------------------------

    async def create_table(
        self,
        *,
        timeout: Seconds = 60.0,  # noqa: ASYNC109 - the same name as LockClient's
        streams: bool = False,
    ) -> None:
        """See `LockClient.create_table`."""
        retry_for = seconds("timeout", timeout)
        await self._run(table.create(self._core.format, now=monotonic(), timeout=retry_for, streams=streams))

    async def check_table(self) -> None:
        """See `LockClient.check_table`."""
        await self._run(table.check(self._core.format))

    async def describe_table(self) -> Mapping[str, Any]:
        """See `LockClient.describe_table`."""
        return await self._run(table.describe(self._core.table))

    # -- take ---------------------------------------------------------------------------------------------------

    @overload
    async def try_acquire(self, key: str, **claim: Unpack[ClaimOptions]) -> Lease | None: ...

    @overload
    async def try_acquire(
        self, key: list[str] | tuple[str, ...], **claim: Unpack[ClaimOptions]
    ) -> LeaseSet | None: ...

    async def try_acquire(self, key: Keys, **claim: Unpack[ClaimOptions]) -> Lease | LeaseSet | None:
        """See `LockClient.try_acquire`."""
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
        **claim: Unpack[ClaimOptions],
    ) -> Lease | LeaseSet:
        """See `LockClient.acquire`."""
        try:
            return await self._run(
                self._core.acquire(key, timeout, poll_interval, on_busy, on_position, claim)
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
        """See `LockClient.wait`."""
        return await self._run(self._core.wait(key, slots, mode, timeout, poll_interval))

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
        """See `LockClient.lock`."""
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
        lease = await self.acquire(key, **options)
        try:
            beats = self.keep_alive(lease, on_lost=on_lost, on_danger=on_danger, safe_time=safe_time)
        except LockValueError:  # what cannot be, for this lease
            await self._release_at_last(lease)
            raise
        try:
            yield lease
            lease.check()
        except BaseException:
            beats.cancel()
            try:
                await self._release_at_last(lease)
            except LockError as failure:
                log.warning("Could not release %r, it will run out: %s", key, failure)
            raise
        beats.cancel()
        if isinstance(outcome := await self._release_at_last(lease), Lost):
            raise lost_in_use(key, lease, outcome)

    async def _release_at_last(self, lease: Lease | LeaseSet) -> Released | Draining | StillHeld | Lost:
        """`release`, tried once more by one who is cancelled meanwhile: nobody else will."""
        try:
            return await self.release(lease)
        except asyncio.CancelledError:
            with suppress(LockError, TimeoutError):
                async with asyncio.timeout(_RELEASE_WITHIN):
                    await self.release(lease)
            raise

    # -- keep ---------------------------------------------------------------------------------------------------

    async def renew(
        self, lease: AnyLease, *, duration: Seconds | None = None, data: Mapping[str, Any] | None = None
    ) -> AnyLease:
        """See `LockClient.renew`."""
        return await self._run(self._core.renew(lease, duration, data))

    def keep_alive(
        self,
        lease: AnyLease,
        *,
        interval: Seconds | None = None,
        on_lost: OnLost | None = None,
        on_danger: OnDanger | None = None,
        safe_time: Seconds | None = None,
    ) -> asyncio.Task[None]:
        """Send heartbeats from a task of the lease's own, which this returns. Cancel it to stop them.

        See `LockClient.keep_alive`; the callbacks are called in the event loop.
        """
        lease = self._core.with_term(lease)
        every = self._core.interval(lease, interval)
        name, safe = name_of(lease), self._core.safe_time(lease, safe_time)
        beats = asyncio.create_task(self._renew(lease, every, on_lost), name=f"dynamo-lock heartbeat {name}")
        self._beating[beats] = lease
        beats.add_done_callback(self._beating.pop)
        if on_danger is not None:
            watching = self._run(self._core.monitor(lease, safe, on_danger))
            monitor = asyncio.create_task(watching, name=f"dynamo-lock monitor {name}")
            beats.add_done_callback(lambda _: monitor.cancel())
        return beats

    async def _renew(self, lease: Lease | LeaseSet, every: float, on_lost: OnLost | None) -> None:
        try:
            await self._run(self._core.keep_alive(lease, every))
        except Exception:
            log.exception("The heartbeats of %s ended.", name_of(lease))
            end_by_error(lease)
        if on_lost is not None:
            try:
                lease.check()
            except LockLostError as lost:
                for each in leases_of(lease):
                    on_lost(each, lost)

    async def keep(self, lease: Lease | LeaseSet, *, interval: Seconds) -> Draining | Lost:
        """Send heartbeats for those who work under the lease elsewhere, until it is gone or was abandoned. Of a set of
        leases, until all of them are."""
        return await self._run(self._core.keep(lease, interval))

    async def until_gone(self, lease: Lease, *, poll_interval: Seconds = 1.0) -> None:
        """Wait until the lease is no longer among the holders, or was abandoned.

        It looks through the shared poller, so any number of leases cost one read for each hundred keys.
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
        """Give up the place in line of an `acquire` that was cancelled. One with a lease id of its own keeps it for a
        while, since another process may go on in it: this says that none will."""
        lease_id = arguments.checked_id("A lease id", lease_id)
        key = self._core.format.checked_key(key)
        if self._core.format.has_queue:
            await self._run(self._core.queue.dequeue_attempt(key, lease_id))
            self._maintain_queue_entries()

    async def enter(self, lease: Lease, process: str) -> Lease:
        """See `LockClient.enter`."""
        return await self._run(self._core.enter(lease, process))

    # -- give back ----------------------------------------------------------------------------------------------

    async def leave(self, lease: Lease, process: str) -> Released | Renewed | Lost:
        """See `LockClient.leave`."""
        outcome = await self._run(self._core.leave(lease, process))
        self._notify_end(lease, outcome)
        return outcome

    async def release(
        self, lease: Lease | LeaseSet, *, retry_for: Seconds | None = 0
    ) -> Released | Draining | StillHeld | Lost:
        """See `LockClient.release`."""
        outcome = await self._run(self._core.release(lease, retry_for))
        self._notify_end(lease, outcome)
        return outcome

    async def close(self, *, release: bool = False) -> None:
        """See `LockClient.close`."""
        leases = [lease for lease in self._beating.values() if not is_inherited(lease)]
        for beats in list(self._beating):
            beats.cancel()
        failure: LockError | None = None
        for lease in leases if release else ():
            try:
                while isinstance(await self.release(lease), StillHeld):
                    pass
            except LockError as failed:
                failure = failure or failed  # no reason to leave the others
        if failure is not None:
            raise failure

    async def forget(self, key: str) -> bool:
        """See `LockClient.forget`."""
        return await self._run(self._core.forget(key))

    async def break_lock(self, key: str, lease_id: str) -> Holder:
        """See `LockClient.break_lock`."""
        return await self._run(self._core.break_lock(key, lease_id))

    async def set_capacity(self, key: str, capacity: int | None) -> LockRecord:
        """See `LockClient.set_capacity`."""
        return await self._run(self._core.set_capacity(key, capacity))

    # -- look ---------------------------------------------------------------------------------------------------

    async def get(self, key: str) -> LockRecord | None:
        """See `LockClient.get`."""
        return await self._run(self._core.operations.get(self._core.format.checked_key(key)))

    async def find(self, key: str, lease_id: str) -> Lease:
        """See `LockClient.find`."""
        return await self._run(self._core.find(key, lease_id))

    async def look(
        self, key: str, *, slots: int = 1, mode: Mode = "exclusive"
    ) -> tuple[LockRecord | None, bool]:
        """See `LockClient.look`."""
        return await self._run(self._core.look(key, slots, mode))

    async def waiters(self, key: str) -> list[Waiter]:
        """See `LockClient.waiters`."""
        return await self._run(self._core.queue.reader.waiters(self._core.format.checked_key(key)))

    async def list_locks(
        self, prefix: str = "", *, on_damaged: Callable[[LockRecordError], None] | None = None
    ) -> AsyncIterator[LockRecord]:
        """See `LockClient.list_locks`; to be used with ``async for``."""
        arguments.checked_text("The prefix", prefix)
        cursor: Mapping[str, Any] | None = None
        while True:
            records, cursor = await self._run(self._core.operations.page(cursor, prefix, on_damaged))
            for record in records:
                yield record
            if not cursor:
                return

    # -- how operations are carried out -------------------------------------------------------------------------

    async def _run(
        self, operation: Operation[T], sleep: Callable[[float, float], Awaitable[None]] | None = None
    ) -> T:
        operation = self._core.format.carry_out(operation)
        process = os.getpid()
        place: WaiterHandle | None = None
        woken: asyncio.Queue[Exception | None] = asyncio.Queue()
        answer: Any = None
        failure: BaseException | None = None
        try:
            while True:
                # A moment from before the operation computes how long to wait.
                resumed = answer.received_at if isinstance(answer, Reply) else monotonic()
                try:
                    effect = operation.send(answer) if failure is None else operation.throw(failure)
                except StopIteration as end:
                    result: T = end.value
                    return result
                answer = failure = None
                try:
                    in_same_process(process)
                    match effect:
                        case Request():
                            answer = await self._send(effect, resumed)
                        case Sleep():
                            await (sleep or _sleep)(effect.seconds, resumed)
                            answer = monotonic()
                        case Callback():
                            effect.call()
                        case WaitForSlots():
                            if place is None or not place.is_for(effect):
                                if place is not None:
                                    self._core.poller.remove(place)
                                # Kept until the operation ends, so that a waiter keeps its turn while it tries.
                                place = WaiterHandle(effect, woken.put_nowait)
                                self._queue(place)
                                self._maintain_queue_entries()
                            await _woken(woken, effect.seconds)
                            answer = monotonic()
                except BaseException as raised:
                    failure = raised
        finally:
            if place is not None:
                self._core.poller.remove(place)

    async def _send(self, request: Request, since: float | None = None) -> Reply:
        sent_at = monotonic()
        streams = request.action in STREAM_ACTIONS
        client = self._streams if streams else self._client
        try:
            async with _timeout(request.within, since):
                output = await getattr(client, xform_name(request.action))(**request.params)
                if "Body" in output:  # an object's
                    output["Body"] = await output["Body"].read()
            answer = reply(output, sent_at)
        except TimeoutError:
            raise not_answered(request) from None
        except Exception as failure:
            answer = answer_to(failure, request, sent_at)
        if not streams:  # it is another service: its clock is nobody's
            self._core.clock.note(answer)
        return answer

    def _queue(self, place: WaiterHandle | EndListener) -> None:
        if self._core.poller.add(place):
            self._wake_up.set()
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll(), name="dynamo-lock poller")
        if self._streams is not None and (self._stream_reader is None or self._stream_reader.done()):
            self._stream_reader = asyncio.create_task(
                self._run(self._core.stream_reader.follow()), name="dynamo-lock stream reader"
            )

    async def _poll(self) -> None:
        async def sleep_until_woken(seconds: float, _: float) -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._wake_up.wait()
            self._wake_up.clear()

        try:
            await self._run(self._core.poller.poll(), sleep_until_woken)
        except Exception as broken:
            log.exception("The poller ended.")
            self._core.poller.fail(broken)

    def _maintain_queue_entries(self) -> None:
        """See to it that somebody looks after this client's places in line, if it has any."""
        if self._core.queue and (self._maintainer is None or self._maintainer.done()):
            with suppress(RuntimeError):  # its event loop has ended
                loop = asyncio.get_running_loop()
                self._maintainer = loop.create_task(self._maintain(), name="dynamo-lock places")

    async def _maintain(self) -> None:
        while self._core.queue:
            try:
                await self._run(self._core.presence.maintain())
            except Exception:
                log.exception("Could not look after the places in line, trying again.")

    def _notify_end(
        self, lease: Lease | LeaseSet, outcome: Released | Draining | StillHeld | Renewed | Lost
    ) -> None:
        if not isinstance(outcome, (Renewed, StillHeld)):
            for each in leases_of(lease):
                self._core.poller.ended(each.key, each.lease_id)


async def _sleep(seconds: float, since: float) -> None:
    for piece in pieces(seconds, since):
        await asyncio.sleep(piece)


@asynccontextmanager
async def _timeout(seconds: float | None, since: float | None) -> AsyncIterator[None]:
    """`asyncio.timeout` that counts the time for which the machine is suspended (see `clock.pieces`)."""
    if seconds is None:
        yield
        return
    loop, waits = asyncio.get_running_loop(), pieces(seconds, since)
    waiting: asyncio.TimerHandle
    async with asyncio.timeout(None) as timeout:

        def wait() -> None:
            nonlocal waiting
            if (piece := next(waits, None)) is None:
                timeout.reschedule(loop.time())
            else:
                waiting = loop.call_later(piece, wait)

        waiting = loop.call_later(next(waits), wait)
        try:
            yield
        finally:
            waiting.cancel()


async def _latest(seen: asyncio.Queue[bool]) -> bool:
    certain = await seen.get()
    while not seen.empty():
        certain |= seen.get_nowait()
    return certain


async def _woken(woken: asyncio.Queue[Exception | None], within: float | None) -> None:
    try:
        async with asyncio.timeout(within):
            failures = [await woken.get()]
    except TimeoutError:
        return
    while not woken.empty():
        failures.append(woken.get_nowait())
    for failure in filter(None, failures):
        raise failure
