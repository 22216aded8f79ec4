"""``dynamo-lock migrate``: move the locks of another library's table to ours, so that at no moment both sides could
hold one.

First ours are taken, all of them, so that nobody on our side gets one. Then theirs, each as soon as it is free or its
holder is dead, and kept for ever: a sign for their clients that it is held. Then ours is given back. Whoever asks
meanwhile is told who is in the way, and on which side. All of it can be interrupted and begun again. On the way back
it is ours that is kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import click

from airflow_dynamo_lock.cli.options import DURATION, Settings, settings
from airflow_dynamo_lock.protocol.errors import LockTimeoutError, LockValueError
from airflow_dynamo_lock.protocol.formats import FORMATS, NATIVE
from airflow_dynamo_lock.protocol.model import LockRecord, readable

if TYPE_CHECKING:
    from airflow_dynamo_lock.client.sync import LockClient

_FOR_EVER = 10 * 365 * 24 * 3600.0
_PAUSE = 1.0


@click.command()
@click.option(
    "--from-format",
    type=click.Choice([name for name in FORMATS if name != NATIVE]),
    required=True,
    help="The other library's.",
)
@click.option("--from-table", required=True, help="Its table, or bucket.")
@click.option("--from-partition-key", help="How that names its partition key, if not as usual.")
@click.option("--from-sort-key", help="The same for its sort key.")
@click.option("--wait-time", type=DURATION, help="For how long to wait for holders.  [default: without end]")
@click.option("--undo", is_flag=True, help="Move them back: their clients can take them again.")
@click.argument("keys", nargs=-1)
@settings
def migrate(
    where: Settings,
    keys: tuple[str, ...],
    from_format: str,
    from_table: str,
    from_partition_key: str | None,
    from_sort_key: str | None,
    wait_time: float | None,
    undo: bool,
) -> None:
    """Move locks from another library's table to ours.

    All that the table shows, and those named by KEYS: of a lock that is free, most libraries leave no trace. A lock
    that is held is moved as soon as it is given back, or its holder is dead. Exits with 3 if the time is up before.
    """
    if where.format != NATIVE:
        raise LockValueError("Locks are moved to a table of the format 'native': leave --format out.")
    log = logging.getLogger("airflow_dynamo_lock")
    if log.getEffectiveLevel() > logging.WARNING:
        log.setLevel(logging.WARNING)  # what is no lock is not moved, which is to be seen
    there = replace(
        where, table=from_table, format=from_format, partition_key=from_partition_key, sort_key=from_sort_key
    )
    move = _Move(
        there.locks(owner=f"moved to {where.table}", lease=_FOR_EVER),
        where.locks(lease=_FOR_EVER),
        # The lease by which a lock is kept on either side, whichever process does it.
        f"dynamo-lock migrate {from_format} {from_table} > {where.table}",
    )
    move.theirs.check_table()
    move.ours.check_table()
    left = set(keys) | {each.key for each in move.theirs.list()}
    if not undo:
        # Ours too that an earlier run has kept: theirs may be free by now, and leave no trace.
        left |= {each.key for each in move.ours.list() if move.keeps(each)}
        for key in sorted(left):
            move.begin(key)
        click.echo(f"begun: nobody here takes any of {len(left)} locks before it is moved", err=True)
    deadline = None if wait_time is None else time.monotonic() + wait_time
    told: dict[str, str] = {}
    while left:
        for key in sorted(left):
            obstacle = move.back(key) if undo else move.over(key)
            if obstacle is None:
                left.discard(key)
                click.echo(f"{'back' if undo else 'moved'}  {readable(key)}")
            elif told.get(key) != obstacle:
                told[key] = obstacle
                click.echo(f"waiting for {readable(key)}: {obstacle}", err=True)
        if left and deadline is not None and time.monotonic() >= deadline:
            names = ", ".join(repr(key) for key in sorted(left))
            raise LockTimeoutError(f"Not moved within {wait_time:g} s: {names}. Run it again for the rest.")
        if left:
            time.sleep(_PAUSE)


@dataclass
class _Move:
    """The locks on either side."""

    theirs: LockClient
    ours: LockClient
    lease_id: str

    def begin(self, key: str) -> str | None:
        """See to it that nobody on our side gets it. Returns what is in the way, if something is."""
        before = self.theirs.get(key)
        if self.keeps(before):
            return None  # it has been moved
        who = _holders(before) or "it is being moved"
        return self._take(self.ours, key, f"{self.theirs.table}: {who}")

    def over(self, key: str) -> str | None:
        """Move it to our side. Returns what is in the way, if something is."""
        if obstacle := self.begin(key):
            return obstacle
        if not self.keeps(self.theirs.get(key)) and (obstacle := self._take(self.theirs, key)):
            return obstacle
        if self.keeps(self.ours.get(key)):
            lease = self.ours.find(key, self.lease_id)
            kept = self.theirs.get(key)
            if kept is not None and kept.data:
                self.ours.renew(lease, data=kept.data)
            self.ours.release(lease)
        return None

    def back(self, key: str) -> str | None:
        """Move it back. Returns what is in the way, if something is."""
        if obstacle := self._take(self.ours, key, f"{self.theirs.table}: it has been moved back"):
            return obstacle
        if self.keeps(self.theirs.get(key)):
            self.theirs.release(self.theirs.find(key, self.lease_id))
        return None

    def keeps(self, record: LockRecord | None) -> bool:
        """Whether a lock is kept by this move."""
        return record is not None and self.lease_id in record.holders

    def _take(self, locks: LockClient, key: str, owner: str | None = None) -> str | None:
        try:
            locks.acquire(key, timeout=0, lease_id=self.lease_id, owner=owner, fair=False)
        except LockTimeoutError as busy:
            who = busy.record.describe() if busy.record is not None else str(busy)
            return f"{who}, in {locks.table}"
        return None


def _holders(record: LockRecord | None) -> str:
    holders: Iterable[str] = () if record is None else (each.owner for each in record.holders.values())
    return ", ".join(holders)
