"""Locks of other libraries are moved to our table, and at no moment could both sides hold one."""

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


@dataclass
class Side:
    place: Place
    locks: LockClient


#: `make test` moves the locks of two libraries: with the item kept (amazon-lock-client), and with it deleted.
IN_TEST = ("amazon-lock-client", "awsflock")
FORMATS = [
    pytest.param(name, marks=() if name in IN_TEST else pytest.mark.proof, id=name) for name in FOREIGN
]


@pytest.fixture(params=FORMATS)
def theirs(request: pytest.FixtureRequest, engine: Engine) -> Side:
    """The other library's table, and somebody who uses it."""
    place = make_place(request.param, engine)
    items.empty(place)  # a move begins all locks, also what other tests have left
    return Side(
        place, LockClient(place.sdk, table=place.table, table_format=place.format, owner="their program")
    )


def arguments(side: Side, *more: str) -> list[str]:
    return ["migrate", "--from-format", side.place.format, "--from-table", side.place.table, *more]


def lines(stream: IO[str] | None) -> SimpleQueue[str]:
    """What a process prints, as it comes."""
    confirmed: SimpleQueue[str] = SimpleQueue()
    assert stream is not None

    def hear() -> None:
        for line in stream:
            confirmed.put(line)

    Thread(target=hear, daemon=True).start()
    return confirmed


def test_a_free_lock_is_moved_and_back(shell: Shell, locks: LockClient, theirs: Side, key: str) -> None:
    moved = shell(*arguments(theirs), key)
    assert (moved.returncode, f"moved  {key}" in moved.stdout.splitlines()) == (0, True), moved.stderr
    assert theirs.locks.try_acquire(key) is None
    record = theirs.locks.get(key)
    assert record
    assert f"moved to {TABLE}" in record.describe()
    with locks.lock(key, timeout=0):
        again = shell(*arguments(theirs), key)
        assert (again.returncode, f"moved  {key}" in again.stdout.splitlines()) == (0, True), again.stderr
        refused = shell(*arguments(theirs), "--undo", "--wait-time", "0", key)
        assert refused.returncode == 3
        assert "somebody else" in refused.stderr
    back = shell(*arguments(theirs), "--undo", key)
    assert (back.returncode, f"back  {key}" in back.stdout.splitlines()) == (0, True), back.stderr
    assert locks.try_acquire(key) is None, "it is theirs now"
    assert theirs.locks.release(theirs.locks.acquire(key, timeout=0))
    assert shell(*arguments(theirs), key).returncode == 0
    assert locks.release(locks.acquire(key, timeout=0)), "and ours again"


def test_a_lock_that_they_hold_is_moved_when_it_is_free(
    shell: Shell, locks: LockClient, theirs: Side, key: str
) -> None:
    lease = theirs.locks.acquire(key)
    moving = shell.start(*arguments(theirs), key)
    said, complained = lines(moving.stdout), lines(moving.stderr)
    while key not in (waiting := complained.get(timeout=PATIENCE)):
        pass
    assert "their program" in waiting
    assert theirs.place.table in waiting
    assert locks.try_acquire(key) is None, "they hold it"
    while not said.empty():  # others' locks are moved meanwhile
        assert key not in said.get()
    assert theirs.locks.release(lease)
    while said.get(timeout=PATIENCE) != f"moved  {key}\n":
        pass
    assert moving.wait(PATIENCE) == 0
    assert theirs.locks.try_acquire(key) is None
    assert locks.release(locks.acquire(key, timeout=0))
    shell(*arguments(theirs), "--undo", key)


@pytest.mark.parametrize("theirs", [each for each in FORMATS if each.id != "s3"], indirect=True)
def test_never_do_both_sides_hold_it(shell: Shell, locks: LockClient, theirs: Side, key: str) -> None:
    """Each side takes it again and again, while it is moved."""
    stays: list[tuple[float, float, str]] = []
    ended = Event()

    def use(side: LockClient, name: str) -> None:
        while not ended.wait(0.01):
            if (lease := side.try_acquire(key, fair=False)) is not None:
                came = time.monotonic()
                time.sleep(0.02)
                stays.append((came, time.monotonic(), name))
                side.release(lease)

    # Ours wait until the move has begun, as the page says.
    first = theirs.locks.acquire(key)
    moving = shell.start(*arguments(theirs), key)
    complained = lines(moving.stderr)
    while key not in complained.get(timeout=PATIENCE):
        pass
    users = [Thread(target=use, args=each) for each in ((theirs.locks, "theirs"), (locks, "ours"))]
    for user in users:
        user.start()
    theirs.locks.release(first)
    try:
        assert moving.wait(PATIENCE) == 0
        wait_until(lambda: stays and stays[-1][2] == "ours", "it did not come to our side")
    finally:
        ended.set()
        for user in users:
            user.join()
    for (_, went, name), (came, _, next_name) in pairwise(sorted(stays)):
        assert went <= came, f"{name} and {next_name}"
    shell(*arguments(theirs), "--undo", key)


@pytest.mark.parametrize("theirs", ["amazon-lock-client"], indirect=True)
def test_the_data_come_along(shell: Shell, locks: LockClient, theirs: Side, key: str) -> None:
    items.put(theirs.place, key, items.released("amazon-lock-client"))
    assert shell(*arguments(theirs)).returncode == 0, "it is listed"
    record = locks.get(key)
    assert record
    assert record.data == {"data": b"their data"}


@pytest.mark.parametrize("theirs", ["awsflock"], indirect=True)
def test_two_moves_to_one_table_do_not_undo_each_other(
    shell: Shell, locks: LockClient, theirs: Side, engine: Engine, key: str
) -> None:
    lease = theirs.locks.acquire(key)
    assert shell(*arguments(theirs), "--wait-time", "0s", key).returncode == 3
    place = make_place("dyndbmutex", engine)
    items.empty(place)
    other = shell(*arguments(Side(place, locks)), "--wait-time", "0s", key)
    assert other.returncode == 3
    assert "awsflock: their program" in other.stderr, "ours is kept by the first move"
    assert locks.try_acquire(key) is None
    assert theirs.locks.release(lease)
    assert shell(*arguments(theirs), key).returncode == 0
    assert shell(*arguments(Side(place, locks)), key).returncode == 0
    assert locks.release(locks.acquire(key, timeout=0))


@pytest.mark.parametrize("theirs", ["awsflock"], indirect=True)
def test_what_was_begun_is_ended_though_nothing_is_left_of_theirs(
    shell: Shell, locks: LockClient, theirs: Side, key: str
) -> None:
    lease = theirs.locks.acquire(key)
    assert shell(*arguments(theirs), "--wait-time", "0s", key).returncode == 3
    assert theirs.locks.release(lease)
    assert locks.try_acquire(key) is None
    again = shell(*arguments(theirs))
    assert f"moved  {key}" in again.stdout.splitlines(), again.stderr
    assert locks.release(locks.acquire(key, timeout=0))


@pytest.mark.parametrize("theirs", ["awsflock"], indirect=True)
def test_what_is_wrong_is_said(shell: Shell, theirs: Side, key: str) -> None:
    assert (
        "does not exist" in shell("migrate", "--from-format", "awsflock", "--from-table", "none", key).stderr
    )
    wrong = shell(*arguments(theirs), "--format", "dyndbmutex", key)
    assert (wrong.returncode, "leave --format out" in wrong.stderr) == (2, True)
    items.put(theirs.place, key, items.held("awsflock"))
    late = shell(*arguments(theirs), "--wait-time", "0s", key)
    assert late.returncode == 3
    assert f"Not moved within 0 s: '{key}'" in late.stderr
    theirs.place.sdk.delete_item(TableName=theirs.place.table, Key=items.key_of("awsflock", key))
    shell(*arguments(theirs), "--undo", key)


@pytest.mark.parametrize("theirs", ["awsflock"], indirect=True)
def test_it_has_begun_when_nobody_here_has_any_of_them(
    shell: Shell, locks: LockClient, theirs: Side, key: str
) -> None:
    there, here = theirs.locks.acquire(key), locks.acquire(key)
    moving = shell.start(*arguments(theirs), key)
    said, complained = lines(moving.stdout), lines(moving.stderr)
    while key not in (first := complained.get(timeout=PATIENCE)):
        assert "begun" not in first
    assert "somebody else" in first, "ours is in the way"
    assert locks.release(here)
    while "begun" not in complained.get(timeout=PATIENCE):
        pass
    assert locks.try_acquire(key) is None, "they hold it"
    assert theirs.locks.release(there)
    while said.get(timeout=PATIENCE) != f"moved  {key}\n":
        pass
    assert moving.wait(PATIENCE) == 0
    shell(*arguments(theirs), "--undo", key)


@pytest.mark.parametrize("theirs", ["awsflock"], indirect=True)
def test_what_cannot_be_moved_is_named_and_stops_nothing(
    shell: Shell, locks: LockClient, theirs: Side, key: str
) -> None:
    damaged, semaphore, fine = f"{key}-1", f"{key}-2", f"{key}-3"
    items.put(theirs.place, damaged, items.damaged("awsflock"))
    locks.set_capacity(semaphore, 3)
    moved = shell(*arguments(theirs), semaphore, fine)
    assert moved.returncode == 1, moved.stderr
    assert f"moved  {fine}" in moved.stdout.splitlines()
    assert f"cannot move {semaphore}: " in moved.stderr
    assert f"'{damaged}'" in moved.stderr
    assert "2 locks could not be moved" in moved.stderr
    theirs.place.sdk.delete_item(TableName=theirs.place.table, Key=items.key_of("awsflock", damaged))
    shell(*arguments(theirs), "--undo", fine)


@pytest.mark.parametrize("theirs", ["awsflock"], indirect=True)
def test_what_was_moved_back_stays_there_when_others_are_moved(
    shell: Shell, locks: LockClient, theirs: Side, key: str
) -> None:
    other = f"{key}-other"
    assert shell(*arguments(theirs), key, other).returncode == 0
    back = shell(*arguments(theirs), "--undo", key)
    assert back.stdout.splitlines() == [f"back  {key}"], "and not the other"
    assert shell(*arguments(theirs), other).returncode == 0
    assert locks.try_acquire(key) is None
    assert theirs.locks.release(theirs.locks.acquire(key, timeout=0))
    assert shell(*arguments(theirs), key).returncode == 0, "unless it is named"
    assert locks.release(locks.acquire(key, timeout=0))
    shell(*arguments(theirs), "--undo", key, other)


@pytest.mark.parametrize("theirs", ["awsflock"], indirect=True)
def test_a_move_that_was_only_begun_can_be_undone(
    shell: Shell, locks: LockClient, theirs: Side, key: str
) -> None:
    lease = theirs.locks.acquire(key)
    assert shell(*arguments(theirs), "--wait-time", "0s", key).returncode == 3
    assert shell(*arguments(theirs), "--undo", "--wait-time", "0s", key).returncode == 3, "they hold it"
    assert theirs.locks.release(lease)
    assert shell(*arguments(theirs), "--undo", key).returncode == 0
    assert shell(*arguments(theirs)).returncode == 0, "it is not moved with the rest"
    assert locks.try_acquire(key) is None
    assert theirs.locks.release(theirs.locks.acquire(key, timeout=0))


@pytest.mark.parametrize("theirs", ["amazon-lock-client"], indirect=True)
def test_the_data_go_back_and_come_again(shell: Shell, locks: LockClient, theirs: Side, key: str) -> None:
    items.put(theirs.place, key, items.released("amazon-lock-client"))
    assert shell(*arguments(theirs), key).returncode == 0
    locks.release(locks.acquire(key, data={"data": b"newer"}))
    assert shell(*arguments(theirs), "--undo", key).returncode == 0
    record = theirs.locks.get(key)
    assert record
    assert record.data == {"data": b"newer"}
    theirs.locks.release(theirs.locks.acquire(key, data={}))
    assert shell(*arguments(theirs), key).returncode == 0
    record = locks.get(key)
    assert record
    assert record.data is None
    shell(*arguments(theirs), "--undo", key)


@pytest.mark.parametrize("theirs", ["s3"], indirect=True)
def test_only_what_has_the_prefix_is_moved(shell: Shell, locks: LockClient, theirs: Side, key: str) -> None:
    for name in (f"{key}/a", f"{key}x/b"):
        items.put(theirs.place, name, items.released("s3"))
    moved = shell(*arguments(theirs), "--from-prefix", f"{key}/")
    assert moved.stdout.splitlines() == [f"moved  {key}/a"]
    assert moved.returncode == 0, moved.stderr
    shell(*arguments(theirs), "--undo", f"{key}/a")
