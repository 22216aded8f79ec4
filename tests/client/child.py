"""A process with a lock client of its own, which a test can stop and kill.

``python -m tests.client.child`` is the process. It reads commands from its standard input, one line of JSON each. To
its standard output it writes their results, and events such as a lost lease. `Child` starts and controls it.
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
    """A process with a client of its own. It runs during a ``with`` block."""

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

    def send(self, do: str, **options: Any) -> None:
        """Send a command, without waiting for its result."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps([do, options]) + "\n")
        self.process.stdin.flush()

    def do(self, do: str, **options: Any) -> Any:
        """Send a command, and return its result, or the name of its error."""
        self.send(do, **options)
        return self.receive(do)

    def receive(self, what: str) -> Any:
        """Wait for the next report, which must be about `what`, and return its value."""
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
        """Kill the process. Returns a time after which it certainly does nothing."""
        self.process.kill()
        self.process.wait()
        return time.monotonic()

    def stop(self) -> None:
        """Stop the process at any point, as if its machine were paused."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        """Continue the process after `stop`."""
        self.process.send_signal(signal.SIGCONT)


# Result of a command that has sent its report already.
_REPORTED = object()


class _Commands:
    """The commands, as they run in the child process."""

    def __init__(self, client: LockClient) -> None:
        self._client = client
        self._blocks = ExitStack()
        self._lease: Lease | None = None

    def take(self, key: str, **options: Any) -> dict[str, Any] | None:
        """Acquire the lock, without heartbeats."""
        self._lease = self._client.try_acquire(key, **options)
        return self._lease.as_dict() if self._lease else None

    def enter_block(self, key: str, **options: Any) -> dict[str, Any]:
        """Enter a ``with`` block, with background heartbeats."""
        self._lease = self._blocks.enter_context(self._client.lock(key, on_lost=self._on_lost, **options))
        return self._lease.as_dict()

    def leave_block(self) -> None:
        """Leave the block."""
        self._blocks.close()

    def check(self) -> float:
        """Check the lease, and return its remaining seconds."""
        assert self._lease
        self._lease.check()
        return self._lease.remaining()

    def renew(self) -> None:
        """Send a heartbeat, as a client that does not know how much time has passed."""
        assert self._lease
        self._client.renew(replace(self._lease, term=None))

    def release(self) -> bool:
        """Release the lease."""
        assert self._lease
        return bool(self._client.release(self._lease))

    def acquire(self, key: str, **options: Any) -> str:
        """Wait for the lock, and return its owner. Reports ``waiting`` once it is queued."""
        waiting = SimpleQueue[object]()

        def on_position(position: QueuePosition) -> None:
            if waiting.empty():
                waiting.put(position)
                _report("waiting", os.getpid())

        self._lease = self._client.acquire(key, on_position=on_position, **options)
        return self._lease.owner

    def enter(self) -> None:
        """Enter the lease, as a process named ``process``."""
        assert self._lease
        self._lease = self._client.enter(self._lease, "process")

    def leave(self) -> None:
        """Leave the lease."""
        assert self._lease
        self._client.leave(self._lease, "process")

    def wait_in_thread(self, key: str) -> None:
        """Wait for the lock in another thread. Returns once the waiter is queued."""
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
        """Read the lock, and return both ends of the client's connections."""
        self._client.get(key)
        session: Any = self._client._client._endpoint.http_session
        pools = session._manager.pools
        queues = [pools[name].pool.queue for name in pools.keys()]  # noqa: SIM118 - it is no dict
        found = [each for queue in queues for each in list(queue) if each and each.sock]
        return [[each.sock.getsockname(), each.sock.getpeername()] for each in found]

    def close(self) -> None:
        """Close the client: stop all heartbeats, and release their leases."""
        self._client.close(release=True)

    def fork(self, what: str, about: str, **options: Any) -> object:
        """Fork. The fork reports its process id, runs the command `what`, and reports its result as `about`."""
        if os.fork():
            return _REPORTED
        try:
            _report("fork", os.getpid())
            _report(about, getattr(self, what)(**options))
        except BaseException as failure:
            _report(about, type(failure).__name__)
        finally:
            os._exit(0)

    def fork_in_block(self, ending: str) -> int:
        """Fork in the block. The fork leaves it by `ending`. Returns the exit code of the fork."""
        if pid := os.fork():
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        try:
            with self._blocks:
                _end(ending)
        finally:
            os._exit(0)

    def fork_in_async_block(self, endpoint_url: str, key: str, ending: str) -> None:
        """Do the same in a coroutine. This process then exits: a fork spoils the event loop of its parent."""

        async def block() -> None:
            async with async_lock_client(endpoint_url) as client, client.lock(key):
                if pid := os.fork():
                    os.waitpid(pid, 0)  # noqa: ASYNC222 - nothing else must run
                    _report("fork_in_async_block", None)
                    os._exit(0)
                _end(ending)

        try:
            asyncio.run(block())
        finally:
            os._exit(0)

    def fork_in_operation(self, key: str) -> None:
        """Fork inside an operation. The fork must not run the cleanup of its parent's operation."""
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
        _report("lost", str(lost))


def _end(ending: str) -> None:
    if ending == "sys.exit":
        sys.exit(7)
    if ending == "exception":
        raise ZeroDivisionError


def _report(about: str, value: Any) -> None:
    print(json.dumps([about, value]), flush=True)


def main() -> None:
    kind, endpoint_url, wall_clock_off, options = json.loads(sys.argv[1])
    right_ns, right = time.time_ns, time.time
    time.time_ns = lambda: right_ns() + int(wall_clock_off * 1e9)
    time.time = lambda: right() + wall_clock_off
    with lock_client(kind, endpoint_url, **options) as client:
        commands = _Commands(client)
        for line in sys.stdin:
            do, arguments = json.loads(line)
            try:
                value = getattr(commands, do)(**arguments)
            except LockError as failure:
                value = type(failure).__name__
            if value is not _REPORTED:
                _report(do, value)
    os._exit(0)


if __name__ == "__main__":
    main()
