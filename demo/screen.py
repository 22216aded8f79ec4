"""The demo's output in the terminal: a live view while it runs, and the report at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import isfinite

from rich import box
from rich.console import Group, RenderableType
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from demo.ledger import Section
from demo.outcome import Handover, Outcome, Turn
from deployments.deployment import Deployment

Bar = list[tuple[str, str]]  # a row of the timeline: character and style of each cell

COLOURS = {"north": "blue", "south": "yellow"}
WAITING, INSIDE, DONE, FAILED = (
    Text("○", "dim"),
    Text("●", "bold magenta"),
    Text("✓", "green"),
    Text("✗", "red"),
)


class Board:
    """The live view: both deployments and their runs. rich redraws it several times a second."""

    def __init__(self, deployments: Sequence[Deployment]) -> None:
        self._deployments = deployments
        self._started = time.monotonic()
        self._outcome: Outcome | None = None
        self._spinner = Spinner("dots")

    @property
    def elapsed(self) -> str:
        """Time since the start of the demo, as minutes:seconds."""
        return "{}:{:02}".format(*divmod(int(time.monotonic() - self._started), 60))

    def show(self, outcome: Outcome) -> None:
        """Replace the outcome that the view shows."""
        self._outcome = outcome

    def __rich__(self) -> RenderableType:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("deployment")
        table.add_column("web interface")
        table.add_column("state")
        table.add_column(Text.assemble("runs: ", WAITING, " waiting ", INSIDE, " inside ", DONE, " done"))
        for deployment in self._deployments:
            table.add_row(
                Text(deployment.name, COLOURS[deployment.name]),
                deployment.url,
                deployment.status,
                Text(" ").join(self._marks(deployment.name)),
            )
        self._spinner.update(text=f"{self.elapsed} {self._activity()}")
        return Group(table, self._spinner)

    def _activity(self) -> str:
        if self._outcome is None:
            return "starting two Airflow deployments"
        done = sum(turn.released is not None for turn in self._outcome.turns)
        return f"{done} of {len(self._outcome.turns)} turns completed"

    def _marks(self, deployment: str) -> list[Text]:
        if self._outcome is None:
            return []
        failed = {run.run_id for run in self._outcome.runs if run.state == "failed"}
        turns = [turn for turn in self._outcome.turns if turn.deployment == deployment]
        return [
            FAILED if turn.run in failed else _mark(turn) for turn in sorted(turns, key=lambda t: t.triggered)
        ]


def report(outcome: Outcome, width: int) -> RenderableType:
    """The report: timeline, durations and verdict, for a terminal with `width` columns."""
    return Group(_timeline(outcome, width), "", _times(outcome), "", _verdict(outcome), "")


def failures(deployments: Sequence[Deployment], dag_id: str) -> Text:
    """For each failed task, the last lines of its log, and those of the scheduler's log that name it."""
    text = Text()
    for deployment in deployments:
        for ti in deployment.task_instances(dag_id):
            if ti.state == "failed":
                log = deployment.task_log(dag_id, ti.run_id, ti.task_id).splitlines()[-15:]
                # With LocalExecutor, the scheduler's log also has the output of the task's supervisor.
                text.append(f"{deployment.name} {ti.run_id} {ti.task_id} failed:\n", "red")
                scheduler = deployment.scheduler.tail(10_000).splitlines()
                log += [line for line in scheduler if ti.id in line][-15:]
                text.append("".join(f"  {line}\n" for line in log))
    return text


def _mark(turn: Turn) -> Text:
    if turn.released:
        return DONE
    return INSIDE if turn.acquired else WAITING


def _timeline(outcome: Outcome, width: int) -> RenderableType:
    """A row for all runs together, and one for each run: when it waited, held the lock, and ran its tasks."""
    if not outcome.sections:
        return Text("No run started a guarded task.", "red")
    origin = min(turn.triggered for turn in outcome.turns)
    end = max(moment for s in outcome.sections for moment in (s.start, s.end) if isfinite(moment))
    columns = max(20, width - 12)
    per_second = columns / (end - origin)

    def column(moment: float) -> float:
        return (min(moment, end) - origin) * per_second

    def draw_section(bar: Bar, section: Section) -> None:
        colour = COLOURS[section.deployment]
        _draw(bar, ("━", colour), column(section.start), column(section.end))
        for work in section.work:
            _draw(bar, ("█", colour), column(work.start), column(work.end))

    table = Table.grid(padding=(0, 1))
    table.add_row("", Text(f"0 s{f'{end - origin:.0f} s':>{columns - 3}}", "dim"))
    both: Bar = [(" ", "")] * columns
    for section in outcome.sections:
        draw_section(both, section)
    table.add_row("both", Text.assemble(*both))
    for deployment, colour in COLOURS.items():
        for number, turn in enumerate((t for t in outcome.turns if t.deployment == deployment), start=1):
            bar: Bar = [(" ", "")] * columns
            if turn.section:
                _draw(bar, ("┄", "dim"), column(turn.triggered), column(turn.section.start))
                draw_section(bar, turn.section)
            table.add_row(Text(f"{deployment} {number}", colour), Text.assemble(*bar))
    return table


def _draw(bar: Bar, cell: tuple[str, str], start: float, end: float) -> None:
    """Fill the cells of a bar from column `start` to column `end`, at least one cell."""
    first = min(round(start), len(bar) - 1)
    last = max(first + 1, min(round(end), len(bar)))
    bar[first:last] = [cell] * (last - first)


def _times(outcome: Outcome) -> RenderableType:
    """A row for each turn, and the summary of the hand-overs."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("turn", "deployment", "fencing token"):
        table.add_column(heading)
    for heading in ("waited", "at work", "idle before the next"):
        table.add_column(heading, justify="right")
    handovers = {(each.previous.deployment, each.previous.run): each for each in outcome.handovers}
    for number, turn in enumerate(outcome.turns, start=1):
        if not turn.section:
            continue
        to_next = handovers.get((turn.deployment, turn.run))
        table.add_row(
            str(number),
            Text(turn.deployment, COLOURS[turn.deployment]),
            ", ".join(map(str, turn.section.tokens)),
            f"{turn.waited:.1f} s",
            f"{turn.section.end - turn.section.start:.1f} s",
            _idle(to_next) if to_next else "",
        )
    return Group(table, _handovers(outcome))


def _idle(handover: Handover) -> str:
    target = f"→ {handover.following.deployment}" if handover.crosses else ""
    return f"{handover.seconds:.1f} s {target:7}"


def _handovers(outcome: Outcome) -> RenderableType:
    if not outcome.spreads:
        return Text()
    crossing = sum(each.crosses for each in outcome.handovers)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(f"{len(outcome.handovers)} hand-overs, {crossing} of them between deployments")
    table.add_column("median", justify="right")
    table.add_column("longest", justify="right")
    for spread in outcome.spreads:
        table.add_row(spread.what, f"{spread.median:.1f} s", f"{spread.longest:.1f} s")
    return table


def _verdict(outcome: Outcome) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for check in outcome.verdict:
        style = "dim" if check.passed is None else "green" if check.passed else "bold red"
        table.add_row(Text(check.mark, style), check.text, Text(check.found, "dim"))
    return Group(
        table,
        Text("No two runs overlapped, and every run had its turn.", "bold green")
        if outcome.passed
        else Text("FAILED: see the lines marked ✗.", "bold red"),
    )
