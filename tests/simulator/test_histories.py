"""The invariants hold in very many histories, and are violated if a rule or an assumption is broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from airflow_dynamo_lock.client import clock
from proof.simulator.history import play
from proof.simulator.many import find, play_some, quiet
from proof.simulator.mutations import MUTATIONS
from proof.simulator.world import Assumptions

#: Maximum number of histories, from the known seed on, in which a broken rule must be detected. A change to the
#: core changes which seeds detect it: `test_a_broken_rule_is_detected` then asks for another seed.
MOST = 100


#: Number of histories in `make test`, and in each part that one of its workers plays.
HISTORIES, PART = 2_000, 250

#: After the first batch, send SIGINT to all processes, as a terminal does. The batches are short.
INTERRUPT = """
import os, signal
from proof.simulator import many

many.BATCH = 5
summary = many.play_many(1, 1_000_000, on_progress=lambda _: os.killpg(0, signal.SIGINT))
print(summary.histories, summary.interrupted)
"""


@pytest.fixture(scope="session")
def player() -> Iterator[ProcessPoolExecutor]:
    """Start a process that only plays histories.

    In the process of the tests, clients of other tests may have left threads, and each of their clock reads would
    change a history.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        yield executor


@pytest.mark.parametrize("first", range(1, HISTORIES + 1, PART))
def test_the_invariants_hold_in_all_histories(player: ProcessPoolExecutor, first: int) -> None:
    verdicts = player.submit(play_some, range(first, first + PART)).result()
    assert {each.seed: each.violations for each in verdicts if each.violations} == {}
    assert sum(each.grants for each in verdicts) > 3 * PART


@pytest.mark.proof
@pytest.mark.timeout(0)  # HISTORIES says how long it takes
def test_the_invariants_hold_in_very_many_histories(tmp_path: Path) -> None:
    histories = int(os.environ.get("HISTORIES", "10000"))
    report = tmp_path / "histories.json"
    play = [sys.executable, "-m", "proof.simulator", "--first", "1", "--histories", str(histories)]
    # It uses all cores for minutes, so the other tests get a higher priority.
    subprocess.run(["nice", *play, "--report", str(report)], stdout=subprocess.DEVNULL, check=False)
    figures = json.loads(report.read_text())

    assert figures["violations"] == {}
    assert figures["histories"] == histories
    assert figures["grants"] > 3 * figures["histories"]
    print(json.dumps(figures, indent=2))


def test_a_report_is_written_into_a_new_folder(tmp_path: Path) -> None:
    report = tmp_path / "new" / "histories.json"
    play = [sys.executable, "-m", "proof.simulator", "--first", "1", "--histories", "1"]
    run = subprocess.run([*play, "--report", str(report)], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    assert json.loads(report.read_text())["histories"] == 1


def test_after_an_interrupt_the_histories_until_then_are_reported() -> None:
    run = subprocess.run(
        [sys.executable, "-c", INTERRUPT], capture_output=True, text=True, start_new_session=True
    )
    assert (run.stdout, run.stderr) == ("5 True\n", "")


def test_the_unit_test_of_each_mutation_fails_under_it() -> None:
    names = [name for name, each in MUTATIONS.items() if each.test is not None]
    run = subprocess.run(
        [sys.executable, "-m", "proof.simulator", "--unit-test", *names], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]


@pytest.mark.parametrize("name", [name for name, each in MUTATIONS.items() if each.test is None])
def test_a_broken_rule_is_detected(player: ProcessPoolExecutor, name: str) -> None:
    first = MUTATIONS[name].seed
    (correct,) = player.submit(play_some, [first]).result()
    assert correct.violations == (), "there must be no violation without the mutation"
    assert player.submit(find, name, MOST, first).result(), (
        f"{MUTATIONS[name].rule}: broken, but no history from {first} on detects it. Find one with "
        f"find({name!r}, 10_000), and set it as the seed of this mutation."
    )


@pytest.mark.parametrize(
    ("broken", "first"),
    [(Assumptions(rates=0.2), 56), (Assumptions(skew=20.0), 0)],
    ids=[
        "clocks at rates that differ by more than the margin",
        "servers whose clocks differ by more than allowed",
    ],
)
def test_a_broken_assumption_is_detected(
    player: ProcessPoolExecutor, broken: Assumptions, first: int
) -> None:
    verdicts = (player.submit(play_some, [seed], broken).result()[0] for seed in range(first, first + MOST))
    assert any("counted on" in violation for verdict in verdicts for violation in verdict.violations)


@pytest.mark.parametrize("seed", ["11", "73"])
def test_a_history_is_the_same_each_time(seed: str) -> None:
    """Whatever differs between two Python processes, such as the iteration order of sets."""
    stories = {
        subprocess.run(
            [sys.executable, "-m", "proof.simulator", "--seed", seed],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2", "3")
    }
    assert len(stories) == 1
    assert " as " in stories.pop()


def test_a_history_that_another_thread_may_have_changed_is_an_error() -> None:
    reader = threading.Thread(target=clock.monotonic, name="dynamo-lock heartbeat")

    def on_first_line(line: str) -> None:
        if reader.ident is None:
            reader.start()
            reader.join()

    with quiet(), pytest.raises(RuntimeError, match="dynamo-lock heartbeat"):
        play(11, log_line=on_first_line)
