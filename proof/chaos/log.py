"""A process's own log: one line of JSON for each thing that it believes or does, with the time of the one clock that
all processes of a machine share. A line is a single write in append mode: it is there whole, or not at all, however the
process ends.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from airflow_dynamo_lock.client.clock import monotonic


@dataclass(frozen=True)
class Event:
    """A line.

    :ivar process: its number in this run; pids come again.
    :ivar what: e.g. ``wants``, ``granted``, ``counts``, ``gives_back``; see `evidence`.
    """

    at: float
    who: str
    process: int
    what: str
    more: Mapping[str, Any]


class Log:
    """To be written by one process."""

    def __init__(self, path: Path, who: str, process: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._who, self._process = who, process

    def write(self, what: str, **more: Any) -> None:
        line = {"at": monotonic(), "who": self._who, "process": self._process, "what": what, "more": more}
        os.write(self._file, (json.dumps(line) + "\n").encode())


def read(path: Path) -> list[Event]:
    """What has been written so far."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [Event(**json.loads(line)) for line in lines if line.endswith("\n")]
