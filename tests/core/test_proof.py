"""Rules whose violation no simulated history shows, or only one in many thousands.

A mutation in `proof/simulator/mutations.py` names each test, which must fail under that mutation.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from airflow_dynamo_lock.core.effects import Stamp
from airflow_dynamo_lock.core.model.edits import CoolDown
from airflow_dynamo_lock.core.model.errors import CapacityMismatchError
from airflow_dynamo_lock.core.model.record import LockRecord
from airflow_dynamo_lock.core.table.native import NativeFormat
from airflow_dynamo_lock.core.table.position import next_ticket
from proof.simulator.stepped import HOURS, KEY, TABLE, Host, World

_WEEK = 7 * 24 * HOURS


@pytest.mark.parametrize(
    "seen", [None, LockRecord(KEY, 1, 1, {}, token=7)], ids=["no record", "no tickets yet"]
)
def test_the_first_ticket_of_a_queue_is_the_time(seen: LockRecord | None) -> None:
    """Tickets must also grow if the record was deleted while a waiter was queued."""
    stamp = Stamp("v", server_ms=1_800_000_000_000, host_ms=5, at=0.0)

    assert next_ticket(seen, stamp) == stamp.server_ms + 1  # type: ignore[operator]


def test_a_token_from_an_old_estimate_in_set_capacity_is_corrected_by_the_next_grant(world: World) -> None:
    """The machine was suspended for a week between the stamp and the write."""
    person = Host(world, "person").start(Host(world, "person").operations.admin.set_capacity(KEY, 3))
    person.step()
    assert person.effect is not None, "the write is stamped, but not sent"
    world.now += _WEEK
    person.finish()

    granted = Host(world, "client").take(slots=1, capacity=3)

    assert granted.token > world.server_ms - 3000


def test_a_reclaim_by_a_claim_that_was_granted_meanwhile_is_refused(world: World) -> None:
    """Two processes run the same attempt: one takes a freed slot, the other reclaims that of a dead holder."""
    for name in ("dead", "alive"):
        Host(world, name).take(capacity=2)
    world.now += 45.0
    Host(world, "alive").heartbeat()
    late = Host(world, "second").start(
        Host(world, "second").operations.attempting.try_acquire(
            Host(world, "second").claim("ti", capacity=2), owns_lease_id=False
        )
    )
    late.step()
    assert late.effect is not None, "the reclaim is stamped, but not sent"
    Host(world, "alive").release()
    Host(world, "first").take("ti", capacity=2)

    late.finish()

    record = world.record()
    assert record.available + sum(each.slots for each in record.holders.values()) == record.capacity


def test_a_late_claim_takes_no_slot_of_another_capacity(world: World) -> None:
    Host(world, "holder").take(capacity=3)
    late = Host(world, "late").start(
        Host(world, "late").operations.attempting.try_acquire(
            Host(world, "late").claim(capacity=3), owns_lease_id=False
        )
    )
    late.step()
    assert late.effect is not None, "the write that takes a free slot is stamped, but not sent"
    Host(world, "holder").release()
    Host(world, "other").take(capacity=5)

    with pytest.raises(CapacityMismatchError):
        late.finish()


def test_lowering_the_head_of_a_queue_never_advances_it(world: World) -> None:
    host = Host(world, "a")
    host.take()
    world.store(**(world.item() or {}) | {"queue_head": {"S": "0999/000000000000005"}})

    assert host.send(NativeFormat(TABLE).lower_head(KEY, "0999/000000000000009/late")).refused


def test_a_lease_does_not_cool_down_with_a_process_inside(world: World) -> None:
    """The process entered between the read that showed no process inside and the write."""
    host = Host(world, "a")
    host.take(min_hold_ms=60_000)
    holder = world.record().holders["a"]
    host.enter("pid-1")
    holder = replace(holder, version=world.record().holders["a"].version)

    assert host.send(
        NativeFormat(TABLE).renew(KEY, holder.lease_id, 50_000, host.stamp(), CoolDown(), holder)
    ).refused


def test_a_token_correction_does_not_overwrite_a_later_grant(world: World) -> None:
    host = Host(world, "a")
    host.take(capacity=2)
    seen = world.record()
    Host(world, "b").take(capacity=2)

    assert host.send(
        NativeFormat(TABLE).correct_grant(host.claim(capacity=2), seen, 5, host.stamp(), last=None)
    ).refused


def test_a_claim_leaves_slots_for_the_waiters_ahead_of_it(world: World) -> None:
    host = Host(world, "a")
    Host(world, "b").take(slots=2, capacity=3)

    write = NativeFormat(TABLE).acquire_slots(
        host.claim(capacity=3), host.stamp(), world.record(), reserved=1
    )

    assert host.send(write).refused


def test_a_waiter_item_is_handed_over_only_by_its_own_process(world: World) -> None:
    host = Host(world, "a")

    write = NativeFormat(TABLE).hand_over_entry(KEY, "0999/000000000000009/v", "waiting:gone", host.stamp())

    assert host.send(write).refused, "the item does not exist"
