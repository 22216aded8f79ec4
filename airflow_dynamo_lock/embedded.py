"""A DynamoDB in memory, to try locks without AWS: an HTTP server in front of moto.

From a shell, this command prints the endpoint's URL when it is ready, and serves requests until it receives
Ctrl-C or SIGTERM:

    python -m airflow_dynamo_lock.embedded --port 8001

In a test or a notebook, use `EmbeddedDynamoDB`.

moto checks the condition of a write first, and stores the item afterwards. Two threads could both pass the
check, and both acquire a lock. So the server executes one request at a time.

Not for production: the server checks no credentials and saves nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterable

    from werkzeug.wrappers import Response

# Held while moto executes a request. All servers of a process share it, because moto's data is global.
_execution_lock = threading.Lock()


class EmbeddedDynamoDB:
    """Serves an empty DynamoDB inside a ``with`` block.

        with EmbeddedDynamoDB() as db:
            client = boto3.client("dynamodb", endpoint_url=db.endpoint_url)

    Use only one at a time in a process: the start of a second one deletes the tables of the first, and they
    share their tables from then on.

    :param host: address to listen on.
    :param port: port to listen on; 0 selects a free one.
    :ivar endpoint_url: URL of the server, inside the ``with`` block.
    :raises ImportError: at the start of the block, if a package of the extra ``embedded`` is not installed.
    :raises OSError: at the start of the block, if the server cannot listen on the address.
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
    """moto's services, without data. Executes one request at a time."""

    def __init__(self) -> None:
        try:
            import flask_cors  # noqa: F401 - if it is missing, moto's import adds a warning of its own
            from moto.core.model_instances import reset_model_data
            from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
            from werkzeug.test import Client
        except ImportError as missing:
            raise ImportError(
                f"The embedded DynamoDB needs the package {missing.name}. "
                "Run: pip install 'airflow-dynamo-lock[embedded]'"
            ) from missing

        application = DomainDispatcherApplication(create_backend_app)
        # moto loads a service at the first request for it, which takes long. Load this one now.
        application.app_instances["dynamodb"] = create_backend_app("dynamodb")
        self._client = Client(application)
        self._client.post("/moto-api/reset")
        self._discard_copies = reset_model_data

    def execute(self, method: str, path: str, headers: Iterable[tuple[str, str]], body: bytes) -> Response:
        """Execute one request, when no other request of the process is executed."""
        try:
            with _execution_lock:
                answer = self._client.open(path, method=method, headers=headers, data=body, buffered=True)
                self._discard_copies()  # moto keeps a copy of each version of each item for its dashboard
        except KeyError as missing:
            if missing.args != (_region(headers),):
                raise
            return _unknown_region(str(missing.args[0]))
        return answer


def _region(headers: Iterable[tuple[str, str]]) -> str | None:
    """The region for which a request is signed."""
    signature = {name.lower(): value for name, value in headers}.get("authorization", "")
    scope = re.search("Credential=[^/]*/[^/]*/([^/]*)/", signature)
    return scope[1] if scope else None


def _unknown_region(region: str) -> Response:
    """DynamoDB's answer to a request that is signed for a region that does not exist."""
    from werkzeug.wrappers import Response

    error = {
        "__type": "com.amazon.coral.service#InvalidSignatureException",
        "message": f"There is no region {region!r}: set one of AWS's, such as us-east-1.",
    }
    return Response(json.dumps(error), 400, content_type="application/x-amz-json-1.0")


class _Server(ThreadingTCPServer):
    """The HTTP server, with one thread per connection. A thread ends when its client disconnects."""

    allow_reuse_address = True
    daemon_threads = True  # an open connection does not keep the process from exiting
    request_queue_size = 1024  # a test may start hundreds of clients at the same time

    def __init__(self, address: tuple[str, int], moto: _Moto) -> None:
        super().__init__(address, _Connection)
        self.moto = moto


class _Connection(BaseHTTPRequestHandler):
    """The connection of one client. Unlike in werkzeug's server, it stays open between requests."""

    server: _Server
    protocol_version = "HTTP/1.1"
    # The head and the body of an answer are two packets. With Nagle's algorithm, the second waits for an ACK.
    disable_nagle_algorithm = True

    def handle(self) -> None:
        """Answer requests until the client disconnects. A lost connection is no error."""
        with suppress(ConnectionError):
            super().handle()

    def do_POST(self) -> None:
        """Execute a request of any method. DynamoDB uses POST only; the others are for locks in S3."""
        length = int(self.headers.get("Content-Length", 0))
        # Read the whole body before the request is executed, so that a slow client does not delay the others.
        body = self.rfile.read(length)
        if len(body) < length:  # the client has disconnected before it had sent the whole request
            self.close_connection = True
            return
        answer = self.server.moto.execute(self.command, self.path, self.headers.items(), body)
        self.send_response_only(answer.status_code)
        self.send_header("Date", self.date_time_string())  # the lock clients read DynamoDB's time from it
        for name, value in answer.headers:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.data)

    do_GET = do_HEAD = do_PUT = do_DELETE = do_POST

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Write no access log."""


def main() -> None:
    """Run the command ``python -m airflow_dynamo_lock.embedded``."""
    parser = argparse.ArgumentParser(
        prog="python -m airflow_dynamo_lock.embedded",
        description="Serve a DynamoDB in memory, to try locks without AWS.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=int, default=0, help="port to listen on; 0 selects a free one (default: %(default)s)"
    )
    options = parser.parse_args()

    # Blocked before any thread starts, because threads inherit the mask. So only sigwait() receives these
    # signals, even if they arrive before the server is ready.
    end_signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, end_signals)
    try:
        with EmbeddedDynamoDB(host=options.host, port=options.port) as db:
            print(db.endpoint_url, flush=True)
            signal.sigwait(end_signals)
    except ImportError as missing:
        sys.exit(str(missing))
    except (OSError, OverflowError) as refused:
        address = f"{options.host}:{options.port}"
        sys.exit(f"Could not listen on {address} ({refused}): choose another --host or --port.")


if __name__ == "__main__":
    main()
