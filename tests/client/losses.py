"""An `on_lost` callback that records its calls, with their times."""

from __future__ import annotations

import time
from queue import Empty, SimpleQueue

import pytest

from airflow_dynamo_lock import Lease, LockLostError
from deployments.patience import PATIENCE


class Losses:
    """An `on_lost` callback that records its calls."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[float, Lease, LockLostError]] = SimpleQueue()

    def __call__(self, lease: Lease, lost: LockLostError) -> None:
        self._calls.put((time.monotonic(), lease, lost))

    def one(self, *, within: float = PATIENCE) -> tuple[float, Lease, LockLostError]:
        """Wait for the next call, and return its time, the lease and the error."""
        return self._calls.get(timeout=within)

    def none(self, *, within: float = 0.0) -> None:
        """Check that `on_lost` is not called."""
        with pytest.raises(Empty):
            self._calls.get(timeout=within)
