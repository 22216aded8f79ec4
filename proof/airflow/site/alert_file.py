"""A notifier that appends alerts to a file of the test. The deployment has its folder on the Python path."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from airflow.sdk import BaseNotifier


class AlertFile(BaseNotifier):
    """Appends each alert to ``alerts.jsonl``, as a line of JSON.

    :param kind: what kind of alert it is.
    :param text: what it says.
    """

    template_fields: Sequence[str] = ("text",)

    def __init__(self, kind: str, text: str) -> None:
        super().__init__()
        self.kind = kind
        self.text = text

    def notify(self, context: Any) -> None:
        line = {"kind": self.kind, "text": self.text, "run_id": context["run_id"], "pid": os.getpid()}
        with (Path(os.environ["DYNAMO_LOCK_TEST_FOLDER"]) / "alerts.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
