"""How long a lock that is given back is nobody's while others wait for it: from the call of release in one process to
the grant in another.

Everybody looks once a second: python-dynamodb-lock's own default is 5 s, awsflock's pauses double up to five minutes,
dyndbmutex does not wait. Two contenders are two processes, one of which holds. Fifty are 25 threads in each of two
processes, and each takes the lock once. What is sent meanwhile is counted too.
"""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

from airflow_dynamo_lock.core.wait.stream import STREAM_ACTIONS
from bench.contestants import OURS, OURS_UNFAIR, OURS_WITH_STREAMS, RIVALS
from bench.contestants import Contestant as Who
from bench.measure.parallel import at_once
from bench.measure.spread import percentile
from bench.meter import Meter

CONTESTANTS = (OURS, OURS_UNFAIR, OURS_WITH_STREAMS, *RIVALS)
POLL = 1.0
ROUNDS = 40  # of two contenders
CHAINS = 2  # of fifty
PROCESSES, MEMBERS = 2, 25
HOLD = 0.02  # for so long each of the fifty holds it, seconds


def measure(endpoint_url: str) -> dict[str, Any]:
    """Seconds, and what was sent."""
    # Two at a time hardly load the engine, so all libraries have their rounds at once; the fifties one after another.
    pairs = at_once(lambda who: two(who, endpoint_url), CONTESTANTS)
    return {
        "poll_interval": POLL,
        "2": {who.name: each for who, each in zip(CONTESTANTS, pairs, strict=True)},
        "50": {who.name: _fifty(who, endpoint_url) for who in CONTESTANTS},
    }


def two(who: Who, endpoint_url: str, rounds: int = ROUNDS) -> dict[str, Any]:
    """Of two contenders."""
    phase = random.Random(0)  # noqa: S311 - when in its interval a waiter is caught; the same for all
    key = f"two, {who.name}"  # some share a table
    took = []
    with ExitStack() as stack:
        meter = stack.enter_context(Meter(endpoint_url))
        holder, waiter = (stack.enter_context(who.worker(meter.endpoint_url)) for _ in range(2))
        for worker in (holder, waiter):
            worker.do("prepare", key=key)
        holder.do("acquire", key=key)
        meter.take()
        for _ in range(rounds):
            waiter.tell("acquire", key=key)
            time.sleep(1 + phase.random() * POLL)
            released, _ = holder.do("release", key=key)
            _, granted = waiter.hear()
            took.append(granted - released)
            holder, waiter = waiter, holder
        return _summary(took, meter)


def _fifty(who: Who, endpoint_url: str) -> dict[str, Any]:
    took = []
    with ExitStack() as stack:
        meter = stack.enter_context(Meter(endpoint_url))
        first, *teams = (stack.enter_context(who.worker(meter.endpoint_url)) for _ in range(1 + PROCESSES))
        for worker in (first, *teams):
            worker.do("prepare", key="any")
        meter.take()
        for chain in range(CHAINS):
            key = f"fifty {chain}, {who.name}"
            first.do("acquire", key=key)
            for team in teams:
                team.tell("turns", key=key, members=MEMBERS, hold=HOLD)
            time.sleep(10.0)  # until all of them have tried once, and wait or stand in line
            released, _ = first.do("release", key=key)
            turns = sorted(turn for team in teams for turn in team.hear())
            ends = [released, *(releasing for _, releasing, _ in turns)]
            took += [granted - end for end, (granted, _, _) in zip(ends, turns, strict=False)]
            assert all(later[0] >= earlier[1] for earlier, later in pairwise(turns)), f"{who.name} let two in"
        return _summary(took, meter)


def _summary(took: list[float], meter: Meter) -> dict[str, Any]:
    usage = meter.take()
    used = usage.per(len(took))
    # Answered by DynamoDB Streams, which charges for them apart.
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
