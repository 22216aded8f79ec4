"""How long it takes to get the lock of a process that was killed (SIGKILL), for one who comes when it is dead already.

All leases last 10 s. The libraries without heartbeats could have such a short one only if no work took longer.
"At once": the newcomer comes in the second in which the holder died. "Old": when the corpse is older than its lease,
and than what anybody adds to it for clocks that differ.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

from bench.adapters.worker import Settings
from bench.contestants import OURS, OURS_BEATING, RIVALS
from bench.contestants import Contestant as Who
from bench.measure.parallel import at_once
from bench.measure.spread import spread
from bench.meter import Meter

LEASE = 10.0
ROUNDS = 5
#: When the newcomer comes, seconds after the death. Ours adds 10 s to a lease by server time, awsflock 5 s.
AGES = {"at once": 0.0, "old": LEASE + 12.0}


def measure(endpoint_url: str) -> dict[str, Any]:
    """Seconds from the newcomer's call to its grant, and its requests."""
    # Nearly all of it is waiting, so all of them do it at once.
    cases = [(who, age, number) for who in (OURS, *RIVALS) for age in AGES for number in range(ROUNDS)]
    results = at_once(lambda case: _recover(case[0], case[1], case[2], endpoint_url), cases)
    measured: dict[str, dict[str, Any]] = {}
    for who in (OURS, *RIVALS):
        for age in AGES:
            took = [result for (w, a, _), result in zip(cases, results, strict=True) if (w, a) == (who, age)]
            measured.setdefault(who.name, {})[age] = {
                "seconds": spread([seconds for seconds, _ in took]),
                "requests": spread([requests for _, requests in took]),
            }
    return {"lease": LEASE, "ages": AGES, "contestants": measured}


def _recover(who: Who, age: str, number: int, endpoint_url: str) -> tuple[float, int]:
    key = f"{age} {number}"
    settings = Settings(lease=LEASE)
    with ExitStack() as stack:
        meter = stack.enter_context(Meter(endpoint_url))
        newcomer = stack.enter_context(who.worker(meter.endpoint_url, settings))
        newcomer.do("prepare", key=key)
        holding = OURS_BEATING if who is OURS else who
        holder = stack.enter_context(holding.worker(endpoint_url, settings))
        holder.do("acquire", key=key)
        time.sleep(3.0)
        holder.process.kill()
        holder.process.wait()
        time.sleep(AGES[age])
        meter.take()
        began, granted = newcomer.do("acquire", key=key)
        return granted - began, meter.take().requests.total()
