"""The locks of tables as metrics in the text format of OpenMetrics 1.0, which Prometheus reads.

The metrics of a table have no key. Keys can be many, and each is a time series of its own, so only a limited
number of locks has metrics with a key: those in use, the ones that have waiters first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from airflow_dynamo_lock.core.model.state import LockState
from airflow_dynamo_lock.monitoring.totals import Totals

#: The content type of the text.
CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_Locks = Sequence[LockState]


# Metrics of a table: name → help text, value; None leaves the metric out.
_OF_TABLES: Mapping[str, tuple[str, Callable[[Totals], float | None]]] = {
    "locks": ("Locks that have a record.", lambda total: total.locks),
    "held": ("Locks that are held.", lambda total: total.held),
    "holders": ("Leases.", lambda total: total.holders),
    "waiting": ("Waiters.", lambda total: total.waiting),
    "longest_held_seconds": (
        "How long the lock that has been held for longest has been held.",
        lambda total: total.held_ms / 1000,
    ),
    "longest_wait_seconds": (
        "How long the waiter that has waited for longest has waited.",
        lambda total: total.waited_ms / 1000,
    ),
    "oldest_heartbeat_seconds": (
        "Age of the oldest last heartbeat of a holder.",
        lambda total: total.silent_ms / 1000,
    ),
    "last_loss_timestamp_seconds": (
        "When a lease was last broken, or reclaimed from a dead holder.",
        lambda total: None if total.last_loss_at_ms is None else total.last_loss_at_ms / 1000,
    ),
}

# Metrics of a lock: name → help text, value.
_OF_KEYS: Mapping[str, tuple[str, Callable[[LockState], float]]] = {
    "key_holders": ("Leases of this lock.", lambda lock: len(lock.record.holders)),
    "key_waiting": ("Waiters for this lock.", lambda lock: len(lock.waiters)),
    "key_held_seconds": (
        "How long the holder that has held this lock for longest has held it.",
        lambda lock: lock.held_ms / 1000,
    ),
    "key_wait_seconds": (
        "How long the waiter that has waited for this lock for longest has waited.",
        lambda lock: lock.waited_ms / 1000,
    ),
}


def exposition(
    tables: Mapping[str, _Locks | None], keys: int = 0, damaged: Mapping[str, int] | None = None
) -> str:
    """The metrics of tables.

    :param tables: name of each table → its locks; None if the table could not be read.
    :param keys: maximum number of locks of each table with metrics of their own.
    :param damaged: name of a table → number of its records that could not be read.
    """
    read = {table: locks for table, locks in tables.items() if locks is not None}
    totals = {table: Totals.of(locks) for table, locks in read.items()}
    lines = _metric(
        "up", "Whether the table could be read.", [((("table", each),), each in read) for each in tables]
    )
    lines += _metric(
        "damaged",
        "Locks whose record is damaged. They cannot be acquired.",
        [((("table", table),), (damaged or {}).get(table, 0)) for table in read],
    )
    for name, (text, value) in _OF_TABLES.items():
        samples = [((("table", table),), value(each)) for table, each in totals.items()]
        lines += _metric(name, text, samples)
    chosen = {table: _in_use(locks, keys) for table, locks in read.items()}
    for name, (text, value_of) in _OF_KEYS.items() if keys else ():
        lines += _metric(
            name,
            text,
            [
                ((("table", table), ("key", lock.record.key)), value_of(lock))
                for table, locks in chosen.items()
                for lock in locks
            ],
        )
    return "\n".join([*lines, "# EOF", ""])


def _in_use(locks: _Locks, most: int) -> _Locks:
    """The locks in use, at most this number: those with the most waiters, then those held for longest."""
    in_use = [each for each in locks if each.record.holders or each.waiters]
    return sorted(in_use, key=lambda each: (-len(each.waiters), -each.held_ms, each.record.key))[:most]


def _metric(
    name: str, text: str, samples: Sequence[tuple[Sequence[tuple[str, str]], float | None]]
) -> list[str]:
    name = f"dynamo_lock_{name}"
    unit = [f"# UNIT {name} seconds"] if name.endswith("_seconds") else []
    shown = []
    for labels, value in samples:
        if value is not None:
            pairs = ",".join(f'{label}="{_escaped(each)}"' for label, each in labels)
            shown.append(f"{name}{{{pairs}}} {value:.15g}")
    return [f"# TYPE {name} gauge", *unit, f"# HELP {name} {text}", *shown] if shown else []


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
