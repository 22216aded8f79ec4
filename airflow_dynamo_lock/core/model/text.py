"""How values appear in errors and logs: on one line, bounded, printable."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

# So much of a value an error shows, in characters.
_SHOWN = 60


def shown(value: Any) -> str:
    """An argument as an error shows it: not all of it, if that is long."""
    try:
        text = repr(value)
    except Exception:  # a number of more digits than Python writes out, an object that cannot show itself
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def utc(epoch_ms: int) -> datetime:
    """Epoch milliseconds as an aware datetime."""
    return datetime.fromtimestamp(epoch_ms / 1000, UTC)


def readable(text: str) -> str:
    """What somebody else wrote into the table, for a log or an error: on one line, and not without end."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:_READABLE])
    return shown if len(text) <= _READABLE else f"{shown}…"


# Longer than an owner's name ever needs to be, in characters.
_READABLE = 1000
