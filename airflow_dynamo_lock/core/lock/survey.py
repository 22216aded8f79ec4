"""One look at all locks of a table with their queues. It reads each item once, and sends no other request."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from airflow_dynamo_lock.core.effects import Operation, Reply
from airflow_dynamo_lock.core.lock.requests import Requests
from airflow_dynamo_lock.core.model.errors import LockRecordError
from airflow_dynamo_lock.core.model.record import Holder, LockRecord, Waiter
from airflow_dynamo_lock.core.model.state import LockState
from airflow_dynamo_lock.core.queue.estimate import with_expected_waits
from airflow_dynamo_lock.core.queue.view import PRESENCE_MS
from airflow_dynamo_lock.core.table.features import Feature
from airflow_dynamo_lock.log import log

# A waiter is shown for this long after its last heartbeat has expired, milliseconds, because clocks differ. People read
# the result; no write depends on it.
_MARGIN_MS = 10_000


def survey(
    requests: Requests, prefix: str, on_damaged: Callable[[LockRecordError], None] | None
) -> Operation[list[LockState]]:
    """The locks whose names begin with the prefix, by name, with their queues. Dead waiters are left out.

    :param on_damaged: called with the error of each damaged record, which is left out, and once with the error of each
        lock that has waiters of a newer version, which are left out; None logs them.
    """
    reported: set[str] = set()

    def report(failure: LockRecordError) -> None:
        if str(failure) not in reported:
            reported.add(str(failure))
            (on_damaged or partial(log.warning, "%s"))(failure)

    table_format = requests.format
    has_queue = Feature.QUEUE in table_format.features
    records: dict[str, LockRecord] = {}
    waiters: dict[str, list[Waiter]] = defaultdict(list)
    cursor: Mapping[str, Any] | None = None
    while True:
        reply: Reply = yield table_format.scan(cursor, prefix, waiters=True)
        for waiter in table_format.waiters(reply.output, report) if has_queue else ():
            waiters[waiter.key].append(waiter)
        records |= {each.key: each for each in requests.scanned(reply, report)}
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
    return _counts(holder.renewed_at_ms, holder.lease_ms, now_ms)


def _is_fresh(waiter: Waiter, now_ms: int) -> bool:
    """Whether the waiter's own entry still counts as a heartbeat."""
    return _counts(waiter.renewed_at_ms, PRESENCE_MS, now_ms)


def _counts(renewed_at_ms: int | None, lasts_ms: int, now_ms: int) -> bool:
    """Whether a heartbeat still counts. If its time is unknown, it does."""
    return renewed_at_ms is None or now_ms - renewed_at_ms <= lasts_ms + _MARGIN_MS
