"""The group of commands, and what a command that fails prints and exits with."""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import Any

import click

from airflow_dynamo_lock import __version__
from airflow_dynamo_lock.cli import doctor, locks, migrate, run, tables
from airflow_dynamo_lock.core.model.errors import (
    CapacityMismatchError,
    LockError,
    LockLostError,
    LockNotHeldError,
    LockTimeoutError,
    LockValueError,
)

#: What a command exits with. The first four are awsflock's as well.
DONE, FAILED, USAGE, NOT_OURS, INTERRUPTED = 0, 1, 2, 3, 130


class _Commands(click.Group):
    """Done, too, when whoever reads the output has seen enough; click and rich have an exit code of 1 for that."""

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

    Exits with 0 when done, 3 when the lock is held by somebody else, or is not held by that lease (any more), 2 when
    the command was used wrongly, 1 for all else. AWS credentials, region and profile are found as by the AWS CLI.
    """


for command in (*locks.COMMANDS, run.run, tables.table, migrate.migrate, doctor.doctor):
    cli.add_command(command)


def main(arguments: list[str] | None = None) -> None:
    """Carry a command out and exit."""
    # So that what was begun is undone: a lock that was just taken is given back, a place in line given up.
    signal.signal(signal.SIGTERM, _terminated)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        signal.signal(signal.SIGHUP, _terminated)
    # Whoever ignores it passes that on, and then no child can be waited for.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _open_streams()
    code = carried_out(arguments)
    try:
        sys.stdout.flush()
    except OSError:  # which was told; Python would tell it again when it closes stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _terminated(number: int, _frame: object) -> None:
    sys.exit(128 + number)


def _open_streams() -> None:
    """Have all three, also where the caller has closed some: what is written to a closed stdout still fails."""
    for name, access, mode in (
        ("stdin", os.O_RDONLY, "r"),
        ("stdout", os.O_RDONLY, "w"),
        ("stderr", os.O_WRONLY, "w"),
    ):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, access), mode))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what the locale cannot write


def carried_out(arguments: list[str] | None = None) -> int:
    """Carry a command out. Returns what to exit with; errors are one sentence on stderr."""
    try:
        return cli.main(arguments, prog_name="dynamo-lock", standalone_mode=False) or DONE
    except click.ClickException as wrong:
        wrong.show()
        return wrong.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except LockError as failure:
        click.echo(f"dynamo-lock: {failure}", err=True)
        return _code(failure)
    except OSError as failure:
        click.echo(f"dynamo-lock: {failure.strerror or failure}.", err=True)
        return FAILED


def _code(failure: LockError) -> int:
    match failure:
        case LockTimeoutError() | LockLostError() | LockNotHeldError():
            return NOT_OURS
        case LockValueError() | CapacityMismatchError():
            return USAGE
    return FAILED
