"""Many histories, on all cores."""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

from proof.simulator.history import Verdict, play
from proof.simulator.mutations import spoilt
from proof.simulator.world import Assumptions

#: So many are played between two looks at the clock.
BATCH = 250


@dataclass
class Summary:
    """What came of many histories.

    :ivar seconds: simulated.
    """

    histories: int = 0
    grants: int = 0
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    bad: list[Verdict] = field(default_factory=list)

    def add(self, verdicts: Iterable[Verdict]) -> None:
        for verdict in verdicts:
            self.histories += 1
            self.grants += verdict.grants
            # A night's sleep of a week, in which nothing happens, does not count.
            self.seconds += verdict.lasted % (24 * 3600)
            self.faults.update(verdict.faults)
            if verdict.violations:
                self.bad.append(verdict)


@contextmanager
def quiet() -> Iterator[None]:
    """No log, and no garbage collection within a history: the remains of a killed process are collected between two
    histories, where its coroutines can no longer disturb."""
    logger = logging.getLogger("airflow_dynamo_lock")
    level, hook = logger.level, sys.unraisablehook
    logger.setLevel(logging.CRITICAL + 1)
    sys.unraisablehook = lambda _: None
    gc.disable()
    _leave_out_what_is_loaded()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # coroutines that were never awaited
            yield
            gc.collect()
    finally:
        gc.enable()
        logger.setLevel(level)
        sys.unraisablehook = hook


@cache
def _leave_out_what_is_loaded() -> None:
    """Exclude all present objects from garbage collection. If Airflow is loaded, a collection would take longer than a
    history. Once in a process: nothing that a history leaves behind may be excluded."""
    gc.freeze()


def play_some(
    seeds: Iterable[int], assumptions: Assumptions | None = None, mutation: str | None = None
) -> list[Verdict]:
    """The verdicts of these, in this process; with the protocol spoilt in that way."""
    verdicts = []
    with quiet(), spoilt(mutation):
        for seed in seeds:
            verdicts.append(play(seed, assumptions))
            if seed % 50 == 0:
                gc.collect()
    return verdicts


def play_many(
    first: int,
    count: int | None = None,
    minutes: float | None = None,
    told: Callable[[Summary], None] = lambda _: None,
) -> Summary:
    """Play so many, or for so long, on all cores."""
    summary = Summary()
    deadline = None if minutes is None else time.monotonic() + minutes * 60
    last = None if count is None else first + count
    cores = os.cpu_count() or 1
    with ProcessPoolExecutor(cores) as pool:
        playing: set[Future[list[Verdict]]] = set()
        seed = first
        while True:
            while len(playing) < 2 * cores and (last is None or seed < last):
                if deadline is not None and time.monotonic() >= deadline:
                    last = seed
                    break
                seeds = range(seed, min(seed + BATCH, last or sys.maxsize))
                playing.add(pool.submit(play_some, seeds))
                seed = seeds.stop
            if not playing:
                return summary
            done = next(as_completed(playing))
            playing.remove(done)
            summary.add(done.result())
            told(summary)


def find(mutation: str, most: int, first: int = 0) -> Verdict | None:
    """The first history that shows that the protocol is spoilt, None if none of so many does."""
    for seed in range(first, first + most):
        (verdict,) = play_some([seed], mutation=mutation)
        if verdict.violations:
            return verdict
    return None
