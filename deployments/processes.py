"""Find the processes of an Airflow deployment, and end them all.

A deployment spans several process groups and sessions: Airflow starts each task in a process group of its
own, and the command of a Bash task in a session of its own. So a process belongs to a deployment if its
environment has the deployment's AIRFLOW_HOME. Only root can read the environment of Airflow's workers; they
are found by their session, which is that of the component that started them.

Run as a script, this file is the *reaper* of one deployment: when its standard input ends, because its parent
has closed it or died, the reaper kills the deployment.
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
    """Return the living processes of some sessions."""
    return [process for process in _living() if _session(process) in sessions] if sessions else []


def of_home(home: Path, sessions: Collection[int] = ()) -> list[psutil.Process]:
    """Return the living processes with AIRFLOW_HOME `home`, and those in a session that one of them leads.

    :param sessions: further sessions of the deployment. The environment of a dead session leader cannot be
        read, so its session is not found by AIRFLOW_HOME.
    """
    living = _living()
    in_home = {p.pid for p in living if (p.info["environ"] or {}).get("AIRFLOW_HOME") == str(home)}
    # The id of a session is the pid of its leader.
    return [p for p in living if p.pid in in_home or _session(p) in in_home or _session(p) in sessions]


def end(find: Callable[[], list[psutil.Process]], grace: float = 0.0) -> None:
    """Send SIGTERM to the processes that `find` returns, and SIGKILL to those left after `grace` seconds.

    Only a process whose parent is not among them receives SIGTERM: it then ends its children itself. Returns
    when `find` returns no process. It is called repeatedly, because a process may fork just before it is
    killed.
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
    """A temporary folder. Ctrl-C does not interrupt its removal."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield folder
    finally:
        with undisturbed():
            shutil.rmtree(folder)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Delay SIGINT, SIGTERM and SIGHUP until the end of the block, where they take effect.

    Python runs signal handlers in the main thread only, so in other threads this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for each in received:
            signal.raise_signal(each)


def _living() -> list[psutil.Process]:
    """Return all processes but zombies, with their environment as `info["environ"]`."""
    processes = psutil.process_iter(["environ", "status"])
    return [process for process in processes if process.info["status"] != psutil.STATUS_ZOMBIE]


def _session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except OSError:  # the process has ended
        return None


if __name__ == "__main__":
    home = Path(sys.argv[1])
    sys.stdin.read()
    end(lambda: of_home(home))
