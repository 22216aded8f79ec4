"""A proxy that counts the requests of a library, and computes the capacity units that they cost.

The engines do not report capacity as AWS bills it: moto always returns the same number, and no engine reports the cost
of a refused write. The proxy therefore computes it from the sizes of the items, by DynamoDB's documented rules:

- A write costs 1 write unit per started KB of the item before or after the write, whichever is larger.
- A refused write costs the same, for the item that is stored.
- A consistent read costs 1 read unit per started 4 KB, an eventually consistent read half of that. A read of an item
  that does not exist costs as much as that of the smallest item.
- In a transaction, everything costs twice as much.
- Requests about a table, such as ``DescribeTable``, cost no units.
"""

from __future__ import annotations

import base64
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Self

import boto3

from airflow_dynamo_lock import sdk_config
from bench.contestants import ENVIRONMENT
from deployments.proxy import Proxy, Rule, Seen


@dataclass
class Usage:
    """Requests and capacity units.

    :ivar requests: number of requests for each action, such as ``UpdateItem``.
    :ivar write_units: write request units.
    :ivar read_units: read request units.
    """

    requests: Counter[str] = field(default_factory=Counter)
    write_units: float = 0.0
    read_units: float = 0.0

    def per(self, number: float) -> dict[str, Any]:
        """Return plain data, with all figures divided by `number`, such as the number of cycles."""
        return {
            "requests": round(self.requests.total() / number, 2),
            "write_units": round(self.write_units / number, 2),
            "read_units": round(self.read_units / number, 2),
            "actions": {action: round(count / number, 2) for action, count in sorted(self.requests.items())},
        }


class Meter:
    """A proxy for the engine at `target`, during a ``with`` block. It counts the requests that it forwards.

    :ivar endpoint_url: address of the proxy.
    """

    def __init__(self, target: str) -> None:
        self._proxy = Proxy(target, self._count)
        # For the meter's own reads, which are not counted.
        self._client = engine_client(target)
        self._lock = threading.Lock()
        self._usage = Usage()
        self._sizes: dict[str, int] = {}  # item → bytes after its last write
        self._keys: dict[str, list[str]] = {}  # table → names of its key attributes

    def __enter__(self) -> Self:
        self._proxy.__enter__()
        self.endpoint_url = self._proxy.endpoint_url
        return self

    def __exit__(self, *_: object) -> None:
        self._proxy.__exit__()

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Count nothing during this block, and delay polls, so that waiters can enqueue faster."""
        slow = Rule(lambda seen: seen.action == "BatchGetItem", delay=1.0)
        self._proxy.on_answer = None
        with self._proxy.applying(slow):
            yield
        self._proxy.on_answer = self._count

    def take(self) -> Usage:
        """Return the usage since the last call."""
        with self._lock:
            usage, self._usage = self._usage, Usage()
        return usage

    def over(self, seconds: float) -> Usage:
        """Return the usage during the next `seconds`."""
        self.take()
        time.sleep(seconds)
        return self.take()

    def _count(self, seen: Seen, status: int, body: bytes) -> None:
        params = seen.params
        answer = json.loads(body)
        write = read = 0.0
        match seen.action:
            case "UpdateItem" | "DeleteItem":
                write = self._write_units(params["TableName"], params["Key"])
            case "PutItem":
                names = self._key_names(params["TableName"])
                write = self._write_units(params["TableName"], {n: params["Item"][n] for n in names})
            case "TransactWriteItems":
                for each in params["TransactItems"]:
                    ((kind, item),) = each.items()
                    names = self._key_names(item["TableName"])
                    key = {n: item["Item"][n] for n in names} if kind == "Put" else item["Key"]
                    write += 2 * self._write_units(item["TableName"], key)
            case "GetItem":
                read = read_units(item_size(answer.get("Item", {})), params.get("ConsistentRead", False))
            case "BatchGetItem":
                for table, asked in params["RequestItems"].items():
                    items = answer.get("Responses", {}).get(table, [])
                    consistent = asked.get("ConsistentRead", False)
                    read += sum(read_units(item_size(item), consistent) for item in items)
                    read += (len(asked["Keys"]) - len(items)) * read_units(0, consistent)
            case "Query" | "Scan":
                size = sum(map(item_size, answer.get("Items", [])))
                read = read_units(size, params.get("ConsistentRead", False))
        with self._lock:
            self._usage.requests[seen.action] += 1
            self._usage.write_units += write
            self._usage.read_units += read

    def _write_units(self, table: str, key: Mapping[str, Any]) -> int:
        """Return the write units of a write that the engine has just carried out, or refused."""
        found = self._client.get_item(TableName=table, Key=key, ConsistentRead=True)
        after = item_size(found.get("Item", {}))
        name = json.dumps([table, key], sort_keys=True)
        with self._lock:
            before = self._sizes.get(name, 0)
            self._sizes[name] = after
        return max(1, ceil(max(before, after) / 1024))

    def _key_names(self, table: str) -> list[str]:
        if table not in self._keys:
            described = self._client.describe_table(TableName=table)["Table"]
            self._keys[table] = [each["AttributeName"] for each in described["KeySchema"]]
        return self._keys[table]


def engine_client(endpoint_url: str) -> Any:
    """Return an SDK client for an engine, or for a proxy."""
    return boto3.client(
        "dynamodb",
        endpoint_url=endpoint_url,
        region_name=ENVIRONMENT["AWS_DEFAULT_REGION"],
        aws_access_key_id=ENVIRONMENT["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=ENVIRONMENT["AWS_SECRET_ACCESS_KEY"],
        config=sdk_config(),
    )


def read_units(size: int, consistent: bool) -> float:
    """Return the read units of a read of `size` bytes."""
    return max(1, ceil(size / 4096)) * (1.0 if consistent else 0.5)


def item_size(item: Mapping[str, Any]) -> int:
    """Return an item's size in bytes, by the rules of DynamoDB's documentation."""
    return sum(len(name.encode()) + _size(value) for name, value in item.items())


def _size(attribute: Mapping[str, Any]) -> int:
    kind: str
    value: Any
    ((kind, value),) = attribute.items()
    match kind:
        case "S":
            return len(str(value).encode())
        case "N":
            digits = len(str(value).lstrip("-").replace(".", "").strip("0"))
            return ceil(digits / 2) + 1 + int(value.startswith("-"))
        case "B":
            return len(value) if isinstance(value, bytes) else len(base64.b64decode(value))
        case "M":
            return 3 + sum(1 + len(name.encode()) + _size(each) for name, each in value.items())
        case "L":
            return 3 + sum(1 + _size(each) for each in value)
        case "SS" | "NS" | "BS":
            return sum(_size({kind[0]: each}) for each in value)
    return 1  # BOOL, NULL
