"""Draws the figures of docs/performance.md: ``python -m bench.plots RESULTS FOLDER``.

`bench.page` runs this module in a virtual environment with matplotlib.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt  # imported after the backend is set

COLOURS = {
    "floor": "#b8bec6",
    "ours": "#1f5fbf",
    "ours, with heartbeats": "#7aa6e8",
    "ours, unfair": "#5bb0c9",
    "ours, with streams": "#12356e",
    "python-dynamodb-lock": "#d98032",
    "dyndbmutex": "#a35c9e",
    "awsflock": "#5a9a6b",
}
#: The components in a time line (`bench.measure.time_line`).
COMPONENTS = {
    "scheduler": "#d9b38c",
    "triggerer": "#d98032",
    "executor and worker": "#8c98a8",
    "tasks": "#d5dae0",
    "this package": "#1f5fbf",
}
WIDTH = 9.0  # inches

mpl.rcParams.update(
    {
        "svg.hashsalt": "bench",  # the same results give the same files
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "figure.facecolor": "white",
        "figure.constrained_layout.use": True,
    }
)


def requests(results: Mapping[str, Any], path: Path) -> None:
    """Draw the requests per cycle, and per minute of waiting."""
    part = results["requests"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 2.8))
    cycle = {
        name: each["later"]["requests"] for name, each in part["cycle"].items() if "heartbeats" not in name
    }
    _bars(left, cycle, "Requests per cycle, uncontended", "{:g}")
    waiting: dict[str, float] = {}
    for each in part["waiting"]:  # the last case of each library polls once a second
        waiting[each["who"]] = each["requests"]
    _bars(right, waiting, "Requests per minute of waiting", "{:.0f}")
    _save(figure, path)


def speed(results: Mapping[str, Any], path: Path) -> None:
    """Draw the cycles per second: a bar for the median round, and a line from the slowest to the fastest."""
    workers = results["speed"]["workers"]
    panels = {f"{number} worker{'s' if number != '1' else ''}": each for number, each in workers.items()}
    if "distance" in results:
        part = results["distance"]
        panels[f"{part['delay_ms']:g} ms of delay"] = part["workers"]["1"]
    figure, axes = plt.subplots(1, len(panels), figsize=(WIDTH, 3.0), sharey=True)
    for axis, (title, contestants) in zip(axes, panels.items(), strict=True):
        rates = {name: each["cycles_per_second"] for name, each in contestants.items()}
        _bars(
            axis,
            {name: rate["median"] for name, rate in rates.items()},
            f"Cycles/s, {title}",
            "{:.0f}",
            [(rate["min"], rate["max"]) for rate in rates.values()],
        )
    _save(figure, path)


def handover(results: Mapping[str, Any], path: Path) -> None:
    """Draw the times from release to the next grant: a dot for the median, a line to the 99th percentile."""
    part = results["handover"]
    figure, axes = plt.subplots(1, 3, figsize=(WIDTH, 3.4), width_ratios=[1, 1, 0.9], sharey=True)
    for axis, contenders in zip(axes, ("2", "50"), strict=False):
        for row, (name, each) in enumerate(part[contenders].items()):
            axis.plot([each["p50"], each["p99"]], [row, row], color=COLOURS[name], linewidth=3, alpha=0.45)
            axis.plot(each["p50"], row, "o", color=COLOURS[name], markersize=8)
            axis.annotate(f"{each['p50']:.2f} s", (each["p50"], row), (-4, 8), textcoords="offset points")
        axis.axvline(part["poll_interval"], color="#888", linewidth=1, linestyle=":")
        axis.set_xlim(0, max(each["p99"] for each in part[contenders].values()) * 1.1)
        axis.set_title(f"Hand-over, {contenders} contenders, s")
        _rows(axis, list(part[contenders]))
    _bars(
        axes[2],
        {name: each["per_handover"]["requests"] for name, each in part["50"].items()},
        "Requests, 50 contenders",
        "{:.0f}",
    )
    _save(figure, path)


def waiting(results: Mapping[str, Any], path: Path) -> None:
    """Draw processor time and memory by number of waiters."""
    cases = results["waiting"]["cases"]
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 3.0))
    values = {
        "cpu": [each["cpu_seconds_per_minute"]["median"] for each in cases],
        "memory": [each["rss_mb"] for each in cases],
    }
    for axis, what, title, limit in (
        (axes[0], "cpu", "Processor seconds per minute", 15),
        (axes[1], "memory", "Resident memory of the process, MB", 400),
    ):
        for keys, colour in ((1, "#7aa6e8"), (1000, "#1f5fbf")):
            line = [
                (each["waiters"], value)
                for each, value in zip(cases, values[what], strict=True)
                if each["keys"] == keys
            ]
            label = "on 1 key" if keys == 1 else f"on {keys:,} keys"
            axis.plot(*zip(*line, strict=True), "o-", color=colour, label=label)
            axis.annotate(
                f"{line[-1][1]:.3g}",
                line[-1],
                (8, 3 if keys > 1 else -9),
                textcoords="offset points",
            )
        axis.axhline(limit, color="#c0392b", linewidth=1, linestyle=":")
        axis.annotate(f"target: {limit}", (1, limit), (0, -12), textcoords="offset points", color="#c0392b")
        axis.set_xscale("log")
        axis.set_xlim(0.7, 30_000)
        axis.set_xticks([1, 100, 1000, 10000], ["1", "100", "1,000", "10,000"])
        axis.minorticks_off()
        axis.set_ylim(-0.03 * limit, limit * 1.1)
        axis.set_xlabel("waiters in one process")
        axis.set_title(title)
        axis.legend(frameon=False, loc="center left")
    _save(figure, path)


def airflow(results: Mapping[str, Any], path: Path) -> None:
    """Draw `DynamoLock` and the workaround with a pool and a sensor."""
    part = results["airflow"]
    figure, axes = plt.subplots(1, 3, figsize=(WIDTH, 2.0), sharey=True)
    names = {"locked": "DynamoLock", "flagged": "pool and sensor"}
    for axis, title, values in (
        (
            axes[0],
            "Worker-slot s, contention",
            {dag: part["contending"][dag]["slot_seconds"]["median"] for dag in names},
        ),
        (axes[1], "Added s, no contention", {dag: part["alone"][dag]["added_seconds"] for dag in names}),
        (
            axes[2],
            "Hand-over p50, s",
            {dag: part["contending"][dag]["all_handovers"]["p50"] for dag in names},
        ),
    ):
        labelled = {names[dag]: value for dag, value in values.items()}
        _bars(axis, labelled, title, "{:.1f}", colours=[COLOURS["ours"], COLOURS["awsflock"]])
    _save(figure, path)


def time_line(results: Mapping[str, Any], path: Path) -> None:
    """Draw the median steps of a run and of hand-overs in Airflow, one after the other."""
    lines = results["airflow"]["time_line"]
    rows = {
        "a run alone": lines["alone"],
        "hand-over between deployments": lines["between"],
        "hand-over within a deployment": lines["within"],
    }
    rows = {name: steps for name, steps in rows.items() if steps}
    figure, axis = plt.subplots(figsize=(WIDTH, 0.9 + 0.5 * len(rows)))
    for row, steps in enumerate(rows.values()):
        begun = 0.0
        for step in steps:
            seconds = step["seconds"]["median"]
            colour = COMPONENTS[step["who"]]
            axis.barh(row, seconds, left=begun, color=colour, edgecolor="white", linewidth=0.8, height=0.6)
            begun += seconds
        axis.annotate(f"{begun:.1f} s", (begun, row), (5, 0), textcoords="offset points", va="center")
    for name, colour in COMPONENTS.items():
        axis.barh(0, 0, color=colour, label=name)
    axis.legend(frameon=False, ncols=len(COMPONENTS), loc="lower left", bbox_to_anchor=(0, 1), fontsize=8)
    axis.set_xlabel("seconds (medians)")
    _rows(axis, list(rows))
    _save(figure, path)


def _bars(
    axis: Any,
    values: Mapping[str, float],
    title: str,
    form: str,
    ranges: Sequence[tuple[float, float]] = (),
    colours: Sequence[str] = (),
) -> None:
    """Draw horizontal bars.

    :param form: format of a bar's label.
    :param ranges: for each bar, the ends of the line over it.
    :param colours: for each bar; by default those of the contestants.
    """
    rows = range(len(values))
    axis.barh(rows, list(values.values()), color=colours or [COLOURS[name] for name in values], height=0.65)
    widest = max([*values.values(), *(high for _, high in ranges)])
    for row, value in enumerate(values.values()):
        low, high = ranges[row] if ranges else (value, value)
        if ranges:
            axis.plot([low, high], [row, row], color="#333", linewidth=1.2)
        axis.annotate(form.format(value), (high, row), (5, 0), textcoords="offset points", va="center")
    axis.set_xlim(0, (widest or 1) * 1.18)
    axis.set_title(title)
    _rows(axis, list(values))


def _rows(axis: Any, names: Sequence[str]) -> None:
    """Label the rows, the first one on top."""
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.tick_params(axis="y", length=0)


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


FIGURES = {
    "requests": requests,
    "speed": speed,
    "handover": handover,
    "waiting": waiting,
    "airflow": airflow,
}

if __name__ == "__main__":
    results, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    for part, draw in FIGURES.items():
        if part in results:
            draw(results, folder / f"{part}.svg")
    if "time_line" in results.get("airflow", {}):
        time_line(results, folder / "time_line.svg")
