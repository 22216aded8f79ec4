"""The virtual environments of the benchmarks, in ``.cache/bench``.

Each library that is compared has one, so that it never becomes a dependency of the project. Another one contains
matplotlib, for the figures.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = ROOT / ".cache" / "bench"
REQUIREMENTS = Path(__file__).parent / "requirements"


def python_of(name: str) -> Path:
    """Return the Python interpreter of an environment that contains exactly what ``requirements/NAME.txt`` lists.

    If the environment is missing or out of date, create it.
    """
    requirements = REQUIREMENTS / f"{name}.txt"
    environment = ENVIRONMENTS / name
    python = environment / "bin" / "python"
    installed = environment / requirements.name  # copy of the list, written after everything is installed
    if not installed.exists() or installed.read_text() != requirements.read_text():
        uv = Path(sys.executable).with_name("uv")
        _run(uv, "venv", "--quiet", "--clear", "--python", sys.executable, environment)
        _run(uv, "pip", "sync", "--quiet", "--python", python, "--require-hashes", requirements)
        installed.write_text(requirements.read_text())
    return python


def _run(*command: str | Path) -> None:
    subprocess.run(list(map(str, command)), check=True)
