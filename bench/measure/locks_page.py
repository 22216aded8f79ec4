"""What the Locks page costs: the time and size of its answers, and the reads of the table, by number of locks.

A real API server answers on 127.0.0.1. A proxy between it and the engine counts its requests.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from airflow_dynamo_lock import LockClient
from airflow_dynamo_lock.core.model.record import Waiter
from airflow_dynamo_lock.core.table.native import NativeFormat
from airflow_dynamo_lock.core.table.position import place_of, ticket_of
from bench.contestants import ENVIRONMENT
from bench.measure.spread import spread
from bench.meter import Meter, engine_client
from deployments.airflow_client import AirflowClient
from deployments.clients import AsyncClientInThread
from deployments.engines import DynamoDBLocal
from deployments.patience import wait_until
from proof.airflow.auth_managers import SimpleAuthDeployment
from proof.airflow.testbed import TABLE, connection, table_environment

LOCKS = (10, 1_000, 10_000)
#: Waiters in the queue of one of the locks.
QUEUE = 500
LOOKS, REPEATS = 3, 20  # number of looks at the table, and of further answers from the same look
#: Seconds for which pages are open, and how many are.
OPEN, PAGES = 60.0, (1, 20)
# Entries in one request that fills the table.
_BATCH = 25


def measure() -> dict[str, Any]:
    """Measure the answers with each number of locks, and then the reads of one open page and of many."""
    os.environ.update(ENVIRONMENT)  # for the waiters
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        DynamoDBLocal() as engine,
        Meter(engine.endpoint_url) as meter,
    ):
        aws = engine_client(engine.endpoint_url)
        locks = LockClient(aws, table=TABLE, owner="the benchmark")
        locks.create_table()
        env = table_environment("north", engine) | {
            "AWS_ENDPOINT_URL_DYNAMODB": meter.endpoint_url,
            "AIRFLOW_CONN_DYNAMO_LOCK_DEFAULT": connection("north", region_name=aws.meta.region_name),
        }
        with (
            SimpleAuthDeployment("north", Path(folder) / "north", env=env) as airflow,
            _queue(aws, engine.endpoint_url, locks),
            httpx.Client(
                base_url=airflow.url,
                timeout=300.0,
                trust_env=False,
                headers={"Authorization": f"Bearer {airflow.token}", "X-Dynamo-Lock": "1"},
            ) as browser,
        ):
            cases = []
            for number in LOCKS:
                _fill(aws, locks, number)
                cases.append({"locks": number, **_answers(browser, meter)})
                if number == LOCKS[1]:
                    pages = [_open(airflow, meter, each) for each in PAGES]
    return {"queue": QUEUE, "cases": cases, "pages": pages, "open_seconds": OPEN}


@contextmanager
def _queue(aws: Any, endpoint_url: str, locks: LockClient) -> Iterator[None]:
    """A lock that is held, and for which many wait.

    One of them is real, and its process's heartbeats count for all: five hundred real ones would slow the engine down.
    """
    lease = locks.acquire("queue", lease=3600)
    with AsyncClientInThread(endpoint_url, table=TABLE, owner="a waiter") as client:
        waiting = asyncio.run_coroutine_threadsafe(client.client.acquire("queue"), client.loop)
        wait_until(lambda: waiting.done() or locks.waiters("queue"), "the waiter is not in the queue")
        assert not waiting.done(), "the waiter has failed"
        (real,) = locks.waiters("queue")
        _put(aws, [_behind(real, number) for number in range(1, QUEUE)])
        assert len(locks.waiters("queue")) == QUEUE
        yield
        waiting.cancel()
    locks.release(lease)


def _behind(waiter: Waiter, number: int) -> dict[str, Any]:
    """The entry of a further waiter of the same process, that many tickets behind a waiter."""
    lease_id = str(uuid.uuid4())
    place = place_of(waiter.priority, ticket_of(waiter.place) + number, lease_id)
    write = NativeFormat(TABLE).put_entry(replace(waiter, place=place, lease_id=lease_id))
    item: dict[str, Any] = write.params["Item"]
    return item


def _fill(aws: Any, locks: LockClient, number: int) -> None:
    """Fill the table, so that it has that many locks with the one that has the queue. All of them are held."""
    locks.acquire("0", lease=3600, reentrant=True)
    pages = aws.get_paginator("scan").paginate(TableName=TABLE)
    (first,) = (item for page in pages for item in page["Items"] if item["key"]["S"] == "0")
    _put(aws, [{**first, "key": {"S": str(at)}} for at in range(1, number - 1)])


def _put(aws: Any, items: list[dict[str, Any]]) -> None:
    puts = [{"PutRequest": {"Item": each}} for each in items]
    for at in range(0, len(puts), _BATCH):
        aws.batch_write_item(RequestItems={TABLE: puts[at : at + _BATCH]})


def _answers(browser: httpx.Client, meter: Meter) -> dict[str, Any]:
    """Ask for the first hundred locks: with a look at the table, from the same look, and as the browser has them."""
    look, again, unchanged, used = [], [], [], []
    for _ in range(LOOKS):
        # After an action, the next answer is a new look.
        action = {"conn": "dynamo_lock_default", "key": "slots", "reason": "a measurement", "capacity": 2}
        browser.post("/dynamo-lock/capacity", json=action).raise_for_status()
        meter.take()
        took, answer = _timed(browser)
        look.append(took)
        used.append(meter.take())
        for _ in range(REPEATS):
            again.append(_timed(browser)[0])
            unchanged.append(_timed(browser, {"If-None-Match": answer.headers["ETag"]})[0])
    queue = browser.get("/dynamo-lock/queue", params={"conn": "dynamo_lock_default", "key": "queue"})
    return {
        "look_seconds": spread(look, 3),
        "again_seconds": spread(again, 4),
        "unchanged_seconds": spread(unchanged, 4),
        "bytes": len(answer.content),
        "queue_bytes": len(queue.content),
        "requests": used[-1].requests.total(),
        "read_units": round(used[-1].read_units),
        "every_seconds": round(answer.json()["next_seconds"], 1),
    }


def _timed(browser: httpx.Client, headers: dict[str, str] | None = None) -> tuple[float, httpx.Response]:
    started = time.monotonic()
    answer = browser.get("/dynamo-lock/locks", headers=headers)
    took = time.monotonic() - started
    assert answer.status_code in (200, 304), answer.text
    return took, answer


def _open(airflow: AirflowClient, meter: Meter, pages: int) -> dict[str, Any]:
    """Poll as that many open pages do, and count the requests to the table."""
    until = time.monotonic() + OPEN

    def page() -> None:
        with httpx.Client(
            base_url=airflow.url,
            timeout=60.0,
            trust_env=False,
            headers={"Authorization": f"Bearer {airflow.token}"},
        ) as browser:
            while time.monotonic() < until:
                time.sleep(_timed(browser)[1].json()["next_seconds"])

    meter.take()
    threads = [threading.Thread(target=page) for _ in range(pages)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    used = meter.take()
    return {"pages": pages, "looks": used.requests["Scan"], "read_units": round(used.read_units)}
