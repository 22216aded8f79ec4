"""``python -m proof.simulator``: play many histories, or tell one.

python -m proof.simulator --histories 100000     # so many, on all cores
python -m proof.simulator --minutes 60           # for so long, from a seed of its own (`make soak MINUTES=60`)
python -m proof.simulator --seed 4711            # play one again, and tell its story
python -m proof.simulator --seed 4711 --spoilt late-heartbeat
python -m proof.simulator --mutations            # in how many histories each spoilt protocol is found out
python -m proof.simulator --unit-test NAME…      # run the unit tests that mutations name, each under its mutation
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

from proof.simulator.history import play
from proof.simulator.many import Summary, find, play_many, quiet
from proof.simulator.mutations import MUTATIONS, spoilt

console = Console(highlight=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if all held, 1 if not."""
    parser = argparse.ArgumentParser(
        prog="python -m proof.simulator", description="Simulated histories of the lock."
    )
    parser.add_argument("--seed", type=int, help="play this one, and tell it")
    parser.add_argument("--spoilt", choices=MUTATIONS, help="with --seed: break this rule of the protocol")
    parser.add_argument("--histories", type=int, help="play so many")
    parser.add_argument("--minutes", type=float, help="play for so long")
    parser.add_argument("--first", type=int, help="the first seed of many; a random one by default")
    parser.add_argument(
        "--mutations", action="store_true", help="break each rule in turn, and see it found out"
    )
    parser.add_argument(
        "--unit-test",
        nargs="+",
        choices=[name for name, each in MUTATIONS.items() if each.test],
        help="run each under its mutation",
    )
    parser.add_argument("--idle", action="store_true", help="take only the time that nobody else wants")
    parser.add_argument("--report", type=Path, help="write the figures to this file, as JSON")
    chosen = parser.parse_args(arguments)
    if chosen.seed is not None:
        return tell(chosen.seed, chosen.spoilt)
    if chosen.unit_test is not None:
        return fail(chosen.unit_test)
    if chosen.mutations:
        return show_mutations(chosen.report)
    if chosen.histories is None and chosen.minutes is None:
        parser.error("say what to play: --seed, --histories, --minutes, --mutations or --unit-test")
    if chosen.idle and hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    first = random.SystemRandom().randrange(10**9) if chosen.first is None else chosen.first
    return show_many(first, chosen.histories, chosen.minutes, chosen.report)


def tell(seed: int, mutation: str | None) -> int:
    """One history, line by line."""
    with quiet(), spoilt(mutation):
        verdict = play(seed, tell=print)
    console.print(
        f"\nSeed {seed}, {verdict.lasted:.0f} s, {verdict.grants} grants heard of; {dict(verdict.faults)}"
    )
    for violation in verdict.violations:
        console.print(f"[red]{violation}[/]", soft_wrap=True)
    return 1 if verdict.violations else 0


def show_many(first: int, histories: int | None, minutes: float | None, report: Path | None) -> int:
    """Many, with what was done to them."""
    begun = time.monotonic()
    with console.status("playing") as status:

        def told(summary: Summary) -> None:
            status.update(f"{summary.histories:,} histories, {len(summary.bad)} bad")

        summary = play_many(first, histories, minutes, told)
    took = time.monotonic() - begun
    table = Table(
        title=f"{summary.histories:,} histories from seed {first}, in {took:.0f} s", title_justify="left"
    )
    table.add_column("")
    table.add_column("times", justify="right")
    table.add_row("simulated seconds", f"{summary.seconds:,.0f}")
    table.add_row("grants heard of", f"{summary.grants:,}")
    for fault, times in sorted(summary.faults.items()):
        table.add_row(fault, f"{times:,}")
    console.print(table)
    for verdict in summary.bad[:20]:
        console.print(f"[red]seed {verdict.seed}: {verdict.violations[0]}[/]", soft_wrap=True)
    if summary.bad:
        console.print(
            f"{len(summary.bad)} did not hold. The first: python -m proof.simulator --seed {summary.bad[0].seed}"
        )
    else:
        console.print("All invariants held in all of them.")
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
    return 1 if summary.bad else 0


def fail(mutations: Sequence[str]) -> int:
    """0 if the unit test that each mutation names fails under it, 1 if not."""
    passed = []
    for mutation in mutations:
        for name in [name for name in sys.modules if name.startswith("tests.") and "histories" not in name]:
            del sys.modules[name]  # the test is to import what the mutation has changed
        with spoilt(mutation):
            outcome = pytest.main(
                [
                    "--quiet",
                    "--exitfirst",
                    "--tb=no",
                    "-p",
                    "no:cacheprovider",
                    MUTATIONS[mutation].test or "",
                ]
            )
        if outcome != pytest.ExitCode.TESTS_FAILED:
            passed.append(mutation)
    if passed:
        console.print(f"Broken, and the unit test does not fail: {', '.join(passed)}", soft_wrap=True)
    return 1 if passed else 0


# So many histories are played until a broken rule counts as one that nothing shows.
MOST = 20_000


def show_mutations(report: Path | None) -> int:
    """Each rule broken, and the first history that shows it."""
    table = Table("broken rule", "found in history", "as", title="Spoilt protocols", title_justify="left")
    names = [name for name, each in MUTATIONS.items() if each.test is None]
    with ProcessPoolExecutor() as pool:
        found = dict(zip(names, pool.map(partial(find, most=MOST), names), strict=True))
    for name, verdict in found.items():
        what = (str(verdict.seed + 1), verdict.violations[0]) if verdict else ("[red]never[/]", "")
        table.add_row(f"{name}\n{MUTATIONS[name].rule}", *what)
    console.print(table)
    if report is not None:
        seeds = {name: verdict.seed if verdict else None for name, verdict in found.items()}
        report.write_text(json.dumps(seeds, indent=2) + "\n")
    return 0 if all(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
