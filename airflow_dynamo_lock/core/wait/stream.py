"""Quick hand-over: the table's stream, where there is one, says which locks have changed (rule R11).

Each process has at most one `StreamReader` per table. It looks at no lock: it tells the `Poller` which keys have
changed, and up to when it knows of all changes. The poller reads those keys, and few others for as long as it hears so.
Whenever the reader does not come to that (no stream, no permission, throttling, an error in here), the poller hears
nothing, and polls as it does without a stream.

Whatever becomes of the stream, the answer is the same: start anew, at its end, and have all keys read that somebody
waits for. Then nothing is missed, so there is no need to tell a shard that was split from an iterator that expired.
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

#: The actions of DynamoDB Streams, which has an endpoint, and an SDK client, of its own.
STREAM_ACTIONS = frozenset({"DescribeStream", "GetShardIterator", "GetRecords"})

# Seconds between two reads of a shard, and what that may grow to while AWS throttles them. All readers of a shard share
# five reads a second.
_PACE = 0.2
_SLOWEST = 5.0
# Seconds until the next try, after something that does not mend itself, such as a missing permission.
_RETRY = 60.0
# Every so many seconds: is it still the table's stream?
_CHECK = 60.0
# After so many seconds without a read (nobody waited, or none succeeded) the end of the stream is nearer than the place
# where reading stopped.
_KEPT = 60.0
# An answer ends after 1,000 records, or before the one that would not fit into 1 MB with the others. That one may have
# two images of an item of 400 KB.
_MOST_RECORDS, _MOST_BYTES = 1000, 200_000


class StreamGoneError(LockError):
    """What was being read is not there any more: a shard was closed, or an iterator has expired."""


class NoStreamError(LockTableError):
    """The table has no stream, or it is disabled."""


@dataclass
class StreamReader:
    """Follows the stream of one table for one process. The driver guards the watch against concurrent use."""

    watch: Poller
    table: str
    _arn: str | None = field(default=None, init=False)
    # Each open shard's id, and where to read on in it; empty if it has to start anew.
    _iterators: dict[str, str] = field(default_factory=dict, init=False)
    _pace: float = field(default=_PACE, init=False)
    _read_at: float = field(default=-math.inf, init=False)
    _checked_at: float = field(default=-math.inf, init=False)
    _warned: bool = field(default=False, init=False)

    def follow(self) -> Operation[None]:
        """Callback the watch of changes, for as long as anybody waits. Ends in no error."""
        pause = 0.0
        while self.watch:
            now = yield Sleep(self.watch.stretched(pause))
            if not self.watch:
                return
            try:
                yield from self._catch_up(now)
            except (LockUnavailableError, StreamGoneError) as failure:
                # Throttled, say, by all who read it together: each has to read less often.
                pause = self._pace = min(self._pace * 2, _SLOWEST)
                if isinstance(failure, StreamGoneError):
                    self._start_anew()
                if pause == _SLOWEST:
                    self._warn(failure)
            except Exception as failure:  # also one that nobody has thought of: polling needs none of this
                self._start_anew()
                self._warn(failure)
                pause = _RETRY
            else:
                pause = self._pace = max(self._pace * 0.7, _PACE)
                if self._warned and pause == _PACE:  # and not at every success among failures
                    log.info("The stream of the lock table %r can be read again.", self.table)
                    self._warned = False

    def _catch_up(self, now: float) -> Operation[None]:
        if now - self._read_at > _KEPT:
            self._start_anew()
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
            self.watch.changed(filter(None, map(_locked, records)))
            if not reply.output.get("NextShardIterator"):
                raise StreamGoneError(f"The shard {shard} was closed.")
            self._iterators[shard] = reply.output["NextShardIterator"]
        self._read_at = asked_at
        if whole:
            self.watch.confirmed(asked_at)

    def _check(self, now: float) -> Operation[None]:
        """A disabled stream can be read for a day. So ask whether it is still the one that is written to."""
        arn = stream_arn((yield from describe(self.table)))
        if arn is None:
            raise NoStreamError(f"The lock table {self.table!r} has no stream, or it is disabled.")
        if arn != self._arn:
            self._start_anew()
        self._arn, self._checked_at = arn, now

    def _open(self) -> Operation[None]:
        """Take up the end of each open shard."""
        shards = yield from self._shards()
        # While a shard is split, it may be shown as closed, and its children not at all. What is written to them would
        # be missed.
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
        self.watch.changed()  # perhaps all of them have, before these places

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

    def _start_anew(self) -> None:
        self._iterators = {}
        self._checked_at = -math.inf
        self.watch.confirmed(None)

    def _warn(self, failure: Exception) -> None:
        level = log.debug if self._warned else log.warning
        level("Cannot read the stream of the lock table %r, polling instead: %s", self.table, failure)
        self._warned = True


def _is_closed(shard: Mapping[str, Any]) -> bool:
    return "EndingSequenceNumber" in shard.get("SequenceNumberRange", {})


def _may_be_cut_off(records: Sequence[Mapping[str, Any]]) -> bool:
    """Whether there may have been more to tell than fits into one answer."""
    size = sum(each["dynamodb"].get("SizeBytes", 0) for each in records)
    return len(records) >= _MOST_RECORDS or size > _MOST_BYTES


def _locked(record: Mapping[str, Any]) -> str | None:
    """The lock whose record has changed; None if it was some other entry."""
    keys = record["dynamodb"]["Keys"]
    if keys.get(SORT_KEY) != {"S": LOCK_ENTRY}:
        return None
    key: str = keys[PARTITION_KEY]["S"]
    return key
