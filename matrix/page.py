"""Parts of a page that a command writes, between two marks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path


def replace_part(page: Path, command: str, text: str) -> None:
    """Put `text` between the marks of that command.

    :raises ValueError: the page has no such marks.
    """
    begin, end = f"<!-- begin: {command} -->\n", f"<!-- end: {command} -->\n"
    content = page.read_text()
    if begin not in content or end not in content:
        raise ValueError(
            f"{page.name} has no part between {begin.strip()!r} and {end.strip()!r}: add the marks."
        )
    before, _, rest = content.partition(begin)
    _, _, after = rest.partition(end)
    page.write_text(f"{before}{begin}{text}{end}{after}")


def as_markdown(heads: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: bool = False) -> str:
    """A table.

    :param numbers: all columns but the first are aligned to the right.
    """
    rules = ["---", *(["---:" if numbers else "---"] * (len(heads) - 1))]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in [heads, rules, *rows])
