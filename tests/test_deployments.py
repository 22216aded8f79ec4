"""The clean-up of processes and event loops that the tests, the demo and the benchmarks start."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest

from deployments.clients import EventLoop
from deployments.processes import undisturbed

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def received() -> Iterator[list[int]]:
    """The signals that this process has received."""
    received: list[int] = []
    before = {each: signal.signal(each, lambda number, _: received.append(number)) for each in SIGNALS}
    yield received
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_during_the_clean_up_takes_effect_after_it(received: list[int], number: int) -> None:
    with undisturbed():
        signal.raise_signal(number)
        assert received == []
    assert received == [number]


def test_an_ignored_hangup_does_not_hide_the_signal_after_it(received: list[int]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as by nohup
    with undisturbed():
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)
    assert received == [signal.SIGTERM]


def test_an_event_loop_ends_tasks_that_cancelled_tasks_start() -> None:
    ended: list[str] = []

    async def run(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)
            if name == "waiter":
                started.append(asyncio.ensure_future(run("its clean-up")))
                await asyncio.sleep(0)

    started: list[asyncio.Future[None]] = []
    with EventLoop() as events:
        asyncio.run_coroutine_threadsafe(run("waiter"), events.loop)
    assert ended == ["waiter", "its clean-up"]
