"""The requests on a DynamoDB table of another lock library, common to the four formats on DynamoDB.

In these tables a lock is one item with one holder. A holder of this package stores what the format has no
attribute for (lease id, version, stamps, processes inside) in one more attribute, a map named `OURS`. Other
clients keep this attribute when they update the item, and drop it when they replace the item. So the map
counts only while the item's mark is the one that was written with it (`ForeignItem`).

The rules of the native format hold as far as the format allows: each change is one conditional write (R1), a
lost reply loses nothing (R5), each attempt has a lease id of its own (R7), and a release waits for the
processes inside (R8). There are no fencing tokens, queues and slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, assert_never

from airflow_dynamo_lock.core.effects import Request, Stamp
from airflow_dynamo_lock.core.foreign.item import OURS, ForeignItem
from airflow_dynamo_lock.core.foreign.values import rounded_up
from airflow_dynamo_lock.core.model.claim import Claim
from airflow_dynamo_lock.core.model.decisions import Decision
from airflow_dynamo_lock.core.model.edits import Change, CoolDown, Drain, Edit, Enter, Heartbeat
from airflow_dynamo_lock.core.model.hold import Hold
from airflow_dynamo_lock.core.model.record import Holder, LockRecord
from airflow_dynamo_lock.core.model.waits import Wait
from airflow_dynamo_lock.core.table.codec import encode
from airflow_dynamo_lock.core.table.expressions import took_over
from airflow_dynamo_lock.core.table.format import QUEUE_EMPTY, HeadUpdate
from airflow_dynamo_lock.core.table.items import WAIT_PREFIX, holder_values, wait_values
from airflow_dynamo_lock.core.table.renewal_writes import renewed_at

_NOT_DRAINING = " AND attribute_not_exists(#ours.#draining)"


@dataclass(frozen=True)
class ForeignTable(ForeignItem):
    """Builds the requests on a DynamoDB table of another library. A subclass defines the attributes."""

    def acquire_idle(
        self,
        claim: Claim,
        stamp: Stamp,
        seen: LockRecord | None = None,
        head_update: HeadUpdate = QUEUE_EMPTY,
    ) -> Request:
        """Acquire a lock that is free or has no item."""
        condition, values = self.free_condition
        if claim.only_existing:
            condition = f"attribute_exists(#pk) AND ({condition})"
        return self._grant(claim, stamp, condition, values, took_over=False)

    def reclaim(
        self,
        claim: Claim,
        record: LockRecord,
        dead: Sequence[Holder],
        stamp: Stamp,
        head_update: HeadUpdate = QUEUE_EMPTY,
        reserved: int = 0,
    ) -> Request:
        """Replace a dead holder, on condition that it has not changed since it was found dead (R3).

        :param dead: the one holder of the lock.
        """
        (holder,) = dead
        condition, values = self._unchanged(holder)
        return self._grant(claim, stamp, condition, values, took_over=took_over(dead))

    def _grant(
        self, claim: Claim, stamp: Stamp, condition: str, values: Mapping[str, Any], *, took_over: bool
    ) -> Request:
        """Make the claim the holder of the lock, if the condition holds."""
        mark = self.new_mark(claim.owner, claim.lease_id, stamp)
        ours = {
            **holder_values(claim, stamp, took_over=took_over),
            "lease_id": claim.lease_id,
            "mark": mark,
            # In seconds as well, because a renewal may need them and expressions cannot divide (`Expiry`).
            "lease_s": rounded_up(claim.lease_ms),
        }
        sets = {
            self.mark_attribute: mark,
            **self.owner_attributes(claim.owner),
            **self.lease_attributes(claim.lease_ms),
            **{expiry.attribute: expiry.value(claim.lease_ms) for expiry in self.expiries(stamp)},
            **self.data_attributes(claim.data),
            OURS: ours,
        }
        remove = [*self.removed_on_grant, *self.removed_data(claim.data)]
        return self._write(claim.key, sets, condition, values, remove=remove)

    def reacquire(self, claim: Claim, mine: Holder, stamp: Stamp, last: Holder | None) -> Request:
        """Continue to hold what an earlier write of the same claim acquired (R5)."""
        return self._renewal(
            claim.key,
            claim.lease_id,
            stamp,
            renewed_at(stamp, last),
            mine,
            sets={"acquired_at": stamp.best_ms},
            only_seen=True,
        )

    def correct_grant(
        self, claim: Claim, seen: LockRecord, token: int, stamp: Stamp, last: Holder | None
    ) -> Request:
        """Correct the times of a grant that was stamped by a wrong clock (R3). There is no token, so `token`
        is not used."""
        return self.reacquire(claim, seen.holders[claim.lease_id], stamp, last)

    def renew(
        self, key: str, lease_id: str, lease_ms: int, stamp: Stamp, edit: Edit, seen: Holder | None = None
    ) -> Request:
        """Write a heartbeat: it proves that the holder is alive, and makes an edit.

        :param lease_ms: length of the lease if the edit changes it, milliseconds.
        :param seen: the holder as the sender last saw it; None if it has not.
        :raises NotImplementedError: the edit is `CoolDown`, which needs `min_hold`.
        """
        renewal = partial(self._renewal, key, lease_id, stamp, renewed_at(stamp, seen), seen)
        match edit:
            case Heartbeat():
                return renewal()
            case Change():
                condition = _NOT_DRAINING
                if edit.longer:
                    condition += " AND #ours.#lease_ms <= :new_lease_ms"
                length = lease_ms if edit.longer else None
                return renewal(condition, lease_ms=length, data=edit.data)
            case Enter():
                sets = {"processes.#process": stamp.best_ms}
                return renewal(_NOT_DRAINING, sets=sets, process=edit.process)
            case Drain():
                # Once only: a second drain would lengthen the lease that the first one has shortened.
                return renewal(_NOT_DRAINING, sets={"draining": True}, lease_ms=lease_ms)
            case CoolDown():
                self._unsupported()
            case _:
                assert_never(edit)

    def leave(self, key: str, lease_id: str, process: str, lease_ms: int, stamp: Stamp) -> Request:
        """Remove a guarded process that has left."""
        remove = ["#ours.#processes.#process"]
        return self._write(key, {}, self._held_by_me, {":me": lease_id}, remove=remove, process=process)

    def note_wait(self, key: str, lease_id: str, wait: Wait) -> Request:
        """Note what the holder waits for (R14). A note with `seen` replaces the one that is there."""
        exists = "attribute_exists" if wait.seen else "attribute_not_exists"
        return self._write(
            key,
            {},
            f"{self._held_by_me} AND {exists}(#ours.#process)",
            {":me": lease_id, ":wait": wait_values(wait)},
            assignments=["#ours.#process = :wait"],
            process=WAIT_PREFIX + wait.id,
        )

    def erase_wait(self, key: str, lease_id: str, wait_id: str) -> Request:
        """Remove the note of a wait that has ended."""
        values = {":me": lease_id}
        remove = ["#ours.#process"]
        return self._write(key, {}, self._held_by_me, values, remove=remove, process=WAIT_PREFIX + wait_id)

    def release(
        self,
        key: str,
        lease_id: str,
        slots: int,
        stamp: Stamp,
        *,
        confirmed: bool,
        hold: Hold | None = None,
        leaving: str | None = None,
    ) -> Request:
        """Free the lock, if no process but `leaving` is inside (R8). There is no token and no queue, so `confirmed` and
        `hold` are not used."""
        inside = "size(#ours.#processes) = :inside"
        if leaving is not None:
            inside += " AND attribute_exists(#ours.#processes.#process)"
        values = {":me": lease_id, ":inside": 0 if leaving is None else 1}
        return self._free(key, f"{self._held_by_me} AND {inside}", values, stamp, leaving or "")

    def forget(self, key: str, latest_token: int | None) -> Request:
        """Delete the item of a free lock. There is no token, so `latest_token` is not used."""
        return self._request("DeleteItem", key, "", *self.free_condition)

    def break_(self, key: str, holder: Holder, stamp: Stamp, decision: Decision | None = None) -> Request:
        """Remove a lease, even with processes inside. Only people decide that."""
        return self._free(key, *self._unchanged(holder), stamp)

    def _free(
        self, key: str, condition: str, values: Mapping[str, Any], stamp: Stamp, process: str = ""
    ) -> Request:
        """Free the lock as the format does it: update its item, or delete it."""
        attributes = self.released_attributes(stamp)
        if attributes is None:
            return self._request("DeleteItem", key, "", condition, values, process)
        return self._write(key, attributes, condition, values, remove=["#ours"], process=process)

    def scan(self, cursor: Mapping[str, Any] | None, prefix: str = "", *, waiters: bool = False) -> Request:
        """Read one page of all locks whose partition keys begin with the prefix.

        :param cursor: ``LastEvaluatedKey`` of the page before; None for the first.
        """
        params: dict[str, Any] = {"TableName": self.table, "ConsistentRead": True}
        if prefix:
            params |= {
                "FilterExpression": "begins_with(#pk, :prefix)",
                "ExpressionAttributeNames": {"#pk": self.partition_key},
                "ExpressionAttributeValues": {":prefix": encode(prefix)},
            }
        return Request("Scan", params | ({"ExclusiveStartKey": cursor} if cursor else {}))
