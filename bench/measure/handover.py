"""Hand-over: the time from the call of release in one process to the grant in another, and the requests for it.

All libraries poll once a second. (By default, python-dynamodb-lock polls every 5 s, awsflock doubles its pauses up to
five minutes, and dyndbmutex cannot wait.)

- Two contenders are two processes that take turns: one holds the lock while the other waits.
- Fifty contenders are 25 threads in each of two processes. Each acquires the lock once.
"""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

from airflow_dynamo_lock.core.wait.stream import STREAM_ACTIONS
from bench.contestants import OURS, OURS_UNFAIR, OURS_WITH_STREAMS, RIVALS, Contestant
from bench.measure.parallel import at_once
from bench.measure.spread import percentile
from bench.meter import Meter

CONTESTANTS = (OURS, OURS_UNFAIR, OURS_WITH_STREAMS, *RIVALS)
POLL = 1.0
ROUNDS = 40  # hand-overs between two contenders
CHAINS = 2  # repetitions with fifty contenders
PROCESSES, MEMBERS = 2, 25
HOLD = 0.02  # seconds for which each of the fifty holds the lock


def measure(endpoint_url: str) -> dict[str, Any]:
    """Measure with two and with fifty contenders."""
    # Two contenders hardly load the engine, so the libraries run at the same time. With fifty, they run in sequence.
    pairs = at_once(lambda contestant: two(contestant, endpoint_url), CONTESTANTS)
    return {
        "poll_interval": POLL,
        "2": {contestant.name: each for contestant, each in zip(CONTESTANTS, pairs, strict=True)},
        "50": {contestant.name: _fifty(contestant, endpoint_url) for contestant in CONTESTANTS},
    }


def two(contestant: Contestant, endpoint_url: str, rounds: int = ROUNDS) -> dict[str, Any]:
    """Measure with two contenders."""
    # The release comes at a random moment of the poll interval. The moments are the same for all libraries.
    phase = random.Random(0)  # noqa: S311 - not for cryptography
    key = f"two, {contestant.name}"  # some contestants share a table
    took = []
    with ExitStack() as stack:
        meter = stack.enter_context(Meter(endpoint_url))
        holder, waiter = (stack.enter_context(contestant.worker(meter.endpoint_url)) for _ in range(2))
        for worker in (holder, waiter):
            worker.do("prepare", key=key)
        holder.do("acquire", key=key)
        meter.take()
        for _ in range(rounds):
            waiter.send("acquire", key=key)
            time.sleep(1 + phase.random() * POLL)
            released, _ = holder.do("release", key=key)
            _, granted = waiter.receive()
            took.append(granted - released)
            holder, waiter = waiter, holder
        return _summary(took, meter)


def _fifty(contestant: Contestant, endpoint_url: str) -> dict[str, Any]:
    took = []
    with ExitStack() as stack:
        meter = stack.enter_context(Meter(endpoint_url))
        first, *teams = (
            stack.enter_context(contestant.worker(meter.endpoint_url)) for _ in range(1 + PROCESSES)
        )
        for worker in (first, *teams):
            worker.do("prepare", key="any")
        meter.take()
        for chain in range(CHAINS):
            key = f"fifty {chain}, {contestant.name}"
            first.do("acquire", key=key)
            for team in teams:
                team.send("turns", key=key, members=MEMBERS, hold=HOLD)
            time.sleep(10.0)  # until all of them wait
            released, _ = first.do("release", key=key)
            turns = sorted(turn for team in teams for turn in team.receive())
            ends = [released, *(releasing for _, releasing, _ in turns)]
            took += [granted - end for end, (granted, _, _) in zip(ends, turns, strict=False)]
            overlaps = [later for earlier, later in pairwise(turns) if later[0] < earlier[1]]
            assert not overlaps, f"{contestant.name} granted the lock to two holders at once."
        return _summary(took, meter)


def _summary(took: list[float], meter: Meter) -> dict[str, Any]:
    usage = meter.take()
    used = usage.per(len(took))
    # DynamoDB Streams bills these requests separately.
    stream_reads = sum(count for action, count in usage.requests.items() if action in STREAM_ACTIONS)
    return {
        "p50": round(percentile(took, 0.5), 3),
        "p99": round(percentile(took, 0.99), 3),
        "max": round(max(took), 3),
        "of": len(took),
        "per_handover": {
            **{name: used[name] for name in ("requests", "write_units", "read_units", "actions")},
            "stream_reads": round(stream_reads / len(took), 2),
        },
    }
