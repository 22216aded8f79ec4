"""Parts of DynamoDB expressions that several writes share."""

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

PARTITION_KEY = "key"


SORT_KEY = "entry"


LOCK_ENTRY = "lock"


#: How long an idle record outlives its last write, so that its fencing token is remembered (rule R10).
RETENTION_MS = RETENTION * 1000


#: By how much the server's time, as two writers estimate it, may differ, milliseconds: the ``Date`` header has whole
# seconds, and one request more now and then does no harm.
OVERTAKEN_MS = 2000


# Every attribute is written as a placeholder: several of the names are DynamoDB's reserved words, or may become so.
PATHS = {f"#{name}": name for name in ATTRIBUTES}


@lru_cache(maxsize=256)
def placeholders(expressions: str) -> frozenset[str]:
    return frozenset(re.findall(r"[#:]\w+", expressions))


def lock_item_key(key: str, entry: str = LOCK_ENTRY) -> dict[str, Any]:
    return {PARTITION_KEY: encode(key), SORT_KEY: encode(entry)}


def remove_clause(paths: Sequence[str]) -> str:
    return f" REMOVE {', '.join(paths)}" if paths else ""


def took_over(dead: Iterable[Holder]) -> bool:
    """Whether one of them may have died at work."""
    return any(not holder.cooling_down for holder in dead)


def set_data(data: Mapping[str, Any] | None) -> str:
    return ", #data = :data" if data else ""


def removed_data(data: Mapping[str, Any] | None) -> list[str]:
    """What is to be removed: an empty map takes the place of none (None is to leave it)."""
    return ["#data"] if data is not None and not data else []


def expiry(stamp: Stamp, lease_ms: int) -> int:
    return (stamp.best_ms + lease_ms + RETENTION_MS) // 1000


class TableWrites:
    """How a conditional write of this format is put together."""

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
        if entry == LOCK_ENTRY:
            condition = f"{version.IS_KNOWN} AND {condition}"
            values = {**values, ":known_version": version.KNOWN}
        # DynamoDB refuses names and values that the expressions do not use, so only those used are sent.
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
