"""What the writes share: parts of expressions, and the `UpdateItem` request that they become."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from airflow_dynamo_lock.core.effects import Request, Stamp
from airflow_dynamo_lock.core.model.limits import RETENTION
from airflow_dynamo_lock.core.model.record import Holder
from airflow_dynamo_lock.core.table import version
from airflow_dynamo_lock.core.table.codec import encode
from airflow_dynamo_lock.core.table.items import ATTRIBUTES

#: The keys of the table, and the sort key of a lock's item.
PARTITION_KEY = "key"
SORT_KEY = "entry"
LOCK_ENTRY = "lock"

#: How long an idle record is kept after its last write, milliseconds, so that its fencing token is remembered (R10).
RETENTION_MS = RETENTION * 1000

# Every attribute name is a placeholder, because some names are reserved words of DynamoDB.
PATHS = {f"#{name}": name for name in ATTRIBUTES}


@lru_cache(maxsize=256)
def placeholders(expressions: str) -> frozenset[str]:
    """The placeholders of names and values in an expression."""
    return frozenset(re.findall(r"[#:]\w+", expressions))


def lock_item_key(key: str, entry: str = LOCK_ENTRY) -> dict[str, Any]:
    """The key of a lock's item, or of another item of the same lock."""
    return {PARTITION_KEY: encode(key), SORT_KEY: encode(entry)}


def remove_clause(paths: Sequence[str]) -> str:
    """A REMOVE clause; empty if there is nothing to remove."""
    return f" REMOVE {', '.join(paths)}" if paths else ""


def took_over(dead: Iterable[Holder]) -> bool:
    """Whether a dead holder may have left its work half done."""
    return any(not holder.cooling_down for holder in dead)


def set_data(data: Mapping[str, Any] | None) -> str:
    """The assignment of new data; empty if the data are kept or removed."""
    return ", #data = :data" if data else ""


def removed_data(data: Mapping[str, Any] | None) -> list[str]:
    """The paths to remove: an empty map removes the data, None keeps them."""
    return ["#data"] if data is not None and not data else []


def expiry(stamp: Stamp, lease_ms: int) -> int:
    """The value of `expires_at` for a lease that lasts for another `lease_ms` milliseconds, epoch seconds."""
    return (stamp.best_ms + lease_ms + RETENTION_MS) // 1000


class TableWrites:
    """Builds conditional writes."""

    table: str

    def _write(
        self,
        key: str,
        update: str,
        condition: str,
        values: Mapping[str, Any],
        entry: str = LOCK_ENTRY,
        **names: str,
    ) -> Request:
        """An `UpdateItem` request. Names and values that the expressions do not use are left out, since DynamoDB
        refuses them. A write to a lock's record is refused if a newer version of this package wrote it (R13).

        :param values: values by placeholder.
        :param names: attribute names by placeholder, where the two differ.
        """
        if entry == LOCK_ENTRY:
            condition = f"{version.IS_KNOWN} AND {condition}"
            values = {**values, ":known_version": version.KNOWN}
        used = placeholders(f"{update} {condition}")
        paths = {alias: names.get(alias[1:]) or PATHS[alias] for alias in used if alias[0] == "#"}
        sent = {alias: encode(value) for alias, value in values.items() if alias in used}
        return Request(
            "UpdateItem",
            {
                "TableName": self.table,
                "Key": lock_item_key(key, entry),
                "UpdateExpression": update,
                "ConditionExpression": condition,
                "ExpressionAttributeNames": paths,
                **({"ExpressionAttributeValues": sent} if sent else {}),
                "ReturnValues": "ALL_NEW",
                "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
            },
        )
