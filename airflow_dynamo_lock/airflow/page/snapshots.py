"""What the Locks page shows of a table: a snapshot of all locks, which all open pages share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from airflow_dynamo_lock.client.sync_client import LockClient
from airflow_dynamo_lock.core.model.errors import LockError, LockRecordError
from airflow_dynamo_lock.core.model.state import LockState
from airflow_dynamo_lock.monitoring.totals import Totals

# A snapshot is shown for this many seconds, and for this many times as long as it took: the larger a table, the less
# often the page reads it.
_FRESH_SECONDS, _FRESH_TIMES = 2.0, 10.0


@dataclass(frozen=True)
class Snapshot:
    """All locks of a table at one moment.

    :ivar states: the locks by name; empty after an error.
    :ivar damaged: what is wrong with each record that cannot be read.
    :ivar error: why the table could not be read; None if it could.
    :ivar fresh_seconds: how long this snapshot is shown, in seconds.
    """

    states: tuple[LockState, ...] = ()
    damaged: tuple[str, ...] = ()
    error: LockError | None = None
    fresh_seconds: float = _FRESH_SECONDS

    @cached_property
    def totals(self) -> Totals:
        """What the locks add up to. All open pages share it, as they share the snapshot."""
        return Totals.of(self.states)


class Snapshots:
    """The latest snapshot of each table. One thread takes it; all others wait for the first one of a table.

    :param connect: returns the client for a connection id.
    """

    def __init__(self, connect: Callable[[str], LockClient]) -> None:
        self._connect = connect
        self._locks: dict[str, threading.Lock] = {}
        self._clients: dict[str, LockClient] = {}
        self._latest: dict[str, tuple[float, Snapshot]] = {}

    def client(self, conn_id: str) -> LockClient:
        """The client of a connection.

        :raises LockError: the connection is missing or not valid.
        """
        if conn_id not in self._clients:
            self._clients[conn_id] = self._connect(conn_id)
        return self._clients[conn_id]

    def latest(self, conn_id: str) -> Snapshot:
        """The latest snapshot of the table of a connection, which is at most `Snapshot.fresh_seconds` old.

        While another thread takes a new one, the previous one is returned. A table that does not answer would
        otherwise block all threads of the API server.
        """
        _, previous = self._latest.get(conn_id, (0.0, None))
        if previous is not None and self._lock(conn_id).locked():
            return previous
        with self._lock(conn_id):
            until, snapshot = self._latest.get(conn_id, (0.0, Snapshot()))
            begun = time.monotonic()
            if begun >= until:
                snapshot = self._take(conn_id, begun)
                self._latest[conn_id] = time.monotonic() + snapshot.fresh_seconds, snapshot
            return snapshot

    def forget(self, conn_id: str) -> None:
        """Take a new snapshot at the next request, because something was changed.

        Waits for a snapshot that is being taken: it may show the table as it was before the change.
        """
        with self._lock(conn_id):
            self._latest.pop(conn_id, None)

    def _lock(self, conn_id: str) -> threading.Lock:
        return self._locks.setdefault(conn_id, threading.Lock())

    def _take(self, conn_id: str, begun: float) -> Snapshot:
        damaged: list[LockRecordError] = []
        try:
            states = self.client(conn_id).survey(on_damaged=damaged.append)
        except LockError as failure:
            self._clients.pop(conn_id, None)  # the connection may be corrected
            return Snapshot(error=failure)
        took = time.monotonic() - begun
        return Snapshot(
            tuple(states), tuple(map(str, damaged)), None, max(_FRESH_SECONDS, _FRESH_TIMES * took)
        )
