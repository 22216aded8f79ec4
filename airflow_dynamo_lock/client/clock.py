"""The clock by which leases expire (R4), and waits by it. Importing this module loads no AWS SDK."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

# Longest single wait, in seconds. A holder detects an expired lease at most this long after its machine resumes.
_LONGEST_WAIT = 1.0


def monotonic() -> float:
    """Seconds on a clock that is never set, and that counts the time of a suspend where the system has such a clock."""
    return _clock()


def _clock_that_counts_sleep() -> Callable[[], float]:
    # Linux: CLOCK_BOOTTIME. macOS: CLOCK_MONOTONIC, which counts sleep there, unlike time.monotonic().
    for name in ("CLOCK_BOOTTIME", "CLOCK_MONOTONIC"):
        if hasattr(time, name):
            return partial(time.clock_gettime, getattr(time, name))
    return time.monotonic


_clock = _clock_that_counts_sleep()


def pieces(seconds: float, since: float | None = None) -> Iterator[float]:
    """Divide a wait into waits of at most 1 s, and end it early if the machine was suspended meanwhile.

    Threads and event loops wait by a clock that stops during a suspend. Leases expire by one that does not.

    :param since: start of the wait, monotonic seconds; by default now. Pass a time from before `seconds` was computed,
        so that the wait also ends early if the process was stopped in between.
    """
    end = (monotonic() if since is None else since) + seconds
    while True:
        piece = max(0.0, min(seconds, end - monotonic(), _LONGEST_WAIT))
        yield piece
        seconds -= piece
        if seconds <= 0 or monotonic() >= end:
            return
