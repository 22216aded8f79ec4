"""DynamoDB's documented limits on requests and items, for engines that do not enforce them: moto, the simulated table.

https://docs.aws.amazon.com/amazondynamodb/latest/developerguide/Constraints.html
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

#: Bytes of one expression, and operators and functions in it.
EXPRESSION_BYTES, OPERATORS = 4096, 300
#: Bytes of an item with its attributes' names, and of a partition and a sort key.
ITEM_BYTES, PARTITION_KEY_BYTES, SORT_KEY_BYTES = 400 * 1024, 2048, 1024
#: Items of a transaction or of a `BatchGetItem`, and bytes of a transaction's items.
BATCH, TRANSACTION_BYTES = 100, 4 * 1024 * 1024
#: Write units of one partition in a second, and bytes that one unit writes.
PARTITION_UNITS, UNIT_BYTES = 1000, 1024

_EXPRESSIONS = ("UpdateExpression", "ConditionExpression", "KeyConditionExpression", "FilterExpression")
_FUNCTIONS = (
    r"\b(?:attribute_(?:exists|not_exists|type)|begins_with|contains|size|if_not_exists|list_append)\b"
)
# In `SET a = :b` the equals sign is no operator.
_IN_UPDATE = re.compile(rf"{_FUNCTIONS}|[+-]")
_IN_CONDITION = re.compile(rf"{_FUNCTIONS}|<>|<=|>=|[=<>]|\b(?:AND|OR|NOT|BETWEEN|IN)\b")


class LimitExceeded(Exception):
    """DynamoDB answers such a request with a ValidationException."""


def check(action: str, params: Mapping[str, Any]) -> None:
    """Check what can be checked without the table.

    :raises LimitExceeded: DynamoDB would refuse the request.
    """
    if action == "TransactWriteItems":
        writes = [write for item in params["TransactItems"] for write in item.values()]
        _at_most(BATCH, len(writes), "items in a transaction")
        _at_most(TRANSACTION_BYTES, sum(map(_sent_bytes, writes)), "bytes in a transaction")
        for write in writes:
            check("one of a transaction", write)
        return
    if action == "BatchGetItem":
        _at_most(
            BATCH, sum(len(each["Keys"]) for each in params["RequestItems"].values()), "keys in a request"
        )
        return
    for name in _EXPRESSIONS:
        if name in params:
            _check_expression(name, params[name])
    if "Item" in params:
        check_item(params["Item"])


def check_item(item: Mapping[str, Any]) -> int:
    """Its bytes.

    :raises LimitExceeded: the item is too large.
    """
    if (size := size_of(item)) > ITEM_BYTES:
        raise LimitExceeded(f"Item size has exceeded the maximum allowed size: {size} bytes")
    return size


def size_of(item: Mapping[str, Any]) -> int:
    """The bytes of an item as DynamoDB counts them."""
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
    """Whether a pair of parentheses stands directly in another one, which DynamoDB refuses."""
    opened: list[int] = []
    pairs = set()
    for place, character in enumerate(text := text.replace(" ", "")):
        if character == "(":
            opened.append(place)
        elif character == ")":
            pairs.add((opened.pop(), place))
    return any(
        (first + 1, last - 1) in pairs and (first == 0 or not text[first - 1].isalnum())
        for first, last in pairs
    )


def _value_bytes(value: Mapping[str, Any]) -> int:
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
    return size_of(write.get("Item", {})) + size_of(write.get("ExpressionAttributeValues", {}))


def _at_most(limit: int, number: int, what: str) -> None:
    if number > limit:
        raise LimitExceeded(f"{number} {what}, where DynamoDB takes at most {limit}")


@dataclass
class Throughput:
    """The write units that each partition has used within the last second."""

    _used: dict[str, deque[tuple[float, int]]] = field(default_factory=lambda: defaultdict(deque))

    def takes(self, key: str, size: int, now: float, times: int = 1) -> bool:
        """Whether the partition of that key takes one more write.

        :param size: bytes of the item, before the write or after it, whichever is more.
        :param times: units for each kilobyte: two in a transaction.
        """
        used = self._used[key]
        while used and used[0][0] <= now - 1.0:
            used.popleft()
        units = times * max(1, -(-size // UNIT_BYTES))
        if sum(each for _, each in used) + units > PARTITION_UNITS:
            return False
        used.append((now, units))
        return True
