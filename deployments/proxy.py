"""A proxy between a client and an engine: it sees every request that goes over the wire, the SDK's own retries too, and
can do to any of them what networks and servers do.
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
    """One request on the wire.

    :ivar action: the API action, e.g. ``UpdateItem``.
    :ivar what: what it means to a lock: ``acquire``, ``heartbeat``, ``release``…; the action where it is no write.
    :ivar key: the lock; None where it is about several or none.
    :ivar at: when it came, monotonic seconds.
    :ivar params: all that it says.
    """

    action: str
    what: str
    key: str | None
    at: float
    params: Mapping[str, Any] = field(repr=False)


Matches = Callable[[Seen], bool]
#: Told what the engine answered to a request: the status and the body.
OnAnswer = Callable[[Seen, int, bytes], None]


@dataclass
class Rule:
    """What happens to the requests that it is about, for as long as it is in force.

    :ivar forward: they reach the engine,
    :ivar late: but only when the rule is over.
    :ivar delay: they take so many seconds on their way to the engine,
    :ivar lag: and the answers so many on the way back.
    :ivar in_turn: one after the other, whether or not their clients still wait for them.
    :ivar reply: what the client gets instead of the engine's answer; None for a broken connection.
    :ivar resets: a connection that breaks is reset (TCP's RST), not closed.
    :ivar tears: the connection breaks in the middle of the answer.
    :ivar hits: how many requests it has met.
    :ivar landed: set when the engine has carried one out.
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
    _lane: threading.Lock = field(default_factory=threading.Lock)

    def stop_on_the_way(self) -> None:
        """What a request does between the client and the engine."""
        if self.late:
            self.over.wait()
        with self._lane if self.in_turn else nullcontext():
            self.over.wait(self.delay)

    def hold(self) -> None:
        """A reply that does not come before the rule is over, and then is a broken connection."""
        self.over.wait()


class Proxy:
    """Stands before the engine at `target` for the length of a ``with`` block.

    :param on_answer: told of each answer of the engine, before the client gets it, or does not.
    :ivar seen: every request, in the order in which they came.
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

    # -- what was seen ----------------------------------------------------------------------------------------

    def whats(self) -> list[str]:
        """What the requests were about, in order."""
        return [request.what for request in self.seen]

    def wait_for(self, count: int, what: str, *, within: float = PATIENCE) -> None:
        """Wait until so many requests of that kind have come."""
        with self._changed:
            came = self._changed.wait_for(lambda: self.whats().count(what) >= count, within)
        assert came, f"{count} × {what} did not come within {within:g} s, only {self.whats()}"

    # -- what happens to requests -----------------------------------------------------------------------------

    @contextmanager
    def losing_replies(self, what: str, *, times: float = 1) -> Iterator[Rule]:
        """The engine carries the request out, and the connection breaks before its answer."""
        with self.applying(Rule(lambda seen: seen.what == what, reply=lambda: None, times=times)) as rule:
            yield rule

    @contextmanager
    def breaking(self, matches: Matches = lambda _: True) -> Iterator[Rule]:
        """The connection breaks before the request reaches the engine."""
        with self.applying(Rule(matches, forward=False, reply=lambda: None)) as rule:
            yield rule

    @contextmanager
    def hanging(self, matches: Matches) -> Iterator[Rule]:
        """The request disappears in a black hole: nothing is answered until this is over."""
        with self.applying(Rule(matches, forward=False)) as rule:
            rule.reply = rule.hold
            yield rule

    @contextmanager
    def delaying(self, what: str) -> Iterator[Rule]:
        """The first such request is stuck in the network, and reaches the engine when this is over."""
        rule = Rule(lambda seen: seen.what == what, late=True, times=1)
        with self.applying(rule):
            yield rule
        assert rule.landed.wait(PATIENCE)

    @contextmanager
    def answering(self, matches: Matches, status: int, code: str, message: str = "") -> Iterator[Rule]:
        """Requests get that error for an answer, and do not reach the engine."""
        body = {"__type": f"com.amazonaws.dynamodb.v20120810#{code}", "message": message}
        answer = (status, json.dumps(body).encode())
        with self.applying(Rule(matches, forward=False, reply=lambda: answer)) as rule:
            yield rule

    @contextmanager
    def applying(self, rule: Rule) -> Iterator[Rule]:
        """Any other rule, for as long as the block lasts."""
        self._rules.append(rule)
        try:
            yield rule
        finally:
            self._rules.remove(rule)
            rule.over.set()

    def note(self, seen: Seen) -> Rule | None:
        """Take in a request, and say which rule it meets."""
        with self._changed:
            self.seen.append(seen)
            met = next((rule for rule in self._rules if rule.hits < rule.times and rule.matches(seen)), None)
            if met is not None:
                met.hits += 1
            self._changed.notify_all()
        return met


class _Server(ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, address: tuple[str, int], proxy: Proxy) -> None:
        super().__init__(address, _Connection)
        self.proxy = proxy


class _Connection(BaseHTTPRequestHandler):
    """One connection of a client, and one to the engine for it."""

    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self._engine = HTTPConnection(self.server.proxy.target)

    def handle(self) -> None:
        with suppress(ConnectionError, HTTPException):  # the client's, or the engine's
            super().handle()

    def finish(self) -> None:
        self._engine.close()
        with suppress(ConnectionError):
            super().finish()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        seen = _seen(self.headers.get("X-Amz-Target", ""), json.loads(body))
        rule = self.server.proxy.note(seen)
        answer: tuple[int, bytes] | None = None
        headers: dict[str, str] = {"Content-Type": "application/x-amz-json-1.0"}
        if rule is not None:
            rule.stop_on_the_way()
        if rule is None or rule.forward:
            self._engine.request("POST", self.path, body, dict(self.headers.items()))
            response = self._engine.getresponse()
            answer = (response.status, response.read())
            if self.server.proxy.on_answer is not None:
                self.server.proxy.on_answer(seen, *answer)
            hop_by_hop = ("content-length", "connection", "transfer-encoding", "keep-alive")
            headers = {
                name: value for name, value in response.headers.items() if name.lower() not in hop_by_hop
            }
        if rule is not None:
            rule.landed.set()
        if rule is not None and rule.lag:
            rule.over.wait(rule.lag)
        if rule is not None and rule.reply is not None:
            answer = rule.reply()
        if answer is None:
            self._break(resets=rule is not None and rule.resets)
            return
        self.send_response_only(answer[0])
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer[1])))
        self.end_headers()
        if rule is not None and rule.tears:
            self.wfile.write(answer[1][: len(answer[1]) // 2])
            self._break(resets=rule.resets)
            return
        self.wfile.write(answer[1])

    def _break(self, *, resets: bool) -> None:
        self.close_connection = True
        if resets:
            # Closed with nothing to linger for, and by its number: the server would end it in good order.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(self.connection.detach())

    def log_message(self, format: str, *args: object) -> None:
        """No access log."""


def _seen(target: str, params: dict[str, Any]) -> Seen:
    action = target.rpartition(".")[2]
    key = params.get("Key", {}).get("key", {}).get("S")
    what = _what(params["UpdateExpression"]) if action == "UpdateItem" else action
    return Seen(action, what, key, time.monotonic(), params)


def _what(update: str) -> str:
    for part, what in (
        ("#token =", "acquire"),
        ("#draining =", "abandon"),
        ("#processes.#process =", "enter"),
        ("REMOVE #holders.#me.#processes.#process", "leave"),
        ("#available =", "release"),
    ):
        if part in update:
            return what
    return "heartbeat"
