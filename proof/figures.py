"""Write the measured figures into docs/reliability.md: ``python -m proof.figures``.

`make figures` measures first, and writes the reports into ``.cache/figures``. A part of the page stays as it
is if its report is missing. The table of broken rules needs no report.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from matrix.page import as_markdown, replace_part
from proof.simulator.mutations import MUTATIONS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reliability.md"
REPORTS = ROOT / ".cache" / "figures"


def main() -> None:
    """Replace each part of the page between its markers."""
    replace_part(PAGE, "python -m proof.figures, broken rules", broken_rules())
    parts: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "histories": histories,
        "chaos": chaos,
        "chaos-airflow": chaos_airflow,
        "deadlocks": deadlocks,
    }
    for name, part in parts.items():
        report = REPORTS / f"{name}.json"
        if report.exists():
            replace_part(PAGE, f"make figures, {name}", part(json.loads(report.read_text())))


def broken_rules() -> str:
    """Return the table of mutations, with the history or the unit test that detects each."""
    by_test = sum(each.test is not None for each in MUTATIONS.values())
    rows = []
    for name, each in MUTATIONS.items():
        file = (each.test or "").split("::")[0]
        found = f"[{Path(file).name}](../{file})" if file else str(each.seed)
        rows.append((each.rule[0].upper() + each.rule[1:], f"`{name}`", found))
    return (
        f"Each of {len(MUTATIONS)} rules is broken in the real code, one at a time. A history detects "
        f"{len(MUTATIONS) - by_test} of them, a unit test the other {by_test}.\n\n"
        + as_markdown(("broken rule", "name", "found by seed or test"), rows)
    )


def histories(report: Mapping[str, Any]) -> str:
    """Return the figures of a report of `python -m proof.simulator`, as Markdown."""
    return (
        f"**Measured**: {report['histories']:,} histories from seed {report['first seed']}, "
        f"{report['simulated seconds'] / 3600:,.0f} simulated hours and\n{report['grants']:,} grants, in "
        f"{report['wall-clock seconds']:,} s. **Violations: {len(report['violations'])}.**\n\n"
        + _counts("Faults", report["faults"].items())
    )


def _counts(what: str, counts: Iterable[tuple[str, int]]) -> str:
    """Return a sentence that lists what was counted."""
    listed = "; ".join(f"{name} {count:,}" for name, count in counts)
    return textwrap.fill(f"{what}: {listed}.", 120) + "\n"


def chaos(report: Mapping[str, Any]) -> str:
    """Return the figures of a report of `make chaos`, as Markdown."""
    engines = report["engines"]
    heads = ("", *(each["engine"] for each in engines))
    counts = {
        "processes": "processes",
        "grants": "grants",
        "entered": "guarded processes that entered",
        "lost": "lost leases that their holder noticed",
    }
    rows = [(title, *(each[name] for each in engines)) for name, title in counts.items()]
    kinds = sorted({kind for each in engines for kind in each["disasters"]})
    rows += [(kind, *(each["disasters"].get(kind, "–") for each in engines)) for kind in kinds]
    bounds = {how: row["bound"] for each in engines for how, row in each["hand_overs"].items()}
    hand_overs = [
        (how, *(_hand_over(each["hand_overs"].get(how)) for each in engines), bound)
        for how, bound in bounds.items()
    ]
    minutes = round(max(each["chaos_seconds"] for each in engines) / 60)
    violations = sum(len(each["violations"]) for each in engines)
    waited = {
        kind: " and ".join(f"{each['longest_room'][kind]:.1f} s on {each['engine']}" for each in engines)
        for kind in ("plain lock", "semaphore")
    }
    return (
        f"**Measured**: {minutes} minutes on both engines at once (`make chaos SEED={report['seed']}`), with a lease "
        f"of {report['lease']:g} s and a\ngrace of {report['release_grace']:g} s. **Violations: {violations}.**\n\n"
        + as_markdown(heads, rows, numbers=True)
        + "\nSeconds from the last heartbeat or the release to the next grant, if no disaster affected "
        "the next holder: median,\nlongest (number).\n\n"
        + as_markdown(("end of the previous holder", *heads[1:], "bound"), hand_overs, numbers=True)
        + "\nLongest time that an undisturbed waiter waited although it could have been granted the lock: for a plain\n"
        + f"lock, {waited['plain lock']}; for a semaphore, {waited['semaphore']}.\n"
    )


def _hand_over(row: Mapping[str, Any] | None) -> str:
    if row is None or row["median"] is None:
        return "–"
    return f"{row['median']:.1f}, {row['longest']:.1f} ({row['undisturbed']})"


def chaos_airflow(report: Mapping[str, Any]) -> str:
    """Return the figures of a report of `make chaos-airflow`, as Markdown."""
    states = ", ".join(f"{count} {state}" for state, count in sorted(report["runs"].items()))
    rows = [
        (
            kind,
            report["troubles"].get(kind, "–"),
            after["times"],
            after["median_seconds"],
            after["longest_seconds"],
        )
        for kind, after in report["hand_overs"].items()
    ]
    others = [each for each in report["troubles"].items() if each[0] not in report["hand_overs"]]
    return (
        f"**Measured**: {report['minutes']:g} minutes (`make chaos-airflow SEED={report['seed']} "
        f"DEPLOYMENTS={report['deployments']}`), Airflow {report['airflow']}.\n"
        f"{sum(report['runs'].values())} runs ({states}), {report['stays']} processes inside "
        f"{report['leases']} leases, {sum(report['troubles'].values())} troubles.\n"
        f"The last run ended {report['settled_seconds']:.0f} s after the last trouble. "
        "A process whose lease was lost stopped within\n"
        f"{report['overtime_seconds']:.2f} s. **Violations: {len(report['violations'])}.**\n\n"
        + as_markdown(
            ("trouble", "times", "hand-overs after only this", "median, s", "longest, s"), rows, numbers=True
        )
        + ("\n" + _counts("Troubles without a hand-over after only them", others) if others else "")
    )


def deadlocks(report: Mapping[str, Any]) -> str:
    """Return the figures of a report of `python -m proof.airflow.deadlocks`, as Markdown."""
    kinds = {"2": "two runs in opposite orders", "3": "three runs in a ring"}
    rows = [
        (title, report["times"], kind["errors"], kind["median_seconds"], kind["longest_seconds"])
        for number, title in kinds.items()
        for kind in (report[number],)
    ]
    violations = sum(len(report[number]["violations"]) for number in kinds)
    return (
        f"**Measured**: `python -m proof.airflow.deadlocks --times {report['times']}`, two deployments. "
        f"**Violations: {violations}.**\n\n"
        + as_markdown(
            ("cycle", "times", "runs that ended with the error", "median, s", "longest, s"),
            rows,
            numbers=True,
        )
        + "\nSeconds from when the last of the runs began to wait until one of them logged the error.\n"
    )


if __name__ == "__main__":
    main()
