"""The options of ``%%dynamo_lock``: those of `dynamo-lock run`, and ``--wait``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import click

from airflow_dynamo_lock.cli.locks import claim_options
from airflow_dynamo_lock.cli.options import DURATION, table_options

#: Name of the magics.
MAGIC = "dynamo_lock"


@click.command(MAGIC, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.argument("key")
@click.option(
    *("--wait", "--wait-time"),
    "wait_time",
    type=DURATION,
    help="Maximum time to wait for the lock.  [default: no limit]",
)
@click.option("--no-wait", is_flag=True, help="Try once, do not wait.")
@click.option(
    "--lease-duration",
    type=DURATION,
    default=30.0,
    show_default="30s",
    help="How long the lease lasts after its last heartbeat, such as when this machine dies.",
)
@table_options
@claim_options
def cell_options(**_: Any) -> None:
    """Hold a lock while the cell runs: %%dynamo_lock [OPTIONS] KEY

    Waits for the lock, runs the rest of the cell with the lease as the variable `lease`, and releases the lock,
    whatever happens. If the lease is lost, the cell is interrupted and ends with LockLostError.
    """


@click.command(f"{MAGIC}s", context_settings=cell_options.context_settings)
@click.argument("prefix", default="")
@table_options
def list_options(**_: Any) -> None:
    """Show the locks of the table whose keys begin with PREFIX: %dynamo_locks [OPTIONS] [PREFIX]"""


def parse(command: click.Command, arguments: Sequence[str]) -> dict[str, Any]:
    """The values of a command's options.

    :raises click.ClickException: the arguments are wrong.
    :raises click.exceptions.Exit: they ask for help, which is printed.
    """
    prefix = "%%" if command is cell_options else "%"
    return command.make_context(f"{prefix}{command.name}", [*arguments]).params


def split(line: str) -> list[str]:
    """The arguments in a magic's line, as a shell splits them.

    :raises click.UsageError: a quotation mark is missing.
    """
    try:
        return shlex.split(line)
    except ValueError as wrong:
        raise click.UsageError(f"{line!r} cannot be split into options: {wrong}.") from None
