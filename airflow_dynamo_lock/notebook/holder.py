"""The holder process: it waits for a lock, sends heartbeats and releases, on behalf of one cell of a notebook.

It reads a `Request` from stdin, one line of JSON, and writes events to stdout, each a line of JSON. When stdin has
another line, the cell has ended, and the process leaves the queue or releases the lock. When stdin ends, the kernel has
ended, however that happened: the process does the same, unless other processes of the kernel still run. These may use
the locked resource, so then the lease runs out, as if the whole machine had died.

Heartbeats are sent while C code in the kernel holds Python's global lock, and while a debugger stops the kernel.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from airflow_dynamo_lock.cli.locks import CLAIM
from airflow_dynamo_lock.cli.options import settings_from
from airflow_dynamo_lock.client.clock import monotonic
from airflow_dynamo_lock.client.held import held_around, with_leases
from airflow_dynamo_lock.client.leases import leases_of
from airflow_dynamo_lock.client.sync_client import LockClient
from airflow_dynamo_lock.core.model import errors
from airflow_dynamo_lock.core.model.arguments import checked_mode
from airflow_dynamo_lock.core.model.claim import LockSpec
from airflow_dynamo_lock.core.model.errors import LockError, LockValueError
from airflow_dynamo_lock.core.model.lease import Lease
from airflow_dynamo_lock.core.model.limits import HEARTBEATS_PER_GRACE, SHARED
from airflow_dynamo_lock.core.model.outcomes import Lost
from airflow_dynamo_lock.core.model.record import LockRecord
from airflow_dynamo_lock.notebook.options import cell_options, parse

# Seconds between two looks at the lease, to report its heartbeats.
_LOOK_EVERY = 1.0
# Maximum time in seconds from the end of stdin to the end of the kernel's processes, if these end with the kernel.
_KERNEL_ENDS_WITHIN = 1.0
#: Maximum time in seconds to retry a release that DynamoDB does not answer, after the end of the cell.
RELEASE_FOR = 20.0


@dataclass(frozen=True)
class Request:
    """What a kernel asks of a holder process.

    :ivar arguments: the arguments of the magic.
    :ivar group: id of the kernel's process group.
    """

    arguments: list[str]
    group: int

    def line(self) -> bytes:
        """The request as the process reads it."""
        return json.dumps(asdict(self)).encode() + b"\n"


class _CellEnded(BaseException):
    """Ends the wait for the lock, because the cell or the kernel has ended."""


class _Holder:
    """Acquires one lock, and keeps the lease until the cell has ended.

    :param emit: sends an event to the kernel.
    """

    def __init__(self, request: Request, emit: Callable[..., None]) -> None:
        self._request = request
        self._emit = emit
        self._waits = False
        self._ended = threading.Event()
        self._released_by_cell = False

    def cell_ended(self, *, orderly: bool) -> None:
        """Release the lock, or leave the queue.

        :param orderly: the kernel lives, so no code of the cell is still running.
        """
        self._released_by_cell = orderly
        self._ended.set()
        os.kill(os.getpid(), signal.SIGTERM)  # wakes the main thread if it waits

    def interrupted(self, *_: object) -> None:
        """Handle SIGTERM: end the wait for the lock."""
        if self._waits and self._ended.is_set():
            self._waits = False
            raise _CellEnded

    def hold(self) -> None:
        """Acquire the lock, hold it until the cell has ended, and release it.

        :raises LockError: the lock could not be acquired.
        """
        options = parse(cell_options, self._request.arguments)
        where, others = settings_from(options)
        claim = {name: others[name] for name in CLAIM}
        locks = where.locks(lease=others["lease_duration"])
        key: str = others["key"]
        around = held_around(locks)
        outer = next((each for each in around if each.key == key), None)
        if outer is not None:
            self._join(locks, outer, claim)
            return
        lease: Lease | None = None
        try:
            self._waits = True
            lease = locks.acquire(
                key,
                timeout=0 if others["no_wait"] else others["wait_time"],
                on_busy=self._report_busy(),
                on_position=lambda position: self._emit("position", text=position.describe()),
                holding=around,
                **claim,
            )
            self._waits = False
        except _CellEnded:
            if lease is None:
                return
        self._keep(locks, lease, None)
        if self._may_release():
            outcome = locks.release(lease, retry_for=min(RELEASE_FOR, lease.remaining()))
            self._emit("released", lost=outcome.describe() if isinstance(outcome, Lost) else None)

    def _join(self, locks: LockClient, outer: Lease, claim: dict[str, Any]) -> None:
        """Work under the lease of a process around the kernel, as a process inside (R8)."""
        spec = LockSpec.of(claim)
        asked, granted = checked_mode(spec.mode, spec.slots, spec.capacity), (outer.slots, outer.capacity)
        if asked != granted:
            raise LockValueError(
                f"The lock {outer.key!r} is held for this notebook already, {_described(*granted)}; the cell asks for "
                f"it {_described(*asked)}: ask for the same."
            )
        process = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        entered = locks.enter(outer, process)
        self._keep(locks, entered, entered.lease_ms / 1000 / HEARTBEATS_PER_GRACE)
        if self._may_release():
            outcome = locks.leave(entered, process)
            self._emit("released", lost=outcome.describe() if isinstance(outcome, Lost) else None)

    def _keep(self, locks: LockClient, lease: Lease, interval: float | None) -> None:
        """Send heartbeats until the cell has ended, and report them."""
        term = lease.term
        assert term is not None
        self._emit(
            "granted",
            lease=lease.as_dict(),
            until=term.until,
            held=with_leases(locks, leases_of(lease)),
        )
        with locks.keep_alive(lease, interval=interval):
            until = term.until
            while not self._ended.wait(_LOOK_EVERY):
                if term.lost:
                    self._emit("lost", why=term.lost)
                    self._ended.wait()
                elif term.until != until:
                    until = term.until
                    self._emit("renewed", until=until)

    def _may_release(self) -> bool:
        """Whether no code of the kernel can still work under the lease."""
        if self._released_by_cell:
            return True
        # A process closes its files, which ends stdin here, a moment before it has ended.
        deadline = monotonic() + _KERNEL_ENDS_WITHIN
        while _has_processes(self._request.group):
            if monotonic() >= deadline:
                return False
            time.sleep(_KERNEL_ENDS_WITHIN / 50)
        return True

    def _report_busy(self) -> Callable[[LockRecord], None]:
        reported = ""

        def report(record: LockRecord) -> None:
            nonlocal reported
            if (text := record.describe()) != reported:
                reported = text
                self._emit("busy", text=text)

        return report


def _described(slots: int, capacity: int) -> str:
    """What a claim takes of its lock."""
    return "in shared mode" if capacity == SHARED else f"with {slots} of {capacity} slots"


def _has_processes(group: int) -> bool:
    """Whether a process of the group is alive. A zombie is not."""
    proc = Path("/proc")
    if not (proc / "self" / "stat").exists():  # not Linux
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True
    for each in proc.glob("[0-9]*/stat"):
        try:
            state, _parent, its_group = each.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # it has ended
            continue
        if int(its_group) == group and state not in "ZX":
            return True
    return False


class _Events(logging.Handler):
    """Writes events, and warnings as events, to the stdout that this process was started with."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        # What Airflow or a plugin prints to stdout must not come between the events.
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._writing = threading.RLock()

    def send(self, event: str, **values: Any) -> None:
        """Write an event. If the kernel has ended, nobody reads it."""
        try:
            with self._writing:
                self._out.write(json.dumps({"event": event, **values}) + "\n")
        except (BrokenPipeError, ValueError):
            return

    def emit(self, record: logging.LogRecord) -> None:
        """Send a warning."""
        self.send("warning", text=record.getMessage())


def main() -> None:
    """Serve one request, and end."""
    events = _Events()
    logging.getLogger("airflow_dynamo_lock").addHandler(events)
    line = sys.stdin.buffer.readline()
    if not line:
        return
    holder = _Holder(Request(**json.loads(line)), events.send)
    signal.signal(signal.SIGTERM, holder.interrupted)

    def follow() -> None:
        holder.cell_ended(orderly=bool(sys.stdin.buffer.readline()))

    threading.Thread(target=follow, name="dynamo-lock cell", daemon=True).start()
    try:
        holder.hold()
    except LockError as failure:
        # The most special of the public classes.
        kind = next(each.__name__ for each in type(failure).__mro__ if hasattr(errors, each.__name__))
        events.send("failed", error=kind, text=str(failure))
    except click.ClickException as wrong:
        events.send("failed", error=LockValueError.__name__, text=wrong.format_message())
    except Exception as failure:
        events.send("failed", error=LockError.__name__, text=f"{type(failure).__name__}: {failure}")


if __name__ == "__main__":
    main()
