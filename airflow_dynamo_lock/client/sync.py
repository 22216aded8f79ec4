"""`LockClient`: the lock on boto3, with threads."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from botocore import xform_name

from airflow_dynamo_lock.client.core import ClaimOptions, ClientCore, OnLost
from airflow_dynamo_lock.client.wire import answer_to, monotonic, not_answered, reply
from airflow_dynamo_lock.protocol import limits, table
from airflow_dynamo_lock.protocol.effects import Operation, Reply, Request, Sleep, T, WaitForRoom
from airflow_dynamo_lock.protocol.errors import LockError, LockLostError
from airflow_dynamo_lock.protocol.limits import Seconds, seconds
from airflow_dynamo_lock.protocol.model import Abandoned, Holder, Lease, LockRecord, Lost, Released, Renewed
from airflow_dynamo_lock.protocol.staleness import MAX_CLOCK_SKEW
from airflow_dynamo_lock.protocol.watch import Ticket

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger("airflow_dynamo_lock")


class LockClient:
    """Locks in one DynamoDB table. Safe to share between threads.

    :param client: a boto3 DynamoDB client; make it with ``config=sdk_config()`` (`client.wire`), so that a dead network
        is noticed within seconds.
    :param table: the lock table's name.
    :param owner: who holds, for people to read. Default ``host:pid``.
    :param lease: how long a lease lasts after its last heartbeat, seconds.
    :param heartbeat: seconds between background heartbeats. Default a sixth of the lease.
    :param release_grace: how long a lease still lasts when it was given back while processes were inside, seconds.
    :param max_clock_skew: by how much the clocks of two DynamoDB servers may differ, seconds (rule R3).
    :raises LockValueError: an argument that can never work.

    Every method may raise `LockUnavailableError` (network, throttling), `LockAccessError` (permissions, credentials)
    and `LockTableError` (no such table, other keys, a damaged record).
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
        self._poller = _Poller(self)

    @property
    def region_name(self) -> str | None:
        """The AWS region that its SDK client talks to."""
        region: str | None = self._client.meta.region_name
        return region

    # -- the table ----------------------------------------------------------------------------------------------

    def create_table(self, *, timeout: Seconds = 60.0) -> None:
        """Make the lock table (on-demand, TTL on) and wait until it is active. One that exists is checked instead."""
        self._run(table.create(self._core.table, now=monotonic(), timeout=seconds("timeout", timeout)))

    def check_table(self) -> None:
        """Make sure that the table exists and can hold locks.

        :raises LockTableError: it cannot; the message says what is expected and what was found.
        """
        self._run(table.check(self._core.table))

    def describe_table(self) -> Mapping[str, Any]:
        """What DynamoDB's ``DescribeTable`` says of the table."""
        return self._run(table.describe(self._core.table))

    # -- take ---------------------------------------------------------------------------------------------------

    def try_acquire(self, key: str, **claim: Unpack[ClaimOptions]) -> Lease | None:
        """Take the lock if it is free or its holder is dead; None if it is taken. One request where it is free.

        No heartbeats are sent for the lease: see `renew`, `keep_alive` and `lock`.

        :raises CapacityMismatchError: it is in use with another capacity.
        """
        return self._run(self._core.try_acquire(key, claim))

    def acquire(
        self,
        key: str,
        *,
        timeout: Seconds | None = None,
        poll_interval: Seconds = 1.0,
        on_busy: Callable[[LockRecord], None] | None = None,
        **claim: Unpack[ClaimOptions],
    ) -> Lease:
        """Wait until the lock is free or its holder is dead, and take it.

        :param timeout: seconds to wait at most; 0 tries once, None waits without end.
        :param poll_interval: seconds between looks at the table; all waiters of this client share them.
        :param on_busy: called with the record each time that a try found the lock taken.
        :raises LockTimeoutError: it was not free in time; the message names the holders.
        """
        return self._run(self._core.acquire(key, timeout, poll_interval, on_busy, claim))

    def wait(
        self, key: str, *, slots: int = 1, timeout: Seconds | None = None, poll_interval: Seconds = 1.0
    ) -> LockRecord | None:
        """Wait until so many slots could be taken, without taking them. Returns the lock as it is then, None if it has
        never been used.

        :raises LockTimeoutError: they were not free in time.
        """
        return self._run(self._core.wait(key, slots, timeout, poll_interval))

    @contextmanager
    def lock(
        self,
        key: str,
        *,
        timeout: Seconds | None = None,
        poll_interval: Seconds = 1.0,
        on_lost: OnLost | None = None,
        **claim: Unpack[ClaimOptions],
    ) -> Iterator[Lease]:
        """Hold the lock for the length of a ``with`` block, with heartbeats in the background.

        An exception raised in the block comes out of it unchanged.

        :raises LockTimeoutError: it was not free in time.
        :raises LockLostError: when the block ends: the lease was lost while it ran, so that its work may have
            overlapped with a successor's. Call ``lease.check()`` in the block to learn of it sooner.
        """
        lease = self.acquire(key, timeout=timeout, poll_interval=poll_interval, **claim)
        beats = self.keep_alive(lease, on_lost=on_lost)
        try:
            yield lease
            lease.check()
        except BaseException:
            beats.stop()
            try:
                self.give_back(lease)
            except LockError as failure:
                log.warning(
                    "Could not release %r (lease %s), it will run out: %s", key, lease.lease_id, failure
                )
            raise
        beats.stop()
        if isinstance(outcome := self.give_back(lease), Lost):
            raise LockLostError(
                f"The lock {key!r} (lease {lease.lease_id}) was lost while it was in use: {outcome.describe()}."
            )

    # -- keep ---------------------------------------------------------------------------------------------------

    def renew(self, lease: Lease) -> Lease:
        """Send one heartbeat.

        :raises LockLostError: the lease is no longer among the holders, or is too old by our own clock.
        """
        return self._run(self._core.renew(lease))

    def keep_alive(
        self, lease: Lease, *, interval: Seconds | None = None, on_lost: OnLost | None = None
    ) -> KeepAlive:
        """Send heartbeats from a thread of the lease's own until `KeepAlive.stop` is called or the lease is lost.

        :param interval: seconds between heartbeats. Default the client's.
        :param on_lost: called once, from that thread, when the lease is lost.
        """
        every = self._core.interval(lease) if interval is None else seconds("interval", interval)
        limits.checked_heartbeat(every, lease.lease_ms / 1000)
        return KeepAlive(self, self._core.with_term(lease), every, on_lost)

    def enter(self, lease: Lease, process: str) -> Lease:
        """Note in the record that a process works under the lease (rule R8), and beat. Returns the lease as that
        process may count on it: for the release grace at most, renewed by `keep_alive`.

        :raises LockLostError: the lease is lost or is being given back; the process must not start.
        """
        return self._run(self._core.enter(lease, process))

    # -- give back ----------------------------------------------------------------------------------------------

    def leave(self, lease: Lease, process: str) -> Released | Renewed | Lost:
        """Note in the record that a process has ended. The last one to leave an abandoned lease releases it."""
        return self._run(self._core.leave(lease, process))

    def release(self, lease: Lease) -> bool:
        """Give the lock back. True if that freed it; False if it was not ours any more, or processes are inside."""
        return isinstance(self.give_back(lease), Released)

    def give_back(self, lease: Lease, *, patience: Seconds | None = 0) -> Released | Abandoned | Lost:
        """`release`, telling what became of it.

        :param patience: for how many seconds to try again while DynamoDB cannot be reached, or access is denied (then
            no longer than a lease); None tries without end.
        """
        return self._run(self._core.give_back(lease, patience))

    def break_lock(self, key: str, lease_id: str) -> Holder:
        """Take a lease away from whoever holds it: for people who know that its work must not go on, or does not.
        Until the holder notices (at its next heartbeat) its work and a successor's may overlap.

        :returns: the holder as it was.
        :raises LockNotHeldError: that lease is not among the holders.
        """
        return self._run(self._core.break_lock(key, lease_id))

    # -- look ---------------------------------------------------------------------------------------------------

    def get(self, key: str) -> LockRecord | None:
        """The lock as it is now, None if it has never been used or is long forgotten."""
        return self._run(self._core.operations.get(limits.checked_key(key)))

    def look(self, key: str, *, slots: int = 1) -> tuple[LockRecord | None, bool]:
        """The lock as it is now, and whether so many slots could be taken from it: free, or held by the dead."""
        limits.checked_slots(slots, slots)
        return self._run(self._core.operations.room(limits.checked_key(key), slots))

    def list(self) -> Iterator[LockRecord]:
        """All locks of the table, held and free. Reads the whole table."""
        cursor: Mapping[str, Any] | None = None
        while True:
            records, cursor = self._run(self._core.operations.page(cursor))
            yield from records
            if not cursor:
                return

    # -- how operations are carried out -------------------------------------------------------------------------

    def _run(self, operation: Operation[T], sleep: Callable[[float], None] = time.sleep) -> T:
        place: _Place | None = None
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
                            answer = self._send(effect)
                        case Sleep():
                            sleep(effect.seconds)
                            answer = monotonic()
                        case WaitForRoom():
                            # Kept until the operation ends, so that a waiter keeps its turn while it tries.
                            place = place or self._poller.queue(effect)
                            place.wait(effect.seconds)
                            answer = monotonic()
                except BaseException as raised:
                    failure = raised
        finally:
            if place is not None:
                place.give_up()

    def _send(self, request: Request) -> Reply:
        if request.within is None:
            return self._call(request)
        # The SDK cannot be told to hurry, so the call goes on in a thread that nobody waits for any longer.
        answers: SimpleQueue[Reply | BaseException] = SimpleQueue()

        def call() -> None:
            try:
                answers.put(self._call(request))
            except BaseException as failure:
                answers.put(failure)

        threading.Thread(target=call, name=f"dynamo-lock {request.action}", daemon=True).start()
        try:
            answer = answers.get(timeout=request.within)
        except Empty:
            raise not_answered(request) from None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _call(self, request: Request) -> Reply:
        sent_at = monotonic()
        try:
            answer = reply(getattr(self._client, xform_name(request.action))(**request.params), sent_at)
        except Exception as failure:
            answer = answer_to(failure, request, sent_at)
        self._core.clock.note(answer)
        return answer


class KeepAlive:
    """Background heartbeats of one lease. `LockClient.keep_alive` makes it; `stop` it, or leave its ``with`` block."""

    def __init__(self, client: LockClient, lease: Lease, interval: float, on_lost: OnLost | None) -> None:
        self.lease = lease
        self._client = client
        self._interval = interval
        self._on_lost = on_lost
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._beat, name=f"dynamo-lock heartbeat {lease.key}", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> KeepAlive:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Send no further heartbeat. One that is on its way may still arrive; it changes nothing after a release."""
        self._stopped.set()

    def _beat(self) -> None:
        def sleep(seconds: float) -> None:
            if self._stopped.wait(seconds):
                raise _Stopped

        try:
            self._client._run(self._client._core.keep_alive(self.lease, self._interval), sleep)
        except _Stopped:
            return
        except Exception:
            log.exception("The heartbeats of %r (lease %s) ended.", self.lease.key, self.lease.lease_id)
            if self.lease.term is not None:
                self.lease.term.lose("its heartbeats ended with an error")
        if self._stopped.is_set() or self._on_lost is None:
            return
        try:
            self.lease.check()
        except LockLostError as lost:
            self._on_lost(self.lease, lost)


class _Stopped(Exception):
    pass


class _Poller:
    """The thread that looks at the table for all waiters of one client (rule R11). It lives while there are any."""

    def __init__(self, client: LockClient) -> None:
        self._client = client
        self._watch = client._core.watch
        self._lock = threading.Lock()
        self._hurry = threading.Event()
        self._thread: threading.Thread | None = None

    def queue(self, wants: WaitForRoom) -> _Place:
        woken: SimpleQueue[Exception | None] = SimpleQueue()
        ticket = Ticket(wants, woken.put)
        with self._lock:
            if self._watch.add(ticket):
                self._hurry.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._poll, name="dynamo-lock poller", daemon=True)
                self._thread.start()
        return _Place(self, ticket, woken)

    def leave(self, ticket: Ticket) -> None:
        with self._lock:
            self._watch.remove(ticket)

    def _poll(self) -> None:
        operation = self._watch.poll(random.random)
        answer: Any = None
        failure: Exception | None = None
        while True:
            # The waiters' list is looked at and changed under the lock, the table is not.
            with self._lock:
                try:
                    effect = operation.send(answer) if failure is None else operation.throw(failure)
                except StopIteration:
                    self._thread = None
                    return
                except Exception as broken:
                    log.exception("The poller ended.")
                    self._thread = None
                    self._watch.fail(broken)
                    return
            answer = failure = None
            try:
                match effect:
                    case Sleep():
                        self._hurry.wait(effect.seconds)
                        self._hurry.clear()
                    case Request():
                        answer = self._client._send(effect)
            except Exception as raised:
                failure = raised


class _Place:
    """One waiter's place in the poller's queue."""

    def __init__(self, poller: _Poller, ticket: Ticket, woken: SimpleQueue[Exception | None]) -> None:
        self._poller, self._ticket, self._woken = poller, ticket, woken

    def wait(self, timeout: float | None) -> None:
        try:
            failures = [self._woken.get(timeout=timeout)]
        except Empty:
            return
        while not self._woken.empty():
            failures.append(self._woken.get())
        for failure in filter(None, failures):
            raise failure

    def give_up(self) -> None:
        self._poller.leave(self._ticket)
