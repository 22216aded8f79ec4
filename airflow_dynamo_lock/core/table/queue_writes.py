"""The writes on the queue of waiters: tickets, the head, and the waiters' entries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow_dynamo_lock.core.effects import Reply, Request, Stamp
from airflow_dynamo_lock.core.model.claim import Claim
from airflow_dynamo_lock.core.model.record import LockRecord, Waiter
from airflow_dynamo_lock.core.table import version
from airflow_dynamo_lock.core.table.codec import encode
from airflow_dynamo_lock.core.table.expressions import (
    LOCK_ENTRY,
    PARTITION_KEY,
    RETENTION_MS,
    SORT_KEY,
    TableWrites,
    expiry,
)
from airflow_dynamo_lock.core.table.items import (
    _WAITER_PLAIN,
    UNVERIFIED,
    WAITER_ENTRY,
    _waiter_optional,
    waiter_record,
)
from airflow_dynamo_lock.core.table.position import front_of, mark_after, mark_at, next_number, number_of
from airflow_dynamo_lock.core.table.reads import TableReads

# The mark is not raised: there may be somebody before it.
_HEAD_NOT_LOWER = " AND (attribute_not_exists(#queue_head) OR #queue_head >= :front)"


# After all places.
_LAST_PLACE = "~"


class QueueWrites(TableWrites, TableReads):
    """Writes and reads of the queue."""

    def take_ticket(self, key: str, priority: int, seen: LockRecord, stamp: Stamp) -> Request:
        """Draw the next number, and make sure that nobody comes in between before its place is taken."""
        front = front_of(priority, next_number(seen, stamp))
        # To lower the mark is always safe: it says that nobody stands before it. Where it is low enough already, it has
        # to be so still when the number is drawn; and where it is not, nobody may have lowered it further meanwhile.
        lower = seen.queue_head is None or seen.queue_head > front
        return self._write(
            key,
            f"SET #last_ticket = {'#last_ticket + :one' if seen.last_ticket else ':number'}"
            + (", #queue_head = :front" if lower else ""),
            f"attribute_exists(#key) AND attribute_{'exists' if seen.last_ticket else 'not_exists'}(#last_ticket)"
            + (_HEAD_NOT_LOWER if lower else " AND #queue_head <= :front"),
            {":one": 1, ":number": next_number(seen, stamp), ":front": front},
        )

    def take_exact_ticket(self, claim: Claim, seen: LockRecord | None, stamp: Stamp) -> Request:
        """Draw the number that comes after those that were seen, and no other; also for a lock never used before."""
        number = next_number(seen, stamp)
        front = front_of(claim.priority, number)
        values = {":number": number, ":front": front}
        if seen is None:
            return self._write(
                claim.key,
                "SET #holders = :holders, #available = :capacity, #capacity = :capacity, #token = :now, "
                "#token_base = :state, #format_version = :version, #expires_at = :expires_at, "
                "#last_ticket = :number, #queue_head = :front",
                "attribute_not_exists(#key)",
                {
                    **values,
                    ":holders": {},
                    ":capacity": claim.capacity,
                    ":now": stamp.best_ms,
                    ":state": UNVERIFIED,
                    ":version": version.WRITTEN,
                    ":expires_at": expiry(stamp, 0),
                },
            )
        lower = seen.queue_head is None or seen.queue_head > front
        return self._write(
            claim.key,
            "SET #last_ticket = :number" + (", #queue_head = :front" if lower else ""),
            (
                "#last_ticket = :drawn"
                if seen.last_ticket
                else "attribute_exists(#key) AND attribute_not_exists(#last_ticket)"
            )
            + (_HEAD_NOT_LOWER if lower else " AND #queue_head <= :front"),
            {**values, ":drawn": seen.last_ticket},
        )

    def lower_head(self, key: str, place: str) -> Request:
        """Say that somebody stands in line at `place`, whom others took for gone."""
        return self._write(
            key,
            "SET #queue_head = :place",
            "attribute_exists(#key) AND (attribute_not_exists(#queue_head) OR #queue_head > :place)",
            {":place": place},
        )

    def clear_head(self, key: str, place: str) -> Request:
        """Say that nobody stands in line, after the only one has left his place."""
        return self._mark_left(key, place, "REMOVE #queue_head", " AND #last_ticket = :number")

    def advance_head(self, key: str, place: str) -> Request:
        """Say that nobody stands before the places behind that one, which was the first, and has been left."""
        return self._mark_left(key, place, "SET #queue_head = :after", "")

    def _mark_left(self, key: str, place: str, update: str, condition: str) -> Request:
        return self._write(
            key,
            update,
            # Who has come to stand before it has lowered the mark.
            f"#queue_head >= :front AND #queue_head <= :place{condition}",
            {
                ":front": mark_at(place),
                ":place": place,
                ":after": mark_after(place),
                ":number": number_of(place),
            },
        )

    def put_entry(self, waiter: Waiter) -> Request:
        """Write the waiter's entry."""
        item = {
            "format_version": version.WRITTEN,
            "key": waiter.key,
            "entry": WAITER_ENTRY + waiter.place,
            **{name: getattr(waiter, name) for name in _WAITER_PLAIN},
            "since": waiter.since_ms,
            # DynamoDB deletes it some day, should nobody else.
            "expires_at": (waiter.since_ms + RETENTION_MS) // 1000,
            **{name: value for name, value in _waiter_optional(waiter).items() if value},
        }
        encoded = {name: encode(value) for name, value in item.items()}
        return Request("PutItem", {"TableName": self.table, "Item": encoded})

    def hand_over_entry(self, key: str, place: str, process: str, stamp: Stamp) -> Request:
        """Leave a place to another process, which may soon go on in it; if none does, it is a dead one's.

        :param process: whose it is. One that goes on in it already is not disturbed.
        """
        stamped = stamp.server_ms is not None
        return self._write(
            key,
            "SET #version = :version"
            + (", #renewed_at = :renewed_at" if stamped else "")
            + " REMOVE #process"
            + ("" if stamped else ", #renewed_at"),
            "#process = :process",
            {":version": stamp.version, ":renewed_at": stamp.server_ms, ":process": process},
            entry=WAITER_ENTRY + place,
        )

    def delete_entry(self, key: str, place: str) -> Request:
        """Leave the line."""
        item_key = {PARTITION_KEY: encode(key), SORT_KEY: encode(WAITER_ENTRY + place)}
        return Request("DeleteItem", {"TableName": self.table, "Key": item_key})

    def read_queue(self, key: str, limit: int | None, cursor: Mapping[str, Any] | None) -> Request:
        """Read a lock, consistently, and then those who wait for it, in their order; from `cursor` (the last page's
        ``LastEvaluatedKey``) on."""
        values = {":key": key, ":lock": LOCK_ENTRY, ":last": WAITER_ENTRY + _LAST_PLACE}
        params: dict[str, Any] = {
            "TableName": self.table,
            "KeyConditionExpression": "#key = :key AND #entry BETWEEN :lock AND :last",
            "ExpressionAttributeNames": {"#key": PARTITION_KEY, "#entry": SORT_KEY},
            "ExpressionAttributeValues": {name: encode(value) for name, value in values.items()},
            "ConsistentRead": True,
            **({"Limit": limit} if limit else {}),
            **({"ExclusiveStartKey": cursor} if cursor else {}),
        }
        return Request("Query", params)

    def lock_in(self, reply: Reply) -> LockRecord | None:
        """The lock in the answer to a `line`, from its beginning."""
        for item in reply.output.get("Items", ())[:1]:
            if item[SORT_KEY] == encode(LOCK_ENTRY):
                return self.record(item, reply.server_ms)
        return None

    def waiters(self, output: Mapping[str, Any]) -> list[Waiter]:
        """The waiters in the answer to `read_queue`. A damaged entry is left out: nobody has to wait for it.

        :raises LockVersionError: a newer version of this package wrote an entry.
        """
        found = []
        for item in output.get("Items", ()):
            if item[SORT_KEY] == encode(LOCK_ENTRY):
                continue
            try:
                found.append(waiter_record(item, self.table))
            except (TypeError, ValueError, RecursionError):
                continue
        return found
