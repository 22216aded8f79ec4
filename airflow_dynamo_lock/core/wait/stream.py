"""Fast hand-over: read from the table's stream which locks have changed (R11).

Each process has at most one `StreamReader` per table. It reports to the `Poller` which keys have changed, and the time
up to which all changes are reported. While these reports arrive, the poller reads the changed keys and few others. When
they stop (no stream, no permission, throttling, an error), the poller reads as it does without a stream.

Every failure has the same remedy: start again at the end of the stream, and have the poller read all keys. So nothing
is missed, and a split shard needs no other treatment than an expired iterator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from airflow_dynamo_lock.core.effects import Operation, Reply, Request, Sleep
from airflow_dynamo_lock.core.model.errors import LockError, LockTableError, LockUnavailableError
from airflow_dynamo_lock.core.table.expressions import LOCK_ENTRY, PARTITION_KEY, SORT_KEY
from airflow_dynamo_lock.core.table.schema import describe, stream_arn
from airflow_dynamo_lock.core.wait.poller import Poller
from airflow_dynamo_lock.log import log

#: The actions of DynamoDB Streams, which has its own endpoint and SDK client.
STREAM_ACTIONS = frozenset({"DescribeStream", "GetShardIterator", "GetRecords"})

# Seconds between two reads of a shard, and the upper limit while AWS throttles them. All readers of a shard share five
# reads per second.
_PACE = 0.2
_SLOWEST = 5.0
# Seconds until the next attempt after a lasting failure, such as a missing permission.
_RETRY = 60.0
# Seconds between two checks that the stream is still the table's.
_CHECK = 60.0
# Restart at the end of the stream after this many seconds without a successful read.
_KEPT = 60.0
# A response ends after 1,000 records, or before the record that would exceed 1 MB. That record may have two images of
# an item of 400 KB, so a response of more than 200 KB may be cut off.
_MOST_RECORDS, _MOST_BYTES = 1000, 200_000


class StreamGoneError(LockError):
    """A shard was closed, or an iterator has expired."""


class NoStreamError(LockTableError):
    """The table has no stream, or it is disabled."""


@dataclass
class StreamReader:
    """Follows the stream of one table for one process. The driver guards the poller against concurrent use."""

    poller: Poller
    table: str
    _arn: str | None = field(default=None, init=False)
    # The next iterator of each open shard; empty if reading has to start again.
    _iterators: dict[str, str] = field(default_factory=dict, init=False)
    _pace: float = field(default=_PACE, init=False)
    _read_at: float = field(default=-math.inf, init=False)
    _checked_at: float = field(default=-math.inf, init=False)
    _warned: bool = field(default=False, init=False)

    def follow(self) -> Operation[None]:
        """Report changes to the poller while it has waiters. Never raises."""
        pause = 0.0
        while self.poller:
            now = yield Sleep(self.poller.stretched(pause))
            if not self.poller:
                return
            try:
                yield from self._catch_up(now)
            except (LockUnavailableError, StreamGoneError) as failure:
                # All readers together may be throttled, so each reads less often.
                pause = self._pace = min(self._pace * 2, _SLOWEST)
                if isinstance(failure, StreamGoneError):
                    self._restart()
                if pause == _SLOWEST:
                    self._warn(failure)
            except Exception as failure:  # also an unexpected one: polling works without the stream
                self._restart()
                self._warn(failure)
                pause = _RETRY
            else:
                pause = self._pace = max(self._pace * 0.7, _PACE)
                if self._warned and pause == _PACE:  # not after every success among failures
                    log.info("The stream of the lock table %r can be read again.", self.table)
                    self._warned = False

    def _catch_up(self, now: float) -> Operation[None]:
        if now - self._read_at > _KEPT:
            self._restart()
        if now - self._checked_at > _CHECK:
            yield from self._check(now)
        if not self._iterators:
            yield from self._open()
        asked_at, whole = math.inf, True
        for shard, iterator in list(self._iterators.items()):
            reply: Reply = yield Request("GetRecords", {"ShardIterator": iterator})
            asked_at = min(asked_at, reply.sent_at)
            records = reply.output["Records"]
            whole = whole and not _may_be_cut_off(records)
            self.poller.changed(filter(None, map(_changed_lock, records)))
            if not reply.output.get("NextShardIterator"):
                raise StreamGoneError(f"The shard {shard} was closed.")
            self._iterators[shard] = reply.output["NextShardIterator"]
        self._read_at = asked_at
        if whole:
            self.poller.reported_until(asked_at)

    def _check(self, now: float) -> Operation[None]:
        """Check which stream the table writes to: a disabled stream can still be read for a day."""
        arn = stream_arn((yield from describe(self.table)))
        if arn is None:
            raise NoStreamError(f"The lock table {self.table!r} has no stream, or it is disabled.")
        if arn != self._arn:
            self._restart()
        self._arn, self._checked_at = arn, now

    def _open(self) -> Operation[None]:
        """Get an iterator for the end of each open shard."""
        shards = yield from self._shards()
        # While a shard is split, it may be listed as closed before its children are listed. Changes in the children
        # would be missed.
        parents = {shard.get("ParentShardId") for shard in shards}
        open_ones = [shard["ShardId"] for shard in shards if not _is_closed(shard)]
        if not open_ones or any(_is_closed(shard) and shard["ShardId"] not in parents for shard in shards):
            raise StreamGoneError(f"DynamoDB does not show all shards of the stream {self._arn} yet.")
        iterators = {}
        for shard_id in open_ones:
            place = {"StreamArn": self._arn, "ShardId": shard_id, "ShardIteratorType": "LATEST"}
            reply: Reply = yield Request("GetShardIterator", place)
            iterators[shard_id] = reply.output["ShardIterator"]
            self._read_at = reply.sent_at
        self._iterators = iterators
        self.poller.changed()  # any lock may have changed before these iterators

    def _shards(self) -> Operation[list[Mapping[str, Any]]]:
        params: dict[str, Any] = {"StreamArn": self._arn}
        shards: list[Mapping[str, Any]] = []
        while True:
            reply: Reply = yield Request("DescribeStream", dict(params))
            stream = reply.output["StreamDescription"]
            shards += stream["Shards"]
            if not stream.get("LastEvaluatedShardId"):
                return shards
            params["ExclusiveStartShardId"] = stream["LastEvaluatedShardId"]

    def _restart(self) -> None:
        self._iterators = {}
        self._checked_at = -math.inf
        self.poller.reported_until(None)

    def _warn(self, failure: Exception) -> None:
        level = log.debug if self._warned else log.warning
        level("Cannot read the stream of the lock table %r, polling instead: %s", self.table, failure)
        self._warned = True


def _is_closed(shard: Mapping[str, Any]) -> bool:
    return "EndingSequenceNumber" in shard.get("SequenceNumberRange", {})


def _may_be_cut_off(records: Sequence[Mapping[str, Any]]) -> bool:
    """Whether there may be more records than one response holds."""
    size = sum(each["dynamodb"].get("SizeBytes", 0) for each in records)
    return len(records) >= _MOST_RECORDS or size > _MOST_BYTES


def _changed_lock(record: Mapping[str, Any]) -> str | None:
    """The lock whose record has changed; None if another item has changed."""
    keys = record["dynamodb"]["Keys"]
    if keys.get(SORT_KEY) != {"S": LOCK_ENTRY}:
        return None
    key: str = keys[PARTITION_KEY]["S"]
    return key
