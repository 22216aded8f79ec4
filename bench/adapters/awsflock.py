"""awsflock 0.2: a command, ``awsflock acquire`` and ``awsflock release``. It has no heartbeats but ``awsflock renew``.

By default its commands are called in this process and share one SDK client, which is the best that can be done for it
from Python. With the option ``commands`` each is a process, as its documentation shows.

Who waits runs ``acquire --no-wait`` once per poll interval: its own waiting doubles its pauses up to five minutes. With
no poll interval it is left to that.
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

TAKEN = 3  # its exit code


class AwsFlock:
    """See `bench.adapters.worker.Library`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._said = threading.local()
        self._client = boto3.client("dynamodb", config=sdk_config(**settings.sdk))
        awsflock.common.get_dynamo_client = lambda: self._client
        awsflock.acquire.click.echo = self._note

    def create_table(self) -> None:
        assert self._call(["create-table"])[0] == 0

    def lock(self, key: str) -> Lock:
        return _Lock(self, key)

    def run(self, arguments: Sequence[str]) -> tuple[int, str]:
        """Run one of its commands. Returns its exit code and what it printed."""
        if not self.settings.options.get("commands"):
            return self._call(arguments)
        command = [str(Path(sys.executable).with_name("awsflock")), *arguments]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        return done.returncode, done.stdout.strip()

    def _call(self, arguments: Sequence[str]) -> tuple[int, str]:
        self._said.text = ""
        code = main.main(args=list(arguments), prog_name="awsflock", standalone_mode=False)
        return int(code or 0), self._said.text

    def _note(self, message: Any = None, err: bool = False, **_: Any) -> None:
        if not err:
            self._said.text = str(message)


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
            assert code == TAKEN, code
            time.sleep(settings.poll or 0)

    def release(self) -> None:
        code, _ = self._library.run(["release", self._key, self._lease_id])
        assert code == 0, code


if __name__ == "__main__":
    serve(AwsFlock)
