"""Checks and conversions of the values that other lock libraries write, and the holders that they show.

The errors complete the sentence "The item is not a lock, because …".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow_dynamo_lock.core.model.limits import LAST_MS
from airflow_dynamo_lock.core.model.record import Holder


def text(values: Mapping[str, Any], name: str) -> str:
    """An attribute that must be text.

    :raises KeyError: the attribute is missing.
    :raises TypeError: it is not text.
    """
    if not isinstance(values[name], str):
        raise TypeError(f"its attribute {name!r} is not text")
    return str(values[name])


def milliseconds(values: Mapping[str, Any], name: str, unit_ms: int = 1) -> int:
    """An attribute that must be a time or a duration, in milliseconds; at most `LAST_MS`.

    :param unit_ms: unit of the attribute: 1 for milliseconds, 1000 for seconds.
    :raises KeyError: the attribute is missing.
    :raises TypeError, ValueError: it is neither a time nor a duration.
    """
    return checked_ms(name, values[name], unit_ms)


def checked_ms(name: str, value: Any, unit_ms: int = 1) -> int:
    """A value that must be a time or a duration, in milliseconds; at most `LAST_MS`.

    :param name: name of the value, for the error.
    :param unit_ms: unit of the value: 1 for milliseconds, 1000 for seconds.
    :raises TypeError, ValueError: the value is neither a time nor a duration.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"its attribute {name!r} is not a number")
    if not value >= 0:  # true for NaN as well
        raise ValueError(f"its attribute {name!r} is neither a time nor a duration")
    # Some programs write an end far beyond the year 9999, for a lock that never expires.
    return int(min(value * unit_ms, LAST_MS))


def rounded_up(milliseconds: int, unit_ms: int = 1000) -> int:
    """Milliseconds in whole units of `unit_ms` milliseconds (seconds by default), rounded up."""
    return -(-milliseconds // unit_ms)


def their_holder(
    owner: str,
    lease_ms: int,
    version: str,
    *,
    lease_id: str | None = None,
    acquired_at_ms: int | None = None,
    expires_at_ms: int | None = None,
) -> Holder:
    """A holder of another library, which has the whole lock and knows no grace.

    :param lease_id: the owner by default.
    """
    return Holder(
        lease_id=owner if lease_id is None else lease_id,
        owner=owner,
        slots=1,
        lease_ms=lease_ms,
        grace_ms=lease_ms,
        version=version,
        acquired_at_ms=acquired_at_ms,
        expires_at_ms=expires_at_ms,
        ours=False,
    )
