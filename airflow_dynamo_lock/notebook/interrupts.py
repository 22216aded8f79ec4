"""What interrupts a locked cell: a person, by way of Jupyter or Ctrl-C, and the loss of the lease.

Both raise `KeyboardInterrupt` in the cell's code, which ``except Exception`` does not catch, or cancel the task of a
cell that awaits. While the lock is being released, a person's interrupt is kept, and raised afterwards.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any, TypeVar

from airflow_dynamo_lock.client.clock import monotonic

T = TypeVar("T")

# A person may press the button again and again. Interrupts that follow each other within this time, in seconds, belong
# to one cell: IPython and Jupyter may fail if they are interrupted while they report its end.
_QUIET = 0.25
# Seconds between the interrupts of a cell that has lost its lease and goes on; doubled each time.
_AGAIN_AFTER, _AGAIN_AT_MOST = 0.5, 8.0


class Interrupts:
    """The interrupts of one cell, for the length of a ``with`` block in the thread that runs it.

    :param task: the task of a cell that awaits; None for other cells.
    """

    def __init__(self, task: asyncio.Task[Any] | None = None) -> None:
        self._task = task
        self._thread = threading.current_thread()
        self._is_main = self._thread is threading.main_thread()
        self._frame: FrameType | None = None  # of `call` or `run`
        self._kept = False
        self._last = -math.inf  # the time of a person's last interrupt
        self._stopping = threading.Event()  # the lease is lost
        self._over = threading.Event()
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        if self._is_main:
            self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._is_main:
            signal.signal(signal.SIGINT, self._before)
        else:
            _raise_in(self._thread, None)

    def call(self, function: Callable[[], T]) -> T:
        """Call a function that an interrupt ends. One that came earlier prevents the call."""
        self.raise_kept()
        # Only a frame below this one is interrupted: an interrupt that comes while the function ends is kept.
        self._frame = sys._getframe()
        try:
            return function()
        finally:
            self._frame = None

    async def run(self, awaitable: Awaitable[T]) -> T:
        """`call` for an awaitable."""
        self.raise_kept()
        self._frame = sys._getframe()
        try:
            return await awaitable
        finally:
            self._frame = None

    def raise_kept(self) -> None:
        """Return if no interrupt was kept.

        :raises KeyboardInterrupt: a person has interrupted the cell while the lock was being released.
        """
        if self._kept:
            self._kept = False
            raise KeyboardInterrupt

    def keep(self) -> None:
        """Keep an interrupt, for `raise_kept`."""
        self._kept = True

    def wait_until_quiet(self) -> None:
        """Wait for the end of a series of interrupts."""
        while (left := self._last + _QUIET - monotonic()) > 0:
            time.sleep(left)

    def stop(self) -> None:
        """Interrupt the cell because its lease is lost, again and again until it ends. Called in another thread."""
        self._stopping.set()
        threading.Thread(target=self._stop, name="dynamo-lock interrupts", daemon=True).start()

    def _stop(self) -> None:
        pause = _AGAIN_AFTER
        while not self._over.is_set():
            if self._frame is not None:
                self._interrupt()
            self._over.wait(pause)
            pause = min(2 * pause, _AGAIN_AT_MOST)

    def _interrupt(self) -> None:
        if self._is_main:
            signal.pthread_kill(self._thread.ident or 0, signal.SIGINT)
        elif self._task is not None:
            # Not by an exception: in a thread whose event loop waits, it would end the loop.
            self._task.get_loop().call_soon_threadsafe(self._task.cancel)
        else:
            _raise_in(self._thread, KeyboardInterrupt)

    def _on_signal(self, _: int, frame: FrameType | None) -> None:
        if not self._stopping.is_set():
            self._last = monotonic()
        if self._frame is None:
            self._keep_persons()
        elif self._task is not None and asyncio.current_task(self._task.get_loop()) is not self._task:
            self._task.get_loop().call_soon_threadsafe(self._task.cancel)
        elif _is_below(frame, self._frame):
            raise KeyboardInterrupt
        else:
            self._keep_persons()

    def _keep_persons(self) -> None:
        """Keep an interrupt by a person. That of a lost lease may arrive when the cell has just ended."""
        self._kept = self._kept or not self._stopping.is_set()


def _is_below(frame: FrameType | None, caller: FrameType) -> bool:
    """Whether the code of the frame was called, directly or not, by that of the other."""
    while frame is not None and frame is not caller:
        frame = frame.f_back
        if frame is caller:
            return True
    return False


def _raise_in(thread: threading.Thread, kind: type[BaseException] | None) -> None:
    """Raise an exception in a thread, as soon as it executes Python code; None removes one that was not raised yet."""
    raised = None if kind is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), raised)
