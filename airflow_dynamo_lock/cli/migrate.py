"""``dynamo-lock migrate``: move the locks of another library's table to ours, so that at no moment both sides could
hold one.

First ours are taken, so that nobody on our side gets one. Then theirs, each as soon as it is free or its holder is
dead, and kept for ever: a sign for their clients that it is held. Then ours is given back. Whoever asks meanwhile is
told who is in the way, and on which side. All of it can be interrupted and begun again. On the way back it is ours that
is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import click

from airflow_dynamo_lock.cli.options import DURATION, Settings, settings
from airflow_dynamo_lock.core.foreign.registry import FORMATS, NATIVE
from airflow_dynamo_lock.core.model.errors import (
    CapacityMismatchError,
    LockError,
    LockRecordError,
    LockTimeoutError,
    LockValueError,
)
from airflow_dynamo_lock.core.model.record import LockRecord
from airflow_dynamo_lock.core.model.text import readable
from airflow_dynamo_lock.core.table.schema import TtlOffError

if TYPE_CHECKING:
    from airflow_dynamo_lock.client.sync_client import LockClient
    from airflow_dynamo_lock.core.model.lease import Lease

_FOR_EVER = 10 * 365 * 24 * 3600.0
_PAUSE = 1.0
# The formats that keep data with a lock.
_WITH_DATA = ("amazon-lock-client",)


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
@click.option("--from-prefix", default="", help="Only those whose names begin like that, and KEYS.")
@click.option("--wait-time", type=DURATION, help="For how long to wait for holders.  [default: without end]")
@click.option(
    "--undo", is_flag=True, help="Move all of them back, or KEYS: their clients can take them again."
)
@click.argument("keys", nargs=-1)
@settings
def migrate(
    where: Settings,
    keys: tuple[str, ...],
    from_format: str,
    from_table: str,
    from_partition_key: str | None,
    from_sort_key: str | None,
    from_prefix: str,
    wait_time: float | None,
    undo: bool,
) -> None:
    """Move locks from another library's table to ours.

    All that the table shows, and those named by KEYS: of a lock that is free, most libraries leave no trace. A lock
    that is held is moved as soon as it is given back, or its holder is dead. Exits with 3 if the time is up before, and
    with 1 if there are some that cannot be moved.
    """
    if where.format != NATIVE:
        raise LockValueError("Locks are moved to a table of the format 'native': leave --format out.")
    there = replace(
        where, table=from_table, format=from_format, partition_key=from_partition_key, sort_key=from_sort_key
    )
    move = _Move(
        there.locks(owner=f"moved to {where.table}", lease=_FOR_EVER),
        where.locks(lease=_FOR_EVER),
        # The leases by which a lock is kept on either side, whichever process does it.
        f"dynamo-lock migrate {from_format} {from_table} > {where.table}",
        f"dynamo-lock migrate {from_format} {from_table} < {where.table}",
        with_data=from_format in _WITH_DATA,
    )
    with suppress(TtlOffError):  # that they are never removed is no reason to leave them there
        move.theirs.check_table()
    move.ours.check_table()
    work = _Work(set(keys))
    if not (undo and keys):
        for record in move.theirs.list_locks(
            from_prefix, on_damaged=lambda damaged: work.cannot(str(damaged))
        ):
            work.left.add(record.key)
    if undo:
        work.until_done(move.back, "back", wait_time)
    else:
        # Ours too that an earlier run has kept: theirs may be free by now, and leave no trace.
        work.left |= {each.key for each in move.ours.list_locks() if move.keeps(each)}
        work.until_done(move.over, "moved", wait_time, first=move.begin)
    if work.failures:
        raise LockError(
            f"{work.failures} could not be moved: see above what is wrong with each, mend it, and run this again."
        )


@dataclass(frozen=True)
class _Obstacle:
    """Who is in the way: their lease ids, and what is said of them."""

    holders: frozenset[str]
    text: str


@dataclass
class _Work:
    """What is still to be moved, and what is said of it."""

    left: set[str]
    failures: int = 0
    _reported: dict[str, frozenset[str]] = field(default_factory=dict)

    def until_done(
        self,
        step: Callable[[str], _Obstacle | None],
        done: str,
        wait_time: float | None,
        *,
        first: Callable[[str], _Obstacle | None] | None = None,
    ) -> None:
        """Take the step with each, again and again until nothing is in the way of any.

        :param first: what has to be done with one before; it is said when that is so of all.
        :raises LockTimeoutError: the time is up.
        """
        deadline = None if wait_time is None else time.monotonic() + wait_time
        before = set(self.left) if first else set()
        moved = 0
        while True:
            for key in sorted(before):
                if first and self._try(first, key):
                    before.discard(key)
            before &= self.left
            if first and not before:
                number = moved + len(self.left)
                click.echo(f"begun: nobody here takes any of {number} locks before it is moved", err=True)
                first = None
            for key in sorted(self.left - before):
                if self._try(step, key):
                    self.left.discard(key)
                    moved += 1
                    click.echo(f"{done}  {readable(key)}")
            if not self.left:
                return
            if deadline is not None and time.monotonic() >= deadline:
                names = ", ".join(repr(key) for key in sorted(self.left))
                raise LockTimeoutError(
                    f"Not moved within {wait_time:g} s: {names}. Run it again for the rest."
                )
            time.sleep(_PAUSE)

    def cannot(self, why: str) -> None:
        """There is one that will not be moved."""
        self.failures += 1
        click.echo(f"cannot move {why}", err=True)

    def _try(self, step: Callable[[str], _Obstacle | None], key: str) -> bool:
        try:
            obstacle = step(key)
        except (CapacityMismatchError, LockRecordError, LockValueError) as wrong:
            self.left.discard(key)
            self.cannot(f"{readable(key)}: {wrong}")
            return False
        if obstacle is not None and self._reported.get(key) != obstacle.holders:
            self._reported[key] = obstacle.holders
            click.echo(f"waiting for {readable(key)}: {obstacle.text}", err=True)
        return obstacle is None


@dataclass
class _Move:
    """The locks on either side. Each step returns what is in the way, if something is.

    :ivar lease_id: by which a lock is kept on the one side, while it is moved, and on the other afterwards.
    :ivar back_id: by which it is kept on ours when it was moved back.
    """

    theirs: LockClient
    ours: LockClient
    lease_id: str
    back_id: str
    with_data: bool

    def begin(self, key: str) -> _Obstacle | None:
        """See to it that nobody on our side gets it."""
        before = self.theirs.get(key)
        if self.keeps(before):
            return None  # it has been moved
        mine = self.ours.get(key)
        if mine is not None and self.back_id in mine.holders:
            return None
        who = _holders(before) or "it is being moved"
        return self._take(self.ours, key, self.lease_id, f"{self.theirs.table}: {who}")

    def over(self, key: str) -> _Obstacle | None:
        """Move it to our side, where it has been taken."""
        if not self.keeps(self.theirs.get(key)) and (obstacle := self._keep_theirs(key)):
            return obstacle
        mine = self.ours.get(key)
        for lease_id in (self.lease_id, self.back_id):
            if mine is not None and lease_id in mine.holders:
                lease = self.ours.find(key, lease_id)
                if self.with_data:
                    kept = self.theirs.get(key)
                    self.ours.renew(lease, data=(kept.data if kept else None) or {})
                self.ours.release(lease)
        return None

    def back(self, key: str) -> _Obstacle | None:
        """Move it back."""
        mine = self.ours.get(key)
        if self.keeps(mine):
            # A move was interrupted. Theirs have to be kept until ours are kept under the other name.
            if obstacle := self._keep_theirs(key):
                return obstacle
            self.ours.release(self.ours.find(key, self.lease_id))
        if obstacle := self._take(
            self.ours, key, self.back_id, f"{self.theirs.table}: it has been moved back"
        ):
            return obstacle
        if self.keeps(self.theirs.get(key)):
            lease = self.theirs.find(key, self.lease_id)
            self._bring_data_back(key, lease)
            self.theirs.release(lease)
        return None

    def _bring_data_back(self, key: str, lease: Lease) -> None:
        ours = self.ours.get(key)
        data = (ours.data if ours else None) or {}
        if data or self.with_data:
            try:
                self.theirs.renew(lease, data=data)
            except LockValueError as wrong:
                click.echo(f"the data of {readable(key)} stay on our side: {wrong}", err=True)

    def keeps(self, record: LockRecord | None) -> bool:
        """Whether a lock is kept by this move."""
        return record is not None and self.lease_id in record.holders

    def _keep_theirs(self, key: str) -> _Obstacle | None:
        return self._take(self.theirs, key, self.lease_id)

    def _take(self, locks: LockClient, key: str, lease_id: str, owner: str | None = None) -> _Obstacle | None:
        try:
            locks.acquire(key, timeout=0, lease_id=lease_id, owner=owner, fair=False)
        except LockTimeoutError as busy:
            if busy.record is None:
                return _Obstacle(frozenset(), f"{busy}, in {locks.table}")
            return _Obstacle(frozenset(busy.record.holders), f"{busy.record.describe()}, in {locks.table}")
        return None


def _holders(record: LockRecord | None) -> str:
    holders: Iterable[str] = () if record is None else (each.owner for each in record.holders.values())
    return ", ".join(holders)
