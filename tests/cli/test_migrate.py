"""``dynamo-lock migrate`` moves foreign locks to the native table, and both sides never hold a lock at once."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from queue import SimpleQueue
from threading import Event, Thread
from typing import IO

import pytest

from airflow_dynamo_lock import LockClient
from deployments.engines import Engine
from deployments.patience import PATIENCE, wait_until
from tests.cli.conftest import TABLE, Shell
from tests.formats import items
from tests.formats.conftest import FOREIGN, Place, make_place
from tests.suites import some_in_proof


@dataclass
class Side:
    place: Place
    locks: LockClient


#: `make test` moves the locks of two libraries: with the item kept (amazon-lock-client), and with it deleted.
IN_TEST = ("amazon-lock-client", "awsflock")
FORMATS = some_in_proof(FOREIGN, *IN_TEST)


@pytest.fixture(params=FORMATS)
def foreign(request: pytest.FixtureRequest, engine: Engine) -> Side:
    """The table of another library, and a client that uses it."""
    place = make_place(request.param, engine)
    items.empty(place)  # a move includes all locks, also those that other tests have left
    return Side(
        place, LockClient(place.sdk, table=place.table, table_format=place.format, owner="their program")
    )


def arguments(side: Side, *more: str) -> list[str]:
    return ["migrate", "--from-format", side.place.format, "--from-table", side.place.table, *more]


def lines(stream: IO[str] | None) -> SimpleQueue[str]:
    """Return a queue to which a thread adds the lines that a process prints."""
    found: SimpleQueue[str] = SimpleQueue()
    assert stream is not None

    def read() -> None:
        for line in stream:
            found.put(line)

    Thread(target=read, daemon=True).start()
    return found


def test_a_free_lock_is_moved_and_back(shell: Shell, locks: LockClient, foreign: Side, key: str) -> None:
    moved = shell(*arguments(foreign), key)
    assert (moved.returncode, f"moved  {key}" in moved.stdout.splitlines()) == (0, True), moved.stderr
    assert foreign.locks.try_acquire(key) is None
    record = foreign.locks.get(key)
    assert record
    assert f"moved to {TABLE}" in record.describe()
    with locks.lock(key, timeout=0):
        again = shell(*arguments(foreign), key)
        assert (again.returncode, f"moved  {key}" in again.stdout.splitlines()) == (0, True), again.stderr
        refused = shell(*arguments(foreign), "--undo", "--wait-time", "0", key)
        assert refused.returncode == 3
        assert "somebody else" in refused.stderr
    back = shell(*arguments(foreign), "--undo", key)
    assert (back.returncode, f"back  {key}" in back.stdout.splitlines()) == (0, True), back.stderr
    assert locks.try_acquire(key) is None, "the lock is in the foreign table now"
    assert foreign.locks.release(foreign.locks.acquire(key, timeout=0))
    assert shell(*arguments(foreign), key).returncode == 0
    assert locks.release(locks.acquire(key, timeout=0)), "the lock is in the native table again"


def test_a_held_lock_is_moved_when_it_is_released(
    shell: Shell, locks: LockClient, foreign: Side, key: str
) -> None:
    lease = foreign.locks.acquire(key)
    moving = shell.start(*arguments(foreign), key)
    out, err = lines(moving.stdout), lines(moving.stderr)
    while key not in (waiting := err.get(timeout=PATIENCE)):
        pass
    assert "their program" in waiting
    assert foreign.place.table in waiting
    assert locks.try_acquire(key) is None, "the other library holds the lock"
    while not out.empty():  # other locks are moved meanwhile
        assert key not in out.get()
    assert foreign.locks.release(lease)
    while out.get(timeout=PATIENCE) != f"moved  {key}\n":
        pass
    assert moving.wait(PATIENCE) == 0
    assert foreign.locks.try_acquire(key) is None
    assert locks.release(locks.acquire(key, timeout=0))
    shell(*arguments(foreign), "--undo", key)


@pytest.mark.parametrize(
    "foreign", some_in_proof([each for each in FOREIGN if each != "s3"], *IN_TEST), indirect=True
)
def test_both_sides_never_hold_the_lock(shell: Shell, locks: LockClient, foreign: Side, key: str) -> None:
    """Each side acquires the lock again and again while it is moved."""
    holds: list[tuple[float, float, str]] = []
    ended = Event()

    def use(side: LockClient, name: str) -> None:
        while not ended.wait(0.01):
            if (lease := side.try_acquire(key, fair=False)) is not None:
                began = time.monotonic()
                time.sleep(0.02)
                holds.append((began, time.monotonic(), name))
                side.release(lease)

    # Native clients wait until the move has begun, as docs/coming-from.md requires.
    first = foreign.locks.acquire(key)
    moving = shell.start(*arguments(foreign), key)
    err = lines(moving.stderr)
    while key not in err.get(timeout=PATIENCE):
        pass
    users = [Thread(target=use, args=each) for each in ((foreign.locks, "foreign"), (locks, "native"))]
    for user in users:
        user.start()
    foreign.locks.release(first)
    try:
        assert moving.wait(PATIENCE) == 0
        wait_until(lambda: holds and holds[-1][2] == "native", "no native client acquired the lock")
    finally:
        ended.set()
        for user in users:
            user.join()
    for (_, ended_at, name), (began, _, next_name) in pairwise(sorted(holds)):
        assert ended_at <= began, f"{name} and {next_name}"
    shell(*arguments(foreign), "--undo", key)


@pytest.mark.parametrize("foreign", ["amazon-lock-client"], indirect=True)
def test_data_are_moved_with_the_lock(shell: Shell, locks: LockClient, foreign: Side, key: str) -> None:
    items.put(foreign.place, key, items.released("amazon-lock-client"))
    assert shell(*arguments(foreign)).returncode == 0, "all locks are moved, this one too"
    record = locks.get(key)
    assert record
    assert record.data == {"data": b"their data"}


@pytest.mark.parametrize("foreign", ["awsflock"], indirect=True)
def test_two_moves_to_one_table_do_not_undo_each_other(
    shell: Shell, locks: LockClient, foreign: Side, engine: Engine, key: str
) -> None:
    lease = foreign.locks.acquire(key)
    assert shell(*arguments(foreign), "--wait-time", "0s", key).returncode == 3
    place = make_place("dyndbmutex", engine)
    items.empty(place)
    other = shell(*arguments(Side(place, locks)), "--wait-time", "0s", key)
    assert other.returncode == 3
    assert "awsflock: their program" in other.stderr, "the first move holds the native lock"
    assert locks.try_acquire(key) is None
    assert foreign.locks.release(lease)
    assert shell(*arguments(foreign), key).returncode == 0
    assert shell(*arguments(Side(place, locks)), key).returncode == 0
    assert locks.release(locks.acquire(key, timeout=0))


@pytest.mark.parametrize("foreign", ["awsflock"], indirect=True)
def test_a_move_is_finished_although_the_foreign_item_is_gone(
    shell: Shell, locks: LockClient, foreign: Side, key: str
) -> None:
    lease = foreign.locks.acquire(key)
    assert shell(*arguments(foreign), "--wait-time", "0s", key).returncode == 3
    assert foreign.locks.release(lease)
    assert locks.try_acquire(key) is None
    again = shell(*arguments(foreign))
    assert f"moved  {key}" in again.stdout.splitlines(), again.stderr
    assert locks.release(locks.acquire(key, timeout=0))


@pytest.mark.parametrize("foreign", ["awsflock"], indirect=True)
def test_errors_are_reported(shell: Shell, foreign: Side, key: str) -> None:
    missing = shell("migrate", "--from-format", "awsflock", "--from-table", "none", key)
    assert (missing.returncode, "does not exist" in missing.stderr) == (1, True)
    wrong = shell(*arguments(foreign), "--format", "dyndbmutex", key)
    assert (wrong.returncode, "leave --format out" in wrong.stderr) == (2, True)
    items.put(foreign.place, key, items.held("awsflock"))
    late = shell(*arguments(foreign), "--wait-time", "0s", key)
    assert late.returncode == 3
    assert f"Not moved within 0 s: '{key}'" in late.stderr
    foreign.place.sdk.delete_item(TableName=foreign.place.table, Key=items.key_of("awsflock", key))
    shell(*arguments(foreign), "--undo", key)


@pytest.mark.parametrize("foreign", ["awsflock"], indirect=True)
def test_a_move_has_begun_when_no_native_lock_is_held(
    shell: Shell, locks: LockClient, foreign: Side, key: str
) -> None:
    foreign_lease, native_lease = foreign.locks.acquire(key), locks.acquire(key)
    moving = shell.start(*arguments(foreign), key)
    out, err = lines(moving.stdout), lines(moving.stderr)
    while key not in (first := err.get(timeout=PATIENCE)):
        assert "begun" not in first
    assert "somebody else" in first, "a native holder delays the move"
    assert locks.release(native_lease)
    while "begun" not in err.get(timeout=PATIENCE):
        pass
    assert locks.try_acquire(key) is None, "the other library holds the lock"
    assert foreign.locks.release(foreign_lease)
    while out.get(timeout=PATIENCE) != f"moved  {key}\n":
        pass
    assert moving.wait(PATIENCE) == 0
    shell(*arguments(foreign), "--undo", key)


@pytest.mark.parametrize("foreign", ["awsflock"], indirect=True)
def test_locks_that_cannot_be_moved_are_named_and_others_moved(
    shell: Shell, locks: LockClient, foreign: Side, key: str
) -> None:
    damaged, semaphore, fine = f"{key}-1", f"{key}-2", f"{key}-3"
    items.put(foreign.place, damaged, items.damaged("awsflock"))
    locks.set_capacity(semaphore, 3)
    moved = shell(*arguments(foreign), semaphore, fine)
    assert moved.returncode == 1, moved.stderr
    assert f"moved  {fine}" in moved.stdout.splitlines()
    assert f"cannot move {semaphore}: " in moved.stderr
    assert f"'{damaged}'" in moved.stderr
    assert "2 locks could not be moved" in moved.stderr
    foreign.place.sdk.delete_item(TableName=foreign.place.table, Key=items.key_of("awsflock", damaged))
    shell(*arguments(foreign), "--undo", fine)


@pytest.mark.parametrize("foreign", ["awsflock"], indirect=True)
def test_a_lock_that_was_moved_back_is_moved_again_only_by_name(
    shell: Shell, locks: LockClient, foreign: Side, key: str
) -> None:
    other = f"{key}-other"
    assert shell(*arguments(foreign), key, other).returncode == 0
    back = shell(*arguments(foreign), "--undo", key)
    assert back.stdout.splitlines() == [f"back  {key}"], "the other lock is not moved back"
    assert shell(*arguments(foreign), other).returncode == 0
    assert locks.try_acquire(key) is None
    assert foreign.locks.release(foreign.locks.acquire(key, timeout=0))
    assert shell(*arguments(foreign), key).returncode == 0, "a named lock is moved"
    assert locks.release(locks.acquire(key, timeout=0))
    shell(*arguments(foreign), "--undo", key, other)


@pytest.mark.parametrize("foreign", ["awsflock"], indirect=True)
def test_an_unfinished_move_can_be_undone(shell: Shell, locks: LockClient, foreign: Side, key: str) -> None:
    lease = foreign.locks.acquire(key)
    assert shell(*arguments(foreign), "--wait-time", "0s", key).returncode == 3
    assert shell(*arguments(foreign), "--undo", "--wait-time", "0s", key).returncode == 3, (
        "the other library holds the lock"
    )
    assert foreign.locks.release(lease)
    assert shell(*arguments(foreign), "--undo", key).returncode == 0
    assert shell(*arguments(foreign)).returncode == 0, "the lock is not moved with the others"
    assert locks.try_acquire(key) is None
    assert foreign.locks.release(foreign.locks.acquire(key, timeout=0))


@pytest.mark.parametrize("foreign", ["amazon-lock-client"], indirect=True)
def test_data_are_moved_back_and_forth(shell: Shell, locks: LockClient, foreign: Side, key: str) -> None:
    items.put(foreign.place, key, items.released("amazon-lock-client"))
    assert shell(*arguments(foreign), key).returncode == 0
    locks.release(locks.acquire(key, data={"data": b"newer"}))
    assert shell(*arguments(foreign), "--undo", key).returncode == 0
    record = foreign.locks.get(key)
    assert record
    assert record.data == {"data": b"newer"}
    foreign.locks.release(foreign.locks.acquire(key, data={}))
    assert shell(*arguments(foreign), key).returncode == 0
    record = locks.get(key)
    assert record
    assert record.data is None
    shell(*arguments(foreign), "--undo", key)


@pytest.mark.parametrize("foreign", ["s3"], indirect=True)
def test_only_locks_with_the_prefix_are_moved(
    shell: Shell, locks: LockClient, foreign: Side, key: str
) -> None:
    for name in (f"{key}/a", f"{key}x/b"):
        items.put(foreign.place, name, items.released("s3"))
    moved = shell(*arguments(foreign), "--from-prefix", f"{key}/")
    assert moved.stdout.splitlines() == [f"moved  {key}/a"]
    assert moved.returncode == 0, moved.stderr
    shell(*arguments(foreign), "--undo", f"{key}/a")
