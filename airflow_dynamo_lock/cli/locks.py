"""The commands on single locks, and those that list and watch them."""

from __future__ import annotations

import getpass
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from airflow_dynamo_lock.cli import show
from airflow_dynamo_lock.cli.options import DURATION, Settings, check_keys, settings
from airflow_dynamo_lock.client.held import held_around
from airflow_dynamo_lock.core.model.arguments import seconds
from airflow_dynamo_lock.core.model.errors import (
    LockError,
    LockNotHeldError,
    LockRecordError,
    LockUnavailableError,
    LockValueError,
)
from airflow_dynamo_lock.core.model.lease import Lease
from airflow_dynamo_lock.core.model.outcomes import Draining, Lost
from airflow_dynamo_lock.core.model.record import LockRecord, QueuePosition
from airflow_dynamo_lock.core.model.text import readable

if TYPE_CHECKING:
    from airflow_dynamo_lock.client.sync_client import LockClient

#: Names of the options of a claim.
CLAIM = ("slots", "capacity", "mode", "fair", "priority", "owner")


def claiming(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a claim to a command, which receives their values as the dict ``claim``.

    :param command: a function that takes `Settings` first.
    :returns: the function with the options.
    """

    @wraps(command)
    def called(where: Settings, **options: Any) -> Any:
        claim = {name: options.pop(name) for name in CLAIM}
        return command(where, claim=claim, **options)

    return claim_options(called)


def claim_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a claim, whose names are `CLAIM`."""
    for option in (
        click.option("--owner", help="Name of the holder, for people to read.  [default: host:pid]"),
        click.option(
            "--priority",
            default=0,
            show_default=True,
            help="From -999 to 999; a waiter with a higher priority is granted first.",
        ),
        click.option(
            "--fair/--unfair", default=True, help="Queue and overtake no waiter, or ignore the queue."
        ),
        click.option(
            "--mode",
            type=click.Choice(["exclusive", "shared"]),
            default="exclusive",
            show_default=True,
            help="Hold the lock alone, or together with other shared holders.",
        ),
        click.option("--capacity", default=1, show_default=True, help="Number of slots that the lock has."),
        click.option("--slots", default=1, show_default=True, help="Number of slots to acquire."),
    ):
        command = option(command)
    return command


def this_user() -> str:
    """The user of this command and its host, for the record."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


@click.command()
@click.argument("key")
@click.option(
    "--wait-time", type=DURATION, default=60.0, show_default="60s", help="Maximum time to wait for the lock."
)
@click.option("--no-wait", is_flag=True, help="Try once, do not wait.")
@click.option(
    "--lease-duration",
    type=DURATION,
    default=7200.0,
    show_default="2 hours",
    help="How long the lease lasts without a renewal.",
)
@click.option("--data", help="JSON object to store with the lock.")
@settings
@claiming
def acquire(
    where: Settings,
    key: str,
    wait_time: float,
    no_wait: bool,
    lease_duration: float,
    data: str | None,
    claim: Any,
) -> None:
    """Acquire a lock, and print its lease id, which renews and releases it.

    No process sends heartbeats: the lock is held until it is released or its lease runs out. See also `run`.
    """
    locks = where.locks(lease=lease_duration)
    lease = locks.acquire(
        key,
        timeout=0 if no_wait else wait_time,
        on_position=print_position,
        holding=held_around(locks),
        data=_json_object("data", data),
        **claim,
    )
    try:
        _print_lease(where, lease)
        sys.stdout.flush()
    except OSError as failure:  # without the lease id, no process can release the lock
        locks.release(lease)
        raise LockError(
            f"The lock {key!r} was released, because its lease id could not be printed: {failure.strerror}."
        ) from failure


@click.command()
@click.argument("key")
@click.argument("lease_id")
@click.option("--lease-duration", type=DURATION, help="New length of the lease, longer than before.")
@click.option("--data", help="JSON object that replaces the lock's data; {} removes them.")
@settings
def renew(where: Settings, key: str, lease_id: str, lease_duration: float | None, data: str | None) -> None:
    """Renew a lease: send one heartbeat."""
    locks = where.locks()
    lease = locks.renew(locks.find(key, lease_id), duration=lease_duration, data=_json_object("data", data))
    _print_lease(where, lease)


@click.command()
@click.argument("key")
@click.argument("lease_id")
@settings
def release(where: Settings, key: str, lease_id: str) -> None:
    """Release a lock."""
    locks = where.locks()
    outcome = locks.release(locks.find(key, lease_id))
    if isinstance(outcome, Lost):
        raise LockNotHeldError(
            f"The lease {lease_id} does not hold the lock {key!r} any more: {outcome.describe()}."
        )
    if isinstance(outcome, Draining):
        holder = outcome.holder
        click.echo(
            f"{len(holder.processes)} processes are still inside: the lock is free when they have left, or "
            f"{holder.lease_ms / 1000:g} s after the last one's heartbeat.",
            err=True,
        )


@click.command()
@click.argument("key")
@settings
def get(where: Settings, key: str) -> None:
    """Show a lock and its holders."""
    record = where.locks().get(key) or LockRecord(key, 1, 1, {}, token=0)
    if where.as_json:
        show.as_json(record.as_dict())
        return
    show.show(show.LOCK_COLUMNS, show.lock_rows([record]))
    if record.data is not None:
        click.echo(show.json_text(record.data, indent=2))


@click.command("list")
@click.option("--prefix", default="", help="Only locks whose keys begin with this text.")
@click.option("--held", is_flag=True, help="Only locks that are held.")
@settings
def list_(where: Settings, prefix: str, held: bool) -> None:
    """Show all locks of the table. Reads the whole table."""
    damaged: list[LockRecordError] = []
    records = _listed(where.locks(), prefix, held, damaged.append)
    for each in damaged:
        click.echo(f"dynamo-lock: {each}", err=True)
    if where.as_json:
        show.as_json([each.as_dict() for each in records])
    elif records:
        show.show(show.LOCK_COLUMNS, show.lock_rows(records))
    else:
        which = f"{'held ' if held else ''}locks" + (f" with the prefix {prefix!r}" if prefix else "")
        click.echo(
            f"No {which} in {'bucket' if where.format == 's3' else 'table'} {where.table!r}.", err=True
        )


@click.command()
@click.argument("keys", nargs=-1)
@click.option("--prefix", default="", help="Only locks whose keys begin with this text.")
@click.option(
    "--interval", type=DURATION, default=2.0, show_default="2s", help="Time between two reads of the table."
)
@settings
def watch(where: Settings, keys: tuple[str, ...], prefix: str, interval: float) -> None:
    """Show the locks KEYS, or all held locks, and update the output on each change, until interrupted."""
    from rich.console import Console
    from rich.live import Live

    locks, console, pause = where.locks(), Console(highlight=False), seconds("--interval", interval)

    def records() -> tuple[list[LockRecord], list[str]]:
        """The locks, and an error for each damaged record."""
        damaged: list[LockRecordError] = []
        if not keys:
            found = _listed(locks, prefix, held=True, on_damaged=damaged.append)
        else:
            found = []
            for key in keys:
                try:
                    found.append(locks.get(key) or LockRecord(key, 1, 1, {}, token=0))
                except LockRecordError as error:
                    damaged.append(error)
        return found, [str(each) for each in damaged]

    def snapshots() -> Iterator[tuple[list[LockRecord], list[str]]]:
        """Read the locks at each interval. After a failed read, yield the last locks and the error.

        :raises LockError: the first read failed.
        """
        found, errors = records()
        while True:
            yield found, errors
            time.sleep(pause)
            try:
                found, errors = records()
            except LockUnavailableError as unavailable:
                errors = [str(unavailable)]

    if where.as_json or not console.is_terminal:
        printed: list[dict[str, Any]] | None = None
        reported: list[str] = []
        for found, errors in snapshots():  # one line per change; heartbeats do not count
            for error in errors:
                if error not in reported:
                    click.echo(f"dynamo-lock: {error}", err=True)
            reported = errors
            now = [each.as_dict() for each in found]
            compared = [
                {**each, "holders": [{**holder, "renewed_at": None} for holder in each["holders"]]}
                for each in now
            ]
            if compared != printed:
                click.echo(show.json_text(now))
                printed = compared
    with Live(console=console, auto_refresh=False, screen=True) as live:
        for found, errors in snapshots():
            shown = show.table(console, show.LOCK_COLUMNS, show.lock_rows(found))
            shown.caption = "\n".join(errors)
            live.update(shown, refresh=True)


@click.command()
@click.argument("key")
@settings
def waiters(where: Settings, key: str) -> None:
    """Show the queue of a lock, in the order in which waiters are granted it."""
    found = where.locks().waiters(key)
    if where.as_json:
        show.as_json([each.as_dict() for each in found])
    elif found:
        show.show(show.WAITER_COLUMNS, show.waiter_rows(found))
    else:
        click.echo(f"No waiters for the lock {key!r}.", err=True)


@click.command("break")
@click.argument("key")
@click.argument("lease_id", required=False)
@click.option("--reason", help="Why; the holder's error shows it, with the name of who breaks the lock.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@settings
def break_(where: Settings, key: str, lease_id: str | None, reason: str | None, yes: bool) -> None:
    """Take a lock away from its holder.

    The holder learns of it at its next heartbeat, and may work until then. Check first that its work has ended, or
    must end.
    """
    locks = where.locks()
    record = locks.get(key)
    if record is None or not record.holders:
        raise LockNotHeldError(f"The lock {key!r} is not held, so there is nothing to break.")
    if lease_id is None:
        if len(record.holders) > 1:
            raise LockValueError(
                f"The lock {key!r} has {len(record.holders)} holders: say which lease to break, "
                "dynamo-lock break KEY LEASE_ID."
            )
        lease_id = next(iter(record.holders))
    holder = record.holders.get(lease_id)
    if holder is not None and not yes:
        click.echo(
            f"The lock {key!r} is held by {holder.describe(record.read_at_ms)} (lease {lease_id}).", err=True
        )
        _confirm("Break it?", "Not broken.")
    locks.break_lock(key, lease_id, by=this_user(), reason=reason)


@click.command("remove-waiter")
@click.argument("key")
@click.argument("lease_id")
@click.option("--reason", help="Why; the waiter's error shows it, with the name of who removes it.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@settings
def remove_waiter(where: Settings, key: str, lease_id: str, reason: str | None, yes: bool) -> None:
    """Remove a waiter from the queue of a lock.

    Its wait ends with an error, and it does not queue again. LEASE_ID is in the last column of `waiters`.
    """
    locks = where.locks()
    if not yes:
        for waiter in locks.waiters(key):
            if waiter.lease_id == lease_id:
                click.echo(
                    f"{readable(waiter.owner)} has waited since {show.since(waiter.since)} UTC.", err=True
                )
                _confirm("Remove it from the queue?", "Not removed.")
    locks.remove_waiter(key, lease_id, by=this_user(), reason=reason)


@click.command()
@click.argument("key")
@click.argument("number", type=int, required=False)
@click.option("--unset", is_flag=True, help="Let claims decide the capacity again.")
@settings
def capacity(where: Settings, key: str, number: int | None, unset: bool) -> None:
    """Set the capacity of a semaphore, or let claims decide it again.

    A NUMBER overrides the capacity of all claims, also while the semaphore is held. No holder loses its lease.
    """
    if (number is None) != unset:
        raise click.UsageError("Give either a NUMBER of slots or --unset.")
    record = where.locks().set_capacity(key, number)
    if where.as_json:
        show.as_json(record.as_dict())
    else:
        show.show(show.LOCK_COLUMNS, show.lock_rows([record]))


COMMANDS = (acquire, renew, release, get, list_, watch, waiters, remove_waiter, break_, capacity)


def _confirm(question: str, refused: str) -> None:
    """Return if the user confirms.

    :raises LockValueError: there is no terminal.
    :raises LockError: the user does not.
    """
    if not sys.stdin.isatty():
        raise LockValueError("There is no terminal on which to ask for confirmation: add --yes.")
    if not click.confirm(question, err=True):
        raise LockError(refused)


def _print_lease(where: Settings, lease: Lease) -> None:
    """Print the lease as JSON, or only its id for use in scripts."""
    if where.as_json:
        show.as_json(lease.as_dict())
    else:
        click.echo(lease.lease_id)


def _listed(
    locks: LockClient, prefix: str, held: bool, on_damaged: Callable[[LockRecordError], None] | None = None
) -> list[LockRecord]:
    found = sorted(locks.list_locks(prefix, on_damaged=on_damaged), key=lambda each: each.key)
    if not found:
        check_keys(locks)
    return [each for each in found if each.holders or not held]


def _json_object(name: str, text: str | None) -> dict[str, Any] | None:
    """Parse the value of an option that takes a JSON object.

    :raises LockValueError: the text is not a JSON object.
    """
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise LockValueError(f"--{name} must be a JSON object, such as '{{\"ticket\": 4711}}'.")
    return value


def print_position(position: QueuePosition) -> None:
    """Print the position of a waiter in the queue, if stderr is a terminal."""
    if sys.stderr.isatty():
        click.echo(f"waiting: {position.describe()}", err=True)
