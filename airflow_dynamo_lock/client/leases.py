"""Leases and lease sets as callers get them: made from grants, monitored, ended; with the log lines of each step."""

from __future__ import annotations

import os
from collections.abc import Callable

from airflow_dynamo_lock.client.options import Keys, OnDanger, OnLost
from airflow_dynamo_lock.core.effects import Operation, Sleep, Stamp, T
from airflow_dynamo_lock.core.model.errors import LockLostError, LockValueError
from airflow_dynamo_lock.core.model.lease import Lease, LeaseSet, Term
from airflow_dynamo_lock.core.model.outcomes import Draining, Granted, Lost, Released
from airflow_dynamo_lock.core.model.text import readable, shown, utc
from airflow_dynamo_lock.events import notify
from airflow_dynamo_lock.log import log


def leases_of(lease: Lease | LeaseSet) -> tuple[Lease, ...]:
    """The lease itself, or the leases of the set.

    :raises LockValueError: this is no lease, or a set without leases.
    """
    leases = lease.leases if isinstance(lease, LeaseSet) else (lease,)
    if not leases or not all(isinstance(each, Lease) for each in leases):
        raise LockValueError(
            f"This needs the lease that acquire returned, not {shown(lease)}: "
            "try_acquire returns None if the lock is taken."
        )
    return leases


def one_lease(lease: Lease | LeaseSet) -> Lease:
    """The lease of one lock, with valid values.

    :raises LockValueError: this is no lease, or a set of leases, or a value of the lease is not valid.
    """
    leases = leases_of(lease)
    if isinstance(lease, LeaseSet):
        raise LockValueError(
            f"This needs the lease of one lock, not of {len(lease)}: call it for each lease of the set."
        )
    return leases[0].checked()


def name_of(lease: Lease | LeaseSet) -> str:
    """The locks and the lease id, for a log line."""
    return str(LeaseSet(leases_of(lease)))


def is_inherited(lease: Lease | LeaseSet) -> bool:
    """Whether this process is a fork of the one that acquired the lease, or entered it."""
    terms = [each.term for each in leases_of(lease)]
    return any(term is not None and term.process != os.getpid() for term in terms)


def end_by_error(lease: Lease | LeaseSet) -> None:
    """End the term of a lease whose heartbeats have ended with an error."""
    for each in leases_of(lease):
        if each.term is not None:
            each.term.lose("its heartbeats ended with an error")


def lost_in_use(key: Keys, lease: Lease | LeaseSet, outcome: Lost) -> LockLostError:
    """The error of a ``with`` block that has lost its lease."""
    lease_id = leases_of(lease)[0].lease_id
    return LockLostError(
        f"The lock {key!r} (lease {lease_id}) was lost while it was in use: {outcome.describe()}."
    )


def lease_of(granted: Granted, term: Term) -> Lease:
    """The lease of a grant. Logs the grant."""
    claim = granted.claim
    notify("acquired", claim.key)
    for dead in granted.reclaimed:
        notify("reclaimed", claim.key)
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
        usual_ms=granted.usual_ms,
        reclaimed=granted.reclaimed,
        term=term,
    )


def log_end(lease: Lease, outcome: Released | Draining | Lost, stamp: Callable[[], Stamp]) -> None:
    """Log the outcome of a release, and notify of it.

    :param stamp: makes a stamp, from which the time that the lease was held is computed.
    """
    match outcome:
        case Released(hold_until_ms):
            notify_released(lease, stamp)
            log.info(
                "Released the lock %r (lease %s, token %d)%s.",
                lease.key,
                lease.lease_id,
                lease.token,
                f"; it is not handed on before {utc(hold_until_ms):%H:%M:%S} UTC" if hold_until_ms else "",
            )
        case Draining(holder):
            notify("drained", lease.key)
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
            notify_lost(lease)
            log.warning(
                "The lock %r was not held any more when it was released (lease %s, token %d): %s.",
                lease.key,
                lease.lease_id,
                lease.token,
                outcome.describe(),
            )


def notify_lost(lease: Lease) -> None:
    """Notify of a lost lease, once: a heartbeat and the release may both find it lost."""
    if lease.term is None or lease.term.is_first_report(lease.key):
        notify("lost", lease.key)


def notify_released(lease: Lease, stamp: Callable[[], Stamp]) -> None:
    """Notify of a release, and of how long the lease was held."""
    notify("released", lease.key)
    notify("held", lease.key, lambda: max(0, stamp().best_ms - lease.acquired_at_ms) / 1000)


def report_loss(lease: Lease | LeaseSet, on_lost: OnLost) -> None:
    """Call `on_lost` with each lease and the error, if the lease is lost."""
    try:
        lease.check()
    except LockLostError as lost:
        for each in leases_of(lease):
            _call("on_lost", on_lost, each, lost)


def _call(name: str, callback: Callable[[Lease, T], None], lease: Lease, argument: T) -> None:
    try:
        callback(lease, argument)
    except Exception:  # the caller's own error, which must not end the monitor
        log.exception("The %s callback of the lock %r failed.", name, lease.key)


def monitor(lease: Lease | LeaseSet, safe_time: float, on_danger: OnDanger) -> Operation[None]:
    """Call `on_danger` each time that less than `safe_time` seconds remain, until the lease is lost."""
    in_danger = False
    while (left := lease.remaining()) > 0:
        if left <= safe_time and not in_danger:
            for each in leases_of(lease):
                _call("on_danger", on_danger, each, left)
        in_danger = left <= safe_time
        # A successful heartbeat ends the danger, and wakes nothing here: so look often.
        yield Sleep(min(left, safe_time / 10) if in_danger else left - safe_time)
