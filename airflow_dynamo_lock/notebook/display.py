"""What the notebook shows of locks: the line above a locked cell, and tables of locks and leases.

Keys and owners come from the table, so everything is escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from io import StringIO
from typing import Any

from airflow_dynamo_lock.cli import show
from airflow_dynamo_lock.core.model.lease import Lease, LeaseSet
from airflow_dynamo_lock.core.model.record import LockRecord
from airflow_dynamo_lock.core.model.text import iso, readable

# Columns of a text table, in characters.
_WIDTH = 120


class Status:
    """The status line of a cell's lock. It is displayed once, and then updated in place.

    :param key: name of the lock.
    """

    def __init__(self, key: str) -> None:
        self._key = readable(key)
        self._text = "Waiting for the lock."
        self._handle: Any = None

    def show(self, text: str) -> None:
        """Show a sentence."""
        from IPython.display import display

        self._text = text
        if self._handle is None:
            self._handle = display(self, display_id=True)
        else:
            self._handle.update(self)

    def __repr__(self) -> str:
        return f"{self._key}: {self._text}"

    def _repr_html_(self) -> str:
        return f"<div>🔒 <code>{escape(self._key)}</code> {escape(self._text)}</div>"


class LocksTable:
    """A table of locks, one row for each holder.

    :param records: the locks.
    :param empty: the sentence that is shown if there are none.
    """

    def __init__(self, records: Sequence[LockRecord], empty: str) -> None:
        self._rows = show.lock_rows(records)
        self._empty = empty

    def __repr__(self) -> str:
        return _text_table(show.LOCK_COLUMNS, self._rows) if self._rows else self._empty

    def _repr_html_(self) -> str:
        if not self._rows:
            return f"<div>{escape(self._empty)}</div>"
        return _html_table(self._rows, show.LOCK_COLUMNS)


def formatters() -> Mapping[type, Callable[[Any], str]]:
    """How IPython displays the values that this package returns, as HTML."""
    return {
        Lease: lambda lease: _html_table(_facts(lease)),
        LeaseSet: lambda leases: "".join(_html_table(_facts(each)) for each in leases),
        LockRecord: lambda record: _html_table(show.lock_rows([record]), show.LOCK_COLUMNS),
    }


def _facts(lease: Lease) -> list[tuple[str, str]]:
    return [
        ("lock", readable(lease.key)),
        ("state", f"valid for {lease.remaining():.0f} s" if lease.remaining() else "not valid any more"),
        ("token", str(lease.token)),
        ("slots", f"{lease.slots} of {lease.capacity}"),
        ("owner", readable(lease.owner)),
        ("acquired", iso(lease.acquired_at) or ""),
        ("lease id", readable(lease.lease_id)),
    ]


def _text_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    from rich.console import Console

    console = Console(file=StringIO(), width=_WIDTH, force_jupyter=False, color_system=None)
    console.print(show.table(console, columns, rows))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())


def _html_table(rows: Iterable[Sequence[str]], columns: Sequence[str] = ()) -> str:
    def cells(tag: str, texts: Sequence[str]) -> str:
        style = ' style="text-align: left"'
        return f"<tr>{''.join(f'<{tag}{style}>{escape(text)}</{tag}>' for text in texts)}</tr>"

    head = f"<thead>{cells('th', columns)}</thead>" if columns else ""
    return f"<table>{head}<tbody>{''.join(cells('td', row) for row in rows)}</tbody></table>"
