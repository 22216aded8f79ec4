"""awsflock 0.2: a command line tool, with ``awsflock acquire`` and ``awsflock release``.

It sends no heartbeats by itself; a program can run ``awsflock renew``.

By default, the adapter calls the tool's commands in its own process, with one SDK client for all of them. That is the
fastest way to use it from Python. With the option ``commands``, each command is a process of its own, as in the tool's
documentation.

If a poll interval is set, the adapter waits by running ``acquire --no-wait`` once per interval. Otherwise the tool
waits itself, with pauses that double up to five minutes.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import awsflock.acquire
import awsflock.common
import boto3
from awsflock.main import main

from airflow_dynamo_lock import sdk_config
from bench.adapters.worker import Lock, Settings, serve

TAKEN = 3  # exit code of ``awsflock acquire`` if the lock is held


class AwsFlock:
    """The tool's commands, called in this process or as processes."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._printed = threading.local()
        self._client = boto3.client("dynamodb", config=sdk_config(**settings.sdk))
        awsflock.common.get_dynamo_client = lambda: self._client
        awsflock.acquire.click.echo = self._echo

    def create_table(self) -> None:
        assert self._call(["create-table"])[0] == 0

    def lock(self, key: str) -> Lock:
        return _Lock(self, key)

    def run(self, arguments: Sequence[str]) -> tuple[int, str]:
        """Run a command. Returns its exit code and its output."""
        if not self.settings.options.get("commands"):
            return self._call(arguments)
        command = [str(Path(sys.executable).with_name("awsflock")), *arguments]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        return done.returncode, done.stdout.strip()

    def _call(self, arguments: Sequence[str]) -> tuple[int, str]:
        self._printed.text = ""
        code = main.main(args=list(arguments), prog_name="awsflock", standalone_mode=False)
        return int(code or 0), self._printed.text

    def _echo(self, message: Any = None, err: bool = False, **_: Any) -> None:
        if not err:
            self._printed.text = str(message)


class _Lock:
    def __init__(self, library: AwsFlock, key: str) -> None:
        self._library, self._key = library, key
        self._lease_id = ""

    def acquire(self) -> None:
        settings = self._library.settings
        lease = ["--lease-duration", f"{round(settings.lease)}s"]
        wait = ["--wait-time", "0"] if settings.poll is None else ["--no-wait"]
        while True:
            code, self._lease_id = self._library.run(["acquire", self._key, *wait, *lease])
            if code == 0:
                return
            assert code == TAKEN, f"awsflock acquire failed with exit code {code}."
            time.sleep(settings.poll or 0)

    def release(self) -> None:
        code, _ = self._library.run(["release", self._key, self._lease_id])
        assert code == 0, f"awsflock release failed with exit code {code}."


if __name__ == "__main__":
    serve(AwsFlock)
