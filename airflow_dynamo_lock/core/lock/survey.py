"""One look at all locks of a table with their queues. It reads each item once, and sends no other request."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from airflow_dynamo_lock.core.effects import Operation, Reply
from airflow_dynamo_lock.core.lock.requests import Requests
from airflow_dynamo_lock.core.model.errors import LockRecordError
from airflow_dynamo_lock.core.model.record import Holder, LockRecord, Waiter
from airflow_dynamo_lock.core.model.state import LockState
from airflow_dynamo_lock.core.queue.estimate import with_expected_waits
from airflow_dynamo_lock.core.queue.view import PRESENCE_MS
from airflow_dynamo_lock.core.table.features import Feature

# A waiter, and the process of a waiter, is taken for dead if its last heartbeat is older than it lasts by this much,
# milliseconds. People read the result, and nothing is done because of it.
_MARGIN_MS = 10_000


def survey(
    requests: Requests, prefix: str, on_damaged: Callable[[LockRecordError], None] | None
) -> Operation[list[LockState]]:
    """The locks whose names begin with the prefix, by name, with their queues. Dead waiters are left out.

    :param on_damaged: called with the error of each damaged record, which is left out; None logs it.
    """
    table_format = requests.format
    has_queue = Feature.QUEUE in table_format.features
    records: dict[str, LockRecord] = {}
    waiters: dict[str, list[Waiter]] = defaultdict(list)
    cursor: Mapping[str, Any] | None = None
    while True:
        reply: Reply = yield table_format.scan(cursor, prefix, waiters=True)
        for waiter in table_format.waiters(reply.output) if has_queue else ():
            waiters[waiter.key].append(waiter)
        records |= {each.key: each for each in requests.scanned(reply, on_damaged)}
        cursor = reply.output.get("LastEvaluatedKey")
        if not cursor:
            break
    now_ms = requests.stamp().best_ms
    present = {
        name for name, each in records.items() if any(_is_alive(h, now_ms) for h in each.holders.values())
    }
    states = []
    for key, record in sorted(records.items()):
        if not requests.is_lock(record):
            continue
        queue = [
            each
            for each in sorted(waiters[key], key=lambda each: each.place)
            if each.lease_id not in record.holders and (each.process in present or _is_fresh(each, now_ms))
        ]
        at_ms = now_ms if record.read_at_ms is None else record.read_at_ms
        states.append(LockState(record, tuple(with_expected_waits(record, queue, at_ms)), at_ms))
    return states


def _is_alive(holder: Holder, now_ms: int) -> bool:
    """Whether the lease of a waiting process has not run out."""
    renewed_at_ms = holder.acquired_at_ms if holder.renewed_at_ms is None else holder.renewed_at_ms
    return renewed_at_ms is not None and now_ms - renewed_at_ms <= holder.lease_ms + _MARGIN_MS


def _is_fresh(waiter: Waiter, now_ms: int) -> bool:
    """Whether the waiter's own entry still counts as a heartbeat."""
    renewed_at_ms = waiter.since_ms if waiter.renewed_at_ms is None else waiter.renewed_at_ms
    return now_ms - renewed_at_ms <= PRESENCE_MS + _MARGIN_MS
