"""The option ``--report`` of the programs that measure: the file that `proof.figures` reads."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path


def add_report_option(parser: ArgumentParser) -> None:
    parser.add_argument("--report", type=_file, metavar="FILE", help="write the figures to FILE, as JSON")


def _file(name: str) -> Path:
    """Make the folder at once: a run of many minutes must not end without a place for its figures."""
    file = Path(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    return file
