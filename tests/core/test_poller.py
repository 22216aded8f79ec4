"""Many waiters, one poller (rule R11): what it reads, whom it wakes, in which order, and what it does with errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from airflow_dynamo_lock.core.effects import Callback, Operation, Reply, Request, Sleep, Stamp, WaitForSlots
from airflow_dynamo_lock.core.liveness import Observer
from airflow_dynamo_lock.core.model.errors import LockAccessError, LockUnavailableError
from airflow_dynamo_lock.core.model.record import LockRecord, QueuePosition, Waiter
from airflow_dynamo_lock.core.queue.queue import WaitQueue
from airflow_dynamo_lock.core.queue.view import QueueReader
from airflow_dynamo_lock.core.table.codec import encode
from airflow_dynamo_lock.core.table.native import NativeFormat
from airflow_dynamo_lock.core.table.position import head_after, place_of
from airflow_dynamo_lock.core.wait.poller import EndListener, Poller, WaiterHandle, _may_be_next, _pause

TABLE = "locks"


def a_watch(now: Callable[[], float], versions: Callable[[], str] = lambda: "") -> Poller:
    """A watch on a table, whose pauses nothing stretches: the jitter of a stamp without a version is 0."""
    form, observer = NativeFormat(TABLE), Observer()
    return Poller(
        form, observer, WaitQueue.of(form, lambda: Stamp(versions(), None, 0, now()), observer).reader
    )


class Poll:
    """A watch whose poller is driven by hand.

    :ivar told: who was woken, in order; with the error where there was one, and whether it is certain that the
        lease is gone.
    :ivar slept: how long the poller sleeps after the last poll.
    """

    def __init__(self, versions: Callable[[], str] = lambda: "") -> None:
        self.watch = a_watch(lambda: self.now, versions)
        self.now = 0.0
        self.told: list[Any] = []
        self.slept = 0.0
        self._poller: Any = None

    def wait(
        self,
        who: str,
        key: str = "k",
        *,
        slots: int = 1,
        takes: bool = True,
        poll_interval: float = 1.0,
        place: str | None = None,
        capacity: int | None = None,
        lease_id: str | None = None,
    ) -> WaiterHandle:
        def wake(failure: Exception | None) -> None:
            self.told.append(who if failure is None else (who, failure))

        wants = WaitForSlots(key, slots, takes, poll_interval, None, capacity, place, lease_id)
        ticket = WaiterHandle(wants, wake)
        self.watch.add(ticket)
        return ticket

    def look(self, who: str, lease_id: str, key: str = "k", *, poll_interval: float = 1.0) -> EndListener:
        sight = EndListener(key, lease_id, poll_interval, lambda certain: self.told.append((who, certain)))
        self.watch.add(sight)
        return sight

    def sleep(self) -> float:
        """Start the poller, or let it go on after its last request, and say for how long it sleeps next."""
        if self._poller is None:
            self._poller = self.watch.poll()
        effect = next(self._poller)
        assert isinstance(effect, Sleep)
        return effect.seconds

    def once(self, *answers: Any) -> list[Request]:
        """One poll after its sleep: the requests, each answered by the next of `answers` (an item, a list of items, a
        whole output, or an exception)."""
        if self._poller is None:
            self.sleep()
        requests = []
        effect = self._poller.send(self.now)
        for answer in answers:
            assert isinstance(effect, Request)
            requests.append(effect)
            if isinstance(answer, Exception):
                effect = self._poller.throw(answer)
            else:
                effect = self._poller.send(Reply(_output(answer), self.now, self.now))
            while isinstance(effect, Callback):
                effect.call()
                effect = self._poller.send(None)
        assert isinstance(effect, Sleep), "the poll asks for more than was answered"
        self.slept = effect.seconds
        return requests


def _output(answer: Any) -> Mapping[str, Any]:
    if isinstance(answer, Mapping) and "Responses" in answer:
        return answer
    items = answer if isinstance(answer, list) else [answer]
    return {"Responses": {TABLE: items}, "UnprocessedKeys": {}}


def lock(
    key: str = "k",
    *,
    held: int = 1,
    capacity: int = 1,
    lease_id: str = "a",
    version: str = "v1",
    draining: bool = False,
) -> dict[str, Any]:
    """The item of a lock, of which one holder has `held` slots."""
    holder = {
        "owner": "me",
        "slots": held,
        "lease_ms": 30_000,
        "version": version,
        "acquired_at": 0,
        "processes": {},
        **({"draining": True} if draining else {}),
    }
    values = {
        "key": key,
        "entry": "lock",
        "capacity": capacity,
        "available": capacity - held,
        "holders": {lease_id: holder} if held else {},
        "token": 1,
    }
    return {name: encode(value) for name, value in values.items()}


# -- whom it wakes, and how often it reads --------------------------------------------------------------------------


FIRST, THIRD, SIXTH = (place_of(0, number, "x") for number in (1, 3, 6))


def a_queue(head: str | None, available: int = 0) -> LockRecord:
    return LockRecord("k", 8, available, {}, token=1, queue_head=head)


@pytest.mark.parametrize(
    ("place", "head", "free", "may_be_next"),
    [
        (THIRD, None, 1, True),  # no queue
        (FIRST, FIRST, 1, True),
        (THIRD, FIRST, 2, False),  # two tickets before it, and one slot left behind them
        (THIRD, FIRST, 3, True),
        (place_of(1, 9, "x"), FIRST, 1, True),  # more urgent than the head
        (place_of(-1, 1, "x"), FIRST, 8, False),  # less urgent
    ],
)
def test_a_waiter_may_be_next_if_there_is_room_for_all_before_it(
    place: str, head: str | None, free: int, may_be_next: bool
) -> None:
    assert _may_be_next(place, 1, a_queue(head), free) is may_be_next


@pytest.mark.parametrize(
    ("places", "head", "free", "polls"),
    [
        ([SIXTH], FIRST, 0, 2),
        ([SIXTH], head_after(FIRST), 0, 2),
        ([SIXTH], THIRD, 0, 1),  # near the head
        ([SIXTH, THIRD], FIRST, 0, 1),
        ([SIXTH], FIRST, 1, 1),  # something is free
        ([SIXTH], None, 0, 1),
        ([SIXTH, None], FIRST, 0, 1),  # one is not in the queue
        ([], FIRST, 0, 1),
    ],
)
def test_a_lock_is_read_in_each_poll_unless_all_who_wait_for_it_here_are_far_from_the_head(
    places: list[str | None], head: str | None, free: int, polls: int
) -> None:
    tickets = [
        WaiterHandle(WaitForSlots("k", 1, True, 1.0, None, place=each), lambda failure: None)
        for each in places
    ]
    assert _pause(a_queue(head), tickets, free) == polls


def test_those_behind_leave_what_is_free_to_the_first_for_two_seconds() -> None:
    poll = Poll()
    poll.wait("third", place=THIRD)
    free = {**lock(held=1, capacity=2), "queue_head": encode(FIRST)}
    told_at = []
    for _ in range(20):
        poll.told.clear()
        poll.once(free)
        if poll.told:
            told_at.append(poll.now)
        poll.now += poll.slept
    assert told_at == [2.0, 4.0]


def test_those_behind_leave_what_is_free_to_the_first_for_longer_after_each_grant() -> None:
    poll = Poll()
    poll.wait("third", place=THIRD)
    for token in range(20):
        poll.once({**lock(held=1, capacity=2), "queue_head": encode(FIRST), "token": encode(token // 6)})
        poll.now += poll.slept
    assert poll.told == []


def test_a_ticket_is_for_one_place_in_one_queue() -> None:
    wants = WaitForSlots("k", 1, True, 1.0, None, place=FIRST)
    ticket = WaiterHandle(wants, lambda failure: None)
    assert ticket.is_for(WaitForSlots("k", 2, True, 5.0, None, place=FIRST))
    assert not ticket.is_for(WaitForSlots("k", 1, True, 1.0, None, place=THIRD))
    assert not ticket.is_for(WaitForSlots("other", 1, True, 1.0, None, place=FIRST))


def test_no_more_waiters_of_a_semaphore_are_woken_than_it_has_slots_left() -> None:
    poll = Poll()
    for number in range(5):
        poll.wait(f"waiter {number}", capacity=3)
    poll.once(lock(held=1, capacity=3))
    assert poll.told == ["waiter 0", "waiter 1"]


def test_one_waiter_is_woken_for_an_idle_lock_that_is_to_have_another_capacity() -> None:
    poll = Poll()
    poll.wait("one", capacity=5)
    poll.wait("two", capacity=5)
    poll.once(lock(held=0))
    assert poll.told == ["one"]


def test_one_who_only_watches_is_not_woken_while_the_lock_is_in_use_with_another_capacity() -> None:
    poll = Poll()
    poll.wait("one", capacity=5, takes=False)
    poll.once(lock(held=1, capacity=3))
    assert poll.told == []


def test_who_wants_two_slots_of_a_plain_lock_is_woken_to_be_told_so() -> None:
    poll = Poll()
    poll.wait("one", slots=2)
    poll.once(lock(held=0))
    assert poll.told == ["one"]


def test_the_first_in_the_queue_is_not_woken_while_the_lock_is_held() -> None:
    poll = Poll()
    poll.wait("first", place=FIRST)
    poll.once({**lock(), "queue_head": encode(FIRST)})
    assert poll.told == []


def test_a_waiter_that_was_removed_is_woken_although_the_lock_is_taken() -> None:
    poll = Poll()
    poll.wait("first", place=FIRST, lease_id="one")
    poll.wait("third", place=THIRD, lease_id="three")
    poll.once({**lock(), "queue_head": encode(FIRST), "removed:three": encode({"at": 1})})
    assert poll.told == ["third"]


def test_with_a_stream_what_is_free_is_read_again_at_the_next_interval_until_it_is_gone() -> None:
    """That nobody takes it changes nothing that the stream could tell."""
    poll = Poll()
    poll.wait("one")
    poll.now = 10.0
    poll.watch.reported_until(10.0)
    poll.once(lock(held=0))
    assert poll.watch._due == {"k": 11.0}
    poll.now = 11.0
    poll.watch.reported_until(11.0)
    poll.once([])
    assert poll.watch._due == {}
    assert poll.slept > 0


def test_what_was_free_before_the_stream_reported_changes_is_read_again_after_an_interval() -> None:
    poll = Poll()
    poll.wait("one")
    poll.now = 10.0
    poll.once(lock(held=0))  # without a stream
    poll.watch.reported_until(10.5)
    poll.now = 11.0
    poll.watch.reported_until(11.0)
    assert keys_of(poll.once(lock(held=0))) == ["k"]


def test_it_polls_more_often_than_once_a_second_if_a_waiter_asks_for_that() -> None:
    poll = Poll()
    poll.wait("one", poll_interval=0.25)
    assert poll.sleep() == 0.25


def test_what_is_known_of_a_lock_is_forgotten_with_its_last_waiter() -> None:
    poll = Poll()
    one, two = poll.wait("one"), poll.wait("two")
    poll.once(lock())
    watch = poll.watch
    watch.remove(one)
    assert "k" in watch._rounds
    watch.remove(two)
    assert not any((watch._rounds, watch._pause, watch._tickets, watch._behind))


def keys_of(requests: list[Request]) -> list[str]:
    return [key["key"]["S"] for each in requests for key in each.params["RequestItems"][TABLE]["Keys"]]


def queued(key: str, head: str) -> dict[str, Any]:
    return {**lock(key), "queue_head": encode(head)}


def test_a_lock_whose_first_waiter_is_here_is_read_four_times_in_an_interval() -> None:
    poll = Poll()
    poll.wait("first", "one", place=FIRST)
    poll.wait("second", "two", place=THIRD)
    answer = [queued("one", FIRST), queued("two", FIRST)]

    assert keys_of(poll.once(answer)) == ["one", "two"]
    for _ in range(2):
        for _ in range(3):
            assert poll.slept == 0.25
            assert keys_of(poll.once(queued("one", FIRST))) == ["one"]
        assert poll.slept == 0.25
        assert keys_of(poll.once(answer)) == ["one", "two"]


def test_the_first_waiter_is_woken_by_such_a_read() -> None:
    poll = Poll()
    poll.wait("first", place=FIRST)
    poll.once(queued("k", FIRST))
    poll.once({**lock(held=0), "queue_head": encode(FIRST)})
    assert poll.told == ["first"]


def test_a_lock_is_read_once_in_an_interval_again_when_the_first_waiter_here_has_left() -> None:
    poll = Poll()
    first = poll.wait("first", "one", place=FIRST)
    poll.wait("second", "two", place=THIRD)
    poll.once([queued("one", FIRST), queued("two", FIRST)])
    poll.watch.remove(first)
    assert keys_of(poll.once(queued("two", FIRST))) == ["two"]
    assert poll.slept == 1.0


def test_no_more_locks_than_25_are_read_so_often() -> None:
    poll = Poll()
    names = [f"k{number:02}" for number in range(26)]
    waiters = [poll.wait(name, name, place=FIRST) for name in names]
    poll.once([queued(name, FIRST) for name in names])
    assert poll.slept == 1.0
    poll.watch.remove(waiters[0])
    poll.once([queued(name, FIRST) for name in names[1:]])
    assert poll.slept == 0.25


def test_a_waiter_with_a_short_interval_or_a_stream_does_not_read_more_often() -> None:
    poll = Poll()
    poll.wait("first", place=FIRST, poll_interval=0.9)
    poll.once(queued("k", FIRST))
    assert poll.slept == 0.9
    poll = Poll()
    poll.wait("first", place=FIRST)
    poll.watch.reported_until(0.0)
    poll.once(queued("k", FIRST))
    assert poll.slept == 1.0


def test_a_lock_whose_free_slots_are_not_taken_is_read_four_times_in_an_interval() -> None:
    poll = Poll()
    third = poll.wait("third", place=THIRD)
    free = {**lock(held=1, capacity=2), "queue_head": encode(FIRST)}
    poll.once(free)
    assert poll.slept == 0.25
    poll.once({**lock(held=2, capacity=2), "queue_head": encode(FIRST)})
    assert poll.slept == 1.0
    poll.watch.remove(third)
    poll.wait("outside the queue")
    poll.once(free)
    assert poll.slept == 1.0


def test_the_lock_of_a_first_waiter_with_a_long_interval_is_read_every_second() -> None:
    poll = Poll()
    poll.wait("first", place=FIRST, poll_interval=10.0)
    for _ in range(11):
        poll.once(queued("k", FIRST))
        assert poll.slept == 1.0


# -- what it reads --------------------------------------------------------------------------------------------------


def test_all_keys_that_anybody_waits_for_are_read_a_hundred_in_a_request() -> None:
    poll = Poll()
    for number in range(250):
        poll.wait(f"waiter-{number}", f"key-{number % 125}")

    requests = poll.once([], [])

    asked = [key["key"]["S"] for each in requests for key in each.params["RequestItems"][TABLE]["Keys"]]
    assert [each.action for each in requests] == ["BatchGetItem"] * 2
    assert sorted(asked) == sorted({f"key-{number}" for number in range(125)})
    assert max(len(each.params["RequestItems"][TABLE]["Keys"]) for each in requests) == 100


def test_it_reads_as_often_as_the_most_impatient_asks_stretched_by_up_to_a_quarter() -> None:
    none, all_of_it, half = "", "144001", "63891"  # by their checksums
    versions = iter([none, all_of_it, half])
    poll = Poll(lambda: next(versions))
    poll.wait("patient", "one", poll_interval=60.0)
    impatient = poll.wait("impatient", "two", poll_interval=4.0)

    assert poll.sleep() == 4.0
    poll.once([])
    assert poll.slept == pytest.approx(5.0, abs=1e-4)
    poll.watch.remove(impatient)
    poll.once([])
    assert poll.slept == pytest.approx(67.5, abs=1e-2)


@pytest.mark.parametrize("interval", [1.0, 3.0, 7.0, 15.0])
def test_every_wait_time_is_slept_through_between_polls(interval: float) -> None:
    """peers.md, 3: with wait times of 1, 3, 7, 15… it spins without sleeping."""
    poll = Poll()
    poll.wait("a", poll_interval=interval)
    assert poll.sleep() == interval
    for _ in range(5):
        poll.once(lock())
        assert poll.slept == interval


def test_it_stops_when_nobody_waits_any_more() -> None:
    poll = Poll()
    ticket = poll.wait("a")
    poll.once([])
    poll.watch.remove(ticket)

    assert not poll.watch
    with pytest.raises(StopIteration):
        poll.once()


def test_a_key_is_no_longer_read_when_its_last_waiter_has_gone() -> None:
    poll = Poll()
    gone = poll.wait("a", "one")
    poll.wait("b", "two")
    poll.watch.remove(gone)

    (request,) = poll.once([])

    assert [key["key"]["S"] for key in request.params["RequestItems"][TABLE]["Keys"]] == ["two"]


# -- whom it wakes --------------------------------------------------------------------------------------------------


def test_nobody_is_woken_while_the_lock_is_held() -> None:
    poll = Poll()
    poll.wait("a")
    poll.once(lock())

    assert poll.told == []


def test_the_one_who_came_first_is_woken_and_nobody_else() -> None:
    poll = Poll()
    for who in ("first", "second", "third"):
        poll.wait(who)
    poll.once(lock(held=0))

    assert poll.told == ["first"]


def test_no_more_are_woken_than_there_is_room_for() -> None:
    poll = Poll()
    poll.wait("big", slots=3)
    for who in ("a", "b", "c"):
        poll.wait(who)
    poll.once(lock(held=3, capacity=5))

    assert poll.told == ["a", "b"], "two slots are free: too few for the one who wants three"


def test_those_who_only_watch_are_all_woken_and_use_up_nothing() -> None:
    poll = Poll()
    poll.wait("sensor-1", takes=False)
    poll.wait("taker")
    poll.wait("sensor-2", takes=False)
    poll.wait("next taker")
    poll.once(lock(held=0))

    assert poll.told == ["sensor-1", "taker"], (
        "what is left for sensor-2, when the taker has taken, is nothing"
    )


def test_a_lock_that_has_no_record_has_room_for_the_first_and_for_all_who_only_watch() -> None:
    poll = Poll()
    poll.wait("first")
    poll.wait("second")
    poll.wait("sensor", takes=False)
    poll.once([])

    assert poll.told == ["first", "sensor"]


def test_one_who_wants_more_than_there_is_at_all_is_woken_to_be_told_so() -> None:
    poll = Poll()
    poll.wait("greedy", slots=5)
    poll.once(lock(held=0, capacity=2))

    assert poll.told == ["greedy"]


def test_the_waiter_is_woken_when_the_holder_has_died() -> None:
    poll = Poll()
    poll.wait("a")
    poll.once(lock())
    poll.now = 29.9
    poll.once(lock())
    assert poll.told == []
    poll.now = 30.0
    poll.once(lock())

    assert poll.told == ["a"]


def test_a_damaged_record_wakes_a_waiter_who_then_is_told_of_it() -> None:
    poll = Poll()
    poll.wait("a")
    poll.once({"key": {"S": "k"}, "entry": {"S": "lock"}, "holders": {"S": "what?"}})

    assert poll.told == ["a"]


def test_waiters_here_are_not_quicker_than_those_elsewhere_when_this_process_releases() -> None:
    """Woken at once, they would leave no turn to another process."""
    poll = Poll()
    poll.wait("first")

    poll.watch.ended("k", "a")

    assert poll.told == []


def test_a_waiter_more_impatient_than_the_sleeping_poller_hurries_it() -> None:
    poll = Poll()
    poll.wait("patient", poll_interval=60.0)
    poll.sleep()

    def hurries(place: WaiterHandle | EndListener) -> bool:
        return poll.watch.add(place)

    assert hurries(WaiterHandle(WaitForSlots("k", 1, True, 1.0, None), lambda _: None))
    assert hurries(EndListener("k", "a", 1.0, lambda _: None))
    assert not hurries(WaiterHandle(WaitForSlots("k", 1, True, 60.0, None), lambda _: None))


def test_keys_that_dynamodb_did_not_get_to_are_not_taken_for_free() -> None:
    poll = Poll()
    poll.wait("a", "one")
    poll.wait("b", "two")
    left = {TABLE: {"Keys": [{"key": {"S": "one"}, "entry": {"S": "lock"}}]}}
    poll.once({"Responses": {TABLE: [lock("two", held=0)]}, "UnprocessedKeys": left})

    assert poll.told == ["b"]


# -- those who look after a lease -----------------------------------------------------------------------------------


def test_whoever_looks_after_a_lease_is_told_when_it_is_gone_or_ending() -> None:
    poll = Poll()
    poll.look("keeper", "a")
    poll.once(lock())
    assert poll.told == []

    poll.once(lock(draining=True))
    poll.once(lock(lease_id="successor"))
    poll.once(lock(held=0))
    poll.once([])
    assert poll.told == [("keeper", False)] * 4, "as far as an eventually consistent read can tell"


def test_whoever_looks_after_a_lease_is_told_at_once_when_this_process_ends_it() -> None:
    poll = Poll()
    poll.look("keeper", "a")
    poll.look("another lease's", "b")

    poll.watch.ended("k", "a")

    assert poll.told == [("keeper", True)]


# -- errors ---------------------------------------------------------------------------------------------------------


def test_a_poll_that_fails_for_want_of_a_network_is_tried_again_and_wakes_nobody() -> None:
    poll = Poll()
    poll.wait("a")
    poll.once(LockUnavailableError("throttled", maybe_applied=False))
    assert poll.told == []

    poll.once(lock(held=0))
    assert poll.told == ["a"]


@pytest.mark.parametrize("failure", [LockAccessError("not allowed"), RuntimeError("something new")])
def test_any_other_failure_is_told_to_everybody_who_waits(failure: Exception) -> None:
    """Nobody may wait for ever on a poller that cannot go on."""
    poll = Poll()
    poll.wait("a", "one")
    poll.wait("b", "two", takes=False)
    poll.once(failure)

    assert sorted(poll.told, key=str) == [("a", failure), ("b", failure)]


def test_a_failure_is_logged_for_those_who_listen_for_the_end_of_a_lease(
    caplog: pytest.LogCaptureFixture,
) -> None:
    poll = Poll()
    poll.look("a", "lease")
    poll.once(LockAccessError("not allowed"))

    assert "not allowed" in caplog.text
    assert poll.told == []


def test_one_failed_request_of_several_does_not_keep_the_others_from_being_looked_at() -> None:
    poll = Poll()
    for number in range(150):
        poll.wait(f"waiter-{number}", f"key-{number:03}")

    poll.once(LockUnavailableError("throttled", maybe_applied=False), [])

    assert len(poll.told) == 50


def test_the_first_in_line_need_not_wait_for_a_poll_when_the_lease_ended_here() -> None:
    poll = Poll()
    poll.wait("second", place="0999/2/b")
    poll.wait("first", place="0999/1/a")
    poll.wait("not in line")
    poll.wait("elsewhere", key="other", place="0999/1/c")

    poll.watch.ended("k", "a")

    assert poll.told == ["first"]


# -- who is told where he stands ------------------------------------------------------------------------------------


class Queues:
    """The queues as the poller reads them to report positions.

    :ivar read: the locks whose queues were read, in order.
    :ivar owners: who waits for each lock, in order; the owner is also the place.
    """

    def __init__(self) -> None:
        self.read: list[str] = []
        self.owners: dict[str, list[str]] = {}

    def everybody(self, _: QueueReader, key: str) -> Operation[list[Waiter]]:
        self.read.append(key)
        yield from ()
        return [
            Waiter(key, each, each, each, 1, 1, 0, 0, None, "p", "", 0) for each in self.owners.get(key, ())
        ]


@pytest.fixture
def queues(monkeypatch: pytest.MonkeyPatch) -> Queues:
    """Queues that are read without requests."""
    found = Queues()
    monkeypatch.setattr(QueueReader, "waiters", lambda *arguments: found.everybody(*arguments))
    return found


def stand(
    watch: Poller,
    place: str,
    key: str = "k",
    on_position: Callable[[QueuePosition], None] = lambda standing: None,
) -> WaiterHandle:
    ticket = WaiterHandle(
        WaitForSlots(key, 1, True, 1.0, None, place=place, on_position=on_position), lambda failure: None
    )
    watch.add(ticket)
    return ticket


def see(watch: Poller, polls: int, *, tickets: int) -> None:
    for _ in range(polls):
        list(watch._report_changes("k", LockRecord("k", 1, 0, {}, token=1, last_ticket=tickets)))


def seconds_of_polls(poll: Poll, seconds: int, *keys: str) -> None:
    """Poll once a second while nothing about the locks changes."""
    for _ in range(seconds):
        poll.now += 1.0
        poll.once([lock(key) for key in keys])


def test_a_line_is_looked_at_again_after_a_number_was_drawn(queues: Queues) -> None:
    """Who drew it comes to stand a moment later, and nothing in the record changes then that would tell."""
    watch = a_watch(lambda: 0.0)
    stand(watch, "0999/1/a")
    see(watch, 4, tickets=1)
    assert len(queues.read) == 2

    see(watch, 4, tickets=2)
    assert len(queues.read) == 4, "twice for the number that another process has drawn, and not for ever"


def test_who_comes_to_stand_after_the_others_were_told_is_told_too(queues: Queues) -> None:
    """His number has been drawn, and seen, before: nothing in the record changes any more that would tell."""
    watch = a_watch(lambda: 0.0)
    stand(watch, "0999/1/a")
    see(watch, 3, tickets=2)
    queues.read.clear()

    stand(watch, "0999/2/b")
    see(watch, 2, tickets=2)

    assert queues.read == ["k"]


def test_a_waiter_whose_entry_is_not_in_the_queue_is_told_nothing(queues: Queues) -> None:
    poll = Poll()
    told: list[QueuePosition] = []
    queues.owners["k"] = ["0999/1/a"]
    stand(poll.watch, "0999/2/b", on_position=told.append)
    poll.once(lock())
    assert queues.read == ["k"]
    assert told == []


def test_a_waiter_learns_within_seconds_that_one_ahead_of_it_has_given_up(queues: Queues) -> None:
    """One who was not the first leaves the lock's record as it is."""
    poll, told = Poll(), list[str]()
    queues.owners["k"] = ["one", "two", "me"]
    stand(poll.watch, "me", on_position=lambda standing: told.append(standing.describe()))
    seconds_of_polls(poll, 5, "k")
    assert told[-1] == "3rd of 3, behind two"

    queues.owners["k"] = ["one", "me"]
    seconds_of_polls(poll, 10, "k")

    assert told[-1] == "2nd of 2, behind one"
    queues.read.clear()
    seconds_of_polls(poll, 60, "k")
    assert queues.read == ["k"] * 6, "one read in ten seconds"


def test_a_waiter_learns_at_the_next_poll_that_one_of_its_own_process_has_given_up(queues: Queues) -> None:
    poll, told = Poll(), list[str]()
    queues.owners["k"] = ["one", "two", "me"]
    stand(poll.watch, "me", on_position=lambda standing: told.append(standing.describe()))
    two = stand(poll.watch, "two")
    seconds_of_polls(poll, 5, "k")

    queues.owners["k"] = ["one", "me"]
    poll.watch.remove(two)
    seconds_of_polls(poll, 1, "k")

    assert told[-1] == "2nd of 2, behind one"


def test_the_queue_of_a_lock_is_not_read_again_while_nobody_is_ahead(queues: Queues) -> None:
    poll = Poll()
    queues.owners["k"] = ["me", "another"]
    stand(poll.watch, "me")
    seconds_of_polls(poll, 5, "k")
    queues.read.clear()

    seconds_of_polls(poll, 60, "k")

    assert queues.read == []


def test_many_queues_are_read_again_in_turn_and_no_more_than_one_a_second(queues: Queues) -> None:
    poll, keys = Poll(), [f"key-{number}" for number in range(30)]
    for key in keys:
        queues.owners[key] = ["one", "me"]
        stand(poll.watch, "me", key)
    seconds_of_polls(poll, 5, *keys)
    queues.read.clear()

    seconds_of_polls(poll, 60, *keys)

    assert len(queues.read) <= 60
    assert {key: queues.read.count(key) for key in keys} == pytest.approx(dict.fromkeys(keys, 2), abs=1)


def test_queues_that_cannot_be_read_do_not_keep_others_from_being_read(
    queues: Queues, monkeypatch: pytest.MonkeyPatch
) -> None:
    poll = Poll()
    for key in ("bad", "good"):
        queues.owners[key] = ["one", "me"]
        stand(poll.watch, "me", key)
    seconds_of_polls(poll, 5, "bad", "good")
    read = queues.everybody

    def everybody(line: QueueReader, key: str) -> Operation[list[Waiter]]:
        if key == "bad":
            raise LockUnavailableError("throttled", maybe_applied=False)
        return (yield from read(line, key))

    monkeypatch.setattr(queues, "everybody", everybody)
    queues.read.clear()
    seconds_of_polls(poll, 60, "bad", "good")

    assert queues.read.count("good") >= 5
