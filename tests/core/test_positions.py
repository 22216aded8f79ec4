"""When the poller reports positions in queues, and that reports delay no poll."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from airflow_dynamo_lock.core.effects import Operation, WaitForSlots
from airflow_dynamo_lock.core.model.errors import LockUnavailableError
from airflow_dynamo_lock.core.model.record import LockRecord, QueuePosition, Waiter
from airflow_dynamo_lock.core.queue.view import QueueReader
from airflow_dynamo_lock.core.wait.poller import Poller, WaiterHandle
from tests.core.test_poller import Poll, a_poller, lock


class Queues:
    """The queues that the poller reads to report positions.

    :ivar read: keys of the locks whose queues were read, in order.
    :ivar owners: owners of the waiters of each lock, in order; a waiter's owner is also its position.
    """

    def __init__(self) -> None:
        self.read: list[str] = []
        self.owners: dict[str, list[str]] = {}

    def waiters(self, _: QueueReader, key: str) -> Operation[list[Waiter]]:
        self.read.append(key)
        yield from ()
        return [
            Waiter(key, each, each, each, 1, 1, 0, 0, None, "p", "", 0) for each in self.owners.get(key, ())
        ]


@pytest.fixture
def queues(monkeypatch: pytest.MonkeyPatch) -> Queues:
    """Replace the reads of queues by ones without requests."""
    found = Queues()
    monkeypatch.setattr(QueueReader, "waiters", lambda *arguments: found.waiters(*arguments))
    return found


def enqueue(
    poller: Poller,
    place: str,
    key: str = "k",
    on_position: Callable[[QueuePosition], None] = lambda position: None,
) -> WaiterHandle:
    waiter = WaiterHandle(
        WaitForSlots(key, 1, True, 1.0, None, place=place, on_position=on_position), lambda failure: None
    )
    poller.add(waiter)
    return waiter


def report_changes(poller: Poller, polls: int, *, tickets: int) -> None:
    for _ in range(polls):
        poller.positions.note("k", LockRecord("k", 1, 0, {}, token=1, last_ticket=tickets))
        while poller.positions:
            list(poller.positions.report(0.0))


def seconds_of_polls(poll: Poll, seconds: int, *keys: str) -> None:
    """Poll once a second while the locks do not change."""
    for _ in range(seconds):
        poll.now += 1.0
        poll.once([lock(key) for key in keys])


def test_a_queue_is_read_again_after_a_ticket_was_taken(queues: Queues) -> None:
    """The waiter writes its item after it took the ticket, and that write does not change the record."""
    poller = a_poller(lambda: 0.0)
    enqueue(poller, "0999/1/a")
    report_changes(poller, 4, tickets=1)
    assert len(queues.read) == 2

    report_changes(poller, 4, tickets=2)
    assert len(queues.read) == 4, "two more reads for the ticket of another process, and then none"


def test_a_waiter_that_is_queued_after_a_report_gets_a_report_too(queues: Queues) -> None:
    """The poller has seen its ticket in the record before, and the record does not change again."""
    poller = a_poller(lambda: 0.0)
    enqueue(poller, "0999/1/a")
    report_changes(poller, 3, tickets=2)
    queues.read.clear()

    enqueue(poller, "0999/2/b")
    report_changes(poller, 2, tickets=2)

    assert queues.read == ["k"]


def test_a_waiter_without_an_item_in_the_queue_gets_no_report(queues: Queues) -> None:
    poll = Poll()
    reported: list[QueuePosition] = []
    queues.owners["k"] = ["0999/1/a"]
    enqueue(poll.poller, "0999/2/b", on_position=reported.append)
    poll.once(lock())
    assert queues.read == ["k"]
    assert reported == []


def test_a_waiter_gets_a_report_within_seconds_after_one_ahead_of_it_left(queues: Queues) -> None:
    """Only the first waiter changes the lock's record when it leaves the queue."""
    poll, reported = Poll(), list[str]()
    queues.owners["k"] = ["one", "two", "me"]
    enqueue(poll.poller, "me", on_position=lambda position: reported.append(position.describe()))
    seconds_of_polls(poll, 5, "k")
    assert reported[-1] == "3rd of 3, behind two"

    queues.owners["k"] = ["one", "me"]
    seconds_of_polls(poll, 10, "k")

    assert reported[-1] == "2nd of 2, behind one"
    queues.read.clear()
    seconds_of_polls(poll, 60, "k")
    assert queues.read == ["k"] * 6, "one read every ten seconds"


def test_a_waiter_gets_a_report_at_the_next_poll_after_one_of_its_process_left(queues: Queues) -> None:
    poll, reported = Poll(), list[str]()
    queues.owners["k"] = ["one", "two", "me"]
    enqueue(poll.poller, "me", on_position=lambda position: reported.append(position.describe()))
    two = enqueue(poll.poller, "two")
    seconds_of_polls(poll, 5, "k")

    queues.owners["k"] = ["one", "me"]
    poll.poller.remove(two)
    seconds_of_polls(poll, 1, "k")

    assert reported[-1] == "2nd of 2, behind one"


def test_a_queue_is_not_read_again_while_no_waiter_is_ahead(queues: Queues) -> None:
    poll = Poll()
    queues.owners["k"] = ["me", "another"]
    enqueue(poll.poller, "me")
    seconds_of_polls(poll, 5, "k")
    queues.read.clear()

    seconds_of_polls(poll, 60, "k")

    assert queues.read == []


def test_nothing_is_remembered_of_a_queue_after_its_last_waiter_has_left(queues: Queues) -> None:
    poll = Poll()
    queues.owners["k"] = ["one", "me"]
    waiter = enqueue(poll.poller, "me")
    seconds_of_polls(poll, 1, "k")
    positions = poll.poller.positions
    assert positions._tickets
    assert positions._behind
    seconds_of_polls(poll, 1, "k")
    assert positions._reported
    poll.poller.remove(waiter)
    assert not any((positions, positions._asking, positions._reported, positions._tickets, positions._behind))


def test_a_waiter_that_is_queued_during_the_read_of_its_queue_gets_a_report(
    queues: Queues, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The read may be older than its item, and the record does not change again."""
    poll, reported = Poll(), list[QueuePosition]()
    queues.owners["k"] = ["one"]
    enqueue(poll.poller, "one")
    seconds_of_polls(poll, 1, "k")
    read = queues.waiters

    def waiters(reader: QueueReader, key: str) -> Operation[list[Waiter]]:
        found = yield from read(reader, key)
        if queues.owners["k"] == ["one"]:
            queues.owners["k"] = ["one", "me"]
            enqueue(poll.poller, "me", on_position=reported.append)
        return found

    monkeypatch.setattr(queues, "waiters", waiters)
    seconds_of_polls(poll, 2, "k")

    assert [each.number for each in reported] == [2]


def test_many_queues_are_read_in_turn_at_most_one_a_second(queues: Queues) -> None:
    poll, keys = Poll(), [f"key-{number}" for number in range(30)]
    for key in keys:
        queues.owners[key] = ["one", "me"]
        enqueue(poll.poller, "me", key)
    seconds_of_polls(poll, 5, *keys)
    queues.read.clear()

    seconds_of_polls(poll, 60, *keys)

    assert len(queues.read) <= 60
    assert {key: queues.read.count(key) for key in keys} == pytest.approx(dict.fromkeys(keys, 2), abs=1)


@pytest.mark.parametrize("seconds", [0.1, 0.4, 5.0])
def test_reports_of_many_queues_do_not_delay_the_polls(queues: Queues, seconds: float) -> None:
    """A free lock waits for a poll, and each report takes a while: two requests to DynamoDB, and the callback."""
    poll, keys = Poll(), [f"key-{number:02}" for number in range(20)]
    polled, reported = list[float](), list[str]()
    for key in keys:
        queues.owners[key] = ["one", "me"]

        def on_position(position: QueuePosition) -> None:
            reported.append(position.key)
            poll.now += seconds

        enqueue(poll.poller, "me", key, on_position)
    while len(reported) < 40:
        polled.append(poll.now)
        poll.once([lock(key, version=f"v{poll.now}") for key in keys])
        poll.now += poll.slept

    pauses = [later - earlier for earlier, later in pairwise(polled)]
    assert max(pauses) <= max(1.0, seconds) + seconds, "no more than one report longer than an interval"
    assert reported == [*keys, *keys], "each in its turn, and once more after the new ticket"


def test_a_change_that_the_stream_reports_waits_for_one_report_at_most(queues: Queues) -> None:
    poll, keys = Poll(), [f"key-{number:02}" for number in range(20)]
    reported = list[str]()

    def on_position(position: QueuePosition) -> None:
        reported.append(position.key)
        if len(reported) == 3:
            poll.poller.changed(["key-09"])

    for key in keys:
        queues.owners[key] = ["one", "me"]
        enqueue(poll.poller, "me", key, on_position)
    poll.poller.reported_until(0.0)
    poll.once([lock(key) for key in keys])

    assert reported == keys[:3]


def test_a_report_of_a_change_is_made_after_the_next_poll_if_the_queue_cannot_be_read(
    queues: Queues, monkeypatch: pytest.MonkeyPatch
) -> None:
    poll, reads = Poll(), list[float]()
    queues.owners["k"] = ["me"]
    enqueue(poll.poller, "me")
    read = queues.waiters

    def waiters(reader: QueueReader, key: str) -> Operation[list[Waiter]]:
        reads.append(poll.now)
        if poll.now in (2.0, 3.0):
            raise LockUnavailableError("throttled", maybe_applied=False)
        return (yield from read(reader, key))

    monkeypatch.setattr(queues, "waiters", waiters)
    seconds_of_polls(poll, 8, "k")

    assert reads == [1.0, 2.0, 3.0, 4.0, 5.0], "two reads that succeed, one after the other, and then none"


def test_a_queue_that_cannot_be_read_does_not_block_the_others(
    queues: Queues, monkeypatch: pytest.MonkeyPatch
) -> None:
    poll = Poll()
    for key in ("bad", "good"):
        queues.owners[key] = ["one", "me"]
        enqueue(poll.poller, "me", key)
    seconds_of_polls(poll, 5, "bad", "good")
    read = queues.waiters

    def waiters(reader: QueueReader, key: str) -> Operation[list[Waiter]]:
        if key == "bad":
            raise LockUnavailableError("throttled", maybe_applied=False)
        return (yield from read(reader, key))

    monkeypatch.setattr(queues, "waiters", waiters)
    queues.read.clear()
    seconds_of_polls(poll, 60, "bad", "good")

    assert queues.read.count("good") >= 5
