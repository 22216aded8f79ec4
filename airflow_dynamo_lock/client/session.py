"""What both clients do, written once: arguments in, operation out; outcome in, lease out."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from airflow_dynamo_lock.client.clock import monotonic
from airflow_dynamo_lock.client.options import AnyLease, ClaimOptions, Keys, Mode, OnDanger
from airflow_dynamo_lock.core.effects import Operation, ServerClock, Sleep, Stamp
from airflow_dynamo_lock.core.foreign.registry import NATIVE, format_of
from airflow_dynamo_lock.core.liveness import Observer
from airflow_dynamo_lock.core.lock.admin import Operations
from airflow_dynamo_lock.core.lock.presence import Presence
from airflow_dynamo_lock.core.model import arguments
from airflow_dynamo_lock.core.model.arguments import Seconds, seconds
from airflow_dynamo_lock.core.model.claim import Change, Claim
from airflow_dynamo_lock.core.model.errors import (
    LockAccessError,
    LockError,
    LockLostError,
    LockNotHeldError,
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
from airflow_dynamo_lock.core.model.record import Holder, LockRecord, QueuePosition
from airflow_dynamo_lock.core.model.text import readable, utc
from airflow_dynamo_lock.core.queue.queue import WaitQueue
from airflow_dynamo_lock.core.wait.poller import Poller
from airflow_dynamo_lock.core.wait.stream import StreamReader
from airflow_dynamo_lock.log import log


@dataclass
class _Held:
    """A lease that its owner may acquire again, and how often it has."""

    lease: Lease
    times: int = 1


class ClientCore:
    """The operations of one client, with its defaults filled in."""

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
        self._owner = owner
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
            raise LockValueError(
                f"Only tables of the format 'native' have a stream that is read: this is {table_format!r}."
            )
        self.table = self.format.table
        self.start()

    def start(self) -> None:
        """Set up what belongs to one process: at the beginning, and in a fork."""
        self.owner = self._owner or f"{socket.gethostname()}:{os.getpid()}"
        self.queue = WaitQueue.of(self.format, self.stamp, self.observer)
        self.operations = Operations(self.format, self.stamp, self.observer, self.queue)
        self.presence = Presence(self.queue, self.operations)
        self.poller = Poller(self.format, self.observer, self.queue.reader)
        self._held: dict[tuple[str, str], _Held] = {}
        self._held_lock = threading.Lock()  # threads of one owner acquire again, and release
        self.stream_reader = StreamReader(self.poller, self.table)

    def stamp(self) -> Stamp:
        """What the next write attempt carries."""
        at = monotonic()
        host_ms = time.time_ns() // 1_000_000
        return Stamp(
            str(uuid.uuid4()), self.clock.at(at), host_ms, at, self.clock.answered, at - self.clock.told_at
        )

    def interval(self, lease: Lease | LeaseSet, chosen: Seconds | None) -> float:
        """Seconds between heartbeats of `lease`: those chosen, or the client's, or a sixth of the lease."""
        lease_ms = min(each.lease_ms for each in leases_of(lease))
        every = self.heartbeat or lease_ms / 6000
        return arguments.checked_heartbeat(
            every if chosen is None else seconds("interval", chosen), lease_ms / 1000
        )

    # -- operations ---------------------------------------------------------------------------------------------

    def try_acquire(self, key: Keys, options: ClaimOptions) -> Operation[Lease | LeaseSet | None]:
        """See `LockClient.try_acquire`."""
        claims = self._claims(key, options)
        if (again := self._again(claims, options)) is not None:
            return again
        for _ in range(2):
            outcome = yield from self.operations.try_acquire_all(claims, undo=_undoable(options))
            if isinstance(outcome, Busy):
                return None
            lease = self._granted(key, outcome, options)
            if lease.remaining() > 0:
                return lease
            yield from self._release_late(lease, options)
            claims = self._claims(key, options)
        raise LockUnavailableError(
            f"DynamoDB has granted {name_of(lease)} twice, each time with an answer that came after the lease's end: "
            "acquire it with a longer lease.",
            maybe_applied=False,
        )

    def acquire(
        self,
        key: Keys,
        timeout: Seconds | None,
        poll_interval: Seconds,
        on_busy: Callable[[LockRecord], None] | None,
        on_position: Callable[[QueuePosition], None] | None,
        options: ClaimOptions,
    ) -> Operation[Lease | LeaseSet]:
        """See `LockClient.acquire`."""
        claims = self._claims(key, options)
        if (again := self._again(claims, options)) is not None:
            return again
        timeout = None if timeout is None else seconds("timeout", timeout, zero=True)
        begun = now = monotonic()
        while True:
            granted = yield from self.operations.acquire_all(
                claims,
                now=now,
                timeout=None if timeout is None else max(0.0, timeout - (now - begun)),
                poll_interval=seconds("poll_interval", poll_interval),
                undo=_undoable(options),
                on_busy=on_busy,
                on_position=on_position,
            )
            lease = self._granted(key, granted, options)
            if lease.remaining() > 0:
                return lease
            yield from self._release_late(lease, options)
            now = monotonic()
            if timeout is not None and now - begun >= timeout:
                raise LockTimeoutError(
                    f"DynamoDB has granted {name_of(lease)}, but its answer came after the lease's end, and after the "
                    f"{timeout:g} s to wait for the lock: acquire it with a longer lease."
                )
            claims = self._claims(key, options)

    def _release_late(self, lease: Lease | LeaseSet, options: ClaimOptions) -> Operation[None]:
        """Release a lease that expired before its grant arrived. Another process may hold the lock by now."""
        log.warning(
            "The answer to the grant of %s came after the lease's end; giving it back.", name_of(lease)
        )
        if not _undoable(options):
            return  # another process may work under the same lease id; acquiring again finds its lease (rule R7)
        try:
            yield from self.release(lease, 0)
        except LockError as failure:
            log.warning("Could not release %s, it will run out: %s", name_of(lease), failure)

    def wait(
        self, key: str, slots: int, mode: Mode, timeout: Seconds | None, poll_interval: Seconds
    ) -> Operation[LockRecord | None]:
        """See `LockClient.wait`."""
        slots, capacity = _wanted(slots, mode)
        return self.operations.wait(
            self.format.checked_key(key),
            slots,
            capacity,
            now=monotonic(),
            timeout=None if timeout is None else seconds("timeout", timeout, zero=True),
            poll_interval=seconds("poll_interval", poll_interval),
        )

    def renew(
        self, lease: AnyLease, duration: Seconds | None, data: Mapping[str, Any] | None
    ) -> Operation[AnyLease]:
        """See `LockClient.renew`."""
        lease = self.with_term(lease)
        leases = [each.checked() for each in leases_of(lease)]
        term = leases[0].term
        assert term is not None
        if term.lost:
            lease.check()  # once lost, always lost: a heartbeat would only keep others waiting
        change = None
        if duration is not None or data is not None:
            lease_ms = None
            if duration is not None:
                for each in leases:
                    lease_ms = _ms(arguments.checked_lease("duration", duration, each.slots, each.capacity))
            change = Change(lease_ms, arguments.checked_map("data", data))
            leases = [replace(each, lease_ms=lease_ms or each.lease_ms) for each in leases]
        outcome = yield from self.operations.heartbeat_all(leases, change=change)
        if isinstance(outcome, Draining):
            raise LockLostError(
                f"The lock {leases[0].key!r} (lease {leases[0].lease_id}) is being given back: "
                "nothing about it changes any more."
            )
        self._renewed(term, min(each.lease_ms for each in leases), outcome)
        lease.check()
        return leases[0] if isinstance(lease, Lease) else LeaseSet(tuple(leases))

    def keep_alive(self, lease: Lease | LeaseSet, interval: float) -> Operation[None]:
        """Beat until the lease is lost, and log it."""
        leases = leases_of(lease)
        term = leases[0].term
        assert term is not None
        yield from self.operations.keep_alive(leases, interval, term)
        for each in leases:
            log.warning(
                "Lost the lock %r (lease %s, token %d): %s.", each.key, each.lease_id, each.token, term.lost
            )

    def monitor(self, lease: Lease | LeaseSet, safe_time: float, on_danger: OnDanger) -> Operation[None]:
        """Callback each time that a lease can no longer be counted on for so long, until it is lost."""
        told = False
        while (left := lease.remaining()) > 0:
            if left <= safe_time and not told:
                for each in leases_of(lease):
                    on_danger(each, left)
            told = left <= safe_time
            # Once it is in danger, only a heartbeat that succeeds ends that, and nobody says so.
            yield Sleep(min(left, safe_time / 10) if told else left - safe_time)

    def safe_time(self, lease: Lease | LeaseSet, chosen: Seconds | None) -> float:
        """For how many seconds a lease is to be good, or else it is in danger: those chosen, or a third of the lease.

        :raises LockValueError: it is not between heartbeats that come in time.
        """
        lease_ms = min(each.lease_ms for each in leases_of(lease))
        safe = lease_ms / 3000 if chosen is None else seconds("safe_time", chosen)
        return arguments.checked_safe_time(safe, lease_ms / 1000)

    def keep(self, lease: Lease | LeaseSet, interval: Seconds) -> Operation[Draining | Lost]:
        """See `AsyncLockClient.keep`."""
        every = self.interval(lease, interval)
        return self.operations.keep([each.checked() for each in leases_of(lease)], every)

    def enter(self, lease: Lease, process: str) -> Operation[Lease]:
        """See `LockClient.enter`. Who is inside counts on no more than the grace (rule R9): by then, an abandoned
        lease may be somebody else's."""
        arguments.checked_id("A process's id", process)
        lease = lease.checked()
        lease = replace(lease, lease_ms=min(lease.lease_ms, lease.grace_ms), term=Term(monotonic))
        outcome = yield from self.operations.enter(lease.key, lease.lease_id, process, lease.lease_ms)
        if isinstance(outcome, Draining):
            raise LockLostError(
                f"The lock {lease.key!r} (lease {lease.lease_id}) is being given back: "
                "nothing may start under it any more."
            )
        assert lease.term is not None
        self._renewed(lease.term, lease.lease_ms, outcome)
        lease.check()
        log.info("Entered the lock %r (lease %s, token %d).", lease.key, lease.lease_id, lease.token)
        return lease

    def leave(self, lease: Lease, process: str) -> Operation[Released | Renewed | Lost]:
        """See `LockClient.leave`."""
        arguments.checked_id("A process's id", process)
        lease = lease.checked()
        if is_inherited(lease):
            raise LockValueError(
                f"The parent process entered the lock {lease.key!r}: a fork cannot leave it."
            )
        outcome = yield from self.operations.leave(
            lease.key, lease.lease_id, process, lease.slots, lease.lease_ms, lease.grace_ms
        )
        if isinstance(outcome, Released):
            log.info("Released the lock %r (lease %s): the last process has left.", lease.key, lease.lease_id)
        return outcome

    def find(self, key: str, lease_id: str) -> Operation[Lease]:
        """See `LockClient.find`."""
        arguments.checked_id("A lease id", lease_id)
        record = yield from self.operations.get(self.format.checked_key(key))
        holder = record.holders.get(lease_id) if record else None
        if record is None or holder is None or holder.acquired_at_ms is None:
            raise LockNotHeldError(
                f"The lease {lease_id} does not hold the lock {key!r}. {record.describe() if record else 'Not locked'}."
            )
        return Lease(
            key=key,
            lease_id=lease_id,
            token=record.token,
            owner=holder.owner,
            slots=holder.slots,
            capacity=max(holder.slots, record.capacity),
            lease_ms=holder.lease_ms,
            grace_ms=holder.grace_ms,
            acquired_at_ms=holder.acquired_at_ms,
            took_over=holder.took_over,
        )

    def look(self, key: str, slots: int, mode: Mode) -> Operation[tuple[LockRecord | None, bool]]:
        """See `LockClient.look`."""
        slots, capacity = _wanted(slots, mode)
        return self.operations.look(self.format.checked_key(key), slots, capacity)

    def release(
        self, lease: Lease | LeaseSet, retry_for: Seconds | None
    ) -> Operation[Released | Draining | StillHeld | Lost]:
        """See `LockClient.release`."""
        leases = [each.checked() for each in leases_of(lease)]
        if is_inherited(lease):
            log.debug(
                "The lock %s is released by the process that acquired it, not by a fork.", name_of(lease)
            )
            return StillHeld(1)
        if (still := self._released_once(leases[0])) is not None:
            return still
        for each in leases:
            if each.term is not None:
                # Before the first release is sent: others may hold the lock before its answer arrives.
                each.term.lose("it was released")
        deadline = math.inf if retry_for is None else monotonic() + seconds("retry_for", retry_for, zero=True)
        applied = False
        denied: float | None = None  # since when
        while True:
            try:
                outcomes = yield from self.operations.release_all(leases, confirmed=True)
                break
            except (LockUnavailableError, LockAccessError) as failure:
                now, most = monotonic(), deadline
                if isinstance(failure, LockUnavailableError):
                    applied, denied = applied or failure.maybe_applied, None
                else:
                    # Credentials are replaced now and then. Who is denied for a whole lease will be denied later, too.
                    denied = now if denied is None else denied
                    most = min(deadline, denied + leases[0].lease_ms / 1000)
                if now >= most:
                    raise
                log.warning(
                    "Releasing %r (lease %s), trying again: %s", leases[0].key, leases[0].lease_id, failure
                )
                yield Sleep(1.0)
        if applied:
            # By the attempt whose answer was lost (rule R5).
            outcomes = [Released() if isinstance(each, Lost) else each for each in outcomes]
        for each, outcome in zip(leases, outcomes, strict=True):
            _log_end(each, outcome)
        # Of a set, the worst that has become of one.
        return max(outcomes, key=lambda each: (isinstance(each, Draining), isinstance(each, Lost)))

    def _released_once(self, lease: Lease) -> StillHeld | None:
        """Whether its owner still holds it, having acquired it more often than that."""
        with self._held_lock:
            held = self._held.get((lease.key, lease.owner))
            if held is None or held.lease.lease_id != lease.lease_id:
                return None
            held.times -= 1
            if held.times:
                return StillHeld(held.times)
            del self._held[lease.key, lease.owner]
            return None

    def break_lock(self, key: str, lease_id: str) -> Operation[Holder]:
        """See `LockClient.break_lock`."""
        arguments.checked_id("A lease id", lease_id)
        broken = yield from self.operations.break_(self.format.checked_key(key), lease_id)
        log.warning(
            "Broke the lock %r, held by %s (lease %s): until that holder notices, at its next heartbeat, its work and "
            "a successor's may overlap.",
            key,
            broken.holder.describe(self.clock.at(monotonic())),
            lease_id,
        )
        return broken.holder

    def forget(self, key: str) -> Operation[bool]:
        """See `LockClient.forget`."""
        return self.operations.forget(self.format.checked_key(key))

    def set_capacity(self, key: str, capacity: int | None) -> Operation[LockRecord]:
        """See `LockClient.set_capacity`."""
        self.format.checked_capacity()
        if capacity is not None:
            arguments.checked_slots(1, capacity)
        outcome = yield from self.operations.set_capacity(self.format.checked_key(key), capacity)
        if capacity is None:
            log.warning("The capacity of the lock %r is again what those who acquire it say.", key)
        else:
            log.warning("Set the capacity of the lock %r to %d.", key, capacity)
        return outcome.record

    # -- parts --------------------------------------------------------------------------------------------------

    def with_term(self, lease: AnyLease) -> AnyLease:
        """The lease with this process's own view of how long it lasts, made where it has none yet; one for a set."""
        if not isinstance(lease, LeaseSet):
            return lease if lease.term is not None else replace(lease, term=Term(monotonic))
        if all(each.term is not None for each in lease):
            return lease
        term = Term(monotonic)
        return LeaseSet(tuple(replace(each, term=term) for each in lease))

    def _claims(self, key: Keys, options: ClaimOptions) -> list[Claim]:
        if isinstance(key, str) or not isinstance(key, (list, tuple)):
            return [self._claim(key, options)]
        if arguments.checked_flag("reentrant", options.get("reentrant", False)):
            raise LockValueError("A set of locks cannot be acquired again: reentrant is for one key.")
        keys = arguments.checked_keys(key)
        if len(keys) > 1:
            self.format.checked_set()
        first = self._claim(keys[0], options)
        return [replace(first, key=each) for each in keys]

    def _claim(self, key: str, options: ClaimOptions) -> Claim:
        lease_id = options.get("lease_id")
        lease_id = str(uuid.uuid4()) if lease_id is None else arguments.checked_id("A lease id", lease_id)
        data, about, attempt_of = options.get("data"), options.get("about") or {}, options.get("attempt_of")
        for name, value in (("data", data), ("about", about)):
            arguments.checked_map(name, value)
        for text in (*about.values(), *([] if attempt_of is None else [attempt_of])):
            arguments.checked_text("What describes a holder", text)
        if unknown := options.keys() - ClaimOptions.__annotations__.keys():
            known = ", ".join(ClaimOptions.__annotations__)
            raise LockValueError(f"There is no option {sorted(unknown)[0]!r} for a lock; there are {known}.")
        slots, capacity = options.get("slots", 1), options.get("capacity", 1)
        mode: Mode = options.get("mode", "exclusive")
        slots, capacity = arguments.checked_mode(mode, slots, capacity)
        arguments.checked_flag("reentrant", options.get("reentrant", False))
        wanted = options.get("lease")
        lease = arguments.checked_lease("lease", self.lease if wanted is None else wanted, slots, capacity)
        if self.heartbeat is not None:
            arguments.checked_heartbeat(self.heartbeat, lease)
        claim = Claim(
            key=self.format.checked_key(key),
            lease_id=lease_id,
            owner=arguments.checked_text("The owner", options.get("owner") or self.owner),
            lease_ms=_ms(lease),
            grace_ms=_ms(_or_default("release_grace", options.get("release_grace"), self.grace)),
            slots=slots,
            capacity=capacity,
            data=data,
            about=about,
            attempt_of=attempt_of,
            min_hold_ms=0 if (hold := options.get("min_hold")) is None else _ms(seconds("min_hold", hold)),
            fair=arguments.checked_flag("fair", options.get("fair", True)),
            priority=arguments.checked_priority(options.get("priority", 0)),
            only_existing=arguments.checked_flag("only_existing", options.get("only_existing", False)),
        )
        return self.format.checked_claim(claim)

    def _again(self, claims: Sequence[Claim], options: ClaimOptions) -> Lease | None:
        """The lease that the owner holds already, if it may have it again."""
        if not options.get("reentrant"):
            return None
        claim = claims[0]
        with self._held_lock:
            held = self._held.get((claim.key, claim.owner))
            if held is None or not held.lease.remaining():
                return None
            lease = held.lease
            if (lease.slots, lease.capacity) != (claim.slots, claim.capacity):
                raise LockValueError(
                    f"{claim.owner} holds the lock {claim.key!r} already, with {lease.slots} of {lease.capacity} "
                    f"slots; it cannot be acquired again with {claim.slots} of {claim.capacity}: ask for the same."
                )
            held.times += 1
            return lease

    def _granted(self, key: Keys, granted: Sequence[Granted], options: ClaimOptions) -> Lease | LeaseSet:
        """The lease of one key, or those of several, which share a term."""
        term = Term(monotonic)
        term.renewed(min(each.sent_at for each in granted), granted[0].claim.lease_ms)
        leases = tuple(_lease(each, term) for each in granted)
        if options.get("reentrant"):
            with self._held_lock:
                self._held[leases[0].key, leases[0].owner] = _Held(leases[0])
        return leases[0] if isinstance(key, str) else LeaseSet(leases)

    def _renewed(self, term: Term, lease_ms: int, outcome: Renewed | Lost) -> None:
        if isinstance(outcome, Lost):
            term.lose(outcome.describe())
        else:
            term.renewed(outcome.sent_at, min(lease_ms, outcome.holder.lease_ms))


def _undoable(options: ClaimOptions) -> bool:
    """Whether this call made the lease id, so that no other process can use it."""
    return options.get("lease_id") is None


def leases_of(lease: Lease | LeaseSet) -> tuple[Lease, ...]:
    """The one lease, or those of the set."""
    return (lease,) if isinstance(lease, Lease) else lease.leases


def name_of(lease: Lease | LeaseSet) -> str:
    """Which locks it is of, for a log."""
    return str(LeaseSet(leases_of(lease)))


def is_inherited(lease: Lease | LeaseSet) -> bool:
    """Whether this process is a fork of the one that acquired the lease, or entered it."""
    terms = [each.term for each in leases_of(lease)]
    return any(term is not None and term.process != os.getpid() for term in terms)


def in_same_process(process: int) -> None:
    """Refuse to go on with an operation in a fork of the process that began it: its requests are the parent's to send.

    :raises LockError: this is such a fork.
    """
    if os.getpid() != process:
        raise LockError("A fork cannot go on with an operation that its parent process began.")


def end_by_error(lease: Lease | LeaseSet) -> None:
    """It cannot be relied on any longer, since nobody beats for it."""
    for each in leases_of(lease):
        if each.term is not None:
            each.term.lose("its heartbeats ended with an error")


def lost_in_use(key: Keys, lease: Lease | LeaseSet, outcome: Lost) -> LockLostError:
    """What a ``with`` block ends with whose lease was lost in it."""
    lease_id = leases_of(lease)[0].lease_id
    return LockLostError(
        f"The lock {key!r} (lease {lease_id}) was lost while it was in use: {outcome.describe()}."
    )


def _lease(granted: Granted, term: Term) -> Lease:
    """A grant as its caller gets it, logged."""
    claim = granted.claim
    for dead in granted.reclaimed:
        log.info(
            "Reclaimed the lock %r from %s (lease %s), whose lease had run out.",
            claim.key,
            readable(dead.owner),
            readable(dead.lease_id),
        )
    log.info(
        "Acquired the lock %r as %s (lease %s, token %d).",
        claim.key,
        readable(claim.owner),
        claim.lease_id,
        granted.token,
    )
    return Lease(
        key=claim.key,
        lease_id=claim.lease_id,
        token=granted.token,
        owner=claim.owner,
        slots=claim.slots,
        capacity=claim.capacity,
        lease_ms=claim.lease_ms,
        grace_ms=claim.grace_ms,
        acquired_at_ms=granted.acquired_at_ms,
        took_over=granted.took_over,
        reclaimed=granted.reclaimed,
        term=term,
    )


def _log_end(lease: Lease, outcome: Released | Draining | Lost) -> None:
    """Log what has become of a lease that was given back."""
    match outcome:
        case Released(hold_until_ms):
            log.info(
                "Released the lock %r (lease %s, token %d)%s.",
                lease.key,
                lease.lease_id,
                lease.token,
                f"; it is not handed on before {utc(hold_until_ms):%H:%M:%S} UTC" if hold_until_ms else "",
            )
        case Draining(holder):
            log.info(
                "Draining the lock %r (lease %s, token %d): %d process(es) still inside; it is free when they "
                "have left, or %g s after the last one's heartbeat.",
                lease.key,
                lease.lease_id,
                lease.token,
                len(holder.processes),
                holder.lease_ms / 1000,
            )
        case Lost():
            log.warning(
                "The lock %r was not ours to release (lease %s, token %d): %s.",
                lease.key,
                lease.lease_id,
                lease.token,
                outcome.describe(),
            )


def _wanted(slots: int, mode: Mode) -> tuple[int, int | None]:
    """What one who only looks wants to see free, and of how many; of as many as there are, if it is not to share."""
    if mode == "shared":
        return arguments.checked_mode(mode, slots, slots)
    return arguments.checked_mode(mode, slots, slots)[0], None


def _or_default(name: str, value: Seconds | None, default: float) -> float:
    return default if value is None else seconds(name, value)


def _ms(value: float) -> int:
    return max(1, round(value * 1000))
