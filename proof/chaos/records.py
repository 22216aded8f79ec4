"""The versions of the lock records. The answer to a write contains the record after it, and the proxies see
all answers, also those that do not reach the process.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from airflow_dynamo_lock.client.clock import monotonic
from airflow_dynamo_lock.core.model.limits import WAITING_PREFIX
from deployments.proxy import Seen


@dataclass(frozen=True)
class Held:
    """One holder in a record.

    :ivar lease: duration of the lease, seconds.
    :ivar since: when a proxy first saw the holder's present version: the time of its last heartbeat,
        monotonic seconds.
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

    :ivar at: when the proxy received the answer, monotonic seconds.
    :ivar sent: when the proxy received the request, monotonic seconds.
    :ivar what: type of the write, e.g. ``acquire``.
    :ivar holders: the holders, by lease id.
    :ivar head: the head of the queue; None if it is empty.
    """

    at: float
    sent: float
    key: str
    what: str
    token: int
    capacity: int
    available: int
    holders: Mapping[str, Held]
    head: str | None = None

    @property
    def damaged(self) -> bool:
        """Return whether the free slots and those of the holders do not add up to the capacity."""
        return self.available + sum(held.slots for held in self.holders.values()) != self.capacity


@dataclass
class Records:
    """The history of each lock's record.

    :ivar of: the versions of each record, in the order of the writes, by key.
    """

    of: dict[str, list[Record]] = field(default_factory=lambda: defaultdict(list))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def on_answer(self, seen: Seen, status: int, body: bytes) -> None:
        """Add the record from an answer of the engine, if it is the answer to a write of a lock."""
        if seen.action != "UpdateItem" or seen.key is None or status != 200:
            return
        item = json.loads(body).get("Attributes", {})
        if "holders" not in item or seen.key.startswith(WAITING_PREFIX):
            return  # the item of a waiter or of a process's presence
        with self._lock:
            self.add(_record(item, seen, *sent_and_answered(seen)))

    def add(self, record: Record) -> None:
        """Add a version of a record. If two requests overlap in time, their tokens decide the order."""
        records = self.of[record.key]
        index = len(records)
        while index and records[index - 1].token > record.token and record.sent < records[index - 1].at:
            index -= 1
        records.insert(index, record)

    def owners(self, key: str) -> list[str]:
        """Return the owners of the lock's present holders."""
        with self._lock:
            records = self.of[key]
            return sorted(held.owner for held in records[-1].holders.values()) if records else []

    def histories(self) -> dict[str, list[Record]]:
        """Return all versions by key. In each, `Held.since` is the time of the holder's last heartbeat."""
        return {key: _with_heartbeat_times(records) for key, records in self.of.items()}


def sent_and_answered(seen: Seen) -> tuple[float, float]:
    """Return when a proxy received a request, and when it received the answer, which is now; monotonic seconds."""
    at = monotonic()
    return at - (time.monotonic() - seen.at), at  # `seen.at` is of another clock than `monotonic`


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
    head = plain.get("queue_head")
    return Record(at, sent, str(seen.key), seen.what, token, capacity, available, holders, head)


def _plain(value: Mapping[str, Any]) -> Any:
    """Remove the type names from a DynamoDB value in JSON."""
    ((kind, inner),) = value.items()
    if kind == "M":
        assert isinstance(inner, dict)
        return {name: _plain(each) for name, each in inner.items()}
    return inner


def _with_heartbeat_times(records: list[Record]) -> list[Record]:
    """Set each holder's `since` to the time at which its version was first seen."""
    first_seen: dict[str, float] = {}
    result = []
    for record in records:
        holders = {
            lease_id: replace(held, since=first_seen.setdefault(held.version, held.since))
            for lease_id, held in record.holders.items()
        }
        result.append(replace(record, holders=holders))
    return result
