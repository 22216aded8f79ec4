"""Metrics and traces that tasks and triggers report to Airflow."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from airflow_dynamo_lock import LockClient
from airflow_dynamo_lock.airflow import versions
from airflow_dynamo_lock.core.model.errors import LockTimeoutError
from airflow_dynamo_lock.events import notify
from tests.layer.test_waiting import in_the_triggerer, key, no_xcom, on_a_worker, result_of

pytestmark = pytest.mark.usefixtures("connection")

__all__ = ["key", "no_xcom"]


class Stats:
    """Records what a process reports to Airflow's metrics."""

    def __init__(self) -> None:
        self.packets: list[tuple[str, Any]] = []

    def incr(self, name: str) -> None:
        self.packets.append((name, 1))

    def timing(self, name: str, value: timedelta) -> None:
        self.packets.append((name, value))

    def gauge(self, name: str, value: float) -> None:
        self.packets.append((name, value))

    def names(self) -> set[str]:
        return {name for name, _ in self.packets}


@pytest.fixture
def stats(monkeypatch: pytest.MonkeyPatch) -> Stats:
    stats = Stats()
    monkeypatch.setattr(versions, "stats", lambda: stats)
    return stats


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter
    provider.shutdown()


def test_airflow_has_the_methods_that_the_package_calls() -> None:
    stats = versions.stats()
    assert all(callable(getattr(stats, name)) for name in ("incr", "timing", "gauge"))


@pytest.mark.parametrize("place", ["triggerer", "worker"])
def test_an_acquisition_is_counted_and_its_wait_is_a_span(
    key: str, stats: Stats, spans: InMemorySpanExporter, place: str
) -> None:
    if place == "triggerer":
        asyncio.run(result_of(in_the_triggerer(key)))
    else:
        on_a_worker(key)()

    assert {"dynamo_lock.acquired", "dynamo_lock.waited"} <= stats.names()
    (span,) = spans.get_finished_spans()
    assert span.name == "dynamo_lock.wait"
    assert dict(span.attributes or {}) == {"dynamo_lock.keys": (key,)}
    assert span.status.is_ok or span.status.is_unset


def test_a_timeout_is_counted_and_its_span_shows_the_error(
    locks: LockClient, key: str, stats: Stats, spans: InMemorySpanExporter
) -> None:
    locks.acquire(key)
    with pytest.raises(LockTimeoutError):
        on_a_worker(key, timeout=timedelta(0))()

    assert "dynamo_lock.timed_out" in stats.names()
    (span,) = spans.get_finished_spans()
    assert not span.status.is_ok
    assert span.events[0].name == "exception"


def test_times_are_timings_and_all_other_events_are_counted(stats: Stats) -> None:
    for name in ("held", "waited", "poll_cpu"):
        notify(name, "k", 1.5)
    for name in ("acquired", "reclaimed", "deadlocked", "removed", "released", "drained", "lost", "broken"):
        notify(name, "k")  # type: ignore[arg-type]
    notify("heartbeat_failed", "k")

    times = {"held", "waited", "poll_cpu"}
    assert dict(stats.packets) == {
        **{f"dynamo_lock.{name}": timedelta(seconds=1.5) for name in times},
        **dict.fromkeys(
            (
                f"dynamo_lock.{name}"
                for name in (
                    *("acquired", "reclaimed", "deadlocked", "removed", "released", "drained", "lost"),
                    *("broken", "heartbeat_failed"),
                )
            ),
            1,
        ),
    }


def test_each_triggerer_has_its_own_metric_of_waiters(stats: Stats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "triggerer-1.svc:x")
    notify("waiting", value=3)
    assert stats.packets == [("dynamo_lock.waiting.triggerer-1_svc_x", 3)]


def test_the_key_of_a_lock_is_not_part_of_a_metric(stats: Stats) -> None:
    notify("acquired", "a,key=with|signs")
    assert stats.packets == [("dynamo_lock.acquired", 1)]


def test_an_error_of_airflows_metrics_does_not_affect_the_lock(
    locks: LockClient, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(versions, "stats", lambda: SimpleNamespace(incr=fails, timing=fails, gauge=fails))
    on_a_worker(key)()
    assert not locks.try_acquire(key)
