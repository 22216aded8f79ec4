"""`LockClient`: the lock on boto3, with threads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, overload
from weakref import WeakSet

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
from airflow_dynamo_lock.core.model.errors import LockError, LockLostError, LockRecordError, LockValueError
from airflow_dynamo_lock.core.model.lease import Lease, LeaseSet
from airflow_dynamo_lock.core.model.limits import RELEASE_GRACE
from airflow_dynamo_lock.core.model.outcomes import Draining, Lost, Released, Renewed, StillHeld
from airflow_dynamo_lock.core.model.record import Holder, LockRecord, QueuePosition, Waiter
from airflow_dynamo_lock.core.table import schema as table
from airflow_dynamo_lock.core.wait.poller import WaiterHandle
from airflow_dynamo_lock.core.wait.stream import STREAM_ACTIONS
from airflow_dynamo_lock.log import log

if TYPE_CHECKING:
    from typing_extensions import Unpack


class LockClient:
    """Locks in one DynamoDB table. Safe to share between threads, and to use on both sides of a fork: the fork holds
    nothing, and releases nothing for its parent.

    :param client: a boto3 DynamoDB client; make it with ``config=sdk_config()`` (`client.wire`), so that a dead network
        is noticed within seconds.
    :param table: the lock table's name.
    :param owner: who holds, for people to read. Default ``host:pid``.
    :param lease: how long a lease lasts after its last heartbeat, seconds.
    :param heartbeat: seconds between background heartbeats. Default a sixth of the lease.
    :param release_grace: how long a lease still lasts when it was given back while processes were inside, seconds.
    :param max_clock_skew: by how much the clocks of two DynamoDB servers may differ, seconds (rule R3).
    :param table_format: the table's: ``native``, or that of another lock library, with whose clients the locks are then
        shared (docs/formats.md). With ``s3``, `client` is one for S3, and `table` a bucket.
    :param partition_key: how a foreign table names that key, if not as its library does.
    :param sort_key: the same.
    :param streams: a boto3 ``dynamodbstreams`` client: with it, those who wait learn of a release from the table's
        stream, as long as there is one that can be read, and not from their next look at the table. For two processes
        on a table; more throttle each other.
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
        self._beating: set[KeepAlive] = set()
        self._start()
        _clients.add(self)

    def _start(self) -> None:
        self._poller = _Poller(self)
        self._maintainer = _QueueMaintainer(self)

    def _start_in_fork(self) -> None:
        """Have nothing in common with the parent process: it has the threads, and what they do is for its leases."""
        for beats in self._beating:
            beats.forget()
        self._beating.clear()
        self._core.start()
        self._start()
        for client in filter(None, (self._client, self._streams)):
            client.close()  # the copies of its connections

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

    def create_table(self, *, timeout: Seconds = 60.0, streams: bool = False) -> None:
        """Make the lock table (on-demand, TTL on) and wait until it is active. One that exists is checked instead.

        :param streams: with a stream of its changes, for clients with `streams`.
        """
        retry_for = seconds("timeout", timeout)
        self._run(table.create(self._core.format, now=monotonic(), timeout=retry_for, streams=streams))

    def check_table(self) -> None:
        """Make sure that the table exists and can hold locks.

        :raises LockTableError: it cannot; the message says what is expected and what was found.
        """
        self._run(table.check(self._core.format))

    def describe_table(self) -> Mapping[str, Any]:
        """What DynamoDB's ``DescribeTable`` says of the table."""
        return self._run(table.describe(self._core.table))

    # -- take ---------------------------------------------------------------------------------------------------

    @overload
    def try_acquire(self, key: str, **claim: Unpack[ClaimOptions]) -> Lease | None: ...

    @overload
    def try_acquire(
        self, key: list[str] | tuple[str, ...], **claim: Unpack[ClaimOptions]
    ) -> LeaseSet | None: ...

    def try_acquire(self, key: Keys, **claim: Unpack[ClaimOptions]) -> Lease | LeaseSet | None:
        """Take the lock if it is free or its holder is dead, and nobody waits for it; None if it is taken. One request
        where it is free.

        No heartbeats are sent for the lease: see `renew`, `keep_alive` and `lock`.

        :param key: the lock; or a list of up to 100 locks, which are taken together, all or none. Two requests then.
        :raises CapacityMismatchError: it is in use with another capacity, or in another mode.
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
        """Wait until the lock is free or its holder is dead, and take it; in the order in which those who wait came.

        :param key: the lock; or a list of up to 100 locks, which are taken together, all or none. Whoever waits for
            several stands in line for each of them, and those behind it in one line wait until it has got them all.
        :param timeout: seconds to wait at most; 0 tries once, None waits without end.
        :param poll_interval: seconds between looks at the table; all waiters of this client share them.
        :param on_busy: called with the record each time that a try found the lock taken.
        :param on_position: called with this waiter's position in the queue each time that it changes. When a waiter of
            another process gives up, that takes 10 s, and longer in a process that waits for more than ten locks. The
            call comes from another thread, which it must not block. An exception that it raises is logged.
        :raises LockTimeoutError: it was not free in time; the message names the holders.
        """
        try:
            return self._run(self._core.acquire(key, timeout, poll_interval, on_busy, on_position, claim))
        finally:
            self._maintainer.maintain()

    def wait(
        self,
        key: str,
        *,
        slots: int = 1,
        mode: Mode = "exclusive",
        timeout: Seconds | None = None,
        poll_interval: Seconds = 1.0,
    ) -> LockRecord | None:
        """Wait until so many slots could be taken, without taking them or standing in line. Returns the lock as it is
        then, None if it has never been used.

        :raises LockTimeoutError: they were not free in time.
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

        An exception raised in the block comes out of it unchanged.

        :raises LockTimeoutError: it was not free in time.
        :raises LockLostError: when the block ends: the lease was lost while it ran, so that its work may have
            overlapped with a successor's. Call ``lease.check()`` in the block to learn of it sooner.
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
            beats = self.keep_alive(lease, on_lost=on_lost, on_danger=on_danger, safe_time=safe_time)
        except LockValueError:  # what cannot be, for this lease
            self.release(lease)
            raise
        try:
            yield lease
            lease.check()
        except BaseException:
            beats.stop()
            try:
                self.release(lease)
            except LockError as failure:
                log.warning("Could not release %r, it will run out: %s", key, failure)
            raise
        beats.stop()
        if isinstance(outcome := self.release(lease), Lost):
            raise lost_in_use(key, lease, outcome)

    # -- keep ---------------------------------------------------------------------------------------------------

    def renew(
        self, lease: AnyLease, *, duration: Seconds | None = None, data: Mapping[str, Any] | None = None
    ) -> AnyLease:
        """Send one heartbeat, for a set of leases too.

        :param duration: how long the lease lasts from then on, after each heartbeat: longer than before, in seconds.
        :param data: to be kept with the lock in place of what is there; an empty map removes that.
        :returns: the lease as it is now.
        :raises LockLostError: the lease is no longer among the holders, or is too old by our own clock.
        :raises LockValueError: it lasts longer than `duration` already.
        """
        return self._run(self._core.renew(lease, duration, data))

    def keep_alive(
        self,
        lease: AnyLease,
        *,
        interval: Seconds | None = None,
        on_lost: OnLost | None = None,
        on_danger: OnDanger | None = None,
        safe_time: Seconds | None = None,
    ) -> KeepAlive:
        """Send heartbeats from a thread of the lease's own until `KeepAlive.stop` is called or the lease is lost.

        :param interval: seconds between heartbeats. Default the client's.
        :param on_lost: called once, from that thread, when the lease is lost.
        :param on_danger: called each time that the lease can no longer be counted on for `safe_time`, with how many
            seconds are left: heartbeats fail, and are tried again. It is in danger no more once one has succeeded.
        :param safe_time: seconds. Default a third of the lease.
        """
        lease = self._core.with_term(lease)
        safe = self._core.safe_time(lease, safe_time)
        return KeepAlive(self, lease, self._core.interval(lease, interval), on_lost, on_danger, safe)

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

    def release(
        self, lease: Lease | LeaseSet, *, retry_for: Seconds | None = 0
    ) -> Released | Draining | StillHeld | Lost:
        """Give the lock back.

        :param lease: a lease, or a set of leases that were acquired together.
        :param retry_for: seconds to retry while DynamoDB cannot be reached, or while access is denied (then for the
            length of a lease at most); None retries without end.
        :returns: what became of the lease; of a set, the worst of them. Only `Released` is true: the slots are free.
            `Draining`: processes are still inside, the lock is free when they have left. `StillHeld`: a re-entrant
            lease was acquired more often than it was released. `Lost`: the lease was gone already.
        :raises LockUnavailableError: DynamoDB could not be reached in time; the lease expires by itself.
        """
        outcome = self._run(self._core.release(lease, retry_for))
        if not isinstance(outcome, StillHeld):
            for each in leases_of(lease):
                self._poller.ended(each)
        return outcome

    def close(self, *, release: bool = False) -> None:
        """Send no more heartbeats for any lease.

        :param release: give back those that heartbeats were sent for; else they run out. Only where nothing works under
            them any more.
        """
        leases = [beats.lease for beats in list(self._beating) if not is_inherited(beats.lease)]
        for beats in list(self._beating):
            beats.stop()
        failure: LockError | None = None
        for lease in leases if release else ():
            try:
                while isinstance(self.release(lease), StillHeld):
                    pass
            except LockError as failed:
                failure = failure or failed  # no reason to leave the others
        if failure is not None:
            raise failure

    def forget(self, key: str) -> bool:
        """Delete the record of a lock. Without this, DynamoDB deletes it a week after its last use.

        The call waits until `max_clock_skew` + 3 s after the last grant, 13 s by default, so that the next token is
        larger than the last one.

        :returns: True if there is none any more; False if somebody holds the lock or waits for it.
        """
        return self._run(self._core.forget(key))

    def break_lock(self, key: str, lease_id: str) -> Holder:
        """Take a lease away from whoever holds it: for people who know that its work must not go on, or does not.
        Until the holder notices (at its next heartbeat) its work and a successor's may overlap.

        :returns: the holder as it was.
        :raises LockNotHeldError: that lease is not among the holders.
        """
        return self._run(self._core.break_lock(key, lease_id))

    def set_capacity(self, key: str, capacity: int | None) -> LockRecord:
        """Give a semaphore another capacity, also while it is held. From then on it counts, whatever capacity those
        say who acquire the lock, until the record is forgotten, a week after its last use; or, with None, not any more.

        If it is less than what is held, nobody loses a lease: new ones are granted when enough were given back.

        :returns: the lock as it is now.
        :raises CapacityMismatchError: it is in use, and not as a semaphore; or it is in use, and was not to have that
            capacity any more.
        """
        return self._run(self._core.set_capacity(key, capacity))

    # -- look ---------------------------------------------------------------------------------------------------

    def get(self, key: str) -> LockRecord | None:
        """The lock as it is now, None if it has never been used or is long forgotten."""
        return self._run(self._core.operations.get(self._core.format.checked_key(key)))

    def find(self, key: str, lease_id: str) -> Lease:
        """The lease of that id, as the lock shows it: for a program that was told no more of it. Its token is the last
        one that was handed out. It is not valid before it was renewed here.

        :raises LockNotHeldError: it is not among the holders.
        """
        return self._run(self._core.find(key, lease_id))

    def look(self, key: str, *, slots: int = 1, mode: Mode = "exclusive") -> tuple[LockRecord | None, bool]:
        """The lock as it is now, and whether so many slots could be taken from it: free, or held by the dead."""
        return self._run(self._core.look(key, slots, mode))

    def waiters(self, key: str) -> list[Waiter]:
        """Those who wait in line for the lock, the next one first."""
        return self._run(self._core.queue.reader.waiters(self._core.format.checked_key(key)))

    def list_locks(
        self, prefix: str = "", *, on_damaged: Callable[[LockRecordError], None] | None = None
    ) -> Iterator[LockRecord]:
        """All locks of the table, held and free, whose keys begin with `prefix`. Reads the whole table.

        :param on_damaged: told of each lock that cannot be read, and is left out. By default that is logged.
        """
        arguments.checked_text("The prefix", prefix)
        cursor: Mapping[str, Any] | None = None
        while True:
            records, cursor = self._run(self._core.operations.page(cursor, prefix, on_damaged))
            yield from records
            if not cursor:
                return

    # -- how operations are carried out -------------------------------------------------------------------------

    def _run(self, operation: Operation[T], sleep: Callable[[float, float], None] | None = None) -> T:
        operation = self._core.format.carry_out(operation)
        process = os.getpid()
        place: _Place | None = None
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
                            answer = self._send(effect, resumed)
                        case Sleep():
                            if sleep is None:
                                time.sleep(effect.seconds)
                            else:
                                sleep(effect.seconds, resumed)
                            answer = monotonic()
                        case WaitForSlots():
                            # Kept until the operation ends, so that a waiter keeps its turn while it tries.
                            if place is not None and not place.ticket.is_for(effect):
                                place.give_up()
                                place = None
                            place = place or self._poller.queue(effect)
                            self._maintainer.maintain()
                            place.wait(effect.seconds)
                            answer = monotonic()
                except BaseException as raised:
                    failure = raised
        finally:
            if place is not None and os.getpid() == process:
                place.give_up()

    def _send(self, request: Request, since: float | None = None) -> Reply:
        if request.within is None:
            return self._call(request)
        # The SDK cannot be told to wake_up, so the call goes on in a thread that nobody waits for any longer.
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
        try:
            output = getattr(client, xform_name(request.action))(**request.params)
            if "Body" in output:  # an object's
                output["Body"] = output["Body"].read()
            answer = reply(output, sent_at)
        except Exception as failure:
            answer = answer_to(failure, request, sent_at)
        if not streams:  # it is another service: its clock is nobody's
            self._core.clock.note(answer)
        return answer


class KeepAlive:
    """Background heartbeats of one lease. `LockClient.keep_alive` makes it; `stop` it, or leave its ``with`` block."""

    def __init__(
        self,
        client: LockClient,
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
            target=self._renew, name=f"dynamo-lock heartbeat {name_of(lease)}", daemon=True
        )
        client._beating.add(self)
        self._thread.start()
        if on_danger is not None:
            # A thread of its own: the other one may have to wait for an answer to a heartbeat.
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
        """Send no further heartbeat. One that is on its way may still arrive; it changes nothing after a release."""
        self._stopped.set()
        self._client._beating.discard(self)

    def forget(self) -> None:
        """Be stopped, in a fork, where the thread does not exist and may have left the event locked."""
        self._stopped = threading.Event()
        self._stopped.set()

    def _sleep(self, seconds: float, since: float) -> None:
        for piece in pieces(seconds, since):
            if self._stopped.wait(piece):
                raise _Stopped

    def _watch(self, safe_time: float, on_danger: OnDanger) -> None:
        with suppress(_Stopped):
            self._client._run(self._client._core.monitor(self.lease, safe_time, on_danger), self._sleep)

    def _renew(self) -> None:
        try:
            self._client._run(self._client._core.keep_alive(self.lease, self._interval), self._sleep)
        except _Stopped:
            return
        except Exception:
            log.exception("The heartbeats of %s ended.", name_of(self.lease))
            end_by_error(self.lease)
        self._client._beating.discard(self)
        if self._stopped.is_set() or self._on_lost is None:
            return
        try:
            self.lease.check()
        except LockLostError as lost:
            for lease in leases_of(self.lease):
                self._on_lost(lease, lost)


class _Stopped(Exception):
    pass


_clients: WeakSet[LockClient] = WeakSet()


def _start_in_fork() -> None:
    for client in list(_clients):
        try:
            client._start_in_fork()
        except Exception:
            log.exception(
                "Could not prepare the client of the lock table %r for use in a fork.", client.table
            )


os.register_at_fork(after_in_child=_start_in_fork)


class _QueueMaintainer:
    """The thread that looks after this client's places in line. It lives while there are any."""

    def __init__(self, client: LockClient) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def maintain(self) -> None:
        """See to it that it runs, if it has to."""
        with self._lock:
            if self._client._core.queue and self._thread is None:
                self._thread = threading.Thread(target=self._maintain, name="dynamo-lock places", daemon=True)
                self._thread.start()

    def _maintain(self) -> None:
        core = self._client._core
        while True:
            try:
                self._client._run(core.presence.maintain())
            except Exception:
                log.exception("Could not look after the places in line, trying again.")
            with self._lock:
                if not core.queue:
                    self._thread = None
                    return


class _Poller:
    """The threads that look at the table, and at its stream, for all waiters of one client (rule R11). They live while
    there are any."""

    def __init__(self, client: LockClient) -> None:
        self._client = client
        self._watch = client._core.poller
        self._lock = threading.Lock()
        self._wake_up = threading.Event()
        self._watch.wake_up = self._wake_up.set
        self._running: set[str] = set()

    def queue(self, wants: WaitForSlots) -> _Place:
        woken: SimpleQueue[Exception | None] = SimpleQueue()
        ticket = WaiterHandle(wants, woken.put)
        with self._lock:
            if self._watch.add(ticket):
                self._wake_up.set()
            self._start("poller", self._watch.poll, self._sleep_until_woken, self._watch.fail)
            if self._client._streams is not None:
                follow = self._client._core.stream_reader.follow
                self._start("stream reader", follow, time.sleep, lambda _: self._watch.confirmed(None))
        return _Place(self, ticket, woken)

    def ended(self, lease: Lease) -> None:
        """This client has just ended a lease."""
        with self._lock:
            self._watch.ended(lease.key, lease.lease_id)

    def leave(self, ticket: WaiterHandle) -> None:
        with self._lock:
            self._watch.remove(ticket)

    def _sleep_until_woken(self, seconds: float) -> None:
        self._wake_up.wait(seconds)
        self._wake_up.clear()

    def _start(
        self,
        name: str,
        operation: Callable[[], Operation[None]],
        sleep: Callable[[float], None],
        on_broken: Callable[[Exception], None],
    ) -> None:
        if name not in self._running:
            self._running.add(name)
            threading.Thread(
                target=self._work,
                args=(name, self._client._core.format.carry_out(operation()), sleep, on_broken),
                name=f"dynamo-lock {name}",
                daemon=True,
            ).start()

    def _work(
        self,
        name: str,
        operation: Operation[None],
        sleep: Callable[[float], None],
        on_broken: Callable[[Exception], None],
    ) -> None:
        answer: Any = None
        failure: Exception | None = None
        while True:
            # The waiters' list is looked at and changed under the lock, the table is not.
            with self._lock:
                try:
                    effect = operation.send(answer) if failure is None else operation.throw(failure)
                except StopIteration:
                    self._running.discard(name)
                    return
                except Exception as broken:
                    log.exception("The %s ended.", name)
                    self._running.discard(name)
                    on_broken(broken)
                    return
            answer = failure = None
            try:
                match effect:
                    case Sleep():
                        sleep(effect.seconds)
                        answer = monotonic()
                    case Request():
                        answer = self._client._send(effect)
                    case Callback():
                        effect.call()
            except Exception as raised:
                failure = raised


class _Place:
    """One waiter's place in the poller's queue."""

    def __init__(self, poller: _Poller, ticket: WaiterHandle, woken: SimpleQueue[Exception | None]) -> None:
        self.ticket = ticket
        self._poller, self._woken = poller, woken

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
        self._poller.leave(self.ticket)
