"""The pages of the documentation, and helpers that read code blocks and tables from them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    """Return the code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def table(page: Path, heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading of any level, without its header."""
    _, _, below = page.read_text().partition(f"# {heading}\n")
    rows = re.search(
        r"(?:^\|.*\|\n)+", re.split(r"^##", below, maxsplit=1, flags=re.MULTILINE)[0], re.MULTILINE
    )
    assert rows is not None, f"{page.name} has no table below {heading!r}"
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[0].splitlines()[2:]]


def code(cell: str) -> list[str]:
    """Return the texts in backticks."""
    return re.findall(r"`([^`]+)`", cell)
