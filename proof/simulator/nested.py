"""Nested lockers of a history: processes that hold locks while they wait for others, in random orders (R14).

They have locks of their own, beside those of the other actors, and random numbers of their own. The checker compares
each `LockDeadlockError` with the true state of all waits, which no process can read:

13. A deadlock error names waits that lasted at the same time, and each of them was for a lock that another one of their
    processes held. No two waits end for the same cycle. After the faults, a cycle ends within 5 s.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from airflow_dynamo_lock.core.model.errors import LockDeadlockError, LockError, LockTimeoutError
from airflow_dynamo_lock.core.model.lease import Lease
from proof.simulator.lease_use import NEVER
from proof.simulator.threads import Threaded
from proof.simulator.world import Process

if TYPE_CHECKING:
    from proof.simulator.history import History

# Which histories have nested lockers: those whose seed has this remainder.
_EVERY, _REMAINDER = 36, 23
# Longest time in seconds for which a cycle lasts without faults; and after the faults, until no request is late.
_LONGEST_CYCLE, _SETTLED_AFTER = 5.0, 10.0


@dataclass
class _TrueWait:
    """One wait of a process, in true time.

    :ivar key: the lock that it waits for.
    :ivar holding: the leases that the process holds meanwhile, and when it received them.
    """

    process: Process
    key: str
    holding: dict[str, tuple[Lease, float]]
    begin: float
    end: float = NEVER


@dataclass
class Nested:
    """The nested lockers of one history.

    :ivar ring: whether each locker acquires one of three locks and then the next one, so that three of them make a
        cycle. Otherwise the orders are random.
    """

    history: History
    waits: list[_TrueWait] = field(default_factory=list)
    _broken: set[frozenset[str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.random = Random(f"nested {self.history.world.seed}")
        self.keys = [f"nested{number}" for number in range(self.random.choice([2, 2, 3, 3]))]
        self.ring = len(self.keys) == 3 and self.random.random() < 0.5

    @classmethod
    def of(cls, history: History) -> Nested | None:
        """The nested lockers of a history; None if it has none."""
        return cls(history) if history.world.seed % _EVERY == _REMAINDER else None

    def schedule(self, ends: float) -> None:
        """Start the lockers, and break some of their locks, before the time `ends`."""
        for _ in range(self.random.choice([3, 4] if self.ring else [2, 2, 3, 4])):
            self.history.world.at(self.random.uniform(0.0, 3.0), None, self._start)
        for _ in range(0 if self.history.calm else self.random.choice([0, 0, 1, 3])):
            self.history.world.at(self.random.uniform(0.5, ends), None, self._trouble)

    # -- what goes wrong ------------------------------------------------------------------------------------

    def _trouble(self) -> None:
        """Kill a locker, stop it, or break one of the locks."""
        history, rng = self.history, self.random
        living = [each for each in self.waits if each.process.alive]
        # A note that is left behind, and a member that does not answer, matter most.
        nested = [each.process for each in living if each.holding and each.end == NEVER]
        lockers = nested or [each.process for each in living]
        event = rng.choice(["kill", "stop", "break"])
        if event == "break":
            key, process = rng.choice(self.keys), history.process("person")
            history.checker.operators.append(process)

            async def break_it() -> None:
                locks = history.connect(process)
                record = await locks.get(key)
                if record is not None and record.holders:
                    await locks.break_lock(key, next(iter(record.holders)))

            history.start(process, f"breaks {key}", break_it())
        elif lockers and event == "kill":
            history.faults.kill(rng.choice(lockers))
        elif lockers:
            process, seconds = rng.choice(lockers), rng.uniform(0.5, history.lease)
            history.world.log(f"is stopped for {seconds:.1f} s", process)
            process.pause(seconds)

    # -- a locker -------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start a process that nests some of the locks, in a random order, some times."""
        history, rng = self.history, self.random
        process = history.process("nested")
        rounds = rng.randint(1, 4)

        async def work() -> None:
            locks = history.connect_plain(process)
            for left in reversed(range(rounds)):
                order = self._order()
                done = False
                while not done:
                    done = await self._nest(process, locks, order) or (history.faulty and left > 0)
                    await asyncio.sleep(rng.random() * 2.0)

        history.start(process, f"nests {len(self.keys)} locks {rounds} times", work())

    def _order(self) -> list[str]:
        """Choose two or more locks, and their order."""
        if self.ring:
            first = self.random.randrange(3)
            return [self.keys[first], self.keys[(first + 1) % 3]]
        return self.random.sample(self.keys, self.random.randint(2, len(self.keys)))

    async def _nest(self, process: Process, locks: Any, order: list[str]) -> bool:
        """Acquire locks one within another, and release them. Returns whether all were acquired."""
        history, rng = self.history, self.random
        holding: dict[str, tuple[Lease, float]] = {}
        try:
            async with AsyncExitStack() as stack:
                for key in order:
                    timeout = rng.choice([None, None, 3.0, history.lease]) if history.faulty else None
                    try:
                        await self._acquire(process, locks, key, holding, stack, timeout)
                    except LockTimeoutError:
                        # It works on under what it holds, as other programs may.
                        await asyncio.sleep(rng.random() * history.lease)
                        raise
                    await asyncio.sleep(rng.random() * rng.choice([0.1, 1.0, 4.0 if history.faulty else 1.0]))
        except LockError as failure:
            history.world.log(f"does not nest {order}: {failure}", process)
            return False
        return True

    async def _acquire(
        self,
        process: Process,
        locks: Any,
        key: str,
        holding: dict[str, tuple[Lease, float]],
        stack: AsyncExitStack,
        timeout: float | None,  # noqa: ASYNC109
    ) -> None:
        """Acquire a lock within others, and add it to `holding`."""
        history, checker = self.history, self.history.checker
        options: dict[str, Any] = {
            "about": {"actor": process.name, "fair": "yes"},
            "poll_interval": history.poll,
            "timeout": timeout,
        }
        if isinstance(locks, Threaded):
            # Each block runs in a thread of its own.
            options["holding"] = [lease for lease, _ in holding.values()]
        wait = _TrueWait(process, key, dict(holding), process.true_now)
        self.waits.append(wait)
        checker.queue.processes[process.name] = lambda: process
        try:
            with checker.queue.waits(process.name):
                lease = await stack.enter_async_context(locks.lock(key, **options))
        except LockDeadlockError as deadlock:
            self._check(wait, deadlock)
            raise
        finally:
            if process.alive:
                wait.end = process.true_now
        returned = locks.returned if isinstance(locks, Threaded) else process.true_now
        checker.confirmed(process, lease, wait.begin, returned)
        stack.enter_context(checker.using(process, lease))
        holding[key] = lease, returned

    # -- the invariant --------------------------------------------------------------------------------------

    def _check(self, wait: _TrueWait, deadlock: LockDeadlockError) -> None:
        """Check the error that has just ended a wait."""
        world, report = self.history.world, self.history.checker.report
        world.faults["deadlock"] += 1
        name = wait.process.name
        cycle = frozenset(each.wait for each in deadlock.cycle)
        members = [self._true_wait(each) for each in sorted(cycle)]
        named = ", ".join(each.process.name if each else "?" for each in members)
        true = [each for each in members if each is not None]
        if len(true) < len(members) or wait not in true:
            report(f"{name} ended by a deadlock of {named}, not all of which were waiting (promise 13)")
            return
        killed_at = self.history.checker.killed_at
        ends = [min(each.end, killed_at.get(each.process, NEVER)) for each in true]
        if max(each.begin for each in true) >= min(ends):
            report(f"{name} ended by a deadlock of {named}, which never waited together (promise 13)")
        held = {key for each in true for key in each.holding}
        if any(each.key not in held for each in true):
            report(
                f"{name} ended by a deadlock of {named}, who did not hold what they waited for (promise 13)"
            )
        if cycle in self._broken:
            report(f"{name} ended by a deadlock of {named}, which had ended before (promise 13)")
        self._broken.add(cycle)
        closed = max(self._begin_of_blocking(each, true) for each in true)
        lasted = wait.process.true_now - max(closed, self.history.checker.faults_ended + _SETTLED_AFTER)
        if lasted > _LONGEST_CYCLE:
            report(f"the deadlock of {named} lasted for {lasted:.1f} s (promise 13)")

    def _true_wait(self, wait_id: str) -> _TrueWait | None:
        """The wait that has this id: its process made the id while it waited."""
        at = self.history.world.id_created_at.get(wait_id, NEVER)
        found = (each for each in self.waits if wait_id in each.process.ids and each.begin <= at <= each.end)
        return next(found, None)

    def _begin_of_blocking(self, wait: _TrueWait, among: list[_TrueWait]) -> float:
        """When one of the others had received the lock that this wait is for, and this wait had begun."""
        received = (each.holding[wait.key][1] for each in among if wait.key in each.holding)
        return max(wait.begin, *received, 0.0)
