"""The kernel's side of the holder process: starts it, follows its events, and ends it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from airflow_dynamo_lock.client.clock import monotonic
from airflow_dynamo_lock.client.held import VARIABLE
from airflow_dynamo_lock.core.model import errors
from airflow_dynamo_lock.core.model.errors import LockError, LockLostError, LockUnavailableError
from airflow_dynamo_lock.core.model.lease import Lease, Term
from airflow_dynamo_lock.notebook.holder import Request

# Seconds between two looks at the lease. A cell learns of its loss at most this long after its machine resumes.
_LOOK_EVERY = 1.0
# If heartbeats fail, the cell is interrupted this long before the lease ends, in seconds, or this share of the lease
# before it if that is less: Python code ends in this time.
_STOP_SECONDS, _STOP_SHARE = 3.0, 0.2


class HolderProcess:
    """A process that acquires one lock for a cell, and releases it when the cell or the kernel ends.

    :param arguments: the arguments of the magic.
    :param held: the value of ``DYNAMO_LOCK_HELD`` from the locked cell around this one; None if there is none.
    :param on_wait: called in another thread with each text about the wait.
    :param on_lost: called in another thread when the lease is lost.
    :ivar granted: the lease, or the error that ended the wait.
    :ivar ended: done when the process has ended; has the error if it has not released the lock.
    :ivar held: the value of ``DYNAMO_LOCK_HELD`` for child processes, as soon as the lock is granted.
    """

    def __init__(
        self,
        arguments: list[str],
        held: str | None,
        on_wait: Callable[[str], None],
        on_lost: Callable[[], None],
    ) -> None:
        self.granted: Future[Lease] = Future()
        self.granted.set_running_or_notify_cancel()  # a cancelled cell does not cancel it
        self.ended: Future[None] = Future()
        self.ended.set_running_or_notify_cancel()
        self.held = held
        self._on_wait, self._on_lost = on_wait, on_lost
        self._lease: Lease | None = None
        self._busy = ""
        self._since = self._until = monotonic()
        self._loss: LockLostError | None = None
        self._cell_ended = self._released = False
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - `_complaint` closes it
        self._process = subprocess.Popen(
            # -P: a file of the notebook's folder must not replace a module of the standard library.
            [sys.executable, "-P", "-m", "airflow_dynamo_lock.notebook.holder"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=os.environ if held is None else {**os.environ, VARIABLE: held},
            start_new_session=True,  # Jupyter kills a kernel's process group, and this process has to release
        )
        self._write(Request(arguments, os.getpgrp()).line())
        threading.Thread(target=self._follow, name="dynamo-lock holder process", daemon=True).start()

    def end_cell(self) -> None:
        """Let the process leave the queue, or release the lock. `ended` says when it has."""
        self._loss, self._cell_ended = self.lost(), True
        if self._lease is not None and self._lease.term is not None:
            self._lease.term.lose("it was released")
            self._until = monotonic()
        self._write(b"end\n")

    def was_granted(self) -> bool:
        """Whether the lock was acquired."""
        return self._lease is not None

    def held_for(self) -> float:
        """Seconds from the grant to the end of the cell."""
        return self._until - self._since

    def lost(self) -> LockLostError | None:
        """The error of a lease that was lost before the cell ended; None if none was, as far as is known."""
        if self._lease is not None and not self._cell_ended:
            try:
                self._lease.check()
            except LockLostError as lost:
                return lost
        return self._loss

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            return  # it has ended, which `_follow` notices

    def _follow(self) -> None:
        """Handle the events of the process until it ends."""
        assert self._process.stdout is not None
        out, rest = self._process.stdout, b""
        try:
            while True:
                readable, _, _ = select.select([out], [], [], _LOOK_EVERY)
                if readable:
                    if not (data := os.read(out.fileno(), 65_536)):
                        break
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        self._handle(json.loads(line))
                self._check()
        finally:
            out.close()
            end = f"has ended with exit code {self._process.wait()}{self._complaint()}"
            if not self.granted.done():
                self.granted.set_exception(LockError(f"The process that waits for the lock {end}."))
            self._lose(f"the process that sends its heartbeats {end}")
            if not self.ended.done():
                if self._released:
                    self.ended.set_result(None)
                else:
                    self.ended.set_exception(LockError(f"The process that releases the lock {end}."))

    def _handle(self, event: Mapping[str, Any]) -> None:
        match event["event"]:
            case "busy":
                self._busy = event["text"]
                self._on_wait(f"{self._busy}.")
            case "position":
                self._on_wait(f"{self._busy}. {event['text']}")
            case "warning":
                self._on_wait(event["text"])
            case "granted":
                term = Term(monotonic)
                lease = Lease.from_dict(event["lease"], term)
                term.renewed(event["until"], 0)  # both processes have the same monotonic clock
                self._lease, self.held, self._since = lease, event["held"], monotonic()
                self.granted.set_result(lease)
            case "renewed":
                if self._lease is not None and self._lease.term is not None:
                    self._lease.term.renewed(event["until"], 0)
            case "lost":
                self._lose(event["why"])
            case "released":
                self._released = True
                if event["lost"] and self._lease is not None:
                    self._loss = self._loss or LockLostError(
                        f"The lock {self._lease.key!r} (lease {self._lease.lease_id}) was lost before the cell ended: "
                        f"{event['lost']}."
                    )
            case "failed":
                future: Future[Any] = self.ended if self.granted.done() else self.granted
                future.set_exception(_error(event["error"], event["text"]))

    def _complaint(self) -> str:
        """The last line that the process has written to stderr, after a colon; nothing if there is none."""
        with self._stderr as file:
            file.seek(0)
            *_, last = file.read().decode(errors="replace").strip().split("\n")
        return f": {last}" if last else ""

    def _check(self) -> None:
        """Lose the lease if it is about to end."""
        if self._lease is not None:
            lease_s = self._lease.lease_ms / 1000
            if self._lease.remaining() <= min(_STOP_SECONDS, _STOP_SHARE * lease_s):
                self._lose("no heartbeat has succeeded in time")

    def _lose(self, why: str) -> None:
        """End the lease, and report that once."""
        if self._lease is None or self._lease.term is None or self._lease.term.lost:
            return
        self._lease.term.lose(why)
        self._on_lost()


def _error(name: str, text: str) -> LockError:
    """An error of the holder process, in this one."""
    kind: type[LockError] = getattr(errors, name, LockError)
    if issubclass(kind, LockUnavailableError):
        return kind(text, maybe_applied=True)
    return kind(text)
