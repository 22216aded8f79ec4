"""Mutations of the protocol. The simulated histories, or the unit test that a mutation names, must detect each of them:
a check that cannot tell a good protocol from a bad one proves nothing.

Each mutation breaks one rule the way a quick edit might: it leaves a condition out, or reads a clock a moment later.
They patch the real code, not a copy of it. A mutation that no longer fits the code raises an error.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from asyncio import get_running_loop
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from airflow_dynamo_lock.client import clock
from airflow_dynamo_lock.client.claims import ReentrantLeases
from airflow_dynamo_lock.client.leases import leases_of
from airflow_dynamo_lock.client.session import ClientCore
from airflow_dynamo_lock.client.threads import KeepAlive, ThreadRuntime, _QueueMaintainer
from airflow_dynamo_lock.core.effects import Reply, Request, ServerClock, Stamp
from airflow_dynamo_lock.core.liveness import Observer
from airflow_dynamo_lock.core.lock import acquire, attempt, presence
from airflow_dynamo_lock.core.lock.admin import Admin
from airflow_dynamo_lock.core.lock.attempt import Attempting
from airflow_dynamo_lock.core.lock.confirm import Confirming
from airflow_dynamo_lock.core.lock.release import Releasing
from airflow_dynamo_lock.core.lock.renew import Renewing
from airflow_dynamo_lock.core.model import lease as lease_module
from airflow_dynamo_lock.core.model.claim import Claim
from airflow_dynamo_lock.core.model.errors import LockUnavailableError
from airflow_dynamo_lock.core.model.lease import Lease, LeaseSet, Term
from airflow_dynamo_lock.core.model.outcomes import Renewed, StillHeld
from airflow_dynamo_lock.core.model.record import Holder
from airflow_dynamo_lock.core.queue import view
from airflow_dynamo_lock.core.queue.queue import WaitQueue
from airflow_dynamo_lock.core.queue.view import QueueReader
from airflow_dynamo_lock.core.table import expressions, grant_writes, lease_writes, position, version
from airflow_dynamo_lock.core.table.format import QUEUE_IGNORED
from airflow_dynamo_lock.core.table.items import VERIFIED
from airflow_dynamo_lock.core.table.native import NativeFormat
from airflow_dynamo_lock.core.wait import stream


@dataclass(frozen=True)
class Mutation:
    """One way.

    :ivar rule: what it breaks.
    :ivar seed: of a history that shows it. The next change of the simulation may need another.
    :ivar test: the unit test that fails under it, where no history shows it, or one in many thousands.
    """

    rule: str
    patches: Callable[[], list[Any]]
    seed: int = 0
    test: str | None = None


def _edited(function: Callable[..., Any], *edits: tuple[str, str]) -> Callable[[], list[Any]]:
    """A method or a function with other source code, wherever the package uses it."""

    def patches() -> list[Any]:
        source = textwrap.dedent(inspect.getsource(function))
        for old, new in edits:
            if old not in source:
                raise ValueError(f"{function.__qualname__} has no {old!r} any more: adapt the mutation")
            source = source.replace(old, new)
        module, made = sys.modules[function.__module__], dict[str, Any]()
        exec(source, module.__dict__, made)
        name, (wrong,) = function.__name__, made.values()
        if "." in function.__qualname__:
            owner = getattr(module, function.__qualname__.split(".")[0])
            return [patch.object(owner, name, wrong)]
        return [
            patch.object(each, name, wrong)
            for title, each in list(sys.modules.items())
            if title.startswith("airflow_dynamo_lock.") and getattr(each, name, None) is function
        ]

    return patches


def _all(*some: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
    """Several changes that break one rule."""
    return lambda: [each for patches in some for each in patches()]


def _rewritten(method: str, *changes: tuple[str, str]) -> Callable[[], list[Any]]:
    """A write whose condition or update is another, by regular expressions on both."""
    right = getattr(NativeFormat, method)

    def wrong(*args: Any, **options: Any) -> Request:
        request: Request = right(*args, **options)
        params = dict(request.params)
        for pattern, instead in changes:
            for part in ("ConditionExpression", "UpdateExpression"):
                params[part] = re.sub(pattern, instead, params[part])
        return replace(request, params=params)

    return lambda: [patch.object(NativeFormat, method, wrong)]


# The right ones, which the wrong ones below make use of.
_stamp, _enter = ClientCore.stamp, ClientCore.enter
_see, _granted, _renew = Observer.see, Confirming.granted, Renewing.renew
_step_out = NativeFormat.delete_entry
_look, _take_together, _living = QueueReader.look, WaitQueue._take_together, QueueReader._living
_release = ClientCore.release


def _stamp_by_host(self: ClientCore) -> Stamp:
    """The host's wall clock passes for the server's."""
    stamp = _stamp(self)
    return replace(stamp, server_ms=stamp.host_ms)


def _see_impatiently(self: Observer, record: Any, reply: Reply) -> Any:
    """Four fifths of a lease of silence are proof enough."""
    hasty = {
        name: replace(holder, lease_ms=holder.lease_ms * 4 // 5) for name, holder in record.holders.items()
    }
    dead = _see(self, replace(record, holders=hasty), reply)
    return [record.holders[each.lease_id] for each in dead]


def _enter_for_long(self: ClientCore, lease: Any, process: str) -> Any:
    """A guarded process counts on the whole lease, not on the grace."""
    return _enter(self, replace(lease, grace_ms=lease.lease_ms), process)


def _patched(target: Any, name: str, wrong: Any) -> Callable[[], list[Any]]:
    return lambda: [patch.object(target, name, wrong)]


def _granted_unconfirmed(self: Confirming, write: Any, record: Any, reply: Reply, within: Any) -> Any:
    """The grant counts, whatever the `Date` of the answer says."""
    return (yield from _granted(self, write, record, replace(reply, server_ms=None), within))


def _renewed_at_reply(self: Renewing, key: str, lease_id: str, *args: Any, **options: Any) -> Any:
    """The lease counts from when the answer came."""
    outcome = yield from _renew(self, key, lease_id, *args, **options)
    if isinstance(outcome, Renewed):
        return replace(outcome, stamped_at=self.requests.stamp().at)
    return outcome


def _never_lost(self: Renewing, key: str, lease_id: str, *args: Any, **options: Any) -> Any:
    """A heartbeat whose fate is not known counts as one that was carried out."""
    try:
        return (yield from _renew(self, key, lease_id, *args, **options))
    except LockUnavailableError:
        holder = Holder(lease_id, "?", 1, 10**9, 10**9, "?", 0)
        return Renewed(holder, self.requests.stamp().at)


def _look_away(self: QueueReader, claim: Any, mine: Any, seconds: Any) -> Any:
    """Who looks at the line sees nobody in it but himself."""
    view = yield from _look(self, claim, mine, seconds)
    return replace(view, ahead=())


def _draw_one_by_one(self: WaitQueue, claims: Any, seconds: Any) -> Any:
    """Who wants several locks draws a number in one line after the other."""
    numbers: dict[str, int] = {}
    for claim in claims:
        stamp, drawn = yield from _take_together(self, [claim], seconds)
        numbers |= drawn
    return stamp, numbers


def _nobody_is_dead(self: QueueReader, waiters: Any, reply: Any, seconds: Any) -> Any:
    """All who stand in line count as alive."""
    yield from _living(self, waiters, reply, seconds)
    return waiters


def _blind_room(record: Any, dead: Any) -> int:
    """The poller does not see the dead."""
    return int(record.available)


def _believe_until_answered(self: ClientCore, lease: Any, *args: Any) -> Any:
    """The holder stops believing in its lease when the release is answered, not before it is sent."""
    leases = leases_of(lease)
    terms = {id(each.term): each.term for each in leases if each.term is not None}
    kept = [replace(each, term=None) for each in leases]
    outcome = yield from _release(self, kept[0] if isinstance(lease, Lease) else LeaseSet(tuple(kept)), *args)
    for term in terms.values() if not isinstance(outcome, StillHeld) else ():
        term.lose("it was released")
    return outcome


def _clock_that_sleeps() -> float:
    """CLOCK_MONOTONIC, which does not count suspended time."""
    return get_running_loop().time()


def _same_id(claim: Any, **changes: Any) -> Any:
    """The next attempt of a caller goes by the lease id of the last one."""
    changes.pop("lease_id", None)
    return replace(claim, **changes)


MUTATIONS = {
    "overwrite": Mutation(
        "R1: a held lock is not overwritten",
        _rewritten("acquire_idle", (r"#available = #capacity AND size\(#holders\) = :zero AND ", "")),
        seed=0,
    ),
    "reclaim-unseen": Mutation(
        "R3: a reclaim is conditional on the version that was silent",
        _rewritten(
            "reclaim", (r"#holders\.#dead(\d)\.#version = :version\d", r"attribute_exists(#holders.#dead\1)")
        ),
        seed=68,
    ),
    "release-unconditional": Mutation(
        "R1: a release is conditional on the lease being there",
        _rewritten(
            "release",
            (r"attribute_exists\(#holders\.#me\)", "attribute_exists(#holders)"),
            (r" AND size.*$", ""),
        ),
        seed=4,
    ),
    "release-with-processes-inside": Mutation(
        "R8: nothing is released while processes are inside",
        _rewritten("release", (r" AND size\(#holders\.#me\.#processes\) = :zero", "")),
        seed=4,
    ),
    "no-margin": Mutation(
        "R4: a holder does without a tenth of its lease", _patched(lease_module, "MARGIN", 0.0), seed=0
    ),
    "count-from-reply": Mutation(
        "R4: a lease counts from before its heartbeat was sent",
        _patched(Renewing, "renew", _renewed_at_reply),
        seed=0,
    ),
    "unknown-is-success": Mutation(
        "R6: a heartbeat whose fate is not known is none",
        _patched(Renewing, "renew", _never_lost),
        seed=0,
    ),
    "impatient": Mutation(
        "R3: silence is proven by a whole lease of it", _patched(Observer, "see", _see_impatiently), seed=53
    ),
    "observe-to-reply": Mutation(
        "R3: silence is counted up to when the question was sent, and no longer",
        _edited(Observer.see, ("(reply.sent_at - sighting.since)", "(reply.received_at - sighting.since)")),
        test="tests/core/test_liveness.py"
        "::test_silence_counts_from_when_the_first_answer_arrived_to_when_the_last_question_was_sent",
    ),
    "no-skew": Mutation(
        "R3: servers' clocks may differ",
        _patched(
            Observer,
            "_has_expired",
            lambda self, holder, server_ms: (
                server_ms is not None
                and holder.renewed_at_ms is not None
                and server_ms > holder.renewed_at_ms + holder.lease_ms
            ),
        ),
        seed=51,
    ),
    "host-clock": Mutation(
        "R3: no host's wall clock is trusted", _patched(ClientCore, "stamp", _stamp_by_host), seed=0
    ),
    "first-stamp-unconfirmed": Mutation(
        "R3, R10: a first write counts after its clock was confirmed",
        _patched(Confirming, "granted", _granted_unconfirmed),
        seed=65,
    ),
    "late-heartbeat": Mutation(
        "R3: a heartbeat that arrives late does not put its stamp in the place of a newer one",
        _rewritten("renew", (r" AND #holders\.#me\.#renewed_at <= :no_newer", "")),
        seed=2636,
    ),
    "late-acquire": Mutation(
        "R5: an acquire that arrives after the release does not take the lock again",
        _patched(grant_writes, "_NO_LATER_RELEASE", "attribute_exists(#holders)"),
        seed=25,
    ),
    "token-not-seeded": Mutation(
        "R10: the first token of a record is the time",
        lambda: [
            *_rewritten("acquire_idle", (r"if_not_exists\(#token, :now\)", "if_not_exists(#token, :zero)"))(),
            patch.object(grant_writes, "UNVERIFIED", VERIFIED),
        ],
        seed=51,
    ),
    "token-kept-by-reclaim": Mutation(
        "R10: every grant adds one", _rewritten("reclaim", (r"#token = #token \+ :one, ", "")), seed=0
    ),
    "token-seeded-by-host": Mutation(
        "R10: a token that a wrong clock has seeded is handed to nobody",
        _patched(grant_writes, "UNVERIFIED", VERIFIED),
        seed=65,
    ),
    "record-expires-in-use": Mutation(
        "R10: every write keeps DynamoDB from deleting the record",
        _patched(expressions, "RETENTION_MS", -5_000),
        seed=503,
    ),
    "guard-counts-on-lease": Mutation(
        "R8: who is inside counts on no more than the grace",
        _patched(ClientCore, "enter", _enter_for_long),
        seed=31,
    ),
    "keeper-keeps-abandoned": Mutation(
        "R8: nobody keeps a lease alive that was abandoned, but the processes inside",
        _edited(NativeFormat.renew, ("condition = _NOT_DRAINING + (", 'condition = "" + (')),
        test="tests/core/test_renew.py::test_a_keeper_stops_when_the_lease_is_ending_and_does_not_prolong_it",
    ),
    "dead-unseen-by-poller": Mutation(
        "R11: waiters are woken for the slots of the dead",
        lambda: [patch("airflow_dynamo_lock.core.wait.poller.free_slots", _blind_room)],
        seed=0,
    ),
    "newcomer-overtakes": Mutation(
        "the line: who comes new does not overtake",
        _patched(attempt, "QUEUE_EMPTY", QUEUE_IGNORED),
        seed=12,
    ),
    "line-unseen": Mutation(
        "the line: who stands in it lets those before him go first",
        _patched(QueueReader, "look", _look_away),
        seed=2,
    ),
    "dead-hold-up-the-line": Mutation(
        "the line: the dead are passed over", _patched(QueueReader, "_living", _nobody_is_dead), seed=12
    ),
    "gone-hold-up-the-line": Mutation(
        "the line: who has gone leaves it",
        _patched(
            NativeFormat, "delete_entry", lambda self, key, place: _step_out(self, key, f"{place} or so")
        ),
        seed=3,
    ),
    "numbers-drawn-one-by-one": Mutation(
        "sets: who waits for several locks draws all numbers at the same moment",
        _patched(WaitQueue, "_take_together", _draw_one_by_one),
        test="tests/core/test_sets.py::test_of_two_sets_one_comes_first_in_every_queue",
    ),
    "rest-by-wrong-clock": Mutation(
        "how long a lock is held at least is put right with the clock",
        _patched(grant_writes, "_hold", lambda claim: ""),
        seed=45,
    ),
    "same-lease-id": Mutation(
        "R7: each attempt has a lease id of its own", _patched(acquire, "replace", _same_id), seed=667
    ),
    "lost-acquire-is-busy": Mutation(
        "R5: an acquire whose answer was lost finds its own lease",
        _patched(NativeFormat, "reacquire", lambda self, claim, mine, stamp: self.acquire_idle(claim, stamp)),
        seed=8,
    ),
    # -- a to k of the list of holes that an attack on the protocol found -------------------------------------------
    "reclaim-without-room": Mutation(
        "R1: a reclaim of some holders needs enough slots",
        _edited(
            NativeFormat.reclaim, ("#capacity = :capacity AND #available >= :need", "#capacity = :capacity")
        ),
        seed=175,
    ),
    "clock-that-sleeps": Mutation(
        "R4: a lease is counted on a clock that counts suspended time",
        lambda: [
            patch(f"airflow_dynamo_lock.client.{module}.monotonic", _clock_that_sleeps)
            for module in ("clock", "sdk", "session", "tasks")
        ],
        seed=13,
    ),
    "beat-counts-from-sending": Mutation(
        "R4: a heartbeat counts from its stamp, not from when it was sent",
        _edited(
            Renewing.renew,
            (
                "Renewed(record.holders[lease_id], stamp.at)",
                "Renewed(record.holders[lease_id], reply.sent_at)",
            ),
        ),
        seed=454,
    ),
    "grant-counts-from-sending": Mutation(
        "R4: a grant counts from its stamp, not from when it was sent",
        _edited(Confirming.granted, ("stamp.at,\n", "reply.sent_at,\n")),
        seed=15,
    ),
    "set-beat-counts-from-last": Mutation(
        "R4: the heartbeat of a set counts from the first of its writes",
        _all(
            _edited(Renewing.renew_all, ("min(each.stamped_at for each", "max(each.stamped_at for each")),
            _edited(Renewing._renew_together, ("stamps[0].at", "stamps[-1].at")),
        ),
        seed=59,
    ),
    "set-grant-counts-from-last": Mutation(
        "R4: the grant of a set counts from the first of its writes",
        _edited(ClientCore._granted, ("min(each.stamped_at for each", "max(each.stamped_at for each")),
        seed=2,
    ),
    "capacity-set-in-use": Mutation(
        "the capacity of a lock is not set after somebody took it as another kind of lock",
        _edited(NativeFormat.set_capacity, ('("" if seen.holders else " AND size(#holders) = :zero")', '""')),
        seed=550,
    ),
    "capacity-unset-in-use": Mutation(
        "a capacity is unset only while nobody holds the lock",
        _edited(
            NativeFormat.set_capacity,
            (
                "attribute_exists(#capacity_pinned) AND size(#holders) = :zero",
                "attribute_exists(#capacity_pinned)",
            ),
        ),
        seed=409,
    ),
    "forget-at-once": Mutation(
        "R10: a record is forgotten only when its last token is old enough",
        _edited(
            Admin.forget, ("if not at_once:", "if False:"), ("None if at_once else", "None if True else")
        ),
        seed=1923,
    ),
    "undo-of-one": Mutation(
        "R5: the undo of a set gives back all of its locks",
        _edited(Attempting.undo, ("for each in claims]", "for each in claims[:1]]")),
        seed=268,
    ),
    "again-after-the-end": Mutation(
        "a re-entrant acquire returns no lease that has run out",
        _edited(ReentrantLeases.again, (" or not held.lease.remaining()", "")),
        seed=53,
    ),
    "believes-while-releasing": Mutation(
        "R4: a holder stops believing in its lease before it sends the release",
        _patched(ClientCore, "release", _believe_until_answered),
        seed=0,
    ),
    # -- the sixteen that were tried on the simulation only ---------------------------------------------------------
    "beat-without-end": Mutation(
        "R4: no heartbeat is waited for longer than the lease lasts",
        _edited(
            Renewing.keep_alive,
            ("renew_all(leases, Heartbeat(), until=term.until)", "renew_all(leases, Heartbeat())"),
        ),
        seed=141,
    ),
    "server-time-from-reply": Mutation(
        "R3: the server's time is counted from when the request was sent",
        _edited(ServerClock.note, ("reply.sent_at", "reply.received_at")),
        seed=45,
    ),
    "head-passes-the-living": Mutation(
        "the queue: a grant beside living waiters leaves the head before them",
        _edited(view.head_update, ("    if ahead:", "    if ahead and False:")),
        seed=121,
    ),
    "head-cleared-by-grant": Mutation(
        "the queue: a grant clears the head only if nobody has drawn a number since",
        _edited(view.head_update, ('f"{condition} AND {no_new_ticket}"', "condition")),
        seed=141,
    ),
    "head-cleared-by-leaver": Mutation(
        "the queue: a waiter that leaves clears the head only if nobody has drawn a number since",
        _edited(NativeFormat.clear_head, (' " AND #last_ticket = :number"', ' ""')),
        seed=13,
    ),
    "dead-never-discarded": Mutation(
        "the queue: the entries of dead waiters are removed",
        _edited(WaitQueue.discard, ("in places", "in ()")),
        seed=1253,
    ),
    "numbers-from-one": Mutation(
        "the queue: the first number is the time",
        _edited(position.next_ticket, ("else stamp.best_ms", "else 0")),
        test="tests/core/test_proof.py::test_the_first_number_in_a_queue_is_the_time",
    ),
    "place-handed-on-blindly": Mutation(
        "the queue: a place is handed on only by the process that stands in it",
        _edited(
            NativeFormat.hand_over_entry,
            ('"#process = :process",', '"attribute_exists(#key) OR attribute_not_exists(#key)",'),
        ),
        test="tests/core/test_proof.py::test_a_place_is_handed_on_only_by_the_process_that_stands_in_it",
    ),
    "behind-oneself": Mutation(
        "the queue: a later attempt does not wait behind its own earlier one",
        _edited(QueueReader.look, ("[each for each in living if not claim.supersedes(each)]", "living")),
        test="tests/core/test_queue.py::test_a_later_attempt_does_not_wait_behind_an_earlier_one",
    ),
    "first-record-verified": Mutation(
        "R10: the token of a record that `set_capacity` or a set makes is unverified",
        _all(
            _edited(NativeFormat.create, ('":state": UNVERIFIED', '":state": VERIFIED')),
            _edited(NativeFormat.take_exact_ticket, ('":state": UNVERIFIED', '":state": VERIFIED')),
        ),
        test="tests/core/test_proof.py"
        "::test_a_token_from_an_old_estimate_in_set_capacity_is_put_right_by_the_next_grant",
    ),
    "rare-signs-of-life": Mutation(
        "the queue: a process with waiters shows that it is alive more often than its sign of life lasts",
        _patched(presence, "_PRESENCE_INTERVAL", 20.0),
        seed=387,
    ),
    "first-beat-without-time": Mutation(
        "R3: a process asks for the server's time before its first heartbeat",
        _edited(Stamp.is_fresh, ("self.answered and", "")),
        test="tests/core/test_late_arrivals.py"
        "::test_a_first_write_that_arrives_twice_does_not_bring_its_version_back",
    ),
    "cut-off-answer-of-a-stream": Mutation(
        "R11: an answer of the stream that may be cut off does not tell all",
        _patched(stream, "_may_be_cut_off", lambda records: False),
        test="tests/core/test_streams.py"
        "::test_after_an_answer_that_may_be_cut_off_it_has_not_heard_of_all_changes",
    ),
    # -- found by asking of each condition and comparison in `protocol` what would notice that it is gone -----------
    "first-seen-when-asked": Mutation(
        "R3: silence is counted from when the first answer arrived",
        _edited(
            Observer.see,
            ("_Sighting(holder.version, reply.received_at,", "_Sighting(holder.version, reply.sent_at,"),
        ),
        test="tests/core/test_liveness.py"
        "::test_silence_counts_from_when_the_first_answer_arrived_to_when_the_last_question_was_sent",
    ),
    "room-of-another-capacity": Mutation(
        "R1: free slots are taken of the capacity that was claimed",
        _edited(NativeFormat.acquire_slots, (" AND #capacity = :capacity", "")),
        test="tests/core/test_proof.py::test_a_late_claim_takes_no_slot_of_another_capacity",
    ),
    "room-taken-twice": Mutation(
        "R1: a lease that has slots takes no more",
        _edited(NativeFormat.acquire_slots, (" AND attribute_not_exists(#holders.#me)", "")),
        test="tests/core/test_acquire.py::test_two_processes_that_make_the_same_attempt_take_its_slots_once",
    ),
    "reclaim-twice": Mutation(
        "R1: a lease that holds the lock reclaims nothing",
        _edited(
            NativeFormat.reclaim,
            ('[*conditions, "attribute_not_exists(#holders.#me)"]', "conditions"),
        ),
        test="tests/core/test_proof.py::test_a_reclaim_by_one_that_holds_the_lock_meanwhile_is_refused",
    ),
    "reclaim-all-but-one": Mutation(
        "R1: counters start afresh only if all holders are dead",
        _edited(NativeFormat.reclaim, ("size(#holders) = :holders AND ", "")),
        test="tests/core/test_acquire.py"
        "::test_one_who_joins_while_all_the_dead_are_being_reclaimed_keeps_his_slot",
    ),
    "again-under-the-same-token": Mutation(
        "R10: an acquire that finds its own lease takes a token of its own",
        _edited(NativeFormat.reacquire, ('", #token = #token + :one, ', '", ')),
        seed=8,
    ),
    "token-put-right-over-another": Mutation(
        "R10: a token is put right only if nobody was granted one since",
        _edited(NativeFormat.correct_grant, ('" AND #token = :seen_token"', '""')),
        test="tests/core/test_proof.py::test_a_token_is_not_put_right_over_one_that_was_granted_since",
    ),
    "enter-while-draining": Mutation(
        "R8: nobody enters a lease that is draining",
        _edited(
            NativeFormat.renew,
            (
                '#processes.#process = :now"\n            condition = _NOT_DRAINING',
                '#processes.#process = :now"\n            condition = ""',
            ),
        ),
        test="tests/core/test_renew.py::test_nobody_enters_an_ending_lease",
    ),
    "released-too-early": Mutation(
        "`min_hold`: a release before its time is refused",
        _patched(lease_writes, "_MIN_HOLD_OVER", "attribute_exists(#holders.#me)"),
        seed=200,
    ),
    "rests-for-nothing": Mutation(
        "`min_hold`: the lease lasts for the rest of the time",
        _edited(
            NativeFormat.renew, ('true, "\n                "#holders.#me.#lease_ms = :lease_ms"', 'true"')
        ),
        seed=247,
    ),
    "rests-with-processes-inside": Mutation(
        "R8: a lease cools down only if nobody is inside",
        _edited(NativeFormat.renew, ('" AND size(#holders.#me.#processes) = :zero"', '""')),
        test="tests/core/test_proof.py::test_a_lease_does_not_cool_down_with_a_process_inside",
    ),
    "head-not-lowered": Mutation(
        "the queue: a new place lowers the head",
        _edited(
            NativeFormat.take_ticket,
            ("lower = seen.queue_head is None or seen.queue_head > front", "lower = seen.queue_head is None"),
        ),
        test="tests/core/test_conditions.py",
    ),
    "head-lowered-blindly": Mutation(
        "the queue: lowering the head never raises it",
        _edited(
            NativeFormat.lower_head, (" AND (attribute_not_exists(#queue_head) OR #queue_head > :place)", "")
        ),
        test="tests/core/test_proof.py::test_to_lower_the_head_of_a_queue_never_raises_it",
    ),
    "head-unseen-by-grant": Mutation(
        "the queue: a grant is conditional on the head that was seen",
        _edited(
            view.head_update,
            (
                '"(attribute_not_exists(#queue_head) OR #queue_head >= :seen_head)"',
                '"attribute_exists(#key)"',
            ),
        ),
        seed=821,
    ),
    "lease-made-shorter": Mutation(
        "R4: a renewal never makes a lease shorter",
        _edited(
            NativeFormat.renew,
            ('" AND #holders.#me.#lease_ms <= :lease_ms"', '""'),
        ),
        seed=88,
    ),
    "old-stamp-kept": Mutation(
        "R3: a heartbeat without server time removes the old stamp",
        _edited(NativeFormat._renewal, ('[] if stamped else ["#holders.#me.#renewed_at"]', "[]")),
        test="tests/core/test_renew.py"
        "::test_a_heartbeat_that_does_not_know_the_servers_time_removes_the_stamp_of_the_one_before",
    ),
    "unheard-is-verified": Mutation(
        "R10: an undo does not vouch for a token",
        _edited(NativeFormat.release, ("if confirmed and stamp", "if stamp")),
        test="tests/core/test_clocks.py::test_an_undo_vouches_for_nothing",
    ),
    "first-stamp-may-be-old": Mutation(
        "R3: a stamp of a host's clock may be behind by 2 s at most",
        _edited(
            Confirming.granted,
            ("_close(reply, holder.renewed_at_ms)", "True"),
        ),
        seed=1,
    ),
    "lost-and-found": Mutation(
        "R4: a lease that is lost stays lost",
        _edited(Term.remaining, ("0.0 if self._lost else ", "")),
        test="tests/core/test_renew.py::test_a_lost_lease_stays_lost_and_keeps_its_first_reason",
    ),
    "earlier-attempt-wins": Mutation(
        "R8: only a later attempt ends the lease of another",
        _edited(Claim.supersedes, ("holder.lease_id < self.lease_id", "True")),
        test="tests/core/test_acquire.py::test_an_earlier_attempt_that_comes_late_leaves_the_later_alone",
    ),
    "wakes-late": Mutation(
        "R4: a holder is notified when its lease has run out",
        _edited(Renewing.keep_alive, ("Sleep(min(pause, term.remaining()))", "Sleep(pause)")),
        seed=140,
    ),
    "leave-forgets-to-release": Mutation(
        "R8: the last process to leave a draining lease releases it",
        _edited(Releasing.leave, ("if holder.draining and not holder.processes:", "if False:")),
        test="tests/core/test_release.py::test_the_last_one_to_leave_an_abandoned_lease_releases_it",
    ),
    # -- what was mended after the checks of the simulation had been made stricter ------------------------------------
    "wait-counted-late": Mutation(
        "R4: a wait is counted from before its length was computed",
        _edited(clock.pieces, ("monotonic() if since is None else since", "monotonic()")),
        test="tests/client/test_suspend.py"
        "::test_a_coroutine_that_is_stopped_between_two_steps_learns_of_its_loss_within_a_second",
    ),
    "dead-cleared-unseen": Mutation(
        "R3: a write that only removes dead holders is conditional on their versions",
        _edited(NativeFormat.remove_dead, ('" AND ".join(_unchanged(dead))', '"attribute_exists(#key)"')),
        test="tests/core/test_edges.py::test_a_holder_that_beats_while_others_are_cleared_keeps_the_lock",
    ),
    "held-by-host-clock": Mutation(
        "`min_hold`: a first request does not go by its host's clock",
        _edited(NativeFormat.release, ("if stamp.answered", "if True")),
        test="tests/core/test_edges.py::test_min_hold_is_kept_by_a_process_whose_first_request_is_the_release",
    ),
    "head-passes-the-late": Mutation(
        "the queue: a grant does not move the head past a waiter that has just come",
        _edited(view.head_update, ("class_of(head) > class_of(record.queue_head)", "False")),
        seed=2074,
        test="tests/core/test_edges.py::test_a_grant_does_not_move_the_head_past_a_waiter_that_has_just_come",
    ),
    "time-from-long-ago": Mutation(
        "R3: a process whose last answer is older than the lease asks for the server's time before it writes",
        _edited(
            Stamp.is_fresh,
            ("(self.server_ms is None or self.age * 1000 <= most_ms)", "True"),
        ),
        test="tests/core/test_edges.py"
        "::test_a_process_that_slept_for_a_week_asks_for_the_time_before_it_shows_that_the_holder_lives",
    ),
    "grant-handed-out-late": Mutation(
        "R4: `acquire` returns no lease that has run out",
        _edited(ClientCore.acquire, ("if lease.remaining() > 0:", "if True:")),
        seed=35,
    ),
    "undated-grant-stamped": Mutation(
        "R3: a process whose answers have no `Date` leaves no stamp of its host's clock",
        _edited(Confirming.granted, ("if undated or", "if")),
        seed=21,
    ),
    # -- what only the threads of `LockClient` show -------------------------------------------------------------------
    "held-by-two-threads": Mutation(
        "threads of one owner: nobody acquires again what another thread gives back",
        _edited(ReentrantLeases.again, ("with self._lock:", "if True:")),
        test="tests/core/test_edges.py::test_a_reentrant_lease_is_not_handed_out_while_another_thread_gives_it_back",
    ),
    "thread-sleeps-in-one-piece": Mutation(
        "R4: a thread that waits for its next heartbeat notices a suspend",
        _edited(KeepAlive._sleep, ("for piece in pieces(seconds, since):", "for piece in [seconds]:")),
        seed=424,
    ),
    "request-waits-in-one-piece": Mutation(
        "R4: a thread that waits for an answer notices a suspend",
        _edited(ThreadRuntime._send, ("in pieces(request.within, since):", "in [request.within]:")),
        test="tests/client/test_suspend.py::test_a_holder_that_waits_for_the_answer_to_a_heartbeat_learns_of_its_loss_within_a_second_of_waking",
    ),
    "tender-does-not-come-back": Mutation(
        "the queue: a thread looks after the places of a process that queues again",
        _edited(_QueueMaintainer._maintain, ("self._thread = None", "pass")),
        test="tests/client/test_waiting.py::test_a_process_that_queues_again_shows_again_that_it_lives",
    ),
    "interrupted-acquire-stays": Mutation(
        "an acquire that is interrupted leaves no lease and no place in the queue",
        _edited(ThreadRuntime._run, ("except BaseException as raised", "except Exception as raised")),
        seed=69,
    ),
    "newer-version-overwritten": Mutation(
        "R13: nothing is written to a record of a newer format version",
        _patched(
            version,
            "IS_KNOWN",
            "(attribute_not_exists(#format_version) OR #format_version >= :known_version)",
        ),
        test="tests/core/test_versions.py"
        "::test_a_write_that_was_built_before_the_upgrade_is_refused_after_it",
    ),
    "nothing-left-for-others": Mutation(
        "the queue: a grant beside living waiters leaves slots for them",
        _edited(NativeFormat.acquire_slots, ("claim.slots + leave", "claim.slots")),
        test="tests/core/test_proof.py::test_a_claim_leaves_slots_for_those_before_it_in_the_queue",
    ),
}


@contextmanager
def spoilt(mutation: str | None) -> Iterator[None]:
    """The protocol is spoilt in that way for the length of the block; None leaves it as it is."""
    with ExitStack() as stack:
        if mutation is not None:
            for each in MUTATIONS[mutation].patches():
                stack.enter_context(each)
        yield
