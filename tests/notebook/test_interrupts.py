"""An interrupt and the loss of the lease end a locked cell before its code does."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from airflow_dynamo_lock import LockClient
from deployments.kernels import Cell, Kernel
from deployments.patience import wait_until
from tests.notebook.conftest import is_free, wait_until_free

pytestmark = pytest.mark.proof

#: Bodies that go on for ever. `work()` writes the time to a file.
ENDLESS = {
    "a loop": "while True:\n    work()",
    "a sleep": "work()\ntime.sleep(1000)",
    "a blocking call": "import socket\nfirst, second = socket.socketpair()\nwork()\nfirst.recv(1)",
    "a loop that catches errors": (
        "while True:\n    try:\n        work()\n        time.sleep(1000)\n    except Exception:\n        pass"
    ),
    "a subprocess": "import subprocess\nwork()\nsubprocess.run(['sleep', '1000'])",
    "an await": "work()\nawait asyncio.sleep(1000)",
    "an awaiting loop": "while True:\n    work()\n    await asyncio.sleep(0.01)",
    "blocking code in a cell that awaits": "await asyncio.sleep(0)\nwork()\ntime.sleep(1000)",
}
#: Code of a cell that finds its holder process.
FIND_HOLDER = """import os, psutil, signal
holder, = (
    each.pid for each in psutil.Process().children()
    if each.status() != psutil.STATUS_ZOMBIE and "airflow_dynamo_lock.notebook.holder" in each.cmdline()
)
"""
SYNC, AWAITING = "a sleep", "an await"


@pytest.fixture
def log(kernel: Kernel, tmp_path: Path) -> Path:
    """The file to which `work()` writes in the kernel."""
    path = tmp_path / "log"
    path.touch()
    kernel.run(
        "import asyncio, time\n"
        f"log = open({str(path)!r}, 'a', buffering=1)\n"
        "def work():\n    print(time.time(), file=log)\n"
    )
    return path


def handlers(kernel: Kernel) -> str:
    """Return the signal handlers of the kernel, and the numbers of its cell transformers."""
    code = (
        "import signal\n"
        "print([signal.getsignal(each) for each in (2, 10, 12, 14, 15)], "
        "len(get_ipython().input_transformers_cleanup), len(get_ipython().input_transformers_post))"
    )
    return kernel.run(code).streamed


def start(kernel: Kernel, key: str, body: str, log: Path, options: str = "") -> Cell:
    """Start a locked cell, and wait until its body works."""
    cell = kernel.start(f"%%dynamo_lock '{key}' {options}\n{ENDLESS[body]}")
    wait_until(lambda: log.stat().st_size)
    return cell


def assert_usable(kernel: Kernel, locks: LockClient, key: str, before: str) -> None:
    """Check that the lock is free, and that the kernel is as it was before the cell."""
    assert is_free(locks, key)
    assert handlers(kernel) == before
    assert kernel.run("%%dynamo_lock 'other'\n1 + 1").outputs[-1]["text"] == "2"


@pytest.mark.parametrize("body", ENDLESS)
@pytest.mark.parametrize("times", [1, 40])
def test_an_interrupt_ends_a_working_cell(
    kernel: Kernel, locks: LockClient, key: str, log: Path, body: str, times: int
) -> None:
    before = handlers(kernel)
    cell = start(kernel, key, body, log)
    for _ in range(times):
        kernel.interrupt()
    kernel.read(cell)

    assert cell.error in ("KeyboardInterrupt", "CancelledError")
    assert_usable(kernel, locks, key, before)


@pytest.mark.parametrize("body", [SYNC, AWAITING])
@pytest.mark.parametrize("times", [1, 40])
def test_an_interrupt_ends_the_wait_and_leaves_the_queue(
    kernel: Kernel, locks: LockClient, key: str, log: Path, body: str, times: int
) -> None:
    before = handlers(kernel)
    lease = locks.acquire(key)
    cell = kernel.start(f"%%dynamo_lock '{key}'\n{ENDLESS[body]}")
    kernel.read(cell, until="1st of 1")
    for _ in range(times):
        kernel.interrupt()
    kernel.read(cell)

    assert cell.error in ("KeyboardInterrupt", "CancelledError")
    assert locks.waiters(key) == []
    assert log.stat().st_size == 0
    locks.release(lease)
    assert_usable(kernel, locks, key, before)


@pytest.mark.parametrize("times", [1, 40])
@pytest.mark.parametrize("awaits", ["", "await asyncio.sleep(0)\n"])
def test_an_interrupt_during_the_release_takes_effect_after_it(
    kernel: Kernel, locks: LockClient, key: str, log: Path, awaits: str, times: int
) -> None:
    before = handlers(kernel)
    # The body stops the holder process, as a network that does not answer would. A second process continues it.
    body = (
        f"{FIND_HOLDER}import subprocess\n"
        "os.kill(holder, signal.SIGSTOP)\n"
        "resume = subprocess.Popen(['sh', '-c', f'sleep 2; kill -CONT {holder}'], start_new_session=True)\n"
        "import threading\n"
        "def report():\n    while lease.remaining(): time.sleep(0.01)\n    work()\n"
        "threading.Thread(target=report).start()\n"
    )
    cell = kernel.start(f"%%dynamo_lock '{key}'\n{awaits}{body}")
    wait_until(lambda: log.stat().st_size, "the cell does not release")
    for _ in range(times):
        kernel.interrupt()
    kernel.read(cell)

    assert cell.error == "KeyboardInterrupt"
    assert "Released" in cell.outputs[0]["text"]
    assert_usable(kernel, locks, key, before)


@pytest.mark.parametrize("body", ENDLESS)
def test_a_lost_lease_ends_the_cell(
    kernel: Kernel, locks: LockClient, key: str, log: Path, body: str
) -> None:
    before = handlers(kernel)
    cell = start(kernel, key, body, log, "--lease-duration 6s")
    record = locks.get(key)
    assert record is not None
    locks.break_lock(key, next(iter(record.holders)), by="ann", reason="repair")
    kernel.read(cell)
    ended = time.time()

    assert cell.error == "LockLostError"
    assert "ann" in cell.reply["evalue"]
    assert cell.outputs[0]["text"] == f"{key}: Lost."
    assert max(map(float, log.read_text().split())) <= ended
    assert_usable(kernel, locks, key, before)
    assert float(log.read_text().split()[-1]) <= ended  # no code of the cell continues


def test_a_cell_whose_holder_process_dies_ends(
    kernel: Kernel, locks: LockClient, key: str, log: Path
) -> None:
    cell = kernel.start(
        f"%%dynamo_lock '{key}'\n{FIND_HOLDER}os.kill(holder, signal.SIGKILL)\ntime.sleep(1000)"
    )
    kernel.read(cell)
    assert cell.error == "LockLostError"
    assert "the process that sends its heartbeats has ended" in cell.reply["evalue"]
    record = locks.get(key)
    assert record is not None
    locks.break_lock(key, next(iter(record.holders)))
    wait_until_free(locks, key)


@pytest.mark.parametrize("awaits", ["", "await asyncio.sleep(0)\n"])
@pytest.mark.parametrize(
    ("last", "error"), [("", "LockLostError"), ("raise ValueError\n", "ValueError")], ids=["ends", "fails"]
)
def test_a_loss_that_only_the_release_notices_fails_the_cell(
    kernel: Kernel, locks: LockClient, key: str, log: Path, awaits: str, last: str, error: str
) -> None:
    cell = kernel.start(
        f"%%dynamo_lock '{key}' --lease-duration 600s\n"
        f"{awaits}work()\nwhile 'broken' not in open(log.name).read(): time.sleep(0.01)\n{last}"
    )
    wait_until(lambda: log.stat().st_size)
    record = locks.get(key)
    assert record is not None
    locks.break_lock(key, next(iter(record.holders)), by="ann", reason="repair")
    with log.open("a") as file:
        file.write("broken\n")
    kernel.read(cell)

    assert cell.error == error
    assert last or "ann" in cell.reply["evalue"]
    assert cell.outputs[0]["text"] == f"{key}: Lost."


@pytest.mark.parametrize("awaits", ["", "await asyncio.sleep(0)\n"])
def test_a_holder_process_that_dies_before_the_release_has_not_released(
    kernel: Kernel, locks: LockClient, key: str, log: Path, awaits: str
) -> None:
    body = (
        f"{FIND_HOLDER}import threading\n"
        "os.kill(holder, signal.SIGSTOP)\n"
        "def kill():\n    while lease.remaining(): time.sleep(0.01)\n    os.kill(holder, signal.SIGKILL)\n"
        "threading.Thread(target=kill).start()\n"
    )
    cell = kernel.run(f"%%dynamo_lock '{key}'\n{awaits}{body}")

    assert cell.error is None, "its work was done under the lease"
    assert "Not released" in cell.outputs[0]["text"]
    assert "exit code -9" in cell.outputs[0]["text"]
    assert not is_free(locks, key)


def test_a_holder_process_that_cannot_start_shows_why(kernel: Kernel, key: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no memory >&2\nexit 3\n")
    python.chmod(0o700)
    cell = kernel.run(
        f"import sys\npython, sys.executable = sys.executable, {str(python)!r}\n"
        f"try:\n    get_ipython().run_cell_magic('dynamo_lock', {key!r}, '1')\n"
        "finally:\n    sys.executable = python"
    )
    assert cell.error == "LockError"
    assert "has ended with exit code 3: no memory." in cell.reply["evalue"]


@pytest.mark.parametrize("body", ["a loop", "an awaiting loop"])
def test_a_lost_lease_ends_a_cell_in_a_subshell(
    kernel: Kernel, locks: LockClient, key: str, log: Path, body: str
) -> None:
    """A subshell is another thread, which neither signals nor Jupyter's interrupt reach."""
    cell = kernel.start(f"%%dynamo_lock '{key}' --lease-duration 6s\n{ENDLESS[body]}", kernel.subshell())
    wait_until(lambda: log.stat().st_size)
    assert kernel.run("1 + 1").outputs[-1]["text"] == "2"  # the main shell answers meanwhile
    record = locks.get(key)
    assert record is not None
    locks.break_lock(key, next(iter(record.holders)))
    kernel.read(cell)

    assert cell.error == "LockLostError"
    wait_until_free(locks, key)
    assert kernel.run(f"%%dynamo_lock '{key}'\n1 + 1").outputs[-1]["text"] == "2"
