"""Which environments the matrix has, and what is pinned in each.

A release's own pins are what its dependencies resolve to on the days after it came out: a fair copy of the constraint
file that comes with it. `lock` writes them into ``requirements/airflow-*.txt``. One more environment has the oldest
version of everything that the package allows, to prove the lower bounds in pyproject.toml.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
UV = [sys.executable, "-m", "uv"]

#: What depends on Airflow: a real deployment, the example DAGs, and the package's Airflow layer.
AIRFLOW_TESTS = (
    "tests/airflow/test_group.py",
    "tests/airflow/test_releases.py",
    "tests/airflow/test_triggerers.py",
    "tests/test_demo.py",
    "tests/layer",
    "tests/cli/test_airflow.py",
    "tests/test_example_dags.py",
    "tests/test_packaging.py",
)
#: What depends on the other libraries, on the embedded DynamoDB.
UNIT_TESTS = (
    "tests/client",
    "tests/layer",
    "tests/cli/test_airflow.py",
    "tests/cli/test_run.py",
    "tests/cli/test_migrate.py",
    "tests/test_embedded.py",
    "tests/test_example_dags.py",
    "tests/test_packaging.py",
    "-k",
    "not dynamodb-local",
)

#: With ``--short``: the Airflow layer, and in a real deployment one case of everything that differs between releases.
SHORT = (
    "not dynamodb-local and (layer or test_packaging or test_example_dags or (cli and test_airflow) "
    "or work_runs_only_under_the_lease or acquire_is_marked_failed or a_group_waits or operator-5 "
    "or one_of_two_triggerers or link_to_the_record)"
)


class MatrixError(Exception):
    """An environment cannot be made; says why, and what to do."""


@dataclass(frozen=True)
class Environment:
    """An Airflow to test in.

    :ivar name: the release, or what else makes it different.
    :ivar airflow: the release.
    :ivar pinned: packages uploaded later than this day are not used.
    :ivar pythons: versions that the release supports; the first one that this machine has is used.
    :ivar tests: arguments of pytest.
    :ivar oldest: whether each dependency of the package is in the oldest version that it allows.
    """

    name: str
    airflow: str
    pinned: str
    pythons: tuple[str, ...]
    tests: tuple[str, ...] = AIRFLOW_TESTS
    oldest: bool = False

    @property
    def python(self) -> Path:
        """Its interpreter, once it is installed."""
        return self.folder / "venv" / "bin" / "python"

    @property
    def python_version(self) -> str:
        """The version of its interpreter, once it is installed."""
        settings = (self.folder / "venv" / "pyvenv.cfg").read_text()
        return next(
            line.partition("=")[2].strip() for line in settings.splitlines() if line.startswith("version")
        )

    @property
    def folder(self) -> Path:
        """Where it is, with the reports of its tests."""
        return ROOT / ".cache" / "matrix" / self.name

    @property
    def lock_file(self) -> Path:
        """Its pins."""
        return ROOT / "requirements" / f"airflow-{self.name}.txt"

    def lock(self) -> None:
        """Write its pins anew."""
        compile_: tuple[str | Path, ...] = (
            *UV,
            "pip",
            "compile",
            "--quiet",
            "--universal",
            "--python-version",
            "3.11",
        )
        compile_ += ("--exclude-newer", self.pinned, "--extra", "embedded", "pyproject.toml")
        with tempfile.NamedTemporaryFile(suffix=".txt") as oldest:
            if self.oldest:
                # Not those of the tools that the tests need: they have no lower bounds.
                _run(*compile_, "--resolution", "lowest-direct", "--output-file", oldest.name)
            _run(
                *(*compile_, self.lock_file.with_suffix(".in"), "--constraint", oldest.name),
                *("--generate-hashes", "--no-annotate", "--no-emit-index-url"),
                *("--custom-compile-command", "make lock", "--output-file", self.lock_file),
            )

    def install(self) -> None:
        """Make it, or bring it up to date.

        :raises MatrixError: this machine has no Python for it, or a package cannot be had.
        """
        if not self.python.exists():
            _run(*UV, "venv", "--quiet", "--python", self._find_python(), self.folder / "venv")
        into: tuple[str | Path, ...] = (*UV, "pip", "install", "--quiet", "--python", self.python)
        _run(*into, "--require-hashes", "--requirement", self.lock_file)
        _run(*into, "--no-deps", "--no-build-isolation", "--editable", ROOT)

    def _find_python(self) -> Path | str:
        for version in self.pythons:
            for python in _interpreters(version):
                with suppress(OSError):
                    # Being on PATH proves nothing: pyenv has commands there for Pythons that do not run.
                    trial = [python, "-c", "import sqlite3, ssl, venv"]
                    asked = subprocess.run(trial, capture_output=True, check=False)
                    if asked.returncode == 0:
                        return python
        raise MatrixError(
            f"Airflow {self.airflow} needs Python {' or '.join(self.pythons)}, and none of them runs here: "
            "install one, and put it on PATH."
        )


#: All of them. Together they use each Python that the package supports.
ENVIRONMENTS = (
    Environment("3.0.6", "3.0.6", "2025-09-01", ("3.12", "3.11")),
    Environment("3.1.8", "3.1.8", "2026-03-14", ("3.12", "3.11", "3.13")),
    Environment("3.2.2", "3.2.2", "2026-06-01", ("3.11", "3.12", "3.13")),
    Environment("3.3.2", "3.3.2", "2026-09-20", ("3.14", "3.13", "3.12", "3.11")),
    Environment("production", "3.3.2", "2026-09-20", ("3.12", "3.13", "3.11")),
    Environment("lowest", "3.0.6", "2025-09-01", ("3.11", "3.12"), UNIT_TESTS, oldest=True),
)


def _interpreters(version: str) -> Iterator[Path | str]:
    yield f"python{version}"
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from sorted(root.glob(f"versions/{version}.*/bin/python"))


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise MatrixError(f"{' '.join(map(str, command))} failed:\n{done.stderr.strip()}")


def chosen(names: Sequence[str]) -> tuple[Environment, ...]:
    """The environments of these names; of no names, all.

    :raises MatrixError: there is none of that name.
    """
    known = {each.name: each for each in ENVIRONMENTS}
    if unknown := set(names) - set(known):
        raise MatrixError(f"There is no environment {min(unknown)!r}: choose from {', '.join(known)}.")
    return tuple(known[name] for name in names) or ENVIRONMENTS
