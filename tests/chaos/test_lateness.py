"""The report finds late hand-overs, shows what led to them, and excuses those that lacked processor time."""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deployments.patience import PATIENCE
from deployments.proxy import Seen
from proof.chaos.evidence import Evidence, Incident
from proof.chaos.exchanges import Exchange, Exchanges
from proof.chaos.log import Event
from proof.chaos.records import Held, Record
from proof.chaos.report import report
from proof.chaos.starvation import OWN, Lag, Meter, measured, seconds_lost

FIRST, SECOND = "0999/000000000000007/x", "0999/000000000000008/y"


def a_record(at: float, token: int, holder: str | None, head: str | None) -> Record:
    holders = {} if holder is None else {holder: Held(holder, 1, 6.0, f"v{at}", False, at)}
    return Record(at, at, "mutex", "write", token, 1, 1 - len(holders), holders, head)


def a_run(
    granted_at: float,
    *,
    place: str = FIRST,
    lags: list[Lag] | None = None,
    incidents: list[Incident] | None = None,
) -> Evidence:
    """A lock that is released at 20, and granted at `granted_at` to a process that has waited since 15."""
    request = {"use": "1", "key": "mutex", "slots": 1, "capacity": 1}
    lease = {"key": "mutex", "lease_id": "b", "token": 2, "slots": 1, "capacity": 1, "lease_ms": 6000}
    grant = {"use": "1", "lease": lease, "until": granted_at + 5, "reclaimed": []}
    return Evidence(
        engine="none",
        began=0,
        calm=100,
        ended=100,
        dated=False,
        events=[
            Event(15, "p1", 1, "requested", request),
            Event(granted_at, "p1", 1, "granted", grant),
        ],
        incidents=incidents or [],
        histories={
            "mutex": [
                a_record(10, 1, "a", None),
                a_record(16, 1, "a", FIRST),
                a_record(20, 1, None, FIRST),
                a_record(granted_at, 2, "b", None),
            ]
        },
        links={"p1": "link 1"},
        exchanges=[
            Exchange(16, 15.9, "link 1", "mutex", "PutItem", "applied", place, "p1", "b"),
            Exchange(20.5, 20.4, "link 1", "mutex", "reads", "1 free"),
        ],
        lags=lags or [],
    )


@pytest.mark.parametrize(
    ("seconds", "place", "found"),
    [
        (2.0, FIRST, []),
        (2.5, FIRST, ["lateness"]),
        (6.5, SECOND, []),  # after passing over the first waiter
        (7.5, SECOND, ["lateness"]),
    ],
)
def test_a_hand_over_that_takes_longer_than_documented_is_a_violation(
    seconds: float, place: str, found: list[str]
) -> None:
    violations = report(a_run(20 + seconds, place=place)).violations
    assert [each.what for each in violations] == found


@pytest.mark.parametrize(("place", "found"), [(FIRST, ["lateness"]), (SECOND, [])])
def test_a_waiter_with_another_lease_id_than_its_entry_is_identified_by_its_deletion(
    place: str, found: list[str]
) -> None:
    run = a_run(24, place=place)
    entry, *others = run.exchanges
    deletes = [
        Exchange(at, at - 0.05, "link 1", "mutex", "DeleteItem", "applied", place) for at in (23.9, 26)
    ]
    exchanges = [replace(entry, lease_id="before the outage"), *others, *deletes]

    violations = report(replace(run, exchanges=exchanges)).violations
    assert [each.what for each in violations] == found


def test_the_details_show_the_waiters_the_reads_and_the_answers() -> None:
    (late,) = report(a_run(24, incidents=[Incident("SIGSTOP", 21, 22, process=9)])).violations
    for part in (
        "released: 4.00 s, bound 1.25 s",
        f"in the queue: p1 ({FIRST})",
        "0.500  link 1: reads, sent 0.400: 1 free",
        "1.000  SIGSTOP begins for process 9",
        "4.000  process 1, p1: granted",
    ):
        assert part in late.details


def test_a_waiter_that_lacked_processor_time_is_excused() -> None:
    assert report(a_run(24, lags=[Lag(1, 22, 1.0), Lag(OWN, 23, 0.9)])).violations == []
    assert report(a_run(24, lags=[Lag(1, 22, 1.0)])).violations != []
    assert report(a_run(24, lags=[Lag(1, 22, 1.0), Lag(2, 23, 0.9)])).violations != [], (
        "another process waited"
    )
    assert report(a_run(24, lags=[Lag(1, 19, 5.0), Lag(1, 40, 5.0)])).violations != [], "at other times"


def test_a_waiter_that_waited_for_the_engine_is_excused() -> None:
    slow = Exchange(23.9, 21.0, "link 1", "mutex", "Query", "1 free")
    for exchange, excused in (
        (slow, True),
        (replace(slow, link="link 2"), False),
        (replace(slow, at=21.5), False),
    ):
        run = a_run(24)
        violations = report(replace(run, exchanges=[*run.exchanges, exchange])).violations
        assert (violations == []) is excused


def test_a_waiter_that_was_stopped_is_excused() -> None:
    assert report(a_run(24, incidents=[Incident("SIGSTOP", 21, 22, process=1)])).violations == []


def test_waits_for_a_processor_are_read_from_the_kernel(tmp_path: Path) -> None:
    def a_thread(pid: int, thread: int, waited: float) -> None:
        path = tmp_path / f"{pid}/task/{thread}/schedstat"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"123456 {round(waited * 1e9)} 7\n")

    a_thread(os.getpid(), 1, 9.0)  # before the run
    meter = Meter(lambda: {1: 100, 2: 200, 3: 300}, tmp_path)  # the third has ended
    a_thread(100, 100, 5.0)
    a_thread(200, 200, 1.0)
    assert list(meter.measure(10.0)) == [Lag(1, 10.0, 5.0), Lag(2, 10.0, 1.0)]
    a_thread(100, 100, 5.5)
    a_thread(100, 101, 0.75)
    lags = list(meter.measure(10.1))

    assert lags == [Lag(1, 10.1, 0.75)]
    assert seconds_lost(lags, 1, 9.0, 9.5) == 0.75
    assert seconds_lost(lags, 1, 8.0, 9.0) == seconds_lost(lags, 1, 10.2, 11.0) == 0


def test_waits_are_measured_during_the_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    measurements, measured_twice = itertools.count(1), threading.Event()

    def measure(_: Meter, now: float) -> list[Lag]:
        if next(measurements) == 2:
            measured_twice.set()
        return [Lag(1, now, 1.0)]

    monkeypatch.setattr(Meter, "measure", measure)
    with measured(dict) as lags:
        assert measured_twice.wait(PATIENCE)
    assert len(lags) >= 2
    assert {(each.process, each.seconds) for each in lags} == {(1, 1.0)}


@pytest.mark.skipif(sys.platform != "linux", reason="the counters are those of Linux")
def test_the_kernel_counts_the_waits_of_this_process() -> None:
    assert str(os.getpid()) in Meter(dict).waited(os.getpid())


def answered(action: str, params: dict[str, Any], status: int, output: dict[str, Any]) -> list[Exchange]:
    exchanges = Exchanges()
    seen = Seen(action, action, params.get("Key", {}).get("key", {}).get("S"), 0.0, params)
    exchanges.on_answer("link", seen, status, json.dumps(output).encode())
    return exchanges.all


def test_an_exchange_shows_the_items_of_the_answer() -> None:
    holder = {"owner": {"S": "me"}}
    lock = {
        "key": {"S": "mutex"},
        "holders": {"M": {"a": {"M": holder}}},
        "available": {"N": "0"},
        "token": {"N": "7"},
        "queue_head": {"S": "0999/1"},
    }
    shown = "0 free, token 7, held by ['me'], head 0999/1"
    waiter = {
        "key": {"S": "mutex"},
        "entry": {"S": f"waiter/{FIRST}"},
        "owner": {"S": "you"},
        "lease_id": {"S": "b"},
    }
    keys = [{"key": {"S": key}} for key in ("mutex", "groups", "waiting:x")]

    read = answered(
        "BatchGetItem", {"RequestItems": {"t": {"Keys": keys}}}, 200, {"Responses": {"t": [lock]}}
    )
    assert [(each.key, each.answer) for each in read] == [("mutex", shown), ("groups", "nothing, status 200")]
    query = {"ExpressionAttributeValues": {":key": {"S": "mutex"}}}
    (looked,) = answered("Query", query, 200, {"Items": [lock, waiter]})
    assert looked.answer == f"{shown}; queue: you"
    refusal = {"__type": "com.amazonaws#ConditionalCheckFailedException", "Item": lock}
    (refused,) = answered("UpdateItem", {"Key": {"key": {"S": "mutex"}}}, 400, refusal)
    assert refused.answer == f"ConditionalCheckFailedException: {shown}"
    (put,) = answered("PutItem", {"Item": waiter}, 200, {})
    assert (put.place, put.owner, put.lease_id, put.answer) == (FIRST, "you", "b", "applied")
    assert answered("UpdateItem", {"Key": {"key": {"S": "waiting:x"}}}, 200, {}) == []
