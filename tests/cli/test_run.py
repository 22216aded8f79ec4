"""``dynamo-lock run``: a command runs only while its lock is held."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from airflow_dynamo_lock import LockClient, LockDeadlockError
from airflow_dynamo_lock.cli.run import Child
from deployments.engines import Engine, MotoServer
from deployments.patience import PATIENCE, wait_until
from deployments.proxy import Proxy, Rule
from tests.cli.conftest import DYNAMO_LOCK, TABLE, Shell, read_until, terminal
from tests.suites import some_in_proof

#: A command that prints its process id, and sleeps until a signal ends it.
WORK = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"]


def pid_of(process: subprocess.Popen[str]) -> int:
    """Wait until the command prints its process id, and return it."""
    assert process.stdout
    return int(process.stdout.readline())


def state(pid: int) -> str:
    """Return the state as ps shows it: T for a stopped process, Z for a zombie, empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    return state(pid) not in ("", "Z")


def break_lock(locks: LockClient, key: str) -> None:
    record = locks.get(key)
    assert record is not None
    locks.break_lock(key, next(iter(record.holders)))


def is_free(locks: LockClient, key: str) -> bool:
    record = locks.get(key)
    return record is None or not record.holders


def test_the_command_gets_the_token_and_determines_the_exit_code(
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


def test_a_nested_run_that_needs_the_same_lock_fails_at_once(shell: Shell, key: str) -> None:
    result = shell.run("run", key, "--", DYNAMO_LOCK, "run", "--wait-time", "1 hour", key, "--", "true")
    assert result.returncode == 3
    assert f"because it holds '{key}' itself" in result.stderr


def test_a_nested_run_takes_part_in_the_search_for_deadlocks(
    shell: Shell, locks: LockClient, key: str
) -> None:
    lease = locks.acquire(f"{key}/ours")
    running = shell.start("run", f"{key}/theirs", "--", DYNAMO_LOCK, "run", f"{key}/ours", "--", "true")

    def waits() -> bool:
        record = locks.get(f"{key}/theirs")
        return record is not None and any(each.waits for each in record.holders.values())

    wait_until(waits)
    local_error = ""
    try:  # the times that order the two waits may differ by 2 s, so either may fail
        locks.release(locks.acquire(f"{key}/theirs", timeout=PATIENCE, holding=[lease]))
    except LockDeadlockError as deadlock:
        local_error = str(deadlock)
    locks.release(lease)
    _, err = running.communicate(timeout=PATIENCE)
    assert running.returncode == (0 if local_error else 3), err
    assert f"holds '{key}/theirs' and waits for '{key}/ours'" in local_error + err


def test_run_waits_for_the_lock_and_sends_heartbeats(shell: Shell, locks: LockClient, key: str) -> None:
    lease = locks.acquire(key)
    running = shell.start("run", "--lease-duration", "2s", key, "--", *WORK)
    wait_until(lambda: locks.waiters(key))
    locks.release(lease)
    pid = pid_of(running)

    def held_for_two_leases() -> bool:
        record = locks.get(key)
        assert record is not None
        (holder,) = record.holders.values()
        assert holder.renewed_at
        assert holder.acquired_at
        return (holder.renewed_at - holder.acquired_at).total_seconds() >= 4.0

    wait_until(held_for_two_leases)
    assert not is_free(locks, key)
    running.terminate()
    running.communicate(timeout=PATIENCE)
    assert not is_alive(pid)
    assert running.returncode == 128 + signal.SIGTERM
    assert is_free(locks, key)


@pytest.mark.parametrize(
    "number",
    some_in_proof([signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1], signal.SIGTERM),
)
def test_signals_are_forwarded_to_the_command(
    shell: Shell, locks: LockClient, key: str, number: signal.Signals
) -> None:
    script = (
        "import signal, sys, time, os\n"
        f"signal.signal({int(number)}, lambda *_: sys.exit(40 + {int(number)}))\n"
        "print(os.getpid(), flush=True); time.sleep(60)"
    )
    running = shell.start("run", key, "--", sys.executable, "-c", script)
    pid_of(running)

    running.send_signal(number)

    running.communicate(timeout=PATIENCE)
    assert running.returncode == 40 + number
    assert is_free(locks, key)


def test_the_lock_of_a_killed_command_is_released(shell: Shell, locks: LockClient, key: str) -> None:
    running = shell.start("run", key, "--", *WORK)
    os.kill(pid_of(running), signal.SIGKILL)

    running.communicate(timeout=PATIENCE)

    assert running.returncode == 128 + signal.SIGKILL
    assert is_free(locks, key)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_the_command_does_not_outlive_a_killed_dynamo_lock(shell: Shell, locks: LockClient, key: str) -> None:
    running = shell.start("run", key, "--", *WORK)
    pid = pid_of(running)

    running.kill()
    running.communicate(timeout=PATIENCE)

    wait_until(lambda: not is_alive(pid))
    assert not is_free(locks, key), "the lock is held until the lease runs out"


def test_the_command_is_stopped_when_the_lease_is_lost(shell: Shell, locks: LockClient, key: str) -> None:
    running = shell.start("run", "--lease-duration", "3s", key, "--", *WORK)
    pid = pid_of(running)
    break_lock(locks, key)

    _, err = running.communicate(timeout=PATIENCE)

    assert running.returncode == 3
    assert "was lost while the command ran" in err
    assert "Traceback" not in err
    assert not is_alive(pid)


def test_a_command_that_ignores_sigterm_is_killed(shell: Shell, locks: LockClient, key: str) -> None:
    script = (
        "import os, signal, time; signal.signal(15, signal.SIG_IGN)\n"
        "print(os.getpid(), flush=True); time.sleep(60)"
    )
    running = shell.start(
        "run", "--lease-duration", "3s", "--kill-after", "0.5s", key, "--", sys.executable, "-c", script
    )
    pid = pid_of(running)
    break_lock(locks, key)

    running.communicate(timeout=PATIENCE)

    assert running.returncode == 3
    assert not is_alive(pid)


def test_the_command_does_not_run_without_the_lock(
    shell: Shell, locks: LockClient, key: str, tmp_path: Path
) -> None:
    locks.acquire(key)
    result = shell.run("run", "--no-wait", key, "--", "touch", str(tmp_path / "trace"))

    assert result.returncode == 3
    assert "Locked by somebody else" in result.stderr
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.proof),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.proof),
    ],
)
def test_an_interrupted_waiter_runs_nothing(
    shell: Shell, locks: LockClient, key: str, number: signal.Signals, code: int
) -> None:
    locks.acquire(key)
    waiting = shell.start("run", key, "--", *WORK)
    wait_until(lambda: locks.waiters(key))

    waiting.send_signal(number)

    out, err = waiting.communicate(timeout=PATIENCE)
    assert (waiting.returncode, out) == (code, "")
    assert "Traceback" not in err
    assert locks.waiters(key) == [], "the waiter has left the queue"


@pytest.mark.parametrize(("exists", "code"), [(False, 127), (True, 126)])
def test_no_lock_is_acquired_for_a_command_that_cannot_run(
    shell: Shell, locks: LockClient, key: str, tmp_path: Path, exists: bool, code: int
) -> None:
    command = tmp_path / "command"
    if exists:
        command.touch(mode=0o600)
    result = shell("run", key, "--", str(command))
    assert result.returncode == code
    assert repr(str(command)) in result.stderr
    assert locks.get(key) is None


def test_the_lock_is_released_if_the_command_has_a_wrong_format(
    shell: Shell, locks: LockClient, key: str, tmp_path: Path
) -> None:
    command = tmp_path / "command"
    command.write_text("no program")
    command.chmod(0o700)
    result = shell.run("run", key, "--", str(command))
    assert result.returncode == 126
    assert "cannot be executed: Exec format error" in result.stderr
    assert is_free(locks, key)


def test_the_command_does_not_run_without_a_lock_table(shell: Shell, key: str, tmp_path: Path) -> None:
    nowhere = replace(shell, environment={**shell.environment, "DYNAMO_LOCK_TABLE": "nowhere"})
    result = nowhere.run("run", key, "--", "touch", str(tmp_path / "trace"))
    assert result.returncode == 1
    assert "'nowhere' does not exist" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "trace").exists()


# -- stopped commands and child processes -----------------------------------------------------------------------------


def test_a_job_with_piped_input_is_stopped_as_a_whole(shell: Shell, locks: LockClient, key: str) -> None:
    script = f"echo data | $DYNAMO_LOCK run {key} -- sh -c 'echo pid=$$.; cat; exec sleep 60'; echo stopped; read x; fg"
    with terminal(shell, script) as terminal_end:
        read_until("pid=", terminal_end)
        pid = int(read_until(".", terminal_end).removesuffix("."))
        read_until("data", terminal_end)
        os.write(terminal_end, b"\x1a")  # Ctrl-Z

        read_until("stopped", terminal_end)
        wait_until(lambda: state(pid) == "T")
        os.write(terminal_end, b"\n")
        wait_until(lambda: state(pid) == "S")  # again in the foreground
        os.write(terminal_end, b"\x03")  # Ctrl-C
        wait_until(lambda: not is_alive(pid))
        wait_until(lambda: is_free(locks, key))


def test_a_command_with_piped_input_can_read_the_terminal(shell: Shell, key: str) -> None:
    script = f"echo data | $DYNAMO_LOCK run {key} -- sh -c 'echo ask; read x </dev/tty; echo got $x'"
    with terminal(shell, script) as terminal_end:
        read_until("ask", terminal_end)
        os.write(terminal_end, b"this\n")
        read_until("got this", terminal_end)


def test_without_a_terminal_the_command_is_stopped_with_dynamo_lock(
    shell: Shell, locks: LockClient, key: str
) -> None:
    running = shell.start("run", key, "--", *WORK)
    pid = pid_of(running)

    running.send_signal(signal.SIGTSTP)
    wait_until(lambda: (state(running.pid), state(pid)) == ("T", "T"))
    running.send_signal(signal.SIGCONT)
    wait_until(lambda: state(pid) == "S")
    running.send_signal(signal.SIGTSTP)
    wait_until(lambda: (state(running.pid), state(pid)) == ("T", "T"))
    running.terminate()
    running.send_signal(signal.SIGCONT)

    running.communicate(timeout=PATIENCE)
    assert running.returncode == 128 + signal.SIGTERM
    assert is_free(locks, key)


def test_a_stopped_command_does_not_continue_under_a_lost_lease(
    shell: Shell, locks: LockClient, key: str, tmp_path: Path
) -> None:
    script = f"echo $$; kill -TSTP $PPID; : >{tmp_path}/went-on; exec sleep 60"
    running = shell.start("run", "--lease-duration", "2s", key, "--", "sh", "-c", script)
    pid = pid_of(running)
    wait_until(lambda: (state(running.pid), state(pid)) == ("T", "T"))
    went_on = (tmp_path / "went-on").exists()  # it may have written this before it was stopped
    locks.release(locks.acquire(key, timeout=60))
    running.send_signal(signal.SIGCONT)

    _, err = running.communicate(timeout=PATIENCE)

    assert running.returncode == 3
    assert "was lost while the command ran" in err
    assert not is_alive(pid)
    assert (tmp_path / "went-on").exists() == went_on


@pytest.mark.parametrize("end", some_in_proof(["killed", "done", "lost"], "killed", "done"))
@pytest.mark.parametrize(
    "trap",
    [pytest.param("", marks=pytest.mark.proof, id="ends"), pytest.param("trap '' TERM;", id="ignores")],
)
def test_the_process_group_has_ended_when_the_lock_is_released(
    shell: Shell, locks: LockClient, key: str, end: str, trap: str
) -> None:
    script = f"{trap} sleep 60 & trap - TERM; echo $$ $!; {'exit 5' if end == 'done' else 'wait'}"
    options = ("--lease-duration", "3s", "--kill-after", "0.5s")
    running = shell.start("run", *options, key, "--", "sh", "-c", script)
    assert running.stdout
    leader, left = map(int, running.stdout.readline().split())
    if end == "killed":
        os.kill(leader, signal.SIGKILL)
    elif end == "lost":
        break_lock(locks, key)

    while running.poll() is None:
        assert end == "lost" or not (is_free(locks, key) and is_alive(left))

    assert running.returncode == {"killed": 128 + signal.SIGKILL, "done": 5, "lost": 3}[end]
    assert not is_alive(left)
    assert is_free(locks, key)


def test_a_process_outside_the_group_outlives_the_command(shell: Shell, locks: LockClient, key: str) -> None:
    script = (
        "import os, subprocess\n"
        "print(subprocess.Popen(['sleep', '60'], start_new_session=True, stdout=-3, stderr=-3).pid)"
    )
    running = shell.start("run", key, "--", sys.executable, "-c", script)
    pid = pid_of(running)
    running.communicate(timeout=PATIENCE)
    try:
        assert is_alive(pid)
        assert is_free(locks, key)
    finally:
        os.kill(pid, signal.SIGKILL)


# -- the command does not start ---------------------------------------------------------------------------------------


def test_a_lease_that_is_lost_before_the_start_runs_nothing(
    shell: Shell, locks: LockClient, key: str, engine: Engine, tmp_path: Path
) -> None:
    slowly = Rule(lambda seen: seen.what == "acquire", lag=0.2)
    with Proxy(engine.endpoint_url) as proxy, proxy.applying(slowly):
        through = ("--endpoint-url", proxy.endpoint_url, "--lease-duration", "0.1")
        result = shell.run("run", "--no-wait", *through, key, "--", "touch", str(tmp_path / "trace"))
    assert result.returncode == 3
    assert "its answer came after the lease's end" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "trace").exists()
    assert is_free(locks, key)


@pytest.mark.skipif(sys.platform != "linux", reason="finds the process in /proc")
def test_the_lock_is_released_if_the_child_is_killed_before_the_start(
    shell: Shell, locks: LockClient, key: str
) -> None:
    lease = locks.acquire(key)
    waiting = shell.start("run", key, "--", *WORK)
    wait_until(lambda: locks.waiters(key))
    (child,) = Path(f"/proc/{waiting.pid}/task/{waiting.pid}/children").read_text().split()
    os.kill(int(child), signal.SIGKILL)
    locks.release(lease)

    _, err = waiting.communicate(timeout=PATIENCE)

    assert waiting.returncode == 128 + signal.SIGKILL
    assert "ended before it executed" in err
    assert len(err.splitlines()) == 1
    assert is_free(locks, key)


# -- signals of the command -------------------------------------------------------------------------------------------


def test_the_command_does_not_inherit_ignored_signals(shell: Shell, key: str) -> None:
    script = "sed -n 's/^SigIgn://p' /proc/self/status; yes | head -1"
    result = shell.run("run", key, "--", "sh", "-c", script)
    ignored, _ = result.stdout.split()
    assert not int(ignored, 16) & (1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1)
    assert result.stderr == ""


# -- DynamoDB cannot be reached ---------------------------------------------------------------------------------------


def test_a_command_that_waits_for_dynamodb_prints_it_once(shell: Shell, key: str) -> None:
    nowhere = ("--endpoint-url", "http://127.0.0.1:1", "--wait-time", "4s")
    for command in (["run", *nowhere, key, "--", *WORK], ["acquire", *nowhere, key]):
        result = shell.run(*command)
        assert result.returncode == 1
        waiting, failure = result.stderr.splitlines()
        assert f"Waiting for the lock {key!r}: DynamoDB cannot be reached" in waiting
        assert "cannot be reached" in failure


def test_a_retried_release_is_reported_and_can_be_interrupted(shell: Shell, key: str) -> None:
    with MotoServer() as engine:
        LockClient(engine.client(), table=TABLE).create_table()
        url = ("--endpoint-url", engine.endpoint_url)
        running = shell.start("run", *url, "--lease-duration", "1 hour", key, "--", *WORK)
        pid = pid_of(running)
    os.kill(pid, signal.SIGUSR1)

    assert running.stderr
    assert f"Releasing {key!r}" in running.stderr.readline()
    running.terminate()

    _, err = running.communicate(timeout=PATIENCE)
    assert "could not be released, its lease will run out: interrupted" in err
    assert len(err.splitlines()) == 1
    assert running.returncode == 128 + signal.SIGUSR1


def test_the_release_of_a_lost_lease_is_not_retried(shell: Shell, key: str) -> None:
    with MotoServer() as engine:
        LockClient(engine.client(), table=TABLE).create_table()
        url = ("--endpoint-url", engine.endpoint_url)
        running = shell.start("run", *url, "--lease-duration", "2s", key, "--", *WORK)
        pid_of(running)

    _, err = running.communicate(timeout=PATIENCE)

    assert running.returncode == 3
    assert "could not be released" in err
    assert "no heartbeat has succeeded in time" in err
    assert "Releasing" not in err


def test_a_process_of_another_user_counts_as_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "killpg", refuse)
    child = Child(("sudo", "true"), kill_after=0.1)
    child.pid, child._grouped = 4_194_303, True  # a group without children of this process
    assert child._has_processes()
