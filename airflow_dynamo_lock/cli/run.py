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
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from airflow_dynamo_lock.cli.locks import claiming, tell_position
from airflow_dynamo_lock.cli.options import DURATION, Settings, settings
from airflow_dynamo_lock.core.model.errors import LockError, LockLostError
from airflow_dynamo_lock.core.model.lease import Lease
from airflow_dynamo_lock.core.model.outcomes import Lost

if TYPE_CHECKING:
    from airflow_dynamo_lock.client.sync_client import LockClient

#: As a shell: no such command, or not one that can be run.
NOT_FOUND, NOT_EXECUTABLE = 127, 126
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2)
# For how long those are waited for that were killed, seconds: it takes the system a moment, or else it is not up to us.
_DYING = 1.0
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
    help="What is to end, when the lease is lost or the command has ended, is given so long before it is killed.",
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
        lease = locks.acquire(key, timeout=0 if no_wait else wait_time, on_position=tell_position, **claim)
        lost = None
        try:
            with _signals_later():
                beats = locks.keep_alive(lease, on_lost=lambda *_: child.end())
            with beats:
                code = child.work(lease)
                lost = lease.term.lost if lease.term else None
        finally:
            lost = _release(locks, lease) or lost
    if lost:
        raise LockLostError(
            f"The lock {key!r} (lease {lease.lease_id}) was lost while the command ran: {lost}."
        )
    return code


@contextmanager
def _signals_later() -> Iterator[None]:
    """No signal goes to a thread that begins in the block: it would not wake the one that waits for the command."""
    signals = {*_PASSED_ON, signal.SIGTSTP, signal.SIGCONT}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _release(locks: LockClient, lease: Lease) -> str | None:
    """Release the lock. Returns why it was not ours any more, or None."""
    # They were the command's. Now they end the trying, which goes on for as long as nobody else can have the lock.
    for number in _ENDING:
        signal.signal(number, signal.default_int_handler)
    try:
        outcome = locks.release(lease, retry_for=lease.remaining())
    except (LockError, KeyboardInterrupt) as failure:
        why = str(failure) or "interrupted"
        click.echo(
            f"dynamo-lock: {lease.key!r} could not be released, its lease will run out: {why}", err=True
        )
        return None
    return outcome.describe() if isinstance(outcome, Lost) else None


@dataclass
class Child:
    """The process that is to become the command. Ended, if it has not worked by the end of the ``with`` block.

    Where there is a terminal, it shares it with this process, as a part of the same job. Else it leads a process group
    of its own: all of that is sent what is sent to it, stops when this process is stopped, and is over before the
    lock is released.

    :param kill_after: what it is given to end by itself, seconds.
    """

    command: tuple[str, ...]
    kill_after: float
    pid: int = field(init=False)
    _begin: Any = field(init=False)
    _grouped: bool = field(init=False)
    _lease: Lease = field(init=False)
    _terminated: bool = field(default=False, init=False)
    _ended: threading.Event = field(default_factory=threading.Event, init=False)

    def __enter__(self) -> Child:
        reads, writes = os.pipe()
        self._grouped, parent = not _has_terminal(), os.getpid()
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

    def work(self, lease: Lease) -> int:
        """Let it be the command, and wait for it. Returns the exit code.

        :raises LockLostError: the lease is lost already, and nothing was run.
        """
        self._lease = lease
        for number in _PASSED_ON:
            signal.signal(number, self._pass_on)
        signal.signal(signal.SIGCONT, self._go_on)
        if self._grouped:
            signal.signal(signal.SIGTSTP, self._stop)
        environment = {
            **os.environ,
            "DYNAMO_LOCK_KEY": lease.key,
            "DYNAMO_LOCK_LEASE_ID": lease.lease_id,
            "DYNAMO_LOCK_TOKEN": str(lease.token or ""),
        }
        lease.check()
        try:
            with self._begin:
                self._begin.write(json.dumps(environment).encode())
        except BrokenPipeError:
            lease.check()
            click.echo(f"dynamo-lock: the process of {self.command[0]!r} ended before it began.", err=True)
        return self._wait()

    def end(self) -> None:
        """Have it end; by force, if it takes too long."""
        self._end(signal.SIGTERM)
        if not self._ended.wait(self.kill_after):
            self._send(signal.SIGKILL)

    def _pass_on(self, number: int, _frame: object) -> None:
        # What is typed at a terminal has reached the command as well.
        if number in (signal.SIGINT, signal.SIGQUIT) and not self._grouped:
            return
        if number in _ENDING:
            self._end(number)
        else:
            self._send(number)

    def _stop(self, *_: object) -> None:
        """Stop with all of the group, which must not go on while nobody sends heartbeats."""
        self._send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)

    def _go_on(self, *_: object) -> None:
        if self._lease.remaining():
            self._send(signal.SIGCONT)
        elif self._lease.term:
            # For good, so that a late answer does not revive it: the heartbeats' thread ends what is stopped.
            self._lease.term.lose("it ran out while dynamo-lock was stopped")

    def _end(self, number: int) -> None:
        self._terminated |= number == signal.SIGTERM
        self._send(number)
        self._send(signal.SIGCONT)  # what is stopped learns of no signal

    def _send(self, number: int) -> bool:
        """Returns whether there was anybody to be sent it."""
        if self._ended.is_set():
            return False  # its number may be another's by now
        try:
            (os.killpg if self._grouped else os.kill)(self.pid, number)
        except (ProcessLookupError, PermissionError):  # it has gone, or become somebody else
            return False
        return True

    def _wait(self) -> int:
        _, status = os.waitpid(self.pid, 0)
        if self._grouped:
            self._end_rest()
        self._ended.set()
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code

    def _end_rest(self) -> None:
        """End what it has left behind in its group, which works on what is locked as well."""
        for number, patience in ((signal.SIGTERM, self.kill_after), (signal.SIGKILL, _DYING)):
            until = time.monotonic() + patience
            if number == signal.SIGKILL or not self._terminated:  # once: it may be tidying up
                self._end(number)
            while self._is_anybody_left():
                if time.monotonic() >= until:
                    break
                time.sleep(0.02)  # nobody tells when a process ends that is not our child

    def _is_anybody_left(self) -> bool:
        with suppress(ChildProcessError):
            os.waitpid(-self.pid, os.WNOHANG)  # as a container's first process, they are ours to bury
        return self._send(0)


def _has_terminal() -> bool:
    """Whether this process has a controlling terminal, wherever its input comes from."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _become(command: tuple[str, ...], reads: int, parent: int, *, grouped: bool) -> None:
    """In the new process: wait to be told, and be the command from then on. Never returns."""
    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores, and commands do not
            signal.signal(number, signal.SIG_DFL)
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
