"""Which processes belong to an Airflow deployment, and how to leave none of them behind.

Airflow gives every running task a process group of its own, and a Bash task's command a session of its own,
so no group and no session holds a whole deployment. What its processes have in common is the environment that
they were started with: the same AIRFLOW_HOME. Those that hide their environment (Airflow's workers do, from
all but root) have at least stayed in the session of the component that started them.

Run as a script, this file is the *reaper*: it waits for the end of its standard input, which comes when its
parent closes it or dies, in whatever way, and then kills the deployment.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil


def of_sessions(sessions: Collection[int]) -> list[psutil.Process]:
    """The living processes of some sessions."""
    return [process for process in _living() if _session(process) in sessions] if sessions else []


def of_home(home: Path, sessions: Collection[int] = ()) -> list[psutil.Process]:
    """The living processes whose AIRFLOW_HOME is `home`, and those in a session that one of them leads.

    `sessions` are further sessions known to belong: a leader that is dead already can no longer tell.
    """
    living = _living()
    marked = {p.pid for p in living if (p.info["environ"] or {}).get("AIRFLOW_HOME") == str(home)}
    return [p for p in living if p.pid in marked or _session(p) in marked or _session(p) in sessions]


def end(find: Callable[[], list[psutil.Process]], grace: float = 0.0) -> None:
    """Ask the processes that `find` finds to end, and kill those that are left after `grace` seconds.

    Only those are asked that none of the others has started: to end its own is part of each one's ending in
    order. Returns when `find` finds nothing any more: what is killed may have forked a moment before.
    """
    deadline = time.monotonic() + grace
    if grace:
        processes = find()
        pids = {process.pid for process in processes}
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                if process.ppid() not in pids:
                    process.terminate()
    while processes := find():
        if time.monotonic() >= deadline:
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        time.sleep(0.05)


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A folder that goes away even if Ctrl-C comes while it is going."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield folder
    finally:
        with undisturbed():
            shutil.rmtree(folder)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Hold Ctrl-C and SIGTERM back until the block is done, and then let the first one have its effect.

    Signals are the main thread's: in another one there is nothing to hold back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held_back: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: held_back.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if held_back:
            signal.raise_signal(held_back[0])


def _living() -> list[psutil.Process]:
    """All processes but zombies, which only wait to be collected by their parents; with `info["environ"]`."""
    processes = psutil.process_iter(["environ", "status"])
    return [process for process in processes if process.info["status"] != psutil.STATUS_ZOMBIE]


def _session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except OSError:  # it is gone
        return None


if __name__ == "__main__":
    home = Path(sys.argv[1])
    sys.stdin.read()
    end(lambda: of_home(home))
