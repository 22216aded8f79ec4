"""What both clients share: it checks arguments, builds operations, and makes leases from their outcomes."""

from __future__ import annotations

import math
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from airflow_dynamo_lock.client import nesting
from airflow_dynamo_lock.client.administration import Administration
from airflow_dynamo_lock.client.claims import Claims, ReentrantLeases
from airflow_dynamo_lock.client.clock import monotonic
from airflow_dynamo_lock.client.leases import (
    is_inherited,
    lease_of,
    leases_of,
    log_end,
    name_of,
    notify_lost,
    notify_released,
    one_lease,
)
from airflow_dynamo_lock.client.options import AcquireOptions, AnyLease, ClaimOptions, Keys
from airflow_dynamo_lock.core.effects import Operation, ServerClock, Sleep, Stamp, T
from airflow_dynamo_lock.core.foreign.registry import NATIVE, format_of
from airflow_dynamo_lock.core.liveness import Observer
from airflow_dynamo_lock.core.lock.operations import Operations
from airflow_dynamo_lock.core.lock.presence import Presence
from airflow_dynamo_lock.core.lock.release import ReleaseProgress
from airflow_dynamo_lock.core.model import arguments
from airflow_dynamo_lock.core.model.arguments import Seconds, milliseconds, seconds
from airflow_dynamo_lock.core.model.edits import Change, Heartbeat
from airflow_dynamo_lock.core.model.errors import (
    LockAccessError,
    LockDeadlockError,
    LockError,
    LockLostError,
    LockRemovedError,
    LockTimeoutError,
    LockUnavailableError,
    LockValueError,
)
from airflow_dynamo_lock.core.model.lease import Lease, LeaseSet, Term
from airflow_dynamo_lock.core.model.outcomes import (
    Busy,
    Draining,
    Granted,
    Lost,
    Released,
    Renewed,
    StillHeld,
)
from airflow_dynamo_lock.core.model.record import LockRecord, QueuePosition
from airflow_dynamo_lock.core.queue.queue import WaitQueue
from airflow_dynamo_lock.core.table.features import Feature, require
from airflow_dynamo_lock.core.wait.poller import Poller
from airflow_dynamo_lock.core.wait.stream import StreamReader
from airflow_dynamo_lock.events import EventName, notify
from airflow_dynamo_lock.log import log


class ClientCore:
    """The operations of one client. `LockClient` and `AsyncLockClient` document the methods."""

    def __init__(
        self,
        table: str,
        owner: str | None,
        lease: Seconds,
        heartbeat: Seconds | None,
        release_grace: Seconds,
        max_clock_skew: Seconds,
        table_format: str = NATIVE,
        partition_key: str | None = None,
        sort_key: str | None = None,
        *,
        streams: bool = False,
    ) -> None:
        self._owner = None if owner is None else arguments.checked_id("The owner", owner)
        self.lease = seconds("lease", lease)
        self.heartbeat = None if heartbeat is None else seconds("heartbeat", heartbeat)
        if self.heartbeat is not None:
            arguments.checked_heartbeat(self.heartbeat, self.lease)
        self.grace = seconds("release_grace", release_grace)
        self.clock = ServerClock()
        self.observer = Observer(arguments.checked_clock_skew(max_clock_skew))
        self.format = format_of(
            table_format,
            table,
            self.observer.max_clock_skew_ms,
            partition_key=partition_key,
            sort_key=sort_key,
        )
        if streams and table_format != NATIVE:
            raise LockValueError(f"Streams need a table of the format 'native', not {table_format!r}.")
        self.table = self.format.table
        self.start()

    def start(self) -> None:
        """Set up what belongs to one process: for a new client, and in a fork."""
        self.owner = self._owner or f"{socket.gethostname()}:{os.getpid()}"
        self.queue = WaitQueue.of(self.format, self.stamp, self.observer)
        self.operations = Operations.of(self.format, self.stamp, self.observer, self.queue)
        self.administration = Administration(self.format, self.operations, self.clock)
        self.presence = Presence(self.queue, self.operations)
        self.poller = Poller(self.format, self.observer, self.queue.reader)
        self.claims = Claims(self.format, self.owner, self.lease, self.heartbeat, self.grace)
        self.reentrant = ReentrantLeases()
        self.stream_reader = StreamReader(self.poller, self.table)

    def stamp(self) -> Stamp:
        """The stamp of the next write attempt."""
        at = monotonic()
        host_ms = time.time_ns() // 1_000_000
        return Stamp(
            str(uuid.uuid4()), self.clock.at(at), host_ms, at, self.clock.answered, at - self.clock.told_at
        )

    def interval(self, lease: Lease | LeaseSet, chosen: Seconds | None) -> float:
        """Seconds between heartbeats: `chosen`, or the client's, or a sixth of the lease.

        :raises LockValueError: the lease is shorter than two intervals.
        """
        lease_ms = min(each.lease_ms for each in leases_of(lease))
        every = self.heartbeat or lease_ms / 6000
        return arguments.checked_heartbeat(
            every if chosen is None else seconds("interval", chosen), lease_ms / 1000
        )

    # -- operations ---------------------------------------------------------------------------------------------

    def try_acquire(self, key: Keys, options: ClaimOptions) -> Operation[Lease | LeaseSet | None]:
        """Make one attempt. Returns None if the lock is busy, or has waiters."""
        claims = self.claims.of(key, options)
        if options.get("reentrant") and (again := self.reentrant.again(claims[0])) is not None:
            return again
        for _ in range(2):
            outcome = yield from self.operations.attempting.try_acquire_all(
                claims, owns_lease_id=_owns_lease_id(options)
            )
            if isinstance(outcome, Busy):
                return None
            lease = self._granted(key, outcome, options)
            if lease.remaining() > 0:
                return lease
            yield from self._release_late(lease, options)
            claims = self.claims.of(key, options)
        raise LockUnavailableError(
            f"DynamoDB has granted {name_of(lease)} twice, each time with an answer that came after the lease's end: "
            "acquire it with a longer lease.",
            maybe_applied=not _owns_lease_id(options),  # a lease under another caller's id was not released
        )

    def acquire(
        self,
        key: Keys,
        timeout: Seconds | None,
        poll_interval: Seconds,
        on_busy: Callable[[LockRecord], None] | None,
        on_position: Callable[[QueuePosition], None] | None,
        options: ClaimOptions,
        holding: Lease | LeaseSet | Sequence[Lease | LeaseSet] = (),
    ) -> Operation[Lease | LeaseSet]:
        """Acquire, and wait for the lock if it is busy."""
        arguments.checked_callbacks(on_busy=on_busy, on_position=on_position)
        claims = self.claims.of(key, options, AcquireOptions)
        if options.get("reentrant") and (again := self.reentrant.again(claims[0])) is not None:
            return again
        timeout = None if timeout is None else seconds("timeout", timeout, zero=True)
        begun = now = monotonic()
        while True:
            waiting = self.operations.acquiring.acquire_all(
                claims,
                now=now,
                timeout=None if timeout is None else max(0.0, timeout - (now - begun)),
                poll_interval=seconds("poll_interval", poll_interval),
                owns_lease_id=_owns_lease_id(options),
                on_busy=on_busy,
                on_position=on_position,
                holding=nesting.held(self, holding),
            )
            granted = yield from _notifying(claims[0].key, waiting)
            lease = self._granted(key, granted, options)
            if lease.remaining() > 0:
                notify("waited", claims[0].key, max(0.0, granted[0].stamped_at - begun))
                return lease
            yield from self._release_late(lease, options)
            now = monotonic()
            if timeout is not None and now - begun >= timeout:
                raise _granted_late(lease, timeout)
            claims = self.claims.of(key, options, AcquireOptions)

    def _release_late(self, lease: Lease | LeaseSet, options: ClaimOptions) -> Operation[None]:
        """Release a lease that expired before its grant arrived. Another process may hold the lock by now."""
        log.warning("The answer to the grant of %s came after the lease's end; releasing it.", name_of(lease))
        if not _owns_lease_id(options):
            return  # another process may work under the same lease id; acquiring again finds its lease (R7)
        try:
            yield from self.release(lease, 0)
        except LockError as failure:
            log.warning("Could not release %s, it will run out: %s", name_of(lease), failure)

    def renew(
        self, lease: AnyLease, duration: Seconds | None, data: Mapping[str, Any] | None
    ) -> Operation[AnyLease]:
        """Send one heartbeat, and change the length of the lease or the data of the lock with it."""
        lease = self.with_term(lease)
        leases = [each.checked() for each in leases_of(lease)]
        term = leases[0].term
        assert term is not None
        if term.lost:
            lease.check()  # a lost lease stays lost: a heartbeat would only keep others waiting
        if duration is not None:
            leases = [_lengthened(each, duration) for each in leases]
        if arguments.checked_map("data", data):
            require(self.format, Feature.DATA)
        changes = duration is not None or data is not None
        edit = Change(longer=duration is not None, data=data) if changes else Heartbeat()
        outcome = yield from self.operations.renewing.renew_all(leases, edit)
        if isinstance(outcome, Draining):
            raise LockLostError(
                f"The lock {leases[0].key!r} (lease {leases[0].lease_id}) is being released: "
                "it cannot be renewed any more."
            )
        _note_renewal(leases[0], min(each.lease_ms for each in leases), outcome)
        lease.check()
        return leases[0] if isinstance(lease, Lease) else LeaseSet(tuple(leases))

    def keep_alive(self, lease: Lease | LeaseSet, interval: float) -> Operation[None]:
        """Send heartbeats until the lease is lost, and log that."""
        leases = leases_of(lease)
        term = leases[0].term
        assert term is not None
        yield from self.operations.renewing.keep_alive(leases, interval, term)
        for each in leases:
            notify_lost(each)
            log.warning(
                "Lost the lock %r (lease %s, token %d): %s.", each.key, each.lease_id, each.token, term.lost
            )

    def safe_time(self, lease: Lease | LeaseSet, chosen: Seconds | None) -> float:
        """The remaining seconds below which a lease is in danger: `chosen`, or a third of the lease.

        :raises LockValueError: a lease with timely heartbeats would always be in danger.
        """
        lease_ms = min(each.lease_ms for each in leases_of(lease))
        safe = lease_ms / 3000 if chosen is None else seconds("safe_time", chosen)
        return arguments.checked_safe_time(safe, lease_ms / 1000)

    def keep_for_processes(self, lease: Lease | LeaseSet, interval: Seconds) -> Operation[Draining | Lost]:
        """Send heartbeats for processes that enter the lease and leave it, until the lease drains or is gone."""
        leases = [each.checked() for each in leases_of(lease)]
        return self.operations.renewing.keep_for_processes(leases, self.interval(lease, interval))

    def enter(self, lease: Lease, process: str) -> Operation[Lease]:
        """Add a process. It relies on no more than the grace (R9), because a drained lease ends then."""
        arguments.checked_id("A process's id", process)
        lease = one_lease(lease)
        until = monotonic() + lease.lease_ms / 1000
        lease = replace(lease, lease_ms=min(lease.lease_ms, lease.grace_ms), term=Term(monotonic))
        outcome = yield from self.operations.renewing.enter(
            lease.key, lease.lease_id, lease.lease_ms, process, until
        )
        if isinstance(outcome, Draining):
            raise LockLostError(
                f"The lock {lease.key!r} (lease {lease.lease_id}) is being released: "
                "no process can enter it any more."
            )
        _note_renewal(lease, lease.lease_ms, outcome)
        lease.check()
        log.info("Entered the lock %r (lease %s, token %d).", lease.key, lease.lease_id, lease.token)
        return lease

    def leave(
        self, lease: Lease, process: str, *, release: bool
    ) -> Operation[Released | Renewed | Draining | Lost]:
        """Remove a process from those inside. The last one that leaves a draining lease frees its slots."""
        arguments.checked_id("A process's id", process)
        arguments.checked_flag("release", release)
        lease = one_lease(lease)
        if is_inherited(lease):
            raise LockValueError(
                f"The parent process entered the lock {lease.key!r}: a fork cannot leave it."
            )
        if release and lease.term is not None:
            # Before the write is sent: others may hold the lock before its answer arrives.
            lease.term.lose("it was released")
        outcome = yield from self.operations.releasing.leave(lease, process, release=release)
        if release and not isinstance(outcome, Renewed):
            log_end(lease, outcome, self.stamp)
        elif isinstance(outcome, Released):
            notify_released(lease, self.stamp)
            log.info("Released the lock %r (lease %s): the last process has left.", lease.key, lease.lease_id)
        return outcome

    def release(
        self, lease: Lease | LeaseSet, retry_for: Seconds | None
    ) -> Operation[Released | Draining | StillHeld | Lost]:
        """Release; drain if processes are inside. Retries for `retry_for` seconds; None: without limit."""
        leases = [each.checked() for each in leases_of(lease)]
        within = None if retry_for is None else seconds("retry_for", retry_for, zero=True)
        if is_inherited(lease):
            log.debug(
                "The lock %s is released by the process that acquired it, not by a fork.", name_of(lease)
            )
            # The parent process still holds it: say without a request that the slots are not free.
            return StillHeld(1)
        if (still := self.reentrant.count_release(leases[0])) is not None:
            return still
        for each in leases:
            if each.term is not None:
                # Before the first release is sent: others may hold the lock before its answer arrives.
                each.term.lose("it was released")
        deadline = math.inf if within is None else monotonic() + within
        progress = ReleaseProgress()
        denied: float | None = None  # the time of the first denial in a row
        while True:
            try:
                outcomes = yield from self.operations.releasing.release_all(
                    leases, confirmed=True, progress=progress
                )
                break
            except (LockUnavailableError, LockAccessError) as failure:
                now, most = monotonic(), deadline
                if isinstance(failure, LockUnavailableError):
                    denied = None
                else:
                    # Credentials may be replaced at any time, but a denial for a whole lease is lasting.
                    denied = now if denied is None else denied
                    most = min(deadline, denied + leases[0].lease_ms / 1000)
                if now >= most:
                    raise
                log.warning(
                    "Releasing %r (lease %s), trying again: %s", leases[0].key, leases[0].lease_id, failure
                )
                yield Sleep(1.0)
        for each, outcome in zip(leases, outcomes, strict=True):
            log_end(each, outcome, self.stamp)
        # Of a set, the worst outcome.
        return max(outcomes, key=lambda each: (isinstance(each, Draining), isinstance(each, Lost)))

    # -- parts --------------------------------------------------------------------------------------------------

    def with_term(self, lease: AnyLease) -> AnyLease:
        """The lease with a term of this process; a new one if it has none. The leases of a set share one."""
        if all(each.term is not None for each in leases_of(lease)):
            return lease
        if not isinstance(lease, LeaseSet):
            return replace(lease, term=Term(monotonic))
        term = Term(monotonic)
        return LeaseSet(tuple(replace(each, term=term) for each in lease))

    def _granted(self, key: Keys, granted: Sequence[Granted], options: ClaimOptions) -> Lease | LeaseSet:
        """The lease, or the lease set, of these grants."""
        term = Term(monotonic)
        term.renewed(min(each.stamped_at for each in granted), granted[0].claim.lease_ms)
        leases = tuple(lease_of(each, term) for each in granted)
        if options.get("reentrant"):
            self.reentrant.add(leases[0])
        return leases[0] if isinstance(key, str) else LeaseSet(leases)


# How a wait may end without the lock.
_WAIT_ENDS: Mapping[type[LockError], EventName] = {
    LockTimeoutError: "timed_out",
    LockDeadlockError: "deadlocked",
    LockRemovedError: "removed",
}


def _notifying(key: str, waiting: Operation[T]) -> Operation[T]:
    """Notify of an end of the wait without the lock."""
    try:
        return (yield from waiting)
    except tuple(_WAIT_ENDS) as failure:
        notify(_WAIT_ENDS[type(failure)], key)
        raise


def _note_renewal(lease: Lease, lease_ms: int, outcome: Renewed | Lost) -> None:
    """Renew the term, or end it if the lease is lost."""
    assert lease.term is not None
    if isinstance(outcome, Lost):
        notify_lost(lease)
        lease.term.lose(outcome.describe())
    else:
        lease.term.renewed(outcome.stamped_at, min(lease_ms, outcome.holder.lease_ms))


def _granted_late(lease: Lease | LeaseSet, timeout: float) -> LockTimeoutError:
    return LockTimeoutError(
        f"DynamoDB has granted {name_of(lease)}, but its answer came after the lease's end, and after the "
        f"{timeout:g} s to wait for the lock: acquire it with a longer lease."
    )


def _owns_lease_id(options: ClaimOptions) -> bool:
    """Whether this call made the lease id, so that no other process can use it."""
    return options.get("lease_id") is None


def in_same_process(process: int) -> None:
    """Return if this process has begun the operation.

    :raises LockError: this is a fork of that process, which sends the operation's requests itself.
    """
    if os.getpid() != process:
        raise LockError("A fork cannot continue an operation of its parent process: begin it again.")


def _lengthened(lease: Lease, duration: Seconds) -> Lease:
    """The lease with that length, after a check."""
    length = arguments.checked_lease("duration", duration, lease.capacity)
    return replace(lease, lease_ms=milliseconds(length))
