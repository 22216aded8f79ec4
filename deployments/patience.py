"""How long a test waits for what must happen.

A bound on real time says only that something happens at all, so it is generous: on a machine with busy cores, a
process may need ten seconds to start. Whether a time is kept exactly is tested on simulated clocks, in `tests/core`
and `proof/simulator`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: Upper bound for anything that should happen soon, in seconds.
PATIENCE = 180.0


def wait_until(true: Callable[[], object], what: str = "") -> None:
    """Wait until a condition holds. Fails after `PATIENCE`, and says what did not happen."""
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, what or "it did not happen"
        time.sleep(0.01)


class TooBusyError(Exception):
    """The machine was so busy that a heartbeat came too late: the attempt shows nothing."""


def on_time(attempt: Callable[[int], T]) -> T:
    """Run a test whose heartbeats must come on time, with longer times if the machine is too busy for short ones.

    :param attempt: the test, given the factor for its times. It raises `TooBusyError` if a heartbeat came too late.
    """
    for factor in (1, 4, 16):
        try:
            return attempt(factor)
        except TooBusyError:
            continue
    return attempt(64)
