"""The log of one process: one line of JSON per event, with the time.

All processes read the same monotonic clock of the machine, so the events of several logs can be ordered. A
single `write` appends each line, so a process that is killed has written a line completely or not at all.
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
    """One line of a log.

    :ivar at: time of the event, monotonic seconds.
    :ivar role: name of the process's role.
    :ivar process: number of the process in this run. Unlike a pid, it is never reused.
    :ivar what: type of the event, e.g. ``granted``; `evidence` lists them.
    :ivar more: attributes of the event.
    """

    at: float
    role: str
    process: int
    what: str
    more: Mapping[str, Any]


class Log:
    """Writes the log of one process."""

    def __init__(self, path: Path, role: str, process: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._role, self._process = role, process

    def write(self, what: str, **more: Any) -> None:
        line = {"at": monotonic(), "role": self._role, "process": self._process, "what": what, "more": more}
        os.write(self._file, (json.dumps(line) + "\n").encode())


def read(path: Path) -> list[Event]:
    """Return the events that have been written so far, without a line that is not complete yet."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [Event(**json.loads(line)) for line in lines if line.endswith("\n")]
