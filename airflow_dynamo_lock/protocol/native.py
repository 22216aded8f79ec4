"""Our own table format: the record of a lock, and each conditional write on it.

The record of the lock `key` is the item ``{key, entry: "lock"}``; those who wait for it stand beside it, under the same
key, as ``{key, entry: "waiter/…"}``. Every write to the record is one `UpdateItem` whose condition is the whole of its
safety (rule R1): it names what must still be true, never what was read some time before. Every acquire pushes
``expires_at`` ahead, and so does every other write whose sender knows the server's time, so that DynamoDB's TTL never
comes near a record in use: no lease, and no `min_hold`, is longer than a record is kept.

A refused write asks for the item as it stands (``ALL_OLD``), so a loser learns in the same request who won (rule R2).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from airflow_dynamo_lock.protocol.attributes import encode
from airflow_dynamo_lock.protocol.effects import Operation, Reply, Request, Stamp, T
from airflow_dynamo_lock.protocol.limits import KEPT, SHARED, checked_key
from airflow_dynamo_lock.protocol.model import Change, Claim, Holder, LockRecord, Waiter
from airflow_dynamo_lock.protocol.places import front_of, mark_after, mark_at, next_number, number_of
from airflow_dynamo_lock.protocol.reading import TableReads
from airflow_dynamo_lock.protocol.records import ATTRIBUTES, WAITER_ENTRY, lock_record, waiter_record

PARTITION_KEY = "key"
SORT_KEY = "entry"
TTL_ATTRIBUTE = "expires_at"
LOCK_ENTRY = "lock"

#: How long an idle record outlives its last write, so that its fencing token is remembered (rule R10).
RETENTION_MS = KEPT * 1000

# In `seed`: whether the time that the record's first token was taken from has been compared with the server's. It may
# come from a host's clock, or from an old estimate; until it is checked, it may be far off, but nobody has heard of a
# token that is.
GUESSED, CHECKED = "guessed", "checked"

#: By how much the server's time, as two writers estimate it, may differ, milliseconds: the ``Date`` header has whole
# seconds, and one request more now and then does no harm.
OVERTAKEN_MS = 2000

#: How far behind a server's clock a process may estimate it, milliseconds. A record may be deleted when its last token
#: is older than this and `max_clock_skew` together: the next token is taken from somebody else's estimate of the time.
ESTIMATE_BEHIND_MS = 3_000

# A write that takes the lock may arrive after its sender has taken it, by a second attempt, and given it back, and must
# not take it once more then. So it succeeds only if no holder has gone since it was stamped, or none but the one that
# its sender has seen to be gone.
_NOT_OVERTAKEN = (
    "(attribute_not_exists(#vacated_at) OR #vacated_at <= :no_newer OR #vacated_at = :seen_vacated)"
)

# A holder that asked for it is not removed before its time (`Claim.min_hold_ms`). A process that has had no answer yet
# knows only its host's clock, which may be ahead: the refusal tells it the server's time.
_NOT_HELD_FOR_A_WHILE = "attribute_not_exists(#holders.#me.#hold_until)"
_HELD_LONG_ENOUGH = f"({_NOT_HELD_FOR_A_WHILE} OR #holders.#me.#hold_until <= :now)"

_NOT_ENDING = " AND attribute_not_exists(#holders.#me.#ending)"

# The mark is not raised: there may be somebody before it.
_LOWERS = " AND (attribute_not_exists(#first) OR #first >= :front)"

#: Dead holders that one write removes, at most. DynamoDB takes expressions of 4,096 bytes.
MOST_CLEARED = 40

_NONE = Change()


# Every attribute is written as a placeholder: several of the names are DynamoDB's reserved words, or may become so.
_PATHS = {f"#{name}": name for name in ATTRIBUTES}


@dataclass(frozen=True)
class Turn:
    """What a write that takes a lock says of the line of those who wait (`protocol.line`).

    :ivar condition: what must hold of it.
    :ivar next: who is first from then on: a place; None if nobody, ``""`` if that does not change.
    :ivar values: what the condition compares with.
    """

    condition: str = ""
    next: str | None = ""
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def set_first(self) -> str:
        return ", #first = :next_first" if self.next else ""

    @property
    def remove(self) -> list[str]:
        return ["#first"] if self.next is None else []

    @property
    def and_condition(self) -> str:
        return f" AND {self.condition}" if self.condition else ""


#: There is no line: for those who come new and do not overtake.
NO_LINE = Turn("attribute_not_exists(#first)")
#: For those who do not mind.
ANY_LINE = Turn()


@dataclass(frozen=True)
class NativeFormat(TableReads):
    """Builds requests for one lock table and reads its items."""

    table: str
    service: str = field(default="dynamodb", init=False)
    keys: tuple[tuple[str, str, str], ...] = field(
        default=((PARTITION_KEY, "HASH", "S"), (SORT_KEY, "RANGE", "S")), init=False
    )
    ttl_attribute: str = field(default=TTL_ATTRIBUTE, init=False)
    has_lines: bool = field(default=True, init=False)

    def checked_key(self, key: str) -> str:
        """A lock's name: `limits.checked_key`."""
        return checked_key(key)

    def checked_claim(self, claim: Claim) -> Claim:
        """Whatever can be claimed, this format has."""
        return claim

    def checked_set(self) -> None:
        """Several locks can be taken together."""

    def checked_capacity(self) -> None:
        """A lock may have any capacity."""

    def carry_out(self, operation: Operation[T]) -> Operation[T]:
        """All of its requests are DynamoDB's own."""
        return operation

    # -- writes -------------------------------------------------------------------------------------------------

    def take_idle(
        self, claim: Claim, stamp: Stamp, seen: LockRecord | None = None, turn: Turn = NO_LINE
    ) -> Request:
        """Take a lock that nobody holds, or that never was; `seen` if it was looked at."""
        # A record without `seed` was written by somebody else. It has to have been seen: then it has a token, and we do
        # not seed one.
        foreign = seen is not None and seen.seed is None
        return self._write(
            claim.key,
            "SET #holders = :holders, #available = :left, #capacity = :capacity, "
            "#token = if_not_exists(#token, :now) + :one, #seed = if_not_exists(#seed, :state), "
            f"#expires_at = :expires_at{_data(claim.data)}{turn.set_first}"
            + _remove([*turn.remove, *_no_data(claim.data)]),
            # The size guards a record whose counter somebody damaged: held slots are never overwritten. The types keep
            # off what `record` could not read, so that a damaged record is left as it is.
            ("" if claim.only_existing else "attribute_not_exists(#key) OR ")
            + "(attribute_type(#holders, :map) AND attribute_type(#capacity, :number) AND "
            "attribute_type(#token, :number) AND (attribute_not_exists(#data) OR attribute_type(#data, :map)) AND "
            "(attribute_not_exists(#tickets) OR attribute_type(#tickets, :number)) AND "
            "(attribute_not_exists(#first) OR attribute_type(#first, :text)) AND "
            f"{'attribute_not_exists(#seed)' if foreign else 'attribute_type(#seed, :text)'} AND "
            f"#available = #capacity AND size(#holders) = :zero AND {_capacity_may_be(seen)} AND "
            f"{_NOT_OVERTAKEN}{turn.and_condition})",
            {
                **_vacated(stamp, seen),
                **_turn_values(turn),
                ":holders": {claim.lease_id: holder_values(claim, stamp)},
                ":left": claim.capacity - claim.slots,
                ":capacity": claim.capacity,
                ":now": stamp.best_ms,
                ":state": CHECKED if foreign or stamp.undated else GUESSED,
                ":one": 1,
                ":zero": 0,
                ":map": "M",
                ":number": "N",
                ":text": "S",
                ":expires_at": _expiry(stamp, claim.lease_ms),
                ":data": claim.data,
            },
        )

    def take_room(
        self, claim: Claim, stamp: Stamp, seen: LockRecord, turn: Turn = NO_LINE, leave: int = 0
    ) -> Request:
        """Take free slots of a lock that others hold too, and `leave` as many for those who are to have them first."""
        return self._write(
            claim.key,
            "SET #holders.#me = :me, #available = #available - :slots, #token = #token + :one, "
            f"#expires_at = :expires_at{_data(claim.data)}{turn.set_first}"
            + _remove([*turn.remove, *_no_data(claim.data)]),
            "#available >= :need AND #capacity = :capacity AND attribute_not_exists(#holders.#me) AND "
            + _NOT_OVERTAKEN
            + turn.and_condition,
            {
                **_vacated(stamp, seen),
                **_turn_values(turn),
                ":me": holder_values(claim, stamp),
                ":slots": claim.slots,
                ":need": claim.slots + leave,
                ":capacity": claim.capacity,
                ":one": 1,
                ":expires_at": _expiry(stamp, claim.lease_ms),
                ":data": claim.data,
            },
            me=claim.lease_id,
        )

    def reclaim(
        self,
        claim: Claim,
        record: LockRecord,
        dead: Sequence[Holder],
        stamp: Stamp,
        turn: Turn = NO_LINE,
        leave: int = 0,
    ) -> Request:
        """Take the place of dead holders, in the same write, and `leave` slots for those who are to have them first.
        Conditional on each one's *version*: one that beat in the meantime is alive and wins (rule R3).

        :param dead: `MOST_CLEARED` at most.
        """
        names = {f"dead{i}": holder.lease_id for i, holder in enumerate(dead)}
        # A reader that removes dead readers does not continue their work.
        takes_over = took_over(dead) and not claim.capacity == record.capacity == SHARED
        values: dict[str, Any] = {
            **_turn_values(turn),
            ":me": holder_values(claim, stamp, took_over=takes_over),
            ":one": 1,
            ":capacity": claim.capacity,
            ":vacated_at": stamp.best_ms,
            ":expires_at": _expiry(stamp, claim.lease_ms),
            ":data": claim.data,
        }
        values |= {f":version{i}": holder.version for i, holder in enumerate(dead)}
        conditions = _unchanged(dead)
        if len(dead) == len(record.holders):
            # Nobody is left, so the counters start afresh, and the capacity may be another.
            conditions.append(f"size(#holders) = :holders AND {_capacity_may_be(record)}")
            counters = "#available = :left, #capacity = :capacity"
            values |= {":holders": len(dead), ":left": claim.capacity - claim.slots}
        else:
            conditions.append("#capacity = :capacity AND #available >= :need")
            counters = "#available = #available + :net"
            net = sum(holder.slots for holder in dead) - claim.slots
            # Which may be less than none: there may be fewer slots than are held (`set_capacity`).
            values |= {":net": net, ":need": leave - net}
        return self._write(
            claim.key,
            f"SET #holders.#me = :me, {counters}, #token = #token + :one, #vacated_at = :vacated_at, "
            f"#expires_at = :expires_at{_data(claim.data)}{turn.set_first}"
            + _remove([*(f"#holders.#{name}" for name in names), *turn.remove, *_no_data(claim.data)]),
            " AND ".join([*conditions, "attribute_not_exists(#holders.#me)"]) + turn.and_condition,
            values,
            me=claim.lease_id,
            **names,
        )

    def clear(self, key: str, dead: Sequence[Holder], stamp: Stamp) -> Request:
        """Remove dead holders, where there are too many for `reclaim`. Conditional on each one's version, as there.

        :param dead: `MOST_CLEARED` at most.
        """
        names = {f"dead{i}": holder.lease_id for i, holder in enumerate(dead)}
        return self._write(
            key,
            "SET #available = #available + :slots, #vacated_at = :vacated_at, #expires_at = :expires_at"
            + _remove([f"#holders.#{name}" for name in names]),
            " AND ".join(_unchanged(dead)),
            {
                ":slots": sum(holder.slots for holder in dead),
                ":vacated_at": stamp.best_ms,
                ":expires_at": _expiry(stamp, 0),
                **{f":version{i}": holder.version for i, holder in enumerate(dead)},
            },
            **names,
        )

    def heartbeat(
        self, key: str, lease_id: str, lease_ms: int, stamp: Stamp, seen: str | None = None
    ) -> Request:
        """Show that the holder lives."""
        return self._sign_of_life(key, lease_id, lease_ms, stamp, seen)

    def heartbeat_unless_ending(
        self,
        key: str,
        lease_id: str,
        lease_ms: int,
        stamp: Stamp,
        seen: str | None = None,
        change: Change = _NONE,
    ) -> Request:
        """Show that the holder lives, while the lease has not been abandoned."""
        longer = change.lease_ms is not None
        return self._sign_of_life(
            key,
            lease_id,
            lease_ms,
            stamp,
            seen,
            (", #holders.#me.#lease_ms = :lease_ms" if longer else "") + _data(change.data),
            _NOT_ENDING + (" AND #holders.#me.#lease_ms <= :lease_ms" if longer else ""),
            values={":lease_ms": change.lease_ms, ":data": change.data},
            remove=_no_data(change.data),
        )

    def take_again(self, claim: Claim, mine: Holder, stamp: Stamp) -> Request:
        """Go on holding what an earlier write of ours took (rule R5). It gets a token of its own: what the earlier
        one was given cannot be told once others took slots as well, and nobody has heard of it."""
        return self._sign_of_life(
            claim.key,
            claim.lease_id,
            claim.lease_ms,
            stamp,
            mine.version,
            ", #token = #token + :one, #holders.#me.#acquired_at = :acquired_at" + _hold(claim),
            " AND #holders.#me.#slots = :slots AND #capacity = :capacity",
            values={
                ":one": 1,
                ":acquired_at": stamp.best_ms,
                ":hold_until": stamp.best_ms + claim.min_hold_ms,
                ":slots": claim.slots,
                ":capacity": claim.capacity,
            },
        )

    def put_right(self, claim: Claim, seen: LockRecord, token: int, stamp: Stamp) -> Request:
        """Replace the times, and the token seeded from one, of a grant whose clock turned out to be wrong (R3, R10)."""
        return self._sign_of_life(
            claim.key,
            claim.lease_id,
            claim.lease_ms,
            stamp,
            seen.holders[claim.lease_id].version,
            ", #token = :token, #seed = :checked, #holders.#me.#acquired_at = :acquired_at" + _hold(claim),
            " AND #token = :seen_token",
            values={
                ":hold_until": stamp.best_ms + claim.min_hold_ms,
                ":token": token,
                ":seen_token": seen.token,
                ":checked": CHECKED,
                ":acquired_at": stamp.best_ms,
            },
        )

    def enter(
        self, key: str, lease_id: str, process: str, lease_ms: int, stamp: Stamp, seen: str | None = None
    ) -> Request:
        """Note that a guarded process is inside, and beat."""
        return self._sign_of_life(
            key,
            lease_id,
            lease_ms,
            stamp,
            seen,
            ", #holders.#me.#inside.#process = :entered",
            _NOT_ENDING,
            values={":entered": stamp.best_ms},
            process=process,
        )

    def leave(self, key: str, lease_id: str, process: str, lease_ms: int, stamp: Stamp) -> Request:
        """Note that a guarded process has left."""
        expires_at = "SET #expires_at = :expires_at " if stamp.server_ms is not None else ""
        return self._write(
            key,
            f"{expires_at}REMOVE #holders.#me.#inside.#process",
            "attribute_exists(#holders.#me)",
            {":expires_at": _expiry(stamp, lease_ms)},
            me=lease_id,
            process=process,
        )

    def release(self, key: str, lease_id: str, slots: int, stamp: Stamp, *, heard: bool) -> Request:
        """Give the slots back, if nobody is inside any more (rule R8).

        :param heard: its holder was told of the grant, so its token has been compared with the server's time.
        """
        proven = ", #seed = :checked" if heard and stamp.server_ms is not None else ""
        held = _HELD_LONG_ENOUGH if stamp.answered else _NOT_HELD_FOR_A_WHILE
        return self._remove(
            key,
            lease_id,
            slots,
            stamp,
            proven,
            f" AND size(#holders.#me.#inside) = :zero AND {held}",
            {":zero": 0, ":checked": CHECKED, ":now": stamp.best_ms},
        )

    def break_(self, key: str, holder: Holder, stamp: Stamp) -> Request:
        """Take a lease away from its holder, whoever is inside. For people."""
        return self._remove(key, holder.lease_id, holder.slots, stamp)

    def abandon(
        self, key: str, lease_id: str, grace_ms: int, stamp: Stamp, seen: str | None = None
    ) -> Request:
        """Shorten a lease to a grace and let nobody enter any more (rule R8). Only once: a second write would
        lengthen what the first one has shortened."""
        return self._sign_of_life(
            key,
            lease_id,
            grace_ms,
            stamp,
            seen,
            ", #holders.#me.#ending = :ending, #holders.#me.#lease_ms = :lease_ms",
            _NOT_ENDING,
            values={":ending": True, ":lease_ms": grace_ms},
        )

    def forget(self, key: str, latest_token: int | None) -> Request:
        """Delete the record of a lock without holders and waiters.

        :param latest_token: delete it only if its last token is at most this; None deletes it with any token.
        """
        alone = "#available = #capacity AND size(#holders) = :zero AND attribute_not_exists(#first)"
        if latest_token is not None:
            alone += " AND #token <= :latest"
        write = self._write(key, "", alone, {":zero": 0, ":latest": latest_token})
        left_out = ("UpdateExpression", "ReturnValues")
        return Request(
            "DeleteItem", {name: value for name, value in write.params.items() if name not in left_out}
        )

    def rest(self, key: str, holder: Holder, rest_ms: int, stamp: Stamp) -> Request:
        """End a lease that is to be held for a while yet (`Claim.min_hold_ms`): it runs out when that is over."""
        return self._sign_of_life(
            key,
            holder.lease_id,
            rest_ms,
            stamp,
            holder.version,
            ", #holders.#me.#ending = :true, #holders.#me.#resting = :true, #holders.#me.#lease_ms = :lease_ms",
            " AND size(#holders.#me.#inside) = :zero",
            values={":true": True, ":lease_ms": rest_ms, ":zero": 0},
        )

    def set_capacity(self, key: str, capacity: int | None, seen: LockRecord, stamp: Stamp) -> Request:
        """Give a semaphore another capacity, held or not, which counts from now on; or, with None, let the claims
        decide again, if nobody holds it: theirs may be another."""
        if capacity is None:
            return self._write(
                key,
                "SET #expires_at = :expires_at REMOVE #fixed",
                "attribute_exists(#fixed) AND size(#holders) = :zero",
                {":expires_at": _expiry(stamp, 0), ":zero": 0},
            )
        return self._write(
            key,
            "SET #capacity = :capacity, #available = #available + :more, #fixed = :true, #expires_at = :expires_at",
            # Whoever holds it as a plain or as a shared lock does not count on sharing it like this. Their holders
            # would have changed the capacity.
            "#capacity = :seen_capacity AND attribute_type(#available, :number)"
            + ("" if seen.holders else " AND size(#holders) = :zero"),
            {
                ":capacity": capacity,
                ":more": capacity - seen.capacity,
                ":seen_capacity": seen.capacity,
                ":true": True,
                ":zero": 0,
                ":number": "N",
                ":expires_at": _expiry(stamp, 0),
            },
        )

    def found(self, key: str, capacity: int, stamp: Stamp) -> Request:
        """Make the record of a lock that was never used, with a capacity that counts."""
        return self._write(
            key,
            "SET #holders = :holders, #available = :capacity, #capacity = :capacity, #fixed = :true, #token = :now, "
            "#seed = :state, #expires_at = :expires_at",
            "attribute_not_exists(#key)",
            {
                ":holders": {},
                ":capacity": capacity,
                ":true": True,
                ":now": stamp.best_ms,
                ":state": GUESSED,
                ":expires_at": _expiry(stamp, 0),
            },
        )

    # -- the line of those who wait -------------------------------------------------------------------------------

    def draw(self, key: str, priority: int, seen: LockRecord, stamp: Stamp) -> Request:
        """Draw the next number, and make sure that nobody comes in between before its place is taken."""
        front = front_of(priority, next_number(seen, stamp))
        # To lower the mark is always safe: it says that nobody stands before it. Where it is low enough already, it has
        # to be so still when the number is drawn; and where it is not, nobody may have lowered it further meanwhile.
        lower = seen.first is None or seen.first > front
        return self._write(
            key,
            f"SET #tickets = {'#tickets + :one' if seen.tickets else ':number'}"
            + (", #first = :front" if lower else ""),
            f"attribute_exists(#key) AND attribute_{'exists' if seen.tickets else 'not_exists'}(#tickets)"
            + (_LOWERS if lower else " AND #first <= :front"),
            {":one": 1, ":number": next_number(seen, stamp), ":front": front},
        )

    def lower(self, key: str, place: str) -> Request:
        """Say that somebody stands in line at `place`, whom others took for gone."""
        return self._write(
            key,
            "SET #first = :place",
            "attribute_exists(#key) AND (attribute_not_exists(#first) OR #first > :place)",
            {":place": place},
        )

    def unmark(self, key: str, place: str) -> Request:
        """Say that nobody stands in line, after the only one has left his place."""
        return self._mark_left(key, place, "REMOVE #first", " AND #tickets = :number")

    def move_mark(self, key: str, place: str) -> Request:
        """Say that nobody stands before the places behind that one, which was the first, and has been left."""
        return self._mark_left(key, place, "SET #first = :after", "")

    def _mark_left(self, key: str, place: str, update: str, condition: str) -> Request:
        return self._write(
            key,
            update,
            # Who has come to stand before it has lowered the mark.
            f"#first >= :front AND #first <= :place{condition}",
            {
                ":front": mark_at(place),
                ":place": place,
                ":after": mark_after(place),
                ":number": number_of(place),
            },
        )

    def stand(self, waiter: Waiter) -> Request:
        """Take a place in line."""
        item = {
            "key": waiter.key,
            "entry": WAITER_ENTRY + waiter.place,
            **{name: getattr(waiter, name) for name in _WAITER_PLAIN},
            "since": waiter.since_ms,
            # DynamoDB deletes it some day, should nobody else.
            "expires_at": (waiter.since_ms + RETENTION_MS) // 1000,
            **{name: value for name, value in _waiter_optional(waiter).items() if value},
        }
        encoded = {name: encode(value) for name, value in item.items()}
        return Request("PutItem", {"TableName": self.table, "Item": encoded})

    def hand_place(self, key: str, place: str, process: str, stamp: Stamp) -> Request:
        """Leave a place to another process, which may soon go on in it; if none does, it is a dead one's.

        :param process: whose it is. One that goes on in it already is not disturbed.
        """
        stamped = stamp.server_ms is not None
        return self._write(
            key,
            "SET #version = :version"
            + (", #renewed_at = :renewed_at" if stamped else "")
            + " REMOVE #process"
            + ("" if stamped else ", #renewed_at"),
            "#process = :process",
            {":version": stamp.version, ":renewed_at": stamp.server_ms, ":process": process},
            entry=WAITER_ENTRY + place,
        )

    def step_out(self, key: str, place: str) -> Request:
        """Leave the line."""
        item_key = {PARTITION_KEY: encode(key), SORT_KEY: encode(WAITER_ENTRY + place)}
        return Request("DeleteItem", {"TableName": self.table, "Key": item_key})

    def line(self, key: str, limit: int | None, cursor: Mapping[str, Any] | None) -> Request:
        """Read a lock, consistently, and then those who wait for it, in their order; from `cursor` (the last page's
        ``LastEvaluatedKey``) on."""
        values = {":key": key, ":lock": LOCK_ENTRY, ":last": WAITER_ENTRY + _LAST_PLACE}
        params: dict[str, Any] = {
            "TableName": self.table,
            "KeyConditionExpression": "#key = :key AND #entry BETWEEN :lock AND :last",
            "ExpressionAttributeNames": {"#key": PARTITION_KEY, "#entry": SORT_KEY},
            "ExpressionAttributeValues": {name: encode(value) for name, value in values.items()},
            "ConsistentRead": True,
            **({"Limit": limit} if limit else {}),
            **({"ExclusiveStartKey": cursor} if cursor else {}),
        }
        return Request("Query", params)

    def lock_in(self, reply: Reply) -> LockRecord | None:
        """The lock in the answer to a `line`, from its beginning."""
        for item in reply.output.get("Items", ())[:1]:
            if item[SORT_KEY] == encode(LOCK_ENTRY):
                return self.record(item, reply.server_ms)
        return None

    def waiters(self, output: Mapping[str, Any]) -> list[Waiter]:
        """Those in the answer to a `line`. What does not describe one is left out: nobody has to wait for it."""
        found = []
        for item in output.get("Items", ()):
            if item[SORT_KEY] == encode(LOCK_ENTRY):
                continue
            try:
                found.append(waiter_record(item))
            except (TypeError, ValueError, RecursionError):
                continue
        return found

    # -- several locks at once ----------------------------------------------------------------------------------------

    def transaction(self, requests: Sequence[Request]) -> Request:
        """Carry out all of these writes, or none. A refusal shows for each what it would have shown alone."""
        items = []
        for request in requests:
            params = {name: value for name, value in request.params.items() if name != "ReturnValues"}
            items.append({request.action.removesuffix("Item"): params})
        return Request("TransactWriteItems", {"TransactItems": items})

    def draw_exactly(self, claim: Claim, seen: LockRecord | None, stamp: Stamp) -> Request:
        """Draw the number that comes after those that were seen, and no other; also for a lock never used before."""
        number = next_number(seen, stamp)
        front = front_of(claim.priority, number)
        values = {":number": number, ":front": front}
        if seen is None:
            return self._write(
                claim.key,
                "SET #holders = :holders, #available = :capacity, #capacity = :capacity, #token = :now, "
                "#seed = :state, #expires_at = :expires_at, #tickets = :number, #first = :front",
                "attribute_not_exists(#key)",
                {
                    **values,
                    ":holders": {},
                    ":capacity": claim.capacity,
                    ":now": stamp.best_ms,
                    ":state": GUESSED,
                    ":expires_at": _expiry(stamp, 0),
                },
            )
        lower = seen.first is None or seen.first > front
        return self._write(
            claim.key,
            "SET #tickets = :number" + (", #first = :front" if lower else ""),
            (
                "#tickets = :drawn"
                if seen.tickets
                else "attribute_exists(#key) AND attribute_not_exists(#tickets)"
            )
            + (_LOWERS if lower else " AND #first <= :front"),
            {**values, ":drawn": seen.tickets},
        )

    # -- reads --------------------------------------------------------------------------------------------------

    def item_key(self, key: str) -> Mapping[str, Any]:
        """See `TableReads`."""
        return _item_key(key)

    def name_of(self, item: Mapping[str, Any]) -> str:
        """See `TableReads`."""
        return str(item[PARTITION_KEY]["S"])

    def scan(self, cursor: Mapping[str, Any] | None, prefix: str = "") -> Request:
        """Read one page of all locks, from where `cursor` (the last page's ``LastEvaluatedKey``) points; show those
        whose keys begin with the prefix."""
        names, values = {"#entry": SORT_KEY}, {":lock": LOCK_ENTRY}
        if prefix:
            names, values = {**names, "#key": PARTITION_KEY}, {**values, ":prefix": prefix}
        params: dict[str, Any] = {
            "TableName": self.table,
            "FilterExpression": "#entry = :lock" + (" AND begins_with(#key, :prefix)" if prefix else ""),
            "ExpressionAttributeNames": names,
            "ExpressionAttributeValues": {name: encode(value) for name, value in values.items()},
            "ConsistentRead": True,
        }
        return Request("Scan", params | ({"ExclusiveStartKey": cursor} if cursor else {}))

    def record(self, item: Mapping[str, Any], server_ms: int | None) -> LockRecord:
        """`records.lock_record` of an item of this table."""
        return lock_record(item, self.table, server_ms)

    # -- how they are put together ------------------------------------------------------------------------------

    def _sign_of_life(
        self,
        key: str,
        lease_id: str,
        lease_ms: int,
        stamp: Stamp,
        seen: str | None,
        update: str = "",
        condition: str = "",
        values: Mapping[str, Any] | None = None,
        remove: Sequence[str] = (),
        **names: str,
    ) -> Request:
        """A write that gives the lease a new version.

        It may arrive long after its sender has given it up, when the lease has been renewed since. It must not put its
        old stamp in the place of a newer one, or a live holder would look dead: it succeeds only if the stamp there is
        no newer than its own, to within `OVERTAKEN_MS`, by which two writers' estimates may differ; or, where that
        cannot be told, if the version is still the one `seen`.

        A writer that does not know the server's time, because no answer tells it, *removes* the stamp of the one
        before, which would make the new version look old; nor does it tell when the record expires.
        """
        stamped = stamp.server_ms is not None
        if seen is not None:
            order = " AND #holders.#me.#version = :seen"
        else:
            order = " AND #holders.#me.#renewed_at <= :no_newer" if stamped else ""
        return self._write(
            key,
            "SET #holders.#me.#version = :version"
            + (", #expires_at = :expires_at, #holders.#me.#renewed_at = :renewed_at" if stamped else "")
            + update
            + _remove([*([] if stamped else ["#holders.#me.#renewed_at"]), *remove]),
            "attribute_exists(#holders.#me)" + order + condition,
            {
                ":version": stamp.version,
                ":expires_at": _expiry(stamp, lease_ms),
                ":renewed_at": stamp.server_ms,
                ":no_newer": stamp.best_ms + OVERTAKEN_MS,
                ":seen": seen,
                **(values or {}),
            },
            me=lease_id,
            **names,
        )

    def _remove(
        self,
        key: str,
        lease_id: str,
        slots: int,
        stamp: Stamp,
        update: str = "",
        condition: str = "",
        values: Mapping[str, Any] | None = None,
    ) -> Request:
        expires_at = ", #expires_at = :expires_at" if stamp.server_ms is not None else ""
        return self._write(
            key,
            f"SET #available = #available + :slots, #vacated_at = :vacated_at{update}{expires_at} REMOVE #holders.#me",
            # So many, and no other number: what is given back is what was taken.
            "attribute_exists(#holders.#me) AND #holders.#me.#slots = :slots" + condition,
            {
                ":slots": slots,
                ":vacated_at": stamp.best_ms,
                ":expires_at": _expiry(stamp, 0),
                **(values or {}),
            },
            me=lease_id,
        )

    def _write(
        self,
        key: str,
        update: str,
        condition: str,
        values: Mapping[str, Any],
        entry: str = LOCK_ENTRY,
        **names: str,
    ) -> Request:
        # DynamoDB refuses names and values that the expressions do not use, so only those used are sent.
        used = _placeholders(f"{update} {condition}")
        paths = {alias: names.get(alias[1:]) or _PATHS[alias] for alias in used if alias[0] == "#"}
        sent = {alias: encode(value) for alias, value in values.items() if alias in used}
        return Request(
            "UpdateItem",
            {
                "TableName": self.table,
                "Key": _item_key(key, entry),
                "UpdateExpression": update,
                "ConditionExpression": condition,
                "ExpressionAttributeNames": paths,
                **({"ExpressionAttributeValues": sent} if sent else {}),
                "ReturnValues": "ALL_NEW",
                "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
            },
        )


@lru_cache(maxsize=256)
def _placeholders(expressions: str) -> frozenset[str]:
    return frozenset(re.findall(r"[#:]\w+", expressions))


def _item_key(key: str, entry: str = LOCK_ENTRY) -> dict[str, Any]:
    return {PARTITION_KEY: encode(key), SORT_KEY: encode(entry)}


def _remove(paths: Sequence[str]) -> str:
    return f" REMOVE {', '.join(paths)}" if paths else ""


def _unchanged(dead: Sequence[Holder]) -> list[str]:
    """Conditions: none of them has beaten since it was found dead."""
    return [f"#holders.#dead{i}.#version = :version{i}" for i in range(len(dead))]


def _turn_values(turn: Turn) -> dict[str, Any]:
    return {**turn.values, ":next_first": turn.next}


def _capacity_may_be(seen: LockRecord | None) -> str:
    """That an idle lock may have another capacity: not if somebody has set it."""
    return "#capacity = :capacity" if seen is not None and seen.fixed else "attribute_not_exists(#fixed)"


def took_over(dead: Iterable[Holder]) -> bool:
    """Whether one of them may have died at work."""
    return any(not holder.resting for holder in dead)


def _data(data: Mapping[str, Any] | None) -> str:
    return ", #data = :data" if data else ""


def _no_data(data: Mapping[str, Any] | None) -> list[str]:
    """What is to be removed: an empty map takes the place of none (None is to leave it)."""
    return ["#data"] if data is not None and not data else []


def _hold(claim: Claim) -> str:
    return ", #holders.#me.#hold_until = :hold_until" if claim.min_hold_ms else ""


def _vacated(stamp: Stamp, seen: LockRecord | None) -> dict[str, int]:
    no_newer = stamp.best_ms + OVERTAKEN_MS
    vacated_at_ms = None if seen is None else seen.vacated_at_ms
    return {":no_newer": no_newer, ":seen_vacated": no_newer if vacated_at_ms is None else vacated_at_ms}


def _expiry(stamp: Stamp, lease_ms: int) -> int:
    return (stamp.best_ms + lease_ms + RETENTION_MS) // 1000


def holder_values(claim: Claim, stamp: Stamp, *, took_over: bool = False) -> dict[str, Any]:
    """What the record shows of a holder."""
    about = dict(claim.about) | ({"attempt_of": claim.attempt_of} if claim.attempt_of else {})
    return {
        "owner": claim.owner,
        "slots": claim.slots,
        "lease_ms": claim.lease_ms,
        "grace_ms": claim.grace_ms,
        "version": stamp.version,
        "acquired_at": stamp.best_ms,
        "inside": {},
        # In a process's first write the host's clock: `Operations._granted` confirms it, or removes it. A process that
        # sees no `Date` has no time that others may rely on.
        **({} if stamp.undated else {"renewed_at": stamp.best_ms}),
        **({"hold_until": stamp.best_ms + claim.min_hold_ms} if claim.min_hold_ms else {}),
        **({"took_over": True} if took_over else {}),
        **({"about": about} if about else {}),
    }


# After all places.
_LAST_PLACE = "~"

_WAITER_PLAIN = ("lease_id", "owner", "slots", "capacity", "priority", "version")


def _waiter_optional(waiter: Waiter) -> dict[str, Any]:
    return {
        "until": waiter.until_ms,
        "process": waiter.process,
        "renewed_at": waiter.renewed_at_ms,
        "about": dict(waiter.about),
    }
