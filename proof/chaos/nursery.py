"""Starts the actors, stops and kills them, and leaves none behind.

``python -m proof.chaos.nursery`` is the process: it has imported all that actors need, and forks one when it is told
to, on its standard input. They share its process group, and when its input ends, which the system sees to even if the
tests are killed, it kills that group. SIGKILL also ends those that are stopped. `Nursery` is its face in the tests.
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
from proof.chaos import actors
from proof.chaos.settings import Role

ROOT = Path(__file__).parents[2]


class Nursery:
    """The process, for the length of a ``with`` block. Safe to share between threads.

    Actors are known by their numbers (`Place.number`): pids come again.
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
            start_new_session=True,  # Ctrl-C is for the tests, which then end their processes
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def start(self, role: Role, place: actors.Place) -> None:
        """Fork a process for that role."""
        self._ask("start", asdict(role), asdict(place))

    def kill(self, number: int) -> float | None:
        """Kill it hard; the moment after which it certainly does nothing. None if it had ended before."""
        return self._moment(self._ask("kill", number))

    def stop(self, number: int) -> float | None:
        """Stop it in whatever it does, as a paused machine is stopped. None if it has ended, or is stopped already."""
        return self._moment(self._ask("stop", number))

    def hang(self, engine: int) -> None:
        """Stop an engine, which the tests have started. If they end before it goes on, the nursery sees to it."""
        self._ask("hang", engine)

    def resume(self, number: int) -> None:
        """Let it go on, unaware."""
        self._ask("resume", number)

    def wake(self, engine: int) -> None:
        """Let an engine go on."""
        self._ask("wake", engine)

    def status(self, number: int) -> int | None:
        """How it ended: its exit code, or the negative number of the signal that killed it. None if it lives."""
        self._ask("reap")
        return self._ended.get(number)

    def _moment(self, answer: Any) -> float | None:
        return None if answer is None else float(answer)

    def _ask(self, *request: Any) -> Any:
        with self._lock:
            assert self._process.stdin
            assert self._process.stdout
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer, ended = json.loads(self._process.stdout.readline())
            self._ended |= dict(ended)
        return answer


class _Parent:
    """What runs in the process. It signals only children that it has not yet collected, whose pids are still theirs,
    and the engine, which its own parent has not collected while it asks for that."""

    def __init__(self) -> None:
        self._children: dict[int, int] = {}  # number → pid
        self._stopped: set[int] = set()
        self._ended: list[tuple[int, int]] = []
        self._hung: set[int] = set()

    def serve(self) -> None:
        try:
            for line in sys.stdin:
                do, *arguments = json.loads(line)
                answer = getattr(self, do)(*arguments)
                self.reap()
                print(json.dumps([answer, self._ended]), flush=True)
                self._ended = []
        finally:  # also when nobody is there to be answered
            for engine in self._hung:
                os.kill(engine, signal.SIGCONT)  # the end of its own input ends it, once it can see that
            os.killpg(0, signal.SIGKILL)

    def start(self, role: dict[str, Any], place: dict[str, Any]) -> None:
        pid = os.fork()
        if pid == 0:
            actors.perform(Role(**role), actors.Place(**place))
        self._children[place["number"]] = pid

    def kill(self, number: int) -> float | None:
        self.reap()
        if number not in self._children:
            return None
        os.kill(self._children[number], signal.SIGKILL)
        self._collect(number, 0)
        return monotonic()

    def stop(self, number: int) -> float | None:
        self.reap()
        if number not in self._children or number in self._stopped:
            return None
        os.kill(self._children[number], signal.SIGSTOP)
        self._collect(number, os.WUNTRACED)  # waits for the stop, or for an end that came before it
        if number not in self._children:
            return None
        self._stopped.add(number)
        return monotonic()

    def resume(self, number: int) -> None:
        if number in self._stopped:
            os.kill(self._children[number], signal.SIGCONT)
            self._stopped.remove(number)

    def hang(self, engine: int) -> None:
        os.kill(engine, signal.SIGSTOP)
        self._hung.add(engine)

    def wake(self, engine: int) -> None:
        os.kill(engine, signal.SIGCONT)
        self._hung.remove(engine)

    def reap(self) -> None:
        for number in list(self._children):
            self._collect(number, os.WNOHANG)

    def _collect(self, number: int, options: int) -> None:
        collected, status = os.waitpid(self._children[number], options)
        if collected and not os.WIFSTOPPED(status):
            del self._children[number]
            self._stopped.discard(number)
            self._ended.append((number, os.waitstatus_to_exitcode(status)))


def main() -> None:
    # What is loaded once is loaded for all: the SDKs' models above all.
    with lock_client("sync", "http://127.0.0.1:1"):
        pass

    async def load() -> None:
        async with async_lock_client("http://127.0.0.1:1"):
            pass

    asyncio.run(load())
    assert threading.active_count() == 1, "a process with threads must not fork"
    _Parent().serve()


if __name__ == "__main__":
    main()
