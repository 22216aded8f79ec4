"""``airflow dynamo-lock …``: the same commands, for the table of an Airflow connection."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from airflow_dynamo_lock.defaults import DEFAULT_CONN_ID


def commands() -> list[Any]:
    """What Airflow adds to its own commands."""
    from airflow.cli.cli_config import ActionCommand, Arg

    return [
        ActionCommand(
            name="dynamo-lock",
            help="Locks on DynamoDB: who holds what, who waits; hold, break, check",
            description="The commands of dynamo-lock, on the table of the connection dynamo_lock_default or --conn-id. "
            "airflow dynamo-lock COMMAND --help tells more.",
            func=_carry_out,
            args=(
                Arg(
                    ("arguments",),
                    nargs=argparse.REMAINDER,
                    metavar="COMMAND …",
                    help="acquire, break, capacity, doctor, get, list, migrate, release, renew, run, table, waiters, "
                    "watch",
                ),
            ),
        )
    ]


def _carry_out(given: argparse.Namespace) -> None:
    """Become `dynamo-lock`: what Airflow has set up here would write its log between the answers."""
    os.environ.setdefault("DYNAMO_LOCK_CONN_ID", DEFAULT_CONN_ID)
    command = [sys.executable, "-m", "airflow_dynamo_lock.cli", *(given.arguments or ["--help"])]
    os.execv(sys.executable, command)  # noqa: S606 - itself
