"""The commands of a worker process, and the interface that each adapter implements for them.

An adapter is a script: ``python -m bench.adapters.NAME SETTINGS``. It reads commands from its standard input, one JSON
line each: ``["command", {arguments}]``. It writes one JSON line per answer to its standard output: ``{"result": …}`` or
``{"error": "…"}``. It exits when its standard input is closed.

This module imports only the standard library, because an adapter runs in the virtual environment of its library. All
adapters use the SDK settings of this package (`sdk_config`).

All times are seconds of the system's monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from queue import SimpleQueue
from typing import Any, Protocol


@dataclass(frozen=True)
class Settings:
    """Settings that all libraries have in common.

    :ivar lease: seconds for which a grant lasts after its last heartbeat.
    :ivar heartbeat: seconds between heartbeats; None for the library's default.
    :ivar poll: seconds between two polls of a waiter; None for the library's default.
    :ivar options: options of the adapter.
    :ivar sdk: arguments for `sdk_config`, where its defaults do not apply.
    """

    lease: float = 30.0
    heartbeat: float | None = None
    poll: float | None = 1.0
    options: dict[str, Any] = field(default_factory=dict)
    sdk: dict[str, Any] = field(default_factory=dict)


class Lock(Protocol):
    """The lock of one key. One thread acquires and releases it, repeatedly."""

    def acquire(self) -> None:
        """Acquire the lock. Wait without a time limit."""

    def release(self) -> None:
        """Release the lock."""


class Library(Protocol):
    """A lock library, with its clients and settings."""

    def create_table(self) -> None:
        """Create the library's table, as its documentation says."""

    def lock(self, key: str) -> Lock:
        """Return the lock of a key. Objects that a program would create once and reuse are created here."""


class Worker:
    """Each public method is a command."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._locks: dict[str, Lock] = {}

    def hello(self) -> dict[str, str]:
        """Return the versions of the SDK, which must be the same for all libraries."""
        return {name: version(name) for name in ("boto3", "botocore", "urllib3")}

    def create_table(self) -> None:
        """Create the library's table."""
        self._library.create_table()

    def prepare(self, key: str) -> None:
        """Create the lock of a key, so that the first cycle does not have to."""
        self._lock(key)

    def acquire(self, key: str) -> tuple[float, float]:
        """Acquire the lock. Returns the times of the call and of the grant."""
        began = time.monotonic()
        self._lock(key).acquire()
        return began, time.monotonic()

    def release(self, key: str) -> tuple[float, float]:
        """Release the lock. Returns the times of the call and of its return."""
        began = time.monotonic()
        self._lock(key).release()
        return began, time.monotonic()

    def cycles(self, key: str, seconds: float = 0.0, count: int = 0) -> dict[str, Any]:
        """Acquire and release the lock repeatedly, for `seconds` or, if that is 0, `count` times.

        :returns: ``acquires`` and ``cycles``: the seconds that each acquire and each cycle took; ``seconds``: total.
        """
        lock = self._lock(key)
        acquires: list[float] = []
        cycles: list[float] = []
        began = now = time.monotonic()
        while (now - began < seconds) if seconds else len(cycles) < count:
            lock.acquire()
            granted = time.monotonic()
            lock.release()
            before, now = now, time.monotonic()
            acquires.append(granted - before)
            cycles.append(now - before)
        return {"acquires": acquires, "cycles": cycles, "seconds": now - began}

    def turns(self, key: str, members: int, hold: float) -> list[tuple[float, float, float]]:
        """Let `members` threads acquire the lock once, hold it for `hold` seconds, and release it.

        :returns: for each thread, the times of the grant, of the call of release, and of its return.
        """

        def turn(lock: Lock) -> tuple[float, float, float]:
            lock.acquire()
            granted = time.monotonic()
            time.sleep(hold)
            releasing = time.monotonic()
            lock.release()
            return granted, releasing, time.monotonic()

        # Created in one thread: some libraries' constructors are not thread-safe.
        locks = [self._library.lock(key) for _ in range(members)]
        with ThreadPoolExecutor(members) as pool:
            return list(pool.map(turn, locks))

    def stays(self, key: str, seconds: float, hold: float) -> list[tuple[float, float]]:
        """For `seconds`, repeatedly acquire the lock, hold it for `hold` seconds, and release it.

        :returns: for each grant, its time and the time of the call of release.
        """
        lock, times = self._lock(key), []
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            lock.acquire()
            granted = time.monotonic()
            time.sleep(hold)
            times.append((granted, time.monotonic()))
            lock.release()
        return times

    def _lock(self, key: str) -> Lock:
        if key not in self._locks:
            self._locks[key] = self._library.lock(key)
        return self._locks[key]


def serve(make: Callable[[Settings], Library]) -> None:
    """Execute commands until standard input is closed.

    :param make: creates the library from the settings in the process's argument.
    """
    # A library's own output must not mix with the answers, and its log lines are discarded.
    answers, sys.stdout = sys.stdout, sys.stderr
    logging.getLogger().addHandler(logging.NullHandler())
    commands: SimpleQueue[str] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            commands.put(line)
        os._exit(0)  # exits even if a command is waiting for a lock

    threading.Thread(target=read, daemon=True).start()
    worker = Worker(make(Settings(**json.loads(sys.argv[1]))))
    while True:
        do, arguments = json.loads(commands.get())
        answer: dict[str, Any]
        try:
            answer = {"result": getattr(worker, do)(**arguments)}
        except Exception as failure:
            answer = {"error": f"{type(failure).__name__}: {failure}"}
        print(json.dumps(answer), file=answers, flush=True)
