"""Runs operations on asyncio: the driver loop, the poller's task, heartbeat tasks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, assert_never

from airflow_dynamo_lock.client.clock import monotonic, pieces
from airflow_dynamo_lock.client.leases import (
    end_by_error,
    is_inherited,
    leases_of,
    monitor,
    name_of,
    report_loss,
)
from airflow_dynamo_lock.client.options import AnyLease, OnDanger, OnLost
from airflow_dynamo_lock.client.sdk import answer_to, not_answered, reply
from airflow_dynamo_lock.client.sdk_methods import asynchronous_method_of
from airflow_dynamo_lock.client.session import ClientCore, in_same_process
from airflow_dynamo_lock.core.effects import Callback, Operation, Reply, Request, Sleep, T, WaitForSlots
from airflow_dynamo_lock.core.foreign.registry import NATIVE
from airflow_dynamo_lock.core.liveness import MAX_CLOCK_SKEW
from airflow_dynamo_lock.core.model import arguments
from airflow_dynamo_lock.core.model.arguments import Seconds
from airflow_dynamo_lock.core.model.errors import LockError
from airflow_dynamo_lock.core.model.lease import Lease, LeaseSet
from airflow_dynamo_lock.core.model.limits import RELEASE_GRACE
from airflow_dynamo_lock.core.model.outcomes import Draining, Lost, Released, Renewed, StillHeld
from airflow_dynamo_lock.core.wait.poller import EndListener, WaiterHandle
from airflow_dynamo_lock.core.wait.stream import STREAM_ACTIONS
from airflow_dynamo_lock.log import log

# Seconds that a cancelled caller still spends on releasing its lease.
_RELEASE_WITHIN = 3.0


class AsyncRuntime:
    """Carries the effects of operations out, for one client in one event loop."""

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
        self._heartbeats: dict[asyncio.Task[None], Lease | LeaseSet] = {}
        self._poller: asyncio.Task[None] | None = None
        self._maintainer: asyncio.Task[None] | None = None
        self._stream_reader: asyncio.Task[None] | None = None
        self._wake_up = asyncio.Event()
        self._core.poller.wake_up = self._wake_up.set

    async def release(
        self, lease: Lease | LeaseSet, *, retry_for: Seconds | None = 0
    ) -> Released | Draining | StillHeld | Lost:
        """Release the lease. The client that inherits from this class implements it."""
        raise NotImplementedError

    def keep_alive(
        self,
        lease: AnyLease,
        *,
        interval: Seconds | None = None,
        on_lost: OnLost | None = None,
        on_danger: OnDanger | None = None,
        safe_time: Seconds | None = None,
    ) -> asyncio.Task[None]:
        """Send heartbeats from a task of the lease's own, until they are stopped or the lease is lost.

        :param lease: a lease, or a set of leases, valid in this process: renew one from an XCom first.
        :param interval: seconds between heartbeats. Default the client's.
        :param on_lost: called with the lease and the `LockLostError`, once per lost lease, in the event loop.
        :param on_danger: called with the lease and the remaining seconds each time that less than `safe_time` remains.
            Heartbeats are retried; the danger is over when one succeeds. An exception that a callback raises is logged.
        :param safe_time: remaining time below which the lease is in danger, in seconds. Default a third of the lease.
        :returns: the task; cancel it to stop the heartbeats.
        """
        arguments.checked_callbacks(on_lost=on_lost, on_danger=on_danger)
        lease = self._core.with_term(lease)
        every = self._core.interval(lease, interval)
        name, safe = name_of(lease), self._core.safe_time(lease, safe_time)
        heartbeats = asyncio.create_task(
            self._send_heartbeats(lease, every, on_lost), name=f"dynamo-lock heartbeat {name}"
        )
        self._heartbeats[heartbeats] = lease
        heartbeats.add_done_callback(self._heartbeats.pop)
        if on_danger is not None:
            watching = self._run(monitor(lease, safe, on_danger))
            watcher = asyncio.create_task(watching, name=f"dynamo-lock monitor {name}")
            heartbeats.add_done_callback(lambda _: watcher.cancel())
        return heartbeats

    async def _send_heartbeats(self, lease: Lease | LeaseSet, every: float, on_lost: OnLost | None) -> None:
        try:
            await self._run(self._core.keep_alive(lease, every))
        except Exception:
            log.exception("The heartbeats of %s ended.", name_of(lease))
            end_by_error(lease)
        if on_lost is not None:
            report_loss(lease, on_lost)

    async def _release_at_block_end(self, lease: Lease | LeaseSet) -> Released | Draining | StillHeld | Lost:
        """Release the lease at the end of a ``with`` block. If the task is cancelled meanwhile, try once more."""
        try:
            return await self.release(lease)
        except asyncio.CancelledError:
            with suppress(LockError, TimeoutError):
                async with asyncio.timeout(_RELEASE_WITHIN):
                    await self.release(lease)
            raise

    def _stop_heartbeats(self) -> list[Lease | LeaseSet]:
        """Stop all heartbeats. Returns their leases, without those of a parent process."""
        leases = [lease for lease in self._heartbeats.values() if not is_inherited(lease)]
        for heartbeats in list(self._heartbeats):
            heartbeats.cancel()
        return leases

    async def _run(
        self, operation: Operation[T], sleep: Callable[[float, float], Awaitable[None]] | None = None
    ) -> T:
        """Run an operation: carry out each of its effects, and send the answer in.

        :param sleep: carries out `Sleep`; given its seconds, and a time from before they were computed.
        """
        operation = self._core.format.carry_out(operation)
        process = os.getpid()
        waiter: WaiterHandle | None = None
        woken: asyncio.Queue[Exception | None] = asyncio.Queue()
        answer: Any = None
        failure: BaseException | None = None
        try:
            while True:
                # A wait counts from here: the process may be stopped while the operation computes its length.
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
                            if waiter is None or not waiter.is_for(effect):
                                if waiter is not None:
                                    self._core.poller.remove(waiter)
                                # Kept until the operation ends, so that the waiter keeps its turn during attempts.
                                waiter = WaiterHandle(effect, woken.put_nowait)
                                self._queue(waiter)
                                self._maintain_queue_entries()
                            await _woken(woken, effect.seconds)
                            answer = monotonic()
                        case _:
                            assert_never(effect)
                except BaseException as raised:
                    failure = raised
        finally:
            if waiter is not None:
                self._core.poller.remove(waiter)

    async def _send(self, request: Request, since: float | None = None) -> Reply:
        sent_at = monotonic()
        streams = request.action in STREAM_ACTIONS
        client = self._streams if streams else self._client
        send = asynchronous_method_of(client, request)
        try:
            async with _timeout(request.within, since):
                output = await send(**request.params)
                if "Body" in output:  # an object's
                    output["Body"] = await output["Body"].read()
            answer = reply(output, sent_at)
        except TimeoutError:
            raise not_answered(request) from None
        except Exception as failure:
            answer = answer_to(failure, request, sent_at)
        if not streams:  # another service, with another clock
            self._core.clock.note(answer)
        return answer

    def _queue(self, added: WaiterHandle | EndListener) -> None:
        """Add a waiter or a listener to the poller, and start the poller if it does not run."""
        if self._core.poller.add(added):
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
        except Exception as failure:
            log.exception("The poller ended.")
            self._core.poller.fail(failure)

    def _maintain_queue_entries(self) -> None:
        """Start the task that maintains this client's queue entries, if there are any."""
        if self._core.queue and (self._maintainer is None or self._maintainer.done()):
            with suppress(RuntimeError):  # its event loop has ended
                loop = asyncio.get_running_loop()
                self._maintainer = loop.create_task(self._maintain(), name="dynamo-lock queue entries")

    async def _maintain(self) -> None:
        while self._core.queue:
            try:
                await self._run(self._core.presence.maintain())
            except Exception:
                log.exception("The maintenance of queue entries failed, trying again.")

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
