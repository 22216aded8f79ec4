"""What goes over the wire for each cycle (acquire and release), for each minute of holding or waiting."""

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
    OURS_BEATING,
    OURS_UNFAIR,
    PYTHON_DYNAMODB_LOCK,
    RIVALS,
)
from bench.contestants import Contestant as Who
from bench.measure.parallel import at_once
from bench.meter import Meter, Usage

CONTESTANTS = (FLOOR, OURS, OURS_BEATING, *RIVALS)
CYCLES = 50
MINUTE = 60.0
SETTLED = 2.5  # seconds after the acquire: not at the moment of a heartbeat, so that each minute has as many
WAITED = (
    14.0  # seconds since it began to wait: it has joined the line, and its process shows by now that it lives
)


@dataclass(frozen=True)
class _Long:
    """Somebody who holds, or waits, for a minute.

    :ivar how: in words.
    """

    who: Who
    how: str
    settings: Settings

    @property
    def key(self) -> str:
        """A lock of its own."""
        return f"{self.who.name}, {self.how}"

    def named(self, used: Usage) -> dict[str, Any]:
        """What was used, and by whom."""
        return {"who": self.who.name, "how": self.how, **used.per(MINUTE / 60)}


# Libraries without heartbeats of their own (dyndbmutex, awsflock) send nothing while they hold, whatever is set.
HOLDING = [
    _Long(OURS_BEATING, "default: lease 30 s, heartbeat 5 s", Settings()),
    _Long(OURS_BEATING, "as the Airflow group has it: lease 120 s, heartbeat 10 s", Settings(120.0, 10.0)),
    _Long(PYTHON_DYNAMODB_LOCK, "default: lease 30 s, heartbeat 5 s", Settings()),
    _Long(PYTHON_DYNAMODB_LOCK, "lease 120 s, heartbeat 10 s", Settings(120.0, 10.0)),
    _Long(DYNDBMUTEX, "has no heartbeat: the lease must outlast the work", Settings(600.0)),
    _Long(AWSFLOCK, "has none of its own: the lease must outlast the work", Settings(7200.0)),
]
WAITING = [
    _Long(OURS, "default: stands in line, and looks every 1 to 1.25 s", Settings(poll=None)),
    _Long(OURS_UNFAIR, "does not stand in line: looks every 1 to 1.25 s", Settings(poll=None)),
    _Long(PYTHON_DYNAMODB_LOCK, "default: tries every 5 s", Settings(poll=None)),
    _Long(PYTHON_DYNAMODB_LOCK, "told to try every 1 s", Settings()),
    _Long(DYNDBMUTEX, "cannot wait: tried again every 1 s", Settings()),
    _Long(AWSFLOCK, "default: pauses double up to 5 minutes", Settings(poll=None)),
    _Long(AWSFLOCK, "tried with --no-wait every 1 s", Settings()),
]


def measure(endpoint_url: str) -> dict[str, Any]:
    """Requests and capacity units of each."""
    return {
        "join_and_take": _join_and_take(endpoint_url),
        "cycle": {who.name: _cycle(who, endpoint_url) for who in CONTESTANTS},
        # They only send something now and then, so they do not disturb each other.
        "holding": at_once(lambda case: _holding(case, endpoint_url), HOLDING),
        "waiting": at_once(lambda case: _waiting(case, endpoint_url), WAITING),
    }


def _cycle(who: Who, endpoint_url: str) -> dict[str, Any]:
    with Meter(endpoint_url) as meter, who.worker(meter.endpoint_url) as worker:
        worker.do("prepare", key="cycle")
        meter.take()
        worker.do("cycles", key="cycle", count=1)
        first = meter.take().per(1)
        worker.do("cycles", key="cycle", count=CYCLES)
        return {"first": first, "later": meter.take().per(CYCLES)}


def _holding(case: _Long, endpoint_url: str) -> dict[str, Any]:
    with Meter(endpoint_url) as meter, case.who.worker(meter.endpoint_url, case.settings) as worker:
        worker.do("acquire", key=case.key)
        time.sleep(SETTLED)
        return case.named(meter.over(MINUTE))


def _waiting(case: _Long, endpoint_url: str) -> dict[str, Any]:
    with ExitStack() as stack:
        # What the holder sends is not counted, and none of its heartbeats is missed: the lease is a long one.
        holder = stack.enter_context(case.who.worker(endpoint_url, Settings(lease=600.0)))
        holder.do("acquire", key=case.key)
        meter = stack.enter_context(Meter(endpoint_url))
        waiter = stack.enter_context(case.who.worker(meter.endpoint_url, case.settings))
        waiter.do("prepare", key=case.key)
        waiter.tell("acquire", key=case.key)
        time.sleep(WAITED)
        return case.named(meter.over(MINUTE))


def _join_and_take(endpoint_url: str) -> dict[str, Any]:
    """What one of ours sends to join the line, and when its turn comes: on each side of the release, in which order."""
    key = "join and take"
    with ExitStack() as stack:
        holder = stack.enter_context(OURS.worker(endpoint_url))
        holder.do("acquire", key=key)
        meter = stack.enter_context(Meter(endpoint_url))
        waiter = stack.enter_context(OURS.worker(meter.endpoint_url))
        waiter.do("prepare", key=key)
        waiter.tell("acquire", key=key)
        time.sleep(SETTLED)
        joined = meter.take().per(1)
        holder.do("release", key=key)
        waiter.hear()
        return {"join": joined, "take": meter.take().per(1)}
