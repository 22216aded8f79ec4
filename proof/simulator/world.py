"""True time, the processes in it, and the machines whose clocks show something else.

Each process is an event loop, on which the real `AsyncLockClient` runs. One queue orders all that happens; ties are
broken by who came first, and chance is drawn from one seed, so that a history can be played again exactly.
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
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from airflow_dynamo_lock.client import claims, clock, session

#: The server's time when a history begins, epoch seconds; not a whole one.
BEGIN = 1_800_000_000.25


@dataclass(frozen=True)
class Assumptions:
    """What the protocol rests on (docs/protocol.md). The adversary stays inside, unless a test wants it to fail.

    :ivar rates: machines' clocks run this much slower or faster than true time.
    :ivar skew: by how much the clocks of two of DynamoDB's servers may differ beyond what a client takes them to, less
        the 5 s that a client needs for itself, seconds.
    :ivar late: how long after it was sent a request may still reach DynamoDB, seconds.
    :ivar stale: how old an eventually consistent read may be, seconds.
    """

    rates: float = 0.05
    skew: float = 0.0
    late: float = 60.0
    stale: float = 3.0


@dataclass(frozen=True)
class Machine:
    """A machine's clocks.

    :ivar rate: seconds that its clocks count in one true second.
    :ivar booted: value of its boot-time clock at the start of the history.
    :ivar wall: seconds by which its wall clock is ahead.
    """

    rate: float
    booted: float
    wall: float


class Handle:
    """Something that will happen."""

    __slots__ = ("_args", "_callback", "_cancelled", "process", "suspended")

    def __init__(
        self, process: Process | None, callback: Callable[..., object], args: tuple[Any, ...]
    ) -> None:
        self.process = process
        # For a timer, which a suspend postpones: the total suspended time that its due time accounts for.
        self.suspended: float | None = None
        self._callback, self._args, self._cancelled = callback, args, False

    def cancel(self) -> None:
        self._cancelled = True

    def cancelled(self) -> bool:
        return self._cancelled

    def run(self) -> None:
        if not self._cancelled:
            self._callback(*self._args)


class Process:
    """A process: alive, stopped or dead. To asyncio it is an event loop.

    :ivar busy_until: it does nothing before that true time. Its own present is then ahead of the world's: what it has
        done since it last waited, it did with a pause in the middle.
    :ivar ids: the unique ids that it has drawn: its lease ids, and the versions of its writes.
    :ivar reaches, hears: whether its requests reach DynamoDB, and the answers it.
    :ivar undated: a proxy removes the ``Date`` header from the answers to it.
    :ivar suspended: true seconds for which its machine was suspended so far.
    :ivar stops: when it, or one of its threads, was stopped: from when until when, in true time.
    """

    def __init__(self, world: World, name: str, machine: Machine) -> None:
        self.world, self.name, self.machine = world, name, machine
        self.alive = True
        self.busy_until = 0.0
        self.ids: set[str] = set()
        self.reaches = self.hears = True
        self.undated = world.proxied and world.random.random() < 0.5
        self.suspended = 0.0
        self.stops: list[tuple[float, float]] = []
        self._ready: deque[Handle] = deque()
        self._works: list[Coroutine[Any, Any, Any]] = []

    # -- its time ---------------------------------------------------------------------------------------------

    @property
    def here(self) -> float:
        """The true time at which it is."""
        return max(self.world.now, self.busy_until)

    def boottime(self) -> float:
        """CLOCK_BOOTTIME, which counts the time of a suspend."""
        return self.machine.booted + self.here * self.machine.rate

    def time(self) -> float:
        """CLOCK_MONOTONIC, which does not. Timers, and asyncio, go by this clock."""
        return self.boottime() - self.suspended * self.machine.rate

    def true(self, at: float) -> float:
        """The true time at which its boot-time clock shows `at`."""
        return (at - self.machine.booted) / self.machine.rate

    def pause(self, seconds: float, *, suspend: bool = False) -> None:
        """Stop it, in the middle of whatever it does: SIGSTOP, or (`suspend`) its whole machine."""
        begun = self.here
        self.busy_until = begun + seconds
        self.stops.append((begun, self.busy_until))
        if suspend:
            self.suspended += seconds

    # -- what it does -----------------------------------------------------------------------------------------

    def start(self, work: Coroutine[Any, Any, Any]) -> Callable[[], object]:
        """Let it do that from now on. Returns what cancels it."""
        begun: list[asyncio.Task[Any]] = []
        self._works.append(work)  # kept, or the rubbish collector would end the work of a dead process
        self.world.at(self.here, self, lambda: begun.append(self.create_task(work)))
        return lambda: [self.world.at(self.here, self, task.cancel) for task in begun]

    def happen(self, handle: Handle) -> None:
        """Let something happen in it, and all that follows from it at once."""
        self.world.running = self
        events._set_running_loop(self)  # type: ignore[arg-type]
        try:
            handle.run()
            while self._ready:
                self._ready.popleft().run()
        finally:
            events._set_running_loop(None)

    # -- the event loop that asyncio sees ---------------------------------------------------------------------

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        handle = Handle(self, callback, args)
        self._ready.append(handle)
        return handle

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        timer = self.world.at(self.here + max(0.0, delay) / self.machine.rate, self, callback, *args)
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
        if "was destroyed but it is pending" not in context["message"]:  # as those of a killed process are
            self.world.mistakes.append(f"{self.name}: {context['message']}: {context.get('exception')!r}")


@dataclass
class World:
    """One history's time, chance and processes.

    :ivar running: the process in which something happens just now.
    :ivar faults: what the adversary has done, by kind.
    :ivar mistakes: errors that nobody has caught.
    :ivar stumbles: how likely a process is to be stopped for a while whenever it looks at its clock.
    :ivar suspends: some of these stops suspend the whole machine.
    :ivar proxied: some processes reach DynamoDB by a proxy that removes the ``Date`` header from the answers.
    :ivar drawn: when each unique id was drawn, and thus each stamp made, in true time.
    :ivar tell: takes a line of the story, when that is wanted.
    :ivar on_clock: is called whenever a process reads its clock.
    """

    seed: int
    assumptions: Assumptions = field(default_factory=Assumptions)
    now: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    mistakes: list[str] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)
    stumbles: float = 0.0
    suspends: bool = False
    proxied: bool = False
    drawn: dict[str, float] = field(default_factory=dict)
    tell: Callable[[str], None] | None = None
    on_clock: Callable[[World], None] = lambda _: None

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.running: Process | None = None
        self._queue: list[tuple[float, int, Handle]] = []
        self._count = 0
        self._ids = 0

    def machine(self) -> Machine:
        """A machine whose clocks are as wrong as they may be."""
        chance, rates = self.random, self.assumptions.rates
        return Machine(
            rate=chance.choice([1 - rates, 1.0, 1 + rates]),
            booted=chance.uniform(0, 1e6),
            # Right, or wrong by anything from a second to years, all magnitudes alike.
            wall=0.0 if chance.random() < 0.3 else chance.choice([-1, 1]) * 10 ** chance.uniform(0.0, 8.0),
        )

    def process(self, name: str) -> Process:
        """A new process, on a machine of its own."""
        self.processes.append(Process(self, name, self.machine()))
        return self.processes[-1]

    def at(self, due: float, process: Process | None, callback: Callable[..., object], *args: Any) -> Handle:
        """Let that happen then; in that process, if it is alive and not stopped by then."""
        handle = Handle(process, callback, args)
        self._count += 1
        heappush(self._queue, (due, self._count, handle))
        return handle

    def run(self, until: Callable[[], bool], latest: float) -> bool:
        """Let things happen until that is so; False if it is not so by the `latest` time."""
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
            elif process.busy_until > self.now:
                heappush(queue, (process.busy_until, order, handle))
                continue
            else:
                process.happen(handle)
            if until():
                return True
        self.now = max(self.now, latest)
        return until()

    def story(self, line: str, who: Process | None = None) -> None:
        """A line of the story."""
        if self.tell is not None:
            at = self.now if who is None else who.here
            self.tell(f"{at:10.3f}  {'' if who is None else who.name:<14} {line}")

    # -- what the clients see of it ---------------------------------------------------------------------------

    def monotonic(self) -> float:
        """The boot-time clock of the process that reads it, and may be stopped for a while just before it does."""
        process = self.running
        assert process is not None
        if self.stumbles and self.random.random() < self.stumbles:
            self.faults["stopped for a moment"] += 1
            seconds = self.random.choice([0.01, 0.5, 2.0, 5.0, 10.0, 25.0, 40.0])
            self.story(f"is stopped for {seconds:g} s", process)
            process.pause(seconds, suspend=self.suspends and self.random.random() < 0.3)
        self.on_clock(self)
        return process.boottime()

    def wall_ms(self, process: Process) -> float:
        return (BEGIN + process.here + process.machine.wall) * 1000

    def unique(self) -> str:
        """An id that nobody else has."""
        assert self.running is not None
        self._ids += 1
        name = f"{self.running.name}#{self._ids}"
        self.drawn[name] = self.running.here
        self.running.ids.add(name)
        return name

    @contextmanager
    def patched(self, term: Callable[..., Any]) -> Iterator[None]:
        """The package's clocks and chance are this world's; what holders believe is recorded by `term`."""

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
            process.alive = False  # so that nothing goes on when Python clears them away
