"""``airflow dynamo-lock …``: the commands of ``dynamo-lock``, on the table of an Airflow connection."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from airflow_dynamo_lock.defaults import DEFAULT_CONN_ID


def commands() -> list[Any]:
    """The commands that Airflow adds to its own command line."""
    from airflow.cli.cli_config import ActionCommand, Arg

    return [
        ActionCommand(
            name="dynamo-lock",
            help="Locks on DynamoDB: show, hold, break and check them",
            description="The commands of dynamo-lock, on the table of the connection dynamo_lock_default or --conn-id. "
            "airflow dynamo-lock COMMAND --help shows the options of a command.",
            func=_exec_dynamo_lock,
            args=(
                Arg(
                    ("arguments",),
                    nargs=argparse.REMAINDER,
                    metavar="COMMAND …",
                    help="acquire, break, capacity, check, doctor, get, list, metrics, migrate, release, "
                    "remove-waiter, renew, run, table, waiters, watch",
                ),
            ),
        )
    ]


def _exec_dynamo_lock(parsed: argparse.Namespace) -> None:
    """Replace this process by `dynamo-lock`, because the log of Airflow here would mix with the output."""
    os.environ.setdefault("DYNAMO_LOCK_CONN_ID", DEFAULT_CONN_ID)
    command = [sys.executable, "-m", "airflow_dynamo_lock.cli", *(parsed.arguments or ["--help"])]
    os.execv(sys.executable, command)  # noqa: S606 - the package's own command line
