"""The commands on the tables of other lock libraries."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from deployments.engines import Engine
from tests.cli.conftest import Shell
from tests.formats.conftest import FOREIGN, make_place

DONE, USAGE, NOT_OURS = 0, 2, 3


@pytest.fixture(params=FOREIGN)
def there(request: pytest.FixtureRequest, shell: Shell, engine: Engine) -> Shell:
    """A shell whose environment names a table of that format."""
    table = make_place(request.param, engine).table
    return replace(
        shell,
        environment={**shell.environment, "DYNAMO_LOCK_FORMAT": request.param, "DYNAMO_LOCK_TABLE": table},
    )


@pytest.fixture(autouse=True)
def settles_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """See `tests.formats.conftest.settles_soon`."""
    monkeypatch.setattr("airflow_dynamo_lock.core.foreign.s3_requests.SETTLE", 0.02)


def test_a_lock_is_taken_seen_renewed_and_given_back(there: Shell, key: str) -> None:
    acquired = there("acquire", key, "--owner", "ada", "--lease-duration", "15 minutes")
    lease_id = acquired.stdout.strip()
    assert (acquired.returncode, acquired.stdout) == (DONE, f"{lease_id}\n"), acquired.stderr
    refused = there("acquire", key, "--no-wait")
    assert (refused.returncode, "Locked by ada since" in refused.stderr) == (NOT_OURS, True)
    assert "ada" in there("get", key).stdout
    (listed,) = [each for each in json.loads(there("list", "--json").stdout) if each["key"] == key]
    assert (listed["held"], listed["token"], listed["holders"][0]["lease_seconds"]) == (True, None, 900)
    assert there("renew", key, lease_id).stdout == f"{lease_id}\n"
    assert there("release", key, lease_id).returncode == DONE
    assert there("release", key, lease_id).returncode == NOT_OURS
    assert json.loads(there("get", key, "--json").stdout)["held"] is False


def test_a_lock_is_broken(there: Shell, key: str) -> None:
    lease_id = there("acquire", key).stdout.strip()
    asked = there("break", key)
    assert (asked.returncode, "add --yes" in asked.stderr) == (USAGE, True)
    assert there("break", key, "--yes").returncode == DONE
    assert there("renew", key, lease_id).returncode == NOT_OURS


def test_a_command_runs_under_it_and_has_no_token(there: Shell, key: str) -> None:
    ran = there.run("run", key, "--", "sh", "-c", "echo $DYNAMO_LOCK_KEY-$DYNAMO_LOCK_TOKEN-; exit 7")
    assert (ran.returncode, ran.stdout) == (7, f"{key}--\n"), ran.stderr


@pytest.mark.parametrize("command", [["table", "check"], ["doctor"]], ids=" ".join)
def test_the_table_is_as_it_should_be(there: Shell, command: list[str]) -> None:
    checked = there(*command)
    assert checked.returncode == DONE, checked.stdout + checked.stderr


def test_doctor_leaves_nothing_behind_that_can_be_deleted(there: Shell) -> None:
    for _ in range(2):
        assert there("doctor").returncode == DONE
    left = json.loads(there("list", "--prefix", "dynamo-lock doctor", "--json").stdout)
    assert len(left) == (1 if there.environment["DYNAMO_LOCK_FORMAT"] == "s3" else 0)


def test_a_table_is_made_as_its_library_would(shell: Shell, key: str) -> None:
    table = "made-by-us"
    made = shell("table", "create", "--format", "amazon-lock-client", "--sort-key", "range", "--table", table)
    assert made.returncode == DONE, made.stderr
    options = ["--format", "amazon-lock-client", "--table", table]
    assert "sort key" in shell("table", "check", *options).stderr
    lease_id = shell("acquire", "a::b", *options, "--sort-key", "range").stdout.strip()
    assert shell("release", "a::b", lease_id, *options, "--sort-key", "range").returncode == DONE
