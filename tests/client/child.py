"""A holder in a process of its own, to be stopped and killed.

``python -m tests.client.child`` is the process: it does what it is told on its standard input, one line of JSON each,
and tells what came of it, and what happened to it, on its standard output. `Child` is its face in the tests.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any, Self

from airflow_dynamo_lock import Lease, LockClient, LockError, LockLostError
from airflow_dynamo_lock.core.effects import Operation
from airflow_dynamo_lock.core.model.record import QueuePosition
from deployments.clients import async_lock_client, lock_client
from deployments.patience import PATIENCE


class Child:
    """A process with a client of its own, for the length of a ``with`` block."""

    def __init__(self, kind: str, endpoint_url: str, *, wall_clock_off: float = 0.0, **options: Any) -> None:
        self._settings = [kind, endpoint_url, wall_clock_off, options]

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, json.dumps(self._settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines: SimpleQueue[str] = SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe
            pipe.close()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def tell(self, do: str, **options: Any) -> None:
        """Have it do something, without waiting for it."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps([do, options]) + "\n")
        self.process.stdin.flush()

    def do(self, do: str, **options: Any) -> Any:
        """Have it do something, and say what came of it: a value, or the name of the error."""
        self.tell(do, **options)
        return self.hear(do)

    def hear(self, what: str) -> Any:
        """Return the value of its next report, which must be about `what`."""
        try:
            line = self._lines.get(timeout=PATIENCE)
        except Empty:
            raise AssertionError(
                f"The child process has not reported {what!r} within {PATIENCE:g} s."
            ) from None
        assert line, f"The child process ended before it reported {what!r}."
        about, value = json.loads(line)
        assert about == what, f"The child process reported {about!r}, not {what!r}: {value}"
        return value

    def kill(self) -> float:
        """Kill it hard; the moment after which it certainly does nothing."""
        self.process.kill()
        self.process.wait()
        return time.monotonic()

    def stop(self) -> None:
        """Stop it in whatever it does, as a paused machine is stopped."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        """Let it go on, unaware."""
        self.process.send_signal(signal.SIGCONT)


# What has been told already.
_ANSWERED = object()


class _Doer:
    """What runs in the child."""

    def __init__(self, client: LockClient) -> None:
        self._client = client
        self._blocks = ExitStack()
        self._lease: Lease | None = None

    def take(self, key: str, **options: Any) -> dict[str, Any] | None:
        """Take the lock, with no heartbeats."""
        self._lease = self._client.try_acquire(key, **options)
        return self._lease.as_dict() if self._lease else None

    def enter_block(self, key: str, **options: Any) -> dict[str, Any]:
        """Enter a with block, with background heartbeats."""
        self._lease = self._blocks.enter_context(self._client.lock(key, on_lost=self._on_lost, **options))
        return self._lease.as_dict()

    def leave_block(self) -> None:
        """Leave it."""
        self._blocks.close()

    def check(self) -> float:
        """What is left of the lease."""
        assert self._lease
        self._lease.check()
        return self._lease.remaining()

    def renew(self) -> None:
        """Send a heartbeat, as one who does not know what time has passed."""
        assert self._lease
        self._client.renew(replace(self._lease, term=None))

    def release(self) -> bool:
        """Release the lease."""
        assert self._lease
        return bool(self._client.release(self._lease))

    def acquire(self, key: str, **options: Any) -> str:
        """Take the lock, and tell as soon as there is a place in the queue. The name of its owner."""
        waiting = SimpleQueue[object]()

        def on_position(standing: QueuePosition) -> None:
            if waiting.empty():
                waiting.put(standing)
                _tell("waiting", os.getpid())

        self._lease = self._client.acquire(key, on_position=on_position, **options)
        return self._lease.owner

    def enter(self) -> None:
        """Enter the lease, as one process of many."""
        assert self._lease
        self._lease = self._client.enter(self._lease, "process")

    def leave(self) -> None:
        """Leave it."""
        assert self._lease
        self._client.leave(self._lease, "process")

    def wait_in_thread(self, key: str) -> None:
        """Wait for the lock in another thread, and return once it has a place in the queue."""
        waiting = threading.Event()
        options: dict[str, Any] = {"on_position": lambda _: waiting.set(), "poll_interval": 0.1}
        threading.Thread(target=self._client.acquire, args=(key,), kwargs=options, daemon=True).start()
        waiting.wait()

    def join_threads(self) -> None:
        """Wait until the client's own threads have ended."""
        for thread in threading.enumerate():
            if thread.name.startswith("dynamo-lock"):
                thread.join()

    def connections(self, key: str) -> list[list[Any]]:
        """Both ends of the connections over which it has just asked for that lock."""
        self._client.get(key)
        session: Any = self._client._client._endpoint.http_session
        pools = session._manager.pools
        queues = [pools[name].pool.queue for name in pools.keys()]  # noqa: SIM118 - it is no dict
        found = [each for queue in queues for each in list(queue) if each and each.sock]
        return [[each.sock.getsockname(), each.sock.getpeername()] for each in found]

    def close(self) -> None:
        """Stop all heartbeats, and release what they were sent for."""
        self._client.close(release=True)

    def fork(self, what: str, about: str, **options: Any) -> object:
        """Fork. The child tells its process id, does something, and tells what came of it."""
        if os.fork():
            return _ANSWERED
        try:
            _tell("fork", os.getpid())
            _tell(about, getattr(self, what)(**options))
        except BaseException as failure:
            _tell(about, type(failure).__name__)
        finally:
            os._exit(0)

    def fork_in_block(self, ending: str) -> int:
        """Fork in the block. The child leaves it in that way. Returns how the child ended."""
        if pid := os.fork():
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        try:
            with self._blocks:
                _end(ending)
        finally:
            os._exit(0)

    def fork_in_async_block(self, endpoint_url: str, key: str, ending: str) -> None:
        """The same in a coroutine. The process ends there: a fork spoils the event loop of its parent."""

        async def block() -> None:
            async with async_lock_client(endpoint_url) as client, client.lock(key):
                if pid := os.fork():
                    os.waitpid(pid, 0)  # noqa: ASYNC222 - nothing else is to happen
                    _tell("fork_in_async_block", None)
                    os._exit(0)
                _end(ending)

        try:
            asyncio.run(block())
        finally:
            os._exit(0)

    def fork_in_operation(self, key: str) -> None:
        """Fork where an operation calls back. What it does in the child to clean up is not the child's to do."""
        core = self._client._core

        def operation() -> Operation[None]:
            try:
                if os.fork() == 0:
                    raise SystemExit
                _, status = os.wait()
                assert status == 0
            finally:
                if os.getpid() != parent:
                    for each in (yield from core.queue.reader.waiters(key)):
                        yield core.format.delete_entry(key, each.place)

        parent = os.getpid()
        try:
            self._client._run(operation())
        finally:
            if os.getpid() != parent:
                os._exit(0)

    def _on_lost(self, lease: Lease, lost: LockLostError) -> None:
        _tell("lost", str(lost))


def _end(ending: str) -> None:
    if ending == "sys.exit":
        sys.exit(7)
    if ending == "exception":
        raise ZeroDivisionError


def _tell(about: str, value: Any) -> None:
    print(json.dumps([about, value]), flush=True)


def main() -> None:
    kind, endpoint_url, wall_clock_off, options = json.loads(sys.argv[1])
    right_ns, right = time.time_ns, time.time
    time.time_ns = lambda: right_ns() + int(wall_clock_off * 1e9)
    time.time = lambda: right() + wall_clock_off
    with lock_client(kind, endpoint_url, **options) as client:
        doer = _Doer(client)
        for line in sys.stdin:
            do, arguments = json.loads(line)
            try:
                value = getattr(doer, do)(**arguments)
            except LockError as failure:
                value = type(failure).__name__
            if value is not _ANSWERED:
                _tell(do, value)
    os._exit(0)


if __name__ == "__main__":
    main()
