"""Simulated time, processes, and machines with inaccurate clocks.

*True time* is the time of the simulation, in seconds since the history began. No process can read it; a
process reads the clocks of its machine. Each process is an event loop that runs the real `AsyncLockClient`.
One queue holds all events, ordered by due time and then in the order in which they were added. All random
numbers come from one generator, so the same seed always gives the same history.
"""

from __future__ import annotations

import asyncio
import random
from asyncio import events
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush
from threading import current_thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from airflow_dynamo_lock.client import claims, clock, session

#: The server's time at the start of a history, in epoch seconds. It is not a whole second, because `Date`
#: headers are.
BEGIN = 1_800_000_000.25


@dataclass(frozen=True)
class Assumptions:
    """How far conditions may go. The defaults keep to the assumptions of the protocol (docs/protocol.md), and
    tests break one of them on purpose.

    :ivar rates: greatest relative error of the rate of a machine's clocks.
    :ivar skew: seconds by which the clocks of two DynamoDB servers may differ beyond what the protocol
        allows, which is `max_clock_skew` - 5 s.
    :ivar late: greatest delay of a request on its way to DynamoDB, in seconds.
    :ivar stale: greatest age of an eventually consistent read, in seconds.
    """

    rates: float = 0.05
    skew: float = 0.0
    late: float = 60.0
    stale: float = 3.0


@dataclass(frozen=True)
class Machine:
    """The clocks of a machine.

    :ivar rate: seconds that the clocks count in one second of true time.
    :ivar booted: value of the boot-time clock at the start of the history, in seconds.
    :ivar wall: seconds by which the wall clock is ahead of the server's time.
    """

    rate: float
    booted: float
    wall: float


class Handle:
    """A scheduled call, with the interface of `asyncio.Handle` and `asyncio.TimerHandle`.

    :ivar process: the process in which the call runs; None if it runs outside all processes.
    :ivar suspended: for a timer, the total suspend time of the process that its due time already includes. A
        suspend postpones timers. None for other calls.
    """

    __slots__ = ("_args", "_callback", "_cancelled", "process", "suspended")

    def __init__(
        self, process: Process | None, callback: Callable[..., object], args: tuple[Any, ...]
    ) -> None:
        self.process = process
        self.suspended: float | None = None
        self._callback, self._args, self._cancelled = callback, args, False

    def cancel(self) -> None:
        """Do not make the call."""
        self._cancelled = True

    def cancelled(self) -> bool:
        """Whether the call was cancelled."""
        return self._cancelled

    def run(self) -> None:
        """Make the call, unless it was cancelled."""
        if not self._cancelled:
            self._callback(*self._args)


class Process:
    """A simulated process: running, paused or dead. It is also the event loop on which its coroutines run.

    :ivar alive: False after the process was killed. No event of a dead process runs.
    :ivar paused_until: true time at which the present pause ends. A pause may begin in the middle of an
        event. The rest of that event then counts as happening after the pause, so `true_now` is ahead of
        `World.now`.
    :ivar ids: UUIDs that the process has generated: its lease ids, and the versions of its writes.
    :ivar can_send: whether requests of the process reach DynamoDB.
    :ivar can_receive: whether answers of DynamoDB reach the process.
    :ivar strips_date: whether a proxy removes the ``Date`` header from the answers to this process.
    :ivar suspended: total time for which the machine was suspended so far, in seconds of true time.
    :ivar pauses: pauses of the process or of one of its threads, each as begin and end in true time.
    :ivar threads: its threads (threads.py), ended ones included.
    """

    def __init__(self, world: World, name: str, machine: Machine) -> None:
        self.world, self.name, self.machine = world, name, machine
        self.alive = True
        self.paused_until = 0.0
        self.ids: set[str] = set()
        self.can_send = self.can_receive = True
        self.strips_date = world.proxied and world.random.random() < 0.5
        self.suspended = 0.0
        self.pauses: list[tuple[float, float]] = []
        self.threads: list[Any] = []
        self._ready: deque[Handle] = deque()
        self._coroutines: list[Coroutine[Any, Any, Any]] = []

    # -- clocks -----------------------------------------------------------------------------------------------

    @property
    def true_now(self) -> float:
        """The present true time of this process: that of the world, or the end of a pause that has just
        begun."""
        return max(self.world.now, self.paused_until)

    def boottime(self) -> float:
        """Return CLOCK_BOOTTIME in seconds, which includes the time of a suspend."""
        return self.machine.booted + self.true_now * self.machine.rate

    def time(self) -> float:
        """Return CLOCK_MONOTONIC in seconds, which excludes the time of a suspend. asyncio's timers use this
        clock."""
        return self.boottime() - self.suspended * self.machine.rate

    def true_time(self, at: float) -> float:
        """Return the true time at which the boot-time clock shows `at`."""
        return (at - self.machine.booted) / self.machine.rate

    def pause(self, seconds: float, *, suspend: bool = False) -> None:
        """Pause the process from now on, even in the middle of an event.

        :param seconds: length of the pause in true time.
        :param suspend: suspend the whole machine; else stop only the process, as SIGSTOP does.
        """
        begun = self.true_now
        self.paused_until = begun + seconds
        self.pauses.append((begun, self.paused_until))
        if suspend:
            self.suspended += seconds

    # -- work -------------------------------------------------------------------------------------------------

    def start(self, work: Coroutine[Any, Any, Any]) -> Callable[[], object]:
        """Start a coroutine in the process. Returns a function that cancels it."""
        tasks: list[asyncio.Task[Any]] = []
        # Keep a reference: garbage collection of a dead process's coroutine would run its `finally` blocks.
        self._coroutines.append(work)
        self.world.at(self.true_now, self, lambda: tasks.append(self.create_task(work)))
        return lambda: [self.world.at(self.true_now, self, task.cancel) for task in tasks]

    def run_event(self, handle: Handle) -> None:
        """Run an event in the process, and all callbacks that it schedules with `call_soon`."""
        self.world.running = self
        events._set_running_loop(self)  # type: ignore[arg-type]
        try:
            handle.run()
            while self._ready:
                self._ready.popleft().run()
        finally:
            events._set_running_loop(None)

    # -- interface of an asyncio event loop -------------------------------------------------------------------

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        handle = Handle(self, callback, args)
        self._ready.append(handle)
        return handle

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        timer = self.world.at(self.true_now + max(0.0, delay) / self.machine.rate, self, callback, *args)
        timer.suspended = self.suspended
        return timer

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return self.call_later(when - self.time(), callback, *args)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)  # type: ignore[arg-type]

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None, **_: Any) -> Any:
        return asyncio.Task(coro, loop=self, name=name or "")  # type: ignore[arg-type]

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        # asyncio reports the pending tasks of a killed process, which are no errors.
        if "was destroyed but it is pending" not in context["message"]:
            self.world.errors.append(f"{self.name}: {context['message']}: {context.get('exception')!r}")


@dataclass
class World:
    """The time, the random numbers and the processes of one history.

    :ivar seed: seed of the random numbers.
    :ivar now: true time of the present event, in seconds.
    :ivar faults: number of injected faults, by the label that reports show.
    :ivar errors: uncaught errors, and invalid requests; the checker reports each as a violation.
    :ivar pause_probability: probability of a pause each time that a process reads its clock.
    :ivar suspends: whether some of these pauses suspend the whole machine.
    :ivar proxied: whether some processes use a proxy that removes the ``Date`` header from answers.
    :ivar id_created_at: true time at which each UUID was generated. A stamp is made together with its UUID.
    :ivar log_line: called with each line of the log of this history; None writes no log.
    :ivar on_clock: called each time that a process reads its clock.
    :ivar random: the random number generator.
    :ivar running: the process whose event runs at present.
    """

    seed: int
    assumptions: Assumptions = field(default_factory=Assumptions)
    now: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)
    pause_probability: float = 0.0
    suspends: bool = False
    proxied: bool = False
    id_created_at: dict[str, float] = field(default_factory=dict)
    log_line: Callable[[str], None] | None = None
    on_clock: Callable[[World], None] = lambda _: None

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.running: Process | None = None
        self._thread = current_thread()
        self._intruders: set[str] = set()
        self._queue: list[tuple[float, int, Handle]] = []
        self._count = 0
        self._ids = 0

    def machine(self) -> Machine:
        """Return a machine with random clocks, within the assumptions."""
        rng, rates = self.random, self.assumptions.rates
        return Machine(
            rate=rng.choice([1 - rates, 1.0, 1 + rates]),
            booted=rng.uniform(0, 1e6),
            # Correct, or wrong by one second to three years; all orders of magnitude are equally likely.
            wall=0.0 if rng.random() < 0.3 else rng.choice([-1, 1]) * 10 ** rng.uniform(0.0, 8.0),
        )

    def process(self, name: str) -> Process:
        """Create a process on a machine of its own."""
        self.processes.append(Process(self, name, self.machine()))
        return self.processes[-1]

    def at(self, due: float, process: Process | None, callback: Callable[..., object], *args: Any) -> Handle:
        """Schedule a call.

        :param due: true time of the call.
        :param process: process in which the call runs. The call is dropped if the process is dead by then,
            and postponed while it is paused. None runs the call outside all processes.
        :returns: handle with which the call can be cancelled.
        """
        handle = Handle(process, callback, args)
        self._count += 1
        heappush(self._queue, (due, self._count, handle))
        return handle

    def run(self, until: Callable[[], bool], latest: float) -> bool:
        """Run events in order until a condition holds.

        :param until: the condition, tested after each event.
        :param latest: true time at which to stop in any case.
        :returns: whether the condition holds.
        """
        queue = self._queue
        while queue and queue[0][0] <= latest:
            due, order, handle = heappop(queue)
            process = handle.process
            self.now = max(self.now, due)
            if process is None:
                handle.run()
            elif not process.alive or handle.cancelled():
                continue
            elif handle.suspended is not None and handle.suspended < process.suspended:
                later = due + process.suspended - handle.suspended
                handle.suspended = process.suspended
                heappush(queue, (later, order, handle))
                continue
            elif process.paused_until > self.now:
                heappush(queue, (process.paused_until, order, handle))
                continue
            else:
                process.run_event(handle)
            if until():
                return True
        self.now = max(self.now, latest)
        return until()

    def log(self, line: str, process: Process | None = None) -> None:
        """Log a line with the true time and the name of the process, if this history is logged."""
        if self.log_line is not None:
            at, name = (self.now, "") if process is None else (process.true_now, process.name)
            self.log_line(f"{at:10.3f}  {name:<14} {line}")

    # -- replacements for the clock and the UUIDs of the package ----------------------------------------------

    def monotonic(self) -> float:
        """Return the boot-time clock of the running process, after a random pause with the probability
        `pause_probability`."""
        if current_thread() is not self._thread:
            self._intruders.add(current_thread().name)
            return 0.0
        process = self.running
        assert process is not None
        if self.pause_probability and self.random.random() < self.pause_probability:
            self.faults["process paused at a clock read"] += 1
            seconds = self.random.choice([0.01, 0.5, 2.0, 5.0, 10.0, 25.0, 40.0])
            self.log(f"is paused for {seconds:g} s", process)
            process.pause(seconds, suspend=self.suspends and self.random.random() < 0.3)
        self.on_clock(self)
        return process.boottime()

    def wall_ms(self, process: Process) -> float:
        """Return the wall clock of a process, in epoch milliseconds."""
        return (BEGIN + process.true_now + process.machine.wall) * 1000

    def unique(self) -> str:
        """Return a unique id, in place of `uuid.uuid4`. It names the process, so that logs are readable."""
        assert self.running is not None
        self._ids += 1
        name = f"{self.running.name}#{self._ids}"
        self.id_created_at[name] = self.running.true_now
        self.running.ids.add(name)
        return name

    @contextmanager
    def patched(self, term: Callable[..., Any]) -> Iterator[None]:
        """Patch the package for this history: its clocks, its UUIDs, and `Term`.

        :param term: replaces `Term`; it records until when holders count on their leases.
        :raises RuntimeError: another thread of this Python process used the package meanwhile, such as a heartbeat of
            a `LockClient` of a test before. It may have changed the history.
        """

        def host_ns() -> int:
            assert self.running is not None
            return int(self.wall_ms(self.running) * 1e6)

        with ExitStack() as stack:
            enter = stack.enter_context
            enter(patch.object(clock, "_clock", self.monotonic))
            enter(patch.object(session, "time", SimpleNamespace(time_ns=host_ns)))
            for module in (claims, session):
                enter(patch.object(module, "uuid", SimpleNamespace(uuid4=self.unique)))
            enter(patch.object(session, "Term", term))
            yield
        for process in self.processes:
            # Garbage collection of the coroutines must not run any more code of the client.
            process.alive = False
        if self._intruders:
            raise RuntimeError(
                f"Play histories in a process of their own: {sorted(self._intruders)} read their clock."
            )
