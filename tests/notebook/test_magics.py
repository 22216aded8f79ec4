"""The magics around the cell: configuration, completion, tables of locks, loading and unloading."""

from __future__ import annotations

import re

import pytest

from airflow_dynamo_lock import LockClient
from deployments.kernels import Kernel
from tests.notebook.conftest import TABLE

pytestmark = pytest.mark.proof


def completions(kernel: Kernel, code: str) -> list[str]:
    """Return what the kernel offers at the end of the code."""
    reply = kernel.client.complete(code, reply=True, timeout=60)
    found: list[str] = reply["content"]["matches"]
    return found


def test_the_configuration_has_defaults_for_all_cells(kernel: Kernel, locks: LockClient, key: str) -> None:
    kernel.run("%config DynamoLockMagics.owner = 'the repair notebook'")
    kernel.run("%config DynamoLockMagics.lease = 77.0")
    cell = kernel.run(f"%%dynamo_lock '{key}'\n(lease.owner, lease.lease_ms)")
    assert cell.outputs[-1]["text"] == "('the repair notebook', 77000)"

    cell = kernel.run(
        f"%%dynamo_lock '{key}' --owner somebody --lease-duration 50s\n(lease.owner, lease.lease_ms)"
    )
    assert cell.outputs[-1]["text"] == "('somebody', 50000)"

    kernel.run("%config DynamoLockMagics.table = 'no_such_table'")
    assert kernel.run(f"%%dynamo_lock '{key}'\n1").error == "LockTableError"
    assert kernel.run(f"%%dynamo_lock '{key}' --table {TABLE}\n1").error is None
    kernel.run("%config DynamoLockMagics.table = None")
    kernel.run("%config DynamoLockMagics.owner = None")


def test_locks_are_shown_as_a_table(kernel: Kernel, locks: LockClient, key: str) -> None:
    evil = f"{key}/<script>alert(1)</script>"
    locks.acquire(evil, owner="<img src=x>")

    table = kernel.run(f"%dynamo_locks '{key}'").outputs[-1]

    assert re.search(r"held by +lease id", table["text"])
    assert "<img src=x>" in table["text"]
    assert "&lt;script&gt;" in table["html"]
    assert "&lt;img src=x&gt;" in table["html"]
    assert "<script" not in table["html"]
    assert "<img" not in table["html"]
    nothing = kernel.run("%dynamo_locks no-such-prefix").outputs[-1]
    assert nothing["text"] == f"The table '{TABLE}' has no locks whose keys begin with 'no-such-prefix'."


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ("--table no_such_table", "TableMissingError", "'no_such_table' does not exist"),
        ("--region x --endpoint-url http://127.0.0.1:99999", "LockError", "check the endpoint URL"),
        ("--conn-id lock_prod --region x", "UsageError", "--conn-id excludes --region"),
    ],
    ids=["no table", "no such port", "wrong usage"],
)
def test_a_list_that_fails_shows_one_line(kernel: Kernel, options: str, error: str, sentence: str) -> None:
    cell = kernel.run(f"%dynamo_locks {options}")
    assert cell.error == error
    (line,) = cell.reply["traceback"] if error != "UsageError" else cell.streamed.splitlines()
    assert sentence in line


def test_a_key_is_shown_as_text(kernel: Kernel) -> None:
    cell = kernel.run("%%dynamo_lock '<b>bold</b>'\n1")
    assert "&lt;b&gt;bold" in cell.outputs[0]["html"]
    assert "<b>" not in cell.outputs[0]["html"]


def test_leases_and_records_have_a_display(kernel: Kernel, key: str) -> None:
    lease = kernel.run(f"%%dynamo_lock '{key}' --owner '<i>ann</i>'\nlease").outputs[-1]
    assert "<td" in lease["html"]
    assert "&lt;i&gt;ann&lt;/i&gt;" in lease["html"]
    assert "valid for" in lease["html"]
    record = kernel.run(
        "import boto3\nfrom airflow_dynamo_lock import LockClient\n"
        f"LockClient(boto3.client('dynamodb'), table='{TABLE}').get('{key}')"
    ).outputs[-1]
    assert "<td" in record["html"]


def test_completion(kernel: Kernel, key: str) -> None:
    kernel.run(f"%%dynamo_lock '{key}'\n1")
    assert {"--wait", "--mode", "--table"} <= set(completions(kernel, "%%dynamo_lock --"))
    assert completions(kernel, "%%dynamo_lock --mo")[0] == "--mode"
    assert {"shared", "exclusive"} <= set(completions(kernel, "%%dynamo_lock --mode "))
    assert key in completions(kernel, "%%dynamo_lock ")


def test_without_airflow_a_connection_is_refused_in_one_sentence(kernel: Kernel, key: str) -> None:
    kernel.run("import sys; sys.modules['airflow_dynamo_lock.airflow.hooks'] = None")
    cell = kernel.run("%dynamo_locks --conn-id lock_prod")
    assert cell.error == "LockValueError"
    assert "--conn-id needs Airflow" in cell.reply["evalue"]


def test_unloading_leaves_nothing_behind(kernel: Kernel, key: str) -> None:
    state = (
        "shell = get_ipython()\n"
        "[len(shell.input_transformers_cleanup), len(shell.configurables), "
        "len(shell.strdispatchers['complete_command'].regexs), "
        "len(shell.display_formatter.formatters['text/html'].type_printers), "
        "sorted(name for kind in shell.magics_manager.magics.values() for name in kind if 'lock' in name)]"
    )
    loaded = kernel.run(state).outputs[-1]["text"]
    kernel.run("%unload_ext airflow_dynamo_lock")
    without = kernel.run(state).outputs[-1]["text"]
    assert kernel.run(f"%%dynamo_lock '{key}'\n1").error == "UsageError"
    assert "dynamo" not in without
    kernel.run("%load_ext airflow_dynamo_lock")
    assert kernel.run(state).outputs[-1]["text"] == loaded
    kernel.run("%reload_ext airflow_dynamo_lock")
    assert kernel.run(state).outputs[-1]["text"] == loaded
