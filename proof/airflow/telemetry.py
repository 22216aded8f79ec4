"""Receivers of the metrics and spans that the processes of a testbed send: a StatsD server, and an OpenTelemetry
collector.

``site/sitecustomize.py`` puts the name of the component before each StatsD metric, and into each OpenTelemetry
resource as ``service.name``. The processes of tasks are children of the scheduler (LocalExecutor) or of a worker
(CeleryExecutor), which themselves use no locks, so `TASK` stands for them.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from typing import Any

import airflow
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from proof.airflow.testbed import IN_PRODUCTION

_VERSION = tuple(map(int, airflow.__version__.split(".")[:2]))
#: Whether Airflow exports spans that OpenTelemetry's own functions begin, and takes its settings from the variables of
#: OpenTelemetry.
HAS_OPENTELEMETRY = _VERSION >= (3, 2)
#: Whether Airflow exports times to OpenTelemetry as times.
EXPORTS_TIMES = _VERSION >= (3, 3)

TASK, TRIGGER, API_SERVER = "worker" if IN_PRODUCTION else "scheduler", "triggerer", "api-server"
_PREFIX = "dynamo_lock."


@dataclass(frozen=True)
class Metric:
    """One packet of StatsD, or one exported data point of OpenTelemetry.

    :ivar component: component that sent it.
    :ivar name: name without prefix and without ``dynamo_lock.``.
    :ivar kind: "c" or "sum" is a counter, "ms" or "exponential_histogram" a time, "g" or "gauge" a gauge. Airflow 3.2
        exports a time to OpenTelemetry as a gauge.
    :ivar value: the value; a time is in milliseconds.
    :ivar series: start of an OpenTelemetry series, in nanoseconds; 0 in StatsD. It tells the sums of two processes of
        one component apart, such as those of two triggerers.
    """

    component: str
    name: str
    kind: str
    value: float
    series: int = 0


@dataclass(frozen=True)
class Span:
    """One span.

    :ivar component: component that sent it.
    :ivar trace_id: id of the trace, in hexadecimal digits.
    :ivar parent_id: id of the parent span, in hexadecimal digits; empty if it has none.
    """

    component: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: Mapping[str, Any] = field(hash=False)


class Received:
    """What has arrived so far: this package's metrics, and all spans."""

    def __init__(self) -> None:
        self.metrics: list[Metric] = []
        self.spans: list[Span] = []


@contextmanager
def statsd_server(received: Received) -> Iterator[Mapping[str, str]]:
    """Receive StatsD packets. Yields the environment variables with which Airflow sends them here."""
    # Without it, Airflow sends nothing, and only logs an error.
    assert find_spec("statsd"), "the package statsd is not installed"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        # UDP drops the packets that find the buffer full.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        port = server.getsockname()[1]
        thread = threading.Thread(target=_receive, args=(server, received), name="statsd server", daemon=True)
        thread.start()
        try:
            yield {
                "AIRFLOW__METRICS__STATSD_ON": "True",
                "AIRFLOW__METRICS__STATSD_HOST": "127.0.0.1",
                "AIRFLOW__METRICS__STATSD_PORT": str(port),
            }
        finally:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
                client.sendto(b"", ("127.0.0.1", port))
            thread.join()


def _receive(server: socket.socket, received: Received) -> None:
    """Receive packets until an empty one."""
    while packet := server.recv(65536):
        for line in packet.decode().splitlines():
            name, _, sample = line.partition(":")
            component, _, name = name.partition(".")
            if name.startswith(_PREFIX):
                value, kind = sample.split("|")[:2]
                metric = Metric(component, name.removeprefix(_PREFIX), kind, float(value))
                received.metrics.append(metric)


@contextmanager
def collector(received: Received) -> Iterator[Mapping[str, str]]:
    """Receive OTLP over HTTP. Yields the environment variables with which Airflow sends metrics and traces here."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/metrics":
                received.metrics += _metrics_of(ExportMetricsServiceRequest.FromString(body))
            elif self.path == "/v1/traces":
                received.spans += _spans_of(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, name="collector", daemon=True)
        thread.start()
        try:
            yield {
                "AIRFLOW__METRICS__OTEL_ON": "True",
                "AIRFLOW__TRACES__OTEL_ON": "True",
                "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
                # Airflow's default for spans is gRPC.
                "OTEL_TRACES_EXPORTER": "otlp_proto_http",
                "OTEL_METRIC_EXPORT_INTERVAL": "1000",
            }
        finally:
            server.shutdown()
            thread.join()


def _metrics_of(request: ExportMetricsServiceRequest) -> Iterator[Metric]:
    for resource in request.resource_metrics:
        component = str(_attributes(resource.resource.attributes)["service.name"])
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                _, _, name = metric.name.partition(f".{_PREFIX}")
                kind = str(metric.WhichOneof("data"))
                if name:
                    for point in getattr(metric, kind).data_points:
                        yield Metric(component, name, kind, _value(point), point.start_time_unix_nano)


def _value(point: Any) -> float:
    """The value of a counter or of a gauge; the sum of a histogram."""
    if hasattr(point, "sum"):
        return float(point.sum)
    return float(getattr(point, point.WhichOneof("value")))


def _spans_of(request: ExportTraceServiceRequest) -> Iterator[Span]:
    for resource in request.resource_spans:
        component = str(_attributes(resource.resource.attributes)["service.name"])
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Span(
                    component=component,
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    attributes=_attributes(span.attributes),
                )


def _attributes(pairs: Iterable[Any]) -> dict[str, Any]:
    return {pair.key: _plain(pair.value) for pair in pairs}


def _plain(value: Any) -> Any:
    """The value of an attribute, with an array as a list."""
    kind = value.WhichOneof("value")
    return (
        [_plain(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)
    )
