"""What many waiters in one process cost while nothing happens: requests, processor time, memory.

The waiters are coroutines of one `AsyncLockClient`, as in Airflow's triggerer, in a process of their own: this module,
run as ``python -m bench.measure.waiting SETTINGS``. It prints a line of JSON once all of them stand in line, one when
it is about to be measured, and one for each window. Joining the lines is not measured: it happens once.
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
from bench.meter import Meter, engine_client
from deployments.clients import async_lock_client

CASES = [(1, 1), (100, 1), (1_000, 1), (10_000, 1), (1_000, 1_000), (10_000, 1_000)]
POLL = 1.0
WINDOWS, WINDOW = 3, 10.0
JOINING = 25  # at once
# Seconds from the beginning, or since all stand in line: the process shows that it lives, and the poller has its pace.
SIGN_OF_LIFE, PACE = 13.0, 3.0
BATCH = 100  # keys in a request


def measure(endpoint_url: str) -> dict[str, Any]:
    """Of each number of waiters, on so many keys."""
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
                ready = json.loads(process.stdout.readline())
            assert process.stdout.readline()
            meter.take()
            windows = []
            for _ in range(WINDOWS):
                window = json.loads(process.stdout.readline())
                used = meter.take()
                # The poller's looks, and the process's sign of life; nobody joins or leaves a line.
                assert used.requests.keys() <= {"BatchGetItem", "UpdateItem"}, used
                windows.append(
                    {
                        "requests_per_second": used.requests.total() / window["seconds"],
                        "read_units_per_second": used.read_units / window["seconds"],
                        "writes_per_minute": used.requests["UpdateItem"] / window["seconds"] * 60,
                        "cpu_seconds_per_minute": window["cpu"] / window["seconds"] * 60,
                        "looks_per_minute": used.requests["BatchGetItem"]
                        / ceil(min(keys, waiters) / BATCH)
                        * 60
                        / window["seconds"],
                    }
                )
        finally:
            process.kill()
            process.communicate()
    return {
        "waiters": waiters,
        "keys": keys,
        **{name: spread([window[name] for window in windows]) for name in windows[0]},
        "rss_mb": round(window["rss"] / 1e6, 1),
        "rss_growth_mb": round((window["rss"] - ready["rss_before"]) / 1e6, 1),
    }


def _keys(waiters: int, keys: int) -> list[str]:
    return [f"{waiters} on {keys}: {number}" for number in range(keys)]


def _hold(waiters: int, keys: int, endpoint_url: str) -> None:
    """Take all the locks, for longer than this takes."""
    client = LockClient(engine_client(endpoint_url), table=TABLE, lease=24 * 3600)
    for key in _keys(waiters, keys):
        assert client.try_acquire(key)


# -- the process --------------------------------------------------------------------------------------------------


def _end_with_stdin() -> None:
    """The bench holds the other end, and lets go of it however it ends."""
    sys.stdin.read()
    os._exit(0)


async def _standing(client: AsyncLockClient, number: int) -> None:
    """Return when so many have joined their line and have nothing left to do but wait."""
    tickets = client._core.poller.waiters
    while sum(map(len, tickets.values())) < number:  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0.005)


async def _wait(waiters: int, keys: int, endpoint_url: str) -> None:
    process = psutil.Process()
    async with async_lock_client(endpoint_url, table=TABLE) as client:
        names = _keys(waiters, keys)
        await client.get(names[0])  # what the first request loads is no waiter's
        gc.collect()
        before = process.memory_info().rss
        began = time.monotonic()
        tasks = []
        for number in range(waiters):
            tasks.append(asyncio.create_task(client.acquire(names[number % keys], poll_interval=POLL)))
            await _standing(client, number + 1 - JOINING)
        await _standing(client, waiters)
        print(json.dumps({"rss_before": before}), flush=True)
        await asyncio.sleep(max(PACE, began + SIGN_OF_LIFE - time.monotonic()))
        print(json.dumps({}), flush=True)
        for _ in range(WINDOWS):
            began, cpu = time.monotonic(), sum(process.cpu_times()[:2])
            await asyncio.sleep(WINDOW)
            window = {
                "seconds": time.monotonic() - began,
                "cpu": sum(process.cpu_times()[:2]) - cpu,
                "rss": process.memory_info().rss,
            }
            print(json.dumps(window), flush=True)
        assert not any(task.done() for task in tasks)
        await asyncio.Event().wait()


if __name__ == "__main__":
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    asyncio.run(_wait(**json.loads(sys.argv[1])))
