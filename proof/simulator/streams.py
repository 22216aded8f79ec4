"""The stream of the simulated table, as DynamoDB Streams shows it.

A record becomes visible some time after its write. Shards split, and their children may be listed later than
they begin, both together. An answer may be empty although there are records, or cut off. An iterator may
expire. The stream may be disabled, and replaced by a new one; the old one can still be read, and shows no
further changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch
from zlib import crc32

from airflow_dynamo_lock.core.wait import stream
from proof.simulator.dynamodb import ItemKey
from proof.simulator.world import World

#: Maximum number of records in one answer; DynamoDB's is 1,000.
MAX_RECORDS = 4
# Number of shards in one answer of `DescribeStream`.
_SHARDS_PER_PAGE = 2
# Hash values of partition keys, which shards divide among themselves.
_HASHES = 2**32
# Seconds until a record becomes visible, at most, usually and rarely; and until a new shard is listed.
_VISIBLE_AFTER, _RARELY_VISIBLE_AFTER, _LISTED_AFTER = 0.3, 2.0, 2.0


class StreamGone(Exception):
    """An iterator or a stream cannot be used any more. The argument is the SDK's error code."""


@dataclass
class _Shard:
    """A shard, which has the records of the partition keys with these hash values.

    :ivar listed_at: true time from which on `DescribeStream` shows it.
    :ivar records: for each record, the true time at which it becomes visible, and the item's key.
    :ivar closed: whether it gets no further records.
    """

    name: str
    hashes: range
    parent: str | None = None
    listed_at: float = 0.0
    records: list[tuple[float, ItemKey]] = field(default_factory=list)
    closed: bool = False

    def visible(self, now: float) -> int:
        """Return the number of visible records."""
        return sum(at <= now for at, _ in self.records)


class Stream:
    """The streams that a table has had, the last of which may be enabled.

    :ivar enabled: whether the table writes to the last stream at present.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.enabled = True
        self._shards: list[list[_Shard]] = []
        self._create()

    def _create(self) -> None:
        self._shards.append([_Shard(f"{len(self._shards)}.0", range(_HASHES))])

    # -- what happens to it ---------------------------------------------------------------------------------

    def changed(self, at: ItemKey) -> None:
        """Add the record of a write."""
        if not self.enabled:
            return
        rng, hash_value = self.world.random, crc32(at[0].encode())
        shard = next(each for each in self._open if hash_value in each.hashes)
        delay = rng.random() * (_VISIBLE_AFTER if rng.random() < 0.95 else _RARELY_VISIBLE_AFTER)
        earliest = shard.records[-1][0] if shard.records else 0.0
        shard.records.append((max(earliest, self.world.now + delay), at))

    def split(self) -> None:
        """Close a shard and open two in its place."""
        rng, shards = self.world.random, self._shards[-1]
        shard = rng.choice(self._open)
        self.world.faults["shard split"] += 1
        self.world.log(f"The shard {shard.name} is split.")
        shard.closed = True
        middle = (shard.hashes.start + shard.hashes.stop) // 2
        listed_at = self.world.now + rng.random() * _LISTED_AFTER
        for hashes in (range(shard.hashes.start, middle), range(middle, shard.hashes.stop)):
            name = f"{len(self._shards) - 1}.{len(shards)}"
            shards.append(_Shard(name, hashes, shard.name, listed_at))

    def disable(self) -> None:
        """Disable the stream, and some time later enable a new one."""
        if self.enabled:
            self.enabled = False
            self.world.faults["stream replaced"] += 1
            self.world.log("The stream is disabled.")
            self.world.at(self.world.now + self.world.random.random() * 10.0, None, self._enable)

    def _enable(self) -> None:
        self.enabled = True
        self._create()
        self.world.log("A new stream is enabled.")

    @property
    def _open(self) -> list[_Shard]:
        return [each for each in self._shards[-1] if not each.closed]

    # -- what DynamoDB answers ------------------------------------------------------------------------------

    def description(self) -> dict[str, Any]:
        """Return what `DescribeTable` shows of the stream."""
        latest = {"LatestStreamArn": str(len(self._shards) - 1)}
        return {**latest, "StreamSpecification": {"StreamEnabled": True}} if self.enabled else latest

    def answer(self, action: str, params: Mapping[str, Any], *, faulty: bool) -> dict[str, Any]:
        """Answer a request of DynamoDB Streams.

        :param faulty: iterators may expire.
        :raises StreamGone: the iterator has expired.
        """
        match action:
            case "DescribeStream":
                return self._describe(int(params["StreamArn"]), int(params.get("ExclusiveStartShardId", 0)))
            case "GetShardIterator":
                shard = self._named(params["ShardId"])
                # A record that is not visible yet may be before or behind the end of the shard.
                last = self.world.random.randint(shard.visible(self.world.now), len(shard.records))
                return {"ShardIterator": f"{shard.name} {last}"}
            case "GetRecords":
                if faulty and self.world.random.random() < 0.01:
                    raise StreamGone("ExpiredIteratorException")
                name, start = params["ShardIterator"].split()
                return self._read(self._named(name), int(start))
        raise NotImplementedError(action)

    def _describe(self, number: int, start: int) -> dict[str, Any]:
        listed = [each for each in self._shards[number] if each.listed_at <= self.world.now]
        page = listed[start : start + _SHARDS_PER_PAGE]
        more = {"LastEvaluatedShardId": str(start + len(page))} if start + len(page) < len(listed) else {}
        # The shards of a disabled stream are all closed.
        disabled = number + 1 < len(self._shards) or not self.enabled
        return {"StreamDescription": {"Shards": [_shown(each, closed=disabled) for each in page], **more}}

    def _read(self, shard: _Shard, start: int) -> dict[str, Any]:
        rng = self.world.random
        most = 0 if rng.random() < 0.1 else MAX_RECORDS
        stop = min(start + most, max(start, shard.visible(self.world.now)))
        records = [
            {"dynamodb": {"Keys": {"key": {"S": key}, "entry": {"S": entry}}, "SizeBytes": 100}}
            for _, (key, entry) in shard.records[start:stop]
        ]
        at_end = shard.closed and stop == len(shard.records)
        return {"Records": records, **({} if at_end else {"NextShardIterator": f"{shard.name} {stop}"})}

    def _named(self, name: str) -> _Shard:
        return next(each for shards in self._shards for each in shards if each.name == name)


def _shown(shard: _Shard, *, closed: bool) -> dict[str, Any]:
    end = {"EndingSequenceNumber": "9"} if shard.closed or closed else {}
    parent = {} if shard.parent is None else {"ParentShardId": shard.parent}
    return {"ShardId": shard.name, "SequenceNumberRange": {"StartingSequenceNumber": "1", **end}, **parent}


@contextmanager
def short_answers() -> Iterator[None]:
    """Let the package expect answers of at most `MAX_RECORDS` records."""
    with patch.object(stream, "_MOST_RECORDS", MAX_RECORDS):
        yield
