"""The virtual environments that the bench makes for itself, under ``.cache/bench``: one for each library that it
compares with, so that none of them is ever a dependency of the project, and one for what draws the figures.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = ROOT / ".cache" / "bench"
REQUIREMENTS = Path(__file__).parent / "requirements"


def python_of(name: str) -> Path:
    """The Python of an environment with what ``requirements/NAME.txt`` lists and nothing else, made if need be."""
    requirements = REQUIREMENTS / f"{name}.txt"
    environment = ENVIRONMENTS / name
    python = environment / "bin" / "python"
    installed = environment / requirements.name  # a copy of the list, written once all of it is there
    if not installed.exists() or installed.read_text() != requirements.read_text():
        uv = Path(sys.executable).with_name("uv")
        _run(uv, "venv", "--quiet", "--clear", "--python", sys.executable, environment)
        _run(uv, "pip", "sync", "--quiet", "--python", python, "--require-hashes", requirements)
        installed.write_text(requirements.read_text())
    return python


def _run(*command: str | Path) -> None:
    subprocess.run(list(map(str, command)), check=True)
