"""``dynamo-lock run KEY -- COMMAND…``: hold a lock for as long as a command runs, as flock does with files.

`dynamo-lock` forks the command's process before it acquires the lock, while it has no other thread. The new
process waits until the lock is acquired, and then executes the command. On Linux, the kernel kills it when
`dynamo-lock` dies, so the command does not continue without the lock.
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

from airflow_dynamo_lock.cli.locks import claiming, print_position
from airflow_dynamo_lock.cli.options import DURATION, Settings, settings
from airflow_dynamo_lock.client.held import VARIABLE, held_around, with_leases
from airflow_dynamo_lock.core.model.errors import LockError, LockLostError
from airflow_dynamo_lock.core.model.lease import Lease
from airflow_dynamo_lock.core.model.outcomes import Lost

if TYPE_CHECKING:
    from airflow_dynamo_lock.client.sync_client import LockClient

#: Exit codes as a shell's: the command does not exist, or cannot be executed.
NOT_FOUND, NOT_EXECUTABLE = 127, 126
_TERMINATING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_FORWARDED = (*_TERMINATING, signal.SIGUSR1, signal.SIGUSR2)
# Maximum time to wait for processes after SIGKILL, in seconds. The kernel needs a moment; more does not help.
_KILL_TIMEOUT = 1.0
_PR_SET_PDEATHSIG = 1


@click.command()
@click.option("--wait-time", type=DURATION, help="Maximum time to wait for the lock.  [default: no limit]")
@click.option("--no-wait", is_flag=True, help="Try once, do not wait.")
@click.option(
    "--lease-duration",
    type=DURATION,
    default=30.0,
    show_default="30s",
    help="How long the lease lasts after its last heartbeat, such as when this machine dies.",
)
@click.option(
    "--kill-after",
    type=DURATION,
    default=2.0,
    show_default="2s",
    help="Time between SIGTERM and SIGKILL for processes that must end.",
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
    """Run a command while the lock is held: dynamo-lock run [OPTIONS] KEY -- COMMAND…

    Waits for the lock, runs the command with DYNAMO_LOCK_KEY, DYNAMO_LOCK_LEASE_ID and DYNAMO_LOCK_TOKEN in its
    environment, sends heartbeats, passes signals on, and exits with the command's exit code (128 and the signal's
    number if one ended it). If the lease is lost, the command is ended: exit code 3.
    """
    if shutil.which(command[0]) is None:
        exists = os.path.exists(command[0])
        click.echo(
            f"dynamo-lock: {command[0]!r} {'cannot be executed' if exists else 'was not found'}.", err=True
        )
        return NOT_EXECUTABLE if exists else NOT_FOUND
    with Child(command, kill_after) as child:
        locks = where.locks(lease=lease_duration)
        lease = locks.acquire(
            key,
            timeout=0 if no_wait else wait_time,
            on_position=print_position,
            holding=held_around(locks),
            **claim,
        )
        lost = None
        try:
            with _signals_blocked():
                heartbeats = locks.keep_alive(lease, on_lost=lambda *_: child.end())
            with heartbeats:
                code = child.work(lease, with_leases(locks, [lease]))
                lost = lease.term.lost if lease.term else None
        finally:
            lost = _release(locks, lease) or lost
    if lost:
        raise LockLostError(
            f"The lock {key!r} (lease {lease.lease_id}) was lost while the command ran: {lost}."
        )
    return code


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Threads that start in the block receive no signals: a signal must wake the thread that waits for the command."""
    signals = {*_FORWARDED, signal.SIGTSTP, signal.SIGCONT}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _release(locks: LockClient, lease: Lease) -> str | None:
    """Release the lock, and retry while the lease lasts.

    :returns: why the lease was lost; None if it was not.
    """
    # The command has ended, so these signals now end the retries.
    for number in _TERMINATING:
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
    """The command's process. If `work` has not been called, the process exits at the end of the ``with`` block.

    On a terminal, the process belongs to the same job as this one. Without a terminal, it leads a process group of
    its own. The group receives the signals that this process forwards, and stops when this process is stopped. All
    processes of the group are ended before the lock is released.

    :param command: the command and its arguments.
    :param kill_after: time in seconds between SIGTERM and SIGKILL.
    :ivar pid: id of the process.
    """

    command: tuple[str, ...]
    kill_after: float
    pid: int = field(init=False)
    _start_pipe: Any = field(init=False)
    _grouped: bool = field(init=False)
    _lease: Lease = field(init=False)
    _terminated: bool = field(default=False, init=False)
    _ended: threading.Event = field(default_factory=threading.Event, init=False)

    def __enter__(self) -> Child:
        read_end, write_end = os.pipe()
        self._grouped, parent = not _has_terminal(), os.getpid()
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            os.close(write_end)
            _exec_command(self.command, read_end, parent, grouped=self._grouped)
        os.close(read_end)
        self._start_pipe = os.fdopen(write_end, "wb")
        return self

    def __exit__(self, *_: object) -> None:
        self._start_pipe.close()
        if not self._ended.is_set():
            self._wait()

    def work(self, lease: Lease, held: str) -> int:
        """Execute the command under the lease, and wait until it ends.

        :param lease: the lease, whose key, id and token the command's environment gets.
        :param held: all leases under which the command runs, for its environment.
        :returns: exit code of the command, or 128 plus the number of the signal that ended it.
        :raises LockLostError: the lease was lost before the command was executed.
        """
        self._lease = lease
        for number in _FORWARDED:
            signal.signal(number, self._forward)
        signal.signal(signal.SIGCONT, self._continue)
        if self._grouped:
            signal.signal(signal.SIGTSTP, self._stop)
        environment = {
            **os.environ,
            "DYNAMO_LOCK_KEY": lease.key,
            "DYNAMO_LOCK_LEASE_ID": lease.lease_id,
            "DYNAMO_LOCK_TOKEN": str(lease.token or ""),
            VARIABLE: held,
        }
        lease.check()
        try:
            with self._start_pipe:
                self._start_pipe.write(json.dumps(environment).encode())
        except BrokenPipeError:
            lease.check()
            click.echo(f"dynamo-lock: the process ended before it executed {self.command[0]!r}.", err=True)
        return self._wait()

    def end(self) -> None:
        """Send SIGTERM, and SIGKILL if the command does not end within `kill_after` seconds."""
        self._end(signal.SIGTERM)
        if not self._ended.wait(self.kill_after):
            self._send(signal.SIGKILL)

    def _forward(self, number: int, _frame: object) -> None:
        # The terminal sends Ctrl-C and Ctrl-\ to the whole job, so the command has received the signal.
        if number in (signal.SIGINT, signal.SIGQUIT) and not self._grouped:
            return
        if number in _TERMINATING:
            self._end(number)
        else:
            self._send(number)

    def _stop(self, *_: object) -> None:
        """Stop the group, then this process: the group must not continue while no heartbeats are sent."""
        self._send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)

    def _continue(self, *_: object) -> None:
        if self._lease.remaining():
            self._send(signal.SIGCONT)
        elif self._lease.term:
            # Lost for good, so a late answer does not revive the lease. The heartbeat thread ends the command.
            self._lease.term.lose("it ran out while dynamo-lock was stopped")

    def _end(self, number: int) -> None:
        self._terminated |= number == signal.SIGTERM
        self._send(number)
        self._send(signal.SIGCONT)  # a stopped process does not handle signals

    def _send(self, number: int) -> bool:
        """Send a signal to the command or its group. Returns whether a process is there, also if it runs as another
        user and may not receive the signal."""
        if self._ended.is_set():
            return False  # the system may have reused its id
        try:
            (os.killpg if self._grouped else os.kill)(self.pid, number)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True

    def _wait(self) -> int:
        _, status = os.waitpid(self.pid, 0)
        if self._grouped:
            self._end_group()
        self._ended.set()
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code

    def _end_group(self) -> None:
        """End the processes that the command has left in its group, since they may use the locked resource."""
        for number, timeout in ((signal.SIGTERM, self.kill_after), (signal.SIGKILL, _KILL_TIMEOUT)):
            deadline = time.monotonic() + timeout
            # SIGTERM is sent only once, because a process may be cleaning up.
            if number == signal.SIGKILL or not self._terminated:
                self._end(number)
            while self._has_processes():
                if time.monotonic() >= deadline:
                    break
                time.sleep(0.02)  # no signal reports the end of a process that is not a child

    def _has_processes(self) -> bool:
        with suppress(ChildProcessError):
            # As process 1 of a container, `dynamo-lock` has to reap orphans.
            os.waitpid(-self.pid, os.WNOHANG)
        return self._send(0)


def _has_terminal() -> bool:
    """Whether this process has a controlling terminal. stdin may come from elsewhere."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _exec_command(command: tuple[str, ...], read_end: int, parent: int, *, grouped: bool) -> None:
    """Wait for the environment on the pipe, then execute the command. Runs in the new process, and never returns.

    If the pipe is closed without an environment, exit.
    """
    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        # Python ignores these signals, and they would stay ignored in the command.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        if grouped:
            os.setpgid(0, 0)
        _die_with_parent(parent)
        with os.fdopen(read_end, "rb") as pipe:
            environment: Mapping[str, str] = json.loads(pipe.read() or b"null")
        if environment is not None:
            os.execvpe(command[0], command, environment)  # noqa: S606 - the user's command
    except OSError as failure:
        os.write(2, f"dynamo-lock: {command[0]!r} cannot be executed: {failure.strerror}.\n".encode())
        code = NOT_EXECUTABLE
    finally:
        os._exit(code)


def _die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the parent dies. Linux only: elsewhere, it lives on."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the call
            os._exit(1)
