"""The libraries that are compared, and the worker processes that run their adapters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Self

from bench.adapters.worker import Settings
from bench.environments import ROOT, python_of

#: The workers' AWS settings: credentials that every engine accepts, and no configuration files of this machine.
ENVIRONMENT: Mapping[str, str] = {
    "AWS_ACCESS_KEY_ID": "bench",
    "AWS_SECRET_ACCESS_KEY": "bench-secret",
    "AWS_DEFAULT_REGION": "eu-central-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}


class WorkerError(Exception):
    """A worker could not carry out a command, or cannot be compared with the others."""


@dataclass(frozen=True)
class Contestant:
    """A library, used in one way. The same library with other options is another contestant.

    :ivar name: its name in the results and on the page.
    :ivar adapter: the module in `bench.adapters` that drives the library.
    :ivar environment: the virtual environment of the library (`bench.environments`); None for the project's own.
    :ivar options: options for the adapter; its docstring lists them.
    """

    name: str
    adapter: str
    environment: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def worker(self, endpoint_url: str, settings: Settings | None = None) -> Worker:
        """Return a worker process, not yet started, in which this library uses the DynamoDB at `endpoint_url`."""
        settings = settings or Settings()
        return Worker(self, endpoint_url, replace(settings, options=dict(self.options)))

    @property
    def python(self) -> Path:
        """The Python interpreter in which the library is installed."""
        return Path(sys.executable) if self.environment is None else python_of(self.environment)


FLOOR = Contestant("floor", "floor")
OURS = Contestant("ours", "ours")
OURS_WITH_HEARTBEATS = Contestant("ours, with heartbeats", "ours", options={"heartbeats": True})
OURS_UNFAIR = Contestant("ours, unfair", "ours", options={"fair": False})
OURS_WITH_STREAMS = Contestant("ours, with streams", "ours", options={"streams": True})
PYTHON_DYNAMODB_LOCK = Contestant("python-dynamodb-lock", "python_dynamodb_lock", "python-dynamodb-lock")
DYNDBMUTEX = Contestant("dyndbmutex", "dyndbmutex", "dyndbmutex")
AWSFLOCK = Contestant("awsflock", "awsflock", "awsflock")
AWSFLOCK_COMMANDS = Contestant("awsflock, as commands", "awsflock", "awsflock", {"commands": True})
# Only for tests/formats: it stores its locks in S3, so its costs cannot be compared.
AWS_S3_LOCK = Contestant("aws_s3_lock", "aws_s3_lock", "aws-ops-alpha")

RIVALS = (PYTHON_DYNAMODB_LOCK, DYNDBMUTEX, AWSFLOCK)


class Worker:
    """A process that runs a contestant's adapter during a ``with`` block. `bench.adapters.worker` has its commands."""

    def __init__(self, contestant: Contestant, endpoint_url: str, settings: Settings) -> None:
        self.contestant = contestant
        self._command = [
            *(str(contestant.python), "-m", f"bench.adapters.{contestant.adapter}"),
            json.dumps(asdict(settings)),
        ]
        self._environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            **ENVIRONMENT,
            "AWS_ENDPOINT_URL_DYNAMODB": endpoint_url,
            "AWS_ENDPOINT_URL_S3": endpoint_url,
            "AWS_ENDPOINT_URL_DYNAMODB_STREAMS": endpoint_url,
        }

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            self._command,
            cwd=ROOT,  # so that the process can import bench
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is sent to the main process only, which stops its workers
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def send(self, do: str, **arguments: Any) -> None:
        """Send a command, without waiting for the answer.

        :param do: the method of `bench.adapters.worker.Worker` to call.
        :param arguments: its keyword arguments.
        """
        assert self.process.stdin
        self.process.stdin.write(json.dumps([do, arguments]) + "\n")
        self.process.stdin.flush()

    def receive(self) -> Any:
        """Return the answer to the oldest command whose answer has not been read.

        :raises WorkerError: the command failed, or the process has ended.
        """
        assert self.process.stdout
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"error": "the worker process has ended"}
        if "error" in answer:
            raise WorkerError(f"{self.contestant.name}: {answer['error']}")
        return answer["result"]

    def do(self, do: str, **arguments: Any) -> Any:
        """Send a command, and return its answer.

        :raises WorkerError: the command failed, or the process has ended.
        """
        self.send(do, **arguments)
        return self.receive()


def create_tables(contestants: Sequence[Contestant], endpoint_url: str) -> None:
    """Create the table of each contestant.

    :raises WorkerError: a contestant uses other versions of the SDK than this process.
    """
    for contestant in contestants:
        with contestant.worker(endpoint_url) as worker:
            versions = worker.do("hello")
            if versions != _sdk_versions():
                raise WorkerError(
                    f"{contestant.name} uses {versions}, and this package {_sdk_versions()}: write the versions of "
                    "requirements/demo.txt into bench/requirements/sdk.in, and run `make lock`."
                )
            worker.do("create_table")


@cache
def _sdk_versions() -> dict[str, str]:
    """Return the SDK's versions in this environment, as a worker's command ``hello`` does in its own."""
    from importlib.metadata import version

    return {name: version(name) for name in ("boto3", "botocore", "urllib3")}
