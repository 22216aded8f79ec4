"""The adversary of a history: it chooses the faults, and injects them until the faulty phase ends."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from typing import TYPE_CHECKING

from airflow_dynamo_lock.core.model.errors import LockError
from proof.simulator.network import REQUEST_FAULTS, FaultRates
from proof.simulator.world import BEGIN, Process

if TYPE_CHECKING:
    from proof.simulator.history import History
    from proof.simulator.streams import Stream

DAY = 24 * 3600.0


class Faults:
    """Faults of processes, machines, the network and the table; and people who change locks by hand."""

    def __init__(self, history: History) -> None:
        self.history, self.world, self.checker = history, history.world, history.checker

    def schedule(self, ends: float) -> None:
        """Choose what goes wrong, and schedule it before the time `ends`."""
        history, world, rng = self.history, self.world, self.world.random
        events = [
            *(self._kill, self._stop, self._suspend, self._disconnect, history.airflow.replace_triggerer),
            *(self._break, self._expire, self._forget, self._set_capacity),
        ]
        if rng.random() < {"slots": 0.3, "mixed": 0.5}.get(history.kind, 0.05):
            world.at(rng.uniform(0.0, ends), None, self._set_capacity)
        weights, number = [4, 5, 2, 6, 3, 1, 1, 2, 0], rng.choice([0, 1, 2, 4])
        world.suspends = rng.random() < 0.3
        match history.profile:
            case "all":
                kinds = rng.sample(REQUEST_FAULTS, rng.choice([0, 1, 2, 3, 8]))
                world.pause_probability = rng.choice([0.0, 0.0, 0.003, 0.01])
            case "pauses":
                kinds, weights, number = [], [1, 5, 2, 5, 1, 0, 0, 0, 0], 3
                world.pause_probability = 0.02
            case "delays":
                kinds, weights, number = ["late", "answer_lost"], [1, 1, 0, 12, 1, 0, 0, 0, 0], 4
            case "races":
                kinds, weights, number = ["lost", "answer_lost"], [8, 1, 0, 1, 0, 1, 0, 1, 2], 8
                world.pause_probability = rng.choice([0.0, 0.003])
        likely = {kind: rng.choice([0.02, 0.05, 0.15]) for kind in kinds}
        if history.profile == "races":
            likely["slow"] = 0.4
        history.network.fault_rates = FaultRates(conflicted=0.05, **likely)
        for _ in range(number):
            latest = 10.0 if history.profile == "races" else ends
            world.at(rng.uniform(0.5, latest), None, rng.choices(events, weights)[0])
        if rng.random() < 0.06:
            world.at(rng.uniform(0.5, ends), None, self._suspend_all)
        people = random.Random(f"removals of {world.seed}")
        for _ in range(people.choice([1, 2, 4]) if people.random() < 0.12 else 0):
            world.at(people.uniform(0.5, ends), None, self._remove_waiter)

    def schedule_stream(self, stream: Stream, ends: float) -> None:
        """Choose what happens to the table's stream, and schedule it before the time `ends`.

        In a calm history it is only split: after it was replaced, processes miss changes for a while.
        """
        rng, calm = self.world.random, self.history.calm
        for _ in range(rng.choice([0, 4, 8] if calm else [0, 1, 2])):
            event = stream.split if calm or rng.random() < 0.5 else stream.disable
            self.world.at(rng.uniform(0.5, ends), None, event)

    # -- processes and machines -----------------------------------------------------------------------------

    def kill(self, process: Process) -> None:
        """Kill a process (SIGKILL)."""
        # A process that is ahead of the world's time has already done what it does until then.
        if process.paused_until > self.world.now:
            self.world.at(process.paused_until, None, self.kill, process)
        elif process.alive:
            self.world.faults["process killed"] += 1
            process.alive = False
            self.checker.killed(process)
            self.history.actors.pop(process, None)

    def _kill(self) -> None:
        # A triggerer is killed only where another one takes over. Schedulers are never killed.
        spared = (*self.history.schedulers, self.history.airflow.triggerer)
        mortal = [each for each in self.world.processes if each not in spared]
        if (process := self._victim(mortal)) is not None:
            self.kill(process)

    def _stop(self) -> None:
        """Stop a process (SIGSTOP), and continue it some time later (SIGCONT)."""
        if (process := self._victim(self.world.processes)) is not None:
            seconds = self._duration()
            self.world.faults["process stopped"] += 1
            self.world.log(f"is stopped for {seconds:.1f} s", process)
            process.pause(seconds)

    def _suspend(self) -> None:
        """Suspend the machine of a process for a while, like a laptop or a paused virtual machine."""
        if (process := self._victim(self.world.processes)) is not None:
            seconds = self._duration()
            self.world.faults["machine suspended"] += 1
            self.world.log(f"and its machine are suspended for {seconds:.1f} s", process)
            process.pause(seconds, suspend=True)

    def _suspend_all(self) -> None:
        """Suspend all machines for more than a week."""
        self.world.faults["slept for a week"] += 1
        self.world.log("All machines are suspended.")
        self.history.resumes_at = self.world.now + 8 * DAY
        for process in self.world.processes:
            process.pause(max(0.0, self.history.resumes_at - process.true_now), suspend=True)
        self.world.at(self.history.resumes_at - self.world.random.random() * DAY / 2, None, self._expire)

    def _disconnect(self) -> None:
        """Cut a process off from DynamoDB up to three times, in one direction or both."""
        rng, process = self.world.random, self._victim(self.world.processes)
        if process is None:
            return
        can_send, can_receive = rng.choice([(False, False), (False, True), (True, False)])

        def cut() -> None:
            process.can_send, process.can_receive = can_send, can_receive
            self.world.faults["process cut off"] += 1
            self.world.log(f"is cut off ({can_send=}, {can_receive=})", process)

        def heal() -> None:
            process.can_send = process.can_receive = True
            self.world.log("is no longer cut off", process)

        at = self.world.now
        for _ in range(rng.choice([1, 2, 3])):
            self.world.at(at, None, lambda: cut() if self.history.faulty else None)
            at += self._duration()
            self.world.at(at, None, heal)
            at += rng.random() * rng.choice([1.0, self.history.lease])

    def _victim(self, among: Iterable[Process]) -> Process | None:
        """Choose a live process: usually one that works under a lease, where a fault does the most harm."""
        alive = [process for process in among if process.alive]
        holding = [process for process in alive if self.checker.works(process)]
        chosen = holding if holding and self.world.random.random() < 0.8 else alive
        return self.world.random.choice(chosen) if chosen else None

    def _duration(self) -> float:
        """Choose how long a fault lasts, in seconds: a moment, somewhat less than a lease, or more."""
        rng, lease = self.world.random, self.history.lease
        return rng.choice([1.0, self.history.grace, lease * 0.7, lease * rng.uniform(0.9, 2)])

    # -- the table, and the people who change it ------------------------------------------------------------

    @property
    def _all_receive_dates(self) -> bool:
        return self.history.network.dates and not self.world.proxied

    def _operator(self) -> Process:
        """Return the process of a person who may change any lock."""
        process = self.history.process("person")
        self.checker.operators.append(process)
        return process

    def _break(self) -> None:
        """Break a lock by hand."""
        process, key = self._operator(), self.world.random.choice(self.history.keys)
        self.world.faults["lock broken"] += 1

        async def break_it() -> None:
            locks = self.history.connect(process)
            record = await locks.get(key)
            if record is not None and record.holders:
                await locks.break_lock(key, next(iter(record.holders)))

        self.history.start(process, f"breaks {key}", break_it())

    def _remove_waiter(self) -> None:
        """Remove a waiter from the queue of a lock by hand."""
        process, key = self._operator(), self.world.random.choice(self.history.keys)

        async def remove_it() -> None:
            locks = self.history.connect(process)
            if waiters := await locks.waiters(key):
                chosen = self.world.random.choice(waiters)
                try:
                    await locks.remove_waiter(key, chosen.lease_id, by="a person")
                except LockError as failure:  # it has just been granted the lock, or has gone
                    self.world.log(f"does not remove a waiter: {failure}", process)
                else:
                    self.world.faults["waiter removed"] += 1

        self.history.start(process, f"removes a waiter for {key}", remove_it())

    def _set_capacity(self) -> None:
        """Pin the capacity of a lock by hand, perhaps to the present one, and perhaps unpin it."""
        process, key = self._operator(), self.world.random.choice(self.history.keys)
        self.world.faults["capacity set"] += 1

        async def set_it() -> None:
            locks = self.history.connect(process)
            rng = self.world.random
            races = self.history.profile == "races"
            capacities = rng.choice([(5,), (4, 3), (5, 3, 4), (5, None), (4, None, 5), (2, 3, None)])
            for capacity in [5, None] * 4 if races else capacities:
                try:
                    await locks.set_capacity(key, capacity)
                except LockError as failure:  # the lock is in use
                    self.world.log(f"does not set the capacity: {failure}", process)
                await asyncio.sleep(rng.random() * (0.5 if races else rng.choice([0.1, self.history.lease])))

        self.history.start(process, f"sets the capacity of {key}", set_it())

    def _forget(self) -> None:
        """Delete the record of a lock by hand, ten times, whenever it has no holder.

        Not if a process receives no ``Date``: then the next token may come from the wall clock of its host.
        """
        if not self._all_receive_dates:
            return
        process, key = self._operator(), self.world.random.choice(self.history.keys)

        async def forget_it() -> None:
            locks = self.history.connect(process)
            for _ in range(10):
                if await locks.forget(key):
                    self.world.faults["record forgotten"] += 1
                await asyncio.sleep(self.world.random.random())

        self.history.start(process, f"forgets {key}", forget_it())

    def _expire(self) -> None:
        """Delete the expired items, as DynamoDB's TTL does at any time.

        Not if a process receives no ``Date``: then the time of expiry, and the next token, may come from the
        wall clock of its host.
        """
        if not self._all_receive_dates:
            return
        for at, item in list(self.history.table.items.items()):
            if "expires_at" in item and int(item["expires_at"]["N"]) < BEGIN + self.world.now:
                self.world.faults["record deleted by TTL"] += 1
                self.history.table.delete(at, self.world.now)
                self.checker.deleted(at)
