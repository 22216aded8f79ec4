"""The output of the commands: tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from base64 import b64encode
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from airflow_dynamo_lock.core.model.text import duration, readable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from airflow_dynamo_lock.core.model.record import Holder, LockRecord, Waiter

LOCK_COLUMNS = ("lock", "state", "held by", "lease id", "since (UTC)", "last heartbeat", "token")
WAITER_COLUMNS = (
    *("position", "waiter", "since (UTC)", "expected", "until (UTC)", "slots", "priority", "lease id"),
)
# Columns that are left out if all their cells are empty.
_OPTIONAL = ("expected",)
# Columns whose cells may be wrapped.
_WRAPPED = ("lock", "held by", "waiter")
# Minimum width of a wrapped column, in characters.
_MIN_WRAPPED_WIDTH = 12
# Columns that a narrow terminal does not show, in the order in which they are left out.
_LEFT_OUT = (
    *("token", "priority", "last heartbeat", "until (UTC)", "since (UTC)", "slots", "expected", "state"),
)


def as_json(value: Any) -> None:
    """Print a value to stdout as one JSON document, with binary data as base64 text."""
    sys.stdout.write(json_text(value, indent=2) + "\n")


def json_text(value: Any, indent: int | None = None) -> str:
    """A value as JSON, with binary data as base64 text. It is ASCII, because other text could control a terminal.

    :param indent: number of spaces per level; None for one line.
    """
    return json.dumps(value, indent=indent, default=lambda binary: b64encode(binary).decode())


def table(console: Console, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Build a table that fits the console.

    Lease ids are never wrapped, because people copy them. Less important columns are left out instead.

    :param console: the console, whose width counts.
    :param columns: the headings.
    :param rows: the cells.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    filled = [
        cells for cells in zip(columns, *rows, strict=True) if cells[0] not in _OPTIONAL or any(cells[1:])
    ]
    rows = list(zip(*filled, strict=True))
    columns = rows[0]
    for column in (None, *_LEFT_OUT):
        if column in columns:
            at = columns.index(column)
            rows = [(*row[:at], *row[at + 1 :]) for row in rows]
            columns = rows[0]
        longest = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        widths = [
            min(width, _MIN_WRAPPED_WIDTH) if column in _WRAPPED else width
            for column, width in zip(columns, longest, strict=True)
        ]
        fits = sum(widths) + 3 * len(columns) <= console.width
        if fits:
            break
    made = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column, width in zip(columns, widths, strict=True):
        # If nothing else can be left out, all cells wrap. A cropped lease id would name no lease.
        is_whole = fits and column not in _WRAPPED
        made.add_column(column, no_wrap=is_whole, overflow="fold", min_width=width if fits else None)
    for row in rows[1:]:
        made.add_row(*(Text(cell) for cell in row))
    return made


def show(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table. If stdout is not a terminal, its width is not limited.

    :param columns: the headings.
    :param rows: the cells.
    """
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 500
    console.print(table(console, columns, rows))


def lock_rows(records: Iterable[LockRecord]) -> list[tuple[str, ...]]:
    """The rows of locks: one for each holder, and one for a free lock."""
    rows: list[tuple[str, ...]] = []
    for record in records:
        holders: list[Holder | None] = list(record.holders.values()) or [None]
        for number, holder in enumerate(holders):
            name, kind = (readable(record.key), record.state) if number == 0 else ("", "")
            token = str(record.token or "") if number == 0 else ""
            rows.append((name, kind, *_holder(holder, record.read_at_ms), token))
    return rows


def _holder(holder: Holder | None, now_ms: int | None) -> tuple[str, str, str, str]:
    if holder is None:
        return "", "", "", ""
    slots = f" ({holder.slots} slots)" if holder.slots > 1 else ""
    notes = [f"{len(holder.processes)} inside"] if holder.processes else []
    notes += ["cooling down"] if holder.cooling_down else ["draining"] if holder.draining else []
    who = readable(holder.owner) + slots + (f", {', '.join(notes)}" if notes else "")
    heartbeat = "" if holder.renewed_at_ms is None else ago(holder.renewed_at_ms, now_ms)
    return who, readable(holder.lease_id), since(holder.acquired_at) if holder.acquired_at else "", heartbeat


def waiter_rows(waiters: Sequence[Waiter]) -> list[tuple[str, ...]]:
    """The rows of waiters, in queue order."""
    return [
        (
            str(number),
            readable(waiter.owner),
            since(waiter.since),
            "" if waiter.expected_wait_ms is None else f"about {duration(waiter.expected_wait_ms)}",
            "no limit" if waiter.until is None else since(waiter.until),
            "shared" if waiter.mode == "shared" else f"{waiter.slots} of {waiter.capacity}",
            str(waiter.priority),
            readable(waiter.lease_id),
        )
        for number, waiter in enumerate(waiters, 1)
    ]


def since(at: datetime) -> str:
    """A time as text, in UTC; without the date if that is today's."""
    same_day = at.date() == datetime.now(UTC).date()
    return f"{at:%H:%M:%S}" if same_day else f"{at:%Y-%m-%d %H:%M}"


def ago(then_ms: int, now_ms: int | None) -> str:
    """The age of a time as text.

    :param then_ms: the time, epoch milliseconds.
    :param now_ms: server time, epoch milliseconds; None if it is unknown, which takes this machine's clock.
    """
    now = now_ms if now_ms is not None else datetime.now(UTC).timestamp() * 1000
    return f"{max(0.0, now - then_ms) / 1000:.0f} s ago"
