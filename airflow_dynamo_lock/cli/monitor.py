"""The commands for monitoring: `check` for cron and Nagios, `metrics` for Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from airflow_dynamo_lock.cli.options import DURATION, Settings, check_keys, settings
from airflow_dynamo_lock.core.model.errors import LockError, LockRecordError, LockValueError
from airflow_dynamo_lock.core.model.text import duration
from airflow_dynamo_lock.monitoring.checks import Limits, findings
from airflow_dynamo_lock.monitoring.openmetrics import exposition
from airflow_dynamo_lock.monitoring.totals import Totals

if TYPE_CHECKING:
    from airflow_dynamo_lock.client.sync_client import LockClient
    from airflow_dynamo_lock.core.model.state import LockState

#: Exit codes of `check`, as Nagios defines them. 2 is also the exit code for wrong usage.
OK, CRITICAL, UNKNOWN = 0, 2, 3


def _survey(locks: LockClient, prefix: str = "") -> tuple[list[LockState], list[LockRecordError]]:
    """The locks with their queues, and an error for each damaged record."""
    damaged: list[LockRecordError] = []
    states = locks.survey(prefix, on_damaged=damaged.append)
    if not states:
        check_keys(locks)
    return states, damaged


def _or_unknown(command: Callable[..., int]) -> Callable[..., int]:
    """Let a command answer as Nagios expects if the locks could not be read, or their connection not be looked up."""

    @wraps(command)
    def called(**options: Any) -> int:
        try:
            return command(**options)
        except LockValueError:
            raise  # wrong usage, as of every command
        except LockError as failure:
            click.echo(f"UNKNOWN: {failure}")
            return UNKNOWN

    return called


@click.command()
@click.argument("prefix", default="")
@click.option("--held-longer", type=DURATION, help="Report locks held by one holder for this time or longer.")
@click.option(
    "--waiting-longer", type=DURATION, help="Report waiters that have waited for this time or longer."
)
@click.option(
    "--lost-within", type=DURATION, help="Report leases that were lost in this time: broken, or reclaimed."
)
@_or_unknown
@settings
def check(
    where: Settings,
    prefix: str,
    held_longer: float | None,
    waiting_longer: float | None,
    lost_within: float | None,
) -> int:
    """Report locks that are held, waited for or lost, for cron and Nagios.

    Checks all locks whose names begin with PREFIX. A record that cannot be read is reported as well.

    Exit codes: 0, nothing to report. 2, something is reported, or wrong usage. 3, the locks could not be read.
    """
    if held_longer is waiting_longer is lost_within is None:
        raise click.UsageError("Give at least one of --held-longer, --waiting-longer and --lost-within.")
    limits = Limits(
        *(None if each is None else each * 1000 for each in (held_longer, waiting_longer, lost_within))
    )
    states, damaged = _survey(where.locks(), prefix)
    found = [*findings(states, limits), *map(str, damaged)]
    total = Totals.of(states)
    summary = f"{total.locks} locks, {total.held} held, {total.waiting} waiting"
    summary += f", the longest for {duration(total.waited_ms)}" if total.waiting else ""
    verdict = f"CRITICAL: {len(found)} finding{'s' if len(found) > 1 else ''} in" if found else "OK:"
    # What follows the bar are figures, which Nagios records.
    click.echo(
        f"{verdict} {summary} | held={total.held} waiting={total.waiting} "
        f"longest_wait={total.waited_ms / 1000:.0f}s"
    )
    for sentence in found:
        click.echo(sentence)
    return CRITICAL if found else OK


@click.command()
@click.option(
    "--keys",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Number of locks in use that get metrics of their own, those with the most waiters first.",
)
@settings
def metrics(where: Settings, keys: int) -> None:
    """Print the locks of the table as metrics, in the text format of OpenMetrics."""
    locks = where.locks()
    states, damaged = _survey(locks)
    for each in damaged:
        click.echo(f"dynamo-lock: {each}", err=True)
    click.echo(exposition({locks.table: states}, keys, {locks.table: len(damaged)}), nl=False)
