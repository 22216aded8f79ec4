"""Each clause of each conditional write: what may have changed since the lock was seen, and then refuses the write.

A clause that can be left out with no test going red is one that the next edit leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from botocore import xform_name
from botocore.exceptions import ClientError

from airflow_dynamo_lock.protocol.attributes import encode
from airflow_dynamo_lock.protocol.effects import Request, Stamp
from airflow_dynamo_lock.protocol.model import Change, Claim, LockRecord
from airflow_dynamo_lock.protocol.native import NativeFormat
from airflow_dynamo_lock.protocol.places import front_of, mark_at, place_of
from tests.simulation import KEY, TABLE

NOW = 1_800_000_000_000
FORMAT = NativeFormat(TABLE)
STAMP = Stamp("new", server_ms=NOW, host_ms=NOW, at=0.0)
CLAIM = Claim(KEY, "new", "new", 30_000, 15_000, capacity=3)
GONE: Any = None
DRAWN = NOW - 100
#: Of who drew the next number, and of others before and behind.
PLACE, LATER = place_of(0, DRAWN + 1, "me"), place_of(0, DRAWN + 9, "other")

HOLDER = {
    "owner": "me",
    "slots": 1,
    "lease_ms": 30_000,
    "grace_ms": 15_000,
    "version": "v1",
    "acquired_at": NOW - 9000,
    "renewed_at": NOW - 5000,
    "inside": {},
}
#: A semaphore of three slots, of which two are held; and the same while nobody holds it.
HELD: dict[str, Any] = {
    "key": KEY,
    "entry": "lock",
    "holders": {"me": HOLDER, "other": {**HOLDER, "owner": "other"}},
    "available": 1,
    "capacity": 3,
    "token": NOW - 60_000,
    "seed": "checked",
    "expires_at": NOW // 1000 + 1000,
    "tickets": DRAWN,
    "first": mark_at(PLACE),
}
IDLE = {**HELD, "holders": {}, "available": 3, "first": GONE}

Write = Callable[[LockRecord], Request]


def but(item: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """`item` with other attributes; ``me__slots`` is that of the holder `me`, what is `GONE` is left out."""
    changed = dict(item)
    for name, value in changes.items():
        if name.startswith("me__"):
            me = {**changed["holders"]["me"], name.removeprefix("me__"): value}
            changed["holders"] = {**changed["holders"], "me": me}
        else:
            changed[name] = value
    return changed


def take_idle(seen: LockRecord) -> Request:
    return FORMAT.take_idle(CLAIM, STAMP, seen)


def take_room(seen: LockRecord) -> Request:
    return FORMAT.take_room(CLAIM, STAMP, seen)


def reclaim_one(seen: LockRecord) -> Request:
    claim = Claim(KEY, "new", "new", 30_000, 15_000, slots=2, capacity=3)
    return FORMAT.reclaim(claim, seen, [seen.holders["other"]], STAMP)


def reclaim_all(seen: LockRecord) -> Request:
    return FORMAT.reclaim(CLAIM, seen, list(seen.holders.values()), STAMP)


def take_again(seen: LockRecord) -> Request:
    mine = Claim(KEY, "me", "me", 30_000, 15_000, capacity=3)
    return FORMAT.take_again(mine, seen.holders["me"], STAMP)


def renew_for_longer(_: LockRecord) -> Request:
    return FORMAT.heartbeat_unless_ending(KEY, "me", 60_000, STAMP, change=Change(lease_ms=60_000))


def release(_: LockRecord) -> Request:
    return FORMAT.release(KEY, "me", 1, STAMP, heard=True)


def forget(seen: LockRecord) -> Request:
    return FORMAT.forget(KEY, seen.token)


def set_capacity(seen: LockRecord) -> Request:
    return FORMAT.set_capacity(KEY, 5, seen, STAMP)


def unset_capacity(seen: LockRecord) -> Request:
    return FORMAT.set_capacity(KEY, None, seen, STAMP)


def draw(seen: LockRecord) -> Request:
    return FORMAT.draw(KEY, 0, seen, STAMP)


def draw_exactly(seen: LockRecord) -> Request:
    return FORMAT.draw_exactly(CLAIM, seen, STAMP)


def lower(_: LockRecord) -> Request:
    return FORMAT.lower(KEY, mark_at(place_of(0, DRAWN - 50, "")))


def unmark(_: LockRecord) -> Request:
    return FORMAT.unmark(KEY, place_of(0, DRAWN, "me"))


def move_mark(_: LockRecord) -> Request:
    return FORMAT.move_mark(KEY, PLACE)


NO_FIRST = but(HELD, first=GONE)
ONE_LEFT = but(HELD, first=front_of(0, DRAWN))
RACES: list[tuple[Write, dict[str, Any], dict[str, Any]]] = [
    *((take_idle, IDLE, but(IDLE, **{name: value})) for name, value in [
        ("available", 2), ("holders", HELD["holders"]), ("capacity", "3"), ("token", "7"), ("data", "x"),
        ("tickets", "7"), ("first", 7), ("seed", GONE), ("fixed", True), ("first", mark_at(PLACE)),
        ("vacated_at", NOW + 5000),
    ]),
    (take_idle, but(IDLE, seed=GONE), but(IDLE, seed="guessed")),
    (take_idle, but(IDLE, fixed=True), but(IDLE, fixed=True, capacity=5, available=5)),
    *((take_room, NO_FIRST, but(NO_FIRST, **{name: value})) for name, value in [
        ("available", 0), ("capacity", 5), ("first", mark_at(PLACE)), ("vacated_at", NOW + 5000),
        ("holders", {**HELD["holders"], "new": HOLDER}),
    ]),
    *((reclaim_one, NO_FIRST, but(NO_FIRST, **{name: value})) for name, value in [
        ("available", 0), ("capacity", 5), ("first", mark_at(PLACE)),
        ("holders", {**HELD["holders"], "new": HOLDER}),
        ("holders", {**HELD["holders"], "other": {**HOLDER, "version": "v2"}}),
    ]),
    *((reclaim_all, NO_FIRST, but(NO_FIRST, **{name: value})) for name, value in [
        ("holders", {**HELD["holders"], "third": HOLDER}), ("fixed", True),
    ]),
    *((take_again, HELD, but(HELD, **{name: value})) for name, value in [
        ("me__slots", 2), ("capacity", 5), ("me__version", "v2"),
    ]),
    *((renew_for_longer, HELD, but(HELD, **{name: value})) for name, value in [
        ("me__lease_ms", 90_000), ("me__ending", True), ("me__renewed_at", NOW + 9000),
    ]),
    *((release, HELD, but(HELD, **{name: value})) for name, value in [
        ("me__slots", 2), ("me__inside", {"task": NOW}), ("me__hold_until", NOW + 1), ("holders", {}),
    ]),
    *((forget, IDLE, but(IDLE, **{name: value})) for name, value in [
        ("available", 2), ("holders", HELD["holders"]), ("first", mark_at(PLACE)), ("token", IDLE["token"] + 1),
    ]),
    (set_capacity, HELD, but(HELD, capacity=4)),
    (set_capacity, HELD, but(HELD, available="1")),
    (set_capacity, IDLE, but(IDLE, holders=HELD["holders"])),
    (unset_capacity, but(IDLE, fixed=True), IDLE),
    (unset_capacity, but(IDLE, fixed=True), but(IDLE, fixed=True, holders=HELD["holders"])),
    (lambda _: FORMAT.found(KEY, 3, STAMP), {}, IDLE),
    *((draw, HELD, but(HELD, **{name: value})) for name, value in [
        ("tickets", GONE), ("first", GONE), ("first", mark_at(LATER)),
    ]),
    (draw, but(IDLE, tickets=GONE), {}),
    (draw, but(IDLE, tickets=GONE), but(IDLE, tickets=NOW)),
    (draw, but(HELD, first=mark_at(LATER)), but(HELD, first=front_of(0, DRAWN - 9))),
    (lower, IDLE, {}),
    (lower, HELD, but(HELD, first=front_of(0, DRAWN - 90))),
    *((unmark, ONE_LEFT, but(ONE_LEFT, **{name: value})) for name, value in [
        ("first", front_of(0, DRAWN - 9)), ("first", mark_at(PLACE)), ("tickets", DRAWN + 1),
    ]),
    *((move_mark, HELD, but(HELD, first=first)) for first in [front_of(0, DRAWN), mark_at(LATER), GONE]),
    (lambda _: FORMAT.draw_exactly(CLAIM, None, STAMP), {}, IDLE),
    *((draw_exactly, HELD, but(HELD, **{name: value})) for name, value in [
        ("tickets", DRAWN + 1), ("first", GONE), ("first", mark_at(LATER)),
    ]),
    (draw_exactly, but(IDLE, tickets=GONE), {}),
    (draw_exactly, but(IDLE, tickets=GONE), but(IDLE, tickets=NOW)),
]  # fmt: skip


@pytest.mark.parametrize(("write", "seen", "meanwhile"), RACES)
def test_a_write_is_refused_if_this_has_changed(
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
    return {name: encode(value) for name, value in item.items() if value is not GONE}
