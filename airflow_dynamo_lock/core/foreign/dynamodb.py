"""What the DynamoDB tables of other lock libraries have in common.

In their tables a lock is one item with one holder. Our holder keeps what the format has no place for in one more
attribute of that item, a map named `OURS`: lease id, version, stamps, processes inside. Other libraries carry unknown
attributes along and lose them when they take the lock, so that map counts only while the format's own attributes are
those that were written together with it.

The rules hold here as far as a format allows: every change is one conditional write, each grant has a lease id of its
own, a lost reply loses nothing, a release waits for the processes inside. There are no fencing tokens, no queue and no
slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

from airflow_dynamo_lock.core.effects import Request, Stamp
from airflow_dynamo_lock.core.foreign.item import OURS, ForeignItem
from airflow_dynamo_lock.core.model.claim import Claim
from airflow_dynamo_lock.core.model.edits import Change, CoolDown, Drain, Edit, Enter, Heartbeat
from airflow_dynamo_lock.core.model.record import Holder, LockRecord
from airflow_dynamo_lock.core.table.codec import encode
from airflow_dynamo_lock.core.table.expressions import took_over
from airflow_dynamo_lock.core.table.format import QUEUE_EMPTY, HeadUpdate
from airflow_dynamo_lock.core.table.items import holder_values


@dataclass(frozen=True)
class ForeignTable(ForeignItem):
    """Builds the requests on the DynamoDB table of another lock library."""

    def acquire_idle(
        self, claim: Claim, stamp: Stamp, seen: LockRecord | None = None, turn: HeadUpdate = QUEUE_EMPTY
    ) -> Request:
        """Take a lock that nobody holds."""
        condition, values = self.free
        if claim.only_existing:
            condition = f"attribute_exists(#pk) AND ({condition})"
        return self._take(claim, stamp, condition, values, took_over=False)

    def reclaim(
        self,
        claim: Claim,
        record: LockRecord,
        dead: Sequence[Holder],
        stamp: Stamp,
        turn: HeadUpdate = QUEUE_EMPTY,
        leave: int = 0,
    ) -> Request:
        """Take the place of a dead holder who is still as he was seen."""
        (one,) = dead
        condition, values = self._unchanged(one)
        return self._take(claim, stamp, condition, values, took_over=took_over(dead))

    def _take(
        self, claim: Claim, stamp: Stamp, condition: str, values: Mapping[str, Any], *, took_over: bool
    ) -> Request:
        mark = self.marked(claim.owner, claim.lease_id, stamp)
        sets = {
            self.mark: mark,
            **self.taken(claim.owner, claim.lease_ms),
            **self.lasting(claim.lease_ms),
            **{each.attribute: each.after(claim.lease_ms) for each in self.expiries(stamp)},
            **self.kept(claim.data),
            OURS: {
                **holder_values(claim, stamp, took_over=took_over),
                "lease_id": claim.lease_id,
                "mark": mark,
                "lease_s": -(-claim.lease_ms // 1000),
            },
        }
        remove = [*self.cleared, *self.no_data(claim.data)]
        return self._write(claim.key, sets, condition, values, remove=remove)

    def reacquire(self, claim: Claim, mine: Holder, stamp: Stamp) -> Request:
        """Go on holding what an earlier write of ours took (rule R5)."""
        return self._renewal(
            claim.key, claim.lease_id, stamp, mine.version, sets={"acquired_at": stamp.best_ms}
        )

    def correct_grant(self, claim: Claim, seen: LockRecord, token: int, stamp: Stamp) -> Request:
        """Replace the times of a grant whose clock turned out to be wrong (rule R3)."""
        version = seen.holders[claim.lease_id].version
        return self._renewal(claim.key, claim.lease_id, stamp, version, sets={"acquired_at": stamp.best_ms})

    def renew(
        self, key: str, lease_id: str, lease_ms: int, stamp: Stamp, edit: Edit, seen: str | None = None
    ) -> Request:
        """Write a heartbeat, and make an edit. `min_hold` does not exist here, so no lease cools down."""
        not_draining = " AND attribute_not_exists(#ours.#draining)"
        match edit:
            case Heartbeat():
                return self._renewal(key, lease_id, stamp, seen)
            case Change():
                longer = " AND #ours.#lease_ms <= :new_lease_ms" if edit.lease_ms is not None else ""
                changes: dict[str, Any] = {"lease_ms": edit.lease_ms, "data": edit.data}
                return self._renewal(key, lease_id, stamp, seen, not_draining + longer, **changes)
            case Enter():
                enters = {"processes.#process": stamp.best_ms}
                return self._renewal(
                    key, lease_id, stamp, seen, not_draining, sets=enters, process=edit.process
                )
            case Drain():
                drains = {"draining": True}
                return self._renewal(key, lease_id, stamp, seen, not_draining, sets=drains, lease_ms=lease_ms)
            case CoolDown():
                self._unsupported()
            case _:
                assert_never(edit)

    def leave(self, key: str, lease_id: str, process: str, lease_ms: int, stamp: Stamp) -> Request:
        """Note that a guarded process has left."""
        remove = ["#ours.#processes.#process"]
        return self._write(key, {}, self._mine, {":me": lease_id}, remove=remove, process=process)

    def release(self, key: str, lease_id: str, slots: int, stamp: Stamp, *, confirmed: bool) -> Request:
        """Give the lock back, if nobody is inside any more (rule R8)."""
        condition = f"{self._mine} AND size(#ours.#processes) = :none"
        return self._free(key, condition, {":me": lease_id, ":none": 0}, stamp)

    def forget(self, key: str, latest_token: int | None) -> Request:
        """Delete the item of a lock without holder. It has no token, so `latest_token` is not used."""
        return self._request("DeleteItem", key, "", *self.free)

    def break_(self, key: str, holder: Holder, stamp: Stamp) -> Request:
        """Take the lock away from its holder, whoever is inside. For people."""
        return self._free(key, *self._unchanged(holder), stamp)

    def _free(self, key: str, condition: str, values: Mapping[str, Any], stamp: Stamp) -> Request:
        empty = self.emptied(stamp)
        if empty is not None:
            return self._write(key, empty, condition, values, remove=["#ours"])
        return self._request("DeleteItem", key, "", condition, values)

    def scan(self, cursor: Mapping[str, Any] | None, prefix: str = "") -> Request:
        """Read one page of all locks."""
        params: dict[str, Any] = {"TableName": self.table, "ConsistentRead": True}
        if prefix:
            params |= {
                "FilterExpression": "begins_with(#pk, :prefix)",
                "ExpressionAttributeNames": {"#pk": self.partition_key},
                "ExpressionAttributeValues": {":prefix": encode(prefix)},
            }
        return Request("Scan", params | ({"ExclusiveStartKey": cursor} if cursor else {}))
