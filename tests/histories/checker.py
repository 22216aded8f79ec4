"""What must hold in every history, judged by true time, which none of its processes knows.

1. Never are more slots in use by those who still believe that they hold than there are; nor does the record ever say
   that a lease may be taken before those who believe in it have given up.
2. Fencing tokens strictly increase, also across a deletion by TTL.
3. Nobody releases, renews or reclaims a lease but its holder, or against the version that he saw.
4. In calm weather, a lock that somebody waits for is taken within a bound after its last sign of life.
5. Who keeps waiting gets his turn, once the trouble is over.
6. No record becomes unusable.
7. Of those who wait in line, nobody who is alive is overtaken, but by more urgent ones, and in the window that
   `protocol.line` names; and nobody counts as waiting who has gone.

All but 4 and 5 are judged here, from what was written and what was believed; those by `history.History`, which knows
when the weather is calm and who waits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from airflow_dynamo_lock.protocol.errors import LockRecordError
from airflow_dynamo_lock.protocol.limits import SHARED, WAITING
from airflow_dynamo_lock.protocol.model import Lease, Term, alike
from airflow_dynamo_lock.protocol.native import LOCK_ENTRY, NativeFormat
from airflow_dynamo_lock.protocol.records import WAITER_ENTRY
from tests.histories.dynamodb import Place
from tests.histories.expressions import Item
from tests.histories.world import BEGIN, Process, World

NEVER = float("inf")
# For how long after a sign of life, its own or its process's, no clock makes a waiter dead; seconds.
_ALIVE = 7.0
# By how much a good estimate of the server's time may be off: its servers' clocks, the header's second, two for two
# writers to differ.
_ESTIMATES = 10.0


class RecordedTerm(Term):
    """A term that remembers what it was at any time.

    :ivar history: from when on it was to last until when, both in true time.
    """

    def __init__(self, world: World, now: Callable[[], float]) -> None:
        super().__init__(now)
        assert world.running is not None
        self._process = world.running
        self.history: list[tuple[float, float]] = []

    def renewed(self, sent_at: float, lease_ms: int) -> None:
        super().renewed(sent_at, lease_ms)
        if not self.lost:
            self.history.append((self._process.here, self._process.true(self.until)))

    def lose(self, why: str) -> None:
        super().lose(why)
        self.history.append((self._process.here, -NEVER))


@dataclass
class Belief:
    """Somebody works under a lease, from `begin` to `end` at most, for as long as its term lasts."""

    process: Process
    lease: Lease
    begin: float
    end: float = NEVER

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
    """A grant of which its caller heard.

    :ivar begun: when it was asked for.
    :ivar heard: when the caller was told.
    :ivar valid: whether the lease was still good then.
    """

    key: str
    lease_id: str
    token: int
    begun: float
    heard: float
    valid: bool


@dataclass
class LineChecker:
    """Whether those who wait are granted in their order, and none of them waits for ever after it has gone.

    :ivar items: what the table holds.
    :ivar waiting: who waits; by the name in ``about`` of its claims.
    :ivar began, ended: when somebody last began, and ceased, to wait.
    :ivar sent, sender: when the request was sent that is carried out just now, and by which task.
    """

    world: World
    items: Mapping[Place, Item] = field(default_factory=dict)
    waiting: set[str] = field(default_factory=set)
    began: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    sent: float = 0.0
    sender: object = None
    _looks: dict[tuple[object, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    # From when on each was there to be seen, and until when it counts.
    _signs: dict[Place, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    _stands: dict[Place, float] = field(default_factory=dict)
    _places: dict[tuple[str, str], tuple[str, float]] = field(default_factory=dict)

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
            self._looks[sender, params["ExpressionAttributeValues"][":key"]["S"]].append(sent)

    def written(self, key: str, entry: str, after: Item | None) -> None:
        """A sign of life of a waiter, or of its process: as old as it says, should it have arrived late."""
        if after is None:
            self._signs.pop((key, entry), None)
            self._stands.pop((key, entry), None)
            return
        self._stands.setdefault((key, entry), self.world.now)
        if after.get("holders", {}).get("M") == {}:
            return  # a process that says good-bye, or whose good-bye arrives late, gives no sign of life
        if "about" in after:
            self._places[key, _about(after)["actor"]] = entry, self.world.now
        at = self.world.now
        for sign in (after, *(each["M"] for each in after.get("holders", {}).get("M", {}).values())):
            if "renewed_at" in sign:
                at = min(at, int(sign["renewed_at"]["N"]) / 1000 - BEGIN)
        self._signs[key, entry].append((self.world.now, at + _ALIVE))

    def overtaken(self, key: str, name: str, before: Item | None, after: Item) -> str | None:
        """Who, alive and in sight, should have had the lock that was just taken."""
        about = _about(after["holders"]["M"][name]["M"])
        if before is None or "first" not in before or about.get("fair") != "yes":
            return None
        look = max((at for at in self._looks[self.sender, key] if at <= self.sent), default=None)
        left = int(after["available"]["N"])
        mine, placed = self._places.get((key, about["actor"]), (None, 0.0))
        if placed < self.began.get(about["actor"], 0.0) <= self.sent:
            mine = None  # of an earlier time
        for (_, entry), item in self._in_line(key):
            their, place = _about(item), entry.removeprefix(WAITER_ENTRY)
            if their["actor"] == about["actor"] or (mine is not None and entry > mine):
                return None
            if (
                their["actor"] not in self.waiting
                or place
                < before["first"]["S"]  # passed over while it was on its way to its place: it is the next
                or item["lease_id"]["S"]
                in before["holders"]["M"]  # it has the lock, and is about to leave the line
                or look is None
                or self._stands[key, entry] > look  # on its way at that time
                or not self._alive_since(key, entry, item, look)
            ):
                continue
            slots, capacity = int(item["slots"]["N"]), int(item["capacity"]["N"])
            left -= slots
            if left < 0 or not alike(capacity, int(after["capacity"]["N"])):
                return f"{their['actor']} in {place}"
        return None

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
            (at, item) for at, item in self.items.items() if at[0] == key and at[1].startswith(WAITER_ENTRY)
        )

    def _alive_since(self, key: str, entry: str, item: Item, since: float) -> bool:
        """Whether nobody could have taken it for dead since then, by any clock."""
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
    :ivar most: the largest capacity that each lock has had.
    :ivar written: when each key was last written to, true time.
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
    written: dict[str, float] = field(default_factory=dict)
    most: dict[str, int] = field(default_factory=dict)
    line: LineChecker = field(init=False)

    def __post_init__(self) -> None:
        self.line = LineChecker(self.world)

    def wrong(self, what: str) -> None:
        self.world.story(f"VIOLATION: {what}")
        self.violations.append(what)

    # -- what happens -----------------------------------------------------------------------------------------

    def term(self, now: Callable[[], float]) -> Term:
        """To be used in place of `Term`."""
        return RecordedTerm(self.world, now)

    def heard(self, process: Process, lease: Lease, begun: float) -> None:
        """A caller was told of a grant."""
        assert isinstance(lease.term, RecordedTerm)
        here = process.here
        valid = lease.term.lost is None and process.true(lease.term.until) > here
        self.grants.append(Grant(lease.key, lease.lease_id, lease.token, begun, here, valid))
        self.world.story(f"holds {lease.key} as {lease.lease_id}, token {lease.token}", process)

    @contextmanager
    def believing(self, process: Process, lease: Lease) -> Iterator[None]:
        """The process works under the lease for the length of the block, or until it is killed in it."""
        belief = Belief(process, lease, process.here)
        self.beliefs.append(belief)
        self.world.story(f"works under {lease.lease_id}", process)
        try:
            yield
        finally:
            if process.alive:  # else it is cleared away, long after its death
                belief.end = process.here
                self.world.story(f"works no more under {lease.lease_id}", process)

    def killed(self, process: Process) -> None:
        """The process is dead from now on."""
        self.world.story("is dead", process)
        self.line.waiting.discard(process.name)
        for belief in self.beliefs:
            if belief.process is process:
                belief.end = min(belief.end, self.world.now)

    def deleted(self, at: Place) -> None:
        """TTL has removed an item."""
        key, entry = at
        if entry != LOCK_ENTRY:
            return
        self.world.story(f"{key} is deleted by TTL")
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
            self.line.written(key, item["entry"]["S"], after)
            return
        if key.startswith(WAITING):
            self.line.written(key, LOCK_ENTRY, after)
        if after is None:
            self.wrong(f"{process.name} deleted the record of {key}")
            return
        self.written[key] = self.world.now
        old: Mapping[str, Any] = before["holders"]["M"] if before else {}
        new: Mapping[str, Any] = after["holders"]["M"]
        takes = [name for name in new if name not in old]
        for name, holder in old.items():
            if name not in new:
                self._gone(process, params, (key, name), holder["M"], taken=bool(takes))
            elif new[name] is not holder and not self._acts_for(process, name):
                self.wrong(f"{process.name} changed the lease {name}, which is not its own")
        for name in takes:
            self._comes_back((key, name), new[name]["M"])
            if (overtaken := self.line.overtaken(key, name, before, after)) is not None:
                self.wrong(f"{process.name} took {key} as {name}, before {overtaken}, which came first")
            if not self._acts_for(process, name):
                self.wrong(f"{process.name} took the lease {name}, which is not its own")
        self._last(new)
        self.most[key] = max(self.most.get(key, 0), int(after["capacity"]["N"]))
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
        taken: bool,
    ) -> None:
        """A lease was removed from the record: of that key, with that id."""
        _, name = at
        if process in self.people:
            self.broken[at] = self.world.now
        elif taken:
            self.reclaimed[at] = self.world.now
            values = params["ExpressionAttributeValues"]
            if holder["version"] not in [value for alias, value in values.items() if "version" in alias]:
                self.wrong(
                    f"{process.name} reclaimed {name} without having seen its version {holder['version']}"
                )
        else:
            if not self._acts_for(process, name):
                self.wrong(f"{process.name} released the lease {name}, which is not its own")
            told = int(params["ExpressionAttributeValues"][":vacated_at"]["N"]) / 1000 - BEGIN
            if abs(told - self.world.now) < _ESTIMATES:
                self.given_back[at] = self.world.now
            if holder["inside"]["M"]:
                self.wrong(f"{process.name} released {name} with {list(holder['inside']['M'])} inside")

    def _last(self, holders: Mapping[str, Any]) -> None:
        """A lease is not over by the record before it is over for those who believe in it."""
        if self.skew is None:
            return
        for belief in self.beliefs:
            name = belief.lease.lease_id
            if belief.end == NEVER and name in holders and "renewed_at" in holders[name]["M"]:
                holder = holders[name]["M"]
                over = (
                    (int(holder["renewed_at"]["N"]) + int(holder["lease_ms"]["N"])) / 1000 - BEGIN + self.skew
                )
                until = max(
                    (end for begin, end in belief.spans() if begin <= self.world.now < end), default=0.0
                )
                if over < until:
                    self.wrong(f"{name} may be taken from {over:.3f} on, and is counted on until {until:.3f}")

    def _comes_back(self, at: Place, holder: Mapping[str, Any]) -> None:
        """A lease that was given back is not taken again by a write that was made before. (One that carries a wrong
        clock's time cannot be told from a later one.)"""
        taken = int(holder["acquired_at"]["N"]) / 1000 - BEGIN
        if self.skew is not None and taken < self.given_back.get(at, -NEVER) - _ESTIMATES:
            self.wrong(f"{at[1]} was given back at {self.given_back[at]:.3f}, and has come back")

    def _acts_for(self, process: Process, lease_id: str) -> bool:
        own = lease_id.removeprefix(WAITING)  # by which a process that waits shows that it lives
        return own in process.ids or process in self.acting[lease_id] or process in self.people

    def works(self, process: Process) -> bool:
        """Whether it works under a lease just now."""
        return any(belief.process is process and belief.end == NEVER for belief in self.beliefs)

    def _holds_now(self, belief: Belief) -> bool:
        return any(begin <= self.world.now < end for begin, end in belief.spans())

    # -- what is wrong with it --------------------------------------------------------------------------------

    def verify(self, items: Mapping[Place, Item]) -> None:
        """All that can be said when a history is over."""
        for mistake in self.world.mistakes:
            self.wrong(mistake)
        for immortal in self.line.immortal():
            self.wrong(immortal)
        for key, capacity in self.capacities.items():
            self._exclusion(key)
            self._tokens([grant for grant in self.grants if grant.key == key], capacity)
        for (_, entry), item in items.items():
            if entry != LOCK_ENTRY:
                continue
            try:
                NativeFormat("locks").record(item, None)
            except LockRecordError as damaged:
                self.wrong(str(damaged))

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
            at = self.reclaimed.get((key, name), -NEVER)
            for begin, end in uses[name]:
                if begin <= at < end:
                    self.wrong(f"{name} was reclaimed at {at:.3f}, but counted on its lease until {end:.3f}")
        for spans in uses.values():
            for begin, _ in spans:
                using = [
                    other
                    for other, theirs in uses.items()
                    if any(since <= begin < until for since, until in theirs)
                ]
                # Who excludes is alone, whatever the others think.
                claimed = min(leases[other].capacity for other in using)
                capacity = self.most.get(key, 0) if 1 < claimed < SHARED else claimed
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
            each for each in grants if each.valid and gone.get((each.key, each.lease_id), NEVER) > each.heard
        ]
        grants = sorted(told, key=lambda grant: grant.heard)
        for i, later in enumerate(grants):
            for earlier in grants[:i]:
                if earlier.lease_id == later.lease_id:
                    continue  # one grant, told to both of two triggerers
                follows = capacity == 1 or earlier.heard < later.begun
                if follows and earlier.token > later.token:
                    self.wrong(
                        f"{later.lease_id} was given the token {later.token} of {later.key}, "
                        f"after {earlier.lease_id} was given {earlier.token}"
                    )
