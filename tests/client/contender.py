"""Processes whose threads or coroutines contend for one lock, and write to a ledger when they enter and leave.

``python -m tests.client.contender SETTINGS`` is one process. `contend` starts several, and returns the ledger.
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

#: Seconds that a holder stays inside: long enough for a second holder to show in the ledger.
STAY = 0.002
#: On a busy machine, the engine may take seconds to answer many requests at once. Other files test lost replies.
SDK = {"read_timeout": 30}


@dataclass(frozen=True)
class Contenders:
    """The settings of one process.

    :ivar members: number of threads or coroutines that contend.
    :ivar rounds: how often each member acquires the lock.
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
    """A line of the ledger: a member entered or left."""

    entered: bool
    member: str
    token: int


def contend(processes: Iterable[Contenders], *, within: float) -> list[Entry]:
    """Run the processes until all have ended, and return the ledger."""
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
    return [Entry(event == "in", member, int(token)) for event, member, token in lines]


def most_inside(ledger: Iterable[Entry]) -> int:
    """Return the largest number of members that were inside at the same time."""
    inside: Counter[str] = Counter()
    most = 0
    for entry in ledger:
        inside[entry.member] += 1 if entry.entered else -1
        most = max(most, inside.total())
    return most


class _Ledger:
    def __init__(self, path: str) -> None:
        # In append mode, single writes of several processes do not mix, and the lines have the order of the writes.
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)

    def write(self, event: str, member: int, token: int) -> None:
        os.write(self._file, f"{event} {os.getpid()}/{member} {token}\n".encode())

    def lacks_second(self, capacity: int) -> bool:
        """Return whether a second member could be inside, but none has entered yet."""
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
                    while ledger.lacks_second(settings.capacity):
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
                    while ledger.lacks_second(settings.capacity):  # noqa: ASYNC110 - for another process
                        await asyncio.sleep(STAY)
                    ledger.write("out", member, lease.token)

        await asyncio.gather(*(take_turns(member) for member in range(settings.members)))


if __name__ == "__main__":
    # The contenders must not slow down the engine, nor the engines of other tests.
    os.nice(10)
    chosen = Contenders(**json.loads(sys.argv[1]))
    if chosen.kind == "sync":
        _threads(chosen)
    else:
        asyncio.run(_coroutines(chosen))
