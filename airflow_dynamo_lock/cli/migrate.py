"""``dynamo-lock migrate``: move the locks of another library's table to the native table.

At no moment can clients of both tables hold the same lock:

1. The migration acquires all locks in the native table ("ours"), so that no other client gets one there.
2. It acquires each lock in the other table ("theirs") as soon as that lock is free or its holder is dead. It keeps
   that lease for ten years, so clients of the other library see the lock as held.
3. It releases the lock in the native table.

Meanwhile the owner of a lock in each table names the other table. An interrupted migration can be started again.
``--undo`` moves the locks back, and keeps the leases in the native table instead.
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

# Lease of a lock that stays held after the move, in seconds.
_FOR_EVER = 10 * 365 * 24 * 3600.0
# Pause between two rounds, in seconds.
_PAUSE = 1.0
# Formats that store data with a lock.
_WITH_DATA = ("amazon-lock-client",)


@click.command()
@click.option(
    "--from-format",
    type=click.Choice([name for name in FORMATS if name != NATIVE]),
    required=True,
    help="Format of the other library.",
)
@click.option("--from-table", required=True, help="Table or bucket of the other library.")
@click.option("--from-partition-key", help="Name of its partition key, if not the library's default.")
@click.option("--from-sort-key", help="Name of its sort key, if not the library's default.")
@click.option(
    "--from-prefix",
    default="",
    help="Only locks whose names begin with this text. Locks named by KEYS are always moved.",
)
@click.option("--wait-time", type=DURATION, help="Maximum time to wait for holders.  [default: no limit]")
@click.option(
    "--undo",
    is_flag=True,
    help="Move all locks back, or KEYS, so that the other library's clients can use them again.",
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

    Moves every lock that the table shows, and those named by KEYS: most libraries delete a free lock. A lock
    that is held is moved as soon as it is released, or its holder is dead. Exits with 3 if the time is up before, and
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
        # The lease ids do not depend on the process, so a later run continues an interrupted one.
        f"dynamo-lock migrate {from_format} {from_table} > {where.table}",
        f"dynamo-lock migrate {from_format} {from_table} < {where.table}",
        with_data=from_format in _WITH_DATA,
    )
    with suppress(TtlOffError):  # items that DynamoDB never expires can be moved
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
        # Add the locks that an interrupted run has acquired in our table. In theirs, a free lock may have no item.
        work.left |= {each.key for each in move.ours.list_locks() if move.keeps(each)}
        work.until_done(move.over, "moved", wait_time, prepare=move.begin)
    if work.failures:
        raise LockError(
            f"{work.failures} {'lock' if work.failures == 1 else 'locks'} could not be moved: correct what is "
            "reported above, and run the command again."
        )


@dataclass(frozen=True)
class _Obstacle:
    """The holders that prevent a step.

    :ivar holders: their lease ids.
    :ivar text: description of the holders, for people to read.
    """

    holders: frozenset[str]
    text: str


@dataclass
class _Work:
    """The locks that are still to be moved. Prints the progress.

    :ivar left: names of these locks.
    :ivar failures: number of locks that cannot be moved.
    """

    left: set[str]
    failures: int = 0
    _reported: dict[str, frozenset[str]] = field(default_factory=dict)

    def until_done(
        self,
        step: Callable[[str], _Obstacle | None],
        done: str,
        wait_time: float | None,
        *,
        prepare: Callable[[str], _Obstacle | None] | None = None,
    ) -> None:
        """Try the step for each lock, once per second, until it has succeeded for all.

        :param step: moves one lock; returns the obstacle if it cannot be moved yet.
        :param done: word to print for a lock that has been moved.
        :param wait_time: maximum time in seconds; None waits without end.
        :param prepare: step that each lock needs first; a message is printed when all locks have had it.
        :raises LockTimeoutError: the time is up.
        """
        deadline = None if wait_time is None else time.monotonic() + wait_time
        unprepared = set(self.left) if prepare else set()
        moved = 0
        while True:
            for key in sorted(unprepared):
                if prepare and self._try(prepare, key):
                    unprepared.discard(key)
            unprepared &= self.left
            if prepare and not unprepared:
                number = moved + len(self.left)
                click.echo(
                    f"begun: the native table grants none of the {number} locks until it is moved", err=True
                )
                prepare = None
            for key in sorted(self.left - unprepared):
                if self._try(step, key):
                    self.left.discard(key)
                    moved += 1
                    click.echo(f"{done}  {readable(key)}")
            if not self.left:
                return
            if deadline is not None and time.monotonic() >= deadline:
                names = ", ".join(repr(key) for key in sorted(self.left))
                raise LockTimeoutError(
                    f"Not moved within {wait_time:g} s: {names}. Run the command again to move them."
                )
            time.sleep(_PAUSE)

    def cannot(self, why: str) -> None:
        """Report a lock that cannot be moved, and count it.

        :param why: name of the lock, and the reason.
        """
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
    """The steps of a move for one lock. Each step returns the obstacle if holders prevent it, else None.

    :ivar theirs: client of the other library's table.
    :ivar ours: client of the native table.
    :ivar lease_id: lease of a lock in our table while it is moved, and in their table afterwards.
    :ivar back_id: lease of a lock in our table after it was moved back.
    :ivar with_data: their format stores data with a lock.
    """

    theirs: LockClient
    ours: LockClient
    lease_id: str
    back_id: str
    with_data: bool

    def begin(self, key: str) -> _Obstacle | None:
        """Acquire the lock in our table, so that no other client gets it there."""
        their_record = self.theirs.get(key)
        if self.keeps(their_record):
            return None  # it has been moved
        our_record = self.ours.get(key)
        if our_record is not None and self.back_id in our_record.holders:
            return None
        who = _holders(their_record) or "it is being moved"
        return self._acquire(self.ours, key, self.lease_id, f"{self.theirs.table}: {who}")

    def over(self, key: str) -> _Obstacle | None:
        """Move the lock to our table, with its data. `begin` has acquired it there."""
        if not self.keeps(self.theirs.get(key)) and (obstacle := self._acquire_theirs(key)):
            return obstacle
        our_record = self.ours.get(key)
        for lease_id in (self.lease_id, self.back_id):
            if our_record is not None and lease_id in our_record.holders:
                lease = self.ours.find(key, lease_id)
                if self.with_data:
                    their_record = self.theirs.get(key)
                    self.ours.renew(lease, data=(their_record.data if their_record else None) or {})
                self.ours.release(lease)
        return None

    def back(self, key: str) -> _Obstacle | None:
        """Move the lock back to their table, with its data."""
        if self.keeps(self.ours.get(key)):
            # A move was interrupted. Their lock must stay held until ours is held with `back_id`.
            if obstacle := self._acquire_theirs(key):
                return obstacle
            self.ours.release(self.ours.find(key, self.lease_id))
        if obstacle := self._acquire(
            self.ours, key, self.back_id, f"{self.theirs.table}: it has been moved back"
        ):
            return obstacle
        if self.keeps(self.theirs.get(key)):
            lease = self.theirs.find(key, self.lease_id)
            self._copy_data_back(key, lease)
            self.theirs.release(lease)
        return None

    def _copy_data_back(self, key: str, lease: Lease) -> None:
        ours = self.ours.get(key)
        data = (ours.data if ours else None) or {}
        if data or self.with_data:
            try:
                self.theirs.renew(lease, data=data)
            except LockValueError as wrong:
                click.echo(f"the data of {readable(key)} stay in the native table: {wrong}", err=True)

    def keeps(self, record: LockRecord | None) -> bool:
        """Whether this move holds the lock, with `lease_id`."""
        return record is not None and self.lease_id in record.holders

    def _acquire_theirs(self, key: str) -> _Obstacle | None:
        return self._acquire(self.theirs, key, self.lease_id)

    def _acquire(
        self, locks: LockClient, key: str, lease_id: str, owner: str | None = None
    ) -> _Obstacle | None:
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
