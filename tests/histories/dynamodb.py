"""A DynamoDB table in memory: conditional writes, `ALL_OLD`, reads that may be stale, deletion by TTL.

No time passes in it and nothing is random; when a request arrives, and which past a stale read shows, is the
adversary's to say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.histories.expressions import Item, Scope, condition, update

Written = Callable[["Item | None", "Item | None"], None]


class Refused(Exception):
    """The condition did not hold. `item` is what stands there, None if there is nothing."""

    def __init__(self, item: Item | None) -> None:
        self.item = item


@dataclass
class Table:
    """One table.

    :ivar items: by partition key and sort key.
    :ivar past: what each item has been, oldest first, with the time from which on it was so; only as far back as reads
        can be stale.
    """

    remembers: float = 0.0
    items: dict[tuple[str, str], Item] = field(default_factory=dict)
    past: dict[tuple[str, str], list[tuple[float, Item | None]]] = field(default_factory=dict)

    def update(self, params: Mapping[str, Any], now: float) -> tuple[Item | None, Item]:
        """`UpdateItem`: the item before and after.

        :raises Refused: its condition does not hold.
        """
        at = _place(params["Key"])
        before = self.items.get(at)
        names = params.get("ExpressionAttributeNames", {})
        values = params.get("ExpressionAttributeValues", {})
        scope = Scope({} if before is None else before, names, values)
        if "ConditionExpression" in params and not condition(params["ConditionExpression"])(scope):
            raise Refused(before)
        after = {**params["Key"], **update(params["UpdateExpression"])(scope)}
        self._put(at, after, now)
        return before, after

    def get(self, key: Mapping[str, Any], as_of: float | None = None) -> Item | None:
        """The item, consistently, or as it was at a moment that is not too long ago."""
        at = _place(key)
        if as_of is not None:
            for since, item in reversed(self.past.get(at, [])):
                if since <= as_of:
                    return item
        return self.items.get(at)

    def delete(self, at: tuple[str, str], now: float) -> None:
        """What TTL does."""
        self._put(at, None, now)

    def _put(self, at: tuple[str, str], item: Item | None, now: float) -> None:
        past = self.past.setdefault(at, [(float("-inf"), None)])
        past.append((now, item))
        while len(past) > 1 and past[1][0] <= now - self.remembers:
            past.pop(0)
        if item is None:
            self.items.pop(at, None)
        else:
            self.items[at] = item


def _place(key: Mapping[str, Any]) -> tuple[str, str]:
    return key["key"]["S"], key["entry"]["S"]
