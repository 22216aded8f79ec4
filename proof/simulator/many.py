"""Play many histories, on all cores."""

from __future__ import annotations

import gc
import logging
import math
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
from itertools import islice
from signal import SIG_IGN, SIGINT, signal
from unittest.mock import patch

from airflow_dynamo_lock import events
from proof.simulator.history import Verdict, play
from proof.simulator.mutations import spoilt
from proof.simulator.world import Assumptions

#: Number of histories that a worker process plays per task. After an interrupt, the tasks that have started end.
BATCH = 50


@dataclass
class Summary:
    """The results of many histories.

    :ivar histories: number of histories.
    :ivar grants: number of grants that a caller received.
    :ivar seconds: simulated time, without the week for which all machines sleep in some histories.
    :ivar faults: number of injected faults, by label.
    :ivar bad: the verdicts with violations.
    :ivar interrupted: whether an interrupt (Ctrl-C) ended them early.
    """

    histories: int = 0
    grants: int = 0
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    bad: list[Verdict] = field(default_factory=list)
    interrupted: bool = False

    def add(self, verdicts: Iterable[Verdict]) -> None:
        """Add the verdicts of further histories."""
        for verdict in verdicts:
            self.histories += 1
            self.grants += verdict.grants
            # The machines may sleep for eight days, during which nothing happens: whole days do not count.
            self.seconds += verdict.lasted % (24 * 3600)
            self.faults.update(verdict.faults)
            if verdict.violations:
                self.bad.append(verdict)


@contextmanager
def quiet() -> Iterator[None]:
    """Disable the package's log and events, and garbage collection during a history.

    Garbage collection runs code in the coroutines of killed processes. Between two histories that does no
    harm. A listener, such as that of Airflow's metrics, reads clocks, and each read changes a history.
    """
    logger = logging.getLogger("airflow_dynamo_lock")
    level, hook = logger.level, sys.unraisablehook
    logger.setLevel(logging.CRITICAL + 1)
    sys.unraisablehook = lambda _: None
    gc.disable()
    _freeze_loaded_objects()
    try:
        with warnings.catch_warnings(), patch.object(events, "_listeners", []):
            warnings.simplefilter("ignore", RuntimeWarning)  # coroutines that were never awaited
            yield
            gc.collect()
    finally:
        gc.enable()
        logger.setLevel(level)
        sys.unraisablehook = hook


@cache
def _freeze_loaded_objects() -> None:
    """Exclude all present objects from garbage collection, once per process.

    If Airflow is loaded, a collection of its objects would take longer than a history. A second call would
    also exclude objects that histories have left behind.
    """
    gc.freeze()


def play_some(
    seeds: Iterable[int], assumptions: Assumptions | None = None, mutation: str | None = None
) -> list[Verdict]:
    """Play the histories of these seeds in this process, and return their verdicts.

    :param assumptions: how far conditions may go; None keeps to the assumptions of the protocol.
    :param mutation: name of the mutation to apply to the package (`MUTATIONS`); None applies none.
    """
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
    on_progress: Callable[[Summary], None] = lambda _: None,
) -> Summary:
    """Play histories on all cores, until `count` or `minutes` is reached, or an interrupt comes.

    :param first: seed of the first history; each further one has the next seed.
    :param count: number of histories; None for no limit.
    :param minutes: time after which no further batch starts; None for no limit.
    :param on_progress: called with the summary after each batch.
    """
    summary = Summary()
    batches = _batches(first, count, minutes)
    cores = os.cpu_count() or 1
    # An interrupt from the terminal reaches the workers as well, where it would end a history in the middle.
    with ProcessPoolExecutor(cores, initializer=signal, initargs=(SIGINT, SIG_IGN)) as pool:
        playing: set[Future[list[Verdict]]] = set()
        try:
            while True:
                for seeds in islice(batches, 2 * cores - len(playing)):
                    playing.add(pool.submit(play_some, seeds))
                if not playing:
                    return summary
                done = next(as_completed(playing))
                playing.remove(done)
                summary.add(done.result())
                on_progress(summary)
        except KeyboardInterrupt:
            summary.interrupted = True
            pool.shutdown(cancel_futures=True)
            return summary


def _batches(first: int, count: int | None, minutes: float | None) -> Iterator[range]:
    """Yield the seeds of each batch, until `count` histories are yielded or `minutes` have passed."""
    end = sys.maxsize if count is None else first + count
    deadline = math.inf if minutes is None else time.monotonic() + minutes * 60
    while first < end and time.monotonic() < deadline:
        seeds = range(first, min(first + BATCH, end))
        yield seeds
        first = seeds.stop


def find(mutation: str, limit: int, first: int = 0) -> Verdict | None:
    """Find the first history that detects a mutation.

    :param mutation: name of the mutation (`MUTATIONS`).
    :param limit: maximum number of histories to play.
    :param first: seed of the first history.
    :returns: verdict of the history that detects it, or None.
    """
    for seed in range(first, first + limit):
        (verdict,) = play_some([seed], mutation=mutation)
        if verdict.violations:
            return verdict
    return None
