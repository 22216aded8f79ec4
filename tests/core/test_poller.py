"""The poller (rule R11): what it reads for all waiters of a process, which it wakes, and how it handles errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from airflow_dynamo_lock.core.effects import Callback, Reply, Request, Sleep, Stamp, WaitForSlots
from airflow_dynamo_lock.core.liveness import Observer
from airflow_dynamo_lock.core.model.errors import LockAccessError, LockUnavailableError
from airflow_dynamo_lock.core.model.record import LockRecord
from airflow_dynamo_lock.core.queue.queue import WaitQueue
from airflow_dynamo_lock.core.table.codec import encode
from airflow_dynamo_lock.core.table.native import NativeFormat
from airflow_dynamo_lock.core.table.position import head_after, place_of
from airflow_dynamo_lock.core.wait.poller import EndListener, Poller, WaiterHandle, _may_be_next, _pause
from airflow_dynamo_lock.events import LockEvent, subscribe, unsubscribe

TABLE = "locks"


def a_poller(now: Callable[[], float], versions: Callable[[], str] = lambda: "") -> Poller:
    """Return a poller without jitter: that of a stamp without a version is 0."""
    form, observer = NativeFormat(TABLE), Observer()
    return Poller(
        form, observer, WaitQueue.of(form, lambda: Stamp(versions(), None, 0, now()), observer).reader
    )


class Poll:
    """A poller that the test drives step by step.

    :ivar woken: names of the waiters and listeners that were woken, in order; with the error, if there was one,
        or with whether it is certain that the lease is gone.
    :ivar slept: how long the poller sleeps after the last poll, in seconds.
    """

    def __init__(self, versions: Callable[[], str] = lambda: "") -> None:
        self.poller = a_poller(lambda: self.now, versions)
        self.now = 0.0
        self.woken: list[Any] = []
        self.slept = 0.0
        self._poller: Any = None

    def wait(
        self,
        name: str,
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
            self.woken.append(name if failure is None else (name, failure))

        wants = WaitForSlots(key, slots, takes, poll_interval, None, capacity, place, lease_id)
        waiter = WaiterHandle(wants, wake)
        self.poller.add(waiter)
        return waiter

    def listen(self, name: str, lease_id: str, key: str = "k", *, poll_interval: float = 1.0) -> EndListener:
        listener = EndListener(
            key, lease_id, poll_interval, lambda certain: self.woken.append((name, certain))
        )
        self.poller.add(listener)
        return listener

    def sleep(self) -> float:
        """Start the poller, or continue it after its last request, and return the seconds that it sleeps next."""
        if self._poller is None:
            self._poller = self.poller.poll()
        effect = next(self._poller)
        assert isinstance(effect, Sleep)
        return effect.seconds

    def once(self, *answers: Any) -> list[Request]:
        """Continue the poller after its sleep for one poll, and return its requests.

        :param answers: answer to each request: an item, a list of items, a whole output, or an exception.
        """
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
        assert isinstance(effect, Sleep), "the poll sends more requests than there are answers"
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
    """Return the item of a lock of which one holder has `held` slots."""
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


# -- which waiters are woken, and how often the poller reads --------------------------------------------------------


FIRST, THIRD, SIXTH = (place_of(0, number, "x") for number in (1, 3, 6))


def a_queue(head: str | None, available: int = 0) -> LockRecord:
    return LockRecord("k", 8, available, {}, token=1, queue_head=head)


@pytest.mark.parametrize(
    ("place", "head", "free", "may_be_next"),
    [
        (THIRD, None, 1, True),  # no queue
        (FIRST, FIRST, 1, True),
        (THIRD, FIRST, 2, False),  # two waiters ahead of it, and two free slots
        (THIRD, FIRST, 3, True),
        (place_of(1, 9, "x"), FIRST, 1, True),  # higher priority than the head
        (place_of(-1, 1, "x"), FIRST, 8, False),  # lower priority
    ],
)
def test_a_waiter_may_be_next_if_there_are_slots_for_all_ahead_of_it(
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
        ([SIXTH], FIRST, 1, 1),  # a slot is free
        ([SIXTH], None, 0, 1),
        ([SIXTH, None], FIRST, 0, 1),  # one waiter is not in the queue
        ([], FIRST, 0, 1),
    ],
)
def test_a_lock_is_read_in_each_poll_unless_all_its_waiters_here_are_far_from_the_head(
    places: list[str | None], head: str | None, free: int, polls: int
) -> None:
    waiters = [
        WaiterHandle(WaitForSlots("k", 1, True, 1.0, None, place=each), lambda failure: None)
        for each in places
    ]
    assert _pause(a_queue(head), waiters, free) == polls


def test_waiters_behind_leave_free_slots_to_the_first_for_two_seconds() -> None:
    poll = Poll()
    poll.wait("third", place=THIRD)
    free = {**lock(held=1, capacity=2), "queue_head": encode(FIRST)}
    woken_at = []
    for _ in range(20):
        poll.woken.clear()
        poll.once(free)
        if poll.woken:
            woken_at.append(poll.now)
        poll.now += poll.slept
    assert woken_at == [2.0, 4.0]


def test_waiters_behind_leave_free_slots_to_the_first_for_longer_after_each_grant() -> None:
    poll = Poll()
    poll.wait("third", place=THIRD)
    for token in range(20):
        poll.once({**lock(held=1, capacity=2), "queue_head": encode(FIRST), "token": encode(token // 6)})
        poll.now += poll.slept
    assert poll.woken == []


def test_a_waiter_handle_is_for_one_position_in_one_queue() -> None:
    wants = WaitForSlots("k", 1, True, 1.0, None, place=FIRST)
    waiter = WaiterHandle(wants, lambda failure: None)
    assert waiter.is_for(WaitForSlots("k", 2, True, 5.0, None, place=FIRST))
    assert not waiter.is_for(WaitForSlots("k", 1, True, 1.0, None, place=THIRD))
    assert not waiter.is_for(WaitForSlots("other", 1, True, 1.0, None, place=FIRST))


def test_no_more_waiters_of_a_semaphore_are_woken_than_it_has_free_slots() -> None:
    poll = Poll()
    for number in range(5):
        poll.wait(f"waiter {number}", capacity=3)
    poll.once(lock(held=1, capacity=3))
    assert poll.woken == ["waiter 0", "waiter 1"]


def test_one_waiter_is_woken_for_an_idle_lock_of_another_capacity() -> None:
    poll = Poll()
    poll.wait("one", capacity=5)
    poll.wait("two", capacity=5)
    poll.once(lock(held=0))
    assert poll.woken == ["one"]


def test_a_sensor_is_not_woken_while_the_lock_is_held_with_another_capacity() -> None:
    poll = Poll()
    poll.wait("one", capacity=5, takes=False)
    poll.once(lock(held=1, capacity=3))
    assert poll.woken == []


def test_a_waiter_for_two_slots_of_a_plain_lock_is_woken_to_fail() -> None:
    poll = Poll()
    poll.wait("one", slots=2)
    poll.once(lock(held=0))
    assert poll.woken == ["one"]


def test_the_first_waiter_is_not_woken_while_the_lock_is_held() -> None:
    poll = Poll()
    poll.wait("first", place=FIRST)
    poll.once({**lock(), "queue_head": encode(FIRST)})
    assert poll.woken == []


def test_a_removed_waiter_is_woken_although_the_lock_is_held() -> None:
    poll = Poll()
    poll.wait("first", place=FIRST, lease_id="one")
    poll.wait("third", place=THIRD, lease_id="three")
    poll.once({**lock(), "queue_head": encode(FIRST), "removed:three": encode({"at": 1})})
    assert poll.woken == ["third"]


def test_with_a_stream_a_free_lock_is_read_again_each_interval_until_it_is_taken() -> None:
    """A free slot that no process takes causes no change that the stream could report."""
    poll = Poll()
    poll.wait("one")
    poll.now = 10.0
    poll.poller.reported_until(10.0)
    poll.once(lock(held=0))
    assert poll.poller._due == {"k": 11.0}
    poll.now = 11.0
    poll.poller.reported_until(11.0)
    poll.once([])
    assert poll.poller._due == {}
    assert poll.slept > 0


def test_a_lock_that_was_free_before_the_stream_started_is_read_after_an_interval() -> None:
    poll = Poll()
    poll.wait("one")
    poll.now = 10.0
    poll.once(lock(held=0))  # without a stream
    poll.poller.reported_until(10.5)
    poll.now = 11.0
    poll.poller.reported_until(11.0)
    assert keys_of(poll.once(lock(held=0))) == ["k"]


def test_it_polls_more_than_once_a_second_for_a_waiter_with_a_shorter_interval() -> None:
    poll = Poll()
    poll.wait("one", poll_interval=0.25)
    assert poll.sleep() == 0.25


def test_the_state_of_a_lock_is_dropped_with_its_last_waiter() -> None:
    poll = Poll()
    one, two = poll.wait("one"), poll.wait("two")
    poll.once(lock())
    poller = poll.poller
    poller.remove(one)
    assert "k" in poller._rounds
    poller.remove(two)
    assert not any((poller._rounds, poller._pause, poller.positions._tickets, poller.positions._behind))


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


def test_an_additional_read_wakes_the_first_waiter() -> None:
    poll = Poll()
    poll.wait("first", place=FIRST)
    poll.once(queued("k", FIRST))
    poll.once({**lock(held=0), "queue_head": encode(FIRST)})
    assert poll.woken == ["first"]


def test_after_the_first_waiter_has_left_a_lock_is_read_once_in_an_interval() -> None:
    poll = Poll()
    first = poll.wait("first", "one", place=FIRST)
    poll.wait("second", "two", place=THIRD)
    poll.once([queued("one", FIRST), queued("two", FIRST)])
    poll.poller.remove(first)
    assert keys_of(poll.once(queued("two", FIRST))) == ["two"]
    assert poll.slept == 1.0


def test_at_most_25_locks_are_read_four_times_in_an_interval() -> None:
    poll = Poll()
    names = [f"k{number:02}" for number in range(26)]
    waiters = [poll.wait(name, name, place=FIRST) for name in names]
    poll.once([queued(name, FIRST) for name in names])
    assert poll.slept == 1.0
    poll.poller.remove(waiters[0])
    poll.once([queued(name, FIRST) for name in names[1:]])
    assert poll.slept == 0.25


def test_a_short_interval_or_a_stream_causes_no_additional_reads() -> None:
    poll = Poll()
    poll.wait("first", place=FIRST, poll_interval=0.9)
    poll.once(queued("k", FIRST))
    assert poll.slept == 0.9
    poll = Poll()
    poll.wait("first", place=FIRST)
    poll.poller.reported_until(0.0)
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
    poll.poller.remove(third)
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


def test_all_keys_with_waiters_are_read_a_hundred_in_a_request() -> None:
    poll = Poll()
    for number in range(250):
        poll.wait(f"waiter-{number}", f"key-{number % 125}")

    requests = poll.once([], [])

    asked = [key["key"]["S"] for each in requests for key in each.params["RequestItems"][TABLE]["Keys"]]
    assert [each.action for each in requests] == ["BatchGetItem"] * 2
    assert sorted(asked) == sorted({f"key-{number}" for number in range(125)})
    assert max(len(each.params["RequestItems"][TABLE]["Keys"]) for each in requests) == 100


def test_the_shortest_interval_counts_with_a_jitter_of_up_to_a_quarter() -> None:
    none, all_of_it, half = "", "144001", "63891"  # by their checksums
    versions = iter([none, all_of_it, half])
    poll = Poll(lambda: next(versions))
    poll.wait("patient", "one", poll_interval=60.0)
    impatient = poll.wait("impatient", "two", poll_interval=4.0)

    assert poll.sleep() == 4.0
    poll.once([])
    assert poll.slept == pytest.approx(5.0, abs=1e-4)
    poll.poller.remove(impatient)
    poll.once([])
    assert poll.slept == pytest.approx(67.5, abs=1e-2)


@pytest.mark.parametrize("interval", [1.0, 3.0, 7.0, 15.0])
def test_it_sleeps_the_whole_interval_between_polls(interval: float) -> None:
    """Another library spins without sleeping at wait times of 1, 3, 7, 15…"""
    poll = Poll()
    poll.wait("a", poll_interval=interval)
    assert poll.sleep() == interval
    for _ in range(5):
        poll.once(lock())
        assert poll.slept == interval


def test_it_stops_after_its_last_waiter_has_left() -> None:
    poll = Poll()
    waiter = poll.wait("a")
    poll.once([])
    poll.poller.remove(waiter)

    assert not poll.poller
    with pytest.raises(StopIteration):
        poll.once()


def test_after_the_last_waiter_has_left_their_number_is_reported_as_zero() -> None:
    poll, numbers = Poll(), list[float | None]()

    def listener(event: LockEvent) -> None:
        if event.name == "waiting":
            numbers.append(event.value)

    subscribe(listener)
    try:
        waiter = poll.wait("a")
        poll.once([])
        poll.poller.remove(waiter)
        with pytest.raises(StopIteration):
            poll.once()
    finally:
        unsubscribe(listener)
    assert numbers == [1, 0]


def test_a_key_is_not_read_after_its_last_waiter_has_left() -> None:
    poll = Poll()
    gone = poll.wait("a", "one")
    poll.wait("b", "two")
    poll.poller.remove(gone)

    (request,) = poll.once([])

    assert [key["key"]["S"] for key in request.params["RequestItems"][TABLE]["Keys"]] == ["two"]


# -- which waiters are woken ----------------------------------------------------------------------------------------


def test_no_waiter_is_woken_while_the_lock_is_held() -> None:
    poll = Poll()
    poll.wait("a")
    poll.once(lock())

    assert poll.woken == []


def test_only_the_first_waiter_is_woken() -> None:
    poll = Poll()
    for name in ("first", "second", "third"):
        poll.wait(name)
    poll.once(lock(held=0))

    assert poll.woken == ["first"]


def test_no_more_waiters_are_woken_than_there_are_free_slots() -> None:
    poll = Poll()
    poll.wait("big", slots=3)
    for name in ("a", "b", "c"):
        poll.wait(name)
    poll.once(lock(held=3, capacity=5))

    assert poll.woken == ["a", "b"], "two slots are free: too few for the waiter that wants three"


def test_a_sensor_is_woken_and_uses_no_slots() -> None:
    poll = Poll()
    poll.wait("sensor-1", takes=False)
    poll.wait("taker")
    poll.wait("sensor-2", takes=False)
    poll.wait("next taker")
    poll.once(lock(held=0))

    assert poll.woken == ["sensor-1", "taker"], "the taker leaves no free slot for sensor-2"


def test_a_lock_without_a_record_wakes_the_first_waiter_and_all_sensors() -> None:
    poll = Poll()
    poll.wait("first")
    poll.wait("second")
    poll.wait("sensor", takes=False)
    poll.once([])

    assert poll.woken == ["first", "sensor"]


def test_a_waiter_for_more_slots_than_the_capacity_is_woken_to_fail() -> None:
    poll = Poll()
    poll.wait("greedy", slots=5)
    poll.once(lock(held=0, capacity=2))

    assert poll.woken == ["greedy"]


def test_the_waiter_is_woken_when_the_holder_is_dead() -> None:
    poll = Poll()
    poll.wait("a")
    poll.once(lock())
    poll.now = 29.9
    poll.once(lock())
    assert poll.woken == []
    poll.now = 30.0
    poll.once(lock())

    assert poll.woken == ["a"]


def test_a_damaged_record_wakes_a_waiter_to_fail() -> None:
    poll = Poll()
    poll.wait("a")
    poll.once({"key": {"S": "k"}, "entry": {"S": "lock"}, "holders": {"S": "what?"}})

    assert poll.woken == ["a"]


def test_waiters_of_the_releasing_process_have_no_advantage_over_others() -> None:
    """If they were woken at once, waiters of other processes would never be granted the lock."""
    poll = Poll()
    poll.wait("first")

    poll.poller.ended("k", "a")

    assert poll.woken == []


def test_a_waiter_with_a_shorter_interval_wakes_the_poller() -> None:
    poll = Poll()
    poll.wait("patient", poll_interval=60.0)
    poll.sleep()

    def wakes(entry: WaiterHandle | EndListener) -> bool:
        return poll.poller.add(entry)

    assert wakes(WaiterHandle(WaitForSlots("k", 1, True, 1.0, None), lambda _: None))
    assert wakes(EndListener("k", "a", 1.0, lambda _: None))
    assert not wakes(WaiterHandle(WaitForSlots("k", 1, True, 60.0, None), lambda _: None))


def test_unprocessed_keys_do_not_count_as_free() -> None:
    poll = Poll()
    poll.wait("a", "one")
    poll.wait("b", "two")
    unprocessed = {TABLE: {"Keys": [{"key": {"S": "one"}, "entry": {"S": "lock"}}]}}
    poll.once({"Responses": {TABLE: [lock("two", held=0)]}, "UnprocessedKeys": unprocessed})

    assert poll.woken == ["b"]


# -- listeners for the end of a lease -------------------------------------------------------------------------------


def test_a_listener_is_notified_when_its_lease_is_gone_or_draining() -> None:
    poll = Poll()
    poll.listen("heartbeat task", "a")
    poll.once(lock())
    assert poll.woken == []

    poll.once(lock(draining=True))
    poll.once(lock(lease_id="successor"))
    poll.once(lock(held=0))
    poll.once([])
    assert poll.woken == [("heartbeat task", False)] * 4, "an eventually consistent read is not certain"


def test_a_listener_is_notified_at_once_when_this_process_ends_its_lease() -> None:
    poll = Poll()
    poll.listen("heartbeat task", "a")
    poll.listen("another lease's", "b")

    poll.poller.ended("k", "a")

    assert poll.woken == [("heartbeat task", True)]


# -- errors ---------------------------------------------------------------------------------------------------------


def test_a_poll_that_fails_without_a_network_is_retried_and_wakes_no_waiter() -> None:
    poll = Poll()
    poll.wait("a")
    poll.once(LockUnavailableError("throttled", maybe_applied=False))
    assert poll.woken == []

    poll.once(lock(held=0))
    assert poll.woken == ["a"]


@pytest.mark.parametrize("failure", [LockAccessError("not allowed"), RuntimeError("something new")])
def test_any_other_failure_is_passed_to_all_waiters(failure: Exception) -> None:
    """Otherwise they would wait for ever on a poller that cannot continue."""
    poll = Poll()
    poll.wait("a", "one")
    poll.wait("b", "two", takes=False)
    poll.once(failure)

    assert sorted(poll.woken, key=str) == [("a", failure), ("b", failure)]


def test_a_failure_is_logged_for_a_listener(
    caplog: pytest.LogCaptureFixture,
) -> None:
    poll = Poll()
    poll.listen("a", "lease")
    poll.once(LockAccessError("not allowed"))

    assert "not allowed" in caplog.text
    assert poll.woken == []


def test_one_failed_request_does_not_affect_the_other_requests() -> None:
    poll = Poll()
    for number in range(150):
        poll.wait(f"waiter-{number}", f"key-{number:03}")

    poll.once(LockUnavailableError("throttled", maybe_applied=False), [])

    assert len(poll.woken) == 50


def test_the_first_waiter_is_woken_at_once_if_this_process_ended_the_lease() -> None:
    poll = Poll()
    poll.wait("second", place="0999/2/b")
    poll.wait("first", place="0999/1/a")
    poll.wait("not in the queue")
    poll.wait("elsewhere", key="other", place="0999/1/c")

    poll.poller.ended("k", "a")

    assert poll.woken == ["first"]
