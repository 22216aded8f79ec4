"""Notifiers that record their messages, in a module, so that triggers can import them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from airflow.sdk import BaseNotifier

#: Messages that were sent, the oldest first.
SENT: list[str] = []
_sent = threading.Condition()


def send(text: str) -> None:
    with _sent:
        SENT.append(text)
        _sent.notify_all()


class Messenger(BaseNotifier):
    """A notifier that blocks, as most do."""

    template_fields: Sequence[str] = ("text",)

    def __init__(self, text: str, conn_id: str = "messages") -> None:
        super().__init__()
        self.text = text
        self.conn_id = conn_id

    def notify(self, context: Any) -> None:
        send(self.text)


class AsyncMessenger(Messenger):
    """A notifier that can be awaited, in Airflow 3.1 and later."""

    def notify(self, context: Any) -> None:
        raise AssertionError("Airflow must await it")

    async def async_notify(self, context: Any) -> None:
        send(f"awaited: {self.text}")


class Unreachable(Messenger):
    """A notifier whose service does not answer."""

    def notify(self, context: Any) -> None:
        raise ConnectionError("no route to host")
