"""docs/performance.md and its figures, from the results: nothing on that page is written by hand but its template."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from bench.contestants import OURS, OURS_WITH_STREAMS, RIVALS
from bench.environments import ROOT, python_of

PAGE = ROOT / "docs" / "performance.md"
FIGURES = ROOT / "docs" / "performance"


@dataclass(frozen=True)
class Target:
    """What was aimed at, and what was measured."""

    text: str
    found: str
    met: bool
    part: str


def write(results: Mapping[str, Any]) -> None:
    """Write the page and draw its figures."""
    PAGE.write_text(text(results))
    _draw(results)


def text(results: Mapping[str, Any]) -> str:
    """The page."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # noqa: S701 - it is not HTML
    )
    template = environment.get_template("performance.md.jinja")
    return template.render(**results, results=results, targets=_targets(results)).rstrip() + "\n"


def _draw(results: Mapping[str, Any]) -> None:
    FIGURES.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(results, file)
        file.flush()
        command = [str(python_of("plots")), "-m", "bench.plots", file.name, str(FIGURES)]
        subprocess.run(command, cwd=ROOT, check=True)


def _targets(results: Mapping[str, Any]) -> list[Target]:
    rivals = [each.name for each in RIVALS]
    targets = []
    if "requests" in results:
        cycle = results["requests"]["cycle"]
        ours = cycle[OURS.name]["later"]["requests"]
        others = {name: cycle[name]["later"]["requests"] for name in rivals}
        targets.append(
            Target(
                "2 requests per uncontended cycle, where each of the others needs 3 or more",
                f"{ours:g}; {', '.join(f'{name} {value:g}' for name, value in others.items())}",
                ours == 2 and min(others.values()) >= 3,
                "requests",
            )
        )
    for part, how in (("speed", ""), ("distance", ", each request 5 ms away")):
        for workers, contestants in results[part]["workers"].items() if part in results else ():
            who = f"{workers} worker{'s' if workers != '1' else ''}{how}"
            best = min(rivals, key=lambda name: contestants[name]["ours_to_it"]["median"])
            ratio = contestants[best]["ours_to_it"]
            targets.append(
                Target(
                    f"cycles per second, {who}: at least 1.4 times the best of the others",
                    f"{_range(ratio)} times {best}",
                    ratio["median"] >= 1.4,
                    part,
                )
            )
            floor = contestants[OURS.name]["of_the_floor"]
            targets.append(
                Target(
                    f"cycles per second, {who}: at least 0.85 of the floor",
                    _range(floor),
                    floor["median"] >= 0.85,
                    part,
                )
            )
    if "handover" in results:
        for contenders in ("2", "50"):
            p50 = results["handover"][contenders][OURS.name]["p50"]
            interval = results["handover"]["poll_interval"]
            targets.append(
                Target(
                    f"hand-over between {contenders} contenders: half of them within a poll interval",
                    f"{p50:.2f} s of {interval:g} s",
                    p50 <= interval,
                    "handover",
                )
            )
            p50 = results["handover"][contenders][OURS_WITH_STREAMS.name]["p50"]
            targets.append(
                Target(
                    f"hand-over between {contenders} contenders, with streams: half of them under 250 ms",
                    f"{p50 * 1000:.0f} ms",
                    p50 < 0.25,
                    "handover",
                )
            )
    if "recovery" in results:
        old = results["recovery"]["contestants"][OURS.name]["old"]
        targets.append(
            Target(
                "a corpse older than its lease is taken by a newcomer in one try",
                f"{old['seconds']['max']:.2f} s at most, of a lease of {results['recovery']['lease']:g} s",
                old["seconds"]["max"] < 1,
                "recovery",
            )
        )
    if "waiting" in results:
        most = results["waiting"]["cases"][-1]
        cpu = most["cpu_seconds_per_minute"]["max"]
        requests = most["requests_per_second"]["max"] * results["waiting"]["poll_interval"]
        targets += [
            Target(
                "10,000 waiters on 1,000 keys: at most 12 requests per poll interval",
                f"{requests:.1f}, in {most['looks_per_minute']['median']:.0f} looks a minute",
                requests <= 12,
                "waiting",
            ),
            Target(
                "10,000 waiters on 1,000 keys: at most a quarter of a core",
                f"{cpu / 60:.2f}",
                cpu <= 15,
                "waiting",
            ),
            Target(
                "10,000 waiters on 1,000 keys: under 400 MB",
                f"{most['rss_mb']:.0f} MB",
                most["rss_mb"] < 400,
                "waiting",
            ),
        ]
    return targets


def _range(spread: Mapping[str, Any]) -> str:
    return f"{spread['median']:.2f} (rounds: {spread['min']:.2f} to {spread['max']:.2f})"
