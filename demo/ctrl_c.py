"""Ctrl-C for a program that starts others. Once it has begun to leave, another Ctrl-C changes nothing."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def leaving_on_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGHUP leave by way of every `with` block on the stack: each ends what it has started.

    A program's main function is run in this, and imported in it if that takes a moment.
    """
    for number in _SIGNALS:
        signal.signal(number, _interrupt)
    try:
        yield
    except KeyboardInterrupt:
        print("\nInterrupted: everything that was started has been stopped.", file=sys.stderr)
        sys.exit(130)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt
