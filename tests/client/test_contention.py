"""Threads, coroutines and processes contend for one lock, in both kinds of clients: there are never two holders, tokens
grow in the order of the grants, and each contender gets its turns.
"""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest

from deployments.clients import KINDS
from deployments.engines import DynamoDBLocal, Engine
from tests.client.contender import Contenders, Entry, contend, most_inside

pytestmark = pytest.mark.proof


@pytest.fixture
def ledger(tmp_path: Path) -> str:
    return str(tmp_path / "ledger")


def _assert_one_at_a_time(ledger: list[Entry]) -> None:
    for first, second in zip(ledger[::2], ledger[1::2], strict=True):
        assert (first.entered, second.entered) == (True, False)
        assert (first.member, first.token) == (second.member, second.token), "another member was inside"
    tokens = [entry.token for entry in ledger if entry.entered]
    assert all(earlier < later for earlier, later in itertools.pairwise(tokens))


def _turns(ledger: list[Entry]) -> Counter[str]:
    return Counter(entry.member for entry in ledger if entry.entered)


@pytest.mark.parametrize("kind", KINDS)
def test_two_contenders_in_one_process_take_turns(engine: Engine, key: str, ledger: str, kind: str) -> None:
    wrote = contend([Contenders(kind, engine.endpoint_url, key, ledger, members=2, rounds=8)], within=180)

    _assert_one_at_a_time(wrote)
    assert list(_turns(wrote).values()) == [8, 8]


def test_two_processes_take_turns(engine: Engine, key: str, ledger: str) -> None:
    wrote = contend(
        [
            Contenders(kind, engine.endpoint_url, key, ledger, members=1, rounds=10, poll_interval=0.02)
            for kind in KINDS
        ],
        within=180,
    )

    _assert_one_at_a_time(wrote)
    assert list(_turns(wrote).values()) == [10, 10]


def test_two_hundred_contenders_in_eight_processes_take_turns(engine: Engine, key: str, ledger: str) -> None:
    # moto answers one request after the other: on a slow machine, 200 at once are not answered in time.
    members = 25 if isinstance(engine, DynamoDBLocal) else 6
    wrote = contend(
        [
            Contenders(kind, engine.endpoint_url, key, ledger, members=members)
            for kind in KINDS
            for _ in range(4)
        ],
        within=180,
    )

    _assert_one_at_a_time(wrote)
    assert len(_turns(wrote)) == 8 * members


def test_at_most_three_contenders_share_three_slots(engine: Engine, key: str, ledger: str) -> None:
    wrote = contend(
        [
            Contenders(kind, engine.endpoint_url, key, ledger, members=6, rounds=5, capacity=3)
            for kind in KINDS
            for _ in range(2)
        ],
        within=180,
    )

    # The first holder stays until a second one has entered.
    assert 2 <= most_inside(wrote) <= 3
    assert list(_turns(wrote).values()) == [5] * 24
    tokens = [entry.token for entry in wrote if entry.entered]
    assert len(set(tokens)) == len(tokens)
