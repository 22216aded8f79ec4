"""The command group, its error messages and its exit codes."""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import Any

import click

from airflow_dynamo_lock import __version__
from airflow_dynamo_lock.cli import doctor, locks, migrate, monitor, run, tables
from airflow_dynamo_lock.core.model.errors import (
    CapacityMismatchError,
    LockDeadlockError,
    LockError,
    LockLostError,
    LockNotHeldError,
    LockNotWaitingError,
    LockRemovedError,
    LockTimeoutError,
    LockValueError,
)

#: Exit codes of the commands. The first four are the same as awsflock's.
DONE, FAILED, USAGE, NOT_OURS, INTERRUPTED = 0, 1, 2, 3, 130


class _Commands(click.Group):
    """The command group. It exits with 0 if a reader closes the pipe; click and rich exit with 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            code = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            return DONE
        except SystemExit as ended:
            if isinstance(ended.__context__, BrokenPipeError):
                return DONE
            raise
        return code


@click.group(
    cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, prog_name="dynamo-lock")
def cli() -> None:
    """Locks in a DynamoDB table, as airflow-dynamo-lock uses them.

    Exit codes: 0, done. 1, any other error. 2, wrong usage. 3, the lock was not granted, or the given lease does not
    hold it or wait for it (any more). `check` and `run` have further ones. AWS credentials, region and profile are
    found as by the AWS CLI.
    """


for command in (
    *locks.COMMANDS,
    run.run,
    tables.table,
    migrate.migrate,
    doctor.doctor,
    monitor.check,
    monitor.metrics,
):
    cli.add_command(command)


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit.

    :param arguments: arguments of the program; None takes those of this process.
    :raises SystemExit: always, with the exit code.
    """
    # An exception undoes what was begun: a lock that was just acquired is released, a waiter is dequeued.
    signal.signal(signal.SIGTERM, _terminated)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # `nohup` ignores it
        signal.signal(signal.SIGHUP, _terminated)
    # If the caller ignores SIGCHLD, this process has inherited that, and could not wait for its children.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _open_streams()
    code = run_command(arguments)
    try:
        sys.stdout.flush()
    except OSError:  # already reported; Python would report it again when it closes stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _terminated(number: int, _frame: object) -> None:
    sys.exit(128 + number)


def _open_streams() -> None:
    """Open the standard streams that the caller has closed.

    stdout is opened for reading only, so that writing to it still fails.
    """
    for name, access, mode in (
        ("stdin", os.O_RDONLY, "r"),
        ("stdout", os.O_RDONLY, "w"),
        ("stderr", os.O_WRONLY, "w"),
    ):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, access), mode))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for characters that the locale cannot encode


def run_command(arguments: list[str] | None = None) -> int:
    """Run a command, and print an error as one sentence on stderr.

    :param arguments: arguments of the program; None takes those of this process.
    :returns: the exit code.
    """
    try:
        return cli.main(arguments, prog_name="dynamo-lock", standalone_mode=False) or DONE
    except click.ClickException as wrong:
        wrong.show()
        return wrong.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except LockError as failure:
        click.echo(f"dynamo-lock: {failure}", err=True)
        return _exit_code(failure)
    except OSError as failure:
        click.echo(f"dynamo-lock: {failure.strerror or failure}.", err=True)
        return FAILED


def _exit_code(failure: LockError) -> int:
    match failure:
        case (
            LockTimeoutError()
            | LockDeadlockError()
            | LockRemovedError()
            | LockLostError()
            | LockNotHeldError()
            | LockNotWaitingError()
        ):
            return NOT_OURS
        case LockValueError() | CapacityMismatchError():
            return USAGE
    return FAILED
