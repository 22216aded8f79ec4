"""The invariants of every history, judged by true time, which none of the processes knows.

1. Holders that still believe in their lease never have more slots than the lock's capacity. The record never allows
   others to take a lease before its holder stops believing in it; checked whenever the record or a belief changes.
2. Fencing tokens strictly increase, also across a deletion by TTL and by `forget`.
3. Only its holder releases or renews a lease. A reclaim requires the version that the reclaimer saw. An undo gives back
   all locks of a set.
4. In calm weather, a lock with waiters is taken within a bound after its last sign of life.
5. Every waiter gets its turn once the trouble is over.
6. No record, and no queue entry, becomes unusable. A capacity is unset only while nobody holds the lock.
7. In the queue, a living waiter is overtaken only by more urgent ones, and in the window that `protocol.line` names. No
   waiter counts as waiting after it has gone, and entries of the dead are removed.
8. A lock with a `min_hold` is not handed on before that time.
9. A holder is notified within a second after its lease has run out.

`history.History`, which knows when the weather is calm and who waits, judges 4 and 5. All others are judged here, from
what was written and what was believed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from airflow_dynamo_lock.core.model.errors import LockRecordError
from airflow_dynamo_lock.core.model.kind import Kind, compatible
from airflow_dynamo_lock.core.model.lease import Lease, Term
from airflow_dynamo_lock.core.model.limits import MARGIN, SHARED, WAITING_PREFIX
from airflow_dynamo_lock.core.table.expressions import LOCK_ENTRY
from airflow_dynamo_lock.core.table.items import WAITER_ENTRY, waiter_record
from airflow_dynamo_lock.core.table.native import NativeFormat
from airflow_dynamo_lock.core.table.position import ticket_of
from proof.simulator.dynamodb import Place
from proof.simulator.expressions import Item
from proof.simulator.world import BEGIN, Process, World

NEVER = float("inf")
# For how long after a sign of life, its own or its process's, no clock makes a waiter dead, seconds: at most, and
# before the difference between two servers' clocks is taken off, for which the queue makes no allowance.
_ALIVE, _SIGN = 7.0, 12.0
# By how much a good estimate of the server's time may be off, beside the difference between two servers' clocks: the
# header's second, two for two writers to differ, two for a clock that runs too fast or too slow.
_ESTIMATES = 5.0
# Seconds within which a holder is notified of its loss: one by the slowest clock, and some steps of its process.
_NOTICE = 1.1
# Seconds by which a `min_hold` may be shorter by true time, plus the difference between two servers' clocks: the
# seconds of two headers, and the time that an answer takes when the SDK sends the request twice.
_HOLD_TOLERANCE = 8.0
# Seconds after the start of the calm from which on every waiter in a live process shows that it is alive.
_SHOWN = 30.0
# Seconds that the undo of a set takes, which goes on key by key. A claim that arrives meanwhile is undone in part.
_UNDO = 0.031
# No entry: its name, when it was written, and when its request was sent.
_NOWHERE = "", -NEVER, -NEVER


class RecordedTerm(Term):
    """A term that remembers what it was at any time.

    :ivar history: from when on it was to last until when, both in true time.
    """

    def __init__(self, checker: Checker, now: Callable[[], float]) -> None:
        super().__init__(now)
        assert checker.world.running is not None
        self._checker, self._process = checker, checker.world.running
        self.history: list[tuple[float, float]] = []

    def renewed(self, sent_at: float, lease_ms: int) -> None:
        super().renewed(sent_at, lease_ms)
        if not self.lost:
            self.history.append((self._process.here, self._process.true(self.until)))
            self._checker.believed(self)

    def lose(self, why: str) -> None:
        super().lose(why)
        self.history.append((self._process.here, -NEVER))


@dataclass
class Belief:
    """A process works under a lease, from `begin` to `end` at most, while its term lasts.

    :ivar left: when the process left the code that works under the lease.
    """

    process: Process
    lease: Lease
    begin: float
    end: float = NEVER
    left: float = NEVER

    def spans(self) -> Iterator[tuple[float, float]]:
        """When it was believed, in true time."""
        assert isinstance(self.lease.term, RecordedTerm)
        history = self.lease.term.history
        for (since, until), (then, _) in zip(history, [*history[1:], (NEVER, NEVER)], strict=True):
            begin, end = max(since, self.begin), min(until, then, self.end)
            if begin < end:
                yield begin, end


@dataclass(frozen=True)
class Grant:
    """A grant of which its caller confirmed.

    :ivar begun: when it was asked for.
    :ivar confirmed: when the caller was told.
    :ivar valid: whether the lease was still good then.
    """

    key: str
    lease_id: str
    token: int
    begun: float
    confirmed: float
    valid: bool


@dataclass
class QueueChecker:
    """Whether those who wait are granted in their order, and none of them waits for ever after it has gone.

    :ivar items: what the table holds.
    :ivar waiting: who waits; by the name in ``about`` of its claims.
    :ivar began, ended: when somebody last began, and ceased, to wait.
    :ivar sent, sender: when the request was sent that is carried out just now, and by which task.
    :ivar processes: the process of each waiter; it may be replaced by another one.
    :ivar calm: when the calm began.
    :ivar moved: when the head of each queue was last changed.
    :ivar drew: when a number was last drawn in the queue of each lock.
    :ivar apart: seconds by which two servers' clocks may differ.
    :ivar numbers: when each number was drawn in the queue of each lock.
    :ivar freed: when each lease, by key and lease id, was last removed from its record.
    """

    world: World
    numbers: dict[tuple[str, int], float] = field(default_factory=dict)
    items: Mapping[Place, Item] = field(default_factory=dict)
    waiting: set[str] = field(default_factory=set)
    began: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    sent: float = 0.0
    sender: object = None
    processes: dict[str, Callable[[], Process]] = field(default_factory=dict)
    calm: float = NEVER
    drew: dict[str, float] = field(default_factory=dict)
    moved: dict[str, float] = field(default_factory=dict)
    apart: float = 0.0
    freed: dict[tuple[str, str], float] = field(default_factory=dict)
    _heads: dict[tuple[object, str], str | None] = field(default_factory=dict)
    _looked: dict[tuple[object, str], float] = field(default_factory=dict)
    _looks: dict[tuple[object, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    # From when on each was there to be seen, and until when it counts.
    _signs: dict[Place, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    _stood_by: dict[Place, Process] = field(default_factory=dict)
    _of: dict[Place, str] = field(default_factory=dict)
    _stands: dict[Place, float] = field(default_factory=dict)
    # The entry of each actor, when it was written, and when its request was sent.
    _places: dict[tuple[str, str], tuple[str, float, float]] = field(default_factory=dict)

    @contextmanager
    def waits(self, who: str) -> Iterator[Callable[[], None]]:
        """Somebody waits, for the length of the block or until it says that it has done so."""

        def done() -> None:
            self.waiting.discard(who)
            self.ended[who] = self.world.now

        self.waiting.add(who)
        self.began[who] = self.world.now
        try:
            yield done
        finally:
            done()

    def arrived(self, sender: object, action: str, params: Mapping[str, Any], sent: float) -> None:
        """A request has arrived, perhaps one for the line of a lock."""
        self.sent, self.sender = sent, sender
        if action == "Query":
            key = params["ExpressionAttributeValues"][":key"]["S"]
            self._looks[sender, key].append(sent)
            self._looked[sender, key] = self.world.now
            # The head that the answer shows; it is not known, if it has changed since the request was sent.
            head = self.items.get((key, LOCK_ENTRY), {}).get("queue_head", {}).get("S")
            self._heads[sender, key] = head if self.moved.get(key, -NEVER) < sent else None

    def written(self, process: Process, key: str, entry: str, after: Item | None) -> None:
        """A sign of life of a waiter, or of its process: as old as it says, should it have arrived late."""
        if after is None:
            self._signs.pop((key, entry), None)
            self._stands.pop((key, entry), None)
            return
        self._stands.setdefault((key, entry), self.world.now)
        if after.get("holders", {}).get("M") == {}:
            return  # a process that says good-bye, or whose good-bye arrives late, gives no sign of life
        if "about" in after:
            actor = key, _about(after)["actor"]
            if self.sent >= self._places.get(actor, _NOWHERE)[2]:  # else a late request, for an earlier entry
                self._places[actor] = entry, self.world.now, self.sent
            self._stood_by[key, entry] = process
            self._of[key, entry] = after["lease_id"]["S"]
        at = self.world.now
        for sign in (after, *(each["M"] for each in after.get("holders", {}).get("M", {}).values())):
            if "renewed_at" in sign:
                at = min(at, int(sign["renewed_at"]["N"]) / 1000 - BEGIN)
        self._signs[key, entry].append((self.world.now, at + min(_ALIVE, _SIGN - self.apart)))

    def overtaken(
        self, process: Process, key: str, name: str, before: Item | None, after: Item
    ) -> str | None:
        """Who, alive and in sight, should have had the lock that was just taken, by that process."""
        about = _about(after["holders"]["M"][name]["M"])
        if before is None or "queue_head" not in before or about.get("fair") != "yes":
            return None
        look = max((at for at in self._looks[self.sender, key] if at <= self.sent), default=None)
        head = self._heads.get((self.sender, key))
        if look is not None and head is not None and before["queue_head"]["S"] < head:
            return "whoever lowered the head of the queue since that looked"
        if after.get("queue_head") != before["queue_head"] and (
            gap := self._head_passes(key, name, before, after, self.sent if look is None else look)
        ):
            return gap
        left = int(after["available"]["N"])
        mine, placed, _ = self._places.get((key, about["actor"]), _NOWHERE)
        if placed < self.began.get(about["actor"], 0.0) <= self.sent:
            mine = ""  # of an earlier time
        for (_, entry), item in self._in_line(key):
            their, place = _about(item), entry.removeprefix(WAITER_ENTRY)
            if their["actor"] == about["actor"] or (mine and entry > mine):
                return None
            if (
                their["actor"] not in self.waiting
                or place
                < before["queue_head"][
                    "S"
                ]  # passed over while it was on its way to its place: it is the next
                or item["lease_id"]["S"]
                in before["holders"]["M"]  # it has the lock, and is about to leave the line
                or look is None
                or self._stands[key, entry] > look  # on its way at that time
                or self._held(key, item, look)
                or self._given_up_by(process, (key, entry), their["actor"])
                or not self._alive_since(key, entry, item, look)
            ):
                continue
            slots, capacity = int(item["slots"]["N"]), int(item["capacity"]["N"])
            left -= slots
            if left < 0 or not compatible(capacity, int(after["capacity"]["N"])):
                return f"{their['actor']} in {place}"
        return None

    def _head_passes(self, key: str, name: str, before: Item, after: Item, look: float) -> str | None:
        """A living waiter that the head of the queue now leaves behind, although it is not the one that took the lock.

        Nobody may be passed but the dead, and those that had drawn a number and not taken their place at the time of
        the `look`.
        """
        first = after["queue_head"]["S"] if "queue_head" in after else "~"
        mine = _about(after["holders"]["M"][name]["M"])["actor"]
        for (_, entry), item in self._in_line(key):
            place, their = entry.removeprefix(WAITER_ENTRY), _about(item)
            if (
                before["queue_head"]["S"] <= place < first
                and their["actor"] != mine
                and their["actor"] in self.waiting
                and item["lease_id"]["S"] not in after["holders"]["M"]
                and not self._held(key, item, look)
                and (
                    self._stands[key, entry] <= look or look < self.numbers.get((key, ticket_of(place)), look)
                )
                and self._stands[key, entry] < self.sent - 4.0
                and self._alive_since(key, entry, item, self.sent - 4.0)
            ):
                return f"{their['actor']} in {place}, which the head of the queue passed"
        return None

    def _held(self, key: str, item: Item, look: float) -> bool:
        """Whether a waiter had the lock at the time of the look: it released a grant whose answer it never received."""
        return self.freed.get((key, item["lease_id"]["S"]), -NEVER) > look

    def _given_up_by(self, process: Process, at: Place, actor: str) -> bool:
        """Whether that process wrote the entry and no longer waits, and the next one has not taken the entry over."""
        return self._stood_by.get(at) is process and self.processes[actor]() is not process

    def head_cleared(
        self, process: Process, key: str, params: Mapping[str, Any], before: Item, takes: Mapping[str, Any]
    ) -> str | None:
        """A number that was drawn after those that the sender knows of, when it clears the head of the queue: who drew
        it may be on the way to its place."""
        place = params["ExpressionAttributeValues"].get(":place", {}).get("S")
        for name, holder in takes.items():
            actor = _about(holder["M"])["actor"]
            entry, placed, _ = self._places.get((key, actor), _NOWHERE)
            if (key, entry) not in self.items or self._of.get((key, entry)) != name:
                continue  # of an earlier claim of the same caller
            if placed >= self.began.get(actor, 0.0) and self._stood_by.get((key, entry)) is process:
                place = entry.removeprefix(WAITER_ENTRY)
        drawn = int(before["last_ticket"]["N"]) if "last_ticket" in before else 0
        if place is not None:
            late = drawn > ticket_of(place)
        else:
            # A number drawn before the look arrived was seen by it, or the write is refused.
            late = self.drew.get(key, -NEVER) > self._looked.get((self.sender, key), NEVER)
        return f"the head of the queue of {key} was cleared, after {drawn} was drawn" if late else None

    def handed_on(self, process: Process, before: Item, after: Item) -> str | None:
        """A place that a process leaves to others, although another process stands in it."""
        standing = before.get("process", {}).get("S", "").removeprefix(WAITING_PREFIX)
        if "process" in after or not standing or standing in process.ids:
            return None
        return f"{process.name} handed {before['entry']['S']} on, in which {standing} stands"

    def left_behind(self, key: str, actor: str, held: Mapping[Place, Any]) -> Iterator[str]:
        """Entries of the dead before the place in which that waiter waited until it was granted the lock.

        :param held: the leases that were granted, whose entries it need not have looked at.
        """
        mine, *_ = self._places.get((key, actor), _NOWHERE)
        for (_, entry), item in self._in_line(key):
            if (
                (key, item["lease_id"]["S"]) not in held
                and entry < mine
                and self._stands[key, entry] < self.began[actor]
            ):
                yield f"{_about(item)['actor']} left {entry} in the queue of {key}, and {actor} did not clear it"

    def immortal(self) -> Iterator[str]:
        """Those who have gone long ago, and still count as waiting."""
        now = self.world.now
        for key in {key for key, _ in self.items}:
            for (_, entry), item in self._in_line(key):
                actor = _about(item)["actor"]
                since = max(self.ended.get(actor, now), self._stands[key, entry])
                long_gone = actor not in self.waiting and now - since > 90.0
                if long_gone and self._alive_since(key, entry, item, now):
                    yield f"{actor} ceased to wait for {key} at {self.ended[actor]:.1f}, and still stands in line"

    def _in_line(self, key: str) -> list[tuple[Place, Item]]:
        return sorted(
            (at, item)
            for at, item in self.items.items()
            if at[0] == key and at[1].startswith(WAITER_ENTRY) and "lease_id" in item
        )

    def _alive_since(self, key: str, entry: str, item: Item, since: float) -> bool:
        """Whether nobody could have taken it for dead since then, by any clock."""
        alive = min(_ALIVE, _SIGN - self.apart)
        if alive <= 0:
            return False
        actor = _about(item)["actor"]
        process = self.processes.get(actor) if actor in self.waiting else None
        if since > self.calm + _SHOWN and self._stands[key, entry] < since and process is not None:
            here = process()
            # Its process is awake, and can reach DynamoDB: it has to show that it is alive.
            if here.alive and here.busy_until < self.calm + 5.0:
                return True
        signs = [*self._signs[key, entry]]
        if "process" in item:
            signs += self._signs.get((item["process"]["S"], LOCK_ENTRY), ())
        until = since
        for begin, end in sorted(signs):
            if begin <= until <= end:
                until = end
        return until > self.world.now


def _about(item: Mapping[str, Any]) -> dict[str, str]:
    return {name: each["S"] for name, each in item.get("about", {}).get("M", {}).items()}


@dataclass
class Checker:
    """Takes in what happens, and says what is wrong with it.

    :ivar acting: who may act for a lease that was not named by the process itself: lease id → processes.
    :ivar people: processes that may break any lease.
    :ivar skew: how long after a lease's end, by its stamp, the first of DynamoDB's servers lets others take it, in
        seconds; None if none of them tells the time.
    :ivar taken: when each lease was taken, and the lock's capacity after that.
    :ivar removed: when each lease was released by its holder.
    :ivar written: when each key was last written to, true time.
    :ivar calm: when the calm began.
    :ivar stamped: of each lease, when the last of its applied heartbeats was stamped, by how long they last.
    :ivar apart: seconds by which two servers' clocks may differ.
    """

    world: World
    capacities: Mapping[str, int]
    skew: float | None
    violations: list[str] = field(default_factory=list)
    beliefs: list[Belief] = field(default_factory=list)
    grants: list[Grant] = field(default_factory=list)
    acting: dict[str, list[Process]] = field(default_factory=lambda: defaultdict(list))
    people: list[Process] = field(default_factory=list)
    broken: dict[Place, float] = field(default_factory=dict)
    given_back: dict[Place, float] = field(default_factory=dict)
    reclaimed: dict[Place, float] = field(default_factory=dict)
    removed: dict[Place, float] = field(default_factory=dict)
    written: dict[str, float] = field(default_factory=dict)
    taken: dict[Place, tuple[float, int]] = field(default_factory=dict)
    calm: float = NEVER
    apart: float = 0.0
    stamped: dict[Place, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    queue: QueueChecker = field(init=False)
    _heard: set[str] = field(default_factory=set)
    # Leases given back whose time the record shows, as the server knows it.
    _guarded: set[Place] = field(default_factory=set)
    # Leases released in calm weather, one lock of a set at least.
    _undone: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.queue = QueueChecker(self.world, apart=self.apart)

    def wrong(self, what: str) -> None:
        self.world.story(f"VIOLATION: {what}")
        self.violations.append(what)

    # -- what happens -----------------------------------------------------------------------------------------

    def term(self, now: Callable[[], float]) -> Term:
        """To be used in place of `Term`."""
        return RecordedTerm(self, now)

    def believed(self, term: RecordedTerm) -> None:
        """A belief in a lease has changed: compare it with what the record allows."""
        for belief in self.beliefs:
            if belief.lease.term is term and belief.end == NEVER:
                self._compare(belief)

    def confirmed(
        self, process: Process, lease: Lease, begun: float, here: float, *, again: bool = False
    ) -> None:
        """A caller was told of a grant, `here` in true time.

        :param again: it may be of a lease that its owner holds already.
        """
        assert isinstance(lease.term, RecordedTerm)
        valid = lease.term.lost is None and process.true(lease.term.until) > here
        if not valid:
            self.wrong(f"{process.name} was given {lease.lease_id}, whose time had run out")
        if again and lease.lease_id in self._heard:
            return
        self.grants.append(Grant(lease.key, lease.lease_id, lease.token, begun, here, valid))
        self._heard.add(lease.lease_id)
        self.world.story(f"holds {lease.key} as {lease.lease_id}, token {lease.token}", process)

    @contextmanager
    def believing(self, process: Process, lease: Lease, *, inside: bool = False) -> Iterator[None]:
        """The process works under the lease for the length of the block, or until it is killed in it.

        :param inside: it is a guarded process, which leaves the lease and does not release it.
        """
        belief = Belief(process, lease, process.here)
        self.beliefs.append(belief)
        self.world.story(f"works under {lease.lease_id}", process)
        self._compare(belief)
        try:
            yield
        finally:
            if process.alive:  # else it is cleared away, long after its death
                belief.left = process.here
                if inside:
                    belief.end = process.here
                self.world.story(f"works no more under {lease.lease_id}", process)

    def killed(self, process: Process) -> None:
        """The process is dead from now on."""
        self.world.story("is dead", process)
        self.queue.waiting.discard(process.name)
        for belief in self.beliefs:
            if belief.process is process:
                belief.end = min(belief.end, self.world.now)
                belief.left = min(belief.left, self.world.now)

    def deleted(self, at: Place) -> None:
        """TTL, or a person, has removed an item."""
        key, entry = at
        if entry != LOCK_ENTRY:
            return
        self.world.story(f"{key} is deleted")
        for belief in self.beliefs:
            if (
                belief.lease.key == key
                and (key, belief.lease.lease_id) not in self.broken
                and self._holds_now(belief)
            ):
                self.wrong(f"the record of {key} was deleted while {belief.lease.lease_id} was held")

    def applied(
        self, process: Process, params: Mapping[str, Any], before: Item | None, after: Item | None
    ) -> None:
        """An item was written. What stands beside the record of a lock is not judged."""
        item = after or before
        if item is None:
            return
        key = item["key"]["S"]
        if item["entry"]["S"] != LOCK_ENTRY:
            if (
                before is not None
                and after is not None
                and (gap := self.queue.handed_on(process, before, after))
            ):
                self.wrong(gap)
            if after is not None and "lease_id" not in after:
                self.wrong(f"{process.name} made {item['entry']['S']}, which names no waiter")
            self.queue.written(process, key, item["entry"]["S"], after)
            return
        if key.startswith(WAITING_PREFIX):
            self.queue.written(process, key, LOCK_ENTRY, after)
        if after is None:
            if process not in self.people or (before or {}).get("holders", {}).get("M"):
                self.wrong(f"{process.name} deleted the record of {key}, held by somebody: {before}")
            self.deleted((key, LOCK_ENTRY))
            return
        self.written[key] = self.world.now
        old: Mapping[str, Any] = before["holders"]["M"] if before else {}
        new: Mapping[str, Any] = after["holders"]["M"]
        takes = [name for name in new if name not in old]
        # Too many dead holders for one write are removed by writes of their own, before somebody takes their place.
        reclaims = bool(takes) or "#dead0" in params["UpdateExpression"]
        for name, holder in old.items():
            if name not in new:
                self.queue.freed[key, name] = self.world.now
                self._gone(process, params, (key, name), holder["M"], reclaimed=reclaims)
                by_hand = process in self.people
                self._too_early((key, name), holder["M"], reclaimed=reclaims, by_hand=by_hand)
            elif new[name] is not holder and not self._acts_for(process, name):
                self.wrong(f"{process.name} changed the lease {name}, which is not its own")
        vacated = int(after["last_freed_at"]["N"]) / 1000 - BEGIN if "last_freed_at" in after else NEVER
        if vacated < self.world.now - _ESTIMATES - self.apart and after["last_freed_at"] != (
            before or {}
        ).get("last_freed_at"):
            # By a process that does not know the server's time: what was given back before it may come back.
            self._guarded = {at for at in self._guarded if at[0] != key}
        for name in takes:
            self._comes_back((key, name), new[name]["M"])
            self.taken[key, name] = self.world.now, int(after["capacity"]["N"])
            if (overtaken := self.queue.overtaken(process, key, name, before, after)) is not None:
                self.wrong(f"{process.name} took {key} as {name}, before {overtaken}, which came first")
            if not self._acts_for(process, name):
                self.wrong(f"{process.name} took the lease {name}, which is not its own")
        for name, holder in new.items():
            if old.get(name) is not holder:
                lasts, stamps = int(holder["M"]["lease_ms"]["N"]), self.stamped[key, name]
                drawn = self.world.drawn.get(holder["M"]["version"]["S"], -NEVER)
                stamps[lasts] = max(drawn, stamps.get(lasts, -NEVER))
        for belief in self.beliefs:
            if belief.end == NEVER and belief.lease.key == key:
                self._compare(belief)
        if before is not None and "queue_head" in before and "queue_head" not in after:
            gap = self.queue.head_cleared(process, key, params, before, {name: new[name] for name in takes})
            if gap is not None:
                self.wrong(f"{process.name}: {gap}")
        if before is None or before.get("queue_head") != after.get("queue_head"):
            self.queue.moved[key] = self.world.now
            heads = [
                each["queue_head"]["S"]
                for each in (before, after)
                if each is not None and "queue_head" in each
            ]
            leaves = ":after" in params["ExpressionAttributeValues"]
            if len(heads) == 2 and heads[0] < heads[1] and not takes and not leaves:
                self.wrong(
                    f"{process.name} raised the head of the queue of {key} from {heads[0]} to {heads[1]}"
                )
        if before is None or before.get("last_ticket") != after.get("last_ticket"):
            self.queue.drew[key] = self.world.now
            if "last_ticket" in after:
                self.queue.numbers[key, int(after["last_ticket"]["N"])] = self.world.now
        alone = before is not None and old and Kind.of(int(before["capacity"]["N"])) is not Kind.SEMAPHORE
        if alone and "capacity_pinned" in after and "capacity_pinned" not in (before or ()):
            self.wrong(f"{process.name} set the capacity of {key}, which somebody held alone")
        if before is not None and "capacity_pinned" in before and "capacity_pinned" not in after and new:
            self.wrong(f"{process.name} unset the capacity of {key}, which was held")
        if takes and int(after["available"]["N"]) < 0:
            self.wrong(f"{process.name} took slots of {key} that there were not: {after}")
        held = sum(int(holder["M"]["slots"]["N"]) for holder in new.values())
        if int(after["available"]["N"]) + held != int(after["capacity"]["N"]):
            self.wrong(f"the record of {key} does not add up: {after}")

    def _gone(
        self,
        process: Process,
        params: Mapping[str, Any],
        at: Place,
        holder: Mapping[str, Any],
        *,
        reclaimed: bool,
    ) -> None:
        """A lease was removed from the record: of that key, with that id."""
        _, name = at
        if process in self.people:
            self.broken[at] = self.world.now
        elif reclaimed:
            self.reclaimed[at] = self.world.now
            values = params["ExpressionAttributeValues"]
            if holder["version"] not in [value for alias, value in values.items() if "version" in alias]:
                self.wrong(
                    f"{process.name} reclaimed {name} without having seen its version {holder['version']}"
                )
        else:
            if not self._acts_for(process, name):
                self.wrong(f"{process.name} released the lease {name}, which is not its own")
            self.removed[at] = self.world.now
            if self.queue.sent > self.calm:
                self._undone.setdefault(name, self.world.now)
            told = int(params["ExpressionAttributeValues"][":last_freed_at"]["N"]) / 1000 - BEGIN
            if abs(told - self.world.now) < _ESTIMATES + self.apart:
                self.given_back[at] = self.world.now
                self._guarded.add(at)
            if holder["processes"]["M"]:
                self.wrong(f"{process.name} released {name} with {list(holder['processes']['M'])} inside")

    def _too_early(self, at: Place, holder: Mapping[str, Any], *, reclaimed: bool, by_hand: bool) -> None:
        """A lock with a `min_hold` is not handed on before its time, unless its holder died or was broken."""
        hold = float(_about(holder).get("hold", 0.0))
        dead = reclaimed and "cooling_down" not in holder
        if (
            not hold
            or dead
            or by_hand
            or self.skew is None
            or self.world.proxied  # it may go by the wall clock of a host
            or at[1] not in self._heard
            or at not in self.taken
        ):
            return
        earliest = self.taken[at][0] + hold - self.apart - _HOLD_TOLERANCE
        if self.world.now < earliest:
            self.wrong(f"{at[1]} was to be held until {earliest:.1f} at least, and was handed on")

    def _compare(self, belief: Belief) -> None:
        """A lease is not over by the record before it is over for those who believe in it: neither by what the record
        says, nor by when the heartbeats were stamped that it shows."""
        item = self.queue.items.get((belief.lease.key, LOCK_ENTRY))
        name = belief.lease.lease_id
        holder = item["holders"]["M"].get(name, {}).get("M", {}) if item is not None else {}
        if not holder or (belief.lease.key, name) in self.broken:
            return
        now = max(self.world.now, belief.begin)
        here = belief.process.here if belief.process is self.world.running else now
        until = max((end for begin, end in belief.spans() if begin <= max(now, here) < end), default=0.0)
        rate = belief.process.machine.rate
        stamps = self.stamped[belief.lease.key, name].items()
        counted = max((at + lasts / 1000 * (1 - MARGIN) / rate for lasts, at in stamps), default=0.0)
        if counted + 0.005 < until:
            self.wrong(
                f"{name} is good until {counted:.3f} by its last stamp, and is counted on until {until:.3f}"
            )
        if self.skew is None or "renewed_at" not in holder:
            return
        over = (int(holder["renewed_at"]["N"]) + int(holder["lease_ms"]["N"])) / 1000 - BEGIN + self.skew
        if over < until:
            self.wrong(f"{name} may be taken from {over:.3f} on, and is counted on until {until:.3f}")

    def _comes_back(self, at: Place, holder: Mapping[str, Any]) -> None:
        """A lease that was given back is not taken again by a write that was made before. (One that carries a wrong
        clock's time cannot be told from a later one.)"""
        stamped = self.world.drawn.get(holder["version"]["S"], -NEVER)
        taken = max(stamped, int(holder["acquired_at"]["N"]) / 1000 - BEGIN)
        if (
            at in self._guarded
            and self.skew is not None
            and taken < self.given_back.get(at, -NEVER) - _ESTIMATES - self.apart
        ):
            self.wrong(f"{at[1]} was given back at {self.given_back[at]:.3f}, and has come back")

    def _acts_for(self, process: Process, lease_id: str) -> bool:
        own = lease_id.removeprefix(WAITING_PREFIX)  # by which a process that waits shows that it lives
        return own in process.ids or process in self.acting[lease_id] or process in self.people

    def works(self, process: Process) -> bool:
        """Whether it works under a lease just now."""
        return any(belief.process is process and belief.left == NEVER for belief in self.beliefs)

    def _holds_now(self, belief: Belief) -> bool:
        return any(begin <= self.world.now < end for begin, end in belief.spans())

    # -- what is wrong with it --------------------------------------------------------------------------------

    def verify(self, items: Mapping[Place, Item]) -> None:
        """All that can be said when a history is over."""
        for mistake in self.world.mistakes:
            self.wrong(mistake)
        for immortal in self.queue.immortal():
            self.wrong(immortal)
        for belief in self.beliefs:
            self._told_in_time(belief)
        for key, capacity in self.capacities.items():
            self._exclusion(key)
            self._tokens([grant for grant in self.grants if grant.key == key], capacity)
        for (key, entry), item in items.items():
            if entry != LOCK_ENTRY:
                try:
                    waiter_record(item, "simulated")
                except (TypeError, ValueError) as damaged:
                    self.wrong(f"the entry {entry} in the queue of {key} is damaged: {damaged}")
                continue
            try:
                record = NativeFormat("locks").record(item, None)
            except LockRecordError as damaged:
                self.wrong(str(damaged))
                continue
            for name, holder in record.holders.items():
                undone = -NEVER if holder.cooling_down else self._undone.get(name, -NEVER)
                if self.taken.get((key, name), (NEVER, 0))[0] < undone - _UNDO:
                    self.wrong(f"{name} was given back at {undone:.3f}, and still holds {key}")

    def _told_in_time(self, belief: Belief) -> None:
        """Whether the holder was notified within a second, of those in which it ran, after its lease had run out."""
        assert isinstance(belief.lease.term, RecordedTerm)
        history, process = belief.lease.term.history, belief.process
        lost = min((at for at, until in history if until == -NEVER), default=NEVER)
        _, runs_out = max(((at, until) for at, until in history if at <= lost), key=lambda each: each[1])
        until = min(lost, belief.left, self.world.now)
        if runs_out + _NOTICE >= until:
            return
        stopped, counted = 0.0, runs_out
        for begin, end in sorted(process.stops):
            stopped += max(0.0, min(end, until) - max(begin, counted))
            counted = max(counted, end)
        if until - runs_out - stopped > _NOTICE:
            self.wrong(
                f"{belief.lease.lease_id} ran out at {runs_out:.3f}, and {process.name} was not told until {until:.3f}"
            )

    def _exclusion(self, key: str) -> None:
        uses: dict[str, list[tuple[float, float]]] = defaultdict(list)
        leases: dict[str, Lease] = {}
        for belief in self.beliefs:
            if belief.lease.key == key:
                name = belief.lease.lease_id
                leases[name] = belief.lease
                # A holder whose lease was broken overlaps with its successor until it notices. It is told so.
                excused = self.broken.get((key, name), NEVER)
                uses[name] += [(begin, min(end, excused)) for begin, end in belief.spans() if begin < excused]
        for name in uses:
            for gone, what in ((self.reclaimed, "reclaimed"), (self.removed, "released")):
                at = gone.get((key, name), -NEVER)
                for begin, end in uses[name]:
                    if begin <= at < end:
                        self.wrong(f"{name} was {what} at {at:.3f}, but counted on its lease until {end:.3f}")
        for spans in uses.values():
            for begin, _ in spans:
                using = [
                    other
                    for other, theirs in uses.items()
                    if any(since <= begin < until for since, until in theirs)
                ]
                # Who excludes is alone, whatever the others think.
                claimed = min(leases[other].capacity for other in using)
                # A capacity may be set below what is held; the last one that was granted fitted.
                _, granted = max(self.taken[key, other] for other in using)
                capacity = granted if 1 < claimed < SHARED else claimed
                if sum(leases[other].slots for other in using) > capacity:
                    self.wrong(
                        f"at {begin:.3f}, {' and '.join(sorted(using))} all worked under {key}, of {capacity}"
                    )
                    return

    def _tokens(self, grants: list[Grant], capacity: int) -> None:
        tokens: dict[int, str] = {}
        for grant in grants:
            if (other := tokens.setdefault(grant.token, grant.lease_id)) != grant.lease_id:
                self.wrong(
                    f"{other} and {grant.lease_id} were both given the token {grant.token} of {grant.key}"
                )
        # One whose lease was broken, or given back by another triggerer, before its caller was told of it has had a
        # successor already.
        gone = {**self.reclaimed, **self.given_back, **self.broken}
        told = [
            each
            for each in grants
            if each.valid and gone.get((each.key, each.lease_id), NEVER) > each.confirmed
        ]
        grants = sorted(told, key=lambda grant: grant.confirmed)
        for i, later in enumerate(grants):
            for earlier in grants[:i]:
                if earlier.lease_id == later.lease_id:
                    continue  # one grant, told to both of two triggerers
                follows = capacity == 1 or earlier.confirmed < later.begun
                if follows and earlier.token > later.token:
                    self.wrong(
                        f"{later.lease_id} was given the token {later.token} of {later.key}, "
                        f"after {earlier.lease_id} was given {earlier.token}"
                    )
