"""The files for what the programs have measured: `proof.figures` reads those of the option ``--report``."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path


def add_report_option(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--report", type=output_file, metavar="FILE", help="write the figures to FILE, as JSON"
    )


def output_file(name: str) -> Path:
    """The type of an option that names a file. It makes the folder at once: a run of many minutes must not end without
    a place for its figures."""
    file = Path(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    return file
