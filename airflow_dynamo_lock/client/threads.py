"""Runs operations on threads: the driver loop, the poller's threads, heartbeat threads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from queue import Empty, SimpleQueue
from typing import Any, assert_never
from weakref import WeakSet

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
from airflow_dynamo_lock.client.sdk_methods import method_of
from airflow_dynamo_lock.client.session import ClientCore, in_same_process
from airflow_dynamo_lock.core.effects import Callback, Operation, Reply, Request, Sleep, T, WaitForSlots
from airflow_dynamo_lock.core.foreign.registry import NATIVE
from airflow_dynamo_lock.core.liveness import MAX_CLOCK_SKEW
from airflow_dynamo_lock.core.model import arguments
from airflow_dynamo_lock.core.model.arguments import Seconds
from airflow_dynamo_lock.core.model.lease import Lease, LeaseSet
from airflow_dynamo_lock.core.model.limits import RELEASE_GRACE
from airflow_dynamo_lock.core.model.outcomes import Draining, Lost, Released, Renewed, StillHeld
from airflow_dynamo_lock.core.wait.poller import WaiterHandle
from airflow_dynamo_lock.core.wait.stream import STREAM_ACTIONS
from airflow_dynamo_lock.log import log

_NO_LOCK: AbstractContextManager[object] = nullcontext()


class ThreadRuntime:
    """Carries the effects of operations out, for one client and all threads that use it."""

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
        self._heartbeats: set[KeepAlive] = set()
        self._start()
        _clients.add(self)

    def _start(self) -> None:
        self._poller = _Poller(self)
        self._maintainer = _QueueMaintainer(self)

    def release(
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
    ) -> KeepAlive:
        """Send heartbeats from a thread of the lease's own, until they are stopped or the lease is lost.

        :param lease: a lease, or a set of leases, valid in this process: renew one from an XCom first.
        :param interval: seconds between heartbeats. Default the client's.
        :param on_lost: called with the lease and the `LockLostError`, once per lost lease, from that thread.
        :param on_danger: called with the lease and the remaining seconds each time that less than `safe_time` remains.
            Heartbeats are retried; the danger is over when one succeeds. An exception that a callback raises is logged.
        :param safe_time: remaining time below which the lease is in danger, in seconds. Default a third of the lease.
        :returns: the heartbeats; `KeepAlive.stop` ends them, and so does leaving its ``with`` block.
        """
        arguments.checked_callbacks(on_lost=on_lost, on_danger=on_danger)
        lease = self._core.with_term(lease)
        safe = self._core.safe_time(lease, safe_time)
        return KeepAlive(self, lease, self._core.interval(lease, interval), on_lost, on_danger, safe)

    def _start_in_fork(self) -> None:
        """Start anew in a fork: the threads, and the leases that they work for, stay with the parent process."""
        for heartbeats in self._heartbeats:
            heartbeats.forget()
        self._heartbeats.clear()
        self._core.start()
        self._start()
        for client in filter(None, (self._client, self._streams)):
            client.close()  # its sockets belong to the parent; the SDK opens new ones with the next request

    def _release_at_block_end(self, lease: Lease | LeaseSet) -> Released | Draining | StillHeld | Lost:
        return self.release(lease)

    def _stop_heartbeats(self) -> list[Lease | LeaseSet]:
        """Stop all heartbeats. Returns their leases, without those of a parent process."""
        leases = [
            heartbeats.lease for heartbeats in list(self._heartbeats) if not is_inherited(heartbeats.lease)
        ]
        for heartbeats in list(self._heartbeats):
            heartbeats.stop()
        return leases

    def _maintain_queue_entries(self) -> None:
        self._maintainer.maintain()

    def _notify_end(
        self, lease: Lease | LeaseSet, outcome: Released | Draining | StillHeld | Renewed | Lost
    ) -> None:
        if not isinstance(outcome, (Renewed, StillHeld)):
            for each in leases_of(lease):
                self._poller.ended(each)

    def _run(
        self,
        operation: Operation[T],
        sleep: Callable[[float, float], None] | None = None,
        step_lock: AbstractContextManager[object] = _NO_LOCK,
    ) -> T:
        """Run an operation: carry out each of its effects, and send the answer in.

        :param sleep: carries out `Sleep`; given its seconds, and a time from before they were computed.
        :param step_lock: held while the operation computes its next effect, not while an effect is carried out.
        """
        operation = self._core.format.carry_out(operation)
        process = os.getpid()
        waiter: _Waiter | None = None
        answer: Any = None
        failure: BaseException | None = None
        try:
            while True:
                # A wait counts from here: the process may be stopped while the operation computes its length.
                resumed = answer.received_at if isinstance(answer, Reply) else monotonic()
                with step_lock:
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
                            answer = self._send(effect, resumed)
                        case Sleep():
                            if sleep is None:
                                time.sleep(effect.seconds)
                            else:
                                sleep(effect.seconds, resumed)
                            answer = monotonic()
                        case Callback():
                            effect.call()
                        case WaitForSlots():
                            # Kept until the operation ends, so that the waiter keeps its turn during attempts.
                            if waiter is not None and not waiter.handle.is_for(effect):
                                waiter.remove()
                                waiter = None
                            waiter = waiter or self._poller.add_waiter(effect)
                            self._maintainer.maintain()
                            waiter.wait(effect.seconds)
                            answer = monotonic()
                        case _:
                            assert_never(effect)
                except BaseException as raised:
                    failure = raised
        finally:
            if waiter is not None and os.getpid() == process:
                waiter.remove()

    def _send(self, request: Request, since: float | None = None) -> Reply:
        if request.within is None:
            return self._call(request)
        # An SDK call cannot be cancelled, so it continues in a thread of its own.
        answers: SimpleQueue[Reply | BaseException] = SimpleQueue()

        def call() -> None:
            try:
                answers.put(self._call(request))
            except BaseException as failure:
                answers.put(failure)

        threading.Thread(target=call, name=f"dynamo-lock {request.action}", daemon=True).start()
        for piece in pieces(request.within, since):
            with suppress(Empty):
                answer = answers.get(timeout=piece)
                break
        else:
            raise not_answered(request)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _call(self, request: Request) -> Reply:
        sent_at = monotonic()
        streams = request.action in STREAM_ACTIONS
        client = self._streams if streams else self._client
        send = method_of(client, request)
        try:
            output = send(**request.params)
            if "Body" in output:  # an object's
                output["Body"] = output["Body"].read()
            answer = reply(output, sent_at)
        except Exception as failure:
            answer = answer_to(failure, request, sent_at)
        if not streams:  # another service, with another clock
            self._core.clock.note(answer)
        return answer


class KeepAlive:
    """Background heartbeats of one lease, from `LockClient.keep_alive`: `stop` them, or leave the ``with`` block."""

    def __init__(
        self,
        client: ThreadRuntime,
        lease: Lease | LeaseSet,
        interval: float,
        on_lost: OnLost | None,
        on_danger: OnDanger | None,
        safe_time: float,
    ) -> None:
        self.lease = lease
        self._client = client
        self._interval = interval
        self._on_lost = on_lost
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._send_heartbeats, name=f"dynamo-lock heartbeat {name_of(lease)}", daemon=True
        )
        client._heartbeats.add(self)
        self._thread.start()
        if on_danger is not None:
            # In a thread of its own, because the other one may wait for the answer to a heartbeat.
            threading.Thread(
                target=self._watch,
                args=(safe_time, on_danger),
                name=f"dynamo-lock monitor {name_of(lease)}",
                daemon=True,
            ).start()

    def __enter__(self) -> KeepAlive:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Send no further heartbeats. One that was sent may still arrive; after a release it changes nothing."""
        self._stopped.set()
        self._client._heartbeats.discard(self)

    def forget(self) -> None:
        """Stop in a fork, where the thread does not exist and may have left the event locked."""
        self._stopped = threading.Event()
        self._stopped.set()

    def _sleep(self, seconds: float, since: float) -> None:
        for piece in pieces(seconds, since):
            if self._stopped.wait(piece):
                raise _Stopped

    def _watch(self, safe_time: float, on_danger: OnDanger) -> None:
        with suppress(_Stopped):
            self._client._run(monitor(self.lease, safe_time, on_danger), self._sleep)

    def _send_heartbeats(self) -> None:
        try:
            self._client._run(self._client._core.keep_alive(self.lease, self._interval), self._sleep)
        except _Stopped:
            return
        except Exception:
            log.exception("The heartbeats of %s ended.", name_of(self.lease))
            end_by_error(self.lease)
        self._client._heartbeats.discard(self)
        if self._on_lost is not None and not self._stopped.is_set():
            report_loss(self.lease, self._on_lost)


class _Stopped(Exception):
    """Ends the operation of a thread whose heartbeats were stopped."""


class _QueueMaintainer:
    """The thread that maintains this client's queue entries. It runs while there are any."""

    def __init__(self, client: ThreadRuntime) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def maintain(self) -> None:
        """Start the thread if it is needed and does not run."""
        with self._lock:
            if self._client._core.queue and self._thread is None:
                self._thread = threading.Thread(
                    target=self._maintain, name="dynamo-lock queue entries", daemon=True
                )
                self._thread.start()

    def _maintain(self) -> None:
        core = self._client._core
        while True:
            try:
                self._client._run(core.presence.maintain())
            except Exception:
                log.exception("The maintenance of queue entries failed, trying again.")
            with self._lock:
                if not core.queue:
                    self._thread = None
                    return


class _Poller:
    """The threads that read the table and its stream for all waiters of one client (R11). They run while there are
    waiters."""

    def __init__(self, client: ThreadRuntime) -> None:
        self._client = client
        self._poller = client._core.poller
        # Held while the poller's waiters are read or changed.
        self._lock = threading.Lock()
        self._wake_up = threading.Event()
        self._poller.wake_up = self._wake_up.set
        self._running: set[str] = set()

    def add_waiter(self, wants: WaitForSlots) -> _Waiter:
        """Add a waiter, and start the threads that do not run."""
        woken: SimpleQueue[Exception | None] = SimpleQueue()
        handle = WaiterHandle(wants, woken.put)
        with self._lock:
            if self._poller.add(handle):
                self._wake_up.set()
            self._start("poller", self._poller.poll, self._sleep_until_woken, self._poller.fail)
            if self._client._streams is not None:
                follow = self._client._core.stream_reader.follow
                self._start("stream reader", follow, None, lambda _: self._poller.reported_until(None))
        return _Waiter(self, handle, woken)

    def ended(self, lease: Lease) -> None:
        """Report a lease that this client has ended."""
        with self._lock:
            self._poller.ended(lease.key, lease.lease_id)

    def remove(self, handle: WaiterHandle) -> None:
        """Remove a waiter."""
        with self._lock:
            self._poller.remove(handle)

    def _sleep_until_woken(self, seconds: float, _: float) -> None:
        self._wake_up.wait(seconds)
        self._wake_up.clear()

    def _start(
        self,
        name: str,
        operation: Callable[[], Operation[None]],
        sleep: Callable[[float, float], None] | None,
        on_failure: Callable[[Exception], None],
    ) -> None:
        if name in self._running:
            return
        self._running.add(name)

        def work() -> None:
            while True:
                error: Exception | None = None
                try:
                    self._client._run(operation(), sleep, self._lock)
                except Exception as failure:
                    log.exception("The %s ended.", name)
                    error = failure
                with self._lock:
                    if error is None and self._poller:
                        continue  # a waiter was added after the operation had ended
                    self._running.discard(name)
                    if error is not None:
                        on_failure(error)
                    return

        threading.Thread(target=work, name=f"dynamo-lock {name}", daemon=True).start()


class _Waiter:
    """A waiter in the poller, and the queue by which it is woken."""

    def __init__(self, poller: _Poller, handle: WaiterHandle, woken: SimpleQueue[Exception | None]) -> None:
        self.handle = handle
        self._poller, self._woken = poller, woken

    def wait(self, timeout: float | None) -> None:
        """Wait until woken, or for `timeout` seconds. Raises the error by which the poller has woken it."""
        try:
            failures = [self._woken.get(timeout=timeout)]
        except Empty:
            return
        while not self._woken.empty():
            failures.append(self._woken.get())
        for failure in filter(None, failures):
            raise failure

    def remove(self) -> None:
        """Remove the waiter from the poller."""
        self._poller.remove(self.handle)


_clients: WeakSet[ThreadRuntime] = WeakSet()


def _start_in_fork() -> None:
    for client in list(_clients):
        try:
            client._start_in_fork()
        except Exception:
            table = client._core.table
            log.exception("Could not prepare the client of the lock table %r for use in a fork.", table)


os.register_at_fork(after_in_child=_start_in_fork)
