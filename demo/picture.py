"""The timeline as a picture: one HTML page by itself, for light and dark screens and for screen readers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from demo.outcome import Outcome, Turn

LABELS = 90.0  # width of the column on the left
CHART = 850.0  # width of the time axis
ROW = 22.0
TICKS = 10  # marks on the time axis, at most


@dataclass(frozen=True, slots=True)
class Scale:
    """From moments to places on the time axis."""

    origin: float
    end: float

    def x(self, moment: float) -> float:
        """Where a moment is; what has no end goes on to the edge."""
        return LABELS + (min(moment, self.end) - self.origin) / (self.end - self.origin) * CHART

    def ticks(self) -> Iterator[tuple[str, float]]:
        """Round numbers of seconds since the first run was triggered, with their places."""
        length = self.end - self.origin
        step = next(
            s for s in (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 3600) if length / s <= TICKS or s == 3600
        )
        for seconds in range(0, int(length) + 1, step):
            yield f"{seconds} s", self.x(self.origin + seconds)


def write_page(outcome: Outcome, file: Path) -> Path:
    """Draw the outcome into an HTML file, and return it."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    turns = [turn for turn in outcome.turns if turn.section]
    idle = {(each.giver.deployment, each.giver.run): each.seconds for each in outcome.handovers}
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
    moments = [turn.triggered for turn in turns]
    moments += [
        m for turn in turns if turn.section for m in (turn.section.start, turn.section.end) if isfinite(m)
    ]
    return Scale(min(moments), max(moments)) if turns else Scale(0.0, 1.0)
