"""A lock table, and a terminal to use it from."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import pty
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from airflow_dynamo_lock import LockClient
from airflow_dynamo_lock.cli.main import run_command
from deployments.engines import REGION, Engine
from deployments.patience import PATIENCE

DYNAMO_LOCK = str(Path(sys.executable).with_name("dynamo-lock"))
TABLE = "airflow_locks"


@dataclass(frozen=True)
class Shell:
    """Runs `dynamo-lock`.

    :ivar environment: more of it, beside the tests' own; None is not there.
    """

    environment: dict[str, str | None]
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def __call__(self, *arguments: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
        """To its end, in this process: loading the SDK takes one of its own a second.

        :param environment: more of it.
        """
        out, complaints = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(complaints):
            # Not there in a process of its own. Airflow 3.0's, of an earlier test, writes what is logged to stdout.
            patch.setattr(logging.getLogger(), "handlers", [])
            for name, value in {**self.environment, **environment}.items():
                if value is None:
                    patch.delenv(name, raising=False)
                else:
                    patch.setenv(name, value)
            code = run_command([*arguments])
        return subprocess.CompletedProcess(arguments, code, out.getvalue(), complaints.getvalue())

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """To its end, as it is installed; its input is empty."""
        running = self.start(*arguments)
        out, complaints = running.communicate(timeout=PATIENCE)
        return subprocess.CompletedProcess(arguments, running.returncode, out, complaints)

    def script(self, script: str, **names: str) -> subprocess.CompletedProcess[str]:
        """A script that knows it as $DYNAMO_LOCK, and other names; run by bash, to its end."""
        known = {**os.environ, **self.environment, "DYNAMO_LOCK": DYNAMO_LOCK, **names}
        return subprocess.run(
            ["bash", "-o", "pipefail", "-c", script],
            env={name: value for name, value in known.items() if value is not None},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """As it is installed, in the background."""
        known = {**os.environ, **self.environment}
        running = subprocess.Popen(
            [DYNAMO_LOCK, *arguments],
            env={name: value for name, value in known.items() if value is not None},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # without the terminal that the tests may have been started from
            preexec_fn=heed_signals,
        )
        self.started.append(running)
        return running


def heed_signals() -> None:
    """Where the tests run in the background, or under nohup, these are ignored, and child processes inherit that."""
    for each in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(each, signal.SIG_DFL)


@contextmanager
def terminal(shell: Shell, script: str) -> Iterator[int]:
    """Its other end, with a shell on it that runs a script, with a job of its own for each command."""
    ours, theirs = pty.openpty()

    def take() -> None:
        heed_signals()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    running = subprocess.Popen(
        ["bash", "-m", "-c", script],
        **dict.fromkeys(("stdin", "stdout", "stderr"), theirs),  # type: ignore[call-overload]
        env={**os.environ, **shell.environment, "DYNAMO_LOCK": DYNAMO_LOCK},
        start_new_session=True,
        preexec_fn=take,
    )
    os.close(theirs)
    try:
        yield ours
    finally:
        os.close(ours)  # which hangs up
        running.kill()
        running.wait()


def read_until(said: str, there: int) -> str:
    """All that a terminal shows before that, and that."""
    found = b""
    while said.encode() not in found:
        assert select.select([there], [], [], PATIENCE)[0], found
        found += os.read(there, 1)  # what comes after it is for who reads next
    return found.decode()


@pytest.fixture(scope="session")
def engine(moto: Engine) -> Engine:
    """A DynamoDB with an empty lock table."""
    LockClient(moto.client(), table=TABLE).create_table()
    return moto


@pytest.fixture
def locks(engine: Engine) -> LockClient:
    """Somebody else's client, whose leases outlast the start of a process on a busy machine."""
    return LockClient(engine.client(), table=TABLE, owner="somebody else", lease=600)


@pytest.fixture
def shell(engine: Engine) -> Iterator[Shell]:
    """With the engine for AWS. What it has started ends with the test."""
    urls = {f"AWS_ENDPOINT_URL_{service}": engine.endpoint_url for service in ("DYNAMODB", "S3")}
    shell = Shell({**urls, "AWS_DEFAULT_REGION": REGION})
    yield shell
    for running in shell.started:
        running.kill()
        running.communicate()


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    """A lock of the test's own."""
    return str(request.node.name)
