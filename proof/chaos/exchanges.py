"""The requests for each lock and its queue, as the proxies see them, and what the engine answered.

They tell the story of a hand-over: who was where in the queue, who looked when, and what each one was shown.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow_dynamo_lock.core.table.items import WAITER_ENTRY
from deployments.proxy import Seen
from proof.chaos.records import sent_and_answered
from proof.chaos.settings import CAPACITIES


@dataclass(frozen=True)
class Exchange:
    """One request for a lock or its queue, and the engine's answer. Times are monotonic seconds.

    :ivar at: when the proxy received the answer.
    :ivar sent: when the proxy received the request.
    :ivar link: name of the proxy.
    :ivar place: the waiter's place, if the request writes or deletes its item.
    :ivar owner: the waiter's owner, if the request writes its item.
    :ivar lease_id: the waiter's lease id, if the request writes its item.
    """

    at: float
    sent: float
    link: str
    key: str
    what: str
    answer: str
    place: str | None = None
    owner: str | None = None
    lease_id: str | None = None


@dataclass
class Exchanges:
    """All exchanges of a run.

    :ivar all: in the order of the answers.
    """

    all: list[Exchange] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def on_answer(self, link: str, seen: Seen, status: int, body: bytes) -> None:
        """Add the exchanges that an answer of the engine completes: one for each lock of the run."""
        sent, at = sent_and_answered(seen)
        output = json.loads(body) if body else {}
        with self._lock:
            self.all += [Exchange(at, sent, link, **each) for each in _exchanges(seen, status, output)]


def _exchanges(seen: Seen, status: int, output: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if seen.action == "BatchGetItem":
        items = [item for found in output.get("Responses", {}).values() for item in found]
        shown = {item["key"]["S"]: _lock(item) for item in items}
        for asked in seen.params["RequestItems"].values():
            for key in (each["key"]["S"] for each in asked["Keys"]):
                if key in CAPACITIES:
                    yield {"key": key, "what": "reads", "answer": shown.get(key, f"nothing, status {status}")}
        return
    item = seen.params.get("Item", seen.params.get("Key", {}))
    key = item.get("key", seen.params.get("ExpressionAttributeValues", {}).get(":key", {})).get("S")
    if key not in CAPACITIES:
        return
    entry = item.get("entry", {}).get("S", "")
    more = {}
    if entry.startswith(WAITER_ENTRY):
        more = {"place": entry.removeprefix(WAITER_ENTRY)} | {
            name: item[name]["S"] for name in ("owner", "lease_id") if name in item
        }
    yield {"key": key, "what": seen.what, "answer": _answer(status, output), **more}


def _answer(status: int, output: Mapping[str, Any]) -> str:
    if "Items" in output:
        waiters = [item["owner"]["S"] for item in output["Items"] if "owner" in item]
        lock = "".join(_lock(item) for item in output["Items"] if "holders" in item)
        return f"{lock}; queue: {', '.join(waiters) or 'empty'}"
    shown = output.get("Attributes", output.get("Item", {}))
    lock = f": {_lock(shown)}" if "holders" in shown else ""
    failure = str(output.get("__type", "")).rpartition("#")[2]
    return ("applied" if status == 200 else failure or f"status {status}") + lock


def _lock(item: Mapping[str, Any]) -> str:
    """The lock that an item shows, in a few words."""
    holders = [each["M"]["owner"]["S"] for each in item["holders"]["M"].values()]
    head = f", head {item['queue_head']['S']}" if "queue_head" in item else ""
    return f"{item['available']['N']} free, token {item['token']['N']}, held by {holders or 'nobody'}{head}"
