"""An HTTP proxy between a client and an engine.

It records every request, including the retries of the SDK, and injects faults: lost replies, broken
connections, delays and error responses.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any, Self
from urllib.parse import urlsplit

from deployments.patience import PATIENCE


@dataclass(frozen=True)
class Seen:
    """One recorded request.

    :ivar action: the API action, such as ``UpdateItem``.
    :ivar what: what an ``UpdateItem`` does to the lock: ``acquire``, ``heartbeat``, ``release``, ``drain``,
        ``enter`` or ``leave``; for any other action, the action.
    :ivar key: the key of the lock; None if the request has several keys or none.
    :ivar at: when the proxy received it, in monotonic seconds.
    :ivar params: the parameters of the action.
    """

    action: str
    what: str
    key: str | None
    at: float
    params: Mapping[str, Any] = field(repr=False)


Matches = Callable[[Seen], bool]
#: Callback for each answer of the engine: the request, the HTTP status and the body.
OnAnswer = Callable[[Seen, int, bytes], None]


@dataclass
class Rule:
    """What the proxy does with the requests that match, during the `with` block of `Proxy.applying`.

    :ivar matches: whether the rule applies to a request.
    :ivar forward: forward the requests to the engine.
    :ivar late: hold the requests back until the rule ends, then forward them.
    :ivar delay: seconds by which each request is delayed on its way to the engine.
    :ivar lag: seconds by which each answer is delayed on its way to the client.
    :ivar in_turn: delay one request at a time, as a server does that works through its queue even if clients
        no longer wait.
    :ivar reply: returns the status and body that the client receives instead of the engine's answer, or None
        to break the connection.
    :ivar resets: break connections by a TCP reset (RST) instead of closing them.
    :ivar tears: break the connection in the middle of the answer.
    :ivar times: maximum number of requests to which the rule applies.
    :ivar hits: number of requests to which the rule has been applied.
    :ivar over: set when the rule ends.
    :ivar landed: set when the engine has answered a request, or was skipped.
    """

    matches: Matches
    forward: bool = True
    late: bool = False
    delay: float = 0.0
    lag: float = 0.0
    in_turn: bool = False
    reply: Callable[[], tuple[int, bytes] | None] | None = None
    resets: bool = False
    tears: bool = False
    times: float = float("inf")
    hits: int = 0
    over: threading.Event = field(default_factory=threading.Event)
    landed: threading.Event = field(default_factory=threading.Event)
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def stop_on_the_way(self) -> None:
        """Delay a request on its way to the engine."""
        if self.late:
            self.over.wait()
        with self._turn if self.in_turn else nullcontext():
            self.over.wait(self.delay)

    def hold(self) -> None:
        """Use as `reply`: send no answer while the rule lasts, then break the connection."""
        self.over.wait()


class Proxy:
    """A proxy that runs during the `with` block, at `endpoint_url`.

    :param target: the endpoint URL of the engine.
    :param on_answer: called for each answer of the engine, before the proxy passes it on or drops it.
    :ivar seen: all requests, in the order of their arrival.
    """

    endpoint_url: str

    def __init__(self, target: str, on_answer: OnAnswer | None = None) -> None:
        self.on_answer = on_answer
        self.target = urlsplit(target).netloc
        self.seen: list[Seen] = []
        self._rules: list[Rule] = []
        self._changed = threading.Condition()

    def __enter__(self) -> Self:
        self._server = _Server(("127.0.0.1", 0), self)
        self.endpoint_url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=[0.02], name="proxy", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for rule in self._rules:
            rule.over.set()
        self._server.shutdown()
        self._server.server_close()

    # -- recorded requests

    def whats(self) -> list[str]:
        """Return `Seen.what` of each request, in the order of arrival."""
        return [request.what for request in self.seen]

    def wait_for(self, count: int, what: str, *, within: float = PATIENCE) -> None:
        """Wait until at least `count` requests whose `Seen.what` is `what` have arrived.

        :raises AssertionError: they have not arrived within `within` seconds.
        """
        with self._changed:
            arrived = self._changed.wait_for(lambda: self.whats().count(what) >= count, within)
        assert arrived, f"{count} × {what} did not arrive within {within:g} s, only {self.whats()}"

    # -- faults

    @contextmanager
    def losing_replies(self, what: str, *, times: float = 1) -> Iterator[Rule]:
        """Let the engine execute the request, but break the connection before its answer."""
        with self.applying(Rule(lambda seen: seen.what == what, reply=lambda: None, times=times)) as rule:
            yield rule

    @contextmanager
    def breaking(self, matches: Matches = lambda _: True) -> Iterator[Rule]:
        """Break the connection before the request reaches the engine."""
        with self.applying(Rule(matches, forward=False, reply=lambda: None)) as rule:
            yield rule

    @contextmanager
    def hanging(self, matches: Matches) -> Iterator[Rule]:
        """Drop the request and send no answer. At the end of the block, break the connection."""
        with self.applying(Rule(matches, forward=False)) as rule:
            rule.reply = rule.hold
            yield rule

    @contextmanager
    def delaying(self, what: str) -> Iterator[Rule]:
        """Delay the first matching request. It reaches the engine at the end of the block."""
        rule = Rule(lambda seen: seen.what == what, late=True, times=1)
        with self.applying(rule):
            yield rule
        assert rule.landed.wait(PATIENCE)

    @contextmanager
    def answering(self, matches: Matches, status: int, code: str, message: str = "") -> Iterator[Rule]:
        """Answer the requests with an error of DynamoDB, without forwarding them to the engine."""
        body = {"__type": f"com.amazonaws.dynamodb.v20120810#{code}", "message": message}
        answer = (status, json.dumps(body).encode())
        with self.applying(Rule(matches, forward=False, reply=lambda: answer)) as rule:
            yield rule

    @contextmanager
    def applying(self, rule: Rule) -> Iterator[Rule]:
        """Apply a rule during the block."""
        self._rules.append(rule)
        try:
            yield rule
        finally:
            self._rules.remove(rule)
            rule.over.set()

    def note(self, seen: Seen) -> Rule | None:
        """Record a request. Returns the first rule that applies to it, or None."""
        with self._changed:
            self.seen.append(seen)
            applied = next(
                (rule for rule in self._rules if rule.hits < rule.times and rule.matches(seen)), None
            )
            if applied is not None:
                applied.hits += 1
            self._changed.notify_all()
        return applied


class _Server(ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, address: tuple[str, int], proxy: Proxy) -> None:
        super().__init__(address, _Connection)
        self.proxy = proxy


class _Connection(BaseHTTPRequestHandler):
    """A connection of a client, and its own connection to the engine."""

    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self._engine = HTTPConnection(self.server.proxy.target)

    def handle(self) -> None:
        with suppress(ConnectionError, HTTPException):  # of the client or of the engine
            super().handle()

    def finish(self) -> None:
        self._engine.close()
        with suppress(ConnectionError):
            super().finish()

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        if len(body) < length:  # the client was killed while it sent the request
            self.close_connection = True
            return
        seen = _seen(self.headers.get("X-Amz-Target", ""), json.loads(body))
        # Without a matching rule, the default rule forwards the request at once.
        rule = self.server.proxy.note(seen) or Rule(lambda _: True)
        answer: tuple[int, bytes] | None = None
        headers = {"Content-Type": "application/x-amz-json-1.0"}
        rule.stop_on_the_way()
        if rule.forward:
            answer, headers = self._forward(seen, body)
        rule.landed.set()
        if rule.lag:
            rule.over.wait(rule.lag)
        if rule.reply is not None:
            answer = rule.reply()
        if answer is None:
            self._break(resets=rule.resets)
            return
        status, content = answer
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if rule.tears:
            self.wfile.write(content[: len(content) // 2])
            self._break(resets=rule.resets)
            return
        self.wfile.write(content)

    def _forward(self, seen: Seen, body: bytes) -> tuple[tuple[int, bytes], dict[str, str]]:
        """Send a request to the engine. Returns its answer, and the headers to pass on to the client."""
        self._engine.request("POST", self.path, body, dict(self.headers.items()))
        response = self._engine.getresponse()
        answer = (response.status, response.read())
        if self.server.proxy.on_answer is not None:
            self.server.proxy.on_answer(seen, *answer)
        hop_by_hop = ("content-length", "connection", "transfer-encoding", "keep-alive")
        headers = {name: value for name, value in response.headers.items() if name.lower() not in hop_by_hop}
        return answer, headers

    def _break(self, *, resets: bool) -> None:
        self.close_connection = True
        if resets:
            # With a linger time of 0, close() sends RST. Without detach(), the server would send FIN first.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(self.connection.detach())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Write no access log."""


def _seen(target: str, params: dict[str, Any]) -> Seen:
    action = target.rpartition(".")[2]
    key = params.get("Key", {}).get("key", {}).get("S")
    what = _what(params["UpdateExpression"]) if action == "UpdateItem" else action
    return Seen(action, what, key, time.monotonic(), params)


def _what(update: str) -> str:
    """Classify a write of a lock by its update expression."""
    for part, what in (
        ("#token =", "acquire"),
        ("#draining =", "drain"),
        ("#processes.#process =", "enter"),
        ("REMOVE #holders.#me.#processes.#process", "leave"),
        ("#available =", "release"),
    ):
        if part in update:
            return what
    return "heartbeat"
