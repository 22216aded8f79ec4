"""Histories that nobody would think of: hosts with wrong clocks take, beat, enter, leave, give back and die at random,
over a network that loses, repeats and delays, one request at a time. At no moment may those who believe in their lease
have more slots than the lock; and in the end, when the trouble is over, everybody gets his turn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from airflow_dynamo_lock.protocol.effects import Request
from airflow_dynamo_lock.protocol.errors import LockError, LockUnavailableError
from airflow_dynamo_lock.protocol.model import Granted, Released, Renewed, Term
from tests.simulation import HOURS, KEY, LOST, LOST_THEN_RETRIED, UNSENT, Host, Paused, World

LEASE_MS = 30_000
GRACE_MS = 9_000
STEPS = 400
#: How late a request may land that its sender has given up, or a process may be stopped just before it sends a beat:
#: then it must not be overtaken by a beat so much later that observers take the newer one's sender for dead.
LATEST = 5.0
#: By how much the clocks of DynamoDB's servers are off, seconds.
SERVERS = (-3.0, 0.0, 3.0)


@dataclass
class Work:
    """A lease as those who work under it see it.

    :ivar terms: the holder's own view of its time, and that of each process inside; those that died have none.
    """

    lease_id: str
    slots: int
    terms: dict[str, Term] = field(default_factory=dict)

    def goes_on(self) -> bool:
        return any(term.remaining() > 0 for term in self.terms.values())


@dataclass
class Running:
    """An operation under way.

    :ivar note: what is made of its outcome.
    :ivar since: when what it does next was decided.
    """

    operation: Paused[Any]
    note: Callable[[Any], None]
    beats: bool
    since: float


class History:
    """One random history."""

    def __init__(self, world: World, capacity: int, seed: int) -> None:
        self.world, self.capacity = world, capacity
        self.random = random.Random(seed)
        self.hosts = [
            Host(
                world,
                name,
                wall_clock_off=self.random.choice([0.0, 0.0, -5 * HOURS, 5 * HOURS, -30.0]),
                clock_rate=self.random.choice([0.96, 1.0, 1.04]),
                booted=self.random.uniform(0, 1e6),
            )
            for name in "abcd"
        ]
        self.works: dict[str, Work] = {}
        self.running: list[Running] = []
        self.late: list[tuple[float, Request]] = []
        self.tokens: list[int] = []
        self.told: list[str] = []
        self._attempts = 0

    # -- what may happen next ---------------------------------------------------------------------------------

    def step(self) -> None:
        """Something happens."""
        happening: Callable[[], None] = self.random.choices(
            [
                self.go_on,
                self.take,
                self.beat,
                self.enter,
                self.leave,
                self.give_back,
                self.die,
                self.time_passes,
            ],
            weights=[30, 8, 6, 3, 4, 3, 1, 6],
        )[0]
        (happening if len(self.running) < 6 else self.go_on)()
        self.land(all_of_them=False)
        self.check()

    def go_on(self) -> None:
        """One operation goes on by one request, with whatever befalls it."""
        if not self.running:
            return
        self.random.shuffle(self.running)
        running = self.running[-1]
        paused = running.operation
        fate = self.random.choices(["", LOST, LOST_THEN_RETRIED, UNSENT, "late"], weights=[80, 5, 5, 5, 5])[0]
        try:
            if running.beats and self.world.now > running.since + LATEST:
                paused.interrupt(LockUnavailableError("never sent", maybe_applied=False))
            elif fate == "late" and isinstance(paused.effect, Request):
                self.late.append((self.world.now + self.random.uniform(0, LATEST), paused.effect))
                paused.interrupt(LockUnavailableError("no answer", maybe_applied=True))
            else:
                self.world.fates.extend(
                    [fate] if isinstance(paused.effect, Request) and fate != "late" else []
                )
                paused.step()
        except LockError:
            self.running.pop()
            return
        running.since = self.world.now
        if paused.effect is None:
            self.running.pop()
            running.note(paused.finish())

    def take(self) -> None:
        host, slots = self.random.choice(self.hosts), self.random.randint(1, self.capacity)
        self._attempts += 1
        claim = host.claim(
            f"{host.name}{self._attempts}",
            slots=slots,
            capacity=self.capacity,
            lease_ms=LEASE_MS,
            grace_ms=GRACE_MS,
        )

        def note(outcome: Any) -> None:
            if isinstance(outcome, Granted):
                term = host.term()
                term.renewed(outcome.sent_at, LEASE_MS)
                self.works[claim.lease_id] = Work(claim.lease_id, slots, {"": term})
                self.told.append(f"{self.world.now:.1f} {claim.lease_id} granted {outcome.token}")
                if term.remaining() > 0:
                    assert self.capacity > 1 or outcome.token > max(self.tokens, default=0), self.told
                    self.tokens.append(outcome.token)

        self._start(host, host.operations.try_acquire(claim, undo=True), note)

    def beat(self) -> None:
        """The holder, or a process inside, sends a heartbeat, unless it knows that it has lost."""
        for work, who, term in self._some_worker():
            lease_ms = GRACE_MS if who else LEASE_MS
            host = next(each for each in self.hosts if each.now == term._now)

            def note(outcome: Any, term: Term = term, lease_ms: int = lease_ms) -> None:
                if isinstance(outcome, Renewed):
                    term.renewed(outcome.sent_at, min(lease_ms, outcome.holder.lease_ms))
                else:
                    term.lose("lost")

            self._start(host, host.operations.heartbeat(KEY, work.lease_id, lease_ms), note, beats=True)

    def enter(self) -> None:
        for work, who, _ in self._some_worker():
            if who:
                continue
            host, process = self.random.choice(self.hosts), f"pid-{self.random.randrange(1000)}"

            def note(outcome: Any, host: Host = host, process: str = process, work: Work = work) -> None:
                if isinstance(outcome, Renewed):
                    term = work.terms[process] = host.term()
                    term.renewed(outcome.sent_at, min(GRACE_MS, outcome.holder.lease_ms))
                    self.told.append(f"{self.world.now:.1f} {process} entered {work.lease_id}")

            self._start(host, host.operations.enter(KEY, work.lease_id, process, GRACE_MS), note, beats=True)

    def leave(self) -> None:
        for work, who, _ in self._some_worker():
            if who:
                del work.terms[who]
                host = self.random.choice(self.hosts)
                leaving = host.operations.leave(KEY, work.lease_id, who, work.slots, GRACE_MS, GRACE_MS)
                self._start(host, leaving, lambda _: None)

    def give_back(self) -> None:
        """The holder stops; its processes go on until they have left."""
        for work, who, _ in self._some_worker():
            if not who:
                del work.terms[who]
                self.told.append(f"{self.world.now:.1f} {work.lease_id} gives back")
                host = self.random.choice(self.hosts)
                self._start(
                    host, host.operations.release(KEY, work.lease_id, work.slots, GRACE_MS), lambda _: None
                )

    def die(self) -> None:
        """One who works is killed."""
        for work, who, _ in self._some_worker():
            del work.terms[who]
            self.told.append(f"{self.world.now:.1f} {work.lease_id}/{who} died")

    def time_passes(self) -> None:
        """A moment, or up to where it gets interesting: just before or after somebody's time is up."""
        ends = [
            term.remaining() / host.clock_rate + more
            for work in self.works.values()
            for term in work.terms.values()
            for host in self.hosts
            for more in (-0.2, -0.2, 0.2, 2.0, 8.0)
            if term._now == host.now and term.remaining() > 0.5
        ]
        self.world.now += self.random.choice([0.1, self.random.choice(ends)] if ends else [0.1, 1.0, 15.0])

    def land(self, *, all_of_them: bool) -> None:
        """Requests that were given up reach DynamoDB."""
        landing = [each for each in self.late if all_of_them or each[0] <= self.world.now]
        for each in landing:
            self.late.remove(each)
            self.world.fates.clear()
            self.world.answer(each[1], lambda: 0.0)

    # -- what must hold ---------------------------------------------------------------------------------------

    def check(self) -> None:
        working = [work for work in self.works.values() if work.goes_on()]
        assert sum(work.slots for work in working) <= self.capacity, [
            work.lease_id for work in working
        ] + self.told
        assert len(set(self.tokens)) == len(self.tokens), self.told

    def settle(self) -> None:
        """The trouble is over: everybody who waits gets his turn, one after the other."""
        self.land(all_of_them=True)
        self.world.fates.clear()
        self.works.clear()
        for host in self.hosts:
            claim = host.claim(f"{host.name}-last", slots=self.capacity, capacity=self.capacity)
            begun = self.world.now
            granted = host.run(
                host.operations.acquire(claim, now=host.now(), timeout=None, poll_interval=1.0, undo=True)
            )
            assert isinstance(granted, Granted)
            assert self.world.now - begun < 2 * LEASE_MS / 1000
            assert isinstance(host.release(granted.claim.lease_id, slots=self.capacity), Released)

    # -- parts ------------------------------------------------------------------------------------------------

    def _some_worker(self) -> Iterator[tuple[Work, str, Term]]:
        workers = [
            (work, who, term)
            for work in self.works.values()
            for who, term in work.terms.items()
            if term.remaining() > 0
        ]
        if workers:
            yield self.random.choice(workers)

    def _start(self, host: Host, operation: Any, note: Callable[[Any], None], *, beats: bool = False) -> None:
        self.running.append(Running(host.start(operation), note, beats, self.world.now))


@contextmanager
def _servers(world: World, seed: int) -> Iterator[None]:
    """Each answer comes from another server, whose clock is off in its own way."""
    off = random.Random(seed)
    world.server_off = lambda: off.choice(SERVERS)
    yield
    world.server_off = lambda: 0.0


@pytest.mark.parametrize("seed", range(int(__import__("os").environ.get("SEEDS", "12"))))
@pytest.mark.parametrize("capacity", [1, 3])
def test_never_more_holders_than_slots_and_in_the_end_everybody_gets_his_turn(
    make_world: Callable[..., World], capacity: int, seed: int
) -> None:
    world = make_world(dates=seed % 3 != 0, shows_refused=seed % 2 == 0)
    history = History(world, capacity, seed)
    with _servers(world, seed):
        for _ in range(STEPS):
            history.step()
        history.settle()

    assert len(history.tokens) > 1, "something happened"
