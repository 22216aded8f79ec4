"""Run several measurements at the same time, if they spend most of their time waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TypeVar

Case = TypeVar("Case")
Result = TypeVar("Result")


def at_once(do: Callable[[Case], Result], cases: Sequence[Case]) -> list[Result]:
    """Call `do` for each case, each in a thread. Returns the results in the order of the cases.

    The first exception of a thread is raised here, without waiting for the other threads. The threads are daemons, so
    that an interrupted program does not wait for them either; their worker processes exit with the program.
    """
    done: SimpleQueue[tuple[int, Result] | BaseException] = SimpleQueue()

    def run(number: int, case: Case) -> None:
        try:
            done.put((number, do(case)))
        except BaseException as failure:
            done.put(failure)

    for number, case in enumerate(cases):
        threading.Thread(target=run, args=(number, case), daemon=True).start()
    results: dict[int, Result] = {}
    for _ in cases:
        outcome = done.get()
        if isinstance(outcome, BaseException):
            raise outcome
        number, result = outcome
        results[number] = result
    return [results[number] for number in range(len(cases))]
