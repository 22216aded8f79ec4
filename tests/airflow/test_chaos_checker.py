"""The checks of `proof.airflow.chaos` find all violations in constructed ledgers, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from proof.airflow.chaos.report import SEVERAL, hand_overs, unfinished
from proof.airflow.chaos.state import StartedRun, Trouble
from proof.airflow.lease_uses import STOPPED_WITHIN, Exemptions, Ledger, violations

Line = dict[str, Any]


def process(
    pid: int, lease_id: str, token: int, first: float, last: float, last_valid: float | None = None
) -> list[Line]:
    """Return the lines of a process, one every 50 ms.

    :param first: time of the first line.
    :param last: time of the last line.
    :param last_valid: time of the last line in which the lease is valid. Default: all lines.
    """
    lines = []
    for number in range(round((last - first) / 0.05) + 1):
        at = round(first + 0.05 * number, 2)
        run = {"deployment": "north", "dag_id": "guarded", "run_id": f"run of {lease_id}", "task_id": "work"}
        remaining = 1.0 if last_valid is None or at <= last_valid else 0.0
        line = {"at": at, "key": "orders", "lease_id": lease_id, "token": token, "pid": pid}
        lines.append({**line, **run, "remaining": remaining})
    return lines


def ledger(folder: Path, *processes: list[Line]) -> Ledger:
    """Write a ledger with the lines of these processes."""
    path = folder / "ledger.jsonl"
    lines = sorted((line for each in processes for line in each), key=lambda line: line["at"])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Ledger(path)


def found(folder: Path, *processes: list[Line], exemptions: Exemptions | None = None) -> list[str]:
    """Return the violations in the ledger of these processes."""
    uses = ledger(folder, *processes).uses("orders")
    return [violation.what for violation in violations(uses, exemptions)]


def test_correct_turns_have_no_violations(tmp_path: Path) -> None:
    two_tasks = (
        process(1, "a", 7, 0, 1),
        process(2, "a", 7, 0.5, 2),
    )  # the lock excludes other runs, not other tasks
    assert found(tmp_path, *two_tasks, process(3, "b", 8, 2.5, 3)) == []


def test_an_overlap_is_found(tmp_path: Path) -> None:
    assert found(tmp_path, process(1, "a", 7, 0, 2), process(2, "b", 8, 1.95, 3)) == [
        "two leases in use at the same time"
    ]


def test_an_overlap_with_an_earlier_task_of_a_run_is_found(tmp_path: Path) -> None:
    quick = process(2, "a", 7, 1, 1.5)
    assert found(tmp_path, process(1, "a", 7, 0, 3), quick, process(3, "b", 8, 2, 4)) == [
        "two leases in use at the same time"
    ]


def test_an_overlap_after_the_lease_was_lost_is_found(tmp_path: Path) -> None:
    late = process(1, "a", 7, 0, 2, last_valid=1)
    assert found(tmp_path, late, process(2, "b", 8, 1.5, 3)) == ["two leases in use at the same time"]


@pytest.mark.parametrize("token", [7, 6])
def test_a_token_that_does_not_grow_is_found(tmp_path: Path, token: int) -> None:
    turns = process(1, "a", 7, 0, 1), process(2, "b", token, 2, 3)
    assert found(tmp_path, *turns) == ["a fencing token that did not increase"]


def test_a_token_smaller_than_an_earlier_one_is_found(tmp_path: Path) -> None:
    turns = process(1, "a", 7, 0, 1), process(2, "b", 9, 2, 3), process(3, "c", 8, 4, 5)
    assert found(tmp_path, *turns) == ["a fencing token that did not increase"]


def test_an_overlap_with_a_broken_lease_is_allowed_until_its_next_heartbeat(tmp_path: Path) -> None:
    turns = process(1, "a", 7, 0, 4, last_valid=3), process(2, "b", 8, 2, 5)
    assert found(tmp_path, *turns, exemptions=Exemptions(broken={"a": (1.5, 3.5)})) == []
    (late,) = found(tmp_path, *turns, exemptions=Exemptions(broken={"a": (1.5, 2.5)}))
    assert "0.50 s too long after a break" in late


def test_an_overlap_before_a_break_is_found(tmp_path: Path) -> None:
    turns = process(1, "a", 7, 0, 4, last_valid=3), process(2, "b", 8, 1, 5)
    assert found(tmp_path, *turns, exemptions=Exemptions(broken={"a": (1.5, 3.5)})) == [
        "two leases in use at the same time"
    ]


def test_a_resumed_process_may_write_until_it_detects_the_loss(tmp_path: Path) -> None:
    turns = process(1, "a", 7, 0, 1) + process(1, "a", 7, 9, 9.1, last_valid=0)
    paused = Exemptions()
    paused.resumed[1].append(8.9)
    assert found(tmp_path, turns, process(2, "b", 8, 8, 12), exemptions=paused) == []


def test_a_resumed_process_must_not_rely_on_its_lease(tmp_path: Path) -> None:
    turns = process(1, "a", 7, 0, 1) + process(1, "a", 7, 9, 9.1)
    paused = Exemptions()
    paused.resumed[1].append(8.9)
    assert found(tmp_path, turns, process(2, "b", 8, 8, 12), exemptions=paused) == [
        "two leases in use at the same time"
    ]


def test_a_process_that_does_not_stop_is_found(tmp_path: Path) -> None:
    (late,) = found(tmp_path, process(1, "a", 7, 0, 2 + STOPPED_WITHIN, last_valid=1))
    assert "after its lease was lost" in late


def test_a_ledger_is_read_while_it_is_written(tmp_path: Path) -> None:
    first, second = process(1, "a", 7, 0, 1), process(1, "a", 7, 1.05, 2)
    book = ledger(tmp_path, first)
    assert [use.last for use in book.uses()] == [1.0]
    *complete, torn = (json.dumps(line) for line in second)
    with book.path.open("a") as file:
        file.write("\n".join([*complete, torn[:20]]))
    assert [use.last for use in book.uses()] == [1.95]
    with book.path.open("a") as file:
        file.write(torn[20:] + "\n")
    assert [use.last for use in book.uses()] == [2.0]


def test_a_run_that_never_ends_is_found() -> None:
    assert unfinished({"a": "success", "b": "running", "c": "failed", "d": "queued"}) == ["b", "d"]


def test_hand_overs_are_classified_by_the_events_before_them(tmp_path: Path) -> None:
    turns = [process(number, str(number), number, 10 * number, 10 * number + 5) for number in range(1, 7)]
    uses = ledger(tmp_path, *turns).uses()
    runs = {
        ("north", "guarded", use.run_id): StartedRun(
            None,  # type: ignore[arg-type]
            "guarded",
            use.run_id,
            "orders",
            ending="run ends normally",
            wanted_at=[0] if use.pid < 6 else [0, 54],  # cleared too late to have waited `WAITING_AFTER`
        )
        for use in uses
    }
    troubles = [
        Trouble("process killed", 22, 22, lease_id="2"),
        Trouble("triggerer paused", 36, 37, deployment="north"),
        Trouble("triggerer paused", 46, 47),
        Trouble("process killed", 44, 44, lease_id="4"),
    ]
    took = hand_overs(uses, runs, troubles, Exemptions())
    assert [(each.after, each.seconds) for each in took] == [
        ("run ends normally", 5),
        ("process killed", 5),
        ("triggerer paused", 5),
        (SEVERAL, 5),
    ]
