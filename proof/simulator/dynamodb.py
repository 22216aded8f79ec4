"""A DynamoDB table in memory: conditional writes, transactions, `ALL_OLD`, reads that may be stale, queries, deletion
by TTL, and DynamoDB's limits.

No time passes in it and nothing is random; when a request arrives, and which past a read shows, is the adversary's to
say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deployments import limits
from proof.simulator.expressions import InvalidExpression, Item, Scope, condition, update

#: Partition key and sort key.
Place = tuple[str, str]
#: The moment at which a read sees an item, anew for each item; None for now.
Moment = Callable[[], float | None]

#: For so long after a transaction its token is remembered, seconds.
REMEMBERS_TOKENS = 600.0
_QUERY = {
    *("TableName", "KeyConditionExpression", "ExpressionAttributeNames", "ExpressionAttributeValues"),
    *("ConsistentRead", "Limit", "ExclusiveStartKey", "ScanIndexForward"),
}


class Refused(Exception):
    """The condition did not hold. `item` is what stands there, None if there is nothing."""

    def __init__(self, item: Item | None) -> None:
        self.item = item


class Throttled(Exception):
    """The partition has taken as many writes within a second as it can."""


class Cancelled(Exception):
    """A transaction was not carried out. `refusals` says for each of its items what was wrong with it, None if
    nothing."""

    def __init__(self, refusals: Sequence[Refused | None]) -> None:
        self.refusals = refusals


@dataclass(frozen=True)
class Written:
    """A write that was carried out: where, with which parameters, and the item before and after; None if there was or
    is none."""

    at: Place
    params: Mapping[str, Any]
    before: Item | None
    after: Item | None


@dataclass
class Table:
    """One table.

    :ivar items: by partition key and sort key.
    :ivar past: what each item has been, oldest first, with the time from which on it was so; only as far back as reads
        can be stale.
    :ivar tokens: of the transactions that were carried out: when, and what they were.
    """

    remembers: float = 0.0
    items: dict[Place, Item] = field(default_factory=dict)
    past: dict[Place, list[tuple[float, Item | None]]] = field(default_factory=dict)
    tokens: dict[str, tuple[float, Sequence[Mapping[str, Any]]]] = field(default_factory=dict)
    throughput: limits.Throughput = field(default_factory=limits.Throughput)
    _sizes: dict[Place, tuple[Item, int]] = field(default_factory=dict)  # to count the bytes of an item once

    def write(self, kind: str, params: Mapping[str, Any], now: float) -> Written:
        """One ``Update``, ``Put`` or ``Delete``.

        :raises Refused: its condition does not hold.
        :raises Throttled: the partition takes no more writes.
        """
        _check(f"{kind}Item", params)
        written = self._decide(kind, params)
        self._use(written, now)
        self._put(written.at, written.after, now)
        return written

    def transact(self, items: Sequence[Mapping[str, Any]], token: str, now: float) -> list[Written]:
        """`TransactWriteItems`: what it wrote; nothing, if it comes a second time.

        :raises Cancelled: the condition of one of its items does not hold.
        :raises Throttled: the partition of one of them takes no more writes.
        """
        _check("TransactWriteItems", {"TransactItems": items})
        if self.has_done(token, now):
            if self.tokens[token][1] != items:
                raise InvalidExpression(f"the token {token} was another transaction's")
            return []
        actions = [action for item in items for action in item.items()]
        if len({place(params) for _, params in actions}) < len(items):
            raise InvalidExpression("Transaction request cannot include multiple operations on one item")
        decided: list[Written] = []
        refusals: list[Refused | None] = []
        for kind, params in actions:
            try:
                written = self._decide(kind, params)
            except Refused as refused:
                refusals.append(refused)
            else:
                refusals.append(None)
                if kind != "ConditionCheck":
                    decided.append(written)
        if any(refusals):
            raise Cancelled(refusals)
        for written in decided:
            self._use(written, now, times=2)
        for written in decided:
            self._put(written.at, written.after, now)
        self.tokens[token] = (now, items)
        return decided

    def has_done(self, token: str, now: float) -> bool:
        """Whether the transaction was carried out not long ago."""
        return token in self.tokens and now - self.tokens[token][0] <= REMEMBERS_TOKENS

    def get(self, key: Mapping[str, Any], as_of: float | None = None) -> Item | None:
        """The item, consistently, or as it was at a moment that is not too long ago."""
        return self._as_of(_place(key), as_of)

    def batch_get(self, keys: Iterable[Mapping[str, Any]], moment: Moment) -> list[Item]:
        """`BatchGetItem`: those of the items that are there."""
        return [item for key in keys if (item := self.get(key, moment())) is not None]

    def query(self, params: Mapping[str, Any], moment: Moment) -> dict[str, Any]:
        """`Query`: one page of the items under a key, in the order of their entries."""
        if strange := params.keys() - _QUERY:
            raise NotImplementedError(f"Query with {strange}")
        names, values = params["ExpressionAttributeNames"], params["ExpressionAttributeValues"]
        wanted = condition(params["KeyConditionExpression"])

        def asked_for(at: Place) -> bool:
            return wanted(Scope(_key(at), names, values))

        forward = params.get("ScanIndexForward", True)
        # Texts are ordered by their code points, which is the order of their bytes in UTF-8.
        places = sorted(filter(asked_for, self.past), reverse=not forward)
        if "ExclusiveStartKey" in params:
            start = _place(params["ExclusiveStartKey"])
            if not asked_for(start):
                raise InvalidExpression("The provided starting key does not match the range key predicate")
            places = [at for at in places if (at > start if forward else at < start)]
        found: list[Item] = []
        for at in places:
            if (item := self._as_of(at, moment())) is not None:
                found.append(item)
                if len(found) == params.get("Limit"):
                    return {"Items": found, "Count": len(found), "LastEvaluatedKey": _key(at)}
        return {"Items": found, "Count": len(found)}

    def delete(self, at: Place, now: float) -> None:
        """What TTL does."""
        self._put(at, None, now)

    def _use(self, written: Written, now: float, times: int = 1) -> None:
        size = max(self._size(written.at, item) for item in (written.before, written.after))
        if not self.throughput.takes(written.at[0], size, now, times):
            raise Throttled

    def _size(self, at: Place, item: Item | None) -> int:
        if item is None:
            return 0
        last, size = self._sizes.get(at, (None, 0))
        if last is not item:
            try:
                size = limits.check_item(item)
            except limits.LimitExceeded as exceeded:
                raise InvalidExpression(str(exceeded)) from None
            self._sizes[at] = item, size
        return size

    def _decide(self, kind: str, params: Mapping[str, Any]) -> Written:
        """What a write would come to."""
        at = place(params)
        before = self.items.get(at)
        names = params.get("ExpressionAttributeNames", {})
        values = params.get("ExpressionAttributeValues", {})
        scope = Scope({} if before is None else before, names, values)
        if "ConditionExpression" in params and not condition(params["ConditionExpression"])(scope):
            raise Refused(before)
        after: Item | None
        match kind:
            case "Update":
                after = {**params["Key"], **update(params["UpdateExpression"])(scope)}
            case "Put":
                after = params["Item"]
            case "Delete":
                after = None
            case "ConditionCheck":
                after = before
            case _:
                raise NotImplementedError(kind)
        return Written(at, params, before, after)

    def _as_of(self, at: Place, as_of: float | None) -> Item | None:
        if as_of is not None:
            for since, item in reversed(self.past.get(at, [])):
                if since <= as_of:
                    return item
        return self.items.get(at)

    def _put(self, at: Place, item: Item | None, now: float) -> None:
        past = self.past.setdefault(at, [(float("-inf"), None)])
        past.append((now, item))
        while len(past) > 1 and past[1][0] <= now - self.remembers:
            past.pop(0)
        if item is None:
            self.items.pop(at, None)
        else:
            self.items[at] = item


def _check(action: str, params: Mapping[str, Any]) -> None:
    try:
        limits.check(action, params)
    except limits.LimitExceeded as exceeded:
        raise InvalidExpression(str(exceeded)) from None


def place(params: Mapping[str, Any]) -> Place:
    """Which item a write is about."""
    return _place(params["Key"] if "Key" in params else params["Item"])


def _place(key: Mapping[str, Any]) -> Place:
    return key["key"]["S"], key["entry"]["S"]


def _key(at: Place) -> Item:
    return {"key": {"S": at[0]}, "entry": {"S": at[1]}}
