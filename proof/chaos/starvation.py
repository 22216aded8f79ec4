"""Measures for how long the machine's processors kept a process waiting that wanted to run.

A hand-over that is late by no more than that shows nothing about the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from airflow_dynamo_lock.client.clock import monotonic

# How long the measuring thread sleeps, and by how much it is late on an idle machine; seconds.
_NAP, _USUAL = 0.05, 0.02

#: A time at which a thread was late, and by how many seconds.
Lag = tuple[float, float]


@contextmanager
def measured() -> Iterator[list[Lag]]:
    """Measure during the block: a thread sleeps for short times, and notes by how much it woke up late."""
    lags: list[Lag] = []
    end = threading.Event()

    def measure() -> None:
        before = monotonic()
        while not end.wait(_NAP):
            now = monotonic()
            if (late := now - before - _NAP) > _USUAL:
                lags.append((now, late))
            before = now

    thread = threading.Thread(target=measure, daemon=True)
    thread.start()
    try:
        yield lags
    finally:
        end.set()
        thread.join()


def seconds_lost(lags: Sequence[Lag], begin: float, end: float) -> float:
    """Return for how long a process had to wait for a processor in a time span."""
    return sum(late for at, late in lags if begin < at and at - late < end)
