"""docs/protocol.md describes the attributes of all items, and what each write changes and on which condition."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import pytest

from airflow_dynamo_lock.core.effects import Request
from airflow_dynamo_lock.core.model.claim import Claim
from airflow_dynamo_lock.core.model.decisions import UNKNOWN, Removal
from airflow_dynamo_lock.core.model.edits import Change, CoolDown, Drain, Enter, Heartbeat
from airflow_dynamo_lock.core.model.hold import Hold
from airflow_dynamo_lock.core.model.record import LockRecord, Waiter
from airflow_dynamo_lock.core.table.grant_writes import GrantWrites
from airflow_dynamo_lock.core.table.items import ATTRIBUTES, holder_values, waiter_values
from airflow_dynamo_lock.core.table.lease_writes import LeaseWrites
from airflow_dynamo_lock.core.table.native import NativeFormat
from airflow_dynamo_lock.core.table.queue_writes import QueueWrites
from proof.simulator.sdk import SimulatedClient
from proof.simulator.stepped import KEY, TABLE, Host, World, a_holder
from tests.pages import table

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
#: Attributes in the conditions and updates of all writes, which the page describes outside of the table.
EVERYWHERE = {"key", "entry", "format_version", "expires_at"}
#: The same for all grants: queue, pinned capacity, data of the caller.
OF_GRANTS = {"queue_head", "last_ticket", "capacity_pinned", "data"}
GRANTS = ("acquire_idle", "acquire_slots", "reclaim")
ABBREVIATIONS = {"as heartbeat": "`holders.version`, `renewed_at`", "in order": "`renewed_at`, `version`"}
READS = {"read_queue", "lock_in", "waiters"}

WRITES = NativeFormat(TABLE)
HOST = Host(World(SimulatedClient()))
HOST.take("earlier")  # so that the host knows the server's time
STAMP = HOST.stamp()
CLAIM = HOST.claim("me", min_hold_ms=1, data={"a": 1})
ALONE = LockRecord(KEY, 1, 0, {"me": a_holder("me")}, token=1)
BESIDE = LockRecord(KEY, 3, 1, {name: a_holder(name) for name in ("a", "b")}, token=1)

#: The writes as the code builds them, in all variants that differ in their attributes.
BUILT: Mapping[str, Sequence[Request]] = {
    "acquire_idle": [WRITES.acquire_idle(CLAIM, STAMP)],
    "acquire_slots": [WRITES.acquire_slots(CLAIM, STAMP, BESIDE)],
    "reclaim": [
        WRITES.reclaim(CLAIM, BESIDE, [BESIDE.holders[name] for name in dead], STAMP) for dead in ("ab", "a")
    ],
    "reacquire": [WRITES.reacquire(CLAIM, a_holder("me"), STAMP, None)],
    "correct_grant": [WRITES.correct_grant(CLAIM, ALONE, 2, STAMP, None)],
    **{
        f"renew {type(edit).__name__}": [WRITES.renew(KEY, "me", 30_000, STAMP, edit, seen) for seen in seens]
        for edit, seens in (
            (Heartbeat(), (None, a_holder("me"))),
            (Change(longer=True, data={"a": 1}), (None, a_holder("me"))),
            (Enter("p"), (None, a_holder("me"))),
            (Drain(), (None, a_holder("me"))),
            (CoolDown(1), (a_holder("me"),)),
        )
    },
    "leave": [WRITES.leave(KEY, "me", "p", 30_000, STAMP)],
    "release": [
        WRITES.release(KEY, "me", 1, STAMP, confirmed=True, hold=Hold("me", 1, None), leaving=leaving)
        for leaving in (None, "p")
    ],
    "break_": [WRITES.break_(KEY, a_holder("me"), STAMP, UNKNOWN)],
    "note_removal": [WRITES.note_removal(KEY, "me", Removal(0), ["other"])],
    "take_ticket": [WRITES.take_ticket(KEY, 0, ALONE, STAMP)],
    "lower_head": [WRITES.lower_head(KEY, "0999/000000000000001/a")],
    "clear_head": [WRITES.clear_head(KEY, "0999/000000000000001/a")],
    "advance_head": [WRITES.advance_head(KEY, "0999/000000000000001/a")],
    "set_capacity": [WRITES.set_capacity(KEY, capacity, ALONE, STAMP) for capacity in (3, None)],
    "create": [WRITES.create(KEY, 3, STAMP)],
}


def named(cell: str) -> set[str]:
    """Return the attributes that a cell names as written or compared, without their values."""
    for short, long in ABBREVIATIONS.items():
        cell = cell.replace(short, long)
    targets = [re.split(r"[=+−≥]", code)[0] for code in re.findall(r"`([^`]+)`", cell)]
    return {name for target in targets for name in re.findall(r"\w+", target)} & set(ATTRIBUTES)


def used(request: Request, part: str) -> set[str]:
    """Return the attributes in an expression of a write."""
    names = request.params["ExpressionAttributeNames"]
    return {names[name] for name in re.findall(r"#\w+", request.params.get(part, ""))} & set(ATTRIBUTES)


@pytest.mark.parametrize("method", BUILT)
@pytest.mark.parametrize(("column", "part"), [(2, "UpdateExpression"), (3, "ConditionExpression")])
def test_a_write_is_as_the_page_describes_it(method: str, column: int, part: str) -> None:
    described = [
        row[column] for row in table(PAGE, "The writes") if " ".join(re.findall(r"`(\w+)`", row[1])) == method
    ]
    elsewhere = EVERYWHERE | (OF_GRANTS if method in GRANTS else set())
    assert {name for cell in described for name in named(cell)} - elsewhere == {
        name for request in BUILT[method] for name in used(request, part)
    } - elsewhere


def test_the_page_has_all_writes() -> None:
    methods = {
        name
        for writes in (GrantWrites, LeaseWrites, QueueWrites)
        for name in vars(writes)
        if not name.startswith("_") and name not in READS
    }
    rows = [*table(PAGE, "The writes"), *table(PAGE, "Other writes")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row[1]) if name.islower()} == methods


def attributes(heading: str) -> set[str]:
    return {name for row in table(PAGE, heading) for name in re.findall(r"`(\w+)`", row[0])}


def test_the_page_has_all_attributes() -> None:
    lock, holder = attributes("The lock item"), attributes("A holder")
    assert lock <= set(ATTRIBUTES) <= lock | holder | {"key", "entry", "process"}
    texts = {each.name: "text" for each in fields(Claim) if each.type == "str | None"}
    claim = HOST.claim("me", min_hold_ms=1, about={"dag": "etl"}, **texts)
    assert holder - {"draining", "cooling_down"} == holder_values(claim, STAMP, took_over=True).keys()
    waiter = Waiter(KEY, "0999/1/a", "me", "me", 1, 1, 0, 1, 1, "p", "v", 1, {"dag": "etl"})
    listed = set(
        re.findall(r"`(\w+)`", PAGE.read_text().partition("The other attributes are")[2].partition("\n\n")[0])
    )
    assert listed >= waiter_values(waiter).keys() | {"format_version", "expires_at"}
