"""Ctrl-C for a program that starts other processes: the first one ends it, further ones are ignored."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def leaving_on_ctrl_c() -> Iterator[None]:
    """Make SIGINT, SIGTERM and SIGHUP raise `KeyboardInterrupt`, and exit with status 130 after it.

    The exception leaves every `with` block of the program, and each block stops what it has started.
    Call the program's main function in this context. If importing it is slow, import it here as well.
    """
    for number in _SIGNALS:
        signal.signal(number, _interrupt)
    try:
        yield
    except KeyboardInterrupt:
        print("\nInterrupted: everything that was started has been stopped.", file=sys.stderr)
        sys.exit(130)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    # A second Ctrl-C must not interrupt the clean-up.
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt
