"""Checks after a history: notices of lost leases, exclusion, the order of tokens, damaged records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from airflow_dynamo_lock.core.model.errors import LockRecordError
from airflow_dynamo_lock.core.model.lease import Lease
from airflow_dynamo_lock.core.model.limits import SHARED
from airflow_dynamo_lock.core.table.expressions import LOCK_ENTRY
from airflow_dynamo_lock.core.table.items import read_waiter
from airflow_dynamo_lock.core.table.native import NativeFormat
from proof.simulator.checker import Checker
from proof.simulator.dynamodb import ItemKey
from proof.simulator.expressions import Item
from proof.simulator.lease_use import NEVER, Grant, LeaseUse
from proof.simulator.threads import MAX_DELAY
from proof.simulator.world import Process

# Seconds within which a holder is notified of its loss: one by the slowest clock, and some steps of its
# process.
_NOTICE = 1.1
# Seconds from a loss until the guard has stopped the work, on the slowest clock, and some steps of its process.
_STOP, _STOP_TOLERANCE = 3.0 / 0.95, 0.3
# Seconds by which the end of a lease may differ between two computations of it.
_ROUNDING = 1e-6
# Seconds that the undo of a set takes, key by key. A claim that arrives meanwhile is undone in part.
_UNDO = 0.031


def verify(checker: Checker, items: Mapping[ItemKey, Item]) -> None:
    """Check what can be checked only after the history.

    :param items: contents of the table.
    """
    for error in checker.world.errors:
        checker.report(error)
    for gone in checker.queue.gone_but_alive():
        checker.report(gone)
    for use in checker.uses:
        _check_notice(checker, use)
        if use.guarded:
            _check_stopped(checker, use)
    for key, capacity in checker.capacities.items():
        _check_exclusion(checker, key)
        _check_tokens(checker, [grant for grant in checker.grants if grant.key == key], capacity)
    for (key, entry), item in items.items():
        if entry == LOCK_ENTRY:
            _check_record(checker, key, item)
            continue
        try:
            read_waiter(item, "simulated")
        except (TypeError, ValueError) as damaged:
            checker.report(f"the entry {entry} in the queue of {key} is damaged: {damaged}")


def _check_record(checker: Checker, key: str, item: Item) -> None:
    """Check that a record is not damaged, and that no lock of a released set is still held."""
    try:
        record = NativeFormat("locks").record(item, None)
    except LockRecordError as damaged:
        checker.report(str(damaged))
        return
    for lease_id, holder in record.holders.items():
        released = -NEVER if holder.cooling_down else checker.released_after_faults.get(lease_id, -NEVER)
        if checker.granted.get((key, lease_id), (NEVER, 0))[0] < released - _UNDO:
            checker.report(f"{lease_id} was released at {released:.3f}, and still holds {key}")


def _check_notice(checker: Checker, use: LeaseUse) -> None:
    """Check that the holder was notified within a second after its lease had run out.

    Only seconds in which its process ran count.
    """
    process, runs_out = use.process, use.term.runs_out_at
    until = min(use.term.lost_at, use.left, checker.world.now)
    if _running(process, runs_out, until) > _NOTICE:
        checker.report(
            f"{use.lease.lease_id} ran out at {runs_out:.3f}, "
            f"and {process.name} was not notified until {until:.3f}"
        )


def _check_stopped(checker: Checker, use: LeaseUse) -> None:
    """Check that the guard stopped the work in time: before the end of the lease if heartbeats failed, and within
    `_STOP` after any other loss. Only seconds in which the process ran count.

    A process that was suspended just before the end may notice only afterwards that heartbeats have failed.
    """
    lost = use.term.lost_at
    if lost == NEVER or use.left <= lost:
        return
    runs_out = use.term.runs_out_at
    left = min(use.left, checker.world.now)
    noticed_early = lost < runs_out - _ROUNDING
    suspended = any(
        end - begin > MAX_DELAY and begin < runs_out and end > runs_out - _NOTICE
        for begin, end in use.process.pauses
    )
    failing = use.term.lost == "no heartbeat has succeeded in time" and (noticed_early or not suspended)
    late = _running(use.process, lost, left) - (runs_out - lost if failing else _STOP)
    if late > _STOP_TOLERANCE:
        checker.report(
            f"{use.process.name} lost {use.lease.lease_id} at {lost:.3f}, and its guard stopped it at {left:.3f}, "
            f"{late:.3f} s too late"
        )


def _running(process: Process, begin: float, end: float) -> float:
    """Seconds between two true times in which the process ran."""
    running, counted = max(0.0, end - begin), begin
    for paused, resumed in sorted(process.pauses):
        running -= max(0.0, min(resumed, end) - max(paused, counted))
        counted = max(counted, resumed)
    return running


def _check_exclusion(checker: Checker, key: str) -> None:
    """Check that holders of a lock never counted on more slots than its capacity, nor on a removed lease."""
    spans_of: dict[str, list[tuple[float, float]]] = defaultdict(list)
    leases: dict[str, Lease] = {}
    for use in checker.uses:
        if use.lease.key == key:
            lease_id = use.lease.lease_id
            leases[lease_id] = use.lease
            # The holder of a broken lease learns of that at its next heartbeat. Until then it may overlap
            # with its successor, as docs/protocol.md says.
            broken = checker.broken.get((key, lease_id), NEVER)
            spans_of[lease_id] += [(begin, min(end, broken)) for begin, end in use.spans() if begin < broken]
    for lease_id, spans in spans_of.items():
        for removed, what in ((checker.reclaimed, "reclaimed"), (checker.released, "released")):
            at = removed.get((key, lease_id), -NEVER)
            for begin, end in spans:
                if begin <= at < end:
                    checker.report(f"{lease_id} was {what} at {at:.3f}, but counted on until {end:.3f}")
    for spans in spans_of.values():
        for begin, _ in spans:
            together = [
                other
                for other, theirs in spans_of.items()
                if any(since <= begin < until for since, until in theirs)
            ]
            # The claim of an exclusive holder decides, whatever capacity the others claimed.
            claimed = min(leases[other].capacity for other in together)
            # A semaphore's capacity may be pinned below what is held. The last grant was within it.
            _, pinned = max(checker.granted[key, other] for other in together)
            capacity = pinned if 1 < claimed < SHARED else claimed
            if sum(leases[other].slots for other in together) > capacity:
                checker.report(
                    f"at {begin:.3f}, {' and '.join(sorted(together))} worked under {key} at the same time, "
                    f"which has a capacity of {capacity}"
                )
                return


def _check_tokens(checker: Checker, grants: list[Grant], capacity: int) -> None:
    """Check that the tokens of one lock's grants are unique and increase."""
    tokens: dict[int, str] = {}
    for grant in grants:
        if (other := tokens.setdefault(grant.token, grant.lease_id)) != grant.lease_id:
            checker.report(f"{other} and {grant.lease_id} both have the token {grant.token} of {grant.key}")
    # A lease that was removed before its caller received the grant may already have a successor.
    removed = {**checker.reclaimed, **checker.released_with_time, **checker.broken}
    received = [
        grant
        for grant in grants
        if grant.valid and removed.get((grant.key, grant.lease_id), NEVER) > grant.confirmed
    ]
    grants = sorted(received, key=lambda grant: grant.confirmed)
    for i, later in enumerate(grants):
        for earlier in grants[:i]:
            if earlier.lease_id == later.lease_id:
                continue  # one grant, which two triggerers received
            follows = capacity == 1 or earlier.confirmed < later.begun
            if follows and earlier.token > later.token:
                checker.report(
                    f"{later.lease_id} has the token {later.token} of {later.key}, "
                    f"but {earlier.lease_id}, which was granted before it, has {earlier.token}"
                )
