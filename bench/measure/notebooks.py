"""Notebooks: how soon a lock that a cell holds is granted to the next, and how much longer a locked cell takes.

Each trial has a real kernel, and a client in this process that waits for the lock of its cell.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from airflow_dynamo_lock import LockClient
from bench.adapters.ours import TABLE
from bench.contestants import ENVIRONMENT
from bench.measure.spread import spread
from bench.meter import engine_client
from deployments.kernels import BODIES, ENDS, Kernel
from deployments.patience import wait_until

ROUNDS = 5
#: Seconds between two looks of the client, which is the first in the queue.
POLL_INTERVAL = 0.25
#: Longer than any trial, so that a lock that is granted was released.
LEASE = "600s"


def measure(endpoint_url: str) -> dict[str, Any]:
    """Measure the seconds until the lock is granted to the next, by the end of the kernel and the body of the cell."""
    locks = LockClient(engine_client(endpoint_url), table=TABLE)
    environment = {
        **ENVIRONMENT,
        "AWS_ENDPOINT_URL_DYNAMODB": endpoint_url,
        "DYNAMO_LOCK_TABLE": TABLE,
    }
    ends: dict[str, dict[str, Any]] = {}
    for end, ended in ENDS.items():
        ends[end] = {}
        for body, code in BODIES.items():
            trials = []
            for number in range(ROUNDS):
                with Kernel(environment) as kernel:
                    kernel.run("%load_ext airflow_dynamo_lock")
                    trials.append(_until_granted(locks, kernel, f"{end} {body} {number}", code, ended))
            ends[end][body] = spread(trials)
    with Kernel(environment) as kernel:
        kernel.run("%load_ext airflow_dynamo_lock")
        return {
            "poll_interval": POLL_INTERVAL,
            "shutdown_wait": kernel.manager.shutdown_wait_time / 2,  # until SIGTERM
            "bodies": list(BODIES),
            "ends": ends,
            "interrupts": _interrupts(locks, kernel),
            "cell": {
                "locked": spread(
                    [_seconds(kernel, f"%%dynamo_lock 'free {each}'\n1") for each in range(ROUNDS)]
                ),
                "plain": spread([_seconds(kernel, "1") for _ in range(ROUNDS)]),
            },
        }


def _until_granted(
    locks: LockClient, kernel: Kernel, key: str, code: str, end: Callable[[Kernel], object]
) -> float:
    """Seconds from the call of `end` until a waiting client has the lock of a cell."""
    kernel.read(kernel.start(f"%%dynamo_lock '{key}' --lease-duration {LEASE}\n{code}"), until="Held since")

    def wait() -> float:
        lease = locks.acquire(key, poll_interval=POLL_INTERVAL)
        granted = time.monotonic()
        locks.release(lease)
        return granted

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(wait)
        wait_until(lambda: locks.waiters(key))
        time.sleep(2 * POLL_INTERVAL)
        started = time.monotonic()
        end(kernel)
        return waiting.result() - started


def _interrupts(locks: LockClient, kernel: Kernel) -> dict[str, Any]:
    working = []
    for number in range(ROUNDS):
        working.append(
            _until_granted(locks, kernel, f"interrupt {number}", BODIES["a sleep"], Kernel.interrupt)
        )
        kernel.run("1")
    key, waiting = "interrupted wait", []
    lease = locks.acquire(key)
    for _ in range(ROUNDS):
        cell = kernel.start(f"%%dynamo_lock '{key}'\n1")
        kernel.read(cell, until="1st of 1")
        started = time.monotonic()
        kernel.interrupt()
        wait_until(lambda: not locks.waiters(key))
        waiting.append(time.monotonic() - started)
        kernel.read(cell)
    locks.release(lease)
    return {"working": spread(working), "waiting": spread(waiting)}


def _seconds(kernel: Kernel, code: str) -> float:
    """Seconds that a cell takes, from the request to the reply."""
    started = time.monotonic()
    kernel.run(code)
    return time.monotonic() - started
