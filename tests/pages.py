"""The pages of the documentation, and what tests read from them: code blocks and tables."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page, by their language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def table(page: Path, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading of any level, without its head."""
    _, _, below = page.read_text().partition(f"# {heading}\n")
    rows = re.search(
        r"(?:^\|.*\|\n)+", re.split(r"^##", below, maxsplit=1, flags=re.MULTILINE)[0], re.MULTILINE
    )
    assert rows is not None, f"{page.name} has no table below {heading!r}"
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[0].splitlines()[2:]]


def code(cell: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", cell)
