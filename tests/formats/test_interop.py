"""The real libraries beside ours, each in a process and an environment of its own, on the tables that they make: who
holds the lock on one side excludes the other, and whoever dies is replaced."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest

from airflow_dynamo_lock import LockClient
from bench.adapters.worker import Settings
from bench.contestants import AWS_S3_LOCK, AWSFLOCK, DYNDBMUTEX, PYTHON_DYNAMODB_LOCK, Contestant, Worker
from deployments.clients import FOREIGN_TABLES, lock_client
from deployments.engines import DynamoDBLocal, Engine, MotoServer

pytestmark = pytest.mark.proof

THEIRS = {
    "python-dynamodb-lock": PYTHON_DYNAMODB_LOCK,
    "dyndbmutex": DYNDBMUTEX,
    "awsflock": AWSFLOCK,
    "s3": AWS_S3_LOCK,
}
#: By how much a clock may be off here, where all share one: awsflock's has whole seconds.
SKEW = 1.0
LEASE = 3.0
POLL = 0.1
#: How long they contend.
SECONDS = 60.0
#: An engine on a busy machine may take seconds to answer; what theirs do without one is for `tests/client/test_peers`.
SDK = {"read_timeout": 30}


class Both:
    """A table of theirs, a process of theirs, and clients of ours."""

    def __init__(self, format: str, engine: Engine) -> None:
        self.format, self.engine = format, engine
        self.contestant: Contestant = THEIRS[format]
        with self.them() as worker:
            worker.do("create_table")

    @property
    def races(self) -> bool:
        """Whether their library overwrites a holder if it is slow between its read and its write: docs/formats.md."""
        return self.format == "s3"

    def them(self, lease: float = LEASE) -> Worker:
        return self.contestant.worker(self.engine.endpoint_url, Settings(lease=lease, poll=POLL, sdk=SDK))

    def us(self, **given: Any) -> Any:
        options: dict[str, Any] = {"lease": LEASE, "max_clock_skew": SKEW, "owner": "ours"} | given
        return lock_client(
            "sync",
            self.engine.endpoint_url,
            table=FOREIGN_TABLES[self.format],
            table_format=self.format,
            sdk=SDK,
            **options,
        )


def _both() -> list[Any]:
    return [
        pytest.param((name, engine), id=f"{name}-{engine.name}")
        for name in THEIRS
        for engine in (MotoServer, DynamoDBLocal)
        if (name, engine) != ("s3", DynamoDBLocal)
    ]


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[type[Engine], Engine]]:
    with MotoServer() as moto, DynamoDBLocal() as local:
        yield {MotoServer: moto, DynamoDBLocal: local}


@pytest.fixture(scope="module")
def made() -> dict[Any, Both]:
    return {}


@pytest.fixture(params=_both())
def both(request: pytest.FixtureRequest, engines: dict[type[Engine], Engine], made: dict[Any, Both]) -> Both:
    if request.param not in made:
        name, engine = request.param
        made[request.param] = Both(name, engines[engine])
    return made[request.param]


def test_they_hold_and_we_wait_and_they_release(both: Both, key: str) -> None:
    with both.them(lease=60) as them, both.us() as us, ThreadPoolExecutor(1) as pool:
        them.do("acquire", key=key)
        assert us.try_acquire(key) is None
        waiting = pool.submit(us.acquire, key, timeout=30, poll_interval=POLL)
        released, _ = them.do("release", key=key)
        lease = waiting.result()
        assert time.monotonic() > released
        assert not lease.took_over
        assert us.release(lease)
        them.do("acquire", key=key)  # and theirs again
        them.do("release", key=key)


def test_they_hold_and_die_and_we_take(both: Both, key: str) -> None:
    with both.them() as them, both.us() as us:
        _, granted = them.do("acquire", key=key)
        if both.format == "python-dynamodb-lock":
            assert us.try_acquire(key) is None
        them.process.kill()
        if both.format == "dyndbmutex" and isinstance(both.engine, DynamoDBLocal):
            # Nothing but a time that this engine does not tell says that it is dead: a person has to.
            record = us.get(key)
            us.break_lock(key, next(iter(record.holders)))
        lease = us.acquire(key, timeout=60, poll_interval=POLL)
        if both.format != "dyndbmutex":
            assert time.monotonic() - granted >= LEASE - 1, "not before its lease was over"
            assert lease.took_over
        assert us.release(lease)


def test_we_hold_and_they_wait_and_we_release(both: Both, key: str) -> None:
    with both.them() as them, both.us() as us:
        lease = us.acquire(key)
        with us.keep_alive(lease):
            them.tell("acquire", key=key)
            time.sleep(LEASE + 2 * SKEW + 1)  # longer than they would wait for a dead one
            lease.check()
            releasing = time.monotonic()
        assert us.release(lease)
        _, granted = them.hear()
        assert granted > releasing
        assert us.try_acquire(key) is None
        them.do("release", key=key)


def test_we_hold_and_die_and_they_take(both: Both, key: str) -> None:
    with both.them() as them, both.us() as us:
        begun = time.monotonic()
        lease = us.acquire(key)
        them.tell("acquire", key=key)
        _, granted = them.hear()
        assert granted - begun >= LEASE
        assert lease.remaining() == 0, "ours had given up before"
        assert not us.release(lease)
        assert us.try_acquire(key) is None
        them.do("release", key=key)


def test_never_two_holders(engines: dict[type[Engine], Engine], made: dict[Any, Both], key: str) -> None:
    """Two processes of theirs and two threads of ours, in all formats at the same time."""
    sides = [
        made.setdefault(each.values[0], Both(each.values[0][0], engines[each.values[0][1]]))
        if each.values[0] not in made
        else made[each.values[0]]
        for each in _both()
    ]
    with ThreadPoolExecutor(100) as pool:
        for side, found in [(side, pool.submit(_contend, side, key)) for side in sides]:
            stays = sorted(found.result())
            name = f"{side.format}, {side.engine.name}"
            turns = {who: [each[2] for each in stays].count(who) for who in ("ours", "theirs")}
            print(name, turns)
            assert all(turns.values()), f"{name}: {turns}"
            if side.races:
                stays = [each for each in stays if each[2] == "ours"]
            for (_, went, one), (came, _, other) in pairwise(stays):
                assert went <= came, f"{name}: {one} and {other} held it together for {went - came:.3f} s"


def _contend(side: Both, key: str) -> list[tuple[float, float, str]]:
    stays: list[tuple[float, float, str]] = []

    def we(us: LockClient) -> None:
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            lease = us.acquire(key, poll_interval=POLL, timeout=120)
            with us.keep_alive(lease):
                came = time.monotonic()
                time.sleep(0.02)
                lease.check()
                went = time.monotonic()
            if us.release(lease):
                stays.append((came, went, "ours"))
            else:
                assert side.races, "the lease was lost"
            time.sleep(0.05)  # whoever has just released it is the quickest

    # A lease that nobody outlives: aws_s3_lock and dyndbmutex have no heartbeats.
    with (
        side.them(60) as one,
        side.them(60) as other,
        side.us(lease=60.0) as us,
        ThreadPoolExecutor(2) as pool,
    ):
        for them in (one, other):
            # So many at once could keep the engines from answering in time, here and in the tests beside it.
            os.setpriority(os.PRIO_PROCESS, them.process.pid, 10)
            them.tell("stays", key=key, seconds=SECONDS, hold=0.02)
        ours = [pool.submit(we, us) for _ in range(2)]
        for them in (one, other):
            stays += [(came, went, "theirs") for came, went in them.hear()]
        for each in ours:
            each.result()
    return stays
