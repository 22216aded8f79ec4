"""Recovery: how long a newcomer needs to acquire the lock of a process that was killed (SIGKILL) before it started.

All leases last 10 s. For libraries without heartbeats, so short a lease would only do if no work took longer. In the
case "at once", the newcomer starts in the second in which the holder is killed. In the case "old", it starts when the
lease is over, and with it the time that libraries add for differences between clocks.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

from bench.adapters.worker import Settings
from bench.contestants import OURS, OURS_WITH_HEARTBEATS, RIVALS, Contestant
from bench.measure.parallel import at_once
from bench.measure.spread import spread
from bench.meter import Meter

LEASE = 10.0
ROUNDS = 5
#: Case → seconds from the holder's death to the newcomer's call. This package adds 10 s to a lease, awsflock 5 s.
AGES = {"at once": 0.0, "old": LEASE + 12.0}


def measure(endpoint_url: str) -> dict[str, Any]:
    """Measure the seconds from the newcomer's call to its grant, and its requests."""
    # Most of the time is waiting, so all cases run at the same time.
    cases = [
        (contestant, age, number)
        for contestant in (OURS, *RIVALS)
        for age in AGES
        for number in range(ROUNDS)
    ]
    results = at_once(lambda case: _recover(case[0], case[1], case[2], endpoint_url), cases)
    measured: dict[str, dict[str, Any]] = {contestant.name: {} for contestant in (OURS, *RIVALS)}
    for contestant in (OURS, *RIVALS):
        for age in AGES:
            rounds = [
                result for case, result in zip(cases, results, strict=True) if case[:2] == (contestant, age)
            ]
            measured[contestant.name][age] = {
                "seconds": spread([seconds for seconds, _ in rounds]),
                "requests": spread([requests for _, requests in rounds]),
            }
    return {"lease": LEASE, "ages": AGES, "contestants": measured}


def _recover(contestant: Contestant, age: str, number: int, endpoint_url: str) -> tuple[float, int]:
    """Return the seconds that the newcomer needed, and the number of its requests."""
    key = f"{age} {number}"
    settings = Settings(lease=LEASE)
    with ExitStack() as stack:
        meter = stack.enter_context(Meter(endpoint_url))
        newcomer = stack.enter_context(contestant.worker(meter.endpoint_url, settings))
        newcomer.do("prepare", key=key)
        with_heartbeats = OURS_WITH_HEARTBEATS if contestant is OURS else contestant
        holder = stack.enter_context(with_heartbeats.worker(endpoint_url, settings))
        holder.do("acquire", key=key)
        time.sleep(3.0)
        holder.process.kill()
        holder.process.wait()
        time.sleep(AGES[age])
        meter.take()
        started, granted = newcomer.do("acquire", key=key)
        return granted - started, meter.take().requests.total()
