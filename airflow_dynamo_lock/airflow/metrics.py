"""What happens to locks, as metrics of Airflow (StatsD, OpenTelemetry), and each wait as a span of the run's trace.

Airflow adds its prefix, by default ``airflow.``, to the names: docs/monitoring.md lists them.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from airflow_dynamo_lock.airflow import versions
from airflow_dynamo_lock.events import LockEvent, subscribe


def start() -> None:
    """Pass on all events of this process from now on. Further calls do nothing."""
    subscribe(_pass_on)


def _pass_on(event: LockEvent) -> None:
    name, stats = f"dynamo_lock.{event.name}", versions.stats()
    match event.name:
        case "waited" | "held" | "poll_cpu":
            stats.timing(name, timedelta(seconds=event.value))
        case "waiting":
            # With the host, as Airflow's own `triggers.running`: the gauges of two triggerers are two metrics.
            stats.gauge(f"{name}.{re.sub(r'[^A-Za-z0-9_-]', '_', socket.gethostname())}", event.value)
        case _:
            stats.incr(name)


@contextmanager
def wait_span(keys: Sequence[str]) -> Iterator[None]:
    """A span from the request for locks until they are granted, or until the wait ends otherwise.

    It is part of the run's trace if Airflow's tracing is on. Otherwise it has no effect.
    """
    from opentelemetry import trace

    tracer = trace.get_tracer("airflow_dynamo_lock")
    with tracer.start_as_current_span("dynamo_lock.wait", attributes={"dynamo_lock.keys": list(keys)}):
        yield
