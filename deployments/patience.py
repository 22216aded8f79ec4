"""How long a test waits for an event before it fails.

The limit is generous, because it only shows whether the event happens at all: on a busy machine, a process
may need ten seconds to start. Tests of exact times use simulated clocks, in `tests/core` and
`proof/simulator`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from airflow_dynamo_lock.core.model.errors import LockUnavailableError

T = TypeVar("T")

#: Time after which a test gives up waiting for an event, in seconds.
PATIENCE = 180.0


def wait_until(true: Callable[[], object], what: str = "") -> None:
    """Wait until `true()` is true.

    :param what: the event, for the message of the error.
    :raises AssertionError: the condition is still false after `PATIENCE` seconds.
    """
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, what or "the condition did not become true"
        time.sleep(0.01)


async def until(true: Callable[[], object], what: str = "") -> None:
    """Wait as `wait_until` does, in a thread, so that the event loop goes on."""
    await asyncio.to_thread(wait_until, true, what)


class TooBusyError(Exception):
    """The machine was so busy that a heartbeat came too late, so this run of a test is inconclusive."""


def on_time(attempt: Callable[[int], T]) -> T:
    """Run a test that needs punctual heartbeats. Repeat it with longer durations if the machine is too busy.

    :param attempt: the test. It multiplies its durations by its argument, and raises `TooBusyError` if a
        heartbeat came too late. A `LockUnavailableError` counts as well: the engine did not answer in time.
    :return: the result of the first run that is conclusive.
    """
    for factor in (1, 4, 16):
        try:
            return attempt(factor)
        except (TooBusyError, LockUnavailableError):
            continue
    return attempt(64)
