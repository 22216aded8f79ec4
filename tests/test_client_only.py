"""The client's wheel in an environment without Airflow, as for notebooks and cron jobs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import airflow_dynamo_lock
from deployments.engines import REGION, MotoServer
from tests.commands import output_of
from tests.test_packaging import build

pytestmark = pytest.mark.proof

ROOT = Path(__file__).parents[1]
#: Maximum number of packages in the environment of the client without extras.
MOST = 16


@pytest.fixture(scope="module")
def bin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the environment's programs."""
    folder = tmp_path_factory.mktemp("client")
    wheel = build(ROOT / "packages" / "client", folder)
    uv = [sys.executable, "-m", "uv"]
    run(*uv, "venv", "--quiet", "--python", sys.executable, folder / "venv")
    python = folder / "venv" / "bin" / "python"
    run(*uv, "pip", "install", "--quiet", "--python", python, wheel, "--constraint", pins(folder))
    return python.parent


def pins(folder: Path) -> Path:
    """Write the versions that the tests use to a constraints file, without the hashes."""
    text = (ROOT / "requirements" / "dev.txt").read_text()
    file = folder / "constraints.txt"
    file.write_text("\n".join(re.findall(r"^[^\s#]+==[^\\\n]+", text, re.MULTILINE)))
    return file


def run(*command: str | Path, **environment: str) -> str:
    """Run a program with the modules of its own environment only, and return what it prints."""
    variables = {**os.environ, **environment}
    variables.pop("PYTHONPATH", None)
    return output_of(*command, env=variables)


def test_the_environment_is_small_and_consistent(
    bin: Path, record_property: Callable[[str, object], None]
) -> None:
    uv = [sys.executable, "-m", "uv", "pip"]
    run(*uv, "check", "--python", bin / "python")
    packages = run(*uv, "list", "--python", bin / "python", "--format", "freeze").splitlines()
    record_property("packages", len(packages))
    assert not [each for each in packages if "apache-airflow" in each]
    assert len(packages) <= MOST, packages


def test_public_names_work_or_say_what_they_need(bin: Path) -> None:
    code = """
import airflow_dynamo_lock
for name in airflow_dynamo_lock.__all__:
    try:
        getattr(airflow_dynamo_lock, name)
    except ImportError as error:
        print(name, "|", error)
"""
    refused = dict(line.split(" | ") for line in run(bin / "python", "-P", "-c", code).splitlines())
    airflows = {
        name
        for name in airflow_dynamo_lock.__all__
        if getattr(airflow_dynamo_lock, name).__module__.startswith("airflow_dynamo_lock.airflow.")
    }
    assert refused == {
        name: f"{name} needs Airflow: install the package airflow-dynamo-lock." for name in airflows
    }


def test_every_command_works(bin: Path) -> None:
    with MotoServer() as engine:
        environment = {
            **{f"AWS_ENDPOINT_URL_{service}": engine.endpoint_url for service in ("DYNAMODB", "S3", "STS")},
            "AWS_DEFAULT_REGION": REGION,
        }

        def dynamo_lock(*arguments: str) -> str:
            return run(bin / "dynamo-lock", *arguments, **environment)

        assert "Locks in a DynamoDB table" in dynamo_lock("--help")
        dynamo_lock("table", "create")
        dynamo_lock("table", "check")
        dynamo_lock("doctor")
        assert dynamo_lock("run", "a", "--", "sh", "-c", "echo $DYNAMO_LOCK_KEY") == "a\n"
        lease_id = dynamo_lock("acquire", "a").strip()
        dynamo_lock("renew", "a", lease_id)
        assert lease_id in dynamo_lock("get", "a")
        assert lease_id in dynamo_lock("list", "--held")
        dynamo_lock("waiters", "a")
        dynamo_lock("check", "--held-longer", "1h")
        assert "dynamo_lock" in dynamo_lock("metrics")
        dynamo_lock("release", "a", lease_id)
        dynamo_lock("acquire", "a")
        dynamo_lock("break", "a", "--yes", "--reason", "the test is over")
        dynamo_lock("capacity", "b", "3")
        refused = subprocess.run(
            [bin / "dynamo-lock", "list", "--conn-id", "lock"],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert refused.returncode == 2
        assert "--conn-id needs Airflow, which is not installed" in refused.stderr


def test_editable_installations_of_both_packages_work_together(tmp_path: Path) -> None:
    uv = [sys.executable, "-m", "uv"]
    run(*uv, "venv", "--quiet", "--python", sys.executable, tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    install = [*uv, "pip", "install", "--quiet", "--no-deps", "--python", str(python)]
    run(*install, "--editable", ROOT / "packages" / "client", "--editable", ROOT)
    found = run(
        python,
        *("-P", "-c"),
        "import airflow_dynamo_lock.notebook, airflow_dynamo_lock.airflow; print(airflow_dynamo_lock.__file__)",
    )
    assert Path(found.strip()).resolve().parent == ROOT / "airflow_dynamo_lock"
