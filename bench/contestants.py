"""Who takes part, and the processes that they run in."""

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

#: What an engine takes from anybody, and nothing of this machine's own settings.
ENVIRONMENT: Mapping[str, str] = {
    "AWS_ACCESS_KEY_ID": "bench",
    "AWS_SECRET_ACCESS_KEY": "bench-secret",
    "AWS_DEFAULT_REGION": "eu-central-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}


class WorkerError(Exception):
    """A worker could not do what it was told."""


@dataclass(frozen=True)
class Contestant:
    """A library in one way of using it. Another way, such as an option of ours, is one more contestant.

    :ivar adapter: its module in `bench.adapters`.
    :ivar environment: what it is installed in (`bench.environments`); None for this project's own.
    :ivar options: for its adapter.
    """

    name: str
    adapter: str
    environment: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def worker(self, endpoint_url: str, settings: Settings | None = None) -> Worker:
        """A process that has this library talk to that DynamoDB."""
        settings = settings or Settings()
        return Worker(self, endpoint_url, replace(settings, options=dict(self.options)))

    @property
    def python(self) -> Path:
        """The Python to run it with."""
        return Path(sys.executable) if self.environment is None else python_of(self.environment)


FLOOR = Contestant("floor", "floor")
OURS = Contestant("ours", "ours")
OURS_BEATING = Contestant("ours, with heartbeats", "ours", options={"beats": True})
OURS_UNFAIR = Contestant("ours, unfair", "ours", options={"fair": False})
OURS_WITH_STREAMS = Contestant("ours, with streams", "ours", options={"streams": True})
PYTHON_DYNAMODB_LOCK = Contestant("python-dynamodb-lock", "python_dynamodb_lock", "python-dynamodb-lock")
DYNDBMUTEX = Contestant("dyndbmutex", "dyndbmutex", "dyndbmutex")
AWSFLOCK = Contestant("awsflock", "awsflock", "awsflock")
AWSFLOCK_COMMANDS = Contestant("awsflock, as commands", "awsflock", "awsflock", {"commands": True})
# Not compared with: it is on another service.
AWS_S3_LOCK = Contestant("aws_s3_lock", "aws_s3_lock", "aws-ops-alpha")

RIVALS = (PYTHON_DYNAMODB_LOCK, DYNDBMUTEX, AWSFLOCK)


class Worker:
    """A process of a contestant, for the length of a ``with`` block. `bench.adapters.worker` has its commands."""

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
            cwd=ROOT,  # where the modules are
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the bench, which then ends its workers
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def tell(self, do: str, **arguments: Any) -> None:
        """Give it a command, without waiting for the answer."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps([do, arguments]) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        """The answer to the oldest command that it has not been heard on."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"error": "it has ended"}
        if "error" in answer:
            raise WorkerError(f"{self.contestant.name}: {answer['error']}")
        return answer["result"]

    def do(self, do: str, **arguments: Any) -> Any:
        """Give it a command, and wait for the answer."""
        self.tell(do, **arguments)
        return self.hear()


def create_tables(contestants: Sequence[Contestant], endpoint_url: str) -> None:
    """Create the table of each of them, and make sure that all stand on the same SDK."""
    for who in contestants:
        with who.worker(endpoint_url) as worker:
            versions = worker.do("hello")
            if versions != _our_versions():
                raise WorkerError(
                    f"{who.name} stands on {versions}, ours on {_our_versions()}: they cannot be compared. "
                    "Give bench/requirements/sdk.in the versions of requirements/demo.txt, and run `make lock`."
                )
            worker.do("create_table")


@cache
def _our_versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("boto3", "botocore", "urllib3")}
