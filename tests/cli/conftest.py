"""Fixtures of the command-line tests: a lock table, and a shell that runs `dynamo-lock`."""

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

    :ivar environment: variables to add to the environment of the tests; None removes one.
    """

    environment: dict[str, str | None]
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def __call__(self, *arguments: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
        """Run a command in this process until it ends. A new process would load the SDK for a second.

        :param environment: variables to add, or with None to remove.
        """
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            # A new process has no handlers. That of Airflow 3.0, from an earlier test, would write the log to stdout.
            patch.setattr(logging.getLogger(), "handlers", [])
            for name, value in {**self.environment, **environment}.items():
                if value is None:
                    patch.delenv(name, raising=False)
                else:
                    patch.setenv(name, value)
            code = run_command([*arguments])
        return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the installed command until it ends. Its input is empty."""
        running = self.start(*arguments)
        out, err = running.communicate(timeout=PATIENCE)
        return subprocess.CompletedProcess(arguments, running.returncode, out, err)

    def script(self, script: str, **names: str) -> subprocess.CompletedProcess[str]:
        """Run a bash script until it ends, with the command as $DYNAMO_LOCK and `names` as other variables."""
        variables = {**os.environ, **self.environment, "DYNAMO_LOCK": DYNAMO_LOCK, **names}
        return subprocess.run(
            ["bash", "-o", "pipefail", "-c", script],
            env={name: value for name, value in variables.items() if value is not None},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start the installed command in the background."""
        variables = {**os.environ, **self.environment}
        running = subprocess.Popen(
            [DYNAMO_LOCK, *arguments],
            env={name: value for name, value in variables.items() if value is not None},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # without the terminal that the tests may have been started from
            preexec_fn=restore_signals,
        )
        self.started.append(running)
        return running


def restore_signals() -> None:
    """Restore the default actions: under nohup or in the background, child processes inherit that these are ignored."""
    for each in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(each, signal.SIG_DFL)


@contextmanager
def terminal(shell: Shell, script: str) -> Iterator[int]:
    """Run a script in bash on a new terminal, each command as a job. Yield the other end of the terminal."""
    controller, bash_end = pty.openpty()

    def take_terminal() -> None:
        restore_signals()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    running = subprocess.Popen(
        ["bash", "-m", "-c", script],
        **dict.fromkeys(("stdin", "stdout", "stderr"), bash_end),  # type: ignore[call-overload]
        env={**os.environ, **shell.environment, "DYNAMO_LOCK": DYNAMO_LOCK},
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    os.close(bash_end)
    try:
        yield controller
    finally:
        os.close(controller)  # which hangs up
        running.kill()
        running.wait()


def read_until(text: str, terminal_end: int) -> str:
    """Read what a terminal shows, up to and including a text."""
    found = b""
    while text.encode() not in found:
        assert select.select([terminal_end], [], [], PATIENCE)[0], found
        found += os.read(terminal_end, 1)  # one byte, to leave what follows for the next call
    return found.decode()


@pytest.fixture(scope="session")
def engine(moto: Engine) -> Engine:
    """A DynamoDB with an empty lock table."""
    LockClient(moto.client(), table=TABLE).create_table()
    return moto


@pytest.fixture
def locks(engine: Engine) -> LockClient:
    """Another client, whose leases outlast the start of a process on a busy machine."""
    return LockClient(engine.client(), table=TABLE, owner="somebody else", lease=600)


@pytest.fixture
def shell(engine: Engine) -> Iterator[Shell]:
    """A shell that uses the engine in place of AWS. The processes that it has started end with the test."""
    urls = {f"AWS_ENDPOINT_URL_{service}": engine.endpoint_url for service in ("DYNAMODB", "S3")}
    shell = Shell({**urls, "AWS_DEFAULT_REGION": REGION})
    yield shell
    for running in shell.started:
        running.kill()
        running.communicate()


@pytest.fixture(scope="session")
def other_table(engine: Engine) -> str:
    """A table with other keys than those of a lock table, and with an item."""
    name, sdk = "orders_by_id", engine.client()
    sdk.create_table(
        TableName=name,
        AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
        KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
        BillingMode="PAY_PER_REQUEST",
    )
    sdk.put_item(TableName=name, Item={"id": {"S": "1"}})
    return name


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    """Key of a lock that only this test uses."""
    return str(request.node.name)
