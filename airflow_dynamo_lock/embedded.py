"""A DynamoDB to try locks on, without AWS: moto behind a small HTTP server, every request answered one at a time.

    python -m airflow_dynamo_lock.embedded --port 8001

prints its endpoint URL once it can answer, and keeps everything in memory until it is ended (Ctrl-C or SIGTERM).
In a test or a notebook, ``with EmbeddedDynamoDB() as db: … db.endpoint_url …`` does the same.

moto checks a write's condition and then stores the item, with nothing in between that keeps other threads out. A lock
built on conditional writes is only as good as their atomicity, so one lock here covers the whole of each request's
execution. It is for trying things out, not for production: no credentials are checked, and nothing is saved.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterable

    from werkzeug.test import TestResponse

# What moto stores belongs to the process, not to a server, and so does the lock around it.
_one_at_a_time = threading.Lock()


class EmbeddedDynamoDB:
    """An empty DynamoDB, served on ``endpoint_url`` for the length of a ``with`` block.

    One at a time in a process: two would share their tables.
    """

    endpoint_url: str

    def __init__(self, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._address = (host, port)

    def __enter__(self) -> Self:
        self._server = _Server(self._address, _Moto())
        host, port = self._server.socket.getsockname()
        self.endpoint_url = f"http://{host}:{port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=[0.05], name="embedded-dynamodb", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Moto:
    """moto's DynamoDB, emptied, executing one request at a time."""

    def __init__(self) -> None:
        try:
            import flask_cors  # noqa: F401 - first, because moto adds a warning of its own when it is missing
            from moto.core.model_instances import reset_model_data
            from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
            from werkzeug.test import Client
        except ImportError as missing:
            raise ImportError(
                f"The embedded DynamoDB needs {missing.name}: pip install 'airflow-dynamo-lock[embedded]'"
            ) from missing

        application = DomainDispatcherApplication(create_backend_app)
        # moto loads a service when it is first asked for; this one now, so that the first request is not a slow one.
        application.app_instances["dynamodb"] = create_backend_app("dynamodb")
        self._client = Client(application)
        self._client.post("/moto-api/reset")
        self._forget_copies = reset_model_data

    def execute(
        self, method: str, path: str, headers: Iterable[tuple[str, str]], body: bytes
    ) -> TestResponse:
        with _one_at_a_time:
            answer = self._client.open(path, method=method, headers=headers, data=body, buffered=True)
            self._forget_copies()  # moto keeps every version of every item, for its dashboard
        return answer


class _Server(ThreadingTCPServer):
    """A thread per connection; each ends with its client, or with the process."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 1024  # a test may start hundreds of clients at the same moment

    def __init__(self, address: tuple[str, int], moto: _Moto) -> None:
        super().__init__(address, _Connection)
        self.moto = moto


class _Connection(BaseHTTPRequestHandler):
    """One client's connection, kept open between its requests (werkzeug's own server closes it after each)."""

    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two packets: the second must not wait for an ACK

    def handle(self) -> None:
        with suppress(ConnectionError):  # clients that are killed, or give up waiting, are what locks are for
            super().handle()

    def do_POST(self) -> None:
        """DynamoDB has no other method; the rest is for locks in S3."""
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)  # a slow sender holds up nobody
        if len(body) < length:  # killed while it sent
            self.close_connection = True
            return
        answer = self.server.moto.execute(self.command, self.path, self.headers.items(), body)
        self.send_response_only(answer.status_code)
        self.send_header("Date", self.date_time_string())  # the clock that clients judge staleness by
        for name, value in answer.headers:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.data)

    do_GET = do_HEAD = do_PUT = do_DELETE = do_POST

    def log_message(self, format: str, *args: object) -> None:
        """No access log."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m airflow_dynamo_lock.embedded",
        description="Serve a DynamoDB in memory, to try locks on.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument(
        "--port", type=int, default=0, help="port to listen on; 0, the default, takes a free one"
    )
    options = parser.parse_args()

    # Threads inherit the blocked signals, which leaves both to sigwait() below, however early they come.
    ending = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ending)
    try:
        with EmbeddedDynamoDB(host=options.host, port=options.port) as db:
            print(db.endpoint_url, flush=True)
            signal.sigwait(ending)
    except ImportError as missing:
        sys.exit(str(missing))
    except (OSError, OverflowError) as refused:
        sys.exit(f"Cannot listen on {options.host}:{options.port}: {refused}")


if __name__ == "__main__":
    main()
