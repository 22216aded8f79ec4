"""Two hundred runs wait for one lock in one triggerer.

The lock table is on DynamoDB Local, because moto takes most of a second for one read of such a long queue,
and the waiters read it repeatedly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise

import pytest

from airflow_dynamo_lock import LockClient
from deployments.engines import REGION, Engine
from proof.airflow.testbed import POLL, TABLE, Testbed, wait_for

pytestmark = pytest.mark.proof

WAITERS, TURNS = 200, 8


def events(testbed: Testbed, key: str) -> Iterator[tuple[datetime, str]]:
    """Yield the times at which tasks acquired and released the lock, from their logs."""
    for log in (testbed.airflow.home / "logs" / "dag_id=many").rglob("*.log"):
        for line in log.read_text().splitlines():
            message = json.loads(line)
            what, _, about = message["event"].partition(" the lock ")
            if what in ("Acquired", "Released") and about.startswith(repr(key)):
                yield datetime.fromisoformat(message["timestamp"]), what


def queued(testbed: Testbed, key: str) -> int:
    """Return how many tasks have logged their position in the queue."""
    position = re.compile(rf"{re.escape(repr(key))}: \d+(st|nd|rd|th) of \d+")
    logs = (testbed.airflow.home / "logs" / "dag_id=many").rglob("task_id=lock.acquire/*.log")
    return sum(1 for log in logs if position.search(log.read_text()))


def test_two_hundred_waiting_runs_neither_block_the_triggerer_nor_slow_the_hand_over(
    testbed: Testbed, dynamodb_local: Engine, key: str
) -> None:
    locks = LockClient(dynamodb_local.client(), table=TABLE, owner="the tests")
    locks.create_table()
    # This connection names its endpoint, because its table is not on the testbed's engine.
    extra = {"table": TABLE, "region_name": REGION, "endpoint_url": dynamodb_local.endpoint_url}
    testbed.airflow.add_connection("dynamodb_local", "dynamo_lock", extra=extra)
    lease = locks.try_acquire(key, lease=600)
    assert lease is not None
    since = len(testbed.airflow.triggerer.log.read_text().splitlines())
    runs = [testbed.start("many", key) for _ in range(WAITERS)]

    def waiting() -> bool | None:
        states = [ti.state for ti in testbed.airflow.task_instances("many") if ti.task_id == "lock.acquire"]
        return states.count("deferred") >= WAITERS or None

    wait_for(waiting, f"{WAITERS} runs wait", 240)
    wait_for(lambda: queued(testbed, key) >= WAITERS or None, f"{WAITERS} runs are queued", 240)
    locks.release(lease)
    # One more than is needed, because a task may log its release after the next one has logged its grant.
    wait_for(
        lambda: len(testbed.uses(key)) > TURNS or None, f"more than {TURNS} runs have used the lock", 180
    )
    blocked = testbed.blocked_warnings(since)
    # Before the runs are marked: a hand-over to a run that has just been marked takes longer.
    turns = sorted(events(testbed, key))
    for run_id in runs:
        testbed.airflow.set_run_state("many", run_id, "failed")

    assert blocked == []
    testbed.assert_exclusive(key)
    took = [
        (later - earlier).total_seconds()
        for (earlier, what), (later, then) in pairwise(turns)
        if (what, then) == ("Released", "Acquired")
    ]
    print("from release to the next grant:", sorted(took))
    assert len(took) >= TURNS - 1
    # Two polls, and a second for the release and the acquire themselves on two busy cores.
    assert max(took) <= 2 * POLL + 1
