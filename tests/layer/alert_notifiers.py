"""Notifiers that keep what they send, in a module, so that triggers can import them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from airflow.sdk import BaseNotifier

#: What was sent, the oldest first.
SENT: list[str] = []
_sent = threading.Condition()


def send(text: str) -> None:
    with _sent:
        SENT.append(text)
        _sent.notify_all()


class Messenger(BaseNotifier):
    """As most notifiers are: it blocks."""

    template_fields: Sequence[str] = ("text",)

    def __init__(self, text: str, conn_id: str = "messages") -> None:
        super().__init__()
        self.text = text
        self.conn_id = conn_id

    def notify(self, context: Any) -> None:
        send(self.text)


class AsyncMessenger(Messenger):
    """One that can be awaited, from Airflow 3.1 on."""

    def notify(self, context: Any) -> None:
        raise AssertionError("it can be awaited")

    async def async_notify(self, context: Any) -> None:
        send(f"awaited: {self.text}")


class Unreachable(Messenger):
    """Its service does not answer."""

    def notify(self, context: Any) -> None:
        raise ConnectionError("no route to host")
