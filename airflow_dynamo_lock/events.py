"""What happens to locks in this process, for metrics.

A program subscribes to the events of all of its lock clients:

    subscribe(lambda event: print(event.name, event.key, event.value))

In Airflow, `airflow_dynamo_lock.airflow.metrics` passes them on to Airflow's own metrics.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from airflow_dynamo_lock.log import log

EventName = Literal[
    "acquired",
    "waited",
    "reclaimed",
    "timed_out",
    "deadlocked",
    "removed",
    "released",
    "held",
    "drained",
    "lost",
    "broken",
    "heartbeat_failed",
    "waiting",
    "poll_cpu",
]


@dataclass(frozen=True)
class LockEvent:
    """Something that happened to a lock.

    :ivar name: what happened. `acquired`, `released`, `drained`: this process has acquired, released or drained a
        lease. `reclaimed`: an acquire has removed a dead holder. `timed_out`, `deadlocked`, `removed`: a wait has
        ended without the lock, at its timeout, in a deadlock, or because a person removed it. `lost`: this process has
        noticed that a lease was lost, which it reports once. `broken`: this process has broken a lease.
        `heartbeat_failed`: a heartbeat failed, and is repeated.
    :ivar key: the lock; empty for `waiting` and `poll_cpu`, which concern all locks.
    :ivar value: `waited`: how long an acquire took, in seconds. `held`: how long a released lease was held, in
        seconds. `waiting`: number of waiters of this process. `poll_cpu`: processor time that the poller needed for
        the answer to one read, in seconds. 1 for all others.
    """

    name: EventName
    key: str = ""
    value: float = 1.0


_listeners: list[Callable[[LockEvent], None]] = []


def subscribe(listener: Callable[[LockEvent], None]) -> None:
    """Call a function with each event from now on, in the thread in which it happens. It must return at once."""
    if listener not in _listeners:
        _listeners.append(listener)


def unsubscribe(listener: Callable[[LockEvent], None]) -> None:
    """Stop calling a listener; do nothing if it is not subscribed."""
    if listener in _listeners:
        _listeners.remove(listener)


def notify(name: EventName, key: str = "", value: float | Callable[[], float] = 1.0) -> None:
    """Call all listeners with an event. An error of a listener is only logged.

    :param value: the value, or a function that returns it, which is called only if there is a listener.
    """
    for listener in list(_listeners):
        try:
            listener(LockEvent(name, key, value() if callable(value) else value))
        except Exception:
            log.exception("A listener failed at the event %r of the lock %r.", name, key)
