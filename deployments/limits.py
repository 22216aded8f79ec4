"""DynamoDB's documented limits on requests and items. moto and the simulated table do not enforce them.

https://docs.aws.amazon.com/amazondynamodb/latest/developerguide/Constraints.html
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil
from typing import Any

#: Maximum size of one expression in bytes, and maximum number of operators and functions in it.
EXPRESSION_BYTES, OPERATORS = 4096, 300
#: Maximum sizes in bytes: of an item with the names of its attributes, of a partition key, of a sort key.
ITEM_BYTES, PARTITION_KEY_BYTES, SORT_KEY_BYTES = 400 * 1024, 2048, 1024
#: Maximum number of items in a transaction or a `BatchGetItem`, and maximum size of a transaction in bytes.
BATCH, TRANSACTION_BYTES = 100, 4 * 1024 * 1024
#: Write units per second of one partition, and bytes that one unit writes.
PARTITION_UNITS, UNIT_BYTES = 1000, 1024

_EXPRESSIONS = ("UpdateExpression", "ConditionExpression", "KeyConditionExpression", "FilterExpression")
_FUNCTION = r"(?:attribute_(?:exists|not_exists|type)|begins_with|contains|size|if_not_exists|list_append)"
_FUNCTIONS = rf"\b{_FUNCTION}\b"
# What parentheses with arguments follow, in an expression without spaces.
_BEFORE_ARGUMENTS = re.compile(rf"(?:{_FUNCTION}|IN)$")
# The equals sign is an operator in a condition, but not in an update such as `SET a = :b`.
_IN_UPDATE = re.compile(rf"{_FUNCTIONS}|[+-]")
_IN_CONDITION = re.compile(rf"{_FUNCTIONS}|<>|<=|>=|[=<>]|\b(?:AND|OR|NOT|BETWEEN|IN)\b")


class LimitExceeded(Exception):
    """The request exceeds a limit. DynamoDB would answer it with a ValidationException."""


def check(action: str, params: Mapping[str, Any]) -> None:
    """Check the limits that depend on the request alone, not on the items in the table.

    :param action: the API action, such as ``UpdateItem``.
    :raises LimitExceeded: the request exceeds a limit.
    """
    if action == "TransactWriteItems":
        writes = [write for item in params["TransactItems"] for write in item.values()]
        _at_most(BATCH, len(writes), "items in a transaction")
        _at_most(TRANSACTION_BYTES, sum(map(_sent_bytes, writes)), "bytes in a transaction")
        for write in writes:
            check("write of a transaction", write)
        return
    if action == "BatchGetItem":
        keys = sum(len(table["Keys"]) for table in params["RequestItems"].values())
        _at_most(BATCH, keys, "keys in a request")
        return
    for name in _EXPRESSIONS:
        if name in params:
            _check_expression(name, params[name])
    if "Item" in params:
        check_item(params["Item"])


def check_item(item: Mapping[str, Any]) -> int:
    """Return the size of an item in bytes.

    :raises LimitExceeded: the item is too large.
    """
    if (size := size_of(item)) > ITEM_BYTES:
        raise LimitExceeded(f"Item size has exceeded the maximum allowed size: {size} bytes")
    return size


def size_of(item: Mapping[str, Any]) -> int:
    """Return the size of an item in bytes, as DynamoDB counts it."""
    return sum(len(name.encode()) + _value_bytes(value) for name, value in item.items())


@lru_cache(maxsize=4096)
def _check_expression(name: str, text: str) -> None:
    if (size := len(text.encode())) > EXPRESSION_BYTES:
        raise LimitExceeded(
            f"Invalid {name}: Expression size has exceeded the maximum allowed size; expression size: {size}"
        )
    operators = len((_IN_UPDATE if name == "UpdateExpression" else _IN_CONDITION).findall(text))
    if operators > OPERATORS:
        raise LimitExceeded(
            f"Invalid {name}: The expression contains too many operators; operators: {operators}"
        )
    if _has_redundant_parentheses(text):
        raise LimitExceeded(f"Invalid {name}: The expression has redundant parentheses;")


def _has_redundant_parentheses(text: str) -> bool:
    """Whether a pair of parentheses directly encloses another pair, which DynamoDB refuses.

    The outer pair may be that of a function's arguments, as in ``size((a))``, or that of IN: those are not redundant.
    """
    opened: list[int] = []
    pairs = set()
    for position, character in enumerate(text := text.replace(" ", "")):
        if character == "(":
            opened.append(position)
        elif character == ")":
            pairs.add((opened.pop(), position))
    return any(
        (first + 1, last - 1) in pairs and not _BEFORE_ARGUMENTS.search(text[:first]) for first, last in pairs
    )


def _value_bytes(value: Mapping[str, Any]) -> int:
    """Return the size of an attribute value such as ``{"S": "text"}`` in bytes, as DynamoDB counts it."""
    ((kind, content),) = value.items()
    match kind:
        case "M":
            return 3 + len(content) + size_of(content)
        case "L":
            return 3 + len(content) + sum(map(_value_bytes, content))
        case "N":
            return len(content.strip("-0.")) // 2 + 2
        case "S":
            return len(content.encode())
        case "SS" | "NS" | "BS":
            return sum(map(len, content))
    return len(content) if kind == "B" else 1


def _sent_bytes(write: Mapping[str, Any]) -> int:
    """Return the size in bytes of the values that one write of a transaction sends."""
    return size_of(write.get("Item", {})) + size_of(write.get("ExpressionAttributeValues", {}))


def _at_most(limit: int, number: int, what: str) -> None:
    if number > limit:
        raise LimitExceeded(f"The request has {number} {what}, but DynamoDB accepts at most {limit}")


@dataclass
class Throughput:
    """The write units that each partition has used during the last second."""

    _used: dict[str, deque[tuple[float, int]]] = field(default_factory=lambda: defaultdict(deque))

    def takes(self, key: str, size: int, now: float, times: int = 1) -> bool:
        """Count a write in the partition of a key, if that has capacity left. Returns whether it has.

        :param size: size of the item in bytes, before or after the write, whichever is larger.
        :param now: current time in seconds, on any clock.
        :param times: write units per kilobyte: 1, or 2 in a transaction.
        """
        used = self._used[key]
        while used and used[0][0] <= now - 1.0:
            used.popleft()
        units = times * max(1, ceil(size / UNIT_BYTES))
        if sum(spent for _, spent in used) + units > PARTITION_UNITS:
            return False
        used.append((now, units))
        return True
