"""Run a command that must succeed."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path


def output_of(*command: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Run a command, assert that it succeeds, and return what it prints.

    :param cwd: working directory; this process's by default.
    :param env: environment variables; this process's by default.
    """
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
