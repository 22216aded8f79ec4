"""The group of commands, and what a command that fails prints and exits with."""

from __future__ import annotations

import os
import signal
import sys

import click

from airflow_dynamo_lock import __version__
from airflow_dynamo_lock.cli import doctor, locks, migrate, run, tables
from airflow_dynamo_lock.protocol.errors import (
    CapacityMismatchError,
    LockError,
    LockLostError,
    LockNotHeldError,
    LockTimeoutError,
    LockValueError,
)

#: What a command exits with. The first four are awsflock's as well.
DONE, FAILED, USAGE, NOT_OURS, INTERRUPTED = 0, 1, 2, 3, 130


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
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
    sys.exit(carried_out(arguments))


def _terminated(number: int, _frame: object) -> None:
    sys.exit(128 + number)


def carried_out(arguments: list[str] | None = None) -> int:
    """Carry a command out. Returns what to exit with; errors are one sentence on stderr."""
    try:
        return cli.main(arguments, prog_name="dynamo-lock", standalone_mode=False) or DONE
    except click.ClickException as wrong:
        wrong.show()
        return wrong.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has seen enough. Nor may Python complain when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except LockError as failure:
        click.echo(f"dynamo-lock: {failure}", err=True)
        return _code(failure)


def _code(failure: LockError) -> int:
    match failure:
        case LockTimeoutError() | LockLostError() | LockNotHeldError():
            return NOT_OURS
        case LockValueError() | CapacityMismatchError():
            return USAGE
    return FAILED
