"""Two hundred runs wait for one lock in one triggerer.

On DynamoDB Local: moto takes most of a second to show so long a line, which is read again and again while they come.
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
from proof.airflow.room import POLL, TABLE, Room, until

pytestmark = pytest.mark.proof

WAITERS, TURNS = 200, 8


def events(room: Room, key: str) -> Iterator[tuple[datetime, str]]:
    """When the lock was acquired and released, as the tasks' own logs tell, in order."""
    for log in (room.airflow.home / "logs" / "dag_id=many").rglob("*.log"):
        for line in log.read_text().splitlines():
            message = json.loads(line)
            what, _, about = message["event"].partition(" the lock ")
            if what in ("Acquired", "Released") and about.startswith(repr(key)):
                yield datetime.fromisoformat(message["timestamp"]), what


def in_line(room: Room, key: str) -> int:
    """How many tasks have been told where in line they stand, as their own logs tell."""
    told = re.compile(rf"{re.escape(repr(key))}: \d+(st|nd|rd|th) of \d+")
    logs = (room.airflow.home / "logs" / "dag_id=many").rglob("task_id=lock.acquire/*.log")
    return sum(1 for log in logs if told.search(log.read_text()))


def test_two_hundred_waiting_runs_neither_block_the_triggerer_nor_slow_the_hand_over(
    room: Room, dynamodb_local: Engine, key: str
) -> None:
    locks = LockClient(dynamodb_local.client(), table=TABLE, owner="the tests")
    locks.create_table()
    # The one connection of these tests that names its endpoint, for an engine of its own.
    extra = {"table": TABLE, "region_name": REGION, "endpoint_url": dynamodb_local.endpoint_url}
    room.airflow.add_connection("dynamodb_local", "dynamo_lock", extra=extra)
    lease = locks.try_acquire(key, lease=600)
    assert lease is not None
    since = len(room.airflow.triggerer.log.read_text().splitlines())
    runs = [room.start("many", key) for _ in range(WAITERS)]

    def waiting() -> bool | None:
        states = [ti.state for ti in room.airflow.task_instances("many") if ti.task_id == "lock.acquire"]
        return states.count("deferred") >= WAITERS or None

    until(waiting, f"{WAITERS} runs wait", 240)
    until(lambda: in_line(room, key) >= WAITERS or None, f"{WAITERS} stand in line", 240)
    locks.release(lease)
    until(lambda: len(room.stays(key)) >= TURNS or None, f"{TURNS} runs had their turn", 180)
    blocked = room.blocked(since)
    for run_id in runs:
        room.airflow.set_run_state("many", run_id, "failed")

    assert blocked == []
    room.assert_exclusive(key)
    turns = sorted(events(room, key))
    took = [
        (later - earlier).total_seconds()
        for (earlier, what), (later, then) in pairwise(turns)
        if (what, then) == ("Released", "Acquired")
    ]
    print("from release to the next grant:", sorted(took))
    assert len(took) >= TURNS - 1
    # Two polls; a second for what the release and the acquire themselves take on two busy cores.
    assert max(took) <= 2 * POLL + 1
