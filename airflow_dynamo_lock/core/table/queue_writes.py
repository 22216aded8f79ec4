"""The writes on the queue of waiters: tickets, the head, and the waiters' entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from airflow_dynamo_lock.core.effects import Reply, Request, Stamp
from airflow_dynamo_lock.core.model.claim import Claim
from airflow_dynamo_lock.core.model.decisions import Removal
from airflow_dynamo_lock.core.model.errors import LockTableError, LockVersionError
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
    remove_clause,
)
from airflow_dynamo_lock.core.table.items import (
    REMOVED_PREFIX,
    UNVERIFIED,
    WAITER_ENTRY,
    read_waiter,
    removal_values,
    waiter_values,
)
from airflow_dynamo_lock.core.table.position import head_after, head_at, head_of, next_ticket, ticket_of
from airflow_dynamo_lock.core.table.reads import TableReads

# For a write that sets the head: refused if another waiter has set a lower (earlier) one, which it would raise.
_HEAD_ABSENT_OR_HIGHER = " AND (attribute_not_exists(#queue_head) OR #queue_head >= :front)"

# Sorts after all places.
_LAST_PLACE = "~"


class QueueWrites(TableWrites, TableReads):
    """Builds the writes and reads of the queue."""

    def take_ticket(self, key: str, priority: int, seen: LockRecord, stamp: Stamp) -> Request:
        """Take the next ticket, and lower the head to its place, so that no newcomer is granted before the entry is
        written."""
        front = head_of(priority, next_ticket(seen, stamp))
        # A head that is too low is safe, one that is too high is not. If the head is low enough, it must still be so
        # when the write is applied; if this write lowers it, no other waiter may have lowered it further.
        lower = seen.queue_head is None or seen.queue_head > front
        return self._write(
            key,
            f"SET #last_ticket = {'#last_ticket + :one' if seen.last_ticket else ':number'}"
            + (", #queue_head = :front" if lower else ""),
            f"attribute_exists(#key) AND attribute_{'exists' if seen.last_ticket else 'not_exists'}(#last_ticket)"
            + (_HEAD_ABSENT_OR_HIGHER if lower else " AND #queue_head <= :front"),
            {":one": 1, ":number": next_ticket(seen, stamp), ":front": front},
        )

    def take_exact_ticket(self, claim: Claim, seen: LockRecord | None, stamp: Stamp) -> Request:
        """Take the ticket after the last one that was seen, and no other. Creates the record of a lock without one."""
        ticket = next_ticket(seen, stamp)
        front = head_of(claim.priority, ticket)
        values = {":number": ticket, ":front": front}
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
                "#last_ticket = :last_ticket"
                if seen.last_ticket
                else "attribute_exists(#key) AND attribute_not_exists(#last_ticket)"
            )
            + (_HEAD_ABSENT_OR_HIGHER if lower else " AND #queue_head <= :front"),
            {**values, ":last_ticket": seen.last_ticket},
        )

    def note_removal(self, key: str, lease_id: str, removal: Removal, outdated: Sequence[str]) -> Request:
        """Note that a person has removed a waiter, which is then never granted the lock (R15).

        Refused if the waiter holds the lock already.

        :param outdated: lease ids of earlier notes, to delete.
        """
        names = {f"old{i}": REMOVED_PREFIX + each for i, each in enumerate(outdated)}
        return self._write(
            key,
            "SET #removed = :removal" + remove_clause([f"#{name}" for name in names]),
            "attribute_exists(#key) AND attribute_not_exists(#holders.#me)",
            {":removal": removal_values(removal)},
            me=lease_id,
            removed=REMOVED_PREFIX + lease_id,
            **names,
        )

    def lower_head(self, key: str, place: str) -> Request:
        """Lower the head to the place of a waiter that others have skipped as dead."""
        return self._write(
            key,
            "SET #queue_head = :place",
            "attribute_exists(#key) AND (attribute_not_exists(#queue_head) OR #queue_head > :place)",
            {":place": place},
        )

    def clear_head(self, key: str, place: str) -> Request:
        """Remove the head after the only waiter has left its place."""
        return self._move_head(key, place, "REMOVE #queue_head", " AND #last_ticket = :number")

    def advance_head(self, key: str, place: str) -> Request:
        """Move the head behind the place that its first waiter has left."""
        return self._move_head(key, place, "SET #queue_head = :after", "")

    def _move_head(self, key: str, place: str, update: str, condition: str) -> Request:
        return self._write(
            key,
            update,
            # A waiter before this place has lowered the head, and this write is refused.
            f"#queue_head >= :front AND #queue_head <= :place{condition}",
            {
                ":front": head_at(place),
                ":place": place,
                ":after": head_after(place),
                ":number": ticket_of(place),
            },
        )

    def put_entry(self, waiter: Waiter) -> Request:
        """Write a waiter's entry. If no process removes it, DynamoDB does so a week after the wait began."""
        item = {
            "format_version": version.WRITTEN,
            "key": waiter.key,
            "entry": WAITER_ENTRY + waiter.place,
            "expires_at": (waiter.since_ms + RETENTION_MS) // 1000,
            **waiter_values(waiter),
        }
        encoded = {name: encode(value) for name, value in item.items()}
        return Request("PutItem", {"TableName": self.table, "Item": encoded})

    def hand_over_entry(self, key: str, place: str, process: str, stamp: Stamp) -> Request:
        """Leave an entry to another process, which may continue in it; if none does, the entry becomes a dead one.

        :param process: the process that leaves. Refused if another process has continued already.
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
        """Remove a waiter's entry."""
        item_key = {PARTITION_KEY: encode(key), SORT_KEY: encode(WAITER_ENTRY + place)}
        return Request("DeleteItem", {"TableName": self.table, "Key": item_key})

    def read_queue(self, key: str, limit: int | None, cursor: Mapping[str, Any] | None) -> Request:
        """Read a lock and then its waiters in their order, consistently.

        :param limit: queue page size; None for DynamoDB's.
        :param cursor: ``LastEvaluatedKey`` of the page before; None for the first.
        """
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
        """The lock in the response to the first page of `read_queue`; None if it has no record."""
        for item in reply.output.get("Items", ())[:1]:
            if item[SORT_KEY] == encode(LOCK_ENTRY):
                return self.record(item, reply.server_ms)
        return None

    def waiters(
        self, output: Mapping[str, Any], on_newer: Callable[[LockVersionError], None] | None = None
    ) -> list[Waiter]:
        """The waiters in the response to `read_queue`. A damaged entry is left out, so that no waiter waits for it.

        :param on_newer: called for each entry that a newer version of this package wrote, which is left out; None
            raises the error.
        :raises LockTableError: an item, which `scan` has read, has other keys.
        """
        found = []
        for item in output.get("Items", ()):
            if PARTITION_KEY not in item or SORT_KEY not in item:
                raise LockTableError(
                    f"The table {self.table!r} is not a lock table, its keys are not {PARTITION_KEY!r} and "
                    f"{SORT_KEY!r}: check its name; client.check_table() says what is expected and what was found."
                )
            if item[SORT_KEY] == encode(LOCK_ENTRY):
                continue
            try:
                found.append(read_waiter(item, self.table))
            except LockVersionError as newer:
                if on_newer is None:
                    raise
                on_newer(newer)
            except (TypeError, ValueError, RecursionError):
                continue
        return found
