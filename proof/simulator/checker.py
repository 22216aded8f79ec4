"""The checker of a history: it judges these invariants by true time, which no process can read.

1. Holders that count on their leases never have more slots than the lock's capacity. The record does not
   allow a reclaim before the holder has stopped counting on its lease; checked whenever the record or a lease
   term changes.
2. Fencing tokens strictly increase, also across a deletion by TTL and by `forget`.
3. Only its holder releases or renews a lease. No version of a lease returns after another one. A reclaim
   requires the version that the reclaimer saw. An undo releases all locks of a set.
4. After the faults have ended, a lock with waiters is acquired within a bound after its last heartbeat. If it
   was released, and all of its waiters are alive, it is acquired within two polls.
5. After the faults have ended, every waiter is granted the lock.
6. No lock record and no waiter item becomes damaged. A capacity is unpinned only while the lock has no
   holder.
7. In a queue, a living waiter is overtaken only by a higher priority, or within the limits that
   docs/protocol.md states. A waiter that is gone no longer counts, and entries of dead waiters are removed.
8. A lock is not granted again before its `min_hold`.
9. A holder is notified within a second after its lease has run out. A guard stops its task in time.

`QueueChecker` checks 7, `IdleChecker` the second part of 4. `History` checks 4 and 5, because it knows when the
faults end and which clients wait. `final_checks` checks after the history what cannot be checked before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from airflow_dynamo_lock.core.model.kind import Kind
from airflow_dynamo_lock.core.model.lease import Lease, Term
from airflow_dynamo_lock.core.model.limits import MARGIN, WAITING_PREFIX
from airflow_dynamo_lock.core.table.expressions import LOCK_ENTRY
from airflow_dynamo_lock.core.table.items import REMOVED_PREFIX
from proof.simulator.dynamodb import ItemKey
from proof.simulator.expressions import Item
from proof.simulator.idle_checker import IdleChecker
from proof.simulator.lease_use import NEVER, Grant, LeaseUse, RecordedTerm
from proof.simulator.queue_checker import QueueChecker, about_of
from proof.simulator.world import BEGIN, Process, World

# Highest error of a good estimate of server time, in seconds, besides the difference between two servers'
# clocks: 1 s for the resolution of the header, 2 s by which two writers may differ, 2 s for a clock at a
# wrong rate.
_ESTIMATE_ERROR = 5.0
# Seconds by which a `min_hold` may be shorter in true time, besides the difference between two servers'
# clocks: the resolution of two headers, and the time of an answer if the SDK sends the request twice.
_HOLD_TOLERANCE = 8.0


@dataclass(frozen=True)
class _RecordWrite:
    """One write of a lock record.

    :ivar process: its sender.
    :ivar before: the record before the write; None if it is new.
    """

    process: Process
    key: str
    params: Mapping[str, Any]
    before: Item | None
    after: Item

    @property
    def old(self) -> Mapping[str, Any]:
        """Return the holders before the write, by lease id."""
        return self.before["holders"]["M"] if self.before else {}

    @property
    def new(self) -> Mapping[str, Any]:
        """Return the holders after the write, by lease id."""
        holders: Mapping[str, Any] = self.after["holders"]["M"]
        return holders

    @property
    def granted(self) -> list[str]:
        """Return the lease ids that the write added."""
        return [lease_id for lease_id in self.new if lease_id not in self.old]

    @property
    def reclaims(self) -> bool:
        """Return whether a removed holder was dead: the write grants its slots, or removes dead holders."""
        return bool(self.granted) or "#dead0" in self.params["UpdateExpression"]

    def values(self, attribute: str) -> list[Any]:
        """Return the values of an attribute before and after the write, where there is one."""
        return [
            each[attribute] for each in (self.before, self.after) if each is not None and attribute in each
        ]

    def changes(self, attribute: str) -> bool:
        """Return whether an attribute has changed, or the record is new."""
        return self.before is None or self.before.get(attribute) != self.after.get(attribute)

    def adds(self, attribute: str) -> bool:
        """Return whether the write adds an attribute."""
        return attribute in self.after and attribute not in (self.before or ())


@dataclass
class Checker:
    """Records what happens in a history, and reports violations of the invariants.

    Times are true times. An `ItemKey` stands for a lease where it consists of a key and a lease id.

    :ivar capacities: capacity of each lock, by key.
    :ivar reclaimable_after: seconds after the end of a lease, counted from its stamp, at which the first of
        DynamoDB's servers allows a reclaim; None if answers have no ``Date``.
    :ivar apart: highest difference between two servers' clocks, in seconds.
    :ivar violations: violations so far, as messages.
    :ivar uses: lease uses so far.
    :ivar grants: grants that callers have received so far.
    :ivar deputies: processes that may act for a lease although they did not create its id, by lease id.
    :ivar operators: processes of people, who may break any lease.
    :ivar faults_ended: when the faults ended.
    :ivar last_written: when each record was last written, by key.
    :ivar granted: when each lease was granted, and the lock's capacity after that.
    :ivar stamped: for each lease, the time of its last applied stamp, by the duration of the lease in
        milliseconds.
    :ivar broken: when each lease was last broken.
    :ivar reclaimed: when each lease was last reclaimed.
    :ivar released: when each lease was last released.
    :ivar released_with_time: the same, for releases that set `last_freed_at` to nearly the true time.
    :ivar released_after_faults: when the first lock of each lease was released by a request that was sent
        after the faults had ended, by lease id.
    :ivar killed_at: when each killed process was killed.
    """

    world: World
    capacities: Mapping[str, int]
    reclaimable_after: float | None
    apart: float = 0.0
    violations: list[str] = field(default_factory=list)
    uses: list[LeaseUse] = field(default_factory=list)
    grants: list[Grant] = field(default_factory=list)
    deputies: dict[str, list[Process]] = field(default_factory=lambda: defaultdict(list))
    operators: list[Process] = field(default_factory=list)
    faults_ended: float = NEVER
    last_written: dict[str, float] = field(default_factory=dict)
    granted: dict[ItemKey, tuple[float, int]] = field(default_factory=dict)
    stamped: dict[ItemKey, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    broken: dict[ItemKey, float] = field(default_factory=dict)
    reclaimed: dict[ItemKey, float] = field(default_factory=dict)
    released: dict[ItemKey, float] = field(default_factory=dict)
    released_with_time: dict[ItemKey, float] = field(default_factory=dict)
    released_after_faults: dict[str, float] = field(default_factory=dict)
    killed_at: dict[Process, float] = field(default_factory=dict)
    queue: QueueChecker = field(init=False)
    idle: IdleChecker = field(init=False)
    # Ids of leases whose grant the caller has received.
    _confirmed: set[str] = field(default_factory=set)
    # The versions that each lease has had before the present one.
    _replaced: dict[ItemKey, set[str]] = field(default_factory=lambda: defaultdict(set))
    # Released leases whose record refuses acquires that were sent before the release, by `last_freed_at`.
    _protected: set[ItemKey] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.queue = QueueChecker(self.world, apart=self.apart)
        self.idle = IdleChecker(self.world, self.queue)

    def report(self, violation: str) -> None:
        """Add a violation."""
        self.world.log(f"VIOLATION: {violation}")
        self.violations.append(violation)

    # -- what the processes do ------------------------------------------------------------------------------

    def term(self, now: Callable[[], float]) -> Term:
        """Create a lease term; used in place of `Term`."""
        return RecordedTerm(self.world, now, self._term_renewed)

    def _term_renewed(self, term: RecordedTerm) -> None:
        """Compare the end of a renewed term with what the record allows."""
        for use in self.uses:
            if use.lease.term is term and use.end == NEVER:
                self._check_end(use)

    def confirmed(
        self, process: Process, lease: Lease, begun: float, here: float, *, again: bool = False
    ) -> None:
        """Record that a caller has received a grant.

        :param begun: when the caller began to acquire.
        :param here: when it received the grant.
        :param again: whether the owner may hold the same lease already.
        """
        assert isinstance(lease.term, RecordedTerm)
        valid = lease.term.lost is None and process.true_time(lease.term.until) > here
        if not valid:
            self.report(f"{process.name} received {lease.lease_id} after it had run out")
        if again and lease.lease_id in self._confirmed:
            return
        self.grants.append(Grant(lease.key, lease.lease_id, lease.token, begun, here, valid))
        self._confirmed.add(lease.lease_id)
        self.world.log(f"holds {lease.key} as {lease.lease_id}, token {lease.token}", process)

    @contextmanager
    def using(
        self, process: Process, lease: Lease, *, inside: bool = False, guarded: bool = False
    ) -> Iterator[None]:
        """Record that the process works under the lease until the block ends or the process is killed.

        :param inside: whether the process is a guarded one, which leaves the lease and does not release it.
        :param guarded: whether the real guard stops the work.
        """
        use = LeaseUse(process, lease, process.true_now, guarded=guarded)
        self.uses.append(use)
        self.world.log(f"works under {lease.lease_id}", process)
        self._check_end(use)
        try:
            yield
        finally:
            # Python may run this block for a killed process too, long after its death.
            if process.alive:
                use.left = process.true_now
                if inside:
                    use.end = process.true_now
                self.world.log(f"no longer works under {lease.lease_id}", process)

    def killed(self, process: Process) -> None:
        """Record that a process was killed."""
        self.world.log("is dead", process)
        self.killed_at[process] = self.world.now
        if process.name in self.queue.waiting:
            self.queue.waiting.discard(process.name)
            self.queue.stopped_waiting[process.name] = self.world.now
        for use in self.uses:
            if use.process is process:
                use.end = min(use.end, self.world.now)
                use.left = min(use.left, self.world.now)

    def works(self, process: Process) -> bool:
        """Return whether a process works under a lease at present."""
        return any(use.process is process and use.left == NEVER for use in self.uses)

    # -- what is written ------------------------------------------------------------------------------------

    def deleted(self, at: ItemKey) -> None:
        """Check the deletion of an item, by TTL or by an operator."""
        key, entry = at
        if entry != LOCK_ENTRY:
            return
        self.world.log(f"{key} is deleted")
        # The record no longer refuses acquires that were sent before earlier releases.
        self._protected = {at for at in self._protected if at[0] != key}
        for use in self.uses:
            lease_id = use.lease.lease_id
            if use.lease.key == key and (key, lease_id) not in self.broken and self._counts_on(use):
                self.report(f"the record of {key} was deleted while {lease_id} was held")

    def applied(
        self, process: Process, params: Mapping[str, Any], before: Item | None, after: Item | None
    ) -> None:
        """Check the write of an item: a lock record, a waiter item, or the lease of a process with waiters.

        :param process: its sender.
        :param before: the item before the write; None if it is new.
        :param after: the item after the write; None if it was deleted.
        """
        item = after or before
        if item is None:
            return
        key, entry = item["key"]["S"], item["entry"]["S"]
        if entry != LOCK_ENTRY:
            self._waiter_written(process, key, entry, before, after)
            return
        if key.startswith(WAITING_PREFIX):
            self.queue.written(process, key, LOCK_ENTRY, after)
        if after is None:
            if process not in self.operators or (before or {}).get("holders", {}).get("M"):
                self.report(f"{process.name} deleted the record of {key}, which was in use: {before}")
            self.deleted((key, LOCK_ENTRY))
            return
        write = _RecordWrite(process, key, params, before, after)
        self.last_written[key] = self.world.now
        self._check_old_holders(write)
        self._note_last_freed_at(write)
        self._check_grants(write)
        self.queue.record_written(key, before, after)
        if not key.startswith(WAITING_PREFIX) and (violation := self.idle.written(key, before, after)):
            self.report(f"{violation} (invariant 4)")
        self._note_stamps(write)
        for use in self.uses:
            if use.end == NEVER and use.lease.key == key:
                self._check_end(use)
        self._check_head(write)
        self._check_capacity(write)

    def _waiter_written(
        self, process: Process, key: str, entry: str, before: Item | None, after: Item | None
    ) -> None:
        """Check the write of a waiter item."""
        if before is not None and after is not None:
            violation = self.queue.wrongly_handed_over(process, before, after)
            if violation is not None:
                self.report(violation)
        if after is not None and "lease_id" not in after:
            self.report(f"{process.name} wrote {entry} without the lease id of a waiter")
        self.queue.written(process, key, entry, after)

    def _check_old_holders(self, write: _RecordWrite) -> None:
        """Check which holders a write removes and changes."""
        for lease_id, holder in write.old.items():
            if lease_id not in write.new:
                self.queue.removed[write.key, lease_id] = self.world.now
                self._check_removal(write, lease_id, holder["M"])
                self._check_min_hold(write, lease_id, holder["M"])
            elif write.new[lease_id] is not holder and not self._acts_for(write.process, lease_id):
                self.report(f"{write.process.name} changed the lease {lease_id}, which is not its own")
            else:
                self._check_version(write, lease_id)

    def _check_version(self, write: _RecordWrite, lease_id: str) -> None:
        """Check that a renewal restores no earlier version, which observers may have seen long ago."""
        old, new = (holders[lease_id]["M"]["version"]["S"] for holders in (write.old, write.new))
        if old != new:
            replaced = self._replaced[write.key, lease_id]
            replaced.add(old)
            if new in replaced:
                self.report(f"{write.process.name} restored the version {new} of the lease {lease_id}")

    def _note_last_freed_at(self, write: _RecordWrite) -> None:
        """Note if a process that does not know server time has set `last_freed_at` too early.

        Then the record no longer refuses acquires that were sent before earlier releases.
        """
        before, after = write.before or {}, write.after
        if "last_freed_at" not in after or after["last_freed_at"] == before.get("last_freed_at"):
            return
        freed = int(after["last_freed_at"]["N"]) / 1000 - BEGIN
        if freed < self.world.now - _ESTIMATE_ERROR - self.apart:
            self._protected = {at for at in self._protected if at[0] != write.key}

    def _check_grants(self, write: _RecordWrite) -> None:
        """Check the leases that a write grants."""
        process, key, after = write.process, write.key, write.after
        for lease_id in write.granted:
            if write.before is not None and REMOVED_PREFIX + lease_id in write.before:
                self.report(f"{process.name} acquired {key} as {lease_id}, which a person had removed (R15)")
            self._check_not_retaken((key, lease_id), write.new[lease_id]["M"])
            self.granted[key, lease_id] = self.world.now, int(after["capacity"]["N"])
            overtaken = self.queue.overtaken(process, key, lease_id, write.before, after)
            if overtaken is not None:
                self.report(f"{process.name} acquired {key} as {lease_id} and overtook {overtaken}")
            if not self._acts_for(process, lease_id):
                self.report(f"{process.name} acquired the lease {lease_id}, which is not its own")

    def _note_stamps(self, write: _RecordWrite) -> None:
        """Record the stamps of the holders that a write adds or renews."""
        for lease_id, holder in write.new.items():
            if write.old.get(lease_id) is not holder:
                duration, stamps = int(holder["M"]["lease_ms"]["N"]), self.stamped[write.key, lease_id]
                stamped = self.world.id_created_at.get(holder["M"]["version"]["S"], -NEVER)
                stamps[duration] = max(stamped, stamps.get(duration, -NEVER))

    def _check_head(self, write: _RecordWrite) -> None:
        """Check how a write changes the queue head, and record the ticket that it takes."""
        process, key, before, after = write.process, write.key, write.before, write.after
        if before is not None and "queue_head" in before and "queue_head" not in after:
            granted = {lease_id: write.new[lease_id] for lease_id in write.granted}
            violation = self.queue.head_cleared_early(process, key, write.params, before, granted)
            if violation is not None:
                self.report(f"{process.name} {violation}")
        if write.changes("queue_head"):
            self.queue.head_moved[key] = self.world.now
            heads = [head["S"] for head in write.values("queue_head")]
            dequeues = ":after" in write.params["ExpressionAttributeValues"]
            if len(heads) == 2 and heads[0] < heads[1] and not write.granted and not dequeues:
                self.report(f"{process.name} raised the queue head of {key} from {heads[0]} to {heads[1]}")
        if write.changes("last_ticket"):
            self.queue.last_ticket_taken[key] = self.world.now
            if "last_ticket" in after:
                self.queue.ticket_times[key, int(after["last_ticket"]["N"])] = self.world.now

    def _check_capacity(self, write: _RecordWrite) -> None:
        """Check the slots of the record, and how a write changes the capacity."""
        process, key, before, after = write.process, write.key, write.before, write.after
        held_otherwise = (
            before is not None and write.old and Kind.of(int(before["capacity"]["N"])) is not Kind.SEMAPHORE
        )
        if held_otherwise and write.adds("capacity_pinned"):
            self.report(f"{process.name} pinned the capacity of {key}, which is held and is no semaphore")
        unpinned = before is not None and "capacity_pinned" in before and "capacity_pinned" not in after
        if unpinned and write.new:
            self.report(f"{process.name} unpinned the capacity of {key}, which is held")
        if write.granted and int(after["available"]["N"]) < 0:
            self.report(f"{process.name} acquired more slots of {key} than were free: {after}")
        held = sum(int(holder["M"]["slots"]["N"]) for holder in write.new.values())
        if int(after["available"]["N"]) + held != int(after["capacity"]["N"]):
            self.report(f"the slots in the record of {key} do not add up to its capacity: {after}")

    def _check_removal(self, write: _RecordWrite, lease_id: str, holder: Mapping[str, Any]) -> None:
        """Check that a lease may be removed: by a break, a reclaim or a release."""
        process, at = write.process, (write.key, lease_id)
        values: Mapping[str, Any] = write.params["ExpressionAttributeValues"]
        if process in self.operators:
            self.broken[at] = self.world.now
        elif write.reclaims:
            self.reclaimed[at] = self.world.now
            version = holder["version"]
            if version not in [value for alias, value in values.items() if "version" in alias]:
                self.report(f"{process.name} reclaimed {lease_id} without requiring its version {version}")
        else:
            if not self._acts_for(process, lease_id):
                self.report(f"{process.name} released the lease {lease_id}, which is not its own")
            self.released[at] = self.world.now
            if self.queue.sent > self.faults_ended:
                self.released_after_faults.setdefault(lease_id, self.world.now)
            freed = int(values[":last_freed_at"]["N"]) / 1000 - BEGIN
            if abs(freed - self.world.now) < _ESTIMATE_ERROR + self.apart:
                self.released_with_time[at] = self.world.now
                self._protected.add(at)
            # A process may release as it leaves.
            leaving = write.params["ExpressionAttributeNames"].get("#process")
            if inside := [name for name in holder["processes"]["M"] if name != leaving]:
                self.report(f"{process.name} released {lease_id} while {inside} were inside")

    def _check_min_hold(self, write: _RecordWrite, lease_id: str, holder: Mapping[str, Any]) -> None:
        """Check that a lease is not removed before its `min_hold`, unless it is dead or broken by hand."""
        at = write.key, lease_id
        min_hold = float(about_of(holder).get("hold", 0.0))
        dead = write.reclaims and "cooling_down" not in holder
        if (
            not min_hold
            or dead
            or write.process in self.operators
            or self.reclaimable_after is None
            # Without a `Date`, the holder may use the wall clock of its host.
            or self.world.proxied
            or lease_id not in self._confirmed
            or at not in self.granted
        ):
            return
        earliest = self.granted[at][0] + min_hold - self.apart - _HOLD_TOLERANCE
        if self.world.now < earliest:
            self.report(
                f"{lease_id} was removed before its min_hold was over, at {earliest:.1f} at the earliest"
            )

    def _check_end(self, use: LeaseUse) -> None:
        """Check that the holder stops counting on its lease before the lease ends by the record (R4).

        That end is counted in two ways: from the true time of the last applied stamp, and from `renewed_at`
        as a server compares it with its own clock.
        """
        item = self.queue.items.get((use.lease.key, LOCK_ENTRY))
        lease_id = use.lease.lease_id
        holder = item["holders"]["M"].get(lease_id, {}).get("M", {}) if item is not None else {}
        if not holder or (use.lease.key, lease_id) in self.broken:
            return
        now = max(self.world.now, use.begin)
        here = use.process.true_now if use.process is self.world.running else now
        until = max((end for begin, end in use.spans() if begin <= max(now, here) < end), default=0.0)
        rate = use.process.machine.rate
        stamps = self.stamped[use.lease.key, lease_id].items()
        valid = max((at + duration / 1000 * (1 - MARGIN) / rate for duration, at in stamps), default=0.0)
        if valid + 0.005 < until:
            self.report(
                f"{lease_id} is valid until {valid:.3f} by its last stamp, but counted on until {until:.3f}"
            )
        if self.reclaimable_after is None or "renewed_at" not in holder:
            return
        ends = (int(holder["renewed_at"]["N"]) + int(holder["lease_ms"]["N"])) / 1000 - BEGIN
        reclaimable = ends + self.reclaimable_after
        if reclaimable < until:
            self.report(
                f"{lease_id} may be reclaimed from {reclaimable:.3f} on, but is counted on until {until:.3f}"
            )

    def _check_not_retaken(self, at: ItemKey, holder: Mapping[str, Any]) -> None:
        """Check that no late write grants a lease again after its release (R5).

        A write with the time of a wrong clock may look like one that was sent after the release.
        """
        stamped = self.world.id_created_at.get(holder["version"]["S"], -NEVER)
        acquired = max(stamped, int(holder["acquired_at"]["N"]) / 1000 - BEGIN)
        if (
            at in self._protected
            and self.reclaimable_after is not None
            and acquired < self.released_with_time.get(at, -NEVER) - _ESTIMATE_ERROR - self.apart
        ):
            released = self.released_with_time[at]
            self.report(f"{at[1]} was released at {released:.3f}, and granted again by a late write")

    def _acts_for(self, process: Process, lease_id: str) -> bool:
        own_id = lease_id.removeprefix(WAITING_PREFIX)  # a process with waiters names its own lease so
        return own_id in process.ids or process in self.deputies[lease_id] or process in self.operators

    def _counts_on(self, use: LeaseUse) -> bool:
        return any(begin <= self.world.now < end for begin, end in use.spans())
