"""Values as errors and logs show them: on one line, printable, with a maximum length."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

# Units of a duration, in milliseconds.
_UNITS = {"days": 86_400_000, "h": 3_600_000, "min": 60_000}

# Maximum length of an argument in an error, in characters.
_SHOWN = 60

# Maximum length of text from the table in an error or a log line, in characters.
_READABLE = 1000


def shown(value: Any) -> str:
    """An argument as an error shows it, cut if it is long."""
    try:
        text = repr(value)
    except Exception:  # a number with more digits than Python prints, or an object whose `__repr__` fails
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def utc(epoch_ms: int) -> datetime:
    """Epoch milliseconds as an aware datetime."""
    return datetime.fromtimestamp(epoch_ms / 1000, UTC)


def iso(at: datetime | None) -> str | None:
    """A time in ISO 8601 with milliseconds; None stays None."""
    return None if at is None else at.isoformat(timespec="milliseconds")


def duration(milliseconds: int) -> str:
    """A rough duration, such as ``12 min``: in the largest unit that it contains at least twice, else in seconds. The
    shortest is ``1 s``."""
    for unit, length in _UNITS.items():
        if milliseconds >= 2 * length:
            return f"{milliseconds / length:.0f} {unit}"
    return f"{max(1, round(milliseconds / 1000))} s"


def readable(text: str) -> str:
    """Text from the table as a log line or an error shows it: escaped, and cut if it is long."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:_READABLE])
    return shown if len(text) <= _READABLE else f"{shown}…"
