"""Locks that were held before, for tests of what waiters expect."""

from __future__ import annotations

from datetime import timedelta
from typing import Any


def make_usual(locks: Any, key: str, hold: timedelta) -> None:
    """Let the record say that leases of a lock are usually held for that long, by a release and without waiting.

    A lease with that `min_hold` counts for the whole time. A break then frees its slots.

    :param locks: a `LockClient`.
    :param key: a lock that is free and was never held.
    """
    lease = locks.acquire(key, timeout=0, min_hold=hold)
    locks.release(lease)
    locks.break_lock(key, lease.lease_id)
