"""When a kernel ends, in whatever way, its lock is released at once and no process of it is left."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from airflow_dynamo_lock import LockClient
from deployments.kernels import BODIES, ENDS, Kernel
from deployments.patience import wait_until
from tests.notebook.conftest import is_free

pytestmark = pytest.mark.proof

#: A lease that is longer than a test waits, so a lock that is free was released.
LONG = "--lease-duration 600s"


def holders() -> list[psutil.Process]:
    """Return the holder processes of this user's kernels."""
    found = []
    for each in psutil.process_iter(["cmdline", "status"]):
        if "airflow_dynamo_lock.notebook.holder" in (each.info["cmdline"] or []):
            found.append(each)
    return found


def hold(kernel: Kernel, key: str, body: str, lease: str = LONG) -> psutil.Process:
    """Let a cell of the kernel hold the lock, and return its holder process."""
    kernel.run("%load_ext airflow_dynamo_lock")
    cell = kernel.start(f"%%dynamo_lock '{key}' {lease}\n{body}")
    kernel.read(cell, until="Held since")
    (holder,) = [each for each in holders() if each.ppid() == kernel.pid]
    return holder


def heartbeat(locks: LockClient, key: str) -> list[str]:
    """Return the versions of the holders, which change with each heartbeat."""
    record = locks.get(key)
    return [each.version for each in record.holders.values()] if record is not None else []


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("end", ENDS)
def test_the_lock_of_a_kernel_that_ends_is_released(
    environment: dict[str, str], locks: LockClient, key: str, end: str, body: str
) -> None:
    with Kernel(environment) as kernel:
        holder = hold(kernel, key, BODIES[body])
        ENDS[end](kernel)
        locks.release(locks.acquire(key, timeout=100))
        wait_until(lambda: not holder.is_running() or holder.status() == psutil.STATUS_ZOMBIE)


def test_the_lock_of_a_kernel_that_exits_by_itself_is_released(
    environment: dict[str, str], locks: LockClient, key: str
) -> None:
    with Kernel(environment) as kernel:
        kernel.run("%load_ext airflow_dynamo_lock")
        kernel.start(f"%%dynamo_lock '{key}' {LONG}\nimport os\nos._exit(1)")
        wait_until(lambda: locks.get(key), "the cell has not acquired the lock")
        locks.release(locks.acquire(key, timeout=100))


def test_a_kernel_that_ends_leaves_the_queue(
    environment: dict[str, str], locks: LockClient, key: str
) -> None:
    lease = locks.acquire(key)
    with Kernel(environment) as kernel:
        kernel.run("%load_ext airflow_dynamo_lock")
        kernel.read(kernel.start(f"%%dynamo_lock '{key}'\n1"), until="1st of 1")
        os.kill(kernel.pid, signal.SIGKILL)
        wait_until(lambda: not locks.waiters(key), "the waiter is still in the queue")
    locks.release(lease)


def test_the_lock_stays_held_while_a_forked_child_lives(
    environment: dict[str, str], locks: LockClient, key: str, tmp_path: Path
) -> None:
    """The child inherits the pipe to the holder process, which sends heartbeats until the child ends too."""
    child = tmp_path / "child"
    body = (
        "import os, time\n"
        "if not os.fork():\n"
        f"    open({str(child)!r}, 'w').write(str(os.getpid()))\n"
        "    time.sleep(1000)\n"
        f"{BODIES['a sleep']}"
    )
    with Kernel(environment) as kernel:
        hold(kernel, key, body, "--lease-duration 12s")
        wait_until(lambda: child.exists() and child.read_text())
        os.kill(kernel.pid, signal.SIGKILL)
        wait_until(lambda: not kernel.manager.is_alive())
        before = heartbeat(locks, key)
        wait_until(lambda: heartbeat(locks, key) != before)
        assert not is_free(locks, key)
        os.kill(int(child.read_text()), signal.SIGKILL)
        locks.release(locks.acquire(key, timeout=100))


def test_the_lock_stays_held_while_another_process_of_the_kernel_lives(
    environment: dict[str, str], locks: LockClient, key: str, tmp_path: Path
) -> None:
    """That process may use the locked resource, so the lease runs out as if the machine had died."""
    child = tmp_path / "child"
    body = (
        "import subprocess\n"
        "running = subprocess.Popen(['sleep', '1000'])\n"
        f"open({str(child)!r}, 'w').write(str(running.pid))\n{BODIES['a sleep']}"
    )
    with Kernel(environment) as kernel:
        holder = hold(kernel, key, body)
        wait_until(lambda: child.exists() and child.read_text())
        os.kill(kernel.pid, signal.SIGKILL)
        wait_until(lambda: not holder.is_running() or holder.status() == psutil.STATUS_ZOMBIE)
        assert not is_free(locks, key)
        os.kill(int(child.read_text()), signal.SIGKILL)
    record = locks.get(key)
    assert record is not None
    locks.break_lock(key, next(iter(record.holders)))
