"""Starts, stops and kills the processes of a run, and makes sure that none survives it.

``python -m proof.chaos.forkserver`` is a process that has imported all that the actors need. It reads
requests from its standard input, forks actors, and sends signals to them. All actors are in its process
group. When its input ends, it kills that group, with SIGKILL, which also ends stopped processes. The
operating system closes the input even if the process that started the run is killed. `ForkServer` starts this
process and sends the requests.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from airflow_dynamo_lock.client.clock import monotonic
from deployments.clients import async_lock_client, lock_client
from proof.chaos.actors import ProcessSetup, run_actor
from proof.chaos.settings import Role

ROOT = Path(__file__).parents[2]


class ForkServer:
    """The fork server's process, for the length of a ``with`` block. Threads may share it.

    Actors are identified by `ProcessSetup.number`, because pids are reused.
    """

    def __enter__(self) -> Self:
        self._lock = threading.Lock()
        self._ended: dict[int, int] = {}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that Ctrl-C reaches only this process, which then stops the server
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def start(self, role: Role, setup: ProcessSetup) -> int:
        """Fork an actor for the role, and return its pid."""
        return int(self._request("start", asdict(role), asdict(setup)))

    def kill(self, number: int) -> float | None:
        """Kill an actor with SIGKILL.

        :returns: a time after which it certainly does nothing, monotonic seconds. None if it had ended.
        """
        return self._time(self._request("kill", number))

    def stop(self, number: int) -> float | None:
        """Stop an actor with SIGSTOP.

        :returns: a time after which it is certainly stopped, monotonic seconds. None if it has ended, or was
            already stopped.
        """
        return self._time(self._request("stop", number))

    def resume(self, number: int) -> None:
        """Resume a stopped actor with SIGCONT."""
        self._request("resume", number)

    def stop_engine(self, pid: int) -> None:
        """Stop the engine with SIGSTOP. The fork server resumes it if the run ends before `resume_engine`."""
        self._request("stop_engine", pid)

    def resume_engine(self, pid: int) -> None:
        """Resume the engine with SIGCONT."""
        self._request("resume_engine", pid)

    def exit_status(self, number: int) -> int | None:
        """Return an actor's exit code, or minus the number of the signal that killed it; None if it runs."""
        self._request("reap")
        return self._ended.get(number)

    def _time(self, answer: Any) -> float | None:
        return None if answer is None else float(answer)

    def _request(self, *request: Any) -> Any:
        with self._lock:
            assert self._process.stdin
            assert self._process.stdout
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer, ended = json.loads(self._process.stdout.readline())
            self._ended |= dict(ended)
        return answer


class _Server:
    """Carries out the requests of `ForkServer`, whose methods have the same names, in the server's process.

    It signals only processes whose pids cannot have been reused: children that it has not reaped yet, and the
    engine, which its own parent does not reap during a request.
    """

    def __init__(self) -> None:
        self._children: dict[int, int] = {}  # pid by number
        self._stopped: set[int] = set()
        self._ended: list[tuple[int, int]] = []
        self._stopped_engines: set[int] = set()

    def serve(self) -> None:
        try:
            for line in sys.stdin:
                method, *arguments = json.loads(line)
                answer = getattr(self, method)(*arguments)
                self.reap()
                print(json.dumps([answer, self._ended]), flush=True)
                self._ended = []
        finally:  # also if the answer could not be written, because the other process has died
            for engine in self._stopped_engines:
                # An engine exits when its own standard input ends, but not while it is stopped.
                os.kill(engine, signal.SIGCONT)
            os.killpg(0, signal.SIGKILL)

    def start(self, role: dict[str, Any], setup: dict[str, Any]) -> int:
        pid = os.fork()
        if pid == 0:
            run_actor(Role(**role), ProcessSetup(**setup))
        self._children[setup["number"]] = pid
        return pid

    def kill(self, number: int) -> float | None:
        self.reap()
        if number not in self._children:
            return None
        os.kill(self._children[number], signal.SIGKILL)
        self._wait(number, 0)
        return monotonic()

    def stop(self, number: int) -> float | None:
        self.reap()
        if number not in self._children or number in self._stopped:
            return None
        os.kill(self._children[number], signal.SIGSTOP)
        self._wait(number, os.WUNTRACED)  # returns when the child has stopped, or has ended before that
        if number not in self._children:
            return None
        self._stopped.add(number)
        return monotonic()

    def resume(self, number: int) -> None:
        if number in self._stopped:
            os.kill(self._children[number], signal.SIGCONT)
            self._stopped.remove(number)

    def stop_engine(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        self._stopped_engines.add(pid)

    def resume_engine(self, pid: int) -> None:
        os.kill(pid, signal.SIGCONT)
        self._stopped_engines.remove(pid)

    def reap(self) -> None:
        for number in list(self._children):
            self._wait(number, os.WNOHANG)

    def _wait(self, number: int, options: int) -> None:
        """Wait for a child as the options of `waitpid` say, and record its end if it has ended."""
        pid, status = os.waitpid(self._children[number], options)
        if pid and not os.WIFSTOPPED(status):
            del self._children[number]
            self._stopped.discard(number)
            self._ended.append((number, os.waitstatus_to_exitcode(status)))


def main() -> None:
    # Create clients before any fork, so that the children need not load the SDKs' service models.
    with lock_client("sync", "http://127.0.0.1:1"):
        pass

    async def load() -> None:
        async with async_lock_client("http://127.0.0.1:1"):
            pass

    asyncio.run(load())
    assert threading.active_count() == 1, "a process with threads must not fork"
    _Server().serve()


if __name__ == "__main__":
    main()
