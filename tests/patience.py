"""How long a test waits for what must happen.

A bound on real time says only that something happens at all, so it is generous: on a machine with busy cores, a
process may need ten seconds to start. Whether a time is kept exactly is tested on simulated clocks, in `tests/protocol`
and `tests/histories`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

#: Upper bound for anything that should happen soon, in seconds.
PATIENCE = 180.0


def wait_until(true: Callable[[], object], what: str = "") -> None:
    """Wait until a condition holds. Fails after `PATIENCE`, and says what did not happen."""
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, what or "it did not happen"
        time.sleep(0.01)
