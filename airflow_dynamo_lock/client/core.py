"""What both clients do, written once: arguments in, operation out; outcome in, lease out."""

from __future__ import annotations

import math
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypedDict

from airflow_dynamo_lock.client.wire import monotonic
from airflow_dynamo_lock.protocol import limits
from airflow_dynamo_lock.protocol.effects import Operation, ServerClock, Sleep, Stamp
from airflow_dynamo_lock.protocol.errors import (
    LockAccessError,
    LockLostError,
    LockUnavailableError,
    LockValueError,
)
from airflow_dynamo_lock.protocol.limits import Seconds, seconds
from airflow_dynamo_lock.protocol.model import (
    Abandoned,
    Claim,
    Ending,
    Granted,
    Holder,
    Lease,
    LockRecord,
    Lost,
    Released,
    Renewed,
    Term,
    readable,
)
from airflow_dynamo_lock.protocol.native import NativeFormat
from airflow_dynamo_lock.protocol.operations import Operations, log
from airflow_dynamo_lock.protocol.staleness import MAX_CLOCK_SKEW, Observer
from airflow_dynamo_lock.protocol.watch import Watch

#: Called when a lease is lost: with the lease, and the error that says why.
OnLost = Callable[[Lease, LockLostError], None]


class ClaimOptions(TypedDict, total=False):
    """The options of every way to acquire a lock.

    ``lease_id`` names the grant attempt; without one it gets a random one. Give one only if it is unique to the attempt
    and a second try with it is meant to find the first one's lease (rule R7). ``about`` and ``attempt_of`` describe the
    holder in detail (see `protocol.model`); ``lease``, ``release_grace`` and ``owner`` default to the client's.
    """

    lease_id: str | None
    slots: int
    capacity: int
    data: Mapping[str, Any] | None
    lease: Seconds | None
    release_grace: Seconds | None
    owner: str | None
    about: Mapping[str, str]
    attempt_of: str | None


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
    ) -> None:
        self.table = limits.checked_table(table)
        self.owner = owner or f"{socket.gethostname()}:{os.getpid()}"
        self.lease = seconds("lease", lease)
        self.heartbeat = None if heartbeat is None else seconds("heartbeat", heartbeat)
        if self.heartbeat is not None:
            limits.checked_heartbeat(self.heartbeat, self.lease)
        self.grace = seconds("release_grace", release_grace)
        self.clock = ServerClock()
        self.observer = Observer(seconds("max_clock_skew", max_clock_skew, zero=True))
        self.format = NativeFormat(table)
        self.operations = Operations(self.format, self.stamp, self.observer)
        self.watch = Watch(self.format, self.observer)

    def stamp(self) -> Stamp:
        """What the next write attempt carries."""
        at = monotonic()
        host_ms = time.time_ns() // 1_000_000
        return Stamp(str(uuid.uuid4()), self.clock.at(at), host_ms, at, self.clock.answered)

    def interval(self, lease: Lease) -> float:
        """Seconds between heartbeats of `lease`: the client's, or a sixth of the lease."""
        return self.heartbeat or lease.lease_ms / 6000

    # -- operations ---------------------------------------------------------------------------------------------

    def try_acquire(self, key: str, options: ClaimOptions) -> Operation[Lease | None]:
        """See `LockClient.try_acquire`."""
        claim = self._claim(key, options)
        outcome = yield from self.operations.try_acquire(claim, undo=options.get("lease_id") is None)
        return self._lease(outcome) if isinstance(outcome, Granted) else None

    def acquire(
        self,
        key: str,
        timeout: Seconds | None,
        poll_interval: Seconds,
        on_busy: Callable[[LockRecord], None] | None,
        options: ClaimOptions,
    ) -> Operation[Lease]:
        """See `LockClient.acquire`."""
        granted = yield from self.operations.acquire(
            self._claim(key, options),
            now=monotonic(),
            timeout=None if timeout is None else seconds("timeout", timeout, zero=True),
            poll_interval=seconds("poll_interval", poll_interval),
            undo=options.get("lease_id") is None,
            on_busy=on_busy,
        )
        return self._lease(granted)

    def wait(
        self, key: str, slots: int, timeout: Seconds | None, poll_interval: Seconds
    ) -> Operation[LockRecord | None]:
        """See `LockClient.wait`."""
        limits.checked_slots(slots, slots)
        return self.operations.wait(
            limits.checked_key(key),
            slots,
            now=monotonic(),
            timeout=None if timeout is None else seconds("timeout", timeout, zero=True),
            poll_interval=seconds("poll_interval", poll_interval),
        )

    def renew(self, lease: Lease) -> Operation[Lease]:
        """See `LockClient.renew`."""
        lease = self.with_term(lease.checked())
        if lease.term is not None and lease.term.lost:
            lease.check()  # once lost, always lost: a heartbeat would only keep others waiting
        outcome = yield from self.operations.heartbeat(lease.key, lease.lease_id, lease.lease_ms)
        self._renewed(lease, outcome)
        return lease

    def keep_alive(self, lease: Lease, interval: float) -> Operation[None]:
        """Beat until the lease is lost, and log it."""
        term = lease.term
        assert term is not None
        yield from self.operations.keep_alive(lease.key, lease.lease_id, lease.lease_ms, interval, term)
        log.warning(
            "Lost the lock %r (lease %s, token %d): %s.", lease.key, lease.lease_id, lease.token, term.lost
        )

    def enter(self, lease: Lease, process: str) -> Operation[Lease]:
        """See `LockClient.enter`. Who is inside counts on no more than the grace (rule R9): by then, an abandoned
        lease may be somebody else's."""
        limits.checked_id("A process's id", process)
        lease = lease.checked()
        lease = replace(lease, lease_ms=min(lease.lease_ms, lease.grace_ms), term=Term(monotonic))
        outcome = yield from self.operations.enter(lease.key, lease.lease_id, process, lease.lease_ms)
        if isinstance(outcome, Ending):
            raise LockLostError(
                f"The lock {lease.key!r} (lease {lease.lease_id}) is being given back: "
                "nothing may start under it any more."
            )
        self._renewed(lease, outcome)
        log.info("Entered the lock %r (lease %s, token %d).", lease.key, lease.lease_id, lease.token)
        return lease

    def leave(self, lease: Lease, process: str) -> Operation[Released | Renewed | Lost]:
        """See `LockClient.leave`."""
        limits.checked_id("A process's id", process)
        lease = lease.checked()
        outcome = yield from self.operations.leave(
            lease.key, lease.lease_id, process, lease.slots, lease.lease_ms, lease.grace_ms
        )
        if isinstance(outcome, Released):
            log.info("Released the lock %r (lease %s): the last process has left.", lease.key, lease.lease_id)
        return outcome

    def give_back(self, lease: Lease, patience: Seconds | None) -> Operation[Released | Abandoned | Lost]:
        """See `LockClient.give_back`."""
        lease = lease.checked()
        deadline = math.inf if patience is None else monotonic() + seconds("patience", patience, zero=True)
        applied = False
        denied: float | None = None  # since when
        while True:
            try:
                outcome = yield from self.operations.release(
                    lease.key, lease.lease_id, lease.slots, lease.grace_ms, heard=True
                )
                break
            except (LockUnavailableError, LockAccessError) as failure:
                now, most = monotonic(), deadline
                if isinstance(failure, LockUnavailableError):
                    applied, denied = applied or failure.maybe_applied, None
                else:
                    # Credentials are replaced now and then. Who is denied for a whole lease will be denied later, too.
                    denied = now if denied is None else denied
                    most = min(deadline, denied + lease.lease_ms / 1000)
                if now >= most:
                    raise
                log.warning("Releasing %r (lease %s), trying again: %s", lease.key, lease.lease_id, failure)
                yield Sleep(1.0)
        if isinstance(outcome, Lost) and applied:
            outcome = Released()  # by the attempt whose answer was lost (rule R5)
        if lease.term is not None:
            lease.term.lose("it was released")
        match outcome:
            case Released():
                log.info("Released the lock %r (lease %s, token %d).", lease.key, lease.lease_id, lease.token)
            case Abandoned(holder):
                log.info(
                    "Abandoned the lock %r (lease %s, token %d): %d process(es) still inside; it is free when they "
                    "have left, or %g s after the last one's heartbeat.",
                    lease.key,
                    lease.lease_id,
                    lease.token,
                    len(holder.inside),
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
        return outcome

    def break_lock(self, key: str, lease_id: str) -> Operation[Holder]:
        """See `LockClient.break_lock`."""
        limits.checked_id("A lease id", lease_id)
        broken = yield from self.operations.break_(limits.checked_key(key), lease_id)
        log.warning(
            "Broke the lock %r, held by %s (lease %s): until that holder notices, at its next heartbeat, its work and "
            "a successor's may overlap.",
            key,
            broken.holder.describe(self.clock.at(monotonic())),
            lease_id,
        )
        return broken.holder

    # -- parts --------------------------------------------------------------------------------------------------

    def with_term(self, lease: Lease) -> Lease:
        """The lease with this process's own view of how long it lasts, made where it has none yet."""
        return lease if lease.term is not None else replace(lease, term=Term(monotonic))

    def _claim(self, key: str, options: ClaimOptions) -> Claim:
        lease_id = options.get("lease_id")
        lease_id = str(uuid.uuid4()) if lease_id is None else limits.checked_id("A lease id", lease_id)
        data, about, attempt_of = options.get("data"), options.get("about") or {}, options.get("attempt_of")
        for name, value in (("data", data), ("about", about)):
            if value is not None and not isinstance(value, Mapping):
                # Not what it is: that may be a secret (rule R12).
                raise LockValueError(f"{name} must be a map, not of type {type(value).__name__}.")
        for text in (*about.values(), *([] if attempt_of is None else [attempt_of])):
            limits.checked_text("What describes a holder", text)
        if unknown := options.keys() - ClaimOptions.__annotations__.keys():
            known = ", ".join(ClaimOptions.__annotations__)
            raise LockValueError(f"There is no option {sorted(unknown)[0]!r} for a lock; there are {known}.")
        slots, capacity = options.get("slots", 1), options.get("capacity", 1)
        limits.checked_slots(slots, capacity)
        lease = _or_default("lease", options.get("lease"), self.lease)
        if self.heartbeat is not None:
            limits.checked_heartbeat(self.heartbeat, lease)
        return Claim(
            key=limits.checked_key(key),
            lease_id=lease_id,
            owner=limits.checked_text("The owner", options.get("owner") or self.owner),
            lease_ms=_ms(lease),
            grace_ms=_ms(_or_default("release_grace", options.get("release_grace"), self.grace)),
            slots=slots,
            capacity=capacity,
            data=data,
            about=about,
            attempt_of=attempt_of,
        )

    def _lease(self, granted: Granted) -> Lease:
        claim = granted.claim
        term = Term(monotonic)
        term.renewed(granted.sent_at, claim.lease_ms)
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
            reclaimed=granted.reclaimed,
            term=term,
        )

    def _renewed(self, lease: Lease, outcome: Renewed | Lost) -> None:
        term = lease.term
        assert term is not None
        if isinstance(outcome, Lost):
            term.lose(outcome.describe())
        else:
            term.renewed(outcome.sent_at, min(lease.lease_ms, outcome.holder.lease_ms))
        lease.check()


def _or_default(name: str, value: Seconds | None, default: float) -> float:
    return default if value is None else seconds(name, value)


def _ms(value: float) -> int:
    return max(1, round(value * 1000))


__all__ = ["MAX_CLOCK_SKEW", "ClaimOptions", "ClientCore", "OnLost"]
