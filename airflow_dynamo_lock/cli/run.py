"""``dynamo-lock run KEY -- COMMAND…``: hold a lock for as long as a command runs, as flock does with files.

The command's process is there before the lock is asked for, and waits: it is forked while this process has no other
thread, and it asks the system to be killed when this one dies, so that nothing works on without the lock.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import click

from airflow_dynamo_lock.cli.locks import claiming, tell_place
from airflow_dynamo_lock.cli.options import DURATION, Settings, settings
from airflow_dynamo_lock.protocol.errors import LockError, LockLostError
from airflow_dynamo_lock.protocol.model import Lost

#: As a shell: no such command, or not one that can be run.
NOT_FOUND, NOT_EXECUTABLE = 127, 126
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1


@click.command()
@click.option("--wait-time", type=DURATION, help="For how long to wait at most.  [default: without end]")
@click.option("--no-wait", is_flag=True, help="Try once.")
@click.option(
    "--lease-duration",
    type=DURATION,
    default=30.0,
    show_default="30s",
    help="How long the lock stays held if this machine dies. Heartbeats are sent meanwhile.",
)
@click.option(
    "--kill-after",
    type=DURATION,
    default=2.0,
    show_default="2s",
    help="What the command is given to end, when the lease is lost, before it is killed.",
)
@click.argument("key")
@click.argument("command", nargs=-1, required=True)
@settings
@claiming
def run(
    where: Settings,
    key: str,
    command: tuple[str, ...],
    wait_time: float | None,
    no_wait: bool,
    lease_duration: float,
    kill_after: float,
    claim: Any,
) -> int:
    """Hold a lock while a command runs: dynamo-lock run [OPTIONS] KEY -- COMMAND…

    Waits for the lock, runs the command with DYNAMO_LOCK_KEY, DYNAMO_LOCK_LEASE_ID and DYNAMO_LOCK_TOKEN in its
    environment, sends heartbeats, passes signals on, and exits with the command's exit code (128 and the signal's
    number if one ended it). If the lease is lost, the command is ended: exit code 3.
    """
    if shutil.which(command[0]) is None:
        exists = os.path.exists(command[0])
        click.echo(
            f"dynamo-lock: {command[0]!r} {'cannot be executed' if exists else 'is no command'}.", err=True
        )
        return NOT_EXECUTABLE if exists else NOT_FOUND
    with Child(command, kill_after) as child:
        locks = where.locks(lease=lease_duration)
        lease = locks.acquire(key, timeout=0 if no_wait else wait_time, on_place=tell_place, **claim)
        beats = locks.keep_alive(lease, on_lost=lambda *_: child.end())
        try:
            code = child.work(
                DYNAMO_LOCK_KEY=key,
                DYNAMO_LOCK_LEASE_ID=lease.lease_id,
                DYNAMO_LOCK_TOKEN=str(lease.token or ""),
            )
            lost = lease.term.lost if lease.term else None
        finally:
            beats.stop()
        try:
            outcome = locks.give_back(lease, patience=lease_duration)
        except LockError as failure:
            click.echo(
                f"dynamo-lock: {key!r} could not be released, its lease will run out: {failure}", err=True
            )
        else:
            lost = lost or (outcome.describe() if isinstance(outcome, Lost) else None)
    if lost:
        raise LockLostError(
            f"The lock {key!r} (lease {lease.lease_id}) was lost while the command ran: {lost}."
        )
    return code


@dataclass
class Child:
    """The process that is to become the command. Ended, if it has not worked by the end of the ``with`` block.

    It has the terminal together with this process, if there is one; else it leads a process group of its own, all of
    which is sent what is sent to it.

    :param kill_after: what it is given to end by itself, seconds.
    """

    command: tuple[str, ...]
    kill_after: float
    pid: int = field(init=False)
    _begin: Any = field(init=False)
    _grouped: bool = field(init=False)
    _ended: threading.Event = field(default_factory=threading.Event, init=False)

    def __enter__(self) -> Child:
        reads, writes = os.pipe()
        self._grouped, parent = not sys.stdin.isatty(), os.getpid()
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            os.close(writes)
            _become(self.command, reads, parent, grouped=self._grouped)
        os.close(reads)
        self._begin = os.fdopen(writes, "wb")
        return self

    def __exit__(self, *_: object) -> None:
        self._begin.close()
        if not self._ended.is_set():
            self._wait()

    def work(self, **environment: str) -> int:
        """Let it be the command, and wait for it. Returns the exit code."""
        for number in _PASSED_ON:
            signal.signal(number, self._pass_on)
        with self._begin:
            self._begin.write(json.dumps({**os.environ, **environment}).encode())
        return self._wait()

    def end(self) -> None:
        """Have it end; by force, if it takes too long."""
        self._send(signal.SIGTERM)
        if not self._ended.wait(self.kill_after):
            self._send(signal.SIGKILL)

    def _pass_on(self, number: int, _frame: object) -> None:
        # What is typed at a terminal has reached the command as well.
        if number not in (signal.SIGINT, signal.SIGQUIT) or self._grouped:
            self._send(number)

    def _send(self, number: int) -> None:
        if self._ended.is_set():
            return  # its number may be another's by now
        with suppress(ProcessLookupError):
            (os.killpg if self._grouped else os.kill)(self.pid, number)

    def _wait(self) -> int:
        _, status = os.waitpid(self.pid, 0)
        self._ended.set()
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code


def _become(command: tuple[str, ...], reads: int, parent: int, *, grouped: bool) -> None:
    """In the new process: wait to be told, and be the command from then on. Never returns."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if grouped:
            os.setpgid(0, 0)
        _die_with(parent)
        with os.fdopen(reads, "rb") as told:
            environment: Mapping[str, str] = json.loads(told.read() or b"null")
        if environment is not None:
            os.execvpe(command[0], command, environment)  # noqa: S606 - what it was told to run
    except OSError as failure:
        os.write(2, f"dynamo-lock: {command[0]!r} cannot be executed: {failure.strerror}.\n".encode())
        code = NOT_EXECUTABLE
    finally:
        os._exit(code)


def _die_with(parent: int) -> None:
    """Be killed when the parent dies. Linux can do that; elsewhere a command outlives a killed `dynamo-lock`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has died already
            os._exit(1)
