"""Generates docs/performance.md and its figures from the results and the template ``performance.md.jinja``."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from bench.contestants import OURS, OURS_WITH_STREAMS, RIVALS
from bench.environments import ROOT, python_of

PAGE = ROOT / "docs" / "performance.md"
FIGURES = ROOT / "docs" / "performance"
#: Part of a trigger, as `airflow_dynamo_lock.airflow.time_line` names it → what the page says of it.
TRIGGER_PARTS = {
    "total": "**the whole trigger**",
    "task state": "question to Airflow: is the task still deferred?",
    "connection": "connection",
    "client": "client",
    "grant": "write to DynamoDB",
    "result": "XCom of the lease",
    "end": "event",
}


@dataclass(frozen=True)
class Target:
    """A performance target.

    :ivar text: the target in words.
    :ivar found: the measured value, as the page shows it.
    :ivar met: whether the measured value reaches the target.
    :ivar part: the part of the benchmarks that has measured it.
    """

    text: str
    found: str
    met: bool
    part: str


def write(results: Mapping[str, Any]) -> None:
    """Write the page, and draw its figures."""
    PAGE.write_text(text(results))
    _draw(results)


def text(results: Mapping[str, Any]) -> str:
    """Return the text of the page."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # noqa: S701 - it is not HTML
    )
    template = environment.get_template("performance.md.jinja")
    rendered = template.render(
        **results, results=results, targets=_targets(results), trigger_parts=TRIGGER_PARTS
    )
    return rendered.rstrip() + "\n"


def _draw(results: Mapping[str, Any]) -> None:
    """Draw the figures, in a process with matplotlib."""
    FIGURES.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(results, file)
        file.flush()
        command = [str(python_of("plots")), "-m", "bench.plots", file.name, str(FIGURES)]
        subprocess.run(command, cwd=ROOT, check=True)


def _targets(results: Mapping[str, Any]) -> list[Target]:
    """Return the targets of all parts that were measured."""
    targets: dict[str, Callable[[Mapping[str, Any]], Iterator[Target]]] = {
        "requests": _requests_targets,
        "speed": _speed_targets,
        "distance": _distance_targets,
        "handover": _handover_targets,
        "recovery": _recovery_targets,
        "waiting": _waiting_targets,
        "airflow": _airflow_targets,
    }
    return [
        target
        for part, targets_of in targets.items()
        if part in results
        for target in targets_of(results[part])
    ]


def _requests_targets(requests: Mapping[str, Any]) -> Iterator[Target]:
    cycle = requests["cycle"]
    ours = cycle[OURS.name]["later"]["requests"]
    others = {each.name: cycle[each.name]["later"]["requests"] for each in RIVALS}
    yield Target(
        "2 requests per uncontended cycle; the others 3 or more",
        f"{ours:g}; {', '.join(f'{name} {value:g}' for name, value in others.items())}",
        ours == 2 and min(others.values()) >= 3,
        "requests",
    )


def _speed_targets(speed: Mapping[str, Any], part: str = "speed", condition: str = "") -> Iterator[Target]:
    for workers, contestants in speed["workers"].items():
        case = f"{workers} worker{'s' if workers != '1' else ''}{condition}"
        best = min((each.name for each in RIVALS), key=lambda name: contestants[name]["ours_to_it"]["median"])
        ratio = contestants[best]["ours_to_it"]
        yield Target(
            f"cycles per second, {case}: at least 1.4 times the best other",
            f"{_range(ratio)} times {best}",
            ratio["median"] >= 1.4,
            part,
        )
        floor = contestants[OURS.name]["of_the_floor"]
        yield Target(
            f"cycles per second, {case}: at least 0.85 of the floor",
            _range(floor),
            floor["median"] >= 0.85,
            part,
        )


def _distance_targets(distance: Mapping[str, Any]) -> Iterator[Target]:
    yield from _speed_targets(distance, "distance", ", 5 ms of delay")


def _handover_targets(handover: Mapping[str, Any]) -> Iterator[Target]:
    interval = handover["poll_interval"]
    for contenders in ("2", "50"):
        median = handover[contenders][OURS.name]["p50"]
        yield Target(
            f"hand-over between {contenders} contenders: median within a poll interval",
            f"{median:.2f} s of {interval:g} s",
            median <= interval,
            "handover",
        )
        median = handover[contenders][OURS_WITH_STREAMS.name]["p50"]
        yield Target(
            f"hand-over between {contenders} contenders, with streams: median under 250 ms",
            f"{median * 1000:.0f} ms",
            median < 0.25,
            "handover",
        )


def _recovery_targets(recovery: Mapping[str, Any]) -> Iterator[Target]:
    longest = recovery["contestants"][OURS.name]["old"]["seconds"]["max"]
    yield Target(
        "lock of a dead holder, after its lease: acquired in under 1 s",
        f"{longest:.2f} s at most, with a lease of {recovery['lease']:g} s",
        longest < 1,
        "recovery",
    )


def _waiting_targets(waiting: Mapping[str, Any]) -> Iterator[Target]:
    case = waiting["cases"][-1]  # the largest
    requests = case["requests_per_second"]["max"] * waiting["poll_interval"]
    yield Target(
        "10,000 waiters on 1,000 keys: at most 12 requests per poll interval",
        f"{requests:.1f}, with {case['polls_per_minute']['median']:.0f} polls per minute",
        requests <= 12,
        "waiting",
    )
    cpu = case["cpu_seconds_per_minute"]["max"]
    yield Target(
        "10,000 waiters on 1,000 keys: at most a quarter of a core",
        f"{cpu / 60:.2f}",
        cpu <= 15,
        "waiting",
    )
    yield Target(
        "10,000 waiters on 1,000 keys: under 400 MB",
        f"{case['rss_mb']:.0f} MB",
        case["rss_mb"] < 400,
        "waiting",
    )


def _airflow_targets(airflow: Mapping[str, Any]) -> Iterator[Target]:
    if "time_line" in airflow:
        total = airflow["time_line"]["trigger"]["later"]["total"]
        yield Target(
            "in Airflow, the trigger that acquires a free lock: median at most 100 ms",
            f"{total['median']:.0f} ms",
            total["median"] <= 100,
            "airflow",
        )
    added = airflow["alone"]["locked"]["added_seconds"]
    yield Target(
        "in Airflow, a run alone: at most 4.5 s longer with the lock",
        f"{added:.1f} s",
        added <= 4.5,
        "airflow",
    )
    for dag, how, most in (("locked", "", 2.0), ("streamed", ", with streams", 1.6)):
        part = airflow["contending"][dag]
        handover, step = part["all_handovers"]["p50"], part["airflow_step"]["p50"]
        yield Target(
            f"in Airflow, a hand-over{how}: at most {most} times Airflow's own step from task to task",
            f"{handover / step:.2f}: {handover:.1f} s of {step:.1f} s",
            handover / step <= most,
            "airflow",
        )


def _range(spread: Mapping[str, Any]) -> str:
    return f"{spread['median']:.2f} ({spread['min']:.2f}–{spread['max']:.2f})"
