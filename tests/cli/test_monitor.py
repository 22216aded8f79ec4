"""`check` for cron and Nagios, and `metrics` for Prometheus, on a real table."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_dynamo_lock import LockClient, LockTableError, LockUnavailableError
from deployments.engines import Engine
from tests.cli.conftest import Shell


def test_a_table_without_anything_to_report_is_ok(shell: Shell, locks: LockClient, key: str) -> None:
    locks.acquire(key)
    checked = shell("check", key, "--held-longer", "1h", "--waiting-longer", "1h", "--lost-within", "1h")

    assert checked.returncode == 0
    assert checked.stdout == "OK: 1 locks, 1 held, 0 waiting | held=1 waiting=0 longest_wait=0s\n"


def test_a_lock_that_is_held_for_too_long_is_critical(shell: Shell, locks: LockClient, key: str) -> None:
    locks.acquire(key)
    checked = shell("check", key, "--held-longer", "0s")

    assert checked.returncode == 2
    first, second = checked.stdout.splitlines()
    assert first.startswith("CRITICAL: 1 finding in 1 locks, 1 held, 0 waiting | held=1 ")
    assert second.startswith(f"The lock '{key}' has been held for 1 s by somebody else since ")


def test_a_lost_lease_is_critical(shell: Shell, locks: LockClient, key: str) -> None:
    locks.break_lock(key, locks.acquire(key).lease_id, by="anna", reason="a drill")
    checked = shell("check", key, "--lost-within", "1h")

    assert checked.returncode == 2
    assert f"somebody else has lost the lock '{key}': it was broken by anna (a drill) at " in checked.stdout


def test_one_lock_may_have_several_findings(shell: Shell, locks: LockClient, key: str) -> None:
    locks.break_lock(key, locks.acquire(key).lease_id)
    locks.acquire(key)
    checked = shell("check", key, "--held-longer", "0s", "--lost-within", "1h")

    first, *findings = checked.stdout.splitlines()
    assert first.startswith("CRITICAL: 2 findings in 1 locks, 1 held, ")
    assert len(findings) == 2


def test_a_table_that_cannot_be_read_is_unknown(shell: Shell) -> None:
    checked = shell("check", "--lost-within", "1h", DYNAMO_LOCK_TABLE="nowhere")
    assert checked.returncode == 3
    assert checked.stdout.startswith("UNKNOWN: ")
    assert "'nowhere' does not exist" in checked.stdout


def test_a_connection_that_cannot_be_looked_up_is_unknown(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise LockUnavailableError("The vault does not answer.", maybe_applied=False)

    monkeypatch.setattr("airflow_dynamo_lock.cli.options.airflow_hook", refuse)
    checked = shell("check", "--lost-within", "1h", "--conn-id", "locks")
    assert (checked.returncode, checked.stdout) == (3, "UNKNOWN: The vault does not answer.\n")


def test_metrics_count_damaged_records_and_refuse_a_table_with_other_keys(
    shell: Shell, engine: Engine, locks: LockClient, key: str
) -> None:
    damaged, sdk = {"key": {"S": key}, "entry": {"S": "lock"}}, engine.client()
    sdk.put_item(TableName=locks.table, Item=damaged)
    printed = shell("metrics")
    sdk.delete_item(TableName=locks.table, Key=damaged)  # other tests list the table without a warning
    assert f'dynamo_lock_damaged{{table="{locks.table}"}} 1\n' in printed.stdout
    assert f"The record of the lock {key!r} in table" in printed.stderr

    name = "empty-with-other-keys"
    sdk.create_table(
        TableName=name,
        AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
        KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
        BillingMode="PAY_PER_REQUEST",
    )
    refused = shell("metrics", "--table", name)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert f"The table '{name}' is not a lock table" in refused.stderr


def test_a_table_with_other_keys_is_a_table_error(shell: Shell, engine: Engine, other_table: str) -> None:
    checked = shell("check", "--lost-within", "1h", "--table", other_table)
    assert checked.returncode == 3
    assert checked.stdout.startswith(f"UNKNOWN: The table '{other_table}' is not a lock table")

    printed = shell("metrics", "--table", other_table)
    assert (printed.returncode, printed.stdout) == (1, "")
    assert f"The table '{other_table}' is not a lock table" in printed.stderr

    with pytest.raises(LockTableError, match="is not a lock table"):
        LockClient(engine.client(), table=other_table).survey()


def test_a_check_without_a_limit_is_wrong_usage(shell: Shell) -> None:
    checked = shell("check")
    assert checked.returncode == 2
    assert "at least one of --held-longer" in checked.stderr


@pytest.mark.parametrize(
    "arguments",
    [["--table", "a table"], ["--endpoint-url", "http://u:p@127.0.0.1:1"], ["--partition-key", "id"]],
    ids=lambda arguments: arguments[0],
)
def test_an_argument_that_can_never_work_is_wrong_usage(shell: Shell, arguments: list[str]) -> None:
    checked = shell("check", "--lost-within", "1h", *arguments)
    assert (checked.returncode, checked.stdout) == (2, "")
    assert len(checked.stderr.splitlines()) == 1


@pytest.mark.parametrize("keys", [0, 5])
def test_metrics(shell: Shell, locks: LockClient, key: str, keys: int) -> None:
    locks.acquire(key)
    printed = shell("metrics", "--keys", str(keys)).stdout

    assert f'dynamo_lock_held{{table="{locks.table}"}} ' in printed
    assert ("dynamo_lock_key_holders" in printed) is bool(keys)
    assert printed.endswith("# EOF\n")
