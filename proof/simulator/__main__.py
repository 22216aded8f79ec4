"""``python -m proof.simulator``: play many simulated histories, or one with its log.

python -m proof.simulator --histories 100000   # play this number of histories, on all cores
python -m proof.simulator --minutes 60         # play histories for an hour (`make soak MINUTES=60`)
python -m proof.simulator --seed 4711          # play one history and print its log
python -m proof.simulator --seed 4711 --spoilt late-heartbeat   # the same with a broken rule
python -m proof.simulator --mutations          # break each rule, and find a history that detects it
python -m proof.simulator --unit-test NAME…    # run the unit tests that detect these broken rules
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from proof.reports import add_report_option
from proof.simulator.history import play
from proof.simulator.many import BATCH, Summary, find, play_many, quiet
from proof.simulator.mutations import MUTATIONS, spoilt

console = Console(highlight=False)

#: Maximum number of histories to play in search of one that detects a mutation.
MAX_HISTORIES = 20_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status: 0 if there are no violations, else 1; 130 after an interrupt."""
    parser = argparse.ArgumentParser(
        prog="python -m proof.simulator", description="Play simulated histories of the lock."
    )
    parser.add_argument("--seed", type=int, help="play the history of this seed and print its log")
    parser.add_argument(
        "--spoilt", choices=MUTATIONS, metavar="NAME", help="with --seed: name of the rule to break"
    )
    parser.add_argument("--histories", type=int, help="number of histories to play")
    parser.add_argument("--minutes", type=float, help="time for which to play histories, in minutes")
    parser.add_argument("--first", type=int, help="first seed of many histories (default: a random one)")
    parser.add_argument(
        "--mutations", action="store_true", help="break each rule in turn, and find a history that detects it"
    )
    parser.add_argument(
        "--unit-test",
        nargs="+",
        metavar="NAME",
        choices=[name for name, each in MUTATIONS.items() if each.test],
        help="names of rules: break each one, and check that its unit test fails",
    )
    parser.add_argument("--idle", action="store_true", help="use only idle CPU time (Linux)")
    add_report_option(parser)
    options = parser.parse_args(arguments)
    if options.seed is not None:
        return show_one(options.seed, options.spoilt)
    if options.unit_test is not None:
        return run_unit_tests(options.unit_test)
    if options.mutations:
        return show_mutations(options.report)
    if options.histories is None and options.minutes is None:
        parser.error("one of --seed, --histories, --minutes, --mutations or --unit-test is required")
    if options.idle and hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    first = random.SystemRandom().randrange(10**9) if options.first is None else options.first
    return show_many(first, options.histories, options.minutes, options.report)


def show_one(seed: int, mutation: str | None) -> int:
    """Play one history and print its log and its violations. Returns the exit status."""
    with quiet(), spoilt(mutation):
        verdict = play(seed, log_line=print)
    console.print(
        f"\nSeed {seed}: {verdict.lasted:.0f} simulated seconds, {verdict.grants} grants; "
        f"faults: {dict(verdict.faults)}"
    )
    for violation in verdict.violations:
        console.print(f"[red]{violation}[/]", soft_wrap=True)
    return 1 if verdict.violations else 0


def show_many(first: int, histories: int | None, minutes: float | None, report: Path | None) -> int:
    """Play many histories, and print the number of faults and the violations. Returns the exit status.

    After an interrupt (Ctrl-C), the figures are those of the histories until then.
    """
    begun = time.monotonic()
    shown: list[int] = []  # seeds whose violations were printed
    with console.status("playing histories") as status:

        def show_progress(summary: Summary) -> None:
            progress = f"{summary.histories:,} histories, {len(summary.bad)} with violations"
            status.update(progress)
            if not console.is_terminal and summary.histories % 10_000 < BATCH:
                print(f"{progress}, after {time.monotonic() - begun:.0f} s", flush=True)
            for verdict in summary.bad[len(shown) :]:
                console.print(f"[red]seed {verdict.seed}: {verdict.violations[0]}[/]", soft_wrap=True)
                shown.append(verdict.seed)

        summary = play_many(first, histories, minutes, show_progress)
    took = time.monotonic() - begun
    table = Table(
        title=f"{summary.histories:,} histories from seed {first}, in {took:.0f} s", title_justify="left"
    )
    table.add_column("")
    table.add_column("times", justify="right")
    table.add_row("simulated seconds", f"{summary.seconds:,.0f}")
    table.add_row("grants", f"{summary.grants:,}")
    for fault, times in sorted(summary.faults.items()):
        table.add_row(fault, f"{times:,}")
    console.print(table)
    if summary.bad:
        console.print(
            f"{len(summary.bad)} histories have violations. Print the first one with "
            f"python -m proof.simulator --seed {summary.bad[0].seed}"
        )
    else:
        console.print("No violations.")
    if report is not None:
        figures = {
            "histories": summary.histories,
            "first seed": first,
            "wall-clock seconds": round(took),
            "simulated seconds": round(summary.seconds),
            "grants": summary.grants,
            "faults": dict(sorted(summary.faults.items())),
            "violations": {verdict.seed: verdict.violations for verdict in summary.bad},
        }
        report.write_text(json.dumps(figures, indent=2) + "\n")
    if summary.bad:
        return 1
    return 130 if summary.interrupted else 0


def run_unit_tests(mutations: Sequence[str]) -> int:
    """Run the unit test that each mutation names, under that mutation.

    :returns: exit status: 0 if all tests fail, else 1.
    """
    passed = []
    for mutation in mutations:
        # The test must import the mutated package, so modules of earlier tests are imported anew.
        for name in [name for name in sys.modules if name.startswith("tests.") and "histories" not in name]:
            del sys.modules[name]
        test = MUTATIONS[mutation].test or ""
        with spoilt(mutation):
            outcome = pytest.main(["--quiet", "--exitfirst", "--tb=no", "-p", "no:cacheprovider", test])
        if outcome != pytest.ExitCode.TESTS_FAILED:
            passed.append(mutation)
    if passed:
        console.print(
            f"The unit tests of these broken rules do not fail: {', '.join(passed)}", soft_wrap=True
        )
    return 1 if passed else 0


def show_mutations(report: Path | None) -> int:
    """Break each rule in turn, and print the first history that detects it.

    :returns: exit status: 0 if all broken rules are detected, else 1.
    """
    table = Table("broken rule", "histories", "first violation", title="Mutations", title_justify="left")
    names = [name for name, each in MUTATIONS.items() if each.test is None]
    with ProcessPoolExecutor() as pool:
        found = dict(zip(names, pool.map(partial(find, limit=MAX_HISTORIES), names), strict=True))
    for name, verdict in found.items():
        cells = (str(verdict.seed + 1), verdict.violations[0]) if verdict else ("[red]not found[/]", "")
        table.add_row(f"{name}\n{MUTATIONS[name].rule}", *cells)
    console.print(table)
    if report is not None:
        seeds = {name: verdict.seed if verdict else None for name, verdict in found.items()}
        report.write_text(json.dumps(seeds, indent=2) + "\n")
    return 0 if all(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
