"""The published wheels: they contain only the package, Airflow finds the installed provider, and an import loads only
what is used.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import sysconfig
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

import airflow
import jsonschema  # type: ignore[import-untyped]
import pytest
from airflow.configuration import conf
from airflow.providers_manager import ProvidersManager

import airflow_dynamo_lock
from airflow_dynamo_lock.airflow.provider_info import get_provider_info
from tests.commands import output_of
from tests.forked import run_forked

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "airflow_dynamo_lock"

AWS_SDKS = ["aiobotocore", "boto3", "botocore"]

MODULES_AFTER = """
import json, sys
{code}
print(json.dumps(sorted({{name.partition(".")[0] for name in sys.modules}})))
"""

BUILD_A_DAG = """
from airflow.sdk import DAG, task
from airflow_dynamo_lock import DynamoLock, DynamoLockOperator, DynamoLockSensor

def work():
    pass

with DAG("example"):
    with DynamoLock("warehouse/orders"):
        task(work)()
    DynamoLockOperator(task_id="operator", key="orders", python_callable=work)
    DynamoLockSensor(task_id="sensor", key="orders")
    task.dynamo_lock(key="orders", task_id="decorator")(work)()
"""


@dataclass(frozen=True)
class Python:
    """A Python interpreter, and the environment to run it in."""

    executable: Path
    environment: Mapping[str, str]

    def run(self, *arguments: str) -> str:
        """Run it, and return what it prints. It can import nothing from the working directory."""
        return output_of(self.executable, "-P", *arguments, cwd=ROOT, env=self.environment)

    def airflow(self, *commands: str) -> list[str]:
        """Return what each of these ``airflow`` commands prints."""
        main = "import sys; from airflow.__main__ import main; sys.argv = {!r}; main()"
        programs = [main.format(["airflow", *command.split()]) for command in commands]
        preload = "import airflow.cli.cli_parser"
        done = run_forked(programs, preload, executable=self.executable, environment=self.environment)
        assert [each.returncode for each in done] == [0] * len(commands), done
        return [each.stdout for each in done]

    def modules_after(self, code: str) -> set[str]:
        """Return the top-level modules that are loaded after `code` has run."""
        return set(json.loads(self.run("-c", MODULES_AFTER.format(code=code)).splitlines()[-1]))


HERE = Python(Path(sys.executable), os.environ)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The wheels of the client and of the provider, built from source distributions as they would be published."""
    return [build(ROOT / each, tmp_path_factory.mktemp("dist")) for each in ("packages/client", ".")]


def build(project: Path, folder: Path) -> Path:
    """Build the wheel of a project."""
    output_of(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=project)
    (sdist,) = folder.glob("*.tar.gz")
    output_of("tar", "-xzf", sdist, "-C", folder)
    source = folder / sdist.name.removesuffix(".tar.gz")
    output_of(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=source)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Python:
    """A Python that has the wheels installed, and all their dependencies."""
    folder = tmp_path_factory.mktemp("venv")
    output_of(sys.executable, "-m", "venv", "--without-pip", folder)
    site_packages = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    # The dependencies are borrowed from this environment. The editable installation of the package is not: it has a
    # .pth file, and Python reads no .pth file in a folder that a .pth file names.
    (site_packages / "borrowed.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    environment = {
        "PATH": os.environ["PATH"],
        "AIRFLOW_HOME": str(tmp_path_factory.mktemp("home")),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "PYTHONWARNINGS": "ignore",  # Airflow prints those about itself to stdout
    }
    python = Python(folder / "bin" / "python", environment)
    install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--offline", "--no-deps"]
    output_of(*install, "--python", python.executable, *wheels)
    found = python.run("-c", "import airflow_dynamo_lock; print(airflow_dynamo_lock.__file__)")
    assert Path(found.strip()).is_relative_to(site_packages)
    return python


def test_the_wheels_together_contain_exactly_the_package(wheels: list[Path]) -> None:
    client, provider = (names(wheel) for wheel in wheels)
    source = {
        str(file.relative_to(ROOT)) for file in PACKAGE.rglob("*") if file.is_file() and file.suffix != ".pyc"
    }
    assert client | provider == source
    assert client & provider == set()
    assert provider == {name for name in source if name.startswith("airflow_dynamo_lock/airflow/")}
    assert "airflow_dynamo_lock/py.typed" in client


def test_the_wheels_have_the_right_metadata(wheels: list[Path]) -> None:
    client, provider = (metadata(wheel) for wheel in wheels)
    assert [client["Name"], provider["Name"]] == ["airflow-dynamo-lock-client", "airflow-dynamo-lock"]
    for head in (client, provider):
        assert head["Version"] == airflow_dynamo_lock.__version__
        assert head["License-Expression"] == "Apache-2.0"
        assert head["Description-Content-Type"] == "text/markdown"
        assert head.get_payload()
    same = f"airflow-dynamo-lock-client[aio]=={airflow_dynamo_lock.__version__}"
    assert same in provider.get_all("Requires-Dist", [])
    assert not [each for each in client.get_all("Requires-Dist", []) if "apache-airflow" in each]


def names(wheel: Path) -> set[str]:
    """Return the files of a wheel, without its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def metadata(wheel: Path) -> Message:
    """Return the metadata of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_airflow_finds_the_parts_of_the_provider(installed: Python) -> None:
    providers, hooks, plugins, configuration = installed.airflow(
        "providers list --output json",
        "providers hooks --output json",
        "plugins --output json",
        "config list --section dynamo_lock",
    )
    versions = {each["package_name"]: each["version"] for each in last_line(providers)}
    assert versions["airflow-dynamo-lock"] == airflow_dynamo_lock.__version__

    (hook,) = (each for each in last_line(hooks) if each["connection_type"] == "dynamo_lock")
    assert hook["class"] == "airflow_dynamo_lock.airflow.hooks.DynamoLockHook"
    assert hook["conn_id_attribute_name"] == "dynamo_lock_conn_id"

    assert "dynamo_lock" in [each["name"] for each in last_line(plugins)]

    options = {
        line.removeprefix("#").split("=")[0].strip() for line in configuration.splitlines() if "=" in line
    }
    assert options == set(get_provider_info()["config"]["dynamo_lock"]["options"])


def last_line(printed: str) -> Any:
    """Return the JSON in the last line. Airflow may log before it."""
    return json.loads(printed.splitlines()[-1])


def test_parsing_a_dag_loads_no_aws_sdk(installed: Python) -> None:
    loaded = installed.modules_after(BUILD_A_DAG)
    assert "airflow_dynamo_lock" in loaded
    assert not loaded.intersection(AWS_SDKS)


def test_only_the_api_server_loads_the_page_and_fastapi() -> None:
    """The DAG processor, the scheduler, triggerers and workers load these modules."""
    ours = [f"airflow_dynamo_lock.airflow.{name}" for name in ("plugin", "triggers", "guard", "metrics")]
    airflows = "import airflow.sdk, airflow.triggers.base"
    loaded = HERE.modules_after(f"{airflows}\n{BUILD_A_DAG}\nimport {', '.join(ours)}")
    assert "airflow_dynamo_lock" in loaded
    assert "fastapi" not in loaded - HERE.modules_after(airflows)


@pytest.mark.proof
def test_the_api_server_can_load_the_page() -> None:
    """Airflow 3.0 shows no page, but serves its metrics."""
    server = Python(Path(sys.executable), {**os.environ, "_AIRFLOW_PROCESS_CONTEXT": "server"})
    assert "fastapi" in server.modules_after("import airflow_dynamo_lock.airflow.page.service")


@pytest.mark.parametrize("name", ["LockClient", "AsyncLockClient"])
def test_a_client_loads_no_airflow(name: str) -> None:
    loaded = HERE.modules_after(f"from airflow_dynamo_lock import {name}")
    assert "airflow_dynamo_lock" in loaded
    assert "airflow" not in loaded


def test_importing_the_package_loads_nothing_else() -> None:
    loaded = HERE.modules_after("import airflow_dynamo_lock")
    assert not loaded.intersection(["airflow", *AWS_SDKS])


@pytest.mark.parametrize("name", airflow_dynamo_lock.__all__)
def test_public_names_resolve(name: str) -> None:
    assert getattr(airflow_dynamo_lock, name).__name__ == name


def test_unknown_names_do_not_resolve() -> None:
    with pytest.raises(AttributeError, match=r"airflow_dynamo_lock.*LockClint"):
        airflow_dynamo_lock.LockClint  # noqa: B018 - the typing error is what is tested


def test_provider_info_is_what_airflow_expects() -> None:
    schema = json.loads((Path(airflow.__file__).parent / "provider_info.schema.json").read_text())
    jsonschema.validate(get_provider_info(), schema)


def test_airflow_hides_the_option_that_may_contain_the_password_of_a_proxy() -> None:
    ProvidersManager().initialize_providers_configuration()  # Airflow 3.0 does that when a component starts
    hidden = {name for section, name in conf.sensitive_config_values if section == "dynamo_lock"}
    assert hidden == {"botocore_config"}


def test_provider_info_names_existing_modules_and_classes() -> None:
    info = get_provider_info()
    for kind in ("operators", "sensors", "hooks", "triggers"):
        for each in info[kind]:
            for module in each["python-modules"]:
                importlib.import_module(module)
    names = [each["class-name"] for each in info["task-decorators"]]
    names += [each["hook-class-name"] for each in info["connection-types"]]
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute)
