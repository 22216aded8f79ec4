"""The report as an HTML page: verdict, timeline (SVG) and durations. The page needs no other file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from demo.outcome import Outcome, Turn

LABELS = 90.0  # width of the column with the labels of the rows
CHART = 850.0  # width of the time axis
ROW = 22.0  # height of a row
TICKS = 10  # maximum number of intervals on the time axis


@dataclass(frozen=True, slots=True)
class Scale:
    """The time axis. `origin` and `end` are in seconds since the epoch."""

    origin: float
    end: float

    def x(self, moment: float) -> float:
        """Horizontal position of a moment. The end of the axis, if the moment is later or infinite."""
        return LABELS + (min(moment, self.end) - self.origin) / (self.end - self.origin) * CHART

    def ticks(self) -> Iterator[tuple[str, float]]:
        """Label and horizontal position of each tick, at round numbers of seconds since the first trigger."""
        length = self.end - self.origin
        steps = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 3600)
        step = next((step for step in steps if length / step <= TICKS), steps[-1])
        for seconds in range(0, int(length) + 1, step):
            yield f"{seconds} s", self.x(self.origin + seconds)


def write_page(outcome: Outcome, file: Path) -> Path:
    """Write the report of the outcome to an HTML file, and return the path of the file."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    turns = [turn for turn in outcome.turns if turn.section]
    idle = {(each.previous.deployment, each.previous.run): each.seconds for each in outcome.handovers}
    page = environment.get_template("picture.html.jinja").render(
        outcome=outcome,
        turns=[(turn, idle.get((turn.deployment, turn.run))) for turn in turns],
        deployments=sorted({turn.deployment for turn in outcome.turns}),
        scale=_scale(turns),
        left=LABELS,
        width=LABELS + CHART + 20,
        row=ROW,
    )
    file.write_text(page)
    return file


def _scale(turns: list[Turn]) -> Scale:
    """A time axis from the first trigger to the last start or end of a critical section."""
    moments = [turn.triggered for turn in turns]
    moments += [
        m for turn in turns if turn.section for m in (turn.section.start, turn.section.end) if isfinite(m)
    ]
    return Scale(min(moments), max(moments)) if turns else Scale(0.0, 1.0)
