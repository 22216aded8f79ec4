"""How many holders one key can have: this file computes the numbers in docs/performance.md."""

from __future__ import annotations

import re
import uuid
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_dynamo_lock.airflow import lock_options
from airflow_dynamo_lock.client.session import ClientCore
from airflow_dynamo_lock.core.effects import Stamp
from airflow_dynamo_lock.core.model.claim import Claim
from airflow_dynamo_lock.core.model.limits import HEARTBEATS_PER_GRACE, LAST_MS, RELEASE_GRACE, SHARED
from airflow_dynamo_lock.core.table import version
from airflow_dynamo_lock.core.table.codec import encode
from airflow_dynamo_lock.core.table.items import holder_values
from airflow_dynamo_lock.core.table.position import place_of
from airflow_dynamo_lock.defaults import DEFAULT_LEASE
from bench.meter import item_size

ROOT = Path(__file__).parents[2]
NOW_MS = 1_795_000_000_123
# Write units per second that DynamoDB serves for one item.
WRITE_UNITS = 1000
HOST = "ip-10-0-1-23.eu-central-1.compute.internal"

CORE = ClientCore("locks", f"{HOST}:4711", 30.0, None, RELEASE_GRACE, 10.0)


def plain() -> Claim:
    (claim,) = CORE.claims.of("warehouse/prices", {"mode": "shared"})
    return claim


def of_a_task() -> Claim:
    ti = SimpleNamespace(
        id=uuid.uuid4(),
        dag_id="daily_reports",
        run_id="scheduled__2026-11-22T00:00:00+00:00",
        task_id="lock.acquire",
        map_index=-1,
        try_number=1,
        dag_version_id=uuid.uuid4(),
    )
    settings: Any = SimpleNamespace(deployment="north")
    wanted = lock_options.Wanted.of(
        SimpleNamespace(**{**lock_options.PARAMETERS, "key": "k", "mode": "shared"})
    )
    (claim,) = CORE.claims.of("warehouse/prices", lock_options.claim_options(ti, settings, wanted))
    return claim


def size(claim: Claim, holders: int, *, inside: bool) -> int:
    """Return the size in bytes of a lock with that many holders like this one."""
    entries = {}
    for _ in range(holders):
        values = holder_values(claim, Stamp(str(uuid.uuid4()), NOW_MS, NOW_MS, 0.0))
        values["processes"] = {f"{HOST}:4711:0123abcd": NOW_MS} if inside else {}
        entries[str(uuid.uuid4())] = values
    values = {
        "key": claim.key,
        "entry": "lock",
        "format_version": version.WRITTEN,
        "capacity": SHARED,
        "available": SHARED - holders,
        "holders": entries,
        "token": NOW_MS,
        "token_base": "verified",
        "last_freed_at": NOW_MS,
        "last_ticket": NOW_MS,
        "usual_ms": 3_612_345,
        "expires_at": NOW_MS // 1000,
    }
    return item_size({name: encode(value) for name, value in values.items()})


def most(claim: Claim, writes_a_second: float, *, inside: bool) -> int:
    """Return the maximum number of holders whose heartbeats DynamoDB serves."""
    holders = 1
    while (holders + 1) * writes_a_second * ceil(
        size(claim, holders + 1, inside=inside) / 1024
    ) <= WRITE_UNITS:
        holders += 1
    return holders


HEARTBEAT_TASK = lock_options.HEARTBEATS_PER_LEASE / DEFAULT_LEASE
GUARD = HEARTBEATS_PER_GRACE / RELEASE_GRACE


@pytest.mark.parametrize(
    ("row", "claim", "writes_a_second", "inside"),
    [
        ("`LockClient`", plain(), 6 / CORE.lease, False),
        ("`DynamoLockOperator`", of_a_task(), GUARD, True),
        ("a `DynamoLock` group", of_a_task(), HEARTBEAT_TASK + GUARD, True),
    ],
)
def test_the_page_says_how_many_holders_one_key_can_have(
    row: str, claim: Claim, writes_a_second: float, inside: bool
) -> None:
    entry = size(claim, 2, inside=inside) - size(claim, 1, inside=inside)
    for page in ("docs/performance.md", "bench/performance.md.jinja"):
        found = re.search(rf"^\| {row}.*?\| (\d+) \|.*\| (\d+) \|$", (ROOT / page).read_text(), re.MULTILINE)
        assert found
        assert (int(found[1]), int(found[2])) == (entry, most(claim, writes_a_second, inside=inside))


def test_a_write_to_a_plain_lock_is_one_write_unit_with_the_usual_hold_time() -> None:
    """Also with a process inside and a queue."""
    assert item_size({"usual_ms": encode(3_612_345)}) == 13
    assert item_size({"usual_ms": encode(LAST_MS)}) == 17
    head = item_size({"queue_head": encode(place_of(0, NOW_MS, str(uuid.uuid4())))})
    assert size(of_a_task(), 1, inside=True) + head <= 1024
