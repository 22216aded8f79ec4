"""Several measurements at the same time, for those that mostly wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TypeVar

Case = TypeVar("Case")
Result = TypeVar("Result")


def at_once(do: Callable[[Case], Result], cases: Sequence[Case]) -> list[Result]:
    """The results, in the order of the cases. The first failure ends it.

    The threads are daemons: when the bench is interrupted, nobody waits for them, and the workers that they have
    started end with it.
    """
    ended: SimpleQueue[tuple[int, Result] | BaseException] = SimpleQueue()

    def run(number: int, case: Case) -> None:
        try:
            ended.put((number, do(case)))
        except BaseException as failure:
            ended.put(failure)

    for number, case in enumerate(cases):
        threading.Thread(target=run, args=(number, case), daemon=True).start()
    results: dict[int, Result] = {}
    for _ in cases:
        end = ended.get()
        if isinstance(end, BaseException):
            raise end
        results[end[0]] = end[1]
    return [results[number] for number in range(len(cases))]
