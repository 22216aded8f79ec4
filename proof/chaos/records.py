"""What the lock records looked like: each write's answer shows the record as the write has left it, and the proxies see
all of them, also those that never reach the process that asked.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow_dynamo_lock.client.clock import monotonic
from airflow_dynamo_lock.core.model.limits import WAITING_PREFIX
from deployments.proxy import Seen


@dataclass(frozen=True)
class Held:
    """One holder in a record.

    :ivar since: when its present version was first seen: its last sign of life.
    """

    owner: str
    slots: int
    lease: float
    version: str
    draining: bool
    since: float


@dataclass(frozen=True)
class Record:
    """A lock's record after a write.

    :ivar at: when the answer was seen.
    :ivar sent: when the request was.
    """

    at: float
    sent: float
    key: str
    what: str
    token: int
    capacity: int
    available: int
    holders: Mapping[str, Held]

    @property
    def damaged(self) -> bool:
        return self.available + sum(held.slots for held in self.holders.values()) != self.capacity


@dataclass
class Records:
    """All of them by key, in order."""

    of: dict[str, list[Record]] = field(default_factory=lambda: defaultdict(list))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def on_answer(self, seen: Seen, status: int, body: bytes) -> None:
        """Take in an answer on the wire."""
        if seen.action != "UpdateItem" or seen.key is None or status != 200:
            return
        item = json.loads(body).get("Attributes", {})
        if "holders" not in item or seen.key.startswith(WAITING_PREFIX):
            return  # somebody who waits, or the sign that he lives
        at = monotonic()
        sent = at - (time.monotonic() - seen.at)  # `seen` has another clock
        with self._lock:
            self.add(_record(item, seen, sent, at))

    def add(self, record: Record) -> None:
        """Two answers that cross may be seen in the wrong order. Their tokens tell."""
        records = self.of[record.key]
        place = len(records)
        while place and records[place - 1].token > record.token and record.sent < records[place - 1].at:
            place -= 1
        records.insert(place, record)

    def owners(self, key: str) -> list[str]:
        """Who holds it now."""
        with self._lock:
            records = self.of[key]
            return sorted(held.owner for held in records[-1].holders.values()) if records else []

    def histories(self) -> dict[str, list[Record]]:
        """The same, with each holder's last sign of life."""
        return {key: _with_since(records) for key, records in self.of.items()}


def _record(item: Mapping[str, Any], seen: Seen, sent: float, at: float) -> Record:
    plain = {name: _plain(value) for name, value in item.items()}
    holders = {
        lease_id: Held(
            owner=each["owner"],
            slots=int(each["slots"]),
            lease=int(each["lease_ms"]) / 1000,
            version=each["version"],
            draining=bool(each.get("draining")),
            since=at,
        )
        for lease_id, each in plain["holders"].items()
    }
    token, capacity, available = (int(plain[name]) for name in ("token", "capacity", "available"))
    return Record(at, sent, str(seen.key), seen.what, token, capacity, available, holders)


def _plain(value: Mapping[str, Any]) -> Any:
    """A DynamoDB value in JSON, without the names of its types."""
    ((kind, inner),) = value.items()
    if kind == "M":
        assert isinstance(inner, dict)
        return {name: _plain(each) for name, each in inner.items()}
    return inner


def _with_since(records: list[Record]) -> list[Record]:
    dated = []
    first: dict[str, float] = {}
    for record in records:
        holders = {}
        for lease_id, held in record.holders.items():
            holders[lease_id] = Held(**{**vars(held), "since": first.setdefault(held.version, held.since)})
        dated.append(Record(**{**vars(record), "holders": holders}))
    return dated
