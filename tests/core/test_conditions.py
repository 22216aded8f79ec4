"""Each clause of each conditional write: DynamoDB refuses the write if the lock has changed since it was read.

Without these tests, a later edit could remove a clause and no test would fail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from botocore import xform_name
from botocore.exceptions import ClientError

from airflow_dynamo_lock.core.effects import Request, Stamp
from airflow_dynamo_lock.core.model.claim import Claim
from airflow_dynamo_lock.core.model.edits import Change
from airflow_dynamo_lock.core.model.record import LockRecord
from airflow_dynamo_lock.core.table.codec import encode
from airflow_dynamo_lock.core.table.native import NativeFormat
from airflow_dynamo_lock.core.table.position import head_at, head_of, place_of
from proof.simulator.stepped import KEY, TABLE

NOW = 1_800_000_000_000
FORMAT = NativeFormat(TABLE)
STAMP = Stamp("new", server_ms=NOW, host_ms=NOW, at=0.0)
CLAIM = Claim(KEY, "new", "new", 30_000, 15_000, capacity=3)
ABSENT: Any = None
#: The last ticket of the record.
TICKET = NOW - 100
#: Positions of the waiter with the next ticket, and of a later one.
PLACE, LATER = place_of(0, TICKET + 1, "me"), place_of(0, TICKET + 9, "other")

HOLDER = {
    "owner": "me",
    "slots": 1,
    "lease_ms": 30_000,
    "grace_ms": 15_000,
    "version": "v1",
    "acquired_at": NOW - 9000,
    "renewed_at": NOW - 5000,
    "processes": {},
}
#: A semaphore with three slots, of which two are held; and the same one without holders.
HELD: dict[str, Any] = {
    "key": KEY,
    "entry": "lock",
    "holders": {"me": HOLDER, "other": {**HOLDER, "owner": "other"}},
    "available": 1,
    "capacity": 3,
    "token": NOW - 60_000,
    "token_base": "verified",
    "expires_at": NOW // 1000 + 1000,
    "last_ticket": TICKET,
    "queue_head": head_at(PLACE),
}
IDLE = {**HELD, "holders": {}, "available": 3, "queue_head": ABSENT}

Write = Callable[[LockRecord], Request]


def but(item: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Return `item` with other attributes. ``me__slots`` changes the holder `me`; `_stored` omits what is `ABSENT`."""
    changed = dict(item)
    for name, value in changes.items():
        if name.startswith("me__"):
            me = {**changed["holders"]["me"], name.removeprefix("me__"): value}
            changed["holders"] = {**changed["holders"], "me": me}
        else:
            changed[name] = value
    return changed


def acquire_idle(seen: LockRecord) -> Request:
    return FORMAT.acquire_idle(CLAIM, STAMP, seen)


def acquire_slots(seen: LockRecord) -> Request:
    return FORMAT.acquire_slots(CLAIM, STAMP, seen)


def reclaim_one(seen: LockRecord) -> Request:
    claim = Claim(KEY, "new", "new", 30_000, 15_000, slots=2, capacity=3)
    return FORMAT.reclaim(claim, seen, [seen.holders["other"]], STAMP)


def reclaim_all(seen: LockRecord) -> Request:
    return FORMAT.reclaim(CLAIM, seen, list(seen.holders.values()), STAMP)


def reacquire(seen: LockRecord) -> Request:
    mine = Claim(KEY, "me", "me", 30_000, 15_000, capacity=3)
    return FORMAT.reacquire(mine, seen.holders["me"], STAMP, None)


def renew_for_longer(_: LockRecord) -> Request:
    return FORMAT.renew(KEY, "me", 60_000, STAMP, Change(longer=True))


def release(_: LockRecord) -> Request:
    return FORMAT.release(KEY, "me", 1, STAMP, confirmed=True)


def forget(seen: LockRecord) -> Request:
    return FORMAT.forget(KEY, seen.token)


def set_capacity(seen: LockRecord) -> Request:
    return FORMAT.set_capacity(KEY, 5, seen, STAMP)


def unset_capacity(seen: LockRecord) -> Request:
    return FORMAT.set_capacity(KEY, None, seen, STAMP)


def take_ticket(seen: LockRecord) -> Request:
    return FORMAT.take_ticket(KEY, 0, seen, STAMP)


def take_exact_ticket(seen: LockRecord) -> Request:
    return FORMAT.take_exact_ticket(CLAIM, seen, STAMP)


def lower_head(_: LockRecord) -> Request:
    return FORMAT.lower_head(KEY, head_at(place_of(0, TICKET - 50, "")))


def clear_head(_: LockRecord) -> Request:
    return FORMAT.clear_head(KEY, place_of(0, TICKET, "me"))


def advance_head(_: LockRecord) -> Request:
    return FORMAT.advance_head(KEY, PLACE)


NO_HEAD = but(HELD, queue_head=ABSENT)
ONE_WAITER = but(HELD, queue_head=head_of(0, TICKET))
RACES: list[tuple[Write, dict[str, Any], dict[str, Any]]] = [
    *((acquire_idle, IDLE, but(IDLE, **{name: value})) for name, value in [
        ("available", 2), ("holders", HELD["holders"]), ("capacity", "3"), ("token", "7"), ("data", "x"),
        ("last_ticket", "7"), ("queue_head", 7), ("token_base", ABSENT), ("capacity_pinned", True),
        ("queue_head", head_at(PLACE)), ("last_freed_at", NOW + 5000),
    ]),
    (acquire_idle, but(IDLE, token_base=ABSENT), but(IDLE, token_base="unverified")),
    (acquire_idle, but(IDLE, capacity_pinned=True), but(IDLE, capacity_pinned=True, capacity=5, available=5)),
    *((acquire_slots, NO_HEAD, but(NO_HEAD, **{name: value})) for name, value in [
        ("available", 0), ("capacity", 5), ("queue_head", head_at(PLACE)), ("last_freed_at", NOW + 5000),
        ("holders", {**HELD["holders"], "new": HOLDER}),
    ]),
    *((reclaim_one, NO_HEAD, but(NO_HEAD, **{name: value})) for name, value in [
        ("available", 0), ("capacity", 5), ("queue_head", head_at(PLACE)),
        ("holders", {**HELD["holders"], "new": HOLDER}),
        ("holders", {**HELD["holders"], "other": {**HOLDER, "version": "v2"}}),
    ]),
    *((reclaim_all, NO_HEAD, but(NO_HEAD, **{name: value})) for name, value in [
        ("holders", {**HELD["holders"], "third": HOLDER}), ("capacity_pinned", True),
    ]),
    *((reacquire, HELD, but(HELD, **{name: value})) for name, value in [
        ("me__slots", 2), ("capacity", 5), ("me__version", "v2"),
    ]),
    *((renew_for_longer, HELD, but(HELD, **{name: value})) for name, value in [
        ("me__lease_ms", 90_000), ("me__draining", True), ("me__renewed_at", NOW + 9000),
    ]),
    *((release, HELD, but(HELD, **{name: value})) for name, value in [
        ("me__slots", 2), ("me__processes", {"task": NOW}), ("me__hold_until", NOW + 1), ("holders", {}),
    ]),
    *((forget, IDLE, but(IDLE, **{name: value})) for name, value in [
        ("available", 2), ("holders", HELD["holders"]), ("queue_head", head_at(PLACE)), ("token", IDLE["token"] + 1),
    ]),
    (set_capacity, HELD, but(HELD, capacity=4)),
    (set_capacity, HELD, but(HELD, available="1")),
    (set_capacity, IDLE, but(IDLE, holders=HELD["holders"])),
    (unset_capacity, but(IDLE, capacity_pinned=True), IDLE),
    (unset_capacity, but(IDLE, capacity_pinned=True), but(IDLE, capacity_pinned=True, holders=HELD["holders"])),
    (lambda _: FORMAT.create(KEY, 3, STAMP), {}, IDLE),
    *((take_ticket, HELD, but(HELD, **{name: value})) for name, value in [
        ("last_ticket", ABSENT), ("queue_head", ABSENT), ("queue_head", head_at(LATER)),
    ]),
    (take_ticket, but(IDLE, last_ticket=ABSENT), {}),
    (take_ticket, but(IDLE, last_ticket=ABSENT), but(IDLE, last_ticket=NOW)),
    (take_ticket, but(HELD, queue_head=head_at(LATER)), but(HELD, queue_head=head_of(0, TICKET - 9))),
    (lower_head, IDLE, {}),
    (lower_head, HELD, but(HELD, queue_head=head_of(0, TICKET - 90))),
    *((clear_head, ONE_WAITER, but(ONE_WAITER, **{name: value})) for name, value in [
        ("queue_head", head_of(0, TICKET - 9)), ("queue_head", head_at(PLACE)), ("last_ticket", TICKET + 1),
    ]),
    *((advance_head, HELD, but(HELD, queue_head=head)) for head in [head_of(0, TICKET), head_at(LATER), ABSENT]),
    (lambda _: FORMAT.take_exact_ticket(CLAIM, None, STAMP), {}, IDLE),
    *((take_exact_ticket, HELD, but(HELD, **{name: value})) for name, value in [
        ("last_ticket", TICKET + 1), ("queue_head", ABSENT), ("queue_head", head_at(LATER)),
    ]),
    (take_exact_ticket, but(IDLE, last_ticket=ABSENT), {}),
    (take_exact_ticket, but(IDLE, last_ticket=ABSENT), but(IDLE, last_ticket=NOW)),
]  # fmt: skip


RACES += [
    (write, seen, {**seen, "format_version": 2})
    for write, seen in {race[0].__name__: race[:2] for race in RACES}.values()
    if seen
]


@pytest.mark.parametrize(("write", "seen", "meanwhile"), RACES)
def test_a_write_is_refused_if_the_lock_has_changed(
    client: Any, write: Write, seen: dict[str, Any], meanwhile: dict[str, Any]
) -> None:
    request = write(FORMAT.record(_stored(seen), NOW) if seen else LockRecord(KEY, 1, 1, {}, token=0))

    _carry_out(client, seen, request)
    with pytest.raises(ClientError, match="ConditionalCheckFailed"):
        _carry_out(client, meanwhile, request)


def _carry_out(client: Any, item: Mapping[str, Any], request: Request) -> None:
    client.delete_item(TableName=TABLE, Key=FORMAT.item_key(KEY))
    if item:
        client.put_item(TableName=TABLE, Item=_stored(item))
    getattr(client, xform_name(request.action))(**request.params)


def _stored(item: Mapping[str, Any]) -> dict[str, Any]:
    return {name: encode(value) for name, value in item.items() if value is not ABSENT}
