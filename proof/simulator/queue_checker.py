"""The checker of the queues (invariant 7): the order of grants, the heads, the removal of dead waiters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from airflow_dynamo_lock.core.model.kind import compatible
from airflow_dynamo_lock.core.model.limits import WAITING_PREFIX
from airflow_dynamo_lock.core.table.expressions import LOCK_ENTRY
from airflow_dynamo_lock.core.table.items import WAITER_ENTRY
from airflow_dynamo_lock.core.table.position import ticket_of
from proof.simulator.dynamodb import ItemKey
from proof.simulator.expressions import Item
from proof.simulator.lease_use import NEVER
from proof.simulator.world import BEGIN, Process, World

# Time in seconds after a heartbeat for which no process may count a waiter as dead: the lesser of the first
# value, and the second value less the difference between two servers' clocks. Proofs of a waiter's death do
# not allow for that difference.
_SURELY_ALIVE, _SURELY_ALIVE_WITH_SKEW = 7.0, 12.0
# Seconds after the end of the faults from which on each live process shows that its waiters are alive.
_RECOVERED_AFTER = 30.0
# Seconds after a waiter's last heartbeat, and after a process began to watch it, until that counts it as dead.
_SURELY_DEAD = 40.0
# Seconds before a grant: the head may pass a waiter that became visible later.
_RECENT = 4.0
# Seconds of true time for which a waiter leaves free slots to those ahead of it, at least; and by how much earlier than
# after its last heartbeat and its whole lease a holder may count as dead, by its stamp and by a fast clock.
_PATIENCE, _DEAD_EARLIER = 1.9, 3.0
# Seconds within which each waiter has read a lock that has changed: after two polls, and a read may be stale.
_UNSEEN = 15.0
# Seconds after which a waiter that stopped waiting may no longer count as alive.
_DEAD_AFTER = 90.0


class _OwnEntry(NamedTuple):
    """The entry that an actor last wrote, and the true times of its write and of the request for it."""

    entry: str
    written: float
    sent: float


_NO_ENTRY = _OwnEntry("", -NEVER, -NEVER)


@dataclass
class QueueChecker:
    """Checks that waiters are granted in queue order, and that entries of gone waiters do not count for ever.

    An *actor* is a client or a task instance; ``about`` in its claims has its name. Times are true times.

    :ivar apart: highest difference between two servers' clocks, in seconds.
    :ivar items: contents of the table.
    :ivar waiting: actors that wait at present.
    :ivar began_waiting: when each actor last began to wait.
    :ivar stopped_waiting: when each actor last stopped waiting.
    :ivar processes: returns the process in which an actor runs now; a new triggerer replaces the old one.
    :ivar sent: when the request was sent that is applied at present.
    :ivar sender: task or thread that sent it.
    :ivar faults_ended: when the faults ended.
    :ivar ticket_times: when each ticket was taken, by key and ticket.
    :ivar last_ticket_taken: when the last ticket was taken, by key.
    :ivar head_moved: when the queue head last changed, by key.
    :ivar removed: when each lease was last removed from its record, by key and lease id.
    """

    world: World
    apart: float = 0.0
    items: Mapping[ItemKey, Item] = field(default_factory=dict)
    waiting: set[str] = field(default_factory=set)
    began_waiting: dict[str, float] = field(default_factory=dict)
    stopped_waiting: dict[str, float] = field(default_factory=dict)
    processes: dict[str, Callable[[], Process]] = field(default_factory=dict)
    sent: float = 0.0
    sender: object = None
    faults_ended: float = NEVER
    ticket_times: dict[tuple[str, int], float] = field(default_factory=dict)
    last_ticket_taken: dict[str, float] = field(default_factory=dict)
    head_moved: dict[str, float] = field(default_factory=dict)
    removed: dict[tuple[str, str], float] = field(default_factory=dict)
    # By sender and key: when it sent each of its reads of the queue, when the last one arrived, and the head
    # that the last one showed.
    _reads_sent: dict[tuple[object, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    _read_arrived: dict[tuple[object, str], float] = field(default_factory=dict)
    _head_read: dict[tuple[object, str], str | None] = field(default_factory=dict)
    # Heartbeats of each entry and of each process with waiters: from when on it is visible, and until when
    # no process may count its sender as dead.
    _heartbeats: dict[ItemKey, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    # For each entry: the process that wrote it last, the lease id in it, and when it was first written.
    _writer: dict[ItemKey, Process] = field(default_factory=dict)
    _lease_id: dict[ItemKey, str] = field(default_factory=dict)
    _enqueued: dict[ItemKey, float] = field(default_factory=dict)
    # By key: when each lease id last had its entry written or deleted.
    _changed: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    # By key and actor.
    _own_entries: dict[tuple[str, str], _OwnEntry] = field(default_factory=dict)
    # By key: the free slots since the last grant, with the time from which on so many were free; and by key and lease
    # id, the version of a holder and when it was written.
    _free: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    _beats: dict[tuple[str, str], tuple[str, float]] = field(default_factory=dict)
    # By key and lease id of a holder whose heartbeat came after it had counted as dead: since when it had, and when the
    # heartbeat came.
    _revived: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)

    # -- what happens ---------------------------------------------------------------------------------------

    @contextmanager
    def waits(self, actor: str) -> Iterator[Callable[[], None]]:
        """Mark the actor as waiting, until the block ends or the yielded function is called."""

        def stop() -> None:
            self.waiting.discard(actor)
            self.stopped_waiting[actor] = self.world.now

        self.waiting.add(actor)
        self.began_waiting[actor] = self.world.now
        try:
            yield stop
        finally:
            stop()

    def arrived(self, sender: object, action: str, params: Mapping[str, Any], sent: float) -> None:
        """Record that a request arrived at DynamoDB; a `Query` reads a queue."""
        self.sent, self.sender = sent, sender
        if action == "Query":
            key = params["ExpressionAttributeValues"][":key"]["S"]
            self._reads_sent[sender, key].append(sent)
            self._read_arrived[sender, key] = self.world.now
            # The answer may show the head as it was at any time since the request was sent. If the head has
            # changed since then, the one that the sender sees is unknown.
            head = self.items.get((key, LOCK_ENTRY), {}).get("queue_head", {}).get("S")
            self._head_read[sender, key] = head if self.head_moved.get(key, -NEVER) < sent else None

    def written(self, process: Process, key: str, entry: str, after: Item | None) -> None:
        """Record a write of a waiter item, or of the presence of a process with waiters.

        :param after: the item after the write; None if it was deleted.
        """
        if after is None:
            if (lease_id := self._lease_id.get((key, entry))) is not None:
                self._changed[key][lease_id] = self.world.now
            self._heartbeats.pop((key, entry), None)
            self._enqueued.pop((key, entry), None)
            return
        self._enqueued.setdefault((key, entry), self.world.now)
        if after.get("holders", {}).get("M") == {}:
            return  # the process has released its own lease: that is no heartbeat
        if "about" in after:
            actor = key, about_of(after)["actor"]
            # A late request for an earlier entry does not replace a newer entry.
            if self.sent >= self._own_entries.get(actor, _NO_ENTRY).sent:
                self._own_entries[actor] = _OwnEntry(entry, self.world.now, self.sent)
            self._writer[key, entry] = process
            self._lease_id[key, entry] = after["lease_id"]["S"]
            self._changed[key][after["lease_id"]["S"]] = self.world.now
        # A heartbeat that arrived late is as old as its stamp.
        at = self.world.now
        for stamped in (after, *(each["M"] for each in after.get("holders", {}).get("M", {}).values())):
            if "renewed_at" in stamped:
                at = min(at, int(stamped["renewed_at"]["N"]) / 1000 - BEGIN)
        heartbeats, counts_until = self._heartbeats[key, entry], at + self._surely_alive
        if "about" in after and any(until > counts_until for _, until in heartbeats):
            heartbeats.clear()  # a late copy of an earlier write of the item has restored its time
        heartbeats.append((self.world.now, counts_until))

    def record_written(self, key: str, before: Item | None, after: Item) -> None:
        """Record a write of a lock record: its free slots, and the heartbeats of its holders."""
        free = self._free.setdefault(key, [])
        old: Mapping[str, Any] = before["holders"]["M"] if before else {}
        since = now = self.world.now
        if before is None or before["token"] != after["token"]:
            free.clear()
        else:
            # Slots that were released by a holder that counted as dead have been unused since it did, also for those
            # who have not seen its last heartbeat.
            gone = old.keys() - after["holders"]["M"].keys()
            deaths = [self._may_be_dead_at(key, name, old[name]) for name in gone]
            revived = [self._revived[key, name] for name in gone if (key, name) in self._revived]
            deaths += [dead for dead, beat in revived if now - beat < _UNSEEN]
            since = min([since, *(max(at, free[0][0]) for at in deaths if free)])
        free.append((since, int(after["available"]["N"])))
        for lease_id, holder in after["holders"]["M"].items():
            version = holder["M"]["version"]["S"]
            if self._beats.get((key, lease_id), ("", 0.0))[0] != version:
                if lease_id in old and (dead := self._may_be_dead_at(key, lease_id, old[lease_id])) <= now:
                    self._revived[key, lease_id] = dead, now
                self._beats[key, lease_id] = version, now

    # -- what is checked with each write; each method returns what is wrong, or None ------------------------

    def overtaken(
        self, process: Process, key: str, lease_id: str, before: Item | None, after: Item
    ) -> str | None:
        """Return the living and visible waiter that a grant overtook, or None.

        :param process: sender of the grant.
        :param lease_id: lease that was granted.
        :param before: lock record before the grant; None if it is new.
        """
        about = about_of(after["holders"]["M"][lease_id]["M"])
        if before is None or "queue_head" not in before or about.get("fair") != "yes":
            return None
        read = max((at for at in self._reads_sent[self.sender, key] if at <= self.sent), default=None)
        head = self._head_read.get((self.sender, key))
        if read is not None and head is not None and before["queue_head"]["S"] < head:
            return "a waiter that lowered the queue head after the sender had read the queue"
        if after.get("queue_head") != before["queue_head"]:
            passed = self._passed_by_head(
                process, key, lease_id, before, after, self.sent if read is None else read
            )
            if passed is not None:
                return passed
        free = int(after["available"]["N"])
        own, written, _ = self._own_entries.get((key, about["actor"]), _NO_ENTRY)
        if written < self.began_waiting.get(about["actor"], 0.0) <= self.sent:
            own = ""  # the entry of an earlier claim
        for (_, entry), item in self._waiters(key):
            actor = about_of(item)["actor"]
            if actor == about["actor"] or (own and entry > own):
                return None
            if read is None or self._may_be_overtaken(process, (key, entry), item, before, read):
                continue
            slots, capacity = int(item["slots"]["N"]), int(item["capacity"]["N"])
            free -= slots
            if free < 0 or not compatible(capacity, int(after["capacity"]["N"])):
                return f"{actor} at position {entry.removeprefix(WAITER_ENTRY)}"
        return None

    def _may_be_overtaken(self, process: Process, at: ItemKey, item: Item, before: Item, read: float) -> bool:
        """Whether the promise of the queue (docs/protocol.md) allows a grant to overtake this waiter.

        :param process: sender of the grant.
        :param before: lock record before the grant.
        :param read: when the sender sent its last read of the queue.
        """
        key, entry = at
        actor = about_of(item)["actor"]
        return (
            actor not in self.waiting
            # The head passed its position between its ticket and its item. It is the next.
            or entry.removeprefix(WAITER_ENTRY) < before["queue_head"]["S"]
            # It has left free slots unused for too long.
            or self._left_unused(key, item, before, read)
            # It holds the lock already, and is about to dequeue.
            or item["lease_id"]["S"] in before["holders"]["M"]
            # Its item was written after the read.
            or self._enqueued[at] > read
            or self._was_holder(key, item, read)
            or self._gave_up(process, at, actor)
            or not self._alive_since(key, entry, item, read)
        )

    def _left_unused(self, key: str, item: Item, before: Item, read: float) -> bool:
        """Whether others may pass over the waiter: it could have taken slots for `_PATIENCE` before that read."""
        if "set_size" in item or "capacity" not in before:
            return False
        since, holders = read - _PATIENCE, before["holders"]["M"]
        free = self._free.get(key, [])
        then = [slots for at, slots in free if at <= since]
        dead = [
            holder for name, holder in holders.items() if since >= self._may_be_dead_at(key, name, holder)
        ]
        in_time = then or (dead and free and free[0][0] <= since)
        if not in_time:
            return False
        # The most: a capacity that was set meanwhile, for a moment, need not have been seen.
        unused = min(max(then, default=0), int(before["available"]["N"]))
        unused += sum(int(holder["M"]["slots"]["N"]) for holder in dead)
        slots, capacity = int(item["slots"]["N"]), int(before["capacity"]["N"])
        same = compatible(capacity, int(item["capacity"]["N"]))
        idle = len(dead) == len(holders)
        return unused > 0 and ((same and slots <= unused) or (idle and unused >= min(slots, capacity)))

    def _may_be_dead_at(self, key: str, lease_id: str, holder: Mapping[str, Any]) -> float:
        """Return the earliest time at which any process may count a holder as dead."""
        _, beat = self._beats.get((key, lease_id), ("", NEVER))
        if "renewed_at" in holder["M"]:
            beat = min(beat, int(holder["M"]["renewed_at"]["N"]) / 1000 - BEGIN)
        return beat + int(holder["M"]["lease_ms"]["N"]) / 1050 - _DEAD_EARLIER - self.apart

    def _passed_by_head(
        self, process: Process, key: str, lease_id: str, before: Item, after: Item, read: float
    ) -> str | None:
        """Return a living waiter that the grant moved the head past, or None.

        The head may pass only the dead, the new holder itself, waiters that had taken a ticket and not yet
        written their item when the queue was read, and those that the sender has left to its successor.
        """
        head = after["queue_head"]["S"] if "queue_head" in after else "~"
        holder = about_of(after["holders"]["M"][lease_id]["M"])["actor"]
        recently = self.sent - _RECENT
        for (_, entry), item in self._waiters(key):
            position, actor = entry.removeprefix(WAITER_ENTRY), about_of(item)["actor"]
            enqueued = self._enqueued[key, entry]
            if (
                before["queue_head"]["S"] <= position < head
                and actor != holder
                and actor in self.waiting
                and item["lease_id"]["S"] not in after["holders"]["M"]
                and not self._was_holder(key, item, read)
                and (enqueued <= read or read < self.ticket_times.get((key, ticket_of(position)), read))
                and enqueued < recently
                and not self._gave_up(process, (key, entry), actor)
                and self._alive_since(key, entry, item, recently)
            ):
                return f"{actor} at position {position}, which the queue head passed"
        return None

    def _was_holder(self, key: str, item: Item, read: float) -> bool:
        """Whether the waiter held the lock at the time of the read: the answer to its grant was lost."""
        return self.removed.get((key, item["lease_id"]["S"]), -NEVER) > read

    def _gave_up(self, process: Process, at: ItemKey, actor: str) -> bool:
        """Whether that process wrote the entry and was replaced, and its successor has not taken over yet."""
        return self._writer.get(at) is process and self.processes[actor]() is not process

    def head_cleared_early(
        self, process: Process, key: str, params: Mapping[str, Any], before: Item, granted: Mapping[str, Any]
    ) -> str | None:
        """Return a message if a write cleared the head after a ticket was taken that its sender had not read.

        The claimant with that ticket may be about to write its item.

        :param params: of the request.
        :param granted: holders that the write added, by lease id.
        """
        position = params["ExpressionAttributeValues"].get(":place", {}).get("S")
        for lease_id, holder in granted.items():
            actor = about_of(holder["M"])["actor"]
            entry, written, _ = self._own_entries.get((key, actor), _NO_ENTRY)
            if (key, entry) not in self.items or self._lease_id.get((key, entry)) != lease_id:
                continue  # the entry of an earlier claim of the same actor
            if written >= self.began_waiting.get(actor, 0.0) and self._writer.get((key, entry)) is process:
                position = entry.removeprefix(WAITER_ENTRY)
        last_ticket = int(before["last_ticket"]["N"]) if "last_ticket" in before else 0
        if position is not None:
            early = last_ticket > ticket_of(position)
        else:
            # A newcomer knows all tickets up to the arrival of its read.
            read = self._read_arrived.get((self.sender, key), NEVER)
            early = self.last_ticket_taken.get(key, -NEVER) > read
        return f"cleared the queue head of {key} after ticket {last_ticket} was taken" if early else None

    def wrongly_handed_over(self, process: Process, before: Item, after: Item) -> str | None:
        """Return a message if a process gave up an entry in which another process waits."""
        owner = before.get("process", {}).get("S", "").removeprefix(WAITING_PREFIX)
        if "process" in after or not owner or owner in process.ids:
            return None
        return f"{process.name} handed over {before['entry']['S']}, in which {owner} waits"

    def undisturbed(self, key: str, after: Item, since: float) -> bool:
        """Whether a queue had waiters before a lock was granted, all of them alive, and did not change since then.

        :param after: lock record after the grant.
        """
        waiters = self._waiters(key)
        others = {at for lease_id, at in self._changed[key].items() if lease_id not in after["holders"]["M"]}
        return (
            any(self._enqueued[at] < since for at, _ in waiters)
            and max(others, default=-NEVER) < since - _RECENT
            and all(self._lives(about_of(item)["actor"]) for _, item in waiters)
        )

    def first(self, key: str) -> str | None:
        """Return the first actor in a queue; None if it is empty."""
        actors = [about_of(item)["actor"] for _, item in self._waiters(key)]
        return next((each for each in actors if each in self.waiting), None)

    def has_waited_since(self, key: str, since: float) -> bool:
        """Whether an actor has waited for the lock since then in a process that runs, at any position in the queue."""
        return any(
            self._enqueued[at] < since and self._lives(about_of(item)["actor"])
            for at, item in self._waiters(key)
        )

    def position(self, key: str, lease_id: str) -> str:
        """Return the last position of a waiter; empty if it has no entry."""
        entries = [entry for (of, entry), each in self._lease_id.items() if (of, each) == (key, lease_id)]
        return max(entries, default="").removeprefix(WAITER_ENTRY)

    def _lives(self, actor: str) -> bool:
        """Whether an actor waits, in a process that runs."""
        if actor not in self.waiting:
            return False
        process = self.processes[actor]()
        return process.alive and process.paused_until <= self.faults_ended

    # -- what is checked at the end; each method yields what is wrong ---------------------------------------

    def dead_entries(
        self, key: str, actor: str, granted: Mapping[ItemKey, Any], granted_at: float
    ) -> Iterator[str]:
        """Yield dead entries ahead of an actor, which had to remove them before it was granted the lock.

        :param granted: leases that were granted. The actor need not have read their entries.
        :param granted_at: when the actor was granted the lock. It passed over those that had not been dead for long.
        """
        own = self._own_entries.get((key, actor), _NO_ENTRY).entry
        for (_, entry), item in self._waiters(key):
            if (
                (key, item["lease_id"]["S"]) not in granted
                and entry < own
                and self._enqueued[key, entry] < self.began_waiting[actor] < granted_at - _SURELY_DEAD
                and self._last_heartbeat(key, entry, item) < granted_at - _SURELY_DEAD
            ):
                yield f"{actor} did not remove {entry} of {about_of(item)['actor']} from the queue of {key}"

    def gone_but_alive(self) -> Iterator[str]:
        """Yield waiters that stopped waiting long ago and still count as alive."""
        now = self.world.now
        for key in {key for key, _ in self.items}:
            for (_, entry), item in self._waiters(key):
                actor = about_of(item)["actor"]
                since = max(self.stopped_waiting.get(actor, now), self._enqueued[key, entry])
                long_gone = actor not in self.waiting and now - since > _DEAD_AFTER
                if long_gone and self._alive_since(key, entry, item, now):
                    stopped = self.stopped_waiting[actor]
                    yield f"{actor} stopped waiting for {key} at {stopped:.1f}, and still counts as a waiter"

    # -- helpers --------------------------------------------------------------------------------------------

    @property
    def _surely_alive(self) -> float:
        return min(_SURELY_ALIVE, _SURELY_ALIVE_WITH_SKEW - self.apart)

    def _waiters(self, key: str) -> list[tuple[ItemKey, Item]]:
        """Return the waiter items of a lock in queue order."""
        return sorted(
            (at, item)
            for at, item in self.items.items()
            if at[0] == key and at[1].startswith(WAITER_ENTRY) and "lease_id" in item
        )

    def _last_heartbeat(self, key: str, entry: str, item: Item) -> float:
        """When the waiter or its process last showed that it is alive."""
        process = item["process"]["S"] if "process" in item else ""
        heartbeats = [*self._heartbeats[key, entry], *self._heartbeats.get((process, LOCK_ENTRY), ())]
        return max((visible for visible, _ in heartbeats), default=-NEVER)

    def _alive_since(self, key: str, entry: str, item: Item, since: float) -> bool:
        """Whether the waiter has counted as alive since then, by the clock of any server."""
        if self._surely_alive <= 0:
            return False
        actor = about_of(item)["actor"]
        current = self.processes.get(actor) if actor in self.waiting else None
        recovered = self.faults_ended + _RECOVERED_AFTER
        if since > recovered and self._enqueued[key, entry] < since and current is not None:
            # A process that runs and reaches DynamoDB has to send its heartbeats.
            process = current()
            if process.alive and process.paused_until < self.faults_ended + 5.0:
                return True
        heartbeats = [*self._heartbeats[key, entry]]
        if "process" in item:
            heartbeats += self._heartbeats.get((item["process"]["S"], LOCK_ENTRY), ())
        until = since
        for visible, counts_until in sorted(heartbeats):
            if visible <= until <= counts_until:
                until = counts_until
        return until > self.world.now


def about_of(item: Mapping[str, Any]) -> dict[str, str]:
    """Return the ``about`` of the claim, from its holder or its waiter item."""
    return {name: each["S"] for name, each in item.get("about", {}).get("M", {}).items()}
