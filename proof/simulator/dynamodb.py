"""A DynamoDB table in memory, with conditional writes, transactions, `ALL_OLD`, stale reads, queries,
deletion by TTL, and DynamoDB's limits.

The table has no clock and draws no random numbers. Its caller, `proof.simulator.network`, decides when a
request is applied and how stale a read is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deployments import limits
from proof.simulator.expressions import InvalidExpression, Item, Scope, condition, update

#: Primary key of an item: partition key and sort key.
ItemKey = tuple[str, str]
#: Called once for each item that is read. Returns the time as of which the item is read, or None for its
#: latest state.
ReadTime = Callable[[], float | None]

#: How long the idempotency token of a transaction is valid, in seconds.
TOKEN_LIFETIME = 600.0
#: The parameters of a query that are supported.
_QUERY = {
    *("TableName", "KeyConditionExpression", "ExpressionAttributeNames", "ExpressionAttributeValues"),
    *("ConsistentRead", "Limit", "ExclusiveStartKey", "ScanIndexForward"),
}


class Refused(Exception):
    """The condition of a write failed.

    :ivar item: the present item, or None if there is none.
    """

    def __init__(self, item: Item | None) -> None:
        self.item = item


class Throttled(Exception):
    """The write would exceed the throughput of its partition."""


class Cancelled(Exception):
    """A transaction was cancelled because conditions failed.

    :ivar refusals: for each item of the transaction its failed condition, or None if it did not fail.
    """

    def __init__(self, refusals: Sequence[Refused | None]) -> None:
        self.refusals = refusals


@dataclass(frozen=True)
class Written:
    """The effect of a write on one item.

    :ivar at: the item's key.
    :ivar params: parameters of the write.
    :ivar before: the item before the write, None if there was none.
    :ivar after: the item after the write, None if there is none.
    """

    at: ItemKey
    params: Mapping[str, Any]
    before: Item | None
    after: Item | None


@dataclass
class Table:
    """One table. Times are in seconds, on any clock that the caller chooses.

    :ivar max_staleness: greatest age of a stale read, in seconds.
    :ivar items: the present items.
    :ivar past: all states of each item since `max_staleness` seconds ago, oldest first, each with the time of
        its write.
    :ivar tokens: idempotency token of each committed transaction, with its time and its items.
    :ivar throughput: write units that each partition has used during the last second.
    :ivar on_change: called for each item that is written or deleted.
    """

    max_staleness: float = 0.0
    items: dict[ItemKey, Item] = field(default_factory=dict)
    past: dict[ItemKey, list[tuple[float, Item | None]]] = field(default_factory=dict)
    tokens: dict[str, tuple[float, Sequence[Mapping[str, Any]]]] = field(default_factory=dict)
    throughput: limits.Throughput = field(default_factory=limits.Throughput)
    on_change: Callable[[ItemKey], None] = lambda _: None
    _sizes: dict[ItemKey, tuple[Item, int]] = field(default_factory=dict)  # cache of the size of each item

    def write(self, kind: str, params: Mapping[str, Any], now: float) -> Written:
        """Apply one write.

        :param kind: ``Update``, ``Put`` or ``Delete``.
        :raises Refused: the condition of the write fails.
        :raises Throttled: the partition's throughput is used up.
        :raises InvalidExpression: DynamoDB would reject the request as invalid.
        """
        _check(f"{kind}Item", params)
        written = self._evaluate(kind, params)
        self._use_throughput(written, now)
        self._store(written.at, written.after, now)
        return written

    def transact(self, items: Sequence[Mapping[str, Any]], token: str, now: float) -> list[Written]:
        """Apply `TransactWriteItems`.

        :param token: idempotency token. A transaction that was already committed with it is not applied
            again.
        :returns: the writes; empty if the transaction was committed before.
        :raises Cancelled: the condition of at least one item fails.
        :raises Throttled: the throughput of a partition is used up.
        :raises InvalidExpression: DynamoDB would reject the request as invalid.
        """
        _check("TransactWriteItems", {"TransactItems": items})
        if self.has_committed(token, now):
            if self.tokens[token][1] != items:
                raise InvalidExpression(f"another transaction has used the idempotency token {token}")
            return []
        actions = [action for item in items for action in item.items()]
        if len({item_key(params) for _, params in actions}) < len(items):
            raise InvalidExpression("Transaction request cannot include multiple operations on one item")
        writes: list[Written] = []
        refusals: list[Refused | None] = []
        for kind, params in actions:
            try:
                written = self._evaluate(kind, params)
            except Refused as refused:
                refusals.append(refused)
            else:
                refusals.append(None)
                if kind != "ConditionCheck":
                    writes.append(written)
        if any(refusals):
            raise Cancelled(refusals)
        for written in writes:
            self._use_throughput(written, now, times=2)
        for written in writes:
            self._store(written.at, written.after, now)
        self.tokens[token] = (now, items)
        return writes

    def has_committed(self, token: str, now: float) -> bool:
        """Whether a transaction was committed with this token, and the token is still valid."""
        return token in self.tokens and now - self.tokens[token][0] <= TOKEN_LIFETIME

    def get(self, key: Mapping[str, Any], as_of: float | None = None) -> Item | None:
        """Return an item, or None if there is none.

        :param as_of: time of the state to return, at most `max_staleness` seconds ago; None for the latest
            state.
        """
        return self._as_of(_primary_key(key), as_of)

    def batch_get(self, keys: Iterable[Mapping[str, Any]], read_time: ReadTime) -> list[Item]:
        """Return the items that exist, as `BatchGetItem` does."""
        return [item for key in keys if (item := self.get(key, read_time())) is not None]

    def query(self, params: Mapping[str, Any], read_time: ReadTime) -> dict[str, Any]:
        """Return one page of the items that match a key condition, ordered by sort key, as `Query` does."""
        if unsupported := params.keys() - _QUERY:
            raise NotImplementedError(f"the simulated table does not support a Query with {unsupported}")
        names, values = params["ExpressionAttributeNames"], params["ExpressionAttributeValues"]
        wanted = condition(params["KeyConditionExpression"])

        def matches(at: ItemKey) -> bool:
            return wanted(Scope(_key(at), names, values))

        forward = params.get("ScanIndexForward", True)
        # Python orders strings by code point. That is the order of their bytes in UTF-8, which DynamoDB uses.
        keys = sorted(filter(matches, self.past), reverse=not forward)
        if "ExclusiveStartKey" in params:
            start = _primary_key(params["ExclusiveStartKey"])
            if not matches(start):
                raise InvalidExpression("The provided starting key does not match the range key predicate")
            keys = [at for at in keys if (at > start if forward else at < start)]
        found: list[Item] = []
        for at in keys:
            if (item := self._as_of(at, read_time())) is not None:
                found.append(item)
                if len(found) == params.get("Limit"):
                    return {"Items": found, "Count": len(found), "LastEvaluatedKey": _key(at)}
        return {"Items": found, "Count": len(found)}

    def delete(self, at: ItemKey, now: float) -> None:
        """Delete an item, as DynamoDB's TTL does."""
        self._store(at, None, now)

    def _use_throughput(self, written: Written, now: float, times: int = 1) -> None:
        # DynamoDB counts the larger of the two sizes; in a transaction, twice the units.
        size = max(self._size(written.at, item) for item in (written.before, written.after))
        if not self.throughput.takes(written.at[0], size, now, times):
            raise Throttled

    def _size(self, at: ItemKey, item: Item | None) -> int:
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

    def _evaluate(self, kind: str, params: Mapping[str, Any]) -> Written:
        """Compute the effect of a write without applying it. Raises `Refused` if the condition fails."""
        at = item_key(params)
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
                raise NotImplementedError(f"the simulated table does not support the write {kind!r}")
        return Written(at, params, before, after)

    def _as_of(self, at: ItemKey, as_of: float | None) -> Item | None:
        if as_of is not None:
            for since, item in reversed(self.past.get(at, [])):
                if since <= as_of:
                    return item
        return self.items.get(at)

    def _store(self, at: ItemKey, item: Item | None, now: float) -> None:
        past = self.past.setdefault(at, [(float("-inf"), None)])
        past.append((now, item))
        while len(past) > 1 and past[1][0] <= now - self.max_staleness:
            past.pop(0)
        if item is None:
            self.items.pop(at, None)
        else:
            self.items[at] = item
        self.on_change(at)


def _check(action: str, params: Mapping[str, Any]) -> None:
    try:
        limits.check(action, params)
    except limits.LimitExceeded as exceeded:
        raise InvalidExpression(str(exceeded)) from None


def item_key(params: Mapping[str, Any]) -> ItemKey:
    """Return the key of the item that a request reads or writes."""
    return _primary_key(params["Key"] if "Key" in params else params["Item"])


def _primary_key(key: Mapping[str, Any]) -> ItemKey:
    return key["key"]["S"], key["entry"]["S"]


def _key(at: ItemKey) -> Item:
    return {"key": {"S": at[0]}, "entry": {"S": at[1]}}
