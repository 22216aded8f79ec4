"""What `on_lost` was called with, and when."""

from __future__ import annotations

import time
from queue import Empty, SimpleQueue

import pytest

from airflow_dynamo_lock import Lease, LockLostError
from deployments.patience import PATIENCE


class Losses:
    """An `on_lost` that remembers its calls."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[float, Lease, LockLostError]] = SimpleQueue()

    def __call__(self, lease: Lease, lost: LockLostError) -> None:
        self._calls.put((time.monotonic(), lease, lost))

    def one(self, *, within: float = PATIENCE) -> tuple[float, Lease, LockLostError]:
        """The one call that is to come."""
        return self._calls.get(timeout=within)

    def none(self, *, within: float = 0.0) -> None:
        """No call comes."""
        with pytest.raises(Empty):
            self._calls.get(timeout=within)
