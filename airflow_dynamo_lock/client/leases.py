"""Leases as the clients hand them out: one or a set, granted, lost, ended, and what is logged of that."""

from __future__ import annotations

import os

from airflow_dynamo_lock.client.options import Keys, OnDanger
from airflow_dynamo_lock.core.effects import Operation, Sleep
from airflow_dynamo_lock.core.model.errors import (
    LockLostError,
)
from airflow_dynamo_lock.core.model.lease import Lease, LeaseSet, Term
from airflow_dynamo_lock.core.model.outcomes import (
    Draining,
    Granted,
    Lost,
    Released,
)
from airflow_dynamo_lock.core.model.text import readable, utc
from airflow_dynamo_lock.log import log


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


def lease_of(granted: Granted, term: Term) -> Lease:
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


def log_end(lease: Lease, outcome: Released | Draining | Lost) -> None:
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


def monitor(lease: Lease | LeaseSet, safe_time: float, on_danger: OnDanger) -> Operation[None]:
    """Callback each time that a lease can no longer be counted on for so long, until it is lost."""
    told = False
    while (left := lease.remaining()) > 0:
        if left <= safe_time and not told:
            for each in leases_of(lease):
                on_danger(each, left)
        told = left <= safe_time
        # Once it is in danger, only a heartbeat that succeeds ends that, and nobody says so.
        yield Sleep(min(left, safe_time / 10) if told else left - safe_time)
