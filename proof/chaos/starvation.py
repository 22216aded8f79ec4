"""Measures for how long each process of a run was ready to run, but got no processor.

On a busy machine, a process may wait for seconds. A hand-over that is late by no more than that shows nothing about the
lock. The Linux kernel counts the waits of each thread (its ``schedstat``). On other systems, no waits are known.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from airflow_dynamo_lock.client.clock import monotonic

#: Number of the process that measures. It runs the proxies, so all other processes depend on it.
OWN = 0

# Time between two measurements, and the shortest wait that is noted, in seconds.
_INTERVAL, _SHORTEST = 0.25, 0.01


@dataclass(frozen=True)
class Lag:
    """A wait for a processor.

    :ivar process: number of the process in the run, or `OWN`.
    :ivar at: when the wait was noticed: soon after its end, monotonic seconds.
    """

    process: int
    at: float
    seconds: float


class Meter:
    """Reads the kernel's counters.

    :param pids: returns the pid of each process that has been started so far, by its number. All of them are started
        after the meter was made.
    """

    def __init__(self, pids: Callable[[], Mapping[int, int]], proc: Path = Path("/proc")) -> None:
        self._pids, self._proc = pids, proc
        self._before = {OWN: self.waited(os.getpid())}

    def measure(self, now: float) -> Iterator[Lag]:
        """Yield the waits since the last measurement. In each process, the thread that waited longest counts."""
        for process, pid in {OWN: os.getpid(), **self._pids()}.items():
            waited = self.waited(pid)
            before = self._before.get(process, {})
            self._before[process] = waited
            seconds = max((waited[each] - before.get(each, 0) for each in waited), default=0) / 1e9
            if seconds >= _SHORTEST:
                yield Lag(process, now, seconds)

    def waited(self, pid: int) -> dict[str, int]:
        """Return for how many nanoseconds each thread has waited so far; none if the process has ended."""
        threads = self._proc / str(pid) / "task"
        waited = {}
        with suppress(OSError):
            for thread in os.listdir(threads):
                with suppress(OSError):  # it has just ended
                    _, nanoseconds, _ = (threads / thread / "schedstat").read_text().split()
                    waited[thread] = int(nanoseconds)
        return waited


@contextmanager
def measured(pids: Callable[[], Mapping[int, int]]) -> Iterator[list[Lag]]:
    """Measure during the block (`Meter`)."""
    lags: list[Lag] = []
    end = threading.Event()

    meter = Meter(pids)

    def measure() -> None:
        while not end.wait(_INTERVAL):
            lags.extend(meter.measure(monotonic()))

    thread = threading.Thread(target=measure, daemon=True)
    thread.start()
    try:
        yield lags
    finally:
        end.set()
        thread.join()


def seconds_lost(lags: Sequence[Lag], process: int, begin: float, end: float) -> float:
    """Return for how long this process, and the one with the proxies, waited for a processor in a time span."""
    return sum(
        lag.seconds
        for lag in lags
        if lag.process in (OWN, process) and begin < lag.at and lag.at - lag.seconds < end
    )
