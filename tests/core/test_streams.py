"""The table's stream: what its reader requests, what it reports to the poller, and how it handles errors."""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import Any

import pytest

from airflow_dynamo_lock.core.effects import Reply, Request, Sleep, WaitForSlots
from airflow_dynamo_lock.core.liveness import Observer
from airflow_dynamo_lock.core.model.errors import LockAccessError, LockUnavailableError
from airflow_dynamo_lock.core.table.codec import encode
from airflow_dynamo_lock.core.table.native import NativeFormat
from airflow_dynamo_lock.core.wait import stream as streams
from airflow_dynamo_lock.core.wait.poller import WaiterHandle
from airflow_dynamo_lock.core.wait.stream import StreamGoneError, StreamReader
from tests.core.test_poller import a_poller

TABLE = "locks"
ARN = f"arn:aws:dynamodb:eu-central-1:111122223333:table/{TABLE}/stream/1"


class Stream:
    """A simulated stream, and its reader, which the test drives step by step.

    :ivar shards: the shards that `DescribeStream` returns, a list for each page.
    :ivar records: the records that the next `GetRecords` of each shard returns.
    :ivar ended: the shards that have no next iterator.
    :ivar answers: answers to actions that replace the usual ones; an exception is raised.
    :ivar reported: all that the poller received, in order: keys, "all", the time up to which it knows all
        changes, or None when it receives no more changes.
    :ivar requests: all requests.
    :ivar now: the time, which advances with each sleep.
    """

    def __init__(self) -> None:
        self.arn: str | None = ARN
        self.shards: list[list[dict[str, Any]]] = [[shard("a")]]
        self.records: dict[str, list[dict[str, Any]]] = {}
        self.ended: set[str] = set()
        self.answers: dict[str, Exception] = {}
        self.reported: list[Any] = []
        self.requests: list[Request] = []
        self.now = 1000.0
        self.slept = 0.0
        self.poller = a_poller(lambda: self.now)
        self.waiter = WaiterHandle(WaitForSlots("k", 1, True, 1.0, None), lambda _: None)
        self.poller.add(self.waiter)
        self._record_reports()
        self.follow()

    def _record_reports(self) -> None:
        changed, confirmed = self.poller.changed, self.poller.reported_until

        def report_changed(keys: Any = None) -> None:
            named = None if keys is None else list(keys)
            if named != []:
                self.reported.append("all" if named is None else named)
            changed(named)

        def report_until(until: float | None) -> None:
            if until is not None or self.reported[-1:] not in ([], [None]):
                self.reported.append(until)
            confirmed(until)

        self.poller.changed = report_changed  # type: ignore[method-assign]
        self.poller.reported_until = report_until  # type: ignore[method-assign]

    def follow(self) -> None:
        if not hasattr(self, "reader"):
            self.reader = StreamReader(self.poller, TABLE)
        self._reader = self.reader.follow()
        self._effect: Any = next(self._reader)

    def once(self) -> list[Any]:
        """Run one round of the reader, and return what the poller received."""
        assert isinstance(self._effect, Sleep)
        self.slept = self._effect.seconds
        self.now += self.slept
        begun = len(self.reported)
        self._effect = self._reader.send(self.now)
        while isinstance(self._effect, Request):
            self.requests.append(self._effect)
            answer = self._answer(self._effect)
            if isinstance(answer, Exception):
                self._effect = self._reader.throw(answer)
            else:
                self._effect = self._reader.send(Reply(answer, self.now, self.now))
        return self.reported[begun:]

    def _answer(self, request: Request) -> Any:
        if request.action in self.answers:
            return self.answers[request.action]
        params = request.params
        match request.action:
            case "DescribeTable":
                specification = {"StreamSpecification": {"StreamEnabled": True}, "LatestStreamArn": self.arn}
                return {"Table": specification if self.arn else {"LatestStreamArn": ARN}}
            case "DescribeStream":
                page = int(params.get("ExclusiveStartShardId", "0"))
                more = {"LastEvaluatedShardId": str(page + 1)} if page + 1 < len(self.shards) else {}
                return {"StreamDescription": {"Shards": self.shards[page], **more}}
            case "GetShardIterator":
                assert params["ShardIteratorType"] == "LATEST"
                return {"ShardIterator": f"{params['ShardId']} 0"}
            case "GetRecords":
                name, number = params["ShardIterator"].split()
                following = {} if name in self.ended else {"NextShardIterator": f"{name} {int(number) + 1}"}
                return {"Records": self.records.pop(name, []), **following}
        raise AssertionError(request)

    def actions(self) -> list[str]:
        """Return the actions of the requests since the last call."""
        actions = [request.action for request in self.requests]
        self.requests.clear()
        return actions


def shard(name: str, *, parent: str | None = None, closed: bool = False) -> dict[str, Any]:
    ends = {"EndingSequenceNumber": "9"} if closed else {}
    above = {"ParentShardId": parent} if parent else {}
    return {"ShardId": name, "SequenceNumberRange": {"StartingSequenceNumber": "1", **ends}, **above}


def change(key: str, entry: str = "lock", *, size: int = 100) -> dict[str, Any]:
    keys = {"key": {"S": key}, "entry": {"S": entry}}
    return {"eventName": "MODIFY", "dynamodb": {"Keys": keys, "SizeBytes": size}}


@pytest.fixture
def stream() -> Stream:
    return Stream()


_OPEN = ["DescribeTable", "DescribeStream", "GetShardIterator", "GetRecords"]


# -- while the stream can be read -----------------------------------------------------------------------------------


def test_all_keys_are_read_first_and_then_those_that_changed(stream: Stream) -> None:
    assert stream.once() == ["all", stream.now]
    assert stream.actions() == _OPEN

    stream.records["a"] = [change("k"), change("k", "waiter/1"), change("other")]
    assert stream.once() == [["k", "other"], stream.now], "without items that are not locks"
    assert stream.once() == [stream.now]
    assert stream.actions() == ["GetRecords"] * 2


def test_every_shard_is_read_also_those_on_the_second_page(stream: Stream) -> None:
    stream.shards = [[shard("a")], [shard("b")]]
    stream.records = {"a": [change("k")], "b": [change("l")]}

    assert stream.once() == ["all", ["k"], ["l"], stream.now]


def test_it_continues_where_it_stopped_at_a_fixed_pace(stream: Stream) -> None:
    for _ in range(4):
        stream.once()
        assert stream.slept in (0.0, 0.2)
    places = [each.params["ShardIterator"] for each in stream.requests if each.action == "GetRecords"]
    assert places == ["a 0", "a 1", "a 2", "a 3"]


@pytest.mark.parametrize(("count", "size"), [(1000, 100), (10, 90_000)])
def test_after_an_answer_that_may_be_cut_off_not_all_changes_are_known(
    stream: Stream, count: int, size: int
) -> None:
    stream.shards = [[shard("a"), shard("b")]]
    stream.once()
    stream.records["a"] = [change("k", size=size)] * count

    assert stream.once() == [["k"] * count]
    assert stream.once() == [stream.now]


def test_it_describes_the_table_once_a_minute_and_the_stream_only_at_first(
    stream: Stream,
) -> None:
    stream.once()
    stream.actions()
    for _ in range(650):
        stream.once()
    actions = stream.actions()
    assert {action: actions.count(action) for action in set(actions)} == {
        "GetRecords": 650,
        "DescribeTable": 2,
    }


def test_without_waiters_it_sends_no_requests(stream: Stream) -> None:
    stream.once()
    stream.actions()
    stream.poller.remove(stream.waiter)

    with pytest.raises(StopIteration):
        stream.once()
    assert stream.actions() == []


def test_after_a_short_pause_it_continues_and_after_a_long_one_it_restarts(stream: Stream) -> None:
    stream.once()
    for pause, asks in ((50, ["GetRecords"]), (61, _OPEN)):
        stream.actions()
        stream.now += pause
        stream.follow()
        stream.once()
        assert stream.actions() == asks


# -- when shards are added and closed -------------------------------------------------------------------------------


def test_after_a_split_the_children_and_all_keys_are_read(stream: Stream) -> None:
    stream.once()
    stream.shards = [[shard("a", closed=True), shard("b", parent="a")], [shard("c", parent="a")]]
    stream.ended = {"a"}
    stream.records["a"] = [change("last")]
    assert stream.once() == [["last"], None], "the poller polls meanwhile"

    stream.records = {"c": [change("k")]}
    assert stream.once() == ["all", ["k"], stream.now]
    read = [each.params["ShardIterator"] for each in stream.requests if each.action == "GetRecords"]
    assert read[-2:] == ["b 0", "c 0"], "the closed shard is not read"


def test_the_reader_waits_until_the_children_of_a_closed_shard_appear(stream: Stream) -> None:
    stream.shards = [[shard("a", closed=True), shard("z")]]
    for _ in range(2):
        assert stream.once() == []
    assert "GetRecords" not in stream.actions(), "the reader would miss changes in the children"

    stream.shards = [[shard("a", closed=True), shard("z"), shard("b", parent="a")]]
    assert stream.once() == ["all", stream.now]


def test_a_stream_without_a_shard_is_read_again(stream: Stream) -> None:
    stream.shards = [[]]
    assert stream.once() == []
    stream.shards = [[shard("a")]]
    assert stream.once() == ["all", stream.now]


@pytest.mark.parametrize("why", ["expired", "trimmed"])
def test_an_expired_iterator_is_replaced(stream: Stream, why: str) -> None:
    stream.once()
    stream.answers["GetRecords"] = StreamGoneError(why)
    assert stream.once() == [None]
    del stream.answers["GetRecords"]
    stream.actions()

    assert stream.once() == ["all", stream.now]
    assert stream.actions() == _OPEN


def test_a_failure_while_the_stream_is_opened_leaves_out_no_shard(stream: Stream) -> None:
    stream.shards = [[shard("a"), shard("b")]]
    stream.answers["GetShardIterator"] = LockUnavailableError("throttled", maybe_applied=False)
    assert stream.once() == []
    stream.answers.clear()
    stream.actions()

    stream.once()
    assert stream.actions().count("GetRecords") == 2


# -- when there is no stream ----------------------------------------------------------------------------------------


def test_without_a_stream_it_describes_the_table_once_a_minute(
    stream: Stream, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    stream.arn = None
    for _ in range(3):
        assert stream.once() == []
    assert stream.slept == 60.0
    assert stream.actions() == ["DescribeTable"] * 3
    assert len(caplog.records) == 1
    assert "has no stream, or it is disabled" in caplog.text

    stream.arn = ARN
    assert stream.once() == ["all", stream.now]


def test_a_disabled_stream_that_can_still_be_read_is_detected(stream: Stream) -> None:
    stream.once()
    stream.arn = None
    begun = stream.now
    while stream.once() == [stream.now]:
        assert stream.now < begun + 70
    assert stream.reported[-1] is None


def test_a_stream_that_replaces_another_is_opened(stream: Stream) -> None:
    stream.once()
    stream.arn = ARN + "2"
    stream.shards = [[shard("new")]]
    stream.now += 61
    stream.actions()

    assert stream.once()[-2:] == ["all", stream.now]
    described = next(each for each in stream.requests if each.action == "DescribeStream")
    assert described.params["StreamArn"] == stream.arn


# -- when the stream cannot be read ---------------------------------------------------------------------------------


@pytest.mark.parametrize("action", _OPEN)
@pytest.mark.parametrize("failure", [LockAccessError("not allowed"), RuntimeError("something new")])
def test_a_lasting_failure_is_retried_every_minute_and_logged_once(
    stream: Stream, action: str, failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    stream.answers[action] = failure
    for _ in range(3):
        assert stream.now not in stream.once(), "the poller receives no changes"
    assert stream.slept == 60.0
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(failure) in caplog.text

    del stream.answers[action]
    assert stream.once()[-2:] == ["all", stream.now]
    assert "can be read again" in caplog.text


def test_while_it_is_throttled_it_reads_less_often_and_logs_that_once(
    stream: Stream, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    stream.once()
    stream.answers["GetRecords"] = LockUnavailableError("throttled", maybe_applied=False)
    for _ in range(10):
        assert stream.once() == [], "the poller detects by itself that it receives no changes"
    assert stream.slept == streams._SLOWEST
    assert set(stream.actions()[4:]) == {"GetRecords"}, "and it sends no other requests"
    assert len(caplog.records) == 1

    for failure in [None, LockUnavailableError("throttled", maybe_applied=False)] * 3:
        stream.answers = {"GetRecords": failure} if failure else {}
        stream.once()
    assert len(caplog.records) == 1, "also if it succeeds at times"
    stream.answers.clear()
    for _ in range(12):
        assert stream.once() == [stream.now]
    assert stream.slept == streams._PACE
    for _ in range(3):
        stream.answers["GetRecords"] = LockUnavailableError("throttled", maybe_applied=False)
        stream.once()
        stream.answers.clear()
        stream.once()
    assert len(caplog.records) == 1, "single failures are not logged"


# -- what the poller does -------------------------------------------------------------------------------------------


class Poll:
    """A poller with a simulated clock.

    :ivar reads: time, keys and consistency of each read.
    """

    def __init__(self, interval: float = 1.0, *, takers: tuple[str, ...] = ("k", "l")) -> None:
        self.now = 0.0
        self.reads: list[tuple[float, list[str], bool]] = []
        self.woken: list[str] = []
        self.items: dict[str, dict[str, Any]] = {}
        self.failure: Exception | None = None
        self.poller = a_poller(lambda: self.now)
        self.poller.wake_up = self._wake_up
        for key in takers:
            self.poller.add(self.waiter(key, interval))
        self._poller = self.poller.poll()
        self._effect: Any = next(self._poller)
        self._slept_at = 0.0
        self._woken = False

    def waiter(self, key: str, interval: float = 1.0) -> WaiterHandle:
        return WaiterHandle(WaitForSlots(key, 1, True, interval, None), lambda _: self.woken.append(key))

    def _wake_up(self) -> None:
        self._woken = True

    def until(self, at: float, *, streamed: bool = True) -> None:
        """Advance the time; the stream reports every 0.2 s that there are no changes."""
        while self.now < at:
            self.now = round(self.now + 0.1, 3)
            if streamed and round(self.now * 10) % 2 == 0:
                self.poller.reported_until(self.now)
            self.go()

    def go(self) -> None:
        """Run the poller up to its next sleep that has not ended."""
        while self._woken or self.now >= self._slept_at + self._effect.seconds - 1e-9:
            self._woken = False
            self._effect = self._poller.send(self.now)
            while isinstance(self._effect, Request):
                requests = self._effect.params["RequestItems"][TABLE]
                keys = sorted(each["key"]["S"] for each in requests["Keys"])
                self.reads.append((self.now, keys, requests.get("ConsistentRead", False)))
                if self.failure is not None:
                    self._effect = self._poller.throw(self.failure)
                    continue
                items = [self.items.get(key, lock(key)) for key in keys]
                output = {"Responses": {TABLE: items}, "UnprocessedKeys": {}}
                self._effect = self._poller.send(Reply(output, self.now, self.now))
            self._slept_at = self.now

    def new_reads(self) -> list[tuple[float, list[str], bool]]:
        reads, self.reads = self.reads, []
        return reads


def lock(key: str, *, lease: float = 600.0, free: bool = False, version: str = "v1") -> dict[str, Any]:
    holder = {"owner": "me", "slots": 1, "lease_ms": round(lease * 1000), "version": version}
    values = {
        "key": key,
        "entry": "lock",
        "capacity": 1,
        "available": 1 if free else 0,
        "holders": {} if free else {"a": {**holder, "acquired_at": 0, "processes": {}}},
        "token": 1,
    }
    return {name: encode(value) for name, value in values.items()}


def test_only_a_changed_lock_is_read_at_once_and_consistently() -> None:
    poll = Poll()
    poll.until(1)
    poll.new_reads()
    poll.until(1.5)
    poll.items["k"] = lock("k", free=True)
    poll.poller.changed(["k", "nobody's"])
    poll.go()

    assert poll.new_reads() == [(1.5, ["k"], True)]
    assert poll.woken == ["k"]


def test_a_change_of_a_lock_without_waiters_costs_no_request() -> None:
    poll = Poll()
    poll.until(1)
    poll.new_reads()
    poll.poller.changed(["nobody's"])
    poll.go()

    assert poll.new_reads() == []


@pytest.mark.parametrize(("interval", "relaxed"), [(0.5, 5.0), (1.0, 10.0), (5.0, 30.0), (60.0, 60.0)])
def test_while_the_stream_reports_changes_all_keys_are_read_less_often(
    interval: float, relaxed: float
) -> None:
    poll = Poll(interval)
    poll.until(200)

    assert all(keys == ["k", "l"] for _, keys, _ in poll.reads)
    gaps = [later[0] - earlier[0] for earlier, later in pairwise(poll.reads)]
    assert gaps
    assert max(gaps) == pytest.approx(relaxed, abs=0.2)
    assert min(gaps) == pytest.approx(relaxed, abs=0.2)


@pytest.mark.parametrize("signal", ["silence", "an end"])
def test_without_reports_of_the_stream_polling_returns_to_its_interval(signal: str) -> None:
    poll = Poll()
    poll.until(5)
    poll.new_reads()
    if signal == "an end":
        poll.poller.reported_until(None)
        poll.go()
        assert [at for at, *_ in poll.reads] == [5], "at once"
    poll.until(10, streamed=False)

    ats = [at for at, *_ in poll.new_reads()]
    assert len(ats) >= 4
    assert all(0.9 < later - earlier < 1.1 for earlier, later in pairwise(ats))


def test_the_lock_of_a_new_waiter_is_read_even_without_a_change() -> None:
    poll = Poll()
    poll.until(2)
    poll.new_reads()
    poll.items["new"] = lock("new", free=True)
    if poll.poller.add(poll.waiter("new")):
        poll.poller.wake_up()
    poll.go()

    assert poll.new_reads() == [(2, ["new"], True)]
    assert poll.woken == ["new"]


def test_a_failed_read_after_a_change_is_retried() -> None:
    poll = Poll()
    poll.until(2)
    poll.new_reads()
    poll.failure = LockUnavailableError("throttled", maybe_applied=False)
    poll.poller.changed(["k"])
    poll.go()
    poll.failure = None
    poll.until(4)

    assert poll.new_reads() == [(2, ["k"], True), (3, ["k"], True)]


def test_a_dead_holder_is_detected_when_its_lease_ends_and_not_at_the_next_poll() -> None:
    poll = Poll(5.0)
    poll.items["k"] = lock("k", lease=12.3)
    poll.until(5.0)
    poll.poller.changed(["k"])  # its last heartbeat
    poll.go()
    poll.new_reads()
    poll.until(17.2)
    assert poll.woken == []

    poll.until(17.5)
    assert poll.woken == ["k"]
    assert poll.new_reads() == [(17.3, ["k"], True)]


def test_a_holder_that_is_dead_by_server_time_is_detected_too() -> None:
    """A newcomer does not have to observe a long-dead holder for a whole lease."""
    observer = Observer()
    format_ = NativeFormat(TABLE)
    item = lock("k", lease=100)
    item["holders"]["M"]["a"]["M"]["renewed_at"] = {"N": "1000000"}
    now_ms = 1_000_000 + 95_000
    reply = Reply({}, sent_at=50.0, received_at=50.0, server_ms=now_ms)
    record = format_.record(item, now_ms)
    observer.see(record, reply)

    due = observer.next_death(record, reply)

    assert due == pytest.approx(50 + 5 + 10 + 1)
    then = Reply({}, sent_at=due, received_at=due, server_ms=now_ms + round((due - 50) * 1000) // 1000 * 1000)
    assert observer.see(record, then)
