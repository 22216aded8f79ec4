"""One history: who takes part, what befalls them, and whether everybody has got his turn in the end.

Those who take part are plain clients, Airflow's groups (an acquiring trigger, a keeper, guarded processes, a releasing
trigger, and a scheduler that marks, clears and kills them), sensors, and people who break locks. For a while there is a
storm; then the weather is calm, nobody new comes, and all that is left undone must come to its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from airflow_dynamo_lock.client.async_client import AsyncLockClient
from airflow_dynamo_lock.client.leases import leases_of
from airflow_dynamo_lock.core.effects import Stamp
from airflow_dynamo_lock.core.model.claim import Claim
from airflow_dynamo_lock.core.model.errors import LockError, LockLostError
from airflow_dynamo_lock.core.model.lease import Lease
from airflow_dynamo_lock.core.model.limits import SHARED
from airflow_dynamo_lock.core.table.native import NativeFormat
from proof.simulator.checker import Checker
from proof.simulator.dynamodb import Table
from proof.simulator.network import CALM, KINDS, TABLE, Network, Sdk, Weather, answer_with
from proof.simulator.threads import Threaded, simulated
from proof.simulator.world import BEGIN, Assumptions, Process, World

#: The longest stretch of the time between two looks, and what a try takes in calm weather, seconds.
STRETCH, TRY = 1.25, 3.0
#: For how long a dead waiter may hold up the others: its last sign of life counts for so many seconds, and it takes so
#: many looks until those behind it ask.
IN_LINE, LOOKS = 30.0, 6
DAY = 24 * 3600.0

Work = Callable[[Process, AsyncLockClient], Coroutine[Any, Any, Any]]


@dataclass(frozen=True)
class Verdict:
    """What came of a history.

    :ivar lasted: simulated seconds.
    """

    seed: int
    violations: tuple[str, ...]
    faults: dict[str, int]
    grants: int
    lasted: float


def play(
    seed: int,
    assumptions: Assumptions | None = None,
    tell: Callable[[str], None] | None = None,
) -> Verdict:
    """Play the history of that seed; `tell` is given its story, line by line."""
    world = World(seed, assumptions or Assumptions(), tell=tell)
    history = History(world)
    with world.patched(history.checker.term), simulated(world):
        history.play()
    checker = history.checker
    return Verdict(seed, tuple(checker.violations), dict(world.faults), len(checker.grants), world.now)


class History:
    """One history."""

    def __init__(self, world: World) -> None:
        self.world = world
        chance = world.random
        # A bit of everything, or one kind of trouble that builds on itself.
        self.trouble = chance.choice(["all"] * 4 + ["pauses", "pauses", "delays", "races"])
        races = self.trouble == "races"  # many, who are quick, and whose requests overtake each other
        plain = self.trouble == "delays"  # its coincidences are rare enough
        self.keys = ["a", "b"] if not plain and chance.random() < 0.25 else ["a"]
        # A plain lock, a semaphore, or one that some share.
        kinds = ["plain"] * 5 + ["slots"] * 4 + ["shared"] * 2 + ["mixed"]
        self.kind = "plain" if plain else chance.choice(["slots", "mixed"] if races else kinds)
        self.slots = 5 if races else 3
        capacity = {"plain": 1, "shared": SHARED}.get(self.kind, self.slots)
        self.fair = chance.choice(
            [1.0, 0.0, 0.0] if races else [1.0, 1.0, 0.7, 0.0]
        )  # so many of those who wait stand in line
        self.lease = 6.0 if plain or races else chance.choice([6.0, 12.0, 30.0])
        self.grace = chance.choice([3.0, 6.0])
        self.skew = 5.5 if plain or races else chance.choice([5.5, 5.5, 10.0, 10.0, 25.0])
        self.longest = self.lease  # of all leases that were asked for
        self.hold = chance.choice([self.grace, self.grace, 30.0])
        self.poll = 1.0 if races else chance.choice([1.0, 3.0])
        dates = plain or chance.random() < 0.85
        world.proxied = dates and not plain and chance.random() < 0.3
        apart = self.skew - 5.0 + world.assumptions.skew
        capacities = dict.fromkeys(self.keys, capacity)
        self.checker = Checker(world, capacities, self.skew - apart / 2 if dates else None, apart=apart)
        self.table = Table(remembers=world.assumptions.stale)
        self.network = Network(
            world,
            self.table,
            self.checker.applied,
            dates=dates,
            shows_refused=plain or chance.random() < 0.8,
            apart=apart,
        )
        self.checker.queue.items = self.table.items
        self.network.arrived = self.checker.queue.arrived
        if self.kind == "shared" and chance.random() < 0.3:
            self._bury_readers()
        self.actors: dict[Process, str] = {}  # those that have not come to their end
        self.schedulers: list[Process] = []  # which live for ever
        self.storm = True
        self.morning = 0.0  # until then, all machines sleep
        self._names = 0
        self.airflow = Airflow(self)

    def _bury_readers(self) -> None:
        """Begin with a record of 130 readers that died a while ago."""
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

    # -- the course of it -------------------------------------------------------------------------------------

    def play(self) -> None:
        """A storm, then calm, then the judgement."""
        world, chance = self.world, self.world.random
        races = self.trouble == "races"
        crowd = [6, 8] if races else [2, 3, 4, 6, 8] if self.kind == "slots" else [2, 2, 3, 4]
        for _ in range(chance.choice(crowd)):
            actors: list[Callable[[], object]] = [self.client, self.airflow.run, self.sensor, self.impatient]
            weights = [8, 1, 0, 2] if races else [5, 4, 1, 1]
            world.at(chance.uniform(0, 3), None, chance.choices(actors, weights)[0])
        ends = 25.0 if races else chance.choice([15.0, 30.0, 60.0])
        self._brew(ends)
        world.run(lambda: False, ends)
        self._calm()
        self.checker.verify(self.table.items)

    def _brew(self, ends: float) -> None:
        """Choose what is to go wrong, and when."""
        world, chance = self.world, self.world.random
        mishaps = [
            *(self._kill, self._stop, self._suspend, self._cut_off, self.airflow.restart),
            *(self._break, self._expire, self._forget, self._set_capacity),
        ]
        if chance.random() < {"slots": 0.3, "mixed": 0.5}.get(self.kind, 0.05):
            world.at(chance.uniform(0.0, ends), None, self._set_capacity)
        weights, number = [4, 5, 2, 6, 3, 1, 1, 2, 0], chance.choice([0, 1, 2, 4])
        world.suspends = chance.random() < 0.3
        match self.trouble:
            case "all":
                kinds = chance.sample(KINDS, chance.choice([0, 1, 2, 3, 8]))
                world.stumbles = chance.choice([0.0, 0.0, 0.003, 0.01])
            case "pauses":
                kinds, weights, number = [], [1, 5, 2, 5, 1, 0, 0, 0, 0], 3
                world.stumbles = 0.02
            case "delays":
                kinds, weights, number = ["late", "unheard"], [1, 1, 0, 12, 1, 0, 0, 0, 0], 4
            case "races":
                kinds, weights, number = ["lost", "unheard"], [8, 1, 0, 1, 0, 1, 0, 1, 2], 8
                world.stumbles = chance.choice([0.0, 0.003])
        troubles = {kind: chance.choice([0.02, 0.05, 0.15]) for kind in kinds}
        if self.trouble == "races":
            troubles["slow"] = 0.4
        self.network.weather = Weather(conflicted=0.05, **troubles)
        for _ in range(number):
            latest = 10.0 if self.trouble == "races" else ends
            world.at(chance.uniform(0.5, latest), None, chance.choices(mishaps, weights)[0])
        if chance.random() < 0.06:
            world.at(chance.uniform(0.5, ends), None, self._long_night)

    def _calm(self) -> None:
        """The trouble is over: everybody must come to an end, and one more get his turn with all the slots."""
        world, checker, chance = self.world, self.checker, self.world.random
        self.storm = False
        self.network.weather = CALM
        world.stumbles = 0.0
        for process in world.processes:
            process.reaches = process.hears = True
        begun = max([world.now, *(each.busy_until for each in world.processes if each.alive)])
        checker.calm = checker.queue.calm = begun
        world.story("The weather is calm from now on.")
        if chance.random() < 0.3 or len(self.keys) > 1:
            for _ in range(chance.randint(1, 3)):
                world.at(begun + chance.random(), None, self.impatient)
        waiting = {key: self.client(key, name="last") for key in self.keys}
        # A corpse is seen at the next look, is watched for a lease by a slow clock, and taken at the look after that.
        # Others wait until those before them in line have had their turn, or are known to be dead.
        silent = max(self.longest, self.hold) / (1 - world.assumptions.rates) + 2 * self.poll * STRETCH + TRY
        if self.fair:
            silent += IN_LINE + LOOKS * self.poll * STRETCH
        latest = begun + world.assumptions.late + 12 * (silent + self.grace)
        last = dict.fromkeys(self.keys, begun)

        def done() -> bool:
            for key, at in last.items():
                # Who waits for two locks holds up those behind him in both, for as long as one of them is held.
                written = max(begun, *(checker.written.get(each, 0.0) for each in self.keys))
                if written - at > silent and waiting[key] in self.actors:
                    checker.wrong(
                        f"{key} was waited for and had no sign of life from {at:.1f} to {written:.1f}"
                    )
                last[key] = written
            return not self.actors

        if not world.run(done, latest):
            left = ", ".join(f"{each.name} ({what})" for each, what in self.actors.items())
            checker.wrong(f"{left} came to no end within {latest - begun:.0f} s after the storm")
        elif (
            chance.random() < 0.1 and not world.faults["capacity set"]
        ):  # else it may hold the lock beside others
            world.run(lambda: False, world.now + 100.0)  # who still stands in line by then, does so for ever
            for key, process in waiting.items():
                for left in (
                    checker.queue.left_behind(key, process.name, checker.taken) if process.alive else ()
                ):
                    checker.wrong(left)

    # -- who takes part ---------------------------------------------------------------------------------------

    def connect(self, process: Process) -> AsyncLockClient:
        """A client in that process."""
        return AsyncLockClient(Sdk(self.network, process), **self._settings(process))

    def connect_plain(self, process: Process) -> AsyncLockClient | Threaded:
        """The same, of a process that Airflow does not run; in every fifth history it has threads."""
        if self.world.seed % 5 == 4:
            return Threaded(self.network, process, **self._settings(process))
        return self.connect(process)

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
        """A new process."""
        self._names += 1
        process = self.world.process(f"{kind}{self._names}")
        process.busy_until = self.morning
        return process

    def actor(self, process: Process, what: str, work: Coroutine[Any, Any, Any]) -> Callable[[], object]:
        """Let the process do that, which has to come to an end, if the process is not killed. Returns what cancels
        it."""
        self.actors[process] = what

        async def until_done() -> None:
            try:
                await work
            except LockError as failure:
                self.world.story(f"ends: {failure}", process)
            finally:
                self.actors.pop(process, None)

        return process.start(until_done())

    def claim(self, who: str, *, all_of_it: bool = False) -> dict[str, Any]:
        """What somebody may want of a lock of this history."""
        chance = self.world.random
        fair = chance.random() < self.fair
        about = {"actor": who, "fair": "yes" if fair else "no"}
        claim: dict[str, Any] = {"about": about, "fair": fair, "poll_interval": self.poll}
        if self.kind == "slots" or (self.kind == "mixed" and chance.random() < 0.5):
            slots = self.slots if all_of_it else chance.randint(1, 3)
            claim |= {"slots": slots, "capacity": self.slots}
        elif self.kind == "shared" and not all_of_it:
            claim |= {"mode": chance.choice(["shared", "shared", "exclusive"])}
        if fair and not all_of_it and chance.random() < 0.1:
            claim["priority"] = chance.choice([-1, 1])
        if not all_of_it and chance.random() < 0.05:
            claim["min_hold"] = self.hold
            about["hold"] = str(self.hold)
        if chance.random() < 0.05:
            claim["data"] = chance.choice([{}, {"by": who}])
        return claim

    def client(self, key: str | None = None, name: str = "client") -> Process:
        """A process that takes the lock once, twice or thrice, each time for a while."""
        chance, process = self.world.random, self.process(name)
        last = name == "last"
        wanted: Any = key or chance.choice(self.keys)
        if not last and len(self.keys) > 1 and chance.random() < 0.6:
            wanted = chance.sample(self.keys, len(self.keys))  # together, in any order
        claim = self.claim(process.name, all_of_it=last)
        rounds = 1 if last else chance.randint(1, 3) if self.trouble != "races" else 8

        if isinstance(wanted, str) and not last and chance.random() < 0.15:
            claim["reentrant"] = True

        async def take_turns(locks: AsyncLockClient | Threaded) -> None:
            for _ in range(rounds):
                timeout = chance.choice([None, None, 5.0]) if self.storm else None
                try:
                    await self._hold(process, locks, wanted, {**claim, "timeout": timeout})
                except LockError as failure:
                    self.world.story(f"has no luck: {failure}", process)
                if not self.storm:
                    break
                await asyncio.sleep(chance.random() * (0.3 if self.trouble == "races" else 2.0))

        async def work() -> None:
            locks = self.connect_plain(process)
            if claim.get("reentrant") and isinstance(locks, Threaded):
                # Two threads with one owner, whose place in the queue is not judged: they count as one.
                claim.update(fair=False, about=claim["about"] | {"fair": "no"})
                await asyncio.gather(take_turns(locks), take_turns(locks))
            else:
                await take_turns(locks)

        self.actor(process, f"takes {wanted} {rounds} times", work())
        return process

    async def _hold(
        self, process: Process, locks: AsyncLockClient | Threaded, wanted: Any, claim: dict[str, Any]
    ) -> None:
        """Take the lock, work under it for a while, and release it."""
        chance, checker, begun = self.world.random, self.checker, process.here
        checker.queue.processes[process.name] = lambda: process
        with checker.queue.waits(process.name) as waited:
            async with locks.lock(wanted, **claim) as held:
                waited()
                returned = locks.returned if isinstance(locks, Threaded) else process.here
                with ExitStack() as believing:
                    for lease in leases_of(held):
                        again = bool(claim.get("reentrant"))  # another thread of its owner may hold it
                        checker.confirmed(process, lease, begun, returned, again=again)
                        believing.enter_context(checker.believing(process, lease))
                    longest = self.lease * 1.5 if self.storm and self.trouble != "races" else 1.0
                    await asyncio.sleep(chance.random() * longest)
                    if self.storm and chance.random() < 0.1:
                        await self._renew(process, locks, held)
                    if claim.get("reentrant"):
                        await self._hold_again(process, locks, wanted, claim)

    async def _renew(self, process: Process, locks: AsyncLockClient | Threaded, held: Any) -> None:
        """Send a heartbeat by hand, which may make the lease longer, and try to make it shorter again."""
        chance = self.world.random
        for factor in chance.choice([(None,), (1.5,), (2.0, 0.7), (0.5,)]):
            self.longest = max(self.longest, self.lease * (factor or 1.0))
            try:
                held = await locks.renew(held, duration=factor and self.lease * factor)
            except LockError as failure:
                self.world.story(f"does not renew: {failure}", process)
            await asyncio.sleep(chance.random() * self.lease / 2)

    async def _hold_again(
        self, process: Process, locks: AsyncLockClient | Threaded, wanted: str, claim: dict[str, Any]
    ) -> None:
        """Acquire the lock once more, from inside the block of the first acquire."""
        begun = process.here
        try:
            async with locks.lock(wanted, **claim) as again:
                returned = locks.returned if isinstance(locks, Threaded) else process.here
                self.checker.confirmed(process, again, begun, returned, again=True)
                with self.checker.believing(process, again):
                    await asyncio.sleep(self.world.random.random() * self.lease / 2)
        except LockError as failure:
            self.world.story(f"does not hold it again: {failure}", process)

    def impatient(self) -> None:
        """A process that is cancelled while it acquires, or a while after that."""
        chance, process = self.world.random, self.process("impatient")
        wanted: Any = chance.choice(self.keys)
        if len(self.keys) > 1 and chance.random() < 0.7:
            wanted = chance.sample(self.keys, len(self.keys))
        claim = self.claim(process.name)

        async def take() -> None:
            try:
                await self._hold(process, self.connect_plain(process), wanted, claim)
            except LockError as failure:
                self.world.story(f"has no luck: {failure}", process)

        cancel = self.actor(process, f"takes {wanted} for a moment", take())
        patience = chance.choice([0.02, 0.05, 2.0, self.lease])
        self.world.at(process.here + chance.random() * patience, None, cancel)

    def sensor(self) -> None:
        """A process that waits until there is room."""
        process, key = self.process("sensor"), self.world.random.choice(self.keys)

        async def look() -> None:
            while True:
                try:
                    await self.connect_plain(process).wait(key, poll_interval=self.poll)
                except LockError as failure:
                    self.world.story(f"has no luck: {failure}", process)
                else:
                    break

        self.actor(process, f"looks at {key}", look())

    # -- what may befall them ---------------------------------------------------------------------------------

    def _victim(self, among: Iterable[Process]) -> Process | None:
        """Somebody alive; most often one who works under a lease, for there it does the most harm."""
        alive = [process for process in among if process.alive]
        holding = [process for process in alive if self.checker.works(process)]
        chosen = holding if holding and self.world.random.random() < 0.8 else alive
        return self.world.random.choice(chosen) if chosen else None

    def _kill(self) -> None:
        # Triggerers are killed where there is another to take over.
        mortal = [
            each for each in self.world.processes if each not in (*self.schedulers, self.airflow.triggerer)
        ]
        if (process := self._victim(mortal)) is not None:
            self.kill(process)

    def kill(self, process: Process) -> None:
        """SIGKILL."""
        if process.busy_until > self.world.now:  # it has got that far, as far as others can tell
            self.world.at(process.busy_until, None, self.kill, process)
        elif process.alive:
            self.world.faults["process killed"] += 1
            process.alive = False
            self.checker.killed(process)
            self.actors.pop(process, None)

    def _stop(self) -> None:
        """SIGSTOP, and SIGCONT some time later."""
        if (process := self._victim(self.world.processes)) is not None:
            seconds = self._spell()
            self.world.faults["process stopped"] += 1
            self.world.story(f"is stopped for {seconds:.1f} s", process)
            process.pause(seconds)

    def _suspend(self) -> None:
        """The machine of a process is suspended for a while: a laptop's lid, a paused virtual machine."""
        if (process := self._victim(self.world.processes)) is not None:
            seconds = self._spell()
            self.world.faults["machine suspended"] += 1
            self.world.story(f"and its machine are suspended for {seconds:.1f} s", process)
            process.pause(seconds, suspend=True)

    def _forget(self) -> None:
        """Somebody deletes the record of a lock, as soon as nobody holds it, again and again.

        Not where a process sees no ``Date``: the next token may be taken from the wall clock of its host.
        """
        if not self.network.dates or self.world.proxied:
            return
        process, key = self.process("person"), self.world.random.choice(self.keys)
        self.checker.people.append(process)

        async def forget_it() -> None:
            locks = self.connect(process)
            for _ in range(10):
                if await locks.forget(key):
                    self.world.faults["record forgotten"] += 1
                await asyncio.sleep(self.world.random.random())

        self.actor(process, f"forgets {key}", forget_it())

    def _cut_off(self) -> None:
        """A process is cut off from DynamoDB for a while, in one direction or both; perhaps twice in a row."""
        chance, process = self.world.random, self._victim(self.world.processes)
        if process is None:
            return
        reaches, hears = chance.choice([(False, False), (False, True), (True, False)])

        def cut() -> None:
            process.reaches, process.hears = reaches, hears
            self.world.faults["process cut off"] += 1
            self.world.story(f"is cut off ({reaches=}, {hears=})", process)

        def heal() -> None:
            process.reaches = process.hears = True
            self.world.story("is cut off no more", process)

        at = self.world.now
        for _ in range(chance.choice([1, 2, 3])):
            self.world.at(at, None, lambda: cut() if self.storm else None)
            at += self._spell()
            self.world.at(at, None, heal)
            at += chance.random() * chance.choice([1.0, self.lease])

    def _spell(self) -> float:
        """How long something lasts: a moment, somewhat less than a lease, or more."""
        chance = self.world.random
        return chance.choice([1.0, self.grace, self.lease * 0.7, self.lease * chance.uniform(0.9, 2)])

    def _break(self) -> None:
        """Somebody breaks a lock."""
        process, key = self.process("person"), self.world.random.choice(self.keys)
        self.checker.people.append(process)
        self.world.faults["lock broken"] += 1

        async def break_it() -> None:
            locks = self.connect(process)
            record = await locks.get(key)
            if record is not None and record.holders:
                await locks.break_lock(key, next(iter(record.holders)))

        self.actor(process, f"breaks {key}", break_it())

    def _set_capacity(self) -> None:
        """Somebody gives a semaphore another capacity, perhaps the old one again, or lets the claims decide again."""
        process, key = self.process("person"), self.world.random.choice(self.keys)
        self.checker.people.append(process)
        self.world.faults["capacity set"] += 1

        async def set_it() -> None:
            locks = self.connect(process)
            chance = self.world.random
            races = self.trouble == "races"
            some = chance.choice([(5,), (4, 3), (5, 3, 4), (5, None), (4, None, 5), (2, 3, None)])
            for capacity in [5, None] * 4 if races else some:
                try:
                    await locks.set_capacity(key, capacity)
                except LockError as failure:  # it is in use
                    self.world.story(f"does not set it: {failure}", process)
                await asyncio.sleep(chance.random() * (0.5 if races else chance.choice([0.1, self.lease])))

        self.actor(process, f"sets the capacity of {key}", set_it())

    def _expire(self) -> None:
        """DynamoDB deletes what has expired, at a moment of its own choosing.

        Not where a process sees no ``Date``: the time of expiry, and the next token, may be taken from the wall clock
        of its host.
        """
        if not self.network.dates or self.world.proxied:
            return
        for at, item in list(self.table.items.items()):
            if "expires_at" in item and int(item["expires_at"]["N"]) < BEGIN + self.world.now:
                self.world.faults["record deleted by TTL"] += 1
                self.table.delete(at, self.world.now)
                self.checker.deleted(at)

    def _long_night(self) -> None:
        """All machines sleep for more than a week."""
        self.world.faults["slept for a week"] += 1
        self.world.story("All machines sleep.")
        self.morning = self.world.now + 8 * DAY
        for process in self.world.processes:
            process.pause(max(0.0, self.morning - process.here), suspend=True)
        self.world.at(self.morning - self.world.random.random() * DAY / 2, None, self._expire)


class Airflow:
    """A deployment: a scheduler for each run, which never errs but knows little; a triggerer; and workers.

    The schedulers know of processes what they do in reality: they may call a task ended whose process still works.
    """

    def __init__(self, history: History) -> None:
        self.history, self.world, self.checker = history, history.world, history.checker
        self._open: dict[int, _Trigger] = {}
        self._running: list[tuple[int, Callable[[], object]]] = []
        self._mine: list[Process] = []
        self._triggers = self._leases = 0
        self._start_triggerer()

    def _start_triggerer(self) -> None:
        self.triggerer = self.history.process("triggerer")
        self._mine.append(self.triggerer)
        self.locks = self.history.connect(self.triggerer)

    def restart(self) -> None:
        """A new triggerer takes over what the old one has not finished. The old one is dead, or only seems so."""
        old, chance, running = self.triggerer, self.world.random, list(self._running)
        self._start_triggerer()
        self.world.faults["triggerer replaced"] += 1
        self.world.story(f"takes over from {old.name}", self.triggerer)
        if chance.random() < 0.6:
            self.history.kill(old)
        elif chance.random() < 0.7:
            self.world.at(self.world.now + chance.random() * 10, None, self.history.kill, old)
        if old.alive and chance.random() < 0.5:
            # It finds that its triggers are another's now, and cancels them.
            for _, cancel in running:
                self.world.at(self.world.now + chance.random() * 3, None, cancel)
        for number in self._open:
            self._go(number)

    async def trigger(self, scheduler: Process, work: Work) -> Any:
        """Run that in the triggerer, and again in the next one if it has not ended there."""
        self._triggers += 1
        number, answer = self._triggers, scheduler.create_future()
        self._open[number] = _Trigger(scheduler, work, answer)
        self._go(number)
        return await answer

    def _go(self, number: int) -> None:
        trigger = self._open[number]
        work = trigger.work(self.triggerer, self.locks)
        cancel = self._do(
            self.triggerer, work, trigger.scheduler, trigger.answer, lambda: self._orphan_later(number)
        )
        self._running.append((number, cancel))

    def _orphan_later(self, number: int) -> None:
        """The task of a trigger has ended, or was cleared. Wherever the trigger still runs, it ends when it looks
        (`task_states.until_orphaned`)."""
        self._open.pop(number, None)
        self.world.at(self.world.now + self.world.random.uniform(0, 25), None, self._orphan, number)

    def _orphan(self, number: int) -> None:
        for each, cancel in self._running:
            if each == number:
                cancel()

    def _do(
        self,
        process: Process,
        work: Coroutine[Any, Any, Any],
        scheduler: Process,
        answer: asyncio.Future[Any],
        ended: Callable[[], object] = lambda: None,
    ) -> Callable[[], object]:
        """Let a process do that, and tell the scheduler what came of it. Returns what cancels it."""

        def tell(result: Any) -> None:
            ended()
            if not answer.done():
                answer.set_result(result)

        async def done() -> None:
            try:
                result = await work
            except LockError as failure:
                self.world.story(f"fails: {failure}", process)
                result = None
            self.world.at(process.here, scheduler, tell, result)

        return process.start(done())

    # -- a run of a DAG: a group with one or two tasks in it --------------------------------------------------

    def run(self) -> None:
        """Start one."""
        scheduler, key = self.history.process("run"), self.world.random.choice(self.history.keys)
        self.history.schedulers.append(scheduler)

        async def until_done() -> None:
            while await self._attempt(key, scheduler):
                pass

        self.history.actor(scheduler, f"works under {key}", until_done())

    async def _attempt(self, key: str, scheduler: Process) -> bool:
        """One attempt of a run. True if somebody has cleared it, so that there is to be another."""
        chance = self.world.random
        self._leases += 1
        lease_id = f"ti{self._leases:04}"
        self.checker.acting[lease_id] = self._mine
        claim: Any = self.history.claim(lease_id) | {
            "lease_id": lease_id,
            "attempt_of": scheduler.name,
        }

        keepers: list[tuple[Process, asyncio.Future[None]]] = []
        released: list[bool] = []

        async def acquire(process: Process, locks: AsyncLockClient) -> Lease:
            begun = process.here
            lease = await locks.acquire(key, **claim)
            self.checker.confirmed(process, lease, begun, process.here)
            return lease

        async def keep(process: Process, locks: AsyncLockClient) -> None:
            # As `DynamoLockHeartbeatTrigger` does: until it is gone, as the beats or the looks show, or until Airflow
            # says that the release task has ended, which it asks now and then.
            keeping = asyncio.ensure_future(locks.keep_for_processes(held, interval=self.history.lease / 3))
            gone = asyncio.ensure_future(locks.until_gone(held, poll_interval=self.history.poll))
            forsaken = process.create_future()
            if released:
                self.world.at(process.here + chance.uniform(0, 25), process, answer_with, forsaken, None)
            keepers.append((process, forsaken))
            try:
                await asyncio.wait((keeping, gone, forsaken), return_when=asyncio.FIRST_COMPLETED)
                if not keeping.done() and not gone.done():
                    await locks.release(held, retry_for=None)
            finally:
                keeping.cancel()
                gone.cancel()

        async def release(process: Process, locks: AsyncLockClient) -> None:
            await locks.release(held, retry_for=None)

        self.checker.queue.processes[lease_id] = lambda: self.triggerer
        with self.checker.queue.waits(lease_id):
            acquired: Lease | None = await self.trigger(scheduler, acquire)
        if acquired is None:
            return False
        held = Lease.from_dict(acquired.as_dict())  # by way of an XCom
        keeper = asyncio.ensure_future(self.trigger(scheduler, keep))
        await asyncio.sleep(0)
        keeping = self._triggers
        cleared = False
        for _ in range(chance.randint(1, 2)):
            cleared = await self._task(held, scheduler)
            if cleared:
                break
        if cleared and chance.random() < 0.7:
            self._orphan_later(keeping)
            return True  # the new attempt has to give its predecessor's lease back
        await self.trigger(scheduler, release)
        released.append(True)
        for process, forsaken in keepers:
            self.world.at(scheduler.here + chance.uniform(0, 25), process, answer_with, forsaken, None)
        await keeper
        return cleared

    async def _task(self, held: Lease, scheduler: Process) -> bool:
        """A guarded task in a process of its own. True if somebody has cleared it."""
        chance = self.world.random
        process = self.history.process("worker")
        self._mine.append(process)
        answer = scheduler.create_future()
        self._do(process, self._guarded(process, held), scheduler, answer)
        fate = (
            chance.choices(["", "marked", "killed", "cleared"], [6, 2, 2, 2])[0] if self.history.storm else ""
        )
        # Of a process that sends it no heartbeats for long, Airflow thinks that it is dead, and sees to it.
        await asyncio.wait([answer], timeout=chance.random() * self.history.lease if fate else 100.0)
        if fate:
            self.world.faults[f"task {fate}"] += 1
            self.world.story(f"has its task {fate}", process)
        if fate or not answer.done():
            # Airflow thinks that it has ended; its process goes on for some seconds.
            delay = 0.0 if fate == "killed" else chance.uniform(1.0, 6.0)
            self.world.at(scheduler.here + delay, None, self.history.kill, process)
        return fate == "cleared"

    async def _guarded(self, process: Process, held: Lease) -> None:
        """What `guard.Guard` does around a task's code."""
        locks = self.history.connect(process)
        lost = process.create_future()
        beats = None
        try:
            entered = await locks.enter(held, process.name)
            beats = locks.keep_alive(
                entered, interval=entered.lease_ms / 3000, on_lost=lambda *_: lost.set_result(None)
            )
            with self.checker.believing(process, entered, inside=True):
                longest = self.history.lease if self.history.storm else 1.0
                await asyncio.wait([lost], timeout=self.world.random.random() * longest)
        except LockLostError as refused:
            self.world.story(f"does not start: {refused}", process)
        finally:
            if beats is not None:
                beats.cancel()
            # Also where it may have entered, and the answer never came.
            await locks.leave(held, process.name)


@dataclass(frozen=True)
class _Trigger:
    """Work for a triggerer, and the scheduler that waits for its answer."""

    scheduler: Process
    work: Work
    answer: asyncio.Future[Any]
