"""What many waiters in one process cost while their locks stay held: requests, processor time and memory.

The waiters are coroutines of one `AsyncLockClient`, as in Airflow's triggerer. They run in a process of their own,
which executes this module: ``python -m bench.measure.waiting SETTINGS``. The process prints a JSON line when all
waiters are queued, another one when the measurement starts, and one at the end of each window. The time until all
waiters are queued is not measured.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
import threading
import time
from math import ceil
from typing import Any

import psutil

from airflow_dynamo_lock import AsyncLockClient, LockClient
from bench.adapters.ours import TABLE
from bench.contestants import ENVIRONMENT
from bench.environments import ROOT
from bench.measure.spread import spread
from bench.meter import Meter, Usage, engine_client
from deployments.clients import async_lock_client

CASES = [(1, 1), (100, 1), (1_000, 1), (10_000, 1), (1_000, 1_000), (10_000, 1_000)]
POLL = 1.0
WINDOWS, WINDOW = 3, 10.0  # number of measured windows, and seconds of each
ENQUEUEING = 25  # waiters that enqueue at the same time
# Seconds from the first waiter to the measurement: by then, the process sends heartbeats.
HEARTBEATS_START = 13.0
# Seconds from the moment at which all waiters are queued: by then, the poller runs at its regular interval.
POLLER_SETTLES = 3.0
BATCH = 100  # keys in one request of the poller


def measure(endpoint_url: str) -> dict[str, Any]:
    """Measure each case: a number of waiters, on a number of keys."""
    return {"poll_interval": POLL, "window": WINDOW, "cases": [_case(*case, endpoint_url) for case in CASES]}


def _case(waiters: int, keys: int, endpoint_url: str) -> dict[str, Any]:
    _hold(waiters, keys, endpoint_url)
    with Meter(endpoint_url) as meter:
        settings = {"waiters": waiters, "keys": keys, "endpoint_url": meter.endpoint_url}
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, json.dumps(settings)],
            cwd=ROOT,
            env=dict(ENVIRONMENT),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            assert process.stdout
            with meter.starting():
                queued = json.loads(process.stdout.readline())
            assert process.stdout.readline()  # the measurement starts
            meter.take()
            windows = []
            for _ in range(WINDOWS):
                window = json.loads(process.stdout.readline())
                windows.append(_rates(meter.take(), window, min(keys, waiters)))
        finally:
            process.kill()
            process.communicate()
    return {
        "waiters": waiters,
        "keys": keys,
        **{name: spread([window[name] for window in windows]) for name in windows[0]},
        "rss_mb": round(window["rss"] / 1e6, 1),
        "rss_growth_mb": round((window["rss"] - queued["rss_before"]) / 1e6, 1),
    }


def _rates(used: Usage, window: dict[str, float], polled_keys: int) -> dict[str, float]:
    """Return what one window has cost, per second or per minute.

    :param used: what the meter has counted.
    :param window: what the process has measured itself.
    """
    # Polls and heartbeats only: nothing else is expected while no waiter enqueues or dequeues.
    assert used.requests.keys() <= {"BatchGetItem", "UpdateItem"}, used
    seconds = window["seconds"]
    polls = used.requests["BatchGetItem"] / ceil(polled_keys / BATCH)
    return {
        "requests_per_second": used.requests.total() / seconds,
        "read_units_per_second": used.read_units / seconds,
        "writes_per_minute": used.requests["UpdateItem"] / seconds * 60,
        "cpu_seconds_per_minute": window["cpu"] / seconds * 60,
        "polls_per_minute": polls / seconds * 60,
    }


def _keys(waiters: int, keys: int) -> list[str]:
    return [f"{waiters} on {keys}: {number}" for number in range(keys)]


def _hold(waiters: int, keys: int, endpoint_url: str) -> None:
    """Acquire all the locks, with a lease that is longer than the measurement."""
    client = LockClient(engine_client(endpoint_url), table=TABLE, lease=24 * 3600)
    for key in _keys(waiters, keys):
        assert client.try_acquire(key)


# -- the process of the waiters ----------------------------------------------------------------------------------


def _exit_with_stdin() -> None:
    """Exit when standard input is closed, which happens when the main process ends, for whatever reason."""
    sys.stdin.read()
    os._exit(0)


async def _wait_until_queued(client: AsyncLockClient, count: int) -> None:
    """Wait until `count` waiters are queued and added to the poller."""
    waiters = client._core.poller.waiters
    while sum(map(len, waiters.values())) < count:  # noqa: ASYNC110 - the poller sends no notification
        await asyncio.sleep(0.005)


async def _wait(waiters: int, keys: int, endpoint_url: str) -> None:
    process = psutil.Process()
    async with async_lock_client(endpoint_url, table=TABLE) as client:
        names = _keys(waiters, keys)
        await client.get(names[0])  # the memory that the first request needs does not count for the waiters
        gc.collect()
        rss_before = process.memory_info().rss
        started = time.monotonic()
        tasks = []
        for number in range(waiters):
            tasks.append(asyncio.create_task(client.acquire(names[number % keys], poll_interval=POLL)))
            await _wait_until_queued(client, number + 1 - ENQUEUEING)
        await _wait_until_queued(client, waiters)
        print(json.dumps({"rss_before": rss_before}), flush=True)
        await asyncio.sleep(max(POLLER_SETTLES, started + HEARTBEATS_START - time.monotonic()))
        print(json.dumps({}), flush=True)
        for _ in range(WINDOWS):
            started, cpu = time.monotonic(), sum(process.cpu_times()[:2])
            await asyncio.sleep(WINDOW)
            window = {
                "seconds": time.monotonic() - started,
                "cpu": sum(process.cpu_times()[:2]) - cpu,
                "rss": process.memory_info().rss,
            }
            print(json.dumps(window), flush=True)
        assert not any(task.done() for task in tasks)
        await asyncio.Event().wait()


if __name__ == "__main__":
    threading.Thread(target=_exit_with_stdin, daemon=True).start()
    asyncio.run(_wait(**json.loads(sys.argv[1])))
