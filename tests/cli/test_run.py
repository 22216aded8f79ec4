"""``dynamo-lock run``: a command works while its lock is held, and no longer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from airflow_dynamo_lock import LockClient
from tests.cli.conftest import Shell

#: A command that says that it works, and ends when it is told to.
WORK = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"]


def until(true: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def works(process: subprocess.Popen[str]) -> int:
    """The command's process id, once it is at work."""
    assert process.stdout
    return int(process.stdout.readline())


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def is_free(locks: LockClient, key: str) -> bool:
    record = locks.get(key)
    return record is None or not record.holders


def test_the_command_has_the_lock_its_token_and_its_own_exit_code(
    shell: Shell, locks: LockClient, key: str
) -> None:
    script = (
        "import os; print(os.environ['DYNAMO_LOCK_KEY'], os.environ['DYNAMO_LOCK_LEASE_ID'], "
        "os.environ['DYNAMO_LOCK_TOKEN']); raise SystemExit(7)"
    )
    result = shell.run("run", key, "--", sys.executable, "-c", script)

    assert result.returncode == 7, result.stderr
    name, lease_id, token = result.stdout.rsplit(maxsplit=2)
    assert name == key
    record = locks.get(key)
    assert record is not None
    assert (int(token), lease_id in record.holders) == (record.token, False)


def test_it_waits_for_the_lock_and_holds_it_with_heartbeats(
    shell: Shell, locks: LockClient, key: str
) -> None:
    lease = locks.acquire(key)
    running = shell.start("run", "--lease-duration", "2s", key, "--", *WORK)
    until(lambda: locks.waiters(key))
    locks.release(lease)
    pid = works(running)

    def held_for_two_leases() -> bool:
        record = locks.get(key)
        assert record is not None
        (holder,) = record.holders.values()
        assert holder.renewed_at
        assert holder.acquired_at
        return (holder.renewed_at - holder.acquired_at).total_seconds() >= 4.0

    until(held_for_two_leases)
    assert not is_free(locks, key)
    running.terminate()
    running.communicate(timeout=20)
    assert not is_alive(pid)
    assert running.returncode == 128 + signal.SIGTERM
    assert is_free(locks, key)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_signals_are_passed_on(shell: Shell, locks: LockClient, key: str, number: signal.Signals) -> None:
    script = (
        "import signal, sys, time, os\n"
        f"signal.signal({int(number)}, lambda *_: sys.exit(40 + {int(number)}))\n"
        "print(os.getpid(), flush=True); time.sleep(60)"
    )
    running = shell.start("run", key, "--", sys.executable, "-c", script)
    works(running)

    running.send_signal(number)

    running.communicate(timeout=20)
    assert running.returncode == 40 + number
    assert is_free(locks, key)


def test_a_command_that_is_killed_frees_the_lock(shell: Shell, locks: LockClient, key: str) -> None:
    running = shell.start("run", key, "--", *WORK)
    os.kill(works(running), signal.SIGKILL)

    running.communicate(timeout=20)

    assert running.returncode == 128 + signal.SIGKILL
    assert is_free(locks, key)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can do that")
def test_the_command_does_not_outlive_a_dynamo_lock_that_is_killed(
    shell: Shell, locks: LockClient, key: str
) -> None:
    running = shell.start("run", key, "--", *WORK)
    pid = works(running)

    running.kill()
    running.communicate(timeout=20)

    until(lambda: not is_alive(pid))
    assert not is_free(locks, key), "until its lease runs out"


def test_the_command_is_ended_when_the_lease_is_lost(shell: Shell, locks: LockClient, key: str) -> None:
    running = shell.start("run", "--lease-duration", "3s", key, "--", *WORK)
    pid = works(running)
    record = locks.get(key)
    assert record is not None
    locks.break_lock(key, next(iter(record.holders)))

    _, complaint = running.communicate(timeout=20)

    assert running.returncode == 3
    assert "was lost while the command ran" in complaint
    assert "Traceback" not in complaint
    assert not is_alive(pid)


def test_a_command_that_does_not_want_to_end_is_killed(shell: Shell, locks: LockClient, key: str) -> None:
    script = (
        "import os, signal, time; signal.signal(15, signal.SIG_IGN)\n"
        "print(os.getpid(), flush=True); time.sleep(60)"
    )
    running = shell.start(
        "run", "--lease-duration", "3s", "--kill-after", "0.5s", key, "--", sys.executable, "-c", script
    )
    pid = works(running)
    record = locks.get(key)
    assert record is not None
    locks.break_lock(key, next(iter(record.holders)))

    running.communicate(timeout=20)

    assert running.returncode == 3
    assert not is_alive(pid)


def test_who_does_not_get_the_lock_does_not_run(
    shell: Shell, locks: LockClient, key: str, tmp_path: Path
) -> None:
    locks.acquire(key)
    result = shell.run("run", "--no-wait", key, "--", "touch", str(tmp_path / "trace"))

    assert result.returncode == 3
    assert "Locked by somebody else" in result.stderr
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_who_is_interrupted_while_waiting_runs_nothing(
    shell: Shell, locks: LockClient, key: str, number: signal.Signals, code: int
) -> None:
    locks.acquire(key)
    waiting = shell.start("run", key, "--", *WORK)
    until(lambda: locks.waiters(key))

    waiting.send_signal(number)

    out, complaint = waiting.communicate(timeout=20)
    assert (waiting.returncode, out) == (code, "")
    assert "Traceback" not in complaint
    assert locks.waiters(key) == [], "it has left the line"


@pytest.mark.parametrize(("there", "code"), [(False, 127), (True, 126)])
def test_a_command_that_cannot_be_run_takes_no_lock(
    shell: Shell, locks: LockClient, key: str, tmp_path: Path, there: bool, code: int
) -> None:
    command = tmp_path / "command"
    if there:
        command.touch(mode=0o600)
    result = shell("run", key, "--", str(command))
    assert result.returncode == code
    assert repr(str(command)) in result.stderr
    assert locks.get(key) is None


def test_a_command_that_turns_out_not_to_be_one_frees_the_lock(
    shell: Shell, locks: LockClient, key: str, tmp_path: Path
) -> None:
    command = tmp_path / "command"
    command.write_text("no program")
    command.chmod(0o700)
    result = shell.run("run", key, "--", str(command))
    assert result.returncode == 126
    assert "cannot be executed: Exec format error" in result.stderr
    assert is_free(locks, key)


def test_without_what_it_takes_to_lock_nothing_runs(shell: Shell, key: str, tmp_path: Path) -> None:
    nowhere = replace(shell, environment={**shell.environment, "DYNAMO_LOCK_TABLE": "nowhere"})
    result = nowhere.run("run", key, "--", "touch", str(tmp_path / "trace"))
    assert result.returncode == 1
    assert "'nowhere' does not exist" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "trace").exists()
