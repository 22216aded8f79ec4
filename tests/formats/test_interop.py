"""Our clients share locks with the real other libraries: one side's holder excludes the other side.

Each library runs in a process and an environment of its own, and creates its table. A dead holder is replaced.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest

from airflow_dynamo_lock import LockClient
from bench.adapters.worker import Settings
from bench.contestants import AWS_S3_LOCK, AWSFLOCK, DYNDBMUTEX, PYTHON_DYNAMODB_LOCK, Contestant, Worker
from deployments.clients import FOREIGN_TABLES, lock_client
from deployments.engines import DynamoDBLocal, Engine, MotoServer
from deployments.patience import PATIENCE

pytestmark = pytest.mark.proof

LIBRARIES = {
    "python-dynamodb-lock": PYTHON_DYNAMODB_LOCK,
    "dyndbmutex": DYNDBMUTEX,
    "awsflock": AWSFLOCK,
    "s3": AWS_S3_LOCK,
}
#: Clock skew to allow: all processes share a clock, but awsflock reads whole seconds.
SKEW = 1.0
LEASE = 3.0
POLL = 0.1
#: Duration of the contention in seconds.
SECONDS = 60.0
#: An engine on a busy machine may take seconds to answer. `tests/client/test_peers` tests libraries without answers.
SDK = {"read_timeout": 30}


class Both:
    """A table of another library, with processes of that library and clients of this package."""

    def __init__(self, format: str, engine: Engine) -> None:
        self.format, self.engine = format, engine
        self.contestant: Contestant = LIBRARIES[format]
        with self.foreign() as worker:
            worker.do("create_table")

    @property
    def races(self) -> bool:
        """Return whether the library overwrites a holder if it is slow between read and write: docs/formats.md."""
        return self.format == "s3"

    @contextmanager
    def keeping_dead_holders(self) -> Iterator[None]:
        """Turn off the deletion of expired items on DynamoDB Local, which deletes them every 10 s.

        An item of awsflock expires with its lease, so a dead holder may be gone before it is replaced.
        """
        deletes = self.format == "awsflock" and isinstance(self.engine, DynamoDBLocal)
        if deletes:
            self._delete_expired(False)
        try:
            yield
        finally:
            if deletes:
                self._delete_expired(True)

    def _delete_expired(self, enabled: bool) -> None:
        self.engine.client().update_time_to_live(
            TableName=FOREIGN_TABLES[self.format],
            TimeToLiveSpecification={"Enabled": enabled, "AttributeName": "expiration_time"},
        )

    def foreign(self, lease: float = LEASE) -> Worker:
        return self.contestant.worker(self.engine.endpoint_url, Settings(lease=lease, poll=POLL, sdk=SDK))

    def ours(self, **given: Any) -> Any:
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
        for name in LIBRARIES
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


def test_our_waiter_is_granted_the_lock_after_a_foreign_release(both: Both, key: str) -> None:
    with both.foreign(lease=60) as worker, both.ours() as client, ThreadPoolExecutor(1) as pool:
        worker.do("acquire", key=key)
        assert client.try_acquire(key) is None
        waiting = pool.submit(client.acquire, key, timeout=PATIENCE, poll_interval=POLL)
        released, _ = worker.do("release", key=key)
        lease = waiting.result()
        assert time.monotonic() > released
        assert not lease.took_over
        assert client.release(lease)
        worker.do("acquire", key=key)  # the other library can acquire the lock again
        worker.do("release", key=key)


def test_our_waiter_replaces_a_dead_foreign_holder(both: Both, key: str) -> None:
    with both.foreign() as worker, both.ours() as client, both.keeping_dead_holders():
        _, granted = worker.do("acquire", key=key)
        if both.format == "python-dynamodb-lock":
            assert client.try_acquire(key) is None
        worker.process.kill()
        if both.format == "dyndbmutex" and isinstance(both.engine, DynamoDBLocal):
            # Only server time, which this engine does not send, proves its death: a person must break it.
            record = client.get(key)
            client.break_lock(key, next(iter(record.holders)))
        lease = client.acquire(key, timeout=60, poll_interval=POLL)
        if both.format != "dyndbmutex":
            assert time.monotonic() - granted >= LEASE - 1, (
                "the lock is not reclaimed before the lease is over"
            )
            assert lease.took_over
        assert client.release(lease)


def test_a_foreign_waiter_is_granted_the_lock_after_our_release(both: Both, key: str) -> None:
    with both.foreign() as worker, both.ours() as client:
        lease = client.acquire(key)
        with client.keep_alive(lease):
            worker.send("acquire", key=key)
            time.sleep(LEASE + 2 * SKEW + 1)  # longer than the library waits for a dead holder
            lease.check()
            releasing = time.monotonic()
        assert client.release(lease)
        _, granted = worker.receive()
        assert granted > releasing
        assert client.try_acquire(key) is None
        worker.do("release", key=key)


def test_a_foreign_waiter_replaces_our_dead_holder(both: Both, key: str) -> None:
    with both.foreign() as worker, both.ours() as client:
        begun = time.monotonic()
        lease = client.acquire(key)
        worker.send("acquire", key=key)
        _, granted = worker.receive()
        assert granted - begun >= LEASE
        assert lease.remaining() == 0, "our lease had run out before"
        assert not client.release(lease)
        assert client.try_acquire(key) is None
        worker.do("release", key=key)


def test_never_two_holders(engines: dict[type[Engine], Engine], made: dict[Any, Both], key: str) -> None:
    """Two processes of the library and two threads of our client contend, in all formats at the same time."""
    sides = [
        made.setdefault(each.values[0], Both(each.values[0][0], engines[each.values[0][1]]))
        if each.values[0] not in made
        else made[each.values[0]]
        for each in _both()
    ]
    with ThreadPoolExecutor(100) as pool:
        for side, found in [(side, pool.submit(_contend, side, key)) for side in sides]:
            holds = sorted(found.result())
            name = f"{side.format}, {side.engine.name}"
            turns = {who: [each[2] for each in holds].count(who) for who in ("ours", "theirs")}
            print(name, turns)
            assert all(turns.values()), f"{name}: {turns}"
            if side.races:
                holds = [each for each in holds if each[2] == "ours"]
            for (_, ended, one), (began, _, other) in pairwise(holds):
                assert ended <= began, f"{name}: {one} and {other} held it together for {ended - began:.3f} s"


def _contend(side: Both, key: str) -> list[tuple[float, float, str]]:
    holds: list[tuple[float, float, str]] = []

    def use(client: LockClient) -> None:
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            lease = client.acquire(key, poll_interval=POLL, timeout=120)
            with client.keep_alive(lease):
                began = time.monotonic()
                time.sleep(0.02)
                lease.check()
                ended = time.monotonic()
            if client.release(lease):
                holds.append((began, ended, "ours"))
            else:
                assert side.races, "the lease was lost"
            time.sleep(0.05)  # the client that has just released would be the quickest

    # No hold outlasts this lease: aws_s3_lock and dyndbmutex have no heartbeats.
    with (
        side.foreign(60) as one,
        side.foreign(60) as other,
        side.ours(lease=60.0) as client,
        ThreadPoolExecutor(2) as pool,
    ):
        for worker in (one, other):
            # All these at once could delay the answers of the engines, also in tests that run at the same time.
            os.setpriority(os.PRIO_PROCESS, worker.process.pid, 10)
            worker.send("stays", key=key, seconds=SECONDS, hold=0.02)
        threads = [pool.submit(use, client) for _ in range(2)]
        for worker in (one, other):
            holds += [(began, ended, "theirs") for began, ended in worker.receive()]
        for each in threads:
            each.result()
    return holds
