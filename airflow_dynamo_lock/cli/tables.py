"""``dynamo-lock table``: create the lock table, or check it."""

from __future__ import annotations

import click

from airflow_dynamo_lock.cli.options import DURATION, Settings, settings


@click.group()
def table() -> None:
    """Create or check the lock table."""


@table.command()
@click.option("--streams", is_flag=True, help="Enable a stream, so that waiters are notified sooner.")
@click.option(
    "--wait-time",
    type=DURATION,
    default=60.0,
    show_default="60s",
    help="Maximum time to wait until the table is active.",
)
@settings
def create(where: Settings, streams: bool, wait_time: float) -> None:
    """Create the lock table, with on-demand capacity and time to live.

    If the table exists, check it, and turn its time to live on.
    """
    where.locks().create_table(timeout=wait_time, streams=streams)
    click.echo(f"The lock table {where.table!r} is ready.", err=True)


@table.command()
@settings
def check(where: Settings) -> None:
    """Check that the table exists and can hold locks."""
    where.locks().check_table()
    click.echo(f"The lock table {where.table!r} is ready.", err=True)
