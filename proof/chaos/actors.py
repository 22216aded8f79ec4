"""The programs of the processes. They use the package as its users do, and log when they count on a lease.

A process counts on its lease from ``granted`` or ``entered`` on. These events, and each ``renewed`` that
follows, carry `until`: the time until which the lease is valid for its holder. The process stops counting on
the lease at that time, or earlier with one of the events ``releasing``, ``handed_over``, ``leaving`` and
``lost``. It writes these *before* another process can acquire the lock because of it. The attribute `use`
tells the uses of leases apart.
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
from airflow_dynamo_lock.core.model.limits import HEARTBEATS_PER_GRACE
from deployments.clients import async_lock_client, lock_client
from proof.chaos.log import Log
from proof.chaos.settings import CAPACITIES, GRACE, LEASE, Role

# Interval at which a working process checks its lease, in seconds.
_TICK = 0.1


@dataclass(frozen=True)
class ProcessSetup:
    """Settings of one process, besides its role.

    :ivar number: number of the process in this run.
    :ivar endpoint_url: the proxy by which it reaches the engine.
    :ivar log: file for its events.
    :ivar stderr: file for its standard output and standard error.
    :ivar calm_file: file that exists after the last disaster. A process outside the groups then uses the lock
        once more, and exits.
    :ivar seed: seed of the process's random choices.
    """

    number: int
    endpoint_url: str
    log: str
    stderr: str
    calm_file: str
    seed: str


def run_actor(role: Role, setup: ProcessSetup) -> NoReturn:
    """Run the role's program in this process, which has just been forked, and exit."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    errors = os.open(setup.stderr, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(name)s %(message)s", level=logging.INFO, force=True
    )
    logging.getLogger("botocore").setLevel(logging.WARNING)
    _falsify_wall_clock(role.clock_error)
    log = Log(Path(setup.log), role.name, setup.number)
    code = 0
    try:
        with patch.object(session, "Term", _ObservedTerm):
            _PROGRAMS[role.program](_Actor(role, setup, log))
    except BaseException:
        log.write("error", trace=traceback.format_exc())
        code = 1
    log.write("exits")
    sys.stderr.flush()
    os._exit(code)  # sys.exit() would wait for threads that may still wait for an answer


def _falsify_wall_clock(error: float) -> None:
    """Make this process's wall clock wrong by `error` seconds, because the lock must not depend on it."""
    true_ns, true = time.time_ns, time.time
    time.time_ns = lambda: true_ns() + int(error * 1e9)
    time.time = lambda: true() + error


class _ObservedTerm(Term):
    """A lease term that calls `on_renewed` with its new end after each renewal."""

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__(now)
        self.on_renewed: Callable[[float], None] | None = None

    def renewed(self, sent_at: float, lease_ms: int) -> None:
        super().renewed(sent_at, lease_ms)
        if self.on_renewed is not None:
            self.on_renewed(self.until)


class _Actor:
    """State and logging that all programs share."""

    def __init__(self, role: Role, setup: ProcessSetup, log: Log) -> None:
        self.role, self.setup, self.log = role, setup, log
        self.rng = random.Random(f"{setup.seed} {role.name} {role.lease_id}")
        self._numbers = itertools.count(1)

    @property
    def client_options(self) -> dict[str, Any]:
        return {"lease": LEASE, "release_grace": GRACE, "owner": self.role.name}

    @property
    def is_calm(self) -> bool:
        """Whether the last disaster is over."""
        return os.path.exists(self.setup.calm_file)

    def log_request(self, slots: int) -> str:
        """Log that an attempt begins. Returns the id of the attempt and of the lease use that may follow."""
        use, role = f"{self.setup.number}/{next(self._numbers)}", self.role
        self.log.write(
            "requested", use=use, key=role.key, slots=slots, capacity=role.capacity, calm=self.is_calm
        )
        return use

    def log_use(self, what: str, use: str, lease: Lease) -> None:
        """Log that the process counts on the lease from now on, and log each later renewal."""
        term = lease.term
        assert isinstance(term, _ObservedTerm)

        def log_renewal(until: float) -> None:
            self.log.write("renewed", use=use, until=until)

        term.on_renewed = log_renewal
        reclaimed = [dead.lease_id for dead in lease.reclaimed]
        self.log.write(what, use=use, lease=lease.as_dict(), until=term.until, reclaimed=reclaimed)

    def log_failure(self, use: str, failure: LockError) -> None:
        """Log a typed error of the package. Network failures may cause it."""
        what = "lost" if isinstance(failure, LockLostError) else "failed"
        self.log.write(what, use=use, error=type(failure).__name__, why=str(failure))

    def choose_turn(self) -> tuple[int, float | None, float]:
        """Choose the slots to claim, the timeout (None after the disasters), and the seconds to work."""
        rng, role = self.rng, self.role
        slots = role.slots or rng.choice([1, 1, 1, 2, 3])
        if self.is_calm:
            return slots, None, self.choose_work()
        timeout = rng.uniform(1, 10) if rng.random() < 0.2 else None
        return slots, timeout, self.choose_work()

    def choose_work(self) -> float:
        """Choose how many seconds to work: mostly few, sometimes more than the duration of a lease."""
        if self.is_calm:
            return self.rng.uniform(0.1, 0.5)
        longest = self.rng.choices([1.0, 3.0, 1.5 * LEASE], [4, 4, 2])[0]
        return self.rng.uniform(0.1, longest)


# -- processes outside the groups ----------------------------------------------------------------------------


def _client(actor: _Actor) -> None:
    """Threads of one `LockClient` acquire and release the lock in turns."""
    with (
        lock_client("sync", actor.setup.endpoint_url, **actor.client_options) as client,
        ThreadPoolExecutor(actor.role.members) as pool,
    ):
        take_turn = _careless_turn if actor.role.careless else _turn

        def member(_: int) -> None:
            done = False
            while not done:
                last = actor.is_calm
                done = take_turn(actor, client) and (last or actor.role.careless)
                time.sleep(actor.rng.uniform(0, 0.5))

        list(pool.map(member, range(actor.role.members)))


def _turn(actor: _Actor, client: LockClient) -> bool:
    """Acquire the lock, work, and release it. Returns whether all of that succeeded."""
    slots, timeout, seconds = actor.choose_turn()
    use = actor.log_request(slots)
    role = actor.role
    try:
        with client.lock(role.key, timeout=timeout, slots=slots, capacity=role.capacity) as lease:
            actor.log_use("granted", use, lease)
            try:
                _work(lease, seconds)
            finally:
                actor.log.write("releasing", use=use)
    except LockError as failure:
        actor.log_failure(use, failure)
        return False
    actor.log.write("released", use=use)
    return True


def _work(lease: Lease, seconds: float) -> None:
    """Pretend to work. Raises `LockLostError` if the lease is lost meanwhile."""
    end = monotonic() + seconds
    while monotonic() < end:
        lease.check()
        time.sleep(_TICK)


def _careless_turn(actor: _Actor, client: LockClient) -> bool:
    """Acquire the lock, send no heartbeats, and count on the lease for twice its duration."""
    use = actor.log_request(1)
    lease = client.acquire(actor.role.key)
    actor.log_use("granted", use, lease)
    actor.log.write("renewed", use=use, until=monotonic() + 2 * LEASE)
    time.sleep(2 * LEASE)
    actor.log.write("releasing", use=use)
    client.release(lease)
    return True


def _async_client(actor: _Actor) -> None:
    """Coroutines of one `AsyncLockClient` acquire and release the lock in turns."""

    async def member(client: AsyncLockClient) -> None:
        done = False
        while not done:
            last = actor.is_calm
            done = await _async_turn(actor, client) and last
            await asyncio.sleep(actor.rng.uniform(0, 0.5))

    async def main() -> None:
        async with async_lock_client(actor.setup.endpoint_url, **actor.client_options) as client:
            await asyncio.gather(*(member(client) for _ in range(actor.role.members)))

    asyncio.run(main())


async def _async_turn(actor: _Actor, client: AsyncLockClient) -> bool:
    """Do the same as `_turn`, with the other client."""
    slots, timeout, seconds = actor.choose_turn()
    use = actor.log_request(slots)
    role = actor.role
    try:
        async with client.lock(role.key, timeout=timeout, slots=slots, capacity=role.capacity) as lease:
            actor.log_use("granted", use, lease)
            try:
                end = monotonic() + seconds
                while monotonic() < end:
                    lease.check()
                    await asyncio.sleep(_TICK)
            finally:
                actor.log.write("releasing", use=use)
    except LockError as failure:
        actor.log_failure(use, failure)
        return False
    actor.log.write("released", use=use)
    return True


# -- processes of a group, which do what the triggers and the guard do in Airflow ----------------------------


def _acquire(actor: _Actor) -> None:
    """Acquire the lock under the attempt's lease id, send heartbeats for a moment, and exit.

    Like `DynamoLockAcquireTrigger`, which sends heartbeats until Airflow has stored its result.
    """

    async def main() -> None:
        async with async_lock_client(actor.setup.endpoint_url, **actor.client_options) as client:
            role, use = actor.role, actor.log_request(1)
            group = role.name.partition("/")[0]
            try:
                lease = await client.acquire(
                    role.key, lease_id=role.lease_id, attempt_of=group, capacity=role.capacity
                )
                heartbeats = client.keep_alive(lease)
                try:
                    actor.log_use("granted", use, lease)
                    await asyncio.sleep(actor.rng.uniform(0, 0.5))
                    lease.check()
                finally:
                    heartbeats.cancel()
            except LockError as failure:
                actor.log_failure(use, failure)
            else:
                actor.log.write("handed_over", use=use)

    asyncio.run(main())


def _heartbeat(actor: _Actor) -> None:
    """Send heartbeats while no process is inside, until the lease is gone, like `DynamoLockHeartbeatTrigger`.

    This process itself does not count on the lease.
    """

    async def main() -> None:
        async with async_lock_client(actor.setup.endpoint_url, **actor.client_options) as client:
            lease = _lease(actor)
            heartbeats = asyncio.ensure_future(client.keep_for_processes(lease, interval=LEASE / 12))
            gone = asyncio.ensure_future(client.until_gone(lease))
            await asyncio.wait((heartbeats, gone), return_when=asyncio.FIRST_COMPLETED)
            for future in (heartbeats, gone):
                if future.done():
                    future.result()
                future.cancel()

    asyncio.run(main())


def _guarded(actor: _Actor) -> None:
    """Enter the lease, send heartbeats, work, and leave, like a task with its guard."""
    with lock_client("sync", actor.setup.endpoint_url, **actor.client_options) as client:
        lease, use = _lease(actor), f"{actor.setup.number}/inside"
        try:
            entered = client.enter(lease, use)
            interval = entered.lease_ms / 1000 / HEARTBEATS_PER_GRACE
            actor.log_use("entered", use, entered)
            with client.keep_alive(entered, interval=interval):
                _work(entered, actor.choose_work())
        except LockError as failure:
            actor.log_failure(use, failure)
        actor.log.write("leaving", use=use)
        try:
            client.leave(lease, use)
        except LockError as failure:
            actor.log_failure(use, failure)


def _release(actor: _Actor) -> None:
    """Release the lease, even with processes inside, like `DynamoLockReleaseTrigger`."""

    async def main() -> None:
        async with async_lock_client(actor.setup.endpoint_url, **actor.client_options) as client:
            lease = _lease(actor)
            try:
                outcome = await client.release(lease, retry_for=None)
            except LockError as failure:
                actor.log_failure("release", failure)
            else:
                actor.log.write("release_outcome", lease_id=lease.lease_id, outcome=type(outcome).__name__)

    asyncio.run(main())


def _lease(actor: _Actor) -> Lease:
    """Return the lease of the role, after the same conversion to JSON as in Airflow's database."""
    assert actor.role.lease
    return Lease.from_dict(json.loads(json.dumps(actor.role.lease)))


# -- people --------------------------------------------------------------------------------------------------


def _breaker(actor: _Actor) -> None:
    """Break a random lease every 5 to 20 s, until the last disaster is over."""
    with lock_client("sync", actor.setup.endpoint_url, **actor.client_options) as client:
        next_break = monotonic() + actor.rng.uniform(5, 20)
        while not actor.is_calm:
            time.sleep(_TICK)
            if monotonic() < next_break:
                continue
            next_break = monotonic() + actor.rng.uniform(5, 20)
            try:
                record = client.get(actor.rng.choice(sorted(CAPACITIES)))
                if record is not None and record.holders:
                    lease_id = actor.rng.choice(sorted(record.holders))
                    actor.log.write("breaking", lease_id=lease_id)
                    client.break_lock(record.key, lease_id)
                    actor.log.write("broken", lease_id=lease_id)
            except LockError as failure:
                actor.log_failure("break", failure)


_PROGRAMS: dict[str, Callable[[_Actor], None]] = {
    "client": _client,
    "async_client": _async_client,
    "acquire": _acquire,
    "heartbeat": _heartbeat,
    "guarded": _guarded,
    "release": _release,
    "breaker": _breaker,
}
