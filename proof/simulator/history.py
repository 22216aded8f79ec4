"""One simulated history: its actors, its faulty phase, and its recovery.

The actors are plain clients, Airflow groups (`airflow`), sensors, and people who change locks by hand
(`faults`). After the faulty phase, the faults end and no more actors arrive. Then all unfinished work must
come to an end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

from airflow_dynamo_lock.client.async_client import AsyncLockClient
from airflow_dynamo_lock.client.leases import leases_of
from airflow_dynamo_lock.core.effects import Stamp
from airflow_dynamo_lock.core.model.claim import Claim
from airflow_dynamo_lock.core.model.errors import LockError
from airflow_dynamo_lock.core.model.limits import SHARED
from airflow_dynamo_lock.core.queue.unused import PASS_OVER_AFTER
from airflow_dynamo_lock.core.table.native import NativeFormat
from airflow_dynamo_lock.core.wait.poller import _SELDOM
from proof.simulator import guards, threads
from proof.simulator.airflow import Airflow
from proof.simulator.checker import Checker
from proof.simulator.dynamodb import Table
from proof.simulator.faults import Faults
from proof.simulator.final_checks import verify
from proof.simulator.nested import Nested
from proof.simulator.network import NO_FAULTS, TABLE, Network, Sdk
from proof.simulator.streams import Stream, short_answers
from proof.simulator.threads import Threaded
from proof.simulator.world import BEGIN, Assumptions, Process, World

# Longest pause between two polls, in poll intervals, and longest attempt without faults, in seconds.
_LONGEST_POLL, _LONGEST_ATTEMPT = 1.25, 3.0
# A dead waiter holds up the waiters behind it for this many seconds after its last heartbeat, and then for
# this many polls.
_DEAD_WAITER_SECONDS, _DEAD_WAITER_POLLS = 30.0, 6
# Seconds after the faults until no process pauses because of one, and until each notices that its stream is not the
# table's.
_SETTLED_AFTER, _STREAM_CHECKED_WITHIN = 10.0, 75.0

# Name of the processes that acquire all slots of a lock during the recovery.
_LAST = "last"

_Client = AsyncLockClient | Threaded


@dataclass(frozen=True)
class Verdict:
    """Result of a history.

    :ivar violations: violated invariants, as messages.
    :ivar faults: number of faults, by kind.
    :ivar grants: number of grants that callers received.
    :ivar lasted: simulated time in seconds.
    """

    seed: int
    violations: tuple[str, ...]
    faults: dict[str, int]
    grants: int
    lasted: float


def play(
    seed: int,
    assumptions: Assumptions | None = None,
    log_line: Callable[[str], None] | None = None,
) -> Verdict:
    """Play the history of a seed.

    :param assumptions: limits of the conditions; those of the protocol by default.
    :param log_line: called with each line of the history's log.
    """
    world = World(seed, assumptions or Assumptions(), log_line=log_line)
    history = History(world)
    with (
        world.patched(history.checker.term),
        threads.simulated(world),
        guards.simulated(),
        short_answers(),
    ):
        copy_context().run(history.play)  # events run in this context, and what they set ends with it
        checker = history.checker
        return Verdict(seed, tuple(checker.violations), dict(world.faults), len(checker.grants), world.now)


class History:
    """One history.

    :ivar profile: kind of faults: `all` kinds, or one kind that builds on itself (`pauses`, `delays`,
        `races`).
    :ivar keys: keys of the locks.
    :ivar kind: kind of the locks: `plain`, `slots` (a semaphore), `shared`, or `mixed` (plain and semaphore
        claims).
    :ivar slots: capacity of a semaphore.
    :ivar fair: part of the claims that are fair.
    :ivar lease: duration of leases in seconds; `grace`, `skew`, `min_hold` and `poll` are the other options
        of clients.
    :ivar longest_lease: longest duration that a holder has requested so far, in seconds.
    :ivar actors: processes whose work has not ended, and what they do.
    :ivar schedulers: processes of Airflow's schedulers, which are never killed.
    :ivar threads: whether processes outside Airflow use `LockClient`, and guarded tasks the real guard.
    :ivar calm: whether the history has no faults but those of the stream.
    :ivar faulty: whether the faulty phase lasts.
    :ivar resumes_at: true time until which all machines are suspended.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        rng = world.random
        self.profile = rng.choice(["all"] * 4 + ["pauses", "pauses", "delays", "races"])
        # Many quick clients, whose requests overtake each other.
        races = self.profile == "races"
        # Late requests matter in rare coincidences only. A single plain lock makes them more frequent.
        delays = self.profile == "delays"
        self.keys = ["a", "b"] if not delays and rng.random() < 0.25 else ["a"]
        kinds = ["plain"] * 5 + ["slots"] * 4 + ["shared"] * 2 + ["mixed"]
        self.kind = "plain" if delays else rng.choice(["slots", "mixed"] if races else kinds)
        self.slots = 5 if races else 3
        capacity = {"plain": 1, "shared": SHARED}.get(self.kind, self.slots)
        self.fair = rng.choice([1.0, 0.0, 0.0] if races else [1.0, 1.0, 0.7, 0.0])
        self.lease = 6.0 if delays or races else rng.choice([6.0, 12.0, 30.0])
        self.grace = rng.choice([3.0, 6.0])
        self.skew = 5.5 if delays or races else rng.choice([5.5, 5.5, 10.0, 10.0, 25.0])
        self.longest_lease = self.lease
        self.min_hold = rng.choice([self.grace, self.grace, 30.0])
        self.poll = 1.0 if races else rng.choice([1.0, 3.0])
        dates = delays or rng.random() < 0.85
        world.proxied = dates and not delays and rng.random() < 0.3
        apart = self.skew - 5.0 + world.assumptions.skew
        capacities = dict.fromkeys(self.keys, capacity)
        self.nested = Nested.of(self)
        if self.nested is not None:
            capacities |= dict.fromkeys(self.nested.keys, 1)
        self.checker = Checker(world, capacities, self.skew - apart / 2 if dates else None, apart=apart)
        self.table = Table(max_staleness=world.assumptions.stale)
        self.network = Network(
            world,
            self.table,
            self.checker.applied,
            dates=dates,
            shows_refused=delays or rng.random() < 0.8,
            apart=apart,
        )
        self.checker.queue.items = self.table.items
        self.network.on_arrival = self.checker.queue.arrived
        if world.seed % 7 == 3:
            self.network.stream = Stream(world)
            self.table.on_change = self.network.stream.changed
        self.calm = world.seed % 14 == 3
        self.threads = world.seed % 5 == 4
        if self.kind == "shared" and rng.random() < 0.3:
            self._add_dead_readers()
        self.actors: dict[Process, str] = {}
        self.schedulers: list[Process] = []
        self.faulty = True
        self.resumes_at = 0.0
        self._names = 0
        self.faults = Faults(self)
        self.airflow = Airflow(self)

    def _add_dead_readers(self) -> None:
        """Create a record with 130 readers that died 100 s before the history begins."""
        stamp = Stamp("v", None, round((BEGIN - 100.0) * 1000), 0.0)
        write = NativeFormat(TABLE).acquire_idle(
            Claim("a", "?", "a dead reader", 6000, 3000, capacity=SHARED), stamp
        )
        written = self.table.write("Update", write.params, 0.0).after
        assert written is not None
        (reader,) = written["holders"]["M"].values()
        readers = {f"reader{number}": reader for number in range(130)}
        left = {"N": str(SHARED - len(readers))}
        record = {**written, "holders": {"M": readers}, "available": left}
        self.table.write("Put", {"Item": record}, 0.0)

    # -- phases ---------------------------------------------------------------------------------------------

    def play(self) -> None:
        """Play the faulty phase and the recovery, and check the result."""
        world, rng = self.world, self.world.random
        races = self.profile == "races"
        numbers = [6, 8] if races else [2, 3, 4, 6, 8] if self.kind == "slots" else [2, 2, 3, 4]
        for _ in range(rng.choice(numbers)):
            actors: list[Callable[[], object]] = [
                *(self.start_client, self.airflow.start_run, self.start_sensor, self.start_impatient)
            ]
            weights = [8, 1, 0, 2] if races else [5, 4, 1, 1]
            world.at(rng.uniform(0, 3), None, rng.choices(actors, weights)[0])
        ends = 25.0 if races else rng.choice([15.0, 30.0, 60.0])
        if len(self.keys) == 1:  # a waiter for two locks leaves one idle while it waits for the other
            self.checker.idle.longest = 2 * self.longest_poll + _LONGEST_ATTEMPT
            self.checker.idle.longest_beside_dead = self._longest_patience + _LONGEST_ATTEMPT
        if self.calm:
            self.checker.idle.begins = 0.0
        else:
            self.faults.schedule(ends)
        if self.network.stream is not None:
            self.faults.schedule_stream(self.network.stream, ends)
        if self.nested is not None:
            self.nested.schedule(ends)
        world.run(lambda: False, ends)
        self._recover()
        verify(self.checker, self.table.items)

    def _recover(self) -> None:
        """End the faults, and check that all actors come to an end.

        One more client per lock joins the queue, and must be granted all slots.
        """
        world, checker, rng = self.world, self.checker, self.world.random
        self.faulty = False
        self.network.fault_rates = NO_FAULTS
        world.pause_probability = 0.0
        for process in world.processes:
            process.can_send = process.can_receive = True
        begun = max([world.now, *(each.paused_until for each in world.processes if each.alive)])
        checker.faults_ended = checker.queue.faults_ended = begun
        replaced = bool(self.world.faults["stream replaced"])
        checker.idle.begins = begun + (_STREAM_CHECKED_WITHIN if replaced else _SETTLED_AFTER)
        world.log("The faults have ended.")
        if world.seed % 4 == 1:
            checker.idle.on_idle = self._kill_first
        if rng.random() < 0.3 or len(self.keys) > 1:
            for _ in range(rng.randint(1, 3)):
                world.at(begun + rng.random(), None, self.start_impatient)
        last_clients = {key: self.start_client(key, name=_LAST) for key in self.keys}
        # A dead holder is seen at the next poll, observed for a whole lease on a slow clock, and reclaimed at
        # the poll after that. Waiters also wait for those ahead of them, until these are granted the lock or
        # proven dead.
        observed = max(self.longest_lease, self.min_hold) / (1 - world.assumptions.rates)
        longest_silence = observed + 2 * self.longest_poll + _LONGEST_ATTEMPT
        if self.network.stream is not None:
            # The stream may have been replaced, so that only the next full poll shows a change.
            longest_silence += min(10 * self.poll, 30.0) * _LONGEST_POLL
        if self.fair:
            longest_silence += _DEAD_WAITER_SECONDS + _DEAD_WAITER_POLLS * self.longest_poll
        latest = begun + world.assumptions.late + 12 * (longest_silence + self.grace)
        last_writes = dict.fromkeys(self.keys, begun)

        def done() -> bool:
            for key, previous in last_writes.items():
                # While one of the locks is held, a waiter for both holds up the waiters behind it for each.
                written = max(begun, *(checker.last_written.get(each, 0.0) for each in self.keys))
                if written - previous > longest_silence and last_clients[key] in self.actors:
                    checker.report(
                        f"{key} had a waiter, and no write from {previous:.1f} to {written:.1f} (invariant 4)"
                    )
                last_writes[key] = written
            return not self.actors

        if not world.run(done, latest):
            unfinished = ", ".join(f"{each.name} ({what})" for each, what in self.actors.items())
            checker.report(
                f"{unfinished} did not end within {latest - begun:.0f} s after the faults (invariant 5)"
            )
        elif rng.random() < 0.1 and not world.faults["capacity set"]:
            # An entry that still exists after 100 s is never removed. If the capacity was changed, the last
            # client may hold the lock beside others, and need not have removed the entries before its own.
            world.run(lambda: False, world.now + 100.0)
            for key, process in last_clients.items():
                # A plain claim fails while the lock is in use as a semaphore.
                granted = [
                    each.confirmed
                    for each in checker.grants
                    if each.key == key and each.lease_id in process.ids
                ]
                if process.alive and granted:
                    for left in checker.queue.dead_entries(key, process.name, checker.granted, max(granted)):
                        checker.report(left)

    def _kill_first(self, key: str) -> None:
        """Kill the first waiter for a lock that has just become free, if it is a client."""
        first = self.checker.queue.first(key)
        for process in self.actors:
            if process.name == first and not first.startswith(_LAST):
                self.world.at(self.world.now, None, self.faults.kill, process)

    @property
    def _longest_patience(self) -> float:
        """Longest time in seconds until a waiter passes over those ahead of it: it reads the lock, sees the slots
        unused for long enough, and reads the lock again."""
        return (_SELDOM + 1) * self.longest_poll + PASS_OVER_AFTER / (1 - self.world.assumptions.rates)

    @property
    def longest_poll(self) -> float:
        """Longest pause between two polls, in seconds."""
        return self.poll * _LONGEST_POLL

    # -- processes ------------------------------------------------------------------------------------------

    def connect(self, process: Process) -> AsyncLockClient:
        """Return a client in that process."""
        sdk = Sdk(self.network, process)
        streams = sdk if self.network.stream is not None else None
        return AsyncLockClient(sdk, streams=streams, **self._settings(process))

    def connect_plain(self, process: Process) -> _Client:
        """Return the client of a process outside Airflow."""
        return self.connect_threads(process) if self.threads else self.connect(process)

    def connect_threads(self, process: Process) -> Threaded:
        """Return a `LockClient` in that process."""
        return Threaded(self.network, process, **self._settings(process))

    def _settings(self, process: Process) -> dict[str, Any]:
        return {
            "table": TABLE,
            "owner": process.name,
            "lease": self.lease,
            "heartbeat": self.lease / 3,
            "release_grace": self.grace,
            "max_clock_skew": self.skew,
        }

    def process(self, kind: str) -> Process:
        """Create a process. Its name is the kind and a number."""
        self._names += 1
        process = self.world.process(f"{kind}{self._names}")
        process.paused_until = self.resumes_at
        return process

    def start(self, process: Process, what: str, work: Coroutine[Any, Any, Any]) -> Callable[[], object]:
        """Start an actor. Its work has to come to an end, unless its process is killed.

        :param what: the work, in words.
        :returns: function that cancels the work.
        """
        self.actors[process] = what

        async def until_done() -> None:
            try:
                await work
            except LockError as failure:
                self.world.log(f"ends: {failure}", process)
            finally:
                self.actors.pop(process, None)

        return process.start(until_done())

    # -- actors outside Airflow -----------------------------------------------------------------------------

    def claim(self, actor: str, *, all_slots: bool = False) -> dict[str, Any]:
        """Return random arguments of an acquire.

        :param actor: name of the actor, by which the checker recognizes the claim.
        :param all_slots: whether to claim all slots.
        """
        rng = self.world.random
        fair = rng.random() < self.fair
        about = {"actor": actor, "fair": "yes" if fair else "no"}
        claim: dict[str, Any] = {"about": about, "fair": fair, "poll_interval": self.poll}
        if self.kind == "slots" or (self.kind == "mixed" and rng.random() < 0.5):
            slots = self.slots if all_slots else rng.randint(1, 3)
            claim |= {"slots": slots, "capacity": self.slots}
        elif self.kind == "shared" and not all_slots:
            claim |= {"mode": rng.choice(["shared", "shared", "exclusive"])}
        if fair and not all_slots and rng.random() < 0.1:
            claim["priority"] = rng.choice([-1, 1])
        if not all_slots and rng.random() < 0.05:
            claim["min_hold"] = self.min_hold
            about["hold"] = str(self.min_hold)
        if rng.random() < 0.05:
            claim["data"] = rng.choice([{}, {"by": actor}])
        return claim

    def start_client(self, key: str | None = None, name: str = "client") -> Process:
        """Start a process that acquires one lock or all of them, holds them for a while, and repeats that.

        :param key: the lock; None chooses at random.
        :param name: `last` for the client that acquires all slots during the recovery, once.
        """
        rng, process = self.world.random, self.process(name)
        last = name == _LAST
        wanted: Any = key or rng.choice(self.keys)
        if not last and len(self.keys) > 1 and rng.random() < 0.6:
            wanted = rng.sample(self.keys, len(self.keys))  # a set, in random order
        claim = self.claim(process.name, all_slots=last)
        rounds = 1 if last else rng.randint(1, 3) if self.profile != "races" else 8

        if isinstance(wanted, str) and not last and rng.random() < 0.15:
            claim["reentrant"] = True

        async def repeat(locks: _Client) -> None:
            for _ in range(rounds):
                timeout = rng.choice([None, None, 5.0]) if self.faulty else None
                try:
                    await self._hold(process, locks, wanted, {**claim, "timeout": timeout})
                except LockError as failure:
                    self.world.log(f"fails: {failure}", process)
                if not self.faulty:
                    break
                await asyncio.sleep(rng.random() * (0.3 if self.profile == "races" else 2.0))

        async def work() -> None:
            locks = self.connect_plain(process)
            if claim.get("reentrant") and isinstance(locks, Threaded):
                # Two threads share the owner, and thus the actor's name. The checker cannot tell their
                # positions in the queue apart, so the claim is not fair.
                claim.update(fair=False, about=claim["about"] | {"fair": "no"})
                await asyncio.gather(repeat(locks), repeat(locks))
            else:
                await repeat(locks)

        self.start(process, f"acquires {wanted} {rounds} times", work())
        return process

    def start_impatient(self) -> None:
        """Start a process that is cancelled while it acquires a lock or holds it."""
        rng, process = self.world.random, self.process("impatient")
        wanted: Any = rng.choice(self.keys)
        if len(self.keys) > 1 and rng.random() < 0.7:
            wanted = rng.sample(self.keys, len(self.keys))
        claim = self.claim(process.name)

        async def work() -> None:
            try:
                await self._hold(process, self.connect_plain(process), wanted, claim)
            except LockError as failure:
                self.world.log(f"fails: {failure}", process)

        cancel = self.start(process, f"acquires {wanted} until it is cancelled", work())
        patience = rng.choice([0.02, 0.05, 2.0, self.lease])
        self.world.at(process.true_now + rng.random() * patience, None, cancel)

    def start_sensor(self) -> None:
        """Start a process that waits for free slots without acquiring them."""
        process, key = self.process("sensor"), self.world.random.choice(self.keys)

        async def work() -> None:
            while True:
                try:
                    await self.connect_plain(process).wait(key, poll_interval=self.poll)
                except LockError as failure:
                    self.world.log(f"fails: {failure}", process)
                else:
                    break

        self.start(process, f"waits for free slots of {key}", work())

    async def _hold(self, process: Process, locks: _Client, wanted: Any, claim: dict[str, Any]) -> None:
        """Acquire one lock or a set, work under it for a while, and release it."""
        rng, checker, begun = self.world.random, self.checker, process.true_now
        checker.queue.processes[process.name] = lambda: process
        with checker.queue.waits(process.name) as stop_waiting:
            async with locks.lock(wanted, **claim) as held:
                stop_waiting()
                returned = locks.returned if isinstance(locks, Threaded) else process.true_now
                with ExitStack() as uses:
                    for lease in leases_of(held):
                        again = bool(claim.get("reentrant"))  # another thread of the owner may hold it
                        checker.confirmed(process, lease, begun, returned, again=again)
                        uses.enter_context(checker.using(process, lease))
                    longest = self.lease * 1.5 if self.faulty and self.profile != "races" else 1.0
                    await asyncio.sleep(rng.random() * longest)
                    if self.faulty and rng.random() < 0.1:
                        await self._renew(process, locks, held)
                    if claim.get("reentrant"):
                        await self._hold_again(process, locks, wanted, claim)

    async def _renew(self, process: Process, locks: _Client, held: Any) -> None:
        """Renew a lease by hand. That may make it longer, and must not make it shorter."""
        rng = self.world.random
        for factor in rng.choice([(None,), (1.5,), (2.0, 0.7), (0.5,)]):
            self.longest_lease = max(self.longest_lease, self.lease * (factor or 1.0))
            try:
                held = await locks.renew(held, duration=factor and self.lease * factor)
            except LockError as failure:
                self.world.log(f"does not renew: {failure}", process)
            await asyncio.sleep(rng.random() * self.lease / 2)

    async def _hold_again(self, process: Process, locks: _Client, wanted: str, claim: dict[str, Any]) -> None:
        """Acquire a reentrant lock again, within the block of the first acquire."""
        begun = process.true_now
        try:
            async with locks.lock(wanted, **claim) as again:
                returned = locks.returned if isinstance(locks, Threaded) else process.true_now
                self.checker.confirmed(process, again, begun, returned, again=True)
                with self.checker.using(process, again):
                    await asyncio.sleep(self.world.random.random() * self.lease / 2)
        except LockError as failure:
            self.world.log(f"does not hold it again: {failure}", process)
