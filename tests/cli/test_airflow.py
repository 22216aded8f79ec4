"""``airflow dynamo-lock``, and the option ``--conn-id``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from airflow_dynamo_lock import LockClient
from airflow_dynamo_lock.airflow.commands import commands
from airflow_dynamo_lock.airflow.versions import HAS_PROVIDER_COMMANDS
from airflow_dynamo_lock.cli.main import cli
from deployments.engines import REGION, Engine
from tests.cli.conftest import TABLE, Shell


@pytest.fixture
def connection(engine: Engine) -> str:
    """A connection to the lock table, as a value of ``AIRFLOW_CONN_…``."""
    extra = {"table": TABLE, "endpoint_url": engine.endpoint_url, "region_name": REGION}
    return json.dumps({"conn_type": "dynamo_lock", "extra": extra})


@pytest.mark.skipif(HAS_PROVIDER_COMMANDS, reason="this Airflow has the commands of providers")
def test_airflow_before_3_2_has_no_commands_of_providers() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "airflow", "dynamo-lock", "list"], capture_output=True, text=True
    )
    assert "invalid choice: 'dynamo-lock'" in result.stderr


def test_the_help_of_the_group_names_all_commands() -> None:
    (command,) = commands()
    assert command.args[0].kwargs["help"].split(", ") == sorted(cli.commands)


@pytest.mark.proof
@pytest.mark.skipif(not HAS_PROVIDER_COMMANDS, reason="this Airflow ignores the commands of providers")
def test_airflow_runs_the_commands(connection: str, locks: LockClient, key: str) -> None:
    lease = locks.acquire(key)
    result = subprocess.run(
        [sys.executable, "-m", "airflow", "dynamo-lock", "get", key, "--json"],
        # Airflow prints warnings about itself to stdout.
        env={**os.environ, "PYTHONWARNINGS": "ignore", "AIRFLOW_CONN_DYNAMO_LOCK_DEFAULT": connection},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    (holder,) = json.loads(result.stdout)["holders"]
    assert holder["lease_id"] == lease.lease_id


def test_a_connection_names_the_table(shell: Shell, connection: str, locks: LockClient, key: str) -> None:
    nowhere: dict[str, str | None] = {
        "AWS_ENDPOINT_URL_DYNAMODB": "http://127.0.0.1:1",
        "AIRFLOW_CONN_TEAM": connection,
    }
    acquired = replace(shell, environment=nowhere).run("acquire", key, "--conn-id", "team")
    assert (acquired.returncode, acquired.stderr) == (0, "")
    record = locks.get(key)
    assert record is not None
    assert acquired.stdout.strip() in record.holders


@pytest.mark.proof
def test_a_command_that_a_task_has_started_finds_its_connection(
    shell: Shell, connection: str, locks: LockClient, key: str
) -> None:
    """Airflow denies tasks the access to its database, and so their child processes too."""
    environment: dict[str, str | None] = {
        "AIRFLOW_CONN_TEAM": connection,
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": "airflow-db-not-allowed:///",
    }
    ran = replace(shell, environment=environment).run("run", key, "--conn-id", "team", "--", "env")
    assert (ran.returncode, ran.stderr) == (0, "")
    record = locks.get(key)
    assert record is not None
    assert f"DYNAMO_LOCK_TOKEN={record.token}" in ran.stdout
    # `run` leaves the environment of the task unchanged.
    of_airflow = {line for line in ran.stdout.splitlines() if line.startswith("AIRFLOW__")}
    assert of_airflow == {
        f"{name}={value}"
        for name, value in {**os.environ, **environment}.items()
        if name.startswith("AIRFLOW__")
    }


@pytest.mark.proof
def test_a_missing_connection_is_reported(shell: Shell, key: str) -> None:
    refused = shell.run("acquire", key, "--conn-id", "nobody")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "There is no connection 'nobody'" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    both = shell("acquire", key, "--conn-id", "nobody", "--region", "eu-central-1")
    assert "the connection has these settings" in both.stderr
