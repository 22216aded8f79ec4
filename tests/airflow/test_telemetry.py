"""Metrics and spans of real Airflow processes: what tasks, triggers and the API server send.

Each test provokes an event, and waits until its metric arrives from the kind of process in which it happens.
"""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Callable, Iterator

import pytest

from airflow_dynamo_lock.airflow.versions import STARTS_IN_TRIGGERER
from proof.airflow.deadlocks import finish_round, start_round
from proof.airflow.telemetry import (
    API_SERVER,
    EXPORTS_TIMES,
    HAS_OPENTELEMETRY,
    TASK,
    TRIGGER,
    Metric,
    Received,
    Span,
    collector,
    statsd_server,
)
from proof.airflow.testbed import Testbed, start_testbed, wait_for

pytestmark = pytest.mark.proof

ARRIVES = 180.0  # seconds in which a metric must arrive; only shows whether it arrives at all
#: Component in which a `release` task runs, if the process of the last guarded task does not release the lock.
RELEASES = TRIGGER if STARTS_IN_TRIGGERER else TASK
WAITING = "waiting." + re.sub(r"[^A-Za-z0-9_-]", "_", socket.gethostname())


class Telemetry:
    """A testbed with a receiver of its metrics and spans."""

    def __init__(self, testbed: Testbed, received: Received) -> None:
        self.testbed, self.received = testbed, received

    def now(self) -> int:
        """Return the number of metrics that have arrived so far."""
        return len(self.received.metrics)

    def wait_for(
        self, component: str, *names: str, since: int = 0, true: Callable[[Metric], object] = lambda _: True
    ) -> list[Metric]:
        """Wait until a component has sent these metrics, and return the first one of each name.

        :param since: ignore metrics that arrived before `now` returned this number. With OpenTelemetry, a process
            exports all of its metrics every second, so only the first test of each metric of a trigger is conclusive.
        :param true: ignore metrics for which this returns something false.
        """

        def found() -> list[Metric] | None:
            arrived = {
                metric.name: metric
                for metric in reversed(self.received.metrics[since:])
                if metric.component == component and metric.name in names and true(metric)
            }
            return [arrived[name] for name in names] if len(arrived) == len(names) else None

        return wait_for(found, f"{component} has sent {', '.join(names)}", ARRIVES)

    def wait_for_span(self, what: str, true: Callable[[Span], object]) -> Span:
        """Wait for a span for which `true` returns something true.

        :param what: the span, for the error message.
        """
        return wait_for(
            lambda: next((span for span in list(self.received.spans) if true(span)), None),
            f"the span {what} has arrived",
            ARRIVES,
        )


@pytest.fixture(scope="module")
def telemetry(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Telemetry]:
    """Start a testbed that sends metrics to a StatsD server, or metrics and spans to an OpenTelemetry collector."""
    received, folder = Received(), tmp_path_factory.mktemp(request.param)
    receiver = {"statsd": statsd_server, "otel": collector}[request.param]
    with receiver(received) as env, start_testbed(folder, "north", env=env) as testbed:
        yield Telemetry(testbed, received)


def on(*receivers: str) -> pytest.MarkDecorator:
    """Run a test with these receivers. The collector supports the format of Airflow 3.2 and later."""
    supported = [each for each in receivers if each != "otel" or HAS_OPENTELEMETRY]
    return pytest.mark.parametrize("telemetry", supported, indirect=True, scope="module")


# -- tasks and triggers ------------------------------------------------------------------------------------------------


# Airflow 3.2 exports a time as a gauge, and each gauge once, so a single lost export would fail the test.
@on("statsd", *(["otel"] if EXPORTS_TIMES else []))
def test_a_trigger_reports_its_wait_and_the_process_of_the_last_task_the_release(
    telemetry: Telemetry, key: str
) -> None:
    """The process of the task releases the lock as it exits, and must send its metrics after that."""
    testbed = telemetry.testbed
    lease = testbed.locks.acquire(key, lease=300)
    run_id = testbed.start("guarded", key, seconds=0.5)
    waiters, _ = telemetry.wait_for(TRIGGER, WAITING, "poll_cpu", true=lambda each: each.value > 0)
    assert (waiters.kind in {"g", "gauge"}, waiters.value) == (True, 1)

    since = telemetry.now()
    # OpenTelemetry exports the sums of each process, which count the locks of earlier tests, too.
    before = {
        each.series: each.value
        for each in telemetry.received.metrics
        if each.kind == "sum" and each.name == "acquired" and each.component == TRIGGER
    }
    testbed.locks.release(lease)
    (acquired,) = telemetry.wait_for(
        TRIGGER, "acquired", since=since, true=lambda each: each.value > before.get(each.series, 0)
    )
    assert (acquired.kind in {"c", "sum"}, acquired.value - before.get(acquired.series, 0)) == (True, 1)
    (waited,) = telemetry.wait_for(TRIGGER, "waited", since=since)
    assert waited.kind in {"ms", "exponential_histogram"}
    assert waited.value > 0
    telemetry.wait_for(TRIGGER, WAITING, since=since, true=lambda each: each.value == 0)
    released, held = telemetry.wait_for(TASK, "released", "held", since=since)
    assert released.value == 1
    assert held.value >= 500  # milliseconds
    testbed.assert_green("guarded", run_id)


@on("statsd", "otel")
def test_a_task_that_waits_on_a_worker_reports_all_of_it(telemetry: Telemetry, key: str) -> None:
    since, testbed = telemetry.now(), telemetry.testbed
    lease = testbed.locks.acquire(key, lease=300)
    run_id = testbed.start("on_worker", key, seconds=0.5)
    telemetry.wait_for(TASK, WAITING, "poll_cpu", since=since, true=lambda each: each.value > 0)
    testbed.locks.release(lease)
    telemetry.wait_for(TASK, "acquired", "waited", "released", "held", since=since)
    testbed.assert_green("on_worker", run_id)


@on("statsd")
def test_the_release_task_reports_the_release_after_a_task_that_failed(
    telemetry: Telemetry, key: str
) -> None:
    since, testbed = telemetry.now(), telemetry.testbed
    run_id = testbed.start("guarded", key, seconds=0.5, fails=True)
    _, held = telemetry.wait_for(RELEASES, "released", "held", since=since)
    assert held.value >= 500
    assert testbed.airflow.wait("guarded", run_id).state == "failed"


@on("statsd")
def test_a_release_task_and_an_operator_report_that_they_drain_the_lease(
    telemetry: Telemetry, key: str
) -> None:
    since, testbed = telemetry.now(), telemetry.testbed
    for dag_id, task_id, component in (("guarded", "lock.work", RELEASES), ("operator", "locked", TASK)):
        run_id = testbed.start(dag_id, f"{key}/{dag_id}")
        testbed.wait_inside(f"{key}/{dag_id}", run_id)
        testbed.airflow.set_task_state(dag_id, run_id, task_id, "failed")
        telemetry.wait_for(component, "drained", since=since)
        testbed.airflow.wait(dag_id, run_id)


# -- waits that end without the lock -----------------------------------------------------------------------------------


@on("statsd")
@pytest.mark.parametrize(("dag_id", "component"), [("guarded", TRIGGER), ("on_worker", TASK)])
def test_a_timeout_is_reported(telemetry: Telemetry, key: str, dag_id: str, component: str) -> None:
    since, testbed = telemetry.now(), telemetry.testbed
    testbed.locks.acquire(key, lease=300)
    run_id = testbed.start(dag_id, key, timeout=1)
    telemetry.wait_for(component, "timed_out", since=since)
    assert testbed.airflow.wait(dag_id, run_id).state == "failed"


@on("statsd")
def test_a_deadlock_is_reported(telemetry: Telemetry, key: str) -> None:
    since = telemetry.now()
    started = start_round(telemetry.testbed, key, 2)
    telemetry.wait_for(TRIGGER, "deadlocked", since=since)
    finish_round(telemetry.testbed, started)
    assert not started.violations


@on("statsd")
def test_a_removed_waiter_is_reported(telemetry: Telemetry, key: str) -> None:
    since, testbed = telemetry.now(), telemetry.testbed
    testbed.locks.acquire(key, lease=300)
    run_id = testbed.start("guarded", key)
    (waiter,) = wait_for(lambda: testbed.locks.waiters(key) or None, "the run is queued", ARRIVES)
    testbed.airflow.act_on_lock("remove", key=key, lease_id=waiter.lease_id, reason="a drill")
    telemetry.wait_for(TRIGGER, "removed", since=since)
    assert testbed.airflow.wait("guarded", run_id).state == "failed"


# -- leases that end ---------------------------------------------------------------------------------------------------


@on("statsd", "otel")
def test_the_api_server_reports_a_broken_lease_and_its_task_the_loss(telemetry: Telemetry, key: str) -> None:
    since, testbed = telemetry.now(), telemetry.testbed
    run_id = testbed.start("guarded", key)
    use = testbed.wait_inside(key, run_id)
    testbed.airflow.act_on_lock("break", key=key, lease_id=use.lease_id, reason="a drill")
    telemetry.wait_for(API_SERVER, "broken", since=since)
    # The heartbeat trigger may read that the lease is gone before a heartbeat fails, and then it reports no loss.
    telemetry.wait_for(TASK, "lost", since=since)
    assert testbed.airflow.wait("guarded", run_id).state == "failed"


@on("statsd")
def test_a_reclaim_is_reported(telemetry: Telemetry, key: str) -> None:
    since, testbed = telemetry.now(), telemetry.testbed
    testbed.locks.acquire(key, owner="a dead process", lease=5)
    run_id = testbed.start("guarded", key, seconds=0.5)
    telemetry.wait_for(TRIGGER, "reclaimed", "acquired", since=since)
    testbed.assert_green("guarded", run_id)


@on("statsd")
def test_failed_heartbeats_are_reported(telemetry: Telemetry, key: str) -> None:
    since, testbed = telemetry.now(), telemetry.testbed
    run_id = testbed.start("guarded", key, lease=120, grace=60)
    testbed.wait_inside(key, run_id)
    engine = testbed.engine.process
    engine.send_signal(signal.SIGSTOP)
    try:
        telemetry.wait_for(TRIGGER, "heartbeat_failed", since=since)
        telemetry.wait_for(TASK, "heartbeat_failed", since=since)
    finally:
        engine.send_signal(signal.SIGCONT)
    testbed.end_task(run_id, "finish")
    testbed.assert_green("guarded", run_id)


# -- spans -------------------------------------------------------------------------------------------------------------


if HAS_OPENTELEMETRY:

    @on("otel")
    @pytest.mark.parametrize(
        ("dag_id", "component", "around"), [("guarded", TRIGGER, "trigger."), ("on_worker", TASK, "worker.")]
    )
    def test_a_wait_is_a_span_of_the_trace_of_the_run(
        telemetry: Telemetry, key: str, dag_id: str, component: str, around: str
    ) -> None:
        testbed = telemetry.testbed
        lease = testbed.locks.acquire(key, lease=300)
        run_id = testbed.start(dag_id, key, seconds=0.5)
        wait_for(lambda: testbed.locks.waiters(key) or None, "the run is queued", ARRIVES)
        testbed.locks.release(lease)
        testbed.assert_green(dag_id, run_id)
        wait = telemetry.wait_for_span(
            "of the wait", lambda each: each.attributes.get("dynamo_lock.keys") == [key]
        )
        assert (wait.name, wait.component) == ("dynamo_lock.wait", component)
        # Airflow's own spans: around the trigger or the task, and of the run.
        parent = telemetry.wait_for_span("around the wait", lambda each: each.span_id == wait.parent_id)
        assert parent.name.startswith(around)
        run = telemetry.wait_for_span(
            "of the run",
            lambda each: (
                each.name == f"dag_run.{dag_id}" and each.attributes["airflow.dag_run.run_id"] == run_id
            ),
        )
        assert wait.trace_id == parent.trace_id == run.trace_id
