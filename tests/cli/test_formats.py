"""The commands on tables in foreign formats."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from deployments.engines import Engine
from tests.cli.conftest import Shell
from tests.formats.conftest import FOREIGN, make_place

DONE, USAGE, NOT_OURS = 0, 2, 3


@pytest.fixture(params=FOREIGN)
def foreign_shell(request: pytest.FixtureRequest, shell: Shell, engine: Engine) -> Shell:
    """A shell whose environment names a table of a foreign format."""
    table = make_place(request.param, engine).table
    return replace(
        shell,
        environment={**shell.environment, "DYNAMO_LOCK_FORMAT": request.param, "DYNAMO_LOCK_TABLE": table},
    )


@pytest.fixture(autouse=True)
def short_settle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the wait as `tests.formats.conftest.short_settle_time` does."""
    monkeypatch.setattr("airflow_dynamo_lock.core.foreign.s3_requests.SETTLE", 0.02)


def test_a_lock_is_acquired_shown_renewed_and_released(foreign_shell: Shell, key: str) -> None:
    acquired = foreign_shell("acquire", key, "--owner", "ada", "--lease-duration", "15 minutes")
    lease_id = acquired.stdout.strip()
    assert (acquired.returncode, acquired.stdout) == (DONE, f"{lease_id}\n"), acquired.stderr
    refused = foreign_shell("acquire", key, "--no-wait")
    assert (refused.returncode, "Locked by ada since" in refused.stderr) == (NOT_OURS, True)
    assert "ada" in foreign_shell("get", key).stdout
    (listed,) = [each for each in json.loads(foreign_shell("list", "--json").stdout) if each["key"] == key]
    assert (listed["held"], listed["token"], listed["holders"][0]["lease_seconds"]) == (True, None, 900)
    assert foreign_shell("renew", key, lease_id).stdout == f"{lease_id}\n"
    assert foreign_shell("release", key, lease_id).returncode == DONE
    assert foreign_shell("release", key, lease_id).returncode == NOT_OURS
    assert json.loads(foreign_shell("get", key, "--json").stdout)["held"] is False


def test_a_lock_is_broken(foreign_shell: Shell, key: str) -> None:
    lease_id = foreign_shell("acquire", key).stdout.strip()
    asked = foreign_shell("break", key)
    assert (asked.returncode, "add --yes" in asked.stderr) == (USAGE, True)
    assert foreign_shell("break", key, "--yes").returncode == DONE
    assert foreign_shell("renew", key, lease_id).returncode == NOT_OURS


def test_a_command_runs_under_the_lock_without_a_token(foreign_shell: Shell, key: str) -> None:
    ran = foreign_shell.run("run", key, "--", "sh", "-c", "echo $DYNAMO_LOCK_KEY-$DYNAMO_LOCK_TOKEN-; exit 7")
    assert (ran.returncode, ran.stdout) == (7, f"{key}--\n"), ran.stderr


@pytest.mark.parametrize("command", [["table", "check"], ["doctor"]], ids=" ".join)
def test_a_correct_table_passes_the_checks(foreign_shell: Shell, command: list[str]) -> None:
    checked = foreign_shell(*command)
    assert checked.returncode == DONE, checked.stdout + checked.stderr


def test_doctor_deletes_its_lock_where_it_can(foreign_shell: Shell) -> None:
    for _ in range(2):
        assert foreign_shell("doctor").returncode == DONE
    left = json.loads(foreign_shell("list", "--prefix", "dynamo-lock doctor", "--json").stdout)
    assert len(left) == (1 if foreign_shell.environment["DYNAMO_LOCK_FORMAT"] == "s3" else 0)


def test_a_table_is_created_with_a_chosen_sort_key(shell: Shell, key: str) -> None:
    table = "made-by-us"
    made = shell("table", "create", "--format", "amazon-lock-client", "--sort-key", "range", "--table", table)
    assert made.returncode == DONE, made.stderr
    options = ["--format", "amazon-lock-client", "--table", table]
    checked = shell("table", "check", *options)
    assert (checked.returncode, "sort key" in checked.stderr) == (1, True)
    lease_id = shell("acquire", "a::b", *options, "--sort-key", "range").stdout.strip()
    assert shell("release", "a::b", lease_id, *options, "--sort-key", "range").returncode == DONE
