"""Reading the values that other lock libraries write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow_dynamo_lock.core.model.limits import LAST_MS


def text(values: Mapping[str, Any], name: str) -> str:
    """An attribute that is to be text."""
    if not isinstance(values[name], str):
        raise TypeError(f"its attribute {name!r} is not text")
    return str(values[name])


def milliseconds(values: Mapping[str, Any], name: str, unit_ms: int = 1) -> int:
    """An attribute that is to be a time or a duration, in milliseconds; the last time of all, if it is later.

    :param unit_ms: 1000 if it is in seconds.
    """
    return checked_ms(name, values[name], unit_ms)


def checked_ms(name: str, value: Any, unit_ms: int = 1) -> int:
    """See `milliseconds`.

    :raises TypeError, ValueError: it can be neither.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"its attribute {name!r} is not a number")
    if not value >= 0:
        raise ValueError(f"its attribute {name!r} is no time")
    # There are programs that hold a lock "for ever".
    return int(min(value * unit_ms, LAST_MS))
