"""Cycles of waits, as records show them: who blocks whom, and which waits end only if one of them gives up (R14).

Pure functions of records. `core/lock/nested.py` reads the records.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from airflow_dynamo_lock.core.model.capacity import effective_capacity
from airflow_dynamo_lock.core.model.errors import CycleMember
from airflow_dynamo_lock.core.model.record import Holder, LockRecord
from airflow_dynamo_lock.core.model.waits import Wait

#: A lease: the key of the lock, and the lease id.
LeaseName = tuple[str, str]

NO_WAITS: frozenset[str] = frozenset()


def is_blocked_by(record: LockRecord, holders: Collection[Holder], slots: int, capacity: int) -> bool:
    """Whether the lock cannot grant `slots` of `capacity` while these holders hold it, even if all others release."""
    if not holders:
        return False
    counts = effective_capacity(capacity, record)
    # Only a lock without holders changes its capacity, and so its kind.
    return record.capacity != counts or record.capacity - sum(each.slots for each in holders) < slots


class WaitGraph:
    """The waits that some records show.

    A wait is blocked by the holders of the locks that it is for. A set of waits is *closed* if each of them is blocked
    by leases whose claimants wait in the same set. Such a set is a deadlock: none of its waits ends before another one
    does. All other holders are assumed to release, so a long chain is no deadlock.

    :param records: the locks, by key. A wait for a lock that was not read is not blocked by it.
    :param dead: leases of dead holders. They end by themselves, and so do draining ones.
    """

    def __init__(self, records: Mapping[str, LockRecord], dead: Collection[LeaseName]) -> None:
        self.records = records
        self.waits: dict[str, Wait] = {}
        self._waiting: dict[str, list[Holder]] = {}  # by lock: the holders that wait
        for record in records.values():
            for holder in record.holders.values():
                if holder.waits and not holder.draining and (record.key, holder.lease_id) not in dead:
                    self._waiting.setdefault(record.key, []).append(holder)
                    for wait in holder.waits.values():
                        # A claimant with several leases has a note in each of them.
                        seen = self.waits.get(wait.id, wait).seen & wait.seen
                        self.waits[wait.id] = replace(wait, seen=seen)

    def suspects(self, mine: str) -> frozenset[str]:
        """The waits of the cycle that the wait `mine` is in, if all waits that the records show still last."""
        return self._cycle(mine, frozenset(self.waits))

    def proven(self, mine: str) -> frozenset[str]:
        """The waits of the cycle that the wait `mine` is in, without those that may have ended; empty if there is none.

        A note may be older than the end of its wait. So each of the other waiters must have seen the whole cycle
        itself, after all of its waits had begun and before its own one ended: then all of them lasted at the same time.
        """
        seen_mine = (each for each in self.suspects(mine) if each == mine or mine in self.waits[each].seen)
        among = self._cycle(mine, frozenset(seen_mine))
        while unaware := {each for each in among if each != mine and not among <= self.waits[each].seen}:
            among = self._cycle(mine, among - unaware)
        return among

    def last(self, among: Iterable[str]) -> str:
        """The one of these waits that began last."""
        return max(among, key=lambda each: self.waits[each].order)

    def members(self, mine: str, among: Collection[str]) -> tuple[CycleMember, ...]:
        """The waits of a cycle, for its error: `mine` first, and each one before one that blocks it, if possible."""
        members: list[CycleMember] = []
        left, current = set(among), mine
        wanted = {key for each in among for key in self.waits[each].keys}
        while True:
            left.discard(current)
            holders = {
                key: holder
                for key, waiting in self._waiting.items()
                for holder in waiting
                if current in holder.waits and key in wanted
            }
            wait = self.waits[current]
            owner = next(iter(holders.values())).owner
            members.append(CycleMember(wait.id, owner, tuple(sorted(holders)), wait.keys))
            if not left:
                return tuple(members)
            current = min(self._blockers(wait, frozenset(among)) & left or left)

    def _cycle(self, mine: str, among: frozenset[str]) -> frozenset[str]:
        """The largest closed set of these waits in which each one depends on `mine`, and `mine` on it."""
        while mine in among:
            blockers = {each: self._blockers(self.waits[each], among) for each in among}
            blocked = frozenset(each for each in among if blockers[each])
            if blocked == among:
                together = _reached(mine, blockers) & _reached(mine, _reversed(blockers))
                if together == among:
                    return among
                blocked = together
            among = blocked
        return NO_WAITS

    def _blockers(self, wait: Wait, among: frozenset[str]) -> frozenset[str]:
        """Those of the waits `among` whose claimants block this wait."""
        found: set[str] = set()
        for key in wait.keys:
            holders = [each for each in self._waiting.get(key, ()) if not among.isdisjoint(each.waits)]
            if holders and is_blocked_by(self.records[key], holders, wait.slots, wait.capacity):
                found.update(each for holder in holders for each in holder.waits)
        return among & found


def _reached(start: str, arrows: Mapping[str, Iterable[str]]) -> frozenset[str]:
    """All that can be reached from `start` by one arrow or more."""
    reached: set[str] = set()
    ahead: list[str] = [*arrows.get(start, ())]
    while ahead:
        if (each := ahead.pop()) not in reached:
            reached.add(each)
            ahead += arrows.get(each, ())
    return frozenset(reached)


def _reversed(arrows: Mapping[str, Iterable[str]]) -> Mapping[str, Sequence[str]]:
    turned: dict[str, list[str]] = {}
    for start, ends in arrows.items():
        for end in ends:
            turned.setdefault(end, []).append(start)
    return turned
