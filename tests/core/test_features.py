"""Claims that a table format cannot store are errors before any write. Locks and waiters as values for JSON."""

from __future__ import annotations

from dataclasses import replace

import pytest

from airflow_dynamo_lock.core.foreign.registry import format_of
from airflow_dynamo_lock.core.model.claim import Claim, LockSpec
from airflow_dynamo_lock.core.model.errors import LockValueError
from airflow_dynamo_lock.core.model.limits import SHARED
from airflow_dynamo_lock.core.model.record import Holder, LockRecord, Waiter
from airflow_dynamo_lock.core.table.features import checked_claim
from airflow_dynamo_lock.core.table.native import NativeFormat

CLAIM = Claim("k", "me", "owner", 30_000, 15_000)
NATIVE, FOREIGN = NativeFormat("locks"), format_of("awsflock", "locks", 10_000)


def test_a_plain_claim_fits_each_format_and_is_fair_only_with_queues() -> None:
    assert checked_claim(NATIVE, CLAIM) == CLAIM
    assert checked_claim(FOREIGN, CLAIM) == replace(CLAIM, fair=False)
    assert LockSpec().priority == 0


@pytest.mark.parametrize("wants", [{"capacity": 2}, {"min_hold_ms": 1}, {"priority": 1}, {"priority": -1}])
def test_a_claim_that_a_format_cannot_store_is_an_error(wants: dict[str, int]) -> None:
    claim = replace(CLAIM, **wants)  # type: ignore[arg-type]
    assert checked_claim(NATIVE, claim) == claim
    with pytest.raises(LockValueError, match="awsflock"):
        checked_claim(FOREIGN, claim)


def test_a_record_as_values_for_json() -> None:
    holder = Holder("me", "owner", 1, 30_000, 15_000, "v", None)
    plain = LockRecord("k", 1, 0, {"me": holder}, token=7).as_dict()
    shared = LockRecord("k", SHARED, SHARED - 1, {"me": holder}, token=0).as_dict()
    assert (plain["capacity"], plain["available"], plain["token"]) == (1, 0, 7)
    assert (shared["capacity"], shared["available"], shared["token"]) == (None, None, None)
    assert plain["holders"][0]["lease_seconds"] == 30


@pytest.mark.parametrize(("capacity", "shown"), [(1, 1), (3, 3), (SHARED, None)])
def test_a_waiter_as_values_for_json(capacity: int, shown: int | None) -> None:
    waiter = Waiter("k", "0999/1/u", "me", "owner", 1, capacity, 0, 0, None, None, "v", None)
    assert waiter.as_dict()["capacity"] == shown
