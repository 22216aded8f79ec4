"""What every adapter does with its lock, and how the bench tells it to.

An adapter is a script: ``python -m bench.adapters.NAME SETTINGS``. It reads commands on its standard input, one line of
JSON each: ``["do", {arguments}]``, and answers each with one line on its standard output: ``{"result": …}`` or
``{"error": "…"}``. It ends when its standard input does. Nothing but the standard library is imported here: an adapter
runs in the environment of the library that it drives, with the SDK settings (`sdk_config`) that ours has.

Moments are seconds of the system's monotonic clock, which is one for all processes of a machine.
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
    """What all libraries are told alike.

    :ivar lease: seconds for which a grant lasts without a sign of life.
    :ivar heartbeat: seconds between signs of life; None for the library's default.
    :ivar poll: seconds between two looks of one that waits; None for the library's default.
    :ivar options: what only this library knows.
    :ivar sdk: in what the SDK's settings differ from those of `sdk_config`.
    """

    lease: float = 30.0
    heartbeat: float | None = None
    poll: float | None = 1.0
    options: dict[str, Any] = field(default_factory=dict)
    sdk: dict[str, Any] = field(default_factory=dict)


class Lock(Protocol):
    """The lock of one key, as one thread uses it again and again."""

    def acquire(self) -> None:
        """Take it, and wait for it as long as that takes."""

    def release(self) -> None:
        """Give it back."""


class Library(Protocol):
    """A lock library, set up."""

    def create_table(self) -> None:
        """Create its table, as its documentation says."""

    def lock(self, key: str) -> Lock:
        """The lock of a key; what a program would make once and keep is made here."""


class Worker:
    """What the bench may ask for. Each public method is a command."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._locks: dict[str, Lock] = {}

    def hello(self) -> dict[str, str]:
        """The versions of what all libraries stand on."""
        return {name: version(name) for name in ("boto3", "botocore", "urllib3")}

    def create_table(self) -> None:
        """Create the library's table."""
        self._library.create_table()

    def prepare(self, key: str) -> None:
        """Make ready what the first use of a key would else have to."""
        self._lock(key)

    def acquire(self, key: str) -> tuple[float, float]:
        """Take the lock. Returns when that began and when it was granted."""
        began = time.monotonic()
        self._lock(key).acquire()
        return began, time.monotonic()

    def release(self, key: str) -> tuple[float, float]:
        """Give it back. Returns when that began and when it was done."""
        began = time.monotonic()
        self._lock(key).release()
        return began, time.monotonic()

    def cycles(self, key: str, seconds: float = 0.0, count: int = 0) -> dict[str, Any]:
        """Take the lock and give it back, over and over, for so long or so many times. Returns how long each took."""
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
        """So many threads each take the lock once, hold it, and give it back.

        :returns: of each: when it was granted, when its release began, when that was done.
        """

        def turn(lock: Lock) -> tuple[float, float, float]:
            lock.acquire()
            granted = time.monotonic()
            time.sleep(hold)
            releasing = time.monotonic()
            lock.release()
            return granted, releasing, time.monotonic()

        # Made one after another: not every library's constructor can be called in several threads at once.
        locks = [self._library.lock(key) for _ in range(members)]
        with ThreadPoolExecutor(members) as pool:
            return list(pool.map(turn, locks))

    def stays(self, key: str, seconds: float, hold: float) -> list[tuple[float, float]]:
        """Take the lock, hold it and give it back, over and over, for so long.

        :returns: of each time: when it was granted, and when its release began.
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
    """Be a worker of that library until standard input ends."""
    # What a library prints is not an answer; what it logs is for nobody, as in a program that sets up no logging.
    answers, sys.stdout = sys.stdout, sys.stderr
    logging.getLogger().addHandler(logging.NullHandler())
    commands: SimpleQueue[str] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            commands.put(line)
        os._exit(0)  # also while a command waits for a lock

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
