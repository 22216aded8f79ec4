"""What each process does. It uses the package as its users do, and writes into its log what it believes meanwhile.

A belief begins with ``granted`` or ``entered``. Each carries `until`, the end of the holder's own term, and so does
each ``counts`` that follows, after a renewal. It ends with ``gives_back``, ``hands_over``, ``leaves`` or ``lost``, each
written *before* anybody else can learn of it, or when the term does. `stay` tells one belief from another.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

from airflow_dynamo_lock import AsyncLockClient, Lease, LockClient, LockError, LockLostError
from airflow_dynamo_lock.client import session
from airflow_dynamo_lock.client.clock import monotonic
from airflow_dynamo_lock.core.model.lease import Term
from deployments.clients import async_lock_client, lock_client
from proof.chaos.log import Log
from proof.chaos.settings import CAPACITIES, GRACE, LEASE, Role

#: Beats of a guarded process in one release grace, as in `airflow_dynamo_lock.airflow.guard`.
BEATS_PER_GRACE = 3
_TICK = 0.1


@dataclass(frozen=True)
class Place:
    """Where a process is, and what is around it.

    :ivar number: its number in this run.
    :ivar endpoint_url: its way to the engine.
    :ivar log: its own log.
    :ivar complaints: where its standard error goes.
    :ivar calm: a file that is there once nothing goes wrong any more. Whoever takes turns takes a last one then.
    """

    number: int
    endpoint_url: str
    log: str
    complaints: str
    calm: str
    seed: str


def perform(role: Role, place: Place) -> NoReturn:
    """Be that process, one that has just been forked."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    errors = os.open(place.complaints, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(name)s %(message)s", level=logging.INFO, force=True
    )
    logging.getLogger("botocore").setLevel(logging.WARNING)
    _set_wall_clock(role.clock_off)
    log = Log(Path(place.log), role.who, place.number)
    code = 0
    try:
        with patch.object(session, "Term", _ToldTerm):
            _ROLES[role.does](_Actor(role, place, log))
    except BaseException:
        log.write("error", trace=traceback.format_exc())
        code = 1
    log.write("ends")
    sys.stderr.flush()
    os._exit(code)  # its threads may be waiting for something still


def _set_wall_clock(off: float) -> None:
    """Nothing may depend on a host's wall clock."""
    right_ns, right = time.time_ns, time.time
    time.time_ns = lambda: right_ns() + int(off * 1e9)
    time.time = lambda: right() + off


class _ToldTerm(Term):
    """A term that tells when it was renewed."""

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__(now)
        self.tell: Callable[[float], None] | None = None

    def renewed(self, sent_at: float, lease_ms: int) -> None:
        super().renewed(sent_at, lease_ms)
        if self.tell is not None:
            self.tell(self.until)


class _Actor:
    """What the roles share."""

    def __init__(self, role: Role, place: Place, log: Log) -> None:
        self.role, self.place, self.log = role, place, log
        self.rng = random.Random(f"{place.seed} {role.who} {role.lease_id}")
        self._numbers = itertools.count(1)

    @property
    def options(self) -> dict[str, Any]:
        return {"lease": LEASE, "release_grace": GRACE, "owner": self.role.who}

    @property
    def calm(self) -> bool:
        return os.path.exists(self.place.calm)

    def wants(self, slots: int) -> str:
        """A new attempt begins."""
        stay = f"{self.place.number}/{next(self._numbers)}"
        role = self.role
        self.log.write("wants", stay=stay, key=role.key, slots=slots, capacity=role.capacity, calm=self.calm)
        return stay

    def counts_on(self, what: str, stay: str, lease: Lease, **more: Any) -> None:
        """A belief begins."""
        term = lease.term
        assert isinstance(term, _ToldTerm)

        def tell(until: float) -> None:
            self.log.write("counts", stay=stay, until=until)

        term.tell = tell
        self.log.write(
            what,
            stay=stay,
            lease=lease.as_dict(),
            until=term.until,
            reclaimed=[dead.lease_id for dead in lease.reclaimed],
            **more,
        )

    def failed(self, stay: str, failure: LockError) -> None:
        """A typed error, which a network that fails may lead to."""
        what = "lost" if isinstance(failure, LockLostError) else "failed"
        self.log.write(what, stay=stay, error=type(failure).__name__, why=str(failure))

    def turn(self) -> tuple[int, float | None, float]:
        """How many slots to take, how long to wait, and how long to stay."""
        rng, role = self.rng, self.role
        slots = role.slots or rng.choice([1, 1, 1, 2, 3])
        if self.calm:
            return slots, None, rng.uniform(0.1, 0.5)
        timeout = rng.uniform(1, 10) if rng.random() < 0.2 else None
        return slots, timeout, self.stay()

    def stay(self) -> float:
        """How long to stay: mostly for a moment, and sometimes for longer than the lease lasts without heartbeats."""
        if self.calm:
            return self.rng.uniform(0.1, 0.5)
        longest = self.rng.choices([1.0, 3.0, 1.5 * LEASE], [4, 4, 2])[0]
        return self.rng.uniform(0.1, longest)


# -- those who take turns by themselves -------------------------------------------------------------------------


def _take_turns(actor: _Actor) -> None:
    with (
        lock_client("sync", actor.place.endpoint_url, **actor.options) as client,
        ThreadPoolExecutor(actor.role.members) as pool,
    ):
        turn = _careless_turn if actor.role.careless else _turn

        def member(_: int) -> None:
            done = False
            while not done:
                last = actor.calm
                done = turn(actor, client) and (last or actor.role.careless)
                time.sleep(actor.rng.uniform(0, 0.5))

        list(pool.map(member, range(actor.role.members)))


def _turn(actor: _Actor, client: LockClient) -> bool:
    """One turn; whether it was to be had, and lasted to its end."""
    slots, timeout, length = actor.turn()
    stay = actor.wants(slots)
    role = actor.role
    try:
        with client.lock(role.key, timeout=timeout, slots=slots, capacity=role.capacity) as lease:
            actor.counts_on("granted", stay, lease)
            try:
                _work(lease, length)
            finally:
                actor.log.write("gives_back", stay=stay)
    except LockError as failure:
        actor.failed(stay, failure)
        return False
    actor.log.write("gave_back", stay=stay)
    return True


def _work(lease: Lease, length: float) -> None:
    end = monotonic() + length
    while monotonic() < end:
        lease.check()
        time.sleep(_TICK)


def _careless_turn(actor: _Actor, client: LockClient) -> bool:
    """Take the lock, send no heartbeat, and count on it for as long as one likes."""
    stay = actor.wants(1)
    lease = client.acquire(actor.role.key)
    actor.counts_on("granted", stay, lease)
    actor.log.write("counts", stay=stay, until=monotonic() + 2 * LEASE)
    time.sleep(2 * LEASE)
    actor.log.write("gives_back", stay=stay)
    client.release(lease)
    return True


def _take_turns_async(actor: _Actor) -> None:
    async def member(client: AsyncLockClient) -> None:
        done = False
        while not done:
            last = actor.calm
            done = await _turn_async(actor, client) and last
            await asyncio.sleep(actor.rng.uniform(0, 0.5))

    async def main() -> None:
        async with async_lock_client(actor.place.endpoint_url, **actor.options) as client:
            await asyncio.gather(*(member(client) for _ in range(actor.role.members)))

    asyncio.run(main())


async def _turn_async(actor: _Actor, client: AsyncLockClient) -> bool:
    slots, timeout, length = actor.turn()
    stay = actor.wants(slots)
    role = actor.role
    try:
        async with client.lock(role.key, timeout=timeout, slots=slots, capacity=role.capacity) as lease:
            actor.counts_on("granted", stay, lease)
            try:
                end = monotonic() + length
                while monotonic() < end:
                    lease.check()
                    await asyncio.sleep(_TICK)
            finally:
                actor.log.write("gives_back", stay=stay)
    except LockError as failure:
        actor.failed(stay, failure)
        return False
    actor.log.write("gave_back", stay=stay)
    return True


# -- the processes of a group, each of which does what `triggers` or `guard` does in Airflow -----------------------


def _acquire(actor: _Actor) -> None:
    """`DynamoLockAcquireTrigger`: takes the lock under its attempt's name, keeps it until that is known, and ends."""

    async def main() -> None:
        async with async_lock_client(actor.place.endpoint_url, **actor.options) as client:
            role, stay = actor.role, actor.wants(1)
            group = role.who.partition("/")[0]
            try:
                lease = await client.acquire(
                    role.key, lease_id=role.lease_id, attempt_of=group, capacity=role.capacity
                )
                beats = client.keep_alive(lease)
                try:
                    actor.counts_on("granted", stay, lease)
                    await asyncio.sleep(actor.rng.uniform(0, 0.5))
                    lease.check()
                finally:
                    beats.cancel()
            except LockError as failure:
                actor.failed(stay, failure)
            else:
                actor.log.write("hands_over", stay=stay)

    asyncio.run(main())


def _keep(actor: _Actor) -> None:
    """`DynamoLockHeartbeatTrigger`: keeps the lease alive for those inside; counts on nothing itself."""

    async def main() -> None:
        async with async_lock_client(actor.place.endpoint_url, **actor.options) as client:
            lease = _lease(actor)
            keeping = asyncio.ensure_future(client.keep_for_processes(lease, interval=LEASE / 12))
            gone = asyncio.ensure_future(client.until_gone(lease))
            await asyncio.wait((keeping, gone), return_when=asyncio.FIRST_COMPLETED)
            for ended in (keeping, gone):
                if ended.done():
                    ended.result()
                ended.cancel()

    asyncio.run(main())


def _guarded(actor: _Actor) -> None:
    """A task with its guard: enters, beats, works, leaves."""
    with lock_client("sync", actor.place.endpoint_url, **actor.options) as client:
        lease, stay = _lease(actor), f"{actor.place.number}/inside"
        try:
            entered = client.enter(lease, stay)
            interval = entered.lease_ms / 1000 / BEATS_PER_GRACE
            actor.counts_on("entered", stay, entered)
            with client.keep_alive(entered, interval=interval):
                _work(entered, actor.stay())
        except LockError as failure:
            actor.failed(stay, failure)
        actor.log.write("leaves", stay=stay)
        try:
            client.leave(lease, stay)
        except LockError as failure:
            actor.failed(stay, failure)


def _release(actor: _Actor) -> None:
    """`DynamoLockReleaseTrigger`: gives the lease back, whoever is inside."""

    async def main() -> None:
        async with async_lock_client(actor.place.endpoint_url, **actor.options) as client:
            lease = _lease(actor)
            try:
                outcome = await client.release(lease, retry_for=None)
            except LockError as failure:
                actor.failed("release", failure)
            else:
                actor.log.write("released", lease_id=lease.lease_id, outcome=type(outcome).__name__)

    asyncio.run(main())


def _lease(actor: _Actor) -> Lease:
    assert actor.role.lease
    return Lease.from_dict(json.loads(json.dumps(actor.role.lease)))


# -- people ---------------------------------------------------------------------------------------------------------


def _break_now_and_then(actor: _Actor) -> None:
    """Somebody who takes a lease away from its holder, every now and then."""
    with lock_client("sync", actor.place.endpoint_url, **actor.options) as client:
        later = monotonic() + actor.rng.uniform(5, 20)
        while not actor.calm:
            time.sleep(_TICK)
            if monotonic() < later:
                continue
            later = monotonic() + actor.rng.uniform(5, 20)
            try:
                record = client.get(actor.rng.choice(sorted(CAPACITIES)))
                if record is not None and record.holders:
                    lease_id = actor.rng.choice(sorted(record.holders))
                    actor.log.write("breaks", lease_id=lease_id)
                    client.break_lock(record.key, lease_id)
                    actor.log.write("broke", lease_id=lease_id)
            except LockError as failure:
                actor.failed("break", failure)


_ROLES: dict[str, Callable[[_Actor], None]] = {
    "take_turns": _take_turns,
    "take_turns_async": _take_turns_async,
    "acquire": _acquire,
    "keep": _keep,
    "guarded": _guarded,
    "release": _release,
    "break_now_and_then": _break_now_and_then,
}
