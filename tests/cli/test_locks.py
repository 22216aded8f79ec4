"""The commands that acquire, show and administer locks, and `doctor`."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from rich.console import Console

from airflow_dynamo_lock import Lease, LockClient
from airflow_dynamo_lock.cli import show
from deployments.engines import Engine
from deployments.hold_times import make_usual
from deployments.patience import PATIENCE, wait_until
from deployments.proxy import Proxy
from tests.cli.conftest import Shell, read_until, terminal
from tests.security.policies import Guarded
from tests.security.test_permissions import policy_of
from tests.suites import some_in_proof

DONE, FAILED, USAGE, NOT_OURS = 0, 1, 2, 3


def stderr_of(result: subprocess.CompletedProcess[str], code: int) -> str:
    """Return what a command has printed to stderr. Check its exit code, and that it printed no traceback."""
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr.strip()


# -- acquire, renew, release ------------------------------------------------------------------------------------------


def test_acquire_prints_only_the_lease_id_which_release_accepts(
    shell: Shell, locks: LockClient, key: str
) -> None:
    acquired = shell.run(
        "acquire", key, "--owner", "ada", "--lease-duration", "15 minutes", "--data", '{"a": 1}'
    )
    lease_id = acquired.stdout.strip()

    assert stderr_of(acquired, DONE) == ""
    assert acquired.stdout == f"{lease_id}\n"
    record = locks.get(key)
    assert record is not None
    assert (record.data, record.holders[lease_id].owner, record.holders[lease_id].lease_ms) == (
        {"a": 1},
        "ada",
        900_000,
    )

    renewed = shell("renew", key, lease_id)
    assert renewed.stdout == f"{lease_id}\n"
    assert stderr_of(shell.run("release", key, lease_id), DONE) == ""
    assert "does not hold the lock" in stderr_of(shell("release", key, lease_id), NOT_OURS)
    assert "does not hold the lock" in stderr_of(shell("renew", key, lease_id), NOT_OURS)


def test_the_refusal_of_a_held_lock_names_the_holder(shell: Shell, locks: LockClient, key: str) -> None:
    locks.acquire(key)

    for options in (["--no-wait"], ["--wait-time", "0.5s"]):
        refused = shell("acquire", key, *options)
        assert refused.stdout == ""
        assert "Locked by somebody else since" in stderr_of(refused, NOT_OURS)


def test_acquire_waits_for_the_lock(shell: Shell, locks: LockClient, key: str) -> None:
    lease = locks.acquire(key)
    waiting = shell.start("acquire", key)
    wait_until(lambda: locks.waiters(key))
    locks.release(lease)

    out, _ = waiting.communicate(timeout=PATIENCE)

    assert waiting.returncode == DONE
    record = locks.get(key)
    assert record is not None
    assert out.strip() in record.holders


def test_semaphores_and_shared_locks_have_several_holders(shell: Shell, key: str) -> None:
    for _ in range(2):
        assert stderr_of(shell("acquire", key, "--capacity", "2", "--no-wait"), DONE) == ""
    assert "Locked by" in stderr_of(shell("acquire", key, "--capacity", "2", "--no-wait"), NOT_OURS)
    assert "with a capacity of 2, not 5" in stderr_of(shell("acquire", key, "--capacity", "5"), USAGE)

    for _ in range(2):
        assert stderr_of(shell("acquire", f"{key}/file", "--mode", "shared", "--no-wait"), DONE) == ""
    assert "Locked by" in stderr_of(shell("acquire", f"{key}/file", "--no-wait"), NOT_OURS)


@pytest.mark.parametrize("output", some_in_proof(["| true", ">/dev/full", ">&-"], "| true"))
@pytest.mark.parametrize("options", some_in_proof(["", "--json"], ""))
def test_a_lock_is_released_if_its_lease_id_cannot_be_printed(
    shell: Shell, locks: LockClient, key: str, options: str, output: str
) -> None:
    # `true` has exited before the command prints.
    result = shell.script(f'$DYNAMO_LOCK acquire "$KEY" --no-wait {options} {output}', KEY=key)
    error = stderr_of(result, FAILED)
    assert "was released, because its lease id could not be printed" in error
    assert len(error.splitlines()) == 1
    record = locks.get(key)
    assert record is not None
    assert not record.holders


# -- show -------------------------------------------------------------------------------------------------------------


def test_get_list_and_waiters_show_the_holder_and_the_waiter(
    shell: Shell, locks: LockClient, key: str
) -> None:
    lease = locks.acquire(key)
    waiting = shell.start("acquire", key, "--owner", "bob", "--wait-time", "1 hour")
    try:
        wait_until(lambda: locks.waiters(key))

        assert lease.lease_id in shell("get", key).stdout
        (holder,) = json.loads(shell("get", key, "--json").stdout)["holders"]
        assert (holder["lease_id"], holder["owner"]) == (lease.lease_id, "somebody else")
        assert "bob" in shell("waiters", key).stdout
        (waiter,) = json.loads(shell("waiters", key, "--json").stdout)
        assert waiter["owner"] == "bob"
        (listed,) = json.loads(shell("list", "--prefix", key, "--json").stdout)
        assert (listed["key"], listed["held"]) == (key, True)
        assert lease.lease_id in shell("list").stdout
    finally:
        waiting.kill()
        waiting.communicate()


def test_waiters_shows_the_expected_wait(shell: Shell, locks: LockClient, key: str) -> None:
    """The column is omitted while no wait can be estimated."""
    for name, known in ((f"{key}/unknown", False), (key, True)):
        if known:
            make_usual(locks, name, timedelta(hours=8))
        locks.acquire(name)
        for number in (1, 2):
            shell.start("acquire", name, "--owner", f"waiter {number}", "--wait-time", "1 hour")
            wait_until(lambda name=name, number=number: len(locks.waiters(name)) == number)  # type: ignore[misc]

        shown = shell("waiters", name).stdout
        waits = [
            each["expected_wait_seconds"] for each in json.loads(shell("waiters", name, "--json").stdout)
        ]

        if known:
            assert re.findall("expected|about [0-9]+ h", shown) == [
                "expected",
                "about 8 h",
                "about 16 h",
            ]
            assert waits == pytest.approx([8 * 3600, 16 * 3600], abs=PATIENCE)
        else:
            assert "expected" not in shown
            assert "waiter 2" in shown
            assert waits == [None, None]


def test_a_waiting_command_shows_the_expected_wait_on_a_terminal(
    shell: Shell, locks: LockClient, key: str
) -> None:
    make_usual(locks, key, timedelta(hours=8))
    lease = locks.acquire(key)
    with terminal(shell, f"$DYNAMO_LOCK run {key} -- echo done.") as terminal_end:
        read_until("waiting: 1st of 1, about 8 h", terminal_end)
        locks.release(lease)
        read_until("done.", terminal_end)


def test_a_lock_without_a_record_is_free(shell: Shell, key: str) -> None:
    assert "free" in shell("get", key).stdout
    assert json.loads(shell("get", key, "--json").stdout)["held"] is False
    assert json.loads(shell("list", "--held", "--prefix", key, "--json").stdout) == []


def test_binary_data_is_printed_as_base64_text(shell: Shell, locks: LockClient, key: str) -> None:
    data = {"state": b"\x00\xff", "parts": [b"a", "b"]}
    encoded = {"state": "AP8=", "parts": ["YQ==", "b"]}
    locks.acquire(key, data=data)

    assert json.loads(shell("get", key, "--json").stdout)["data"] == encoded
    (listed,) = json.loads(shell("list", "--prefix", key, "--json").stdout)
    assert listed["data"] == encoded
    assert json.dumps(encoded, indent=2) in shell("get", key).stdout


def test_an_empty_result_is_reported_in_one_sentence(shell: Shell, locks: LockClient, key: str) -> None:
    nothing = shell("list", "--prefix", key)
    assert (nothing.returncode, nothing.stdout) == (DONE, "")
    assert nothing.stderr == f"No locks with the prefix {key!r} in table 'airflow_locks'.\n"

    locks.release(locks.acquire(key))
    assert "free" in shell("list", "--prefix", key).stdout
    held = shell("list", "--prefix", key, "--held")
    assert (held.stdout, held.stderr) == (
        "",
        f"No held locks with the prefix {key!r} in table 'airflow_locks'.\n",
    )
    waiters = shell("waiters", key)
    assert (waiters.stdout, waiters.stderr) == ("", f"No waiters for the lock {key!r}.\n")

    for command in (["list", "--prefix", key, "--held"], ["waiters", key]):
        empty = shell(*command, "--json")
        assert (json.loads(empty.stdout), empty.stderr) == ([], "")


@pytest.mark.parametrize("options", ["", "--json", "-v"])
def test_list_skips_a_damaged_record_with_a_warning(
    shell: Shell, engine: Engine, locks: LockClient, key: str, options: str
) -> None:
    locks.acquire(f"{key}/good")
    damaged, sdk = [f"{key}/bad/{number}" for number in (1, 2)], engine.client()
    items = [{"key": {"S": each}, "entry": {"S": "lock"}} for each in damaged]
    for item in items:
        sdk.put_item(TableName=locks.table, Item=item)

    listed = shell("list", "--prefix", key, *options.split())

    for item in items:  # other tests list the table without a warning
        sdk.delete_item(TableName=locks.table, Key=item)

    assert (listed.returncode, listed.stdout.count("somebody else")) == (DONE, 1)
    for each in damaged:
        assert listed.stderr.count(f"The record of the lock {each!r} in table") == 1


def test_watch_reports_a_damaged_record_once(
    shell: Shell, engine: Engine, locks: LockClient, key: str
) -> None:
    damaged, sdk = {"key": {"S": f"{key}/bad"}, "entry": {"S": "lock"}}, engine.client()
    lease = locks.acquire(f"{key}/good")
    watching = shell.start("watch", "--prefix", key, "--interval", "0.1s")
    try:
        assert watching.stdout
        assert watching.stderr
        assert json.loads(watching.stdout.readline())[0]["key"] == lease.key
        sdk.put_item(TableName=locks.table, Item=damaged)
        assert f"The record of the lock '{key}/bad' in table" in watching.stderr.readline()
        assert locks.release(lease)
        assert json.loads(watching.stdout.readline()) == []  # it has read the table again
        also = shell.start("watch", f"{key}/bad", lease.key, "--interval", "0.1s")
        assert also.stdout
        assert json.loads(also.stdout.readline())[0]["key"] == lease.key
        also.send_signal(signal.SIGINT)
        assert f"The record of the lock '{key}/bad' in table" in also.communicate(timeout=PATIENCE)[1]
    finally:
        sdk.delete_item(TableName=locks.table, Key=damaged)  # other tests list the table without a warning
        watching.send_signal(signal.SIGINT)
        _, err = watching.communicate(timeout=PATIENCE)
    assert watching.returncode == 130
    assert err.strip() == ""


@pytest.mark.parametrize("command", ["list", "list --prefix a --held", "watch", "check a --lost-within 1h"])
def test_a_table_with_other_keys_is_not_taken_for_one_without_locks(
    shell: Shell, other_table: str, command: str
) -> None:
    result = shell(*command.split(), "--table", other_table)
    assert result.returncode == (3 if command.startswith("check") else FAILED)
    assert f"The table '{other_table}' is not a lock table" in result.stdout + result.stderr


def test_a_role_that_may_only_scan_sees_that_there_are_no_locks(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, engine: Engine, key: str
) -> None:
    policy = {"Statement": [{"Effect": "Allow", "Action": "dynamodb:Scan", "Resource": "*"}]}
    monkeypatch.setattr(
        "airflow_dynamo_lock.cli.options._by_sdk", lambda *_: Guarded(engine.client(), policy)
    )
    assert stderr_of(shell("list", "--prefix", key), DONE).startswith("No locks")


def test_watch_prints_a_line_for_each_change(shell: Shell, locks: LockClient, key: str) -> None:
    watching = shell.start("watch", key, "--interval", "0.1s")
    try:
        assert watching.stdout
        assert json.loads(watching.stdout.readline())[0]["held"] is False
        locks.acquire(key)
        assert json.loads(watching.stdout.readline())[0]["held"] is True
    finally:
        watching.send_signal(2)
        _, err = watching.communicate(timeout=PATIENCE)
    assert watching.returncode == 130
    assert err.strip() == ""


@pytest.mark.parametrize("arguments", some_in_proof(["list", "list --json", "get k", "get k --json"], "list"))
def test_a_closed_pipe_is_no_failure_but_a_full_disk_is(shell: Shell, arguments: str) -> None:
    assert stderr_of(shell.script(f"$DYNAMO_LOCK {arguments} | true"), DONE) == ""
    assert stderr_of(shell.script(f"$DYNAMO_LOCK {arguments} >/dev/full"), FAILED) == (
        "dynamo-lock: No space left on device."
    )


@pytest.mark.parametrize(
    ("script", "code", "out", "error"),
    [
        ("run k -- echo done <&-", DONE, "done\n", ""),
        pytest.param("run k -- true >&-", DONE, "", "", marks=pytest.mark.proof),
        pytest.param("run k -- echo done 2>&-", DONE, "done\n", "", marks=pytest.mark.proof),
        ("break k <&-", USAGE, "", "add --yes"),
        ("get k >&-", FAILED, "", "Bad file descriptor"),
    ],
)
def test_closed_standard_streams(
    shell: Shell, locks: LockClient, key: str, script: str, code: int, out: str, error: str
) -> None:
    if "break" in script:
        locks.acquire(key)
    result = shell.script("$DYNAMO_LOCK " + script.replace(" k ", ' "$KEY" '), KEY=key)
    assert error in stderr_of(result, code)
    assert result.stdout == out
    assert len(result.stderr.splitlines()) <= 2


def test_the_exit_code_if_the_parent_ignores_sigchld(shell: Shell, locks: LockClient, key: str) -> None:
    script = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    result = shell.script(
        f'{sys.executable} -c "{script}" $DYNAMO_LOCK run "$KEY" -- sh -c "exit 7"', KEY=key
    )
    assert stderr_of(result, 7) == ""
    record = locks.get(key)
    assert record is not None
    assert not record.holders


def test_characters_that_the_locale_lacks_are_escaped(shell: Shell) -> None:
    result = shell.script("$DYNAMO_LOCK get schlüssel→", PYTHONIOENCODING="ascii:strict")
    assert stderr_of(result, DONE) == ""
    assert "schl\\xfcssel\\u2192" in result.stdout


@pytest.mark.parametrize("columns", [40, 80, 140, 200])
def test_a_narrow_terminal_shows_fewer_columns(columns: int) -> None:
    console = Console(width=columns, file=io.StringIO(), force_terminal=True, color_system=None)
    lease_id = "".join(map(chr, range(0x100, 0x124)))  # as long as a UUID
    lock = ("warehouse/orders", "held", "prod/etl/load", lease_id, "03:12:11", "4 s ago", "1767225600123")
    console.print(show.table(console, show.LOCK_COLUMNS, [lock]))
    waiter = ("1", "host-12.example:4711", "03:12:11", "about 12 min", "never", "1 of 3", "0", lease_id)
    console.print(show.table(console, show.WAITER_COLUMNS, [waiter]))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(shown.count(each) == 2 for each in lease_id), "it is folded, not cropped"
    if columns >= 80:
        assert shown.count(lease_id) == 2
        assert all(part in shown for part in ("warehouse/or", "held", "prod/etl/", "host-12.exam", "12 min"))
    assert (lock[-1] in shown) == (columns >= 140)


def test_watch_prints_every_change_also_after_an_outage(
    shell: Shell, engine: Engine, locks: LockClient, key: str
) -> None:
    with Proxy(engine.endpoint_url) as proxy:
        watching = shell.start("watch", key, "--interval", "0.1s", "--endpoint-url", proxy.endpoint_url)
        assert watching.stdout
        assert watching.stderr
        assert json.loads(watching.stdout.readline())[0]["capacity"] == 1
        locks.set_capacity(key, 3)
        assert json.loads(watching.stdout.readline())[0]["capacity"] == 3
        with proxy.breaking():
            assert "broke" in watching.stderr.readline()
            locks.set_capacity(key, 5)
        assert json.loads(watching.stdout.readline())[0]["capacity"] == 5
        watching.send_signal(signal.SIGINT)
        _, err = watching.communicate(timeout=PATIENCE)
    assert watching.returncode == 130
    assert "Traceback" not in err


# -- administer ------------------------------------------------------------------------------------------------------


def test_break_names_the_holder_and_needs_confirmation(shell: Shell, locks: LockClient, key: str) -> None:
    locks.acquire(key)

    refused = stderr_of(shell("break", key), USAGE)
    assert "held by somebody else" in refused
    assert "add --yes" in refused
    assert stderr_of(shell("break", key, "--yes"), DONE) == ""
    assert locks.try_acquire(key)
    assert "does not hold the lock" in stderr_of(shell("break", key, "nobody", "--yes"), NOT_OURS)
    assert "nothing to break" in stderr_of(shell("break", f"{key}/other"), NOT_OURS)


def test_the_record_shows_who_broke_a_lease_and_why(shell: Shell, locks: LockClient, key: str) -> None:
    lease = locks.acquire(key)
    assert stderr_of(shell("break", key, "--yes", "--reason", "a drill"), DONE) == ""

    loss = json.loads(shell("get", key, "--json").stdout)["last_loss"]
    assert (loss["lease_id"], loss["broken"], loss["reason"]) == (lease.lease_id, True, "a drill")
    assert loss["by"].endswith(f"@{socket.gethostname()}")
    assert f"it was broken by {loss['by']} (a drill) at " in stderr_of(
        shell("renew", key, lease.lease_id), NOT_OURS
    )


def test_remove_waiter_needs_confirmation(shell: Shell, locks: LockClient, key: str) -> None:
    locks.acquire(key)
    waiting = shell.start("run", key, "--", "true")
    wait_until(lambda: locks.waiters(key))
    (waiter,) = locks.waiters(key)

    refused = stderr_of(shell("remove-waiter", key, waiter.lease_id), USAGE)
    assert "has waited since" in refused
    assert "add --yes" in refused
    assert stderr_of(shell("remove-waiter", key, waiter.lease_id, "--yes", "--reason", "a drill"), DONE) == ""

    _, error = waiting.communicate(timeout=PATIENCE)
    assert waiting.returncode == NOT_OURS
    assert "was ended by " in error
    assert "(a drill): ask there before you run it again." in error
    assert "does not wait for the lock" in stderr_of(shell("remove-waiter", key, "nobody", "--yes"), NOT_OURS)


def test_break_can_be_declined_on_a_terminal(shell: Shell, locks: LockClient, key: str) -> None:
    locks.acquire(key)
    with terminal(shell, f"$DYNAMO_LOCK break {key}; echo exit $?.") as terminal_end:
        read_until("Break it? [y/N]: ", terminal_end)
        os.write(terminal_end, b"n\n")
        answer = read_until("exit 1.", terminal_end)
    assert "Not broken." in answer
    assert not locks.try_acquire(key)


def test_the_capacity_of_a_semaphore_is_set_and_unset(shell: Shell, locks: LockClient, key: str) -> None:
    assert json.loads(shell("capacity", key, "3", "--json").stdout)["capacity_pinned"] is True
    lease = locks.acquire(key, capacity=9)
    record = locks.get(key)
    assert record is not None
    assert record.capacity == 3
    assert "cannot be unset while the lock is held" in stderr_of(shell("capacity", key, "--unset"), USAGE)
    locks.release(lease)
    assert json.loads(shell("capacity", key, "--unset", "--json").stdout)["capacity_pinned"] is False
    assert "either a NUMBER" in stderr_of(shell("capacity", key), USAGE)


def test_doctor_finds_no_problem(shell: Shell) -> None:
    result = shell.run("doctor", "--json")
    assert result.returncode == DONE, result.stdout
    found = {each["what"]: each["verdict"] for each in json.loads(result.stdout)}
    assert {found["AWS"], found["table"], found["permissions"], found["clock"]} == {"ok"}


@pytest.mark.parametrize(
    ("role", "warnings"), [("Holder", {"table", "permissions"}), ("Administrator", {"permissions"})]
)
def test_doctor_accepts_a_role_with_its_permissions(
    shell: Shell, engine: Engine, monkeypatch: pytest.MonkeyPatch, role: str, warnings: set[str]
) -> None:
    sdk = engine.client()
    guarded = Guarded(sdk, policy_of(role))
    vars(guarded)["_request_signer"] = sdk._request_signer
    monkeypatch.setattr("airflow_dynamo_lock.cli.options._by_sdk", lambda *_: guarded)
    # An earlier test may have set up Airflow's logging to stdout in this process.
    monkeypatch.setattr("airflow_dynamo_lock.cli.doctor.find_spec", lambda _: None)
    result = shell("doctor", "--json")
    assert stderr_of(result, DONE) == ""
    found = {each["what"]: each for each in json.loads(result.stdout) if each["what"] != "clock"}
    assert {what for what, each in found.items() if each["verdict"] == "warning"} == warnings
    assert {each["verdict"] for each in found.values()} <= {"ok", "warning"}
    assert "only needed for" in found["permissions"]["found"]


def test_doctor_deletes_its_lock(shell: Shell, locks: LockClient) -> None:
    locks.release(locks.acquire("dynamo-lock doctor"))  # as an earlier version leaves it
    for _ in range(2):
        assert stderr_of(shell("doctor"), DONE) == ""
        assert locks.get("dynamo-lock doctor") is None
    assert locks.waiters("dynamo-lock doctor") == []


def test_doctor_does_not_delete_the_lock_of_another_doctor(
    shell: Shell, locks: LockClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both use the same key. The second one acquires it before the first one cleans up."""
    release, acquired = LockClient.release, list[Lease]()

    def release_and_acquire(client: LockClient, lease: Lease) -> bool:
        released = release(client, lease)
        acquired.append(locks.acquire(lease.key, timeout=0))
        return bool(released)

    monkeypatch.setattr(LockClient, "release", release_and_acquire)
    assert stderr_of(shell("doctor"), DONE) == ""
    monkeypatch.undo()

    (lease,) = acquired
    assert locks.renew(lease), "the lock of the second doctor is still held"
    locks.release(lease)


def test_table_check_accepts_what_table_create_creates(shell: Shell, key: str) -> None:
    name = "a_table_of_its_own"
    assert f"'{name}' does not exist" in stderr_of(shell("table", "check", "--table", name), FAILED)
    assert "is ready" in stderr_of(shell("table", "create", "--tablename", name), DONE)
    assert "is ready" in stderr_of(shell("table", "check", DYNAMO_LOCK_TABLE=name), DONE)
    assert stderr_of(shell("acquire", key, "--table", name), DONE) == ""


# -- errors, in one sentence each -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["acquire", "k", "--lease-duration", "3 wibbles"], "'3 wibbles' is not a duration"),
        (["watch", "--interval", "1000000000000 days"], "is too long"),
        (["watch", "--interval", "0"], "must be a finite time, more than zero"),
        (["run", "k", "--kill-after", "1000000000000 days", "--", "true"], "is too long"),
        # More levels than the JSON parser of any Python accepts. That of 3.13 accepts 3,000.
        (["acquire", "k", "--data", '{"a":' * 100_000 + "1" + "}" * 100_000], "must be a JSON object"),
        (["acquire", "k", "--slots", "3", "--capacity", "2"], "3 slots can never be free"),
        (["acquire", "k", "--mode", "shared", "--capacity", "2"], "shared mode"),
        (["acquire", "k", "--data", "[1]"], "must be a JSON object"),
        (["acquire", "k", "--priority", "much"], "not a valid integer"),
        (["acquire", ""], "must not be empty"),
        (["acquire"], "Missing argument 'KEY'"),
        (["release", "k"], "Missing argument 'LEASE_ID'"),
        (["acquire", "k", "--table", "a table"], "cannot be the name of the lock table"),
        (["acquire", "k", "--table", ""], "cannot be the name of the lock table"),
        (["capacity", "k", "0"], "capacity must be a whole number of at least 1"),
        (["nonsense"], "No such command 'nonsense'"),
        (["get", "k", "--format", "redis"], "'redis' is not one of"),
        (["waiters", "k", "--format", "awsflock"], "cannot have a queue"),
        (["capacity", "k", "3", "--format", "s3"], "more than one slot"),
        (["acquire", "k", "--format", "dyndbmutex", "--data", '{"a": 1}'], "cannot keep data"),
        (["acquire", "a::-", "--format", "python-dynamodb-lock"], "'partition key::sort key'"),
        (["get", "k", "--partition-key", "id"], "give no partition_key"),
        (["table", "create", "--format", "s3"], "create it as you create your other buckets"),
        (["migrate", "k"], "Missing option '--from-format'"),
        (["run", "k"], "Missing argument 'COMMAND...'"),
    ],
)
def test_wrong_arguments_are_reported(shell: Shell, arguments: list[str], sentence: str) -> None:
    assert sentence in stderr_of(shell(*arguments), USAGE)


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}, "credentials"),
        ({"AWS_PROFILE": "nobody"}, "profile"),
        ({"AWS_DEFAULT_REGION": None}, "region"),
        ({"AWS_ENDPOINT_URL_DYNAMODB": "http://127.0.0.1:1"}, "127.0.0.1:1"),
        ({"DYNAMO_LOCK_TABLE": "nowhere"}, "'nowhere' does not exist"),
    ],
    ids=["no credentials", "no such profile", "no region", "a dead endpoint", "no table"],
)
@pytest.mark.parametrize(
    "arguments",
    [
        ["acquire", "k"],
        ["renew", "k", "l"],
        ["release", "k", "l"],
        ["get", "k"],
        ["list"],
        ["watch"],
        ["waiters", "k"],
        ["break", "k"],
        ["remove-waiter", "k", "l"],
        ["capacity", "k", "2"],
        ["table", "check"],
        ["migrate", "--from-format", "awsflock", "--from-table", "nowhere"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_missing_settings_are_reported(
    shell: Shell, arguments: list[str], environment: dict[str, str | None], sentence: str
) -> None:
    short = ["--wait-time", "0"] if arguments[0] == "acquire" else []
    error = stderr_of(shell(*arguments[:1], *short, *arguments[1:], **environment), FAILED)
    assert sentence in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("config", "environment", "cause"),
    [
        ("", {"AWS_SECRET_ACCESS_KEY": None}, "AWS_SECRET_ACCESS_KEY"),
        ("[default]\ncredential_process = false", {}, "custom-process"),
        ("[default]\ncredential_process = /no/such/program", {}, "/no/such/program"),
        ("[default]\ncredential_process = echo '", {}, "No closing quotation"),
        ("[default", {}, "Unable to parse config file"),
    ],
    ids=["half of the credentials", "a failing process", "a missing process", "no command", "no config"],
)
@pytest.mark.parametrize("command", some_in_proof(["get k", "doctor"], "get k"))
def test_unusable_credentials_and_configuration_are_reported(
    shell: Shell,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    config: str,
    environment: dict[str, str | None],
    cause: str,
    command: str,
) -> None:
    monkeypatch.setattr("airflow_dynamo_lock.cli.doctor.find_spec", lambda _: None)
    file = tmp_path / "config"
    file.write_text(config)
    if not environment:
        environment = {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}
    result = shell(*command.split(), AWS_CONFIG_FILE=str(file), **environment)

    assert result.returncode == FAILED
    (line,) = (result.stdout + result.stderr).splitlines()
    assert cause in line
    assert "check the AWS credentials and configuration" in line


@pytest.mark.parametrize("command", ["get k", "doctor"])
@pytest.mark.parametrize(
    ("host", "code", "sentence"),
    [
        ("127.0.0.1:1", USAGE, "The endpoint URL contains a user name"),
        ("no..host", FAILED, "--region, --profile and --endpoint-url"),
    ],
    ids=["a URL", "no URL"],
)
@pytest.mark.parametrize("source", ["option", "environment"])
def test_an_endpoint_url_with_a_password_is_refused_and_not_shown(
    shell: Shell,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    host: str,
    code: int,
    sentence: str,
    source: str,
) -> None:
    monkeypatch.setattr("airflow_dynamo_lock.cli.doctor.find_spec", lambda _: None)
    url = f"http://u:hunter2@{host}"
    result = (
        shell(*command.split(), "--endpoint-url", url)
        if source == "option"
        else shell(*command.split(), AWS_ENDPOINT_URL_DYNAMODB=url)
    )
    assert result.returncode == (FAILED if command == "doctor" else code)
    assert sentence in result.stdout + result.stderr
    assert "hunter2" not in result.stdout + result.stderr


def test_an_empty_variable_does_not_select_the_default_table(shell: Shell, key: str) -> None:
    assert "cannot be the name of the lock table" in stderr_of(
        shell("acquire", key, DYNAMO_LOCK_TABLE=""), USAGE
    )
    assert "DYNAMO_LOCK_CONN_ID is empty" in stderr_of(shell("acquire", key, DYNAMO_LOCK_CONN_ID=""), USAGE)


def test_a_port_that_cannot_be_is_reported(shell: Shell) -> None:
    error = stderr_of(shell("get", "k", "--endpoint-url", "http://127.0.0.1:99999"), FAILED)
    assert "check the endpoint URL" in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("environment", "what", "sentence"),
    [
        ({"DYNAMO_LOCK_TABLE": "nowhere"}, "table", "'nowhere' does not exist"),
        ({"AWS_ENDPOINT_URL_DYNAMODB": "http://127.0.0.1:1"}, "table", "127.0.0.1:1"),
        ({"AWS_ENDPOINT_URL_DYNAMODB": "http://127.0.0.1:99999"}, "table", "check the endpoint URL"),
        ({"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}, "AWS", "no AWS credentials"),
        ({"AWS_DEFAULT_REGION": None}, "AWS", "region"),
    ],
    ids=["no table", "a dead endpoint", "no such port", "no credentials", "no region"],
)
def test_doctor_reports_missing_settings(
    shell: Shell,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str | None],
    what: str,
    sentence: str,
) -> None:
    # Airflow takes seconds to load.
    monkeypatch.setattr("airflow_dynamo_lock.cli.doctor.find_spec", lambda _: None)
    result = shell("doctor", "--json", **environment)
    assert result.returncode == FAILED
    (found,) = (each for each in json.loads(result.stdout) if each["verdict"] == "BAD")
    assert found["what"] == what
    assert sentence in found["found"]


def test_help_loads_neither_airflow_nor_the_sdk() -> None:
    loaded = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, airflow_dynamo_lock.cli.main\n"
            "print([each for each in ('airflow', 'boto3', 'botocore', 'rich') if each in sys.modules])",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert loaded.stdout.strip() == "[]"
