"""Contenders in a process of their own: so many threads or coroutines, each of which takes one lock again and again and
writes into a ledger when it is in and when it is out.

``python -m tests.client.contender SETTINGS`` is the process; `contend` starts several and reads what they wrote.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from deployments.clients import async_lock_client, lock_client

#: How long a stay lasts, seconds: long enough that somebody who should not be in would be seen.
STAY = 0.002
#: An engine on a busy machine may take seconds for what a crowd asks at once. What is lost is tried elsewhere.
SDK = {"read_timeout": 30}


@dataclass(frozen=True)
class Contenders:
    """What one process does.

    :ivar members: how many contend in it.
    :ivar rounds: how often each of them takes the lock.
    """

    kind: str
    endpoint_url: str
    key: str
    ledger: str
    members: int
    rounds: int = 1
    capacity: int = 1
    poll_interval: float = 0.1


@dataclass(frozen=True)
class Entry:
    """A line of the ledger: somebody came in or went out."""

    came: bool
    who: str
    token: int


def contend(processes: Iterable[Contenders], *, within: float) -> list[Entry]:
    """Let them contend, and return the ledger."""
    started = [
        subprocess.Popen([sys.executable, "-m", __name__, json.dumps(asdict(each))]) for each in processes
    ]
    deadline = time.monotonic() + within
    try:
        codes = [process.wait(max(0.0, deadline - time.monotonic())) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert codes == [0] * len(codes)
    (path,) = {each.ledger for each in processes}
    lines = [line.split() for line in Path(path).read_text().splitlines()]
    return [Entry(came == "in", who, int(token)) for came, who, token in lines]


def most_inside(ledger: Iterable[Entry]) -> int:
    """The largest number that were inside at once."""
    inside: Counter[str] = Counter()
    most = 0
    for entry in ledger:
        inside[entry.who] += 1 if entry.came else -1
        most = max(most, inside.total())
    return most


class _Ledger:
    def __init__(self, path: str) -> None:
        # A single write in append mode is never mixed with another process's, and the order of lines is that of writes.
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)

    def write(self, came: str, member: int, token: int) -> None:
        os.write(self._file, f"{came} {os.getpid()}/{member} {token}\n".encode())

    def awaits(self, capacity: int) -> bool:
        """Whether who is inside has to stay until a second has come, where there is room for more than one."""
        return capacity > 1 and os.pread(self._file, 1000, 0).count(b"in ") < 2


def _threads(settings: Contenders) -> None:
    ledger = _Ledger(settings.ledger)
    with (
        lock_client("sync", settings.endpoint_url, sdk=SDK) as client,
        ThreadPoolExecutor(settings.members) as pool,
    ):

        def take_turns(member: int) -> None:
            for _ in range(settings.rounds):
                with client.lock(
                    settings.key, capacity=settings.capacity, poll_interval=settings.poll_interval
                ) as lease:
                    ledger.write("in", member, lease.token)
                    time.sleep(STAY)
                    while ledger.awaits(settings.capacity):
                        time.sleep(STAY)
                    ledger.write("out", member, lease.token)

        list(pool.map(take_turns, range(settings.members)))


async def _coroutines(settings: Contenders) -> None:
    ledger = _Ledger(settings.ledger)
    async with async_lock_client(settings.endpoint_url, sdk=SDK) as client:

        async def take_turns(member: int) -> None:
            for _ in range(settings.rounds):
                async with client.lock(
                    settings.key, capacity=settings.capacity, poll_interval=settings.poll_interval
                ) as lease:
                    ledger.write("in", member, lease.token)
                    await asyncio.sleep(STAY)
                    while ledger.awaits(settings.capacity):  # noqa: ASYNC110 - for another process
                        await asyncio.sleep(STAY)
                    ledger.write("out", member, lease.token)

        await asyncio.gather(*(take_turns(member) for member in range(settings.members)))


if __name__ == "__main__":
    # A crowd must not keep the engine from answering it, nor those of the tests beside it.
    os.nice(10)
    chosen = Contenders(**json.loads(sys.argv[1]))
    if chosen.kind == "sync":
        _threads(chosen)
    else:
        asyncio.run(_coroutines(chosen))
