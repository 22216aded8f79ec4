"""The writes that grant a lock or set its capacity. The condition of each write is what makes it safe (R1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow_dynamo_lock.core.effects import Request, Stamp
from airflow_dynamo_lock.core.model.claim import Claim
from airflow_dynamo_lock.core.model.decisions import Loss
from airflow_dynamo_lock.core.model.kind import Kind
from airflow_dynamo_lock.core.model.limits import ESTIMATES_DIFFER_MS
from airflow_dynamo_lock.core.model.record import Holder, LockRecord
from airflow_dynamo_lock.core.table import version
from airflow_dynamo_lock.core.table.expressions import (
    expiry,
    remove_clause,
    removed_data,
    set_data,
    took_over,
)
from airflow_dynamo_lock.core.table.format import QUEUE_EMPTY, HeadUpdate
from airflow_dynamo_lock.core.table.items import (
    REMOVED_PREFIX,
    UNVERIFIED,
    VERIFIED,
    holder_values,
    loss_values,
)
from airflow_dynamo_lock.core.table.renewal_writes import RenewalWrites, renewed_at

# R5: a delayed duplicate of an acquire must not retake a lock that its sender has since released. It is refused if a
# slot was freed after it was stamped, unless the sender already knew of that release.
_NO_LATER_RELEASE = (
    "(attribute_not_exists(#last_freed_at) OR #last_freed_at <= :no_newer OR #last_freed_at = :seen_freed)"
)


# R15: no person has removed the claim from the queue.
_NOT_REMOVED = " AND attribute_not_exists(#removed)"


#: Maximum number of dead holders that one write removes: DynamoDB's expressions have at most 4,096 bytes.
MAX_REMOVED = 40


def _unchanged(dead: Sequence[Holder]) -> list[str]:
    """Conditions: no dead holder has sent a heartbeat since it was found dead."""
    return [f"#holders.#dead{i}.#version = :version{i}" for i in range(len(dead))]


def _head_values(head_update: HeadUpdate) -> dict[str, Any]:
    return {**head_update.values, ":next_head": head_update.next}


def _capacity_change_allowed(seen: LockRecord | None) -> str:
    """Condition: the capacity of an idle lock may change, unless it is pinned."""
    return (
        "#capacity = :capacity"
        if seen is not None and seen.capacity_pinned
        else "attribute_not_exists(#capacity_pinned)"
    )


def _set_hold_until(claim: Claim) -> str:
    return ", #holders.#me.#hold_until = :hold_until" if claim.min_hold_ms else ""


def _freed_values(stamp: Stamp, seen: LockRecord | None) -> dict[str, int]:
    no_newer = stamp.best_ms + ESTIMATES_DIFFER_MS
    last_freed_at_ms = None if seen is None else seen.last_freed_at_ms
    return {":no_newer": no_newer, ":seen_freed": no_newer if last_freed_at_ms is None else last_freed_at_ms}


def _loss(dead: Sequence[Holder], stamp: Stamp) -> tuple[str, dict[str, Any]]:
    """The assignment of the loss of the first dead holder that did not release its lease, and its value; empty if all
    did."""
    lost = next((each for each in dead if not each.draining), None)
    if lost is None:
        return "", {}
    loss = Loss(lost.lease_id, lost.owner, stamp.best_ms, broken=False)
    return ", #last_loss = :loss", {":loss": loss_values(loss)}


class GrantWrites(RenewalWrites):
    """Writes that grant a lock or set its capacity."""

    def acquire_idle(
        self,
        claim: Claim,
        stamp: Stamp,
        seen: LockRecord | None = None,
        head_update: HeadUpdate = QUEUE_EMPTY,
    ) -> Request:
        """Acquire a lock that is idle or has no record.

        :param seen: the lock as it was read; None if it was not, or has no record.
        """
        # A record without `token_base` was written by another program. It has a token, so the time is not used.
        foreign = seen is not None and seen.token_base is None
        return self._write(
            claim.key,
            "SET #holders = :holders, #available = :left, #capacity = :capacity, "
            "#token = if_not_exists(#token, :now) + :one, #token_base = if_not_exists(#token_base, :state), "
            f"#format_version = :version, #expires_at = :expires_at{set_data(claim.data)}{head_update.set_head}"
            + remove_clause([*head_update.remove, *removed_data(claim.data)]),
            # Checking the size as well as the counter protects holders if another program damaged the counter. The
            # types refuse what `read_lock` cannot read, so a damaged record is left as it is.
            ("" if claim.only_existing else "(attribute_not_exists(#key) OR ")
            + "(attribute_type(#holders, :map) AND attribute_type(#capacity, :number) AND "
            "attribute_type(#token, :number) AND (attribute_not_exists(#data) OR attribute_type(#data, :map)) AND "
            "(attribute_not_exists(#last_ticket) OR attribute_type(#last_ticket, :number)) AND "
            "(attribute_not_exists(#queue_head) OR attribute_type(#queue_head, :text)) AND "
            f"{'attribute_not_exists(#token_base)' if foreign else 'attribute_type(#token_base, :text)'} AND "
            f"#available = #capacity AND size(#holders) = :zero AND {_capacity_change_allowed(seen)} AND "
            f"{_NO_LATER_RELEASE}{head_update.and_condition}{_NOT_REMOVED})"
            + ("" if claim.only_existing else ")"),
            {
                **_freed_values(stamp, seen),
                **_head_values(head_update),
                ":holders": {claim.lease_id: holder_values(claim, stamp)},
                ":left": claim.capacity - claim.slots,
                ":capacity": claim.capacity,
                ":now": stamp.best_ms,
                ":state": VERIFIED if foreign or stamp.undated else UNVERIFIED,
                ":one": 1,
                ":zero": 0,
                ":map": "M",
                ":number": "N",
                ":text": "S",
                ":version": version.WRITTEN,
                ":expires_at": expiry(stamp, claim.lease_ms),
                ":data": claim.data,
            },
            removed=REMOVED_PREFIX + (head_update.waiter or claim.lease_id),
        )

    def acquire_slots(
        self,
        claim: Claim,
        stamp: Stamp,
        seen: LockRecord,
        head_update: HeadUpdate = QUEUE_EMPTY,
        reserved: int = 0,
    ) -> Request:
        """Acquire free slots of a lock with other holders.

        :param reserved: number of slots that must remain for earlier waiters.
        """
        return self._write(
            claim.key,
            "SET #holders.#me = :me, #available = #available - :slots, #token = #token + :one, "
            f"#expires_at = :expires_at{set_data(claim.data)}{head_update.set_head}"
            + remove_clause([*head_update.remove, *removed_data(claim.data)]),
            "#available >= :need AND #capacity = :capacity AND attribute_not_exists(#holders.#me) AND "
            + _NO_LATER_RELEASE
            + head_update.and_condition
            + _NOT_REMOVED,
            {
                **_freed_values(stamp, seen),
                **_head_values(head_update),
                ":me": holder_values(claim, stamp),
                ":slots": claim.slots,
                ":need": claim.slots + reserved,
                ":capacity": claim.capacity,
                ":one": 1,
                ":expires_at": expiry(stamp, claim.lease_ms),
                ":data": claim.data,
            },
            me=claim.lease_id,
            removed=REMOVED_PREFIX + (head_update.waiter or claim.lease_id),
        )

    def reclaim(
        self,
        claim: Claim,
        record: LockRecord,
        dead: Sequence[Holder],
        stamp: Stamp,
        head_update: HeadUpdate = QUEUE_EMPTY,
        reserved: int = 0,
    ) -> Request:
        """Acquire slots and remove dead holders in the same write, on condition of each one's *version*: a holder that
        has sent a heartbeat in the meantime is alive and wins (R3).

        :param dead: at most `MAX_REMOVED`.
        :param reserved: number of slots that must remain for earlier waiters.
        """
        names = {f"dead{i}": holder.lease_id for i, holder in enumerate(dead)}
        set_loss, loss = _loss(dead, stamp)
        # A reader does not continue the work of the dead readers that it removes.
        takes_over = took_over(dead) and not claim.kind is record.kind is Kind.SHARED
        values: dict[str, Any] = {
            **_head_values(head_update),
            ":me": holder_values(claim, stamp, took_over=takes_over),
            ":one": 1,
            ":capacity": claim.capacity,
            ":last_freed_at": stamp.best_ms,
            ":expires_at": expiry(stamp, claim.lease_ms),
            ":data": claim.data,
            **loss,
        }
        values |= {f":version{i}": holder.version for i, holder in enumerate(dead)}
        conditions = _unchanged(dead)
        if len(dead) == len(record.holders):
            # No other holder is left, so the counters start anew, and the capacity may change.
            conditions.append(f"size(#holders) = :holders AND {_capacity_change_allowed(record)}")
            counters = "#available = :left, #capacity = :capacity"
            values |= {":holders": len(dead), ":left": claim.capacity - claim.slots}
        else:
            conditions.append("#capacity = :capacity AND #available >= :need")
            counters = "#available = #available + :net"
            net = sum(holder.slots for holder in dead) - claim.slots
            # `net` may be negative: `set_capacity` may have left fewer slots than are held.
            values |= {":net": net, ":need": reserved - net}
        return self._write(
            claim.key,
            f"SET #holders.#me = :me, {counters}, #token = #token + :one, #last_freed_at = :last_freed_at, "
            f"#expires_at = :expires_at{set_data(claim.data)}{head_update.set_head}{set_loss}"
            + remove_clause(
                [*(f"#holders.#{name}" for name in names), *head_update.remove, *removed_data(claim.data)]
            ),
            " AND ".join([*conditions, "attribute_not_exists(#holders.#me)"])
            + head_update.and_condition
            + _NOT_REMOVED,
            values,
            me=claim.lease_id,
            removed=REMOVED_PREFIX + (head_update.waiter or claim.lease_id),
            **names,
        )

    def remove_dead(self, key: str, dead: Sequence[Holder], stamp: Stamp) -> Request:
        """Remove dead holders without a grant, where `reclaim` would have to remove too many.

        :param dead: at most `MAX_REMOVED`.
        """
        names = {f"dead{i}": holder.lease_id for i, holder in enumerate(dead)}
        set_loss, loss = _loss(dead, stamp)
        return self._write(
            key,
            "SET #available = #available + :slots, #last_freed_at = :last_freed_at, #expires_at = :expires_at"
            + set_loss
            + remove_clause([f"#holders.#{name}" for name in names]),
            " AND ".join(_unchanged(dead)),
            {
                ":slots": sum(holder.slots for holder in dead),
                ":last_freed_at": stamp.best_ms,
                ":expires_at": expiry(stamp, 0),
                **loss,
                **{f":version{i}": holder.version for i, holder in enumerate(dead)},
            },
            **names,
        )

    def reacquire(self, claim: Claim, mine: Holder, stamp: Stamp, last: Holder | None) -> Request:
        """Continue to hold what an earlier write of the same claim acquired (R5). The lease gets a new token: the first
        one is unknown once others have acquired slots, and no caller has received it.

        :param last: the holder as its last heartbeat left it; None if there was none.
        """
        return self._renewal(
            claim.key,
            claim.lease_id,
            claim.lease_ms,
            stamp,
            renewed_at(stamp, last),
            mine,
            ", #token = #token + :one, #holders.#me.#acquired_at = :acquired_at" + _set_hold_until(claim),
            " AND #holders.#me.#slots = :slots AND #capacity = :capacity",
            values={
                ":one": 1,
                ":acquired_at": stamp.best_ms,
                ":hold_until": stamp.best_ms + claim.min_hold_ms,
                ":slots": claim.slots,
                ":capacity": claim.capacity,
            },
            only_seen=True,
        )

    def correct_grant(
        self, claim: Claim, seen: LockRecord, token: int, stamp: Stamp, last: Holder | None
    ) -> Request:
        """Correct the times and the token of a grant that was stamped by a wrong clock (R3, R10).

        :param last: the holder as its last heartbeat before the grant left it; None if there was none.
        """
        return self._renewal(
            claim.key,
            claim.lease_id,
            claim.lease_ms,
            stamp,
            renewed_at(stamp, last),
            seen.holders[claim.lease_id],
            ", #token = :token, #token_base = :verified, #holders.#me.#acquired_at = :acquired_at"
            + _set_hold_until(claim),
            " AND #token = :seen_token",
            values={
                ":hold_until": stamp.best_ms + claim.min_hold_ms,
                ":token": token,
                ":seen_token": seen.token,
                ":verified": VERIFIED,
                ":acquired_at": stamp.best_ms,
            },
            only_seen=True,
        )

    def set_capacity(self, key: str, capacity: int | None, seen: LockRecord, stamp: Stamp) -> Request:
        """Pin the capacity of a semaphore, which may have holders; or, with None, let claims decide again.

        None needs a lock without holders, because claims may have another capacity.
        """
        if capacity is None:
            return self._write(
                key,
                "SET #expires_at = :expires_at REMOVE #capacity_pinned",
                "attribute_exists(#capacity_pinned) AND size(#holders) = :zero",
                {":expires_at": expiry(stamp, 0), ":zero": 0},
            )
        return self._write(
            key,
            "SET #capacity = :capacity, #available = #available + :more, #capacity_pinned = :true, "
            "#expires_at = :expires_at",
            # A holder of a plain or shared lock does not expect other holders; such a grant changes the capacity, so
            # the condition refuses this write.
            "#capacity = :seen_capacity AND attribute_type(#available, :number)"
            + ("" if seen.holders else " AND size(#holders) = :zero"),
            {
                ":capacity": capacity,
                ":more": capacity - seen.capacity,
                ":seen_capacity": seen.capacity,
                ":true": True,
                ":zero": 0,
                ":number": "N",
                ":expires_at": expiry(stamp, 0),
            },
        )

    def create(self, key: str, capacity: int, stamp: Stamp) -> Request:
        """Create the record of a lock with a pinned capacity."""
        return self._write(
            key,
            "SET #holders = :holders, #available = :capacity, #capacity = :capacity, #capacity_pinned = :true, "
            "#token = :now, #token_base = :state, #format_version = :version, #expires_at = :expires_at",
            "attribute_not_exists(#key)",
            {
                ":holders": {},
                ":capacity": capacity,
                ":true": True,
                ":now": stamp.best_ms,
                ":state": UNVERIFIED,
                ":version": version.WRITTEN,
                ":expires_at": expiry(stamp, 0),
            },
        )
