"""Requests and capacity units per cycle (acquire and release), and per minute of holding or waiting."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from bench.adapters.worker import Settings
from bench.contestants import (
    AWSFLOCK,
    DYNDBMUTEX,
    FLOOR,
    OURS,
    OURS_UNFAIR,
    OURS_WITH_HEARTBEATS,
    PYTHON_DYNAMODB_LOCK,
    RIVALS,
    Contestant,
)
from bench.measure.parallel import at_once
from bench.meter import Meter, Usage

CONTESTANTS = (FLOOR, OURS, OURS_WITH_HEARTBEATS, *RIVALS)
CYCLES = 50
MINUTE = 60.0
# Seconds from the acquire to the measured minute. No heartbeat is due then, so each minute has as many of them.
SETTLED = 2.5
# Seconds of waiting before the measured minute. By then, a waiter is queued and its process sends heartbeats for it.
WAITED = 14.0


@dataclass(frozen=True)
class _Case:
    """A holder or a waiter that is measured for a minute.

    :ivar how: its settings in words, for the page.
    """

    contestant: Contestant
    how: str
    settings: Settings

    @property
    def key(self) -> str:
        """The key of the lock, which no other case uses."""
        return f"{self.contestant.name}, {self.how}"

    def named(self, used: Usage) -> dict[str, Any]:
        """Return plain data of the usage during the minute, with the names of this case."""
        return {"who": self.contestant.name, "how": self.how, **used.per(MINUTE / 60)}


# dyndbmutex and awsflock send nothing while they hold a lock, because they have no automatic heartbeats.
HOLDING = [
    _Case(OURS_WITH_HEARTBEATS, "default: lease 30 s, heartbeat 5 s", Settings()),
    _Case(
        OURS_WITH_HEARTBEATS, "as in the Airflow group: lease 120 s, heartbeat 10 s", Settings(120.0, 10.0)
    ),
    _Case(PYTHON_DYNAMODB_LOCK, "default: lease 30 s, heartbeat 5 s", Settings()),
    _Case(PYTHON_DYNAMODB_LOCK, "lease 120 s, heartbeat 10 s", Settings(120.0, 10.0)),
    _Case(DYNDBMUTEX, "has no heartbeat: the lease must outlast the work", Settings(600.0)),
    _Case(AWSFLOCK, "has no automatic heartbeat: the lease must outlast the work", Settings(7200.0)),
]
WAITING = [
    _Case(OURS, "default: queues, and polls every 1 to 1.25 s", Settings(poll=None)),
    _Case(OURS_UNFAIR, "does not queue: polls every 1 to 1.25 s", Settings(poll=None)),
    _Case(PYTHON_DYNAMODB_LOCK, "default: polls every 5 s", Settings(poll=None)),
    _Case(PYTHON_DYNAMODB_LOCK, "set to poll every 1 s", Settings()),
    _Case(DYNDBMUTEX, "cannot wait: the caller retries every 1 s", Settings()),
    _Case(AWSFLOCK, "default: pauses double up to 5 minutes", Settings(poll=None)),
    _Case(AWSFLOCK, "the caller retries with --no-wait every 1 s", Settings()),
]


def measure(endpoint_url: str) -> dict[str, Any]:
    """Measure cycles, holders and waiters."""
    return {
        "queued_waiter": _queued_waiter(endpoint_url),
        "cycle": {contestant.name: _cycle(contestant, endpoint_url) for contestant in CONTESTANTS},
        # These cases send few requests, so they can run at the same time.
        "holding": at_once(lambda case: _holding(case, endpoint_url), HOLDING),
        "waiting": at_once(lambda case: _waiting(case, endpoint_url), WAITING),
    }


def _cycle(contestant: Contestant, endpoint_url: str) -> dict[str, Any]:
    with Meter(endpoint_url) as meter, contestant.worker(meter.endpoint_url) as worker:
        worker.do("prepare", key="cycle")
        meter.take()
        worker.do("cycles", key="cycle", count=1)
        first = meter.take().per(1)
        worker.do("cycles", key="cycle", count=CYCLES)
        return {"first": first, "later": meter.take().per(CYCLES)}


def _holding(case: _Case, endpoint_url: str) -> dict[str, Any]:
    with Meter(endpoint_url) as meter, case.contestant.worker(meter.endpoint_url, case.settings) as worker:
        worker.do("acquire", key=case.key)
        time.sleep(SETTLED)
        return case.named(meter.over(MINUTE))


def _waiting(case: _Case, endpoint_url: str) -> dict[str, Any]:
    with ExitStack() as stack:
        # The holder does not use the meter, so its requests are not counted. Its lease outlasts the measurement.
        holder = stack.enter_context(case.contestant.worker(endpoint_url, Settings(lease=600.0)))
        holder.do("acquire", key=case.key)
        meter = stack.enter_context(Meter(endpoint_url))
        waiter = stack.enter_context(case.contestant.worker(meter.endpoint_url, case.settings))
        waiter.do("prepare", key=case.key)
        waiter.send("acquire", key=case.key)
        time.sleep(WAITED)
        return case.named(meter.over(MINUTE))


def _queued_waiter(endpoint_url: str) -> dict[str, Any]:
    """Measure a queued waiter of this package: before the holder's release, and after it."""
    key = "queued waiter"
    with ExitStack() as stack:
        holder = stack.enter_context(OURS.worker(endpoint_url))
        holder.do("acquire", key=key)
        meter = stack.enter_context(Meter(endpoint_url))
        waiter = stack.enter_context(OURS.worker(meter.endpoint_url))
        waiter.do("prepare", key=key)
        waiter.send("acquire", key=key)
        time.sleep(SETTLED)
        before_release = meter.take().per(1)
        holder.do("release", key=key)
        waiter.receive()
        return {"before_release": before_release, "after_release": meter.take().per(1)}
