"""Triggers that look after several leases: what becomes of one does not stop the work on the others."""

from __future__ import annotations

import asyncio

import pytest

from airflow_dynamo_lock.protocol.errors import LockAccessError
from airflow_dynamo_lock.triggers import _each


async def test_one_lease_that_fails_leaves_the_others_to_their_own_end() -> None:
    ended: list[str] = []

    async def fail() -> None:
        raise LockAccessError("denied")

    async def go_on(name: str) -> None:
        await asyncio.sleep(0.01)
        ended.append(name)

    with pytest.raises(LockAccessError):
        await _each([go_on("first"), fail(), go_on("last")])

    assert ended == ["first", "last"]


async def test_a_trigger_that_is_cancelled_takes_all_its_work_with_it() -> None:
    cancelled: list[str] = []

    async def go_on(name: str) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.append(name)

    working = asyncio.ensure_future(_each([go_on("first"), go_on("last")]))
    await asyncio.sleep(0.01)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working

    assert cancelled == ["first", "last"]
