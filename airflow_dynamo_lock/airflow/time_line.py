"""The time line of a trigger: how long each of its steps took.

A trigger writes it into the log of its task at level DEBUG, in one line, because each line of a trigger passes the
triggerer's supervisor, which answers no trigger meanwhile. To see it, set
``AIRFLOW__LOGGING__NAMESPACE_LEVELS=airflow_dynamo_lock.airflow=DEBUG`` for the triggerer. The benchmark of Airflow
reads it.
"""

from __future__ import annotations

import time


class TimeLine:
    """Measures the steps of a trigger, which follow one another. It begins when it is created."""

    def __init__(self) -> None:
        self._started = self._last = time.monotonic()
        self._steps: dict[str, float] = {}

    def end(self, step: str) -> None:
        """End a step, which began when the one before it ended.

        :param step: name of the step. If it was ended before, the time is added to it.
        """
        now = time.monotonic()
        self._steps[step] = self._steps.get(step, 0.0) + now - self._last
        self._last = now

    def __str__(self) -> str:
        steps = "".join(f", {step} {1000 * seconds:.0f} ms" for step, seconds in self._steps.items())
        return f"total {1000 * (time.monotonic() - self._started):.0f} ms{steps}"
