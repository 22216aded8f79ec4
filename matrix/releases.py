"""The environments of the matrix, and the versions that are pinned in each.

The pins of a release are the versions to which its dependencies resolve if packages that were uploaded later are
ignored. They are nearly those of the release's constraint file. `Environment.lock` writes them into
``requirements/airflow-*.txt``. The environment ``lowest`` has the oldest version of each dependency that the package
allows, to test the lower bounds in pyproject.toml.
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
#: The distributions of this repository: the client, and the provider.
PACKAGES = ("packages/client/pyproject.toml", "pyproject.toml")

#: Tests that depend on Airflow: real deployments, the example DAGs, and the package's Airflow layer.
AIRFLOW_TESTS = (
    "tests/airflow/test_group.py",
    "tests/airflow/test_releases.py",
    "tests/airflow/test_triggerers.py",
    "tests/airflow/test_telemetry.py",
    "tests/test_demo.py",
    "tests/layer",
    "tests/cli/test_airflow.py",
    "tests/test_example_dags.py",
    "tests/test_packaging.py",
)
#: Tests of releases that have pages of plugins. `make proof` runs them on the release of `make test`.
PAGE_TESTS = (*AIRFLOW_TESTS, "tests/browser/test_locks_page.py")
#: Tests of the environment ``production``, which has both auth managers.
PRODUCTION_TESTS = (*AIRFLOW_TESTS, "tests/page/test_roles.py")
#: Tests that depend on the other dependencies, with the embedded DynamoDB.
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

#: Tests for ``--short``: the Airflow layer, and one case in a real deployment for each difference between releases.
SHORT = (
    "not dynamodb-local and (layer or test_packaging or test_example_dags or (cli and test_airflow) "
    "or work_runs_only_under_the_lease or acquire_is_marked_failed or a_group_waits or operator-5 "
    "or one_of_two_triggerers or link_to_the_record or test_roles)"
)


class MatrixError(Exception):
    """An environment cannot be chosen, locked or installed. The message says why, and what to do."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment with Airflow, in which tests run.

    :ivar name: the release of Airflow, or another name if there are several environments with that release.
    :ivar airflow: the release of Airflow.
    :ivar pinned: date; packages that were uploaded later are ignored.
    :ivar pythons: versions of Python that the release supports. The first one that is installed here is used.
    :ivar tests: arguments for pytest.
    :ivar oldest: whether to use the oldest version of each dependency that the package allows.
    """

    name: str
    airflow: str
    pinned: str
    pythons: tuple[str, ...]
    tests: tuple[str, ...] = AIRFLOW_TESTS
    oldest: bool = False

    @property
    def python(self) -> Path:
        """The Python interpreter, once the environment is installed."""
        return self.folder / "venv" / "bin" / "python"

    @property
    def python_version(self) -> str:
        """The version of the Python interpreter, once the environment is installed."""
        settings = (self.folder / "venv" / "pyvenv.cfg").read_text()
        return next(
            line.partition("=")[2].strip() for line in settings.splitlines() if line.startswith("version")
        )

    @property
    def folder(self) -> Path:
        """The folder of the environment and of its test reports."""
        return ROOT / ".cache" / "matrix" / self.name

    @property
    def lock_file(self) -> Path:
        """The file with the pinned versions."""
        return ROOT / "requirements" / f"airflow-{self.name}.txt"

    def lock(self) -> None:
        """Resolve the pinned versions again, and write them.

        :raises MatrixError: the versions cannot be resolved.
        """
        pip_compile: list[str | Path] = [*UV, "pip", "compile", "--quiet"]
        pip_compile += ["--universal", "--python-version", "3.11"]
        pip_compile += ["--exclude-newer", self.pinned, "--extra", "embedded"]
        pip_compile += [*PACKAGES, "--no-emit-package", "airflow-dynamo-lock-client"]
        with tempfile.NamedTemporaryFile(suffix=".txt") as oldest:
            if self.oldest:
                # Only the package's own dependencies: the tools of the tests have no lower bounds.
                _run(*pip_compile, "--resolution", "lowest-direct", "--output-file", oldest.name)
            _run(
                *(*pip_compile, self.lock_file.with_suffix(".in"), "--constraint", oldest.name),
                *("--generate-hashes", "--no-annotate", "--no-emit-index-url"),
                *("--custom-compile-command", "make lock", "--output-file", self.lock_file),
            )

    def install(self) -> None:
        """Create or update the environment.

        :raises MatrixError: no suitable Python is installed, or a package cannot be installed.
        """
        if not self.python.exists():
            _run(*UV, "venv", "--quiet", "--python", self._find_python(), self.folder / "venv")
        pip_install: tuple[str | Path, ...] = (*UV, "pip", "install", "--quiet", "--python", self.python)
        _run(*pip_install, "--require-hashes", "--requirement", self.lock_file)
        own = [option for each in PACKAGES for option in ("--editable", ROOT / Path(each).parent)]
        _run(*pip_install, "--no-deps", "--no-build-isolation", *own)

    def _find_python(self) -> Path | str:
        """Return the first installed interpreter of a version that the release supports."""
        for version in self.pythons:
            for python in _interpreters(version):
                with suppress(OSError):
                    # A command on PATH may not work: pyenv has commands for all versions, active or not.
                    check = [python, "-c", "import sqlite3, ssl, venv"]
                    done = subprocess.run(check, capture_output=True, check=False)
                    if done.returncode == 0:
                        return python
        raise MatrixError(
            f"Airflow {self.airflow} needs Python {' or '.join(self.pythons)}, and none of them is installed: "
            "install one, and put it on PATH."
        )


#: All environments. Together they use each version of Python that the package supports.
ENVIRONMENTS = (
    Environment("3.0.6", "3.0.6", "2025-09-01", ("3.12", "3.11")),
    Environment("3.1.8", "3.1.8", "2026-03-14", ("3.12", "3.11", "3.13"), PAGE_TESTS),
    Environment("3.2.2", "3.2.2", "2026-06-01", ("3.11", "3.12", "3.13"), PAGE_TESTS),
    Environment("3.3.2", "3.3.2", "2026-09-20", ("3.14", "3.13", "3.12", "3.11")),
    Environment("production", "3.3.2", "2026-09-20", ("3.12", "3.13", "3.11"), PRODUCTION_TESTS),
    Environment("lowest", "3.0.6", "2025-09-01", ("3.11", "3.12"), UNIT_TESTS, oldest=True),
)


def _interpreters(version: str) -> Iterator[Path | str]:
    """Return the candidates: the command on PATH, and the versions that pyenv has installed."""
    yield f"python{version}"
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from sorted(root.glob(f"versions/{version}.*/bin/python"))


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise MatrixError(f"{' '.join(map(str, command))} failed:\n{done.stderr.strip()}")


def chosen(names: Sequence[str]) -> tuple[Environment, ...]:
    """Return the environments with these names, or all environments if there are no names.

    :raises MatrixError: there is no environment of that name.
    """
    known = {each.name: each for each in ENVIRONMENTS}
    if unknown := set(names) - set(known):
        raise MatrixError(f"There is no environment {min(unknown)!r}: choose from {', '.join(known)}.")
    return tuple(known[name] for name in names) or ENVIRONMENTS
