"""A machine that was suspended: within a second of waking, a holder detects that its lease is lost (R4).

Two clocks are simulated. Leases use the one that counts the suspend. Everything that waits (events, queues, event
loops) uses the other one, which does not.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from collections.abc import Callable, Iterator
from queue import Empty
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from airflow_dynamo_lock import AsyncLockClient, Lease, LockClient, LockLostError
from airflow_dynamo_lock.client import clock, leases
from airflow_dynamo_lock.client import threads as thread_runtime
from airflow_dynamo_lock.client.threads import KeepAlive
from airflow_dynamo_lock.core.effects import Operation, Sleep
from airflow_dynamo_lock.core.lock.renew import Renewing
from airflow_dynamo_lock.core.model.outcomes import Renewed
from airflow_dynamo_lock.core.model.record import Holder

LEASE = 30.0
#: A heartbeat interval that is longer than the rest of the lease, if the holder waits for it in one piece.
INTERVAL = 14.0
#: Rounding error of the clocks, which are floats, in seconds.
EXACT = 1e-6


class Machine:
    """A machine that is suspended once, for longer than a lease, three seconds after the start of the test."""

    suspended_at, suspended_for = 1003.0, 60.0
    woken_at = suspended_at + suspended_for

    def __init__(self) -> None:
        self.awake = 1000.0

    def clock(self) -> float:
        """The clock that counts the suspend."""
        return self.awake + (self.suspended_for if self.awake > self.suspended_at else 0.0)

    def wait(self, seconds: float) -> None:
        """Wait by the clock that does not count the suspend."""
        assert seconds >= 0
        self.awake += seconds
        assert self.awake < self.suspended_at + LEASE, "the test has not ended within a whole lease"


@pytest.fixture
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine: Machine = getattr(request, "param", Machine)()
    monkeypatch.setattr(clock, "_clock", machine.clock)
    return machine


@pytest.fixture
def reported_at() -> list[float]:
    """Times of the reports that a test expects, usually by the clock that counts the suspend."""
    return []


def the_lease(client: LockClient | AsyncLockClient) -> Lease:
    """Return a lease whose last heartbeat has just been sent."""
    lease = client._core.with_term(Lease("key", "lease", 1, "owner", 1, 1, int(LEASE * 1000), 1000, 0))
    assert lease.term
    lease.term.renewed(clock.monotonic(), lease.lease_ms)
    return lease


# -- threads --------------------------------------------------------------------------------------------------------


@pytest.fixture
def threads(machine: Machine) -> Iterator[list[Callable[[], None]]]:
    """The functions of the client's threads. The test calls them in its own thread, where waiting is simulated."""
    started: list[Callable[[], None]] = []

    class Thread:
        def __init__(self, *, target: Any, name: str, args: Any = (), daemon: bool) -> None:
            self.start = lambda: started.append(lambda: target(*args))

    class Event:
        def wait(self, seconds: float) -> bool:
            machine.wait(seconds)
            return False

        def is_set(self) -> bool:
            return False

        def set(self) -> None:
            raise AssertionError

    class Queue:
        def get(self, timeout: float) -> object:
            machine.wait(timeout)
            raise Empty

    here = SimpleNamespace(Thread=Thread, Event=Event, Lock=threading.Lock)
    with patch.object(thread_runtime, "threading", here), patch.object(thread_runtime, "SimpleQueue", Queue):
        yield started


def start_heartbeats(machine: Machine, reported_at: list[float], interval: float) -> KeepAlive:
    client = LockClient(None, table="locks", heartbeat=INTERVAL)

    def on_lost(lease: Lease, lost: LockLostError) -> None:
        assert "no heartbeat has succeeded in time" in str(lost)
        reported_at.append(machine.clock())

    def on_danger(lease: Lease, left: float) -> None:
        reported_at.append(machine.clock())

    return client.keep_alive(the_lease(client), interval=interval, on_lost=on_lost, on_danger=on_danger)


def test_a_holder_between_two_heartbeats_detects_its_loss_within_a_second_of_waking(
    machine: Machine, reported_at: list[float], threads: list[Callable[[], None]]
) -> None:
    start_heartbeats(machine, reported_at, INTERVAL)
    heartbeats, _ = threads
    heartbeats()

    assert len(reported_at) == 1
    assert reported_at[0] <= Machine.woken_at + 1 + EXACT


def test_a_holder_that_waits_for_an_answer_detects_its_loss_within_a_second_of_waking(
    machine: Machine, reported_at: list[float], threads: list[Callable[[], None]]
) -> None:
    start_heartbeats(machine, reported_at, interval=2.0)
    heartbeats, _ = threads
    heartbeats()

    assert len(reported_at) == 1
    assert reported_at[0] <= Machine.woken_at + 1 + EXACT


def test_a_monitor_ends_within_a_second_of_waking(
    machine: Machine, reported_at: list[float], threads: list[Callable[[], None]]
) -> None:
    start_heartbeats(machine, reported_at, INTERVAL)
    _, monitor = threads
    monitor()

    assert machine.clock() <= Machine.woken_at + 1 + EXACT


# -- asyncio --------------------------------------------------------------------------------------------------------


class Loop(asyncio.SelectorEventLoop):
    """An event loop on the simulated machine, without input from outside."""

    def __init__(self, machine: Machine) -> None:
        class Selector(selectors.SelectSelector):
            def select(self, timeout: float | None = None) -> list[Any]:
                assert timeout is not None, "the loop would wait for ever"
                machine.wait(max(0.0, timeout))
                return []

        self._machine = machine
        super().__init__(Selector())

    def time(self) -> float:
        return self._machine.awake


def run(machine: Machine, main: Callable[[], Any]) -> None:
    with asyncio.Runner(loop_factory=lambda: Loop(machine)) as runner:
        runner.run(main())


class Silent:
    """An SDK client that never receives an answer."""

    async def update_item(self, **_: object) -> None:
        await asyncio.get_running_loop().create_future()

    get_item = update_item


@pytest.mark.parametrize("interval", [INTERVAL, 2.0], ids=["asleep", "waiting for an answer"])
def test_a_coroutine_that_holds_detects_its_loss_within_a_second_of_waking(
    machine: Machine, reported_at: list[float], interval: float
) -> None:
    async def hold() -> None:
        client = AsyncLockClient(Silent(), table="locks", heartbeat=INTERVAL)

        def on_lost(lease: Lease, lost: LockLostError) -> None:
            reported_at.append(machine.clock())

        await client.keep_alive(the_lease(client), interval=interval, on_lost=on_lost)

    run(machine, hold)
    assert len(reported_at) == 1
    assert reported_at[0] <= Machine.woken_at + 1 + EXACT


def test_keep_for_processes_renews_within_a_second_of_waking(
    machine: Machine, reported_at: list[float]
) -> None:
    class Ended(Exception):
        pass

    def heartbeat(*_: object) -> Operation[Renewed]:
        reported_at.append(machine.clock())
        if machine.awake > Machine.suspended_at:
            raise Ended
        yield Sleep(0.0)
        return Renewed(Holder("lease", "owner", 1, int(LEASE * 1000), 1000, "", 0), machine.clock())

    async def keep() -> None:
        client = AsyncLockClient(Silent(), table="locks")
        with patch.object(Renewing, "_renew_or_error", heartbeat), pytest.raises(Ended):
            await client.keep_for_processes(the_lease(client), interval=INTERVAL)

    run(machine, keep)
    assert len(reported_at) == 2
    assert reported_at[1] <= Machine.woken_at + 1 + EXACT


def test_a_monitoring_task_ends_within_a_second_of_waking(machine: Machine) -> None:
    async def watch() -> None:
        client = AsyncLockClient(Silent(), table="locks")
        await client._run(leases.monitor(the_lease(client), 5.0, lambda *_: None))

    run(machine, watch)
    assert machine.clock() <= Machine.woken_at + 1 + EXACT


# -- a stop between two steps ---------------------------------------------------------------------------------------


class StoppedMachine(Machine):
    """A machine that is suspended for a minute just before its process reads the clock for the n-th time."""

    def __init__(self) -> None:
        super().__init__()
        self.reads, self.suspended_for = -1, 0.0

    def suspend_before_read(self, number: int) -> None:
        self.reads = number

    def clock(self) -> float:
        self.reads -= 1
        if self.reads == 0:
            self.suspended_for, self.suspended_at = 60.0, self.awake
        return self.awake + self.suspended_for


stopped = pytest.mark.parametrize("machine", [StoppedMachine], indirect=True)


@stopped
@pytest.mark.parametrize("interval", [INTERVAL, 2.0], ids=["asleep", "waiting for an answer"])
@pytest.mark.parametrize("read", range(1, 25))
def test_a_coroutine_that_is_stopped_between_two_steps_detects_its_loss_within_a_second(
    machine: StoppedMachine, reported_at: list[float], interval: float, read: int
) -> None:
    async def hold() -> None:
        client = AsyncLockClient(Silent(), table="locks", heartbeat=INTERVAL)
        lease = the_lease(client)
        machine.suspend_before_read(read)
        await client.keep_alive(
            lease, interval=interval, on_lost=lambda *_: reported_at.append(machine.awake)
        )

    run(machine, hold)
    assert len(reported_at) == 1
    assert reported_at[0] <= machine.suspended_at + 1 + EXACT


@stopped
@pytest.mark.parametrize("interval", [INTERVAL, 2.0], ids=["asleep", "waiting for an answer"])
@pytest.mark.parametrize("read", range(1, 25))
def test_a_thread_that_is_stopped_between_two_steps_detects_its_loss_within_a_second(
    machine: StoppedMachine,
    reported_at: list[float],
    threads: list[Callable[[], None]],
    interval: float,
    read: int,
) -> None:
    client = LockClient(None, table="locks", heartbeat=INTERVAL)
    lease = the_lease(client)
    client.keep_alive(lease, interval=interval, on_lost=lambda *_: reported_at.append(machine.awake))
    machine.suspend_before_read(read)
    (heartbeats,) = threads
    heartbeats()

    assert len(reported_at) == 1
    assert reported_at[0] <= machine.suspended_at + 1 + EXACT


# -- the clock ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("system", "chosen"),
    [
        ({"CLOCK_BOOTTIME": 7, "CLOCK_MONOTONIC": 1}, 7),  # Linux
        ({"CLOCK_MONOTONIC": 6}, 6),  # macOS, where time.monotonic() stands still during sleep
    ],
)
def test_the_clock_is_the_one_that_counts_sleep(
    monkeypatch: pytest.MonkeyPatch, system: dict[str, int], chosen: int
) -> None:
    clocks = SimpleNamespace(monotonic=lambda: -1.0, clock_gettime=lambda clock: float(clock), **system)
    monkeypatch.setattr(clock, "time", clocks)
    assert clock._clock_that_counts_sleep()() == chosen


def test_without_such_a_clock_it_is_pythons_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=time.monotonic))
    assert clock._clock_that_counts_sleep() is time.monotonic
