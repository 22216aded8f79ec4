"""The time line of a trigger: how long each of its steps took.

A trigger writes it into the log of its task, in one line, if its logger is enabled for level DEBUG: set
``AIRFLOW__LOGGING__NAMESPACE_LEVELS=airflow_dynamo_lock.airflow=DEBUG`` for the triggerer. The benchmark of Airflow
does, and reads the line.
"""

from __future__ import annotations

import logging
import time
from typing import Any


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

    def write(self, log: Any) -> None:
        """Log the time line, if level DEBUG is enabled.

        The line itself has level INFO: the triggerer's supervisor drops lower levels, whatever the runner's loggers
        are set to.
        """
        # Airflow 3.0 gives triggers a logger of the standard library, later versions one of structlog.
        is_enabled = getattr(log, "is_enabled_for", None) or log.isEnabledFor
        if is_enabled(logging.DEBUG):
            log.info("Time line of this trigger: %s.", self)

    def __str__(self) -> str:
        steps = "".join(f", {step} {1000 * seconds:.0f} ms" for step, seconds in self._steps.items())
        return f"total {1000 * (time.monotonic() - self._started):.0f} ms{steps}"
