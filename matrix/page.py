"""Generated parts of Markdown pages, between two markers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path


def replace_part(page: Path, command: str, text: str) -> None:
    """Replace the text between the markers of a command.

    :param command: the command that generates the text, as the markers name it.
    :raises ValueError: the page has no such markers.
    """
    begin, end = f"<!-- begin: {command} -->\n", f"<!-- end: {command} -->\n"
    content = page.read_text()
    if begin not in content or end not in content:
        raise ValueError(
            f"{page.name} has no part between {begin.strip()!r} and {end.strip()!r}: add these two lines to it."
        )
    before, _, rest = content.partition(begin)
    _, _, after = rest.partition(end)
    page.write_text(f"{before}{begin}{text}{end}{after}")


def as_markdown(heads: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: bool = False) -> str:
    """Return a Markdown table.

    :param numbers: whether to align all columns but the first to the right.
    """
    rules = ["---", *(["---:" if numbers else "---"] * (len(heads) - 1))]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in [heads, rules, *rows])
