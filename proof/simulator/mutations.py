"""Mutations of the protocol: each one breaks a rule in the real code.

A simulated history, or the unit test that a mutation names, must detect each of them. That shows that the
tests distinguish the protocol from a broken one. A mutation resembles a careless edit: it omits a condition,
or reads a clock a moment later. A mutation that no longer fits the code raises an error.
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
from airflow_dynamo_lock.core.lock.attempt import Attempting, _with_heartbeats
from airflow_dynamo_lock.core.lock.confirm import Confirming
from airflow_dynamo_lock.core.lock.nested import NestedWait
from airflow_dynamo_lock.core.lock.release import Releasing
from airflow_dynamo_lock.core.lock.renew import Renewing
from airflow_dynamo_lock.core.model import cycle
from airflow_dynamo_lock.core.model import lease as lease_module
from airflow_dynamo_lock.core.model.claim import Claim
from airflow_dynamo_lock.core.model.cycle import WaitGraph
from airflow_dynamo_lock.core.model.errors import LockUnavailableError
from airflow_dynamo_lock.core.model.lease import Lease, LeaseSet, Term
from airflow_dynamo_lock.core.model.outcomes import Renewed, StillHeld
from airflow_dynamo_lock.core.model.record import Holder
from airflow_dynamo_lock.core.queue import unused, view
from airflow_dynamo_lock.core.queue.queue import WaitQueue
from airflow_dynamo_lock.core.queue.view import QueueReader
from airflow_dynamo_lock.core.table import expressions, grant_writes, lease_writes, position, version
from airflow_dynamo_lock.core.table.format import QUEUE_IGNORED
from airflow_dynamo_lock.core.table.items import VERIFIED
from airflow_dynamo_lock.core.table.native import NativeFormat
from airflow_dynamo_lock.core.table.renewal_writes import renewed_at
from airflow_dynamo_lock.core.wait import stream
from airflow_dynamo_lock.core.wait.poller import Poller
from airflow_dynamo_lock.core.wait.stream import StreamReader
from proof.simulator.guards import GUARD


@dataclass(frozen=True)
class Mutation:
    """A broken rule.

    :ivar rule: what the unbroken protocol does, in one clause.
    :ivar patches: creates the patches that break the rule.
    :ivar seed: seed of a history that detects the mutation. It may change with any change of the simulation.
    :ivar test: unit test that fails under the mutation, if no history detects it, or only one in many
        thousands.
    """

    rule: str
    patches: Callable[[], list[Any]]
    seed: int = 0
    test: str | None = None


def _edited(function: Callable[..., Any], *edits: tuple[str, str]) -> Callable[[], list[Any]]:
    """Edit the source code of a method or a function, wherever the package uses it.

    :param edits: pairs of the old and the new text.
    """

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
    """Combine several changes that break one rule."""
    return lambda: [each for patches in some for each in patches()]


def _rewritten(method: str, *changes: tuple[str, str]) -> Callable[[], list[Any]]:
    """Edit the condition and the update of a write.

    :param method: method of `NativeFormat` that builds the write.
    :param changes: pairs of a regular expression and its replacement.
    """
    right = getattr(NativeFormat, method)

    def wrong(*args: Any, **options: Any) -> Request:
        request: Request = right(*args, **options)
        params = dict(request.params)
        for pattern, instead in changes:
            for part in ("ConditionExpression", "UpdateExpression"):
                params[part] = re.sub(pattern, instead, params[part])
        return replace(request, params=params)

    return lambda: [patch.object(NativeFormat, method, wrong)]


# The original methods, which the broken ones below call.
_stamp, _enter = ClientCore.stamp, ClientCore.enter
_see, _granted, _renew = Observer.see, Confirming.granted, Renewing.renew
_delete_entry = NativeFormat.delete_entry
_look, _take_together, _living = QueueReader.look, WaitQueue._take_together, QueueReader._living
_release = ClientCore.release


def _stamp_by_host(self: ClientCore) -> Stamp:
    """Use the host's wall clock as server time."""
    stamp = _stamp(self)
    return replace(stamp, server_ms=stamp.host_ms)


def _see_too_early(self: Observer, record: Any, reply: Reply) -> Any:
    """Accept an observation of four fifths of a lease as a proof of death."""
    hasty = {
        name: replace(holder, lease_ms=holder.lease_ms * 4 // 5) for name, holder in record.holders.items()
    }
    dead = _see(self, replace(record, holders=hasty), reply)
    return [record.holders[each.lease_id] for each in dead]


def _enter_without_grace(self: ClientCore, lease: Any, process: str) -> Any:
    """Let a guarded process count on the whole lease, not on the grace."""
    return _enter(self, replace(lease, grace_ms=lease.lease_ms), process)


def _patched(target: Any, name: str, wrong: Any) -> Callable[[], list[Any]]:
    return lambda: [patch.object(target, name, wrong)]


def _granted_unconfirmed(self: Confirming, write: Any, record: Any, reply: Reply, within: Any) -> Any:
    """Ignore the `Date` of the answer to a grant."""
    return (yield from _granted(self, write, record, replace(reply, server_ms=None), within))


def _renewed_at_reply(self: Renewing, key: str, lease_id: str, *args: Any, **options: Any) -> Any:
    """Count the lease from when the answer arrived."""
    outcome = yield from _renew(self, key, lease_id, *args, **options)
    if isinstance(outcome, Renewed):
        return replace(outcome, stamped_at=self.requests.stamp().at)
    return outcome


def _renewed_without_answer(self: Renewing, key: str, lease_id: str, *args: Any, **options: Any) -> Any:
    """Count a heartbeat without an answer as applied."""
    try:
        return (yield from _renew(self, key, lease_id, *args, **options))
    except LockUnavailableError:
        holder = Holder(lease_id, "?", 1, 10**9, 10**9, "?", 0)
        return Renewed(holder, self.requests.stamp().at)


def _see_empty_queue(self: QueueReader, claim: Any, mine: Any, seconds: Any) -> Any:
    """Show a waiter a queue without other waiters."""
    view = yield from _look(self, claim, mine, seconds)
    return replace(view, ahead=())


def _take_one_by_one(self: WaitQueue, claims: Any, seconds: Any) -> Any:
    """Take the tickets for a set one after the other."""
    numbers: dict[str, int] = {}
    for claim in claims:
        stamp, drawn = yield from _take_together(self, [claim], seconds)
        numbers |= drawn
    return stamp, numbers


def _count_all_as_living(self: QueueReader, waiters: Any, reply: Any, seconds: Any) -> Any:
    """Count all waiters as alive."""
    yield from _living(self, waiters, reply, seconds)
    return waiters


def _free_slots_without_dead(record: Any, dead: Any) -> int:
    """Do not count the slots of dead holders as free."""
    return int(record.available)


def _count_on_lease_until_answered(self: ClientCore, lease: Any, *args: Any) -> Any:
    """Let the holder count on its lease until the release is answered."""
    leases = leases_of(lease)
    terms = {id(each.term): each.term for each in leases if each.term is not None}
    kept = [replace(each, term=None) for each in leases]
    outcome = yield from _release(self, kept[0] if isinstance(lease, Lease) else LeaseSet(tuple(kept)), *args)
    for term in terms.values() if not isinstance(outcome, StillHeld) else ():
        term.lose("it was released")
    return outcome


def _clock_without_suspends() -> float:
    """Return CLOCK_MONOTONIC, which excludes suspended time."""
    return get_running_loop().time()


def _same_id(claim: Any, **changes: Any) -> Any:
    """Give the next attempt of a caller the lease id of the last one."""
    changes.pop("lease_id", None)
    return replace(claim, **changes)


MUTATIONS = {
    "overwrite": Mutation(
        "R1: an acquire does not overwrite a held lock",
        _rewritten("acquire_idle", (r"#available = #capacity AND size\(#holders\) = :zero AND ", "")),
        seed=0,
    ),
    "reclaim-unseen": Mutation(
        "R3: a reclaim requires the version that was silent",
        _rewritten(
            "reclaim", (r"#holders\.#dead(\d)\.#version = :version\d", r"attribute_exists(#holders.#dead\1)")
        ),
        seed=68,
    ),
    "release-unconditional": Mutation(
        "R1: a release requires that the lease is in the record",
        _rewritten(
            "release",
            (r"attribute_exists\(#holders\.#me\)", "attribute_exists(#holders)"),
            (r" AND size.*$", ""),
        ),
        seed=3,
    ),
    "release-with-processes-inside": Mutation(
        "R8: a release requires that no process is inside",
        _rewritten("release", (r" AND size\(#holders\.#me\.#processes\) = :zero", "")),
        seed=3,
    ),
    "no-margin": Mutation(
        "R4: a holder does not use the last tenth of its lease", _patched(lease_module, "MARGIN", 0.0), seed=0
    ),
    "count-from-reply": Mutation(
        "R4: a renewed lease counts from its heartbeat's stamp, not from the answer",
        _patched(Renewing, "renew", _renewed_at_reply),
        seed=0,
    ),
    "unknown-is-success": Mutation(
        "R6: a heartbeat without an answer does not count as a renewal",
        _patched(Renewing, "renew", _renewed_without_answer),
        seed=88,
    ),
    "observation-too-short": Mutation(
        "R3: an observation covers the whole lease", _patched(Observer, "see", _see_too_early), seed=53
    ),
    "observe-to-reply": Mutation(
        "R3: an observation ends when its last request was sent, not when the answer arrived",
        _edited(Observer.see, ("(reply.sent_at - sighting.since)", "(reply.received_at - sighting.since)")),
        test="tests/core/test_liveness.py"
        "::test_an_observation_lasts_from_the_first_answer_to_the_last_request",
    ),
    "no-skew": Mutation(
        "R3: a proof of death by server time allows for `max_clock_skew`",
        _patched(
            Observer,
            "_has_expired",
            lambda self, holder, server_ms: (
                server_ms is not None
                and holder.renewed_at_ms is not None
                and server_ms > holder.renewed_at_ms + holder.lease_ms
            ),
        ),
        seed=66,
    ),
    "host-clock": Mutation(
        "R3: the wall clock of a host does not count as server time",
        _patched(ClientCore, "stamp", _stamp_by_host),
        seed=0,
    ),
    "first-stamp-unconfirmed": Mutation(
        "R3, R10: the stamp and the token of a grant are compared with the `Date` of its answer",
        _patched(Confirming, "granted", _granted_unconfirmed),
        seed=65,
    ),
    "late-heartbeat": Mutation(
        "R3: a heartbeat that arrives late does not replace a newer one",
        _rewritten("renew", (r" AND \([^()]*#renewed_at < :renewed_at\)", "")),
        seed=22,
    ),
    "same-stamp": Mutation(
        "R3: a heartbeat replaces none with the same stamp",
        _rewritten("renew", (r"#renewed_at < :renewed_at", "#renewed_at <= :renewed_at")),
        test="tests/core/test_late_arrivals.py::test_of_two_renewals_with_the_same_stamp_the_first_is_not_restored",
    ),
    "late-heartbeat-undated": Mutation(
        "R3: a heartbeat without server time requires the version that its sender has read",
        _rewritten("renew", (r" AND \(#holders\.#me\.#version = :seen\)", "")),
        seed=37,
    ),
    "uncorrected-time-kept": Mutation(
        "R3: a time far ahead, which was not corrected, is not kept like that of a heartbeat",
        _edited(
            _with_heartbeats, (" if (holder.renewed_at_ms or 0) - stamp.best_ms <= skew_ms else None", "")
        ),
        test="tests/core/test_late_arrivals.py"
        "::test_a_grant_whose_process_died_before_it_corrected_a_time_ahead_is_corrected_by_the_next",
    ),
    "written-before-correction": Mutation(
        "R3: a renewal after the correction of a grant does not compare with the wrong time",
        _edited(
            Confirming.granted,
            ("note_written(claim.key, corrected.holders[claim.lease_id])", "note_written(claim.key, holder)"),
        ),
        test="tests/core/test_late_arrivals.py"
        "::test_after_a_wrong_time_was_corrected_a_heartbeat_does_not_bring_it_back",
    ),
    "stamp-lowered": Mutation(
        "R3: no heartbeat lowers the time of the one that it replaces",
        _edited(renewed_at, ("max(stamp.server_ms, last.renewed_at_ms)", "stamp.server_ms")),
        seed=85,
    ),
    "stamp-restored": Mutation(
        "R3: no heartbeat writes a time after one without",
        _edited(
            renewed_at,
            ("None if last.renewed_at_ms is None", "stamp.server_ms if last.renewed_at_ms is None"),
        ),
        test="tests/core/test_late_arrivals.py"
        "::test_after_renewals_with_and_without_server_time_none_restores_an_earlier_version",
    ),
    "late-acquire": Mutation(
        "R5: an acquire that arrives after its lease was released does not retake the lock",
        _patched(grant_writes, "_NO_LATER_RELEASE", "attribute_exists(#holders)"),
        seed=38,
    ),
    "token-starts-at-zero": Mutation(
        "R10: the first token of a record starts from the time",
        lambda: [
            *_rewritten("acquire_idle", (r"if_not_exists\(#token, :now\)", "if_not_exists(#token, :zero)"))(),
            patch.object(grant_writes, "UNVERIFIED", VERIFIED),
        ],
        seed=51,
    ),
    "token-kept-by-reclaim": Mutation(
        "R10: every grant increases the token",
        _rewritten("reclaim", (r"#token = #token \+ :one, ", "")),
        seed=3,
    ),
    "token-base-from-host-clock": Mutation(
        "R10: a token from a wrong wall clock is corrected before a caller receives it",
        _patched(grant_writes, "UNVERIFIED", VERIFIED),
        seed=65,
    ),
    "record-expires-in-use": Mutation(
        "R10: every write postpones the deletion of the record by TTL",
        _patched(expressions, "RETENTION_MS", -5_000),
        seed=503,
    ),
    "guard-counts-on-lease": Mutation(
        "R8: a process inside counts on the grace, not on the whole lease",
        _patched(ClientCore, "enter", _enter_without_grace),
        seed=47,
    ),
    "heartbeat-task-renews-draining": Mutation(
        "R8: the heartbeat task does not renew a draining lease",
        _edited(NativeFormat.renew, ("condition = _NOT_DRAINING + (", 'condition = "" + (')),
        test="tests/core/test_renew.py::test_a_heartbeat_task_does_not_renew_a_draining_lease_and_stops",
    ),
    "dead-unseen-by-poller": Mutation(
        "R11: the poller wakes waiters for the slots of dead holders",
        lambda: [patch("airflow_dynamo_lock.core.wait.poller.free_slots", _free_slots_without_dead)],
        seed=165,
    ),
    "newcomer-overtakes": Mutation(
        "queue: a newcomer does not overtake waiters",
        _patched(attempt, "QUEUE_EMPTY", QUEUE_IGNORED),
        seed=93,
    ),
    "queue-unseen": Mutation(
        "queue: a waiter leaves free slots to the waiters ahead of it",
        _patched(QueueReader, "look", _see_empty_queue),
        seed=2,
    ),
    "dead-block-the-queue": Mutation(
        "queue: waiters skip dead waiters",
        _patched(QueueReader, "_living", _count_all_as_living),
        seed=413,
    ),
    "unused-slots-left": Mutation(
        "queue: waiters pass over one that leaves free slots unused",
        _edited(view._is_passed, ("if record is None", "if True or record is None")),
        seed=97,
    ),
    "passed-over-too-soon": Mutation(
        "queue: waiters leave free slots to those ahead of them for a while",
        _patched(unused, "PASS_OVER_AFTER", 0.5),
        seed=181,
    ),
    "passed-over-late": Mutation(
        "queue: a grant that passes over waiters requires that no slot was granted since the lock was read",
        _patched(view, "_while_unused", lambda head_update, record: head_update),
        test="tests/core/test_unused.py"
        "::test_a_late_write_passes_over_no_waiter_if_the_lock_was_granted_meanwhile",
    ),
    "set-passed-over": Mutation(
        "queue: waiters do not pass over one that waits for another lock too",
        _edited(view._is_passed, ("waiter.set_size > 1", "waiter.set_size > 999")),
        seed=42,
    ),
    "writer-passed-over": Mutation(
        "queue: readers do not pass over a writer that waits for other readers",
        _edited(view._is_passed, ("(same_capacity and ", "(")),
        test="tests/core/test_unused.py::test_a_writer_is_not_passed_over_while_there_are_readers",
    ),
    "gone-block-the-queue": Mutation(
        "queue: a waiter that stops waiting deletes its item",
        _patched(
            NativeFormat, "delete_entry", lambda self, key, place: _delete_entry(self, key, f"{place} or so")
        ),
        seed=600,
    ),
    "tickets-taken-one-by-one": Mutation(
        "sets: a waiter for a set takes all its tickets in one transaction",
        _patched(WaitQueue, "_take_together", _take_one_by_one),
        test="tests/core/test_sets.py::test_of_two_sets_one_comes_first_in_every_queue",
    ),
    "hold-until-not-corrected": Mutation(
        "`min_hold`: the correction of a grant's time also corrects `hold_until`",
        _patched(grant_writes, "_set_hold_until", lambda claim: ""),
        seed=110,
    ),
    "same-lease-id": Mutation(
        "R7: each attempt has a lease id of its own", _patched(acquire, "replace", _same_id), seed=667
    ),
    "lost-acquire-is-busy": Mutation(
        "R5: an acquire whose answer was lost finds its own lease and continues the grant",
        _patched(NativeFormat, "reacquire", lambda self, claim, mine, stamp: self.acquire_idle(claim, stamp)),
        seed=22,
    ),
    # -- found by a search for flaws in the protocol --------------------------------------------------------
    "reclaim-without-enough-slots": Mutation(
        "R1: a reclaim of some of the holders requires enough slots",
        _edited(
            NativeFormat.reclaim, ("#capacity = :capacity AND #available >= :need", "#capacity = :capacity")
        ),
        test="tests/core/test_conditions.py::test_a_write_is_refused_if_the_lock_has_changed",
    ),
    "clock-stops-during-suspend": Mutation(
        "R4: a lease counts on a clock that includes suspended time",
        lambda: [
            patch(f"airflow_dynamo_lock.client.{module}.monotonic", _clock_without_suspends)
            for module in ("clock", "sdk", "session", "tasks")
        ],
        seed=51,
    ),
    "heartbeat-counts-from-sending": Mutation(
        "R4: a renewed lease counts from its heartbeat's stamp, not from when it was sent",
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
        "R4: a granted lease counts from the grant's stamp, not from when it was sent",
        _edited(Confirming.granted, ("stamp.at,\n", "reply.sent_at,\n")),
        seed=15,
    ),
    "set-heartbeat-counts-from-last": Mutation(
        "R4: the heartbeat of a set counts from the earliest of its stamps",
        _all(
            _edited(Renewing.renew_all, ("min(each.stamped_at for each", "max(each.stamped_at for each")),
            _edited(Renewing._renew_together, ("stamps[0].at", "stamps[-1].at")),
        ),
        seed=634,
    ),
    "set-grant-counts-from-last": Mutation(
        "R4: the grant of a set counts from the earliest of its stamps",
        _edited(ClientCore._granted, ("min(each.stamped_at for each", "max(each.stamped_at for each")),
        seed=2,
    ),
    "capacity-pinned-in-use": Mutation(
        "pinned capacity: if no holder was seen, pinning requires that there is still none",
        _edited(NativeFormat.set_capacity, ('("" if seen.holders else " AND size(#holders) = :zero")', '""')),
        seed=2316,
    ),
    "capacity-unpinned-in-use": Mutation(
        "pinned capacity: unpinning requires that there is no holder",
        _edited(
            NativeFormat.set_capacity,
            (
                "attribute_exists(#capacity_pinned) AND size(#holders) = :zero",
                "attribute_exists(#capacity_pinned)",
            ),
        ),
        seed=776,
    ),
    "forget-at-once": Mutation(
        "R10: `forget` deletes a record only if its last token is old enough",
        _edited(Admin.forget, ("if not at_once:", "if False:")),
        seed=1923,
    ),
    "forget-by-an-old-estimate": Mutation(
        "R10: `forget` measures the age of the last token by a recent server time",
        _edited(
            Admin.forget,
            ("yield from self.requests.fresh_stamp(key, token_age_ms, None)", "self.requests.stamp()"),
        ),
        test="tests/core/test_edges.py"
        "::test_a_record_that_was_made_during_a_suspend_is_not_forgotten_at_once",
    ),
    "undo-of-one": Mutation(
        "R5: the undo of a set releases all of its locks",
        _edited(Attempting.undo, ("for each in claims]", "for each in claims[:1]]")),
        test="tests/core/test_sets.py::test_a_failed_acquire_of_unknown_fate_is_undone",
    ),
    "unconfirmed-grant-stays": Mutation(
        "R5: an attempt that fails after its write was applied releases the lease",
        _edited(attempt._maybe_applied, ("bool(unconfirmed) or ", "")),
        test="tests/core/test_lost_replies.py::test_a_grant_whose_confirmation_fails_is_undone",
    ),
    "undone-lease-id-used-again": Mutation(
        "R7: an attempt after an undo has a new lease id",
        _edited(acquire.Acquiring.acquire_all, ("if outcome.undone:", "if False:")),
        test="tests/core/test_sets.py"
        "::test_a_late_undo_of_a_set_does_not_release_the_grants_of_the_next_attempt",
    ),
    "reentrant-after-the-end": Mutation(
        "reentrant: an acquire returns no lease that has run out",
        _edited(ReentrantLeases.again, (" or not held.lease.remaining()", "")),
        seed=53,
    ),
    "relies-while-releasing": Mutation(
        "R4: a holder stops counting on its lease before it sends the release",
        _patched(ClientCore, "release", _count_on_lease_until_answered),
        seed=0,
    ),
    # -- found by a search for what the simulation does not detect ------------------------------------------
    "heartbeat-without-timeout": Mutation(
        "R4: a holder waits for a heartbeat's answer no longer than the lease is valid",
        _edited(
            Renewing.keep_alive,
            ("renew_all(leases, Heartbeat(), until=term.until)", "renew_all(leases, Heartbeat())"),
        ),
        test="tests/core/test_renew.py::test_a_heartbeat_times_out_at_the_end_of_the_lease",
    ),
    "server-time-from-reply": Mutation(
        "R3: server time counts from when the request was sent, not from when the answer arrived",
        _edited(ServerClock.note, ("reply.sent_at", "reply.received_at")),
        test="tests/core/test_clocks.py::test_a_slow_answer_does_not_put_the_estimate_behind",
    ),
    "head-passes-the-living": Mutation(
        "queue: a grant does not move the head past living waiters",
        _edited(view.head_update_of, ("    if ahead:", "    if ahead and False:")),
        seed=134,
    ),
    "head-cleared-by-grant": Mutation(
        "queue: a grant clears the head only if no ticket was taken meanwhile",
        _edited(view.head_update_of, ('f"{condition} AND {no_new_ticket}"', "condition")),
        seed=58,
    ),
    "head-cleared-by-leaver": Mutation(
        "queue: a waiter that leaves clears the head only if no ticket was taken meanwhile",
        _edited(NativeFormat.clear_head, (' " AND #last_ticket = :number"', ' ""')),
        seed=6,
    ),
    "dead-never-discarded": Mutation(
        "queue: the items of dead waiters are deleted",
        _edited(WaitQueue.discard, ("in places", "in ()")),
        test="tests/core/test_queue.py::test_items_of_dead_waiters_are_removed_by_a_process_that_reads_them",
    ),
    "tickets-from-one": Mutation(
        "queue: the first ticket starts from the time",
        _edited(position.next_ticket, ("else stamp.best_ms", "else 0")),
        test="tests/core/test_proof.py::test_the_first_ticket_of_a_queue_is_the_time",
    ),
    "position-handed-over-blindly": Mutation(
        "queue: only the process that waits at a position hands it over",
        _edited(
            NativeFormat.hand_over_entry,
            ('"#process = :process",', '"attribute_exists(#key) OR attribute_not_exists(#key)",'),
        ),
        test="tests/core/test_proof.py::test_a_waiter_item_is_handed_over_only_by_its_own_process",
    ),
    "waits-behind-itself": Mutation(
        "queue: a later attempt does not wait behind an earlier one at the same work",
        _edited(QueueReader.look, ("[each for each in living if not claim.supersedes(each)]", "living")),
        test="tests/core/test_queue.py::test_a_later_attempt_does_not_wait_behind_an_earlier_one",
    ),
    "first-record-verified": Mutation(
        "R10: the token base of a record that `set_capacity` or a set creates is unverified",
        _all(
            _edited(NativeFormat.create, ('":state": UNVERIFIED', '":state": VERIFIED')),
            _edited(NativeFormat.take_exact_ticket, ('":state": UNVERIFIED', '":state": VERIFIED')),
        ),
        test="tests/core/test_proof.py"
        "::test_a_token_from_an_old_estimate_in_set_capacity_is_corrected_by_the_next_grant",
    ),
    "presence-expires": Mutation(
        "queue: a process with waiters renews its presence before that expires",
        _patched(presence, "_PRESENCE_INTERVAL", 20.0),
        test="tests/core/test_details.py"
        "::test_a_process_renews_its_presence_with_one_request_and_releases_it_at_the_end",
    ),
    "first-heartbeat-without-time": Mutation(
        "R3: a process learns server time before its first heartbeat",
        _edited(Stamp.is_fresh, ("self.answered and", "")),
        test="tests/core/test_late_arrivals.py"
        "::test_a_first_write_that_arrives_twice_does_not_restore_its_version",
    ),
    "cut-off-answer-of-a-stream": Mutation(
        "R11: an answer of the stream that may be cut off does not confirm that all changes are known",
        _patched(stream, "_may_be_cut_off", lambda records: False),
        test="tests/core/test_streams.py::test_after_an_answer_that_may_be_cut_off_not_all_changes_are_known",
    ),
    "restarted-stream-trusted": Mutation(
        "R11: after a restart of the stream's reader, all keys are read",
        _edited(StreamReader._open, ("self.poller.changed()", "pass")),
        test="tests/core/test_streams.py::test_after_a_split_the_children_and_all_keys_are_read",
    ),
    "children-of-a-shard-missing": Mutation(
        "R11: a stream's shards are not read before the children of each closed one are listed",
        _edited(
            StreamReader._open,
            ('any(_is_closed(shard) and shard["ShardId"] not in parents for shard in shards)', "False"),
        ),
        test="tests/core/test_streams.py::test_the_reader_waits_until_the_children_of_a_closed_shard_appear",
    ),
    "replaced-stream-read": Mutation(
        "R11: the stream's reader checks once a minute that the stream is the table's",
        _edited(StreamReader._catch_up, ("now - self._checked_at > _CHECK", "self._arn is None")),
        test="tests/core/test_streams.py::test_a_disabled_stream_that_can_still_be_read_is_detected",
    ),
    "changed-key-read-stale": Mutation(
        "R11: the read of a changed key is consistent",
        _edited(Poller._next, ("return changed & watched, True", "return changed & watched, False")),
        test="tests/core/test_streams.py::test_only_a_changed_lock_is_read_at_once_and_consistently",
    ),
    "free-slots-forgotten": Mutation(
        "R11: beside a stream, a lock that was seen to be free is read again after one interval",
        _edited(Poller._notify, ("min(soon, self", "min(math.inf, self")),
        seed=2607,
    ),
    "death-beside-a-stream-unseen": Mutation(
        "R11: beside a stream, a lock is read again when a silent holder would be dead",
        _edited(Poller._notify, ("min(soon, self.observer.next_death(record, reply))", "soon")),
        test="tests/core/test_streams.py"
        "::test_a_dead_holder_is_detected_when_its_lease_ends_and_not_at_the_next_poll",
    ),
    # -- one for each condition and comparison in the core that no other test covered -----------------------
    "first-seen-when-asked": Mutation(
        "R3: an observation begins when its first answer arrived, not when the request was sent",
        _edited(
            Observer.see,
            ("_Sighting(holder.version, reply.received_at,", "_Sighting(holder.version, reply.sent_at,"),
        ),
        test="tests/core/test_liveness.py"
        "::test_an_observation_lasts_from_the_first_answer_to_the_last_request",
    ),
    "slots-of-another-capacity": Mutation(
        "R1: an acquire of free slots requires the claimed capacity",
        _edited(NativeFormat.acquire_slots, (" AND #capacity = :capacity", "")),
        test="tests/core/test_proof.py::test_a_late_claim_takes_no_slot_of_another_capacity",
    ),
    "slots-taken-twice": Mutation(
        "R1: an acquire of free slots requires that the lease holds none",
        _edited(NativeFormat.acquire_slots, (" AND attribute_not_exists(#holders.#me)", "")),
        test="tests/core/test_acquire.py::test_two_processes_that_make_the_same_attempt_take_its_slots_once",
    ),
    "reclaim-twice": Mutation(
        "R1: a reclaim requires that its own lease is not in the record",
        _edited(
            NativeFormat.reclaim,
            ('[*conditions, "attribute_not_exists(#holders.#me)"]', "conditions"),
        ),
        test="tests/core/test_proof.py::test_a_reclaim_by_a_claim_that_was_granted_meanwhile_is_refused",
    ),
    "reclaim-all-but-one": Mutation(
        "R1: a reclaim resets the counters only if all holders are dead",
        _edited(NativeFormat.reclaim, ("size(#holders) = :holders AND ", "")),
        test="tests/core/test_acquire.py::test_a_holder_that_joins_during_a_reclaim_of_all_keeps_its_slot",
    ),
    "reacquire-under-the-same-token": Mutation(
        "R10: an acquire that finds its own lease takes a new token",
        _edited(NativeFormat.reacquire, ('", #token = #token + :one, ', '", ')),
        seed=8,
    ),
    "token-corrected-over-another": Mutation(
        "R10: a token is corrected only if no other one was granted since",
        _edited(NativeFormat.correct_grant, ('" AND #token = :seen_token"', '""')),
        test="tests/core/test_proof.py::test_a_token_correction_does_not_overwrite_a_later_grant",
    ),
    "enter-while-draining": Mutation(
        "R8: no process enters a draining lease",
        _edited(
            NativeFormat.renew,
            (
                '#processes.#process = :now"\n            condition = _NOT_DRAINING',
                '#processes.#process = :now"\n            condition = ""',
            ),
        ),
        test="tests/core/test_renew.py::test_no_process_enters_a_draining_lease",
    ),
    "released-too-early": Mutation(
        "`min_hold`: a release before `hold_until` is refused",
        _patched(lease_writes, "_MIN_HOLD_OVER", "attribute_exists(#holders.#me)"),
        seed=14,
    ),
    "cool-down-ends-too-early": Mutation(
        "`min_hold`: a lease that cools down lasts until `hold_until`",
        _edited(
            NativeFormat.renew, ('true, "\n                "#holders.#me.#lease_ms = :lease_ms"', 'true"')
        ),
        seed=247,
    ),
    "cooling-lease-renewed": Mutation(
        "R3: no heartbeat renews a lease that cools down",
        _edited(NativeFormat.renew, ("condition = _NOT_COOLING_DOWN", 'condition = ""')),
        test="tests/core/test_late_arrivals.py"
        "::test_a_heartbeat_that_arrives_after_a_cool_down_changes_nothing",
    ),
    "cools-down-with-processes-inside": Mutation(
        "R8: a lease cools down only if no process is inside",
        _edited(NativeFormat.renew, ("condition = _NONE_INSIDE", 'condition = ""')),
        test="tests/core/test_proof.py::test_a_lease_does_not_cool_down_with_a_process_inside",
    ),
    "head-not-lowered": Mutation(
        "queue: taking a ticket lowers the head to the new position",
        _edited(
            NativeFormat.take_ticket,
            ("lower = seen.queue_head is None or seen.queue_head > front", "lower = seen.queue_head is None"),
        ),
        test="tests/core/test_conditions.py",
    ),
    "head-lowered-blindly": Mutation(
        "queue: lowering the head never raises it",
        _edited(
            NativeFormat.lower_head, (" AND (attribute_not_exists(#queue_head) OR #queue_head > :place)", "")
        ),
        test="tests/core/test_proof.py::test_lowering_the_head_of_a_queue_never_advances_it",
    ),
    "head-unseen-by-grant": Mutation(
        "queue: a waiter's grant requires that the head is not before the one it has read",
        _edited(
            view.head_update_of,
            (
                '"(attribute_not_exists(#queue_head) OR #queue_head >= :seen_head)"',
                '"attribute_exists(#key)"',
            ),
        ),
        test="tests/core/test_details.py::test_a_grant_checks_and_updates_the_queue_head",
    ),
    "lease-made-shorter": Mutation(
        "R4: a renewal never makes a lease shorter",
        _edited(
            NativeFormat.renew,
            ('" AND #holders.#me.#lease_ms <= :lease_ms"', '""'),
        ),
        seed=138,
    ),
    "old-stamp-kept": Mutation(
        "R3: a heartbeat without server time removes the old stamp",
        _edited(NativeFormat._renewal, ('[] if stamped else ["#holders.#me.#renewed_at"]', "[]")),
        test="tests/core/test_renew.py::test_a_heartbeat_without_server_time_removes_the_previous_stamp",
    ),
    "unconfirmed-is-verified": Mutation(
        "R10: an undo does not verify the token base",
        _edited(NativeFormat.release, ("if confirmed and stamp", "if stamp")),
        test="tests/core/test_clocks.py::test_an_undo_does_not_verify_the_token_base",
    ),
    "first-stamp-may-be-old": Mutation(
        "R3: a grant whose stamp is more than 2 s behind server time is corrected",
        _edited(
            Confirming.granted,
            ("_close(reply, holder.renewed_at_ms)", "True"),
        ),
        test="tests/core/test_clocks.py::test_a_machine_that_was_suspended_writes_no_outdated_stamp",
    ),
    "lost-lease-revived": Mutation(
        "R4: a lost lease stays lost",
        _edited(Term.remaining, ("0.0 if self._lost else ", "")),
        test="tests/core/test_renew.py::test_a_lost_lease_stays_lost_and_keeps_its_first_reason",
    ),
    "earlier-attempt-wins": Mutation(
        "R8: only a later attempt ends the lease of another one",
        _edited(Claim.supersedes, ("holder.lease_id < self.lease_id", "True")),
        test="tests/core/test_acquire.py::test_a_late_earlier_attempt_does_not_end_the_later_one",
    ),
    "wakes-late": Mutation(
        "R4: a holder is notified when its lease has run out",
        _edited(Renewing.keep_alive, ("Sleep(min(pause, term.remaining()))", "Sleep(pause)")),
        seed=140,
    ),
    "leave-does-not-release": Mutation(
        "R8: the last process that leaves a draining lease releases it",
        _edited(
            Releasing.leave, ("if release or (holder.draining and not holder.processes):", "if release:")
        ),
        test="tests/core/test_release.py::test_the_last_process_to_leave_a_draining_lease_releases_it",
    ),
    "released-over-others": Mutation(
        "R8: a process that releases as it leaves is the only one inside",
        _patched(
            lease_writes,
            "_ONLY_ME_INSIDE",
            " AND attribute_exists(#holders.#me.#processes.#process)",
        ),
        test="tests/core/test_release.py"
        "::test_a_leave_that_would_release_drains_while_another_process_is_inside",
    ),
    "released-by-an-outsider": Mutation(
        "R8: a process that releases as it leaves is inside",
        _patched(lease_writes, "_ONLY_ME_INSIDE", " AND size(#holders.#me.#processes) = :one"),
        test="tests/core/test_release.py::test_a_process_that_is_not_inside_drains_if_another_is",
    ),
    "counts-on-what-it-releases": Mutation(
        "R4: a process that releases as it leaves does not count on the lease from before the write is sent",
        _edited(ClientCore.leave, ("if release and lease.term is not None:", "if False:")),
        test="tests/core/test_edges.py::test_a_lease_is_lost_before_a_leave_that_releases_it_is_sent",
    ),
    "leave-ignores-min-hold": Mutation(
        "`min_hold`: a process that releases as it leaves keeps the slots for it",
        _edited(
            NativeFormat.release,
            ('f"{inside} AND {min_hold}"', 'inside if leaving else f"{inside} AND {min_hold}"'),
        ),
        test="tests/core/test_release.py::test_a_leave_that_releases_keeps_the_slots_for_min_hold",
    ),
    # -- defects that stricter checks of the simulation have found ------------------------------------------
    "wait-counted-late": Mutation(
        "R4: a wait counts from before its length was computed",
        _edited(clock.pieces, ("monotonic() if since is None else since", "monotonic()")),
        test="tests/client/test_suspend.py"
        "::test_a_coroutine_that_is_stopped_between_two_steps_detects_its_loss_within_a_second",
    ),
    "dead-cleared-unseen": Mutation(
        "R3: a write that only removes dead holders requires their versions",
        _edited(NativeFormat.remove_dead, ('" AND ".join(_unchanged(dead))', '"attribute_exists(#key)"')),
        test="tests/core/test_edges.py::test_a_heartbeat_while_other_holders_are_removed_keeps_the_lock",
    ),
    "held-by-host-clock": Mutation(
        "`min_hold`: a process without an answer does not compare `hold_until` with its host's clock",
        _edited(NativeFormat.release, ("if stamp.answered", "if True")),
        test="tests/core/test_edges.py::test_min_hold_is_kept_by_a_process_whose_first_request_is_the_release",
    ),
    "head-passes-the-late": Mutation(
        "queue: a grant does not move the head past a waiter that was queued after the read",
        _edited(view.head_update_of, ("class_of(head) > class_of(record.queue_head)", "False")),
        seed=2074,
        test="tests/core/test_edges.py::test_a_grant_does_not_advance_the_head_past_a_new_waiter",
    ),
    "outdated-server-time": Mutation(
        "R3: a process whose last answer is older than the lease asks for server time before it writes",
        _edited(
            Stamp.is_fresh,
            ("(self.server_ms is None or self.age * 1000 <= most_ms)", "True"),
        ),
        test="tests/core/test_edges.py"
        "::test_a_process_suspended_for_a_week_reads_server_time_before_it_writes",
    ),
    "expired-grant-returned": Mutation(
        "R4: `acquire` returns no lease that has run out",
        _edited(ClientCore.acquire, ("if lease.remaining() > 0:", "if True:")),
        seed=35,
    ),
    "undated-grant-stamped": Mutation(
        "R3: a grant whose answer has no `Date` keeps no stamp of its host's clock",
        _edited(Confirming.granted, ("if undated or", "if")),
        seed=21,
    ),
    # -- defects that only the threads of `LockClient` show -------------------------------------------------
    "held-by-two-threads": Mutation(
        "reentrant: an acquire returns no lease that another thread is releasing",
        _edited(ReentrantLeases.again, ("with self._lock:", "if True:")),
        test="tests/core/test_edges.py::test_a_reentrant_lease_is_not_returned_while_another_thread_releases_it",
    ),
    "thread-sleeps-in-one-piece": Mutation(
        "R4: a thread that waits for its next heartbeat notices a suspend",
        _edited(KeepAlive._sleep, ("for piece in pieces(seconds, since):", "for piece in [seconds]:")),
        seed=454,
    ),
    "request-waits-in-one-piece": Mutation(
        "R4: a thread that waits for an answer notices a suspend",
        _edited(ThreadRuntime._send, ("in pieces(request.within, since):", "in [request.within]:")),
        test="tests/client/test_suspend.py::test_a_holder_that_waits_for_an_answer_detects_its_loss_within_a_second_of_waking",
    ),
    "queue-maintenance-not-restarted": Mutation(
        "queue: a process that queues again maintains its positions again",
        _edited(_QueueMaintainer._maintain, ("self._thread = None", "pass")),
        test="tests/client/test_waiting.py::test_a_process_that_queues_again_starts_its_maintenance_again",
    ),
    "interrupted-acquire-stays": Mutation(
        "cancellation: an interrupted acquire leaves no lease and no waiter item",
        _edited(ThreadRuntime._run, ("except BaseException as raised", "except Exception as raised")),
        seed=379,
    ),
    # -- the guard ------------------------------------------------------------------------------------------
    "guard-never-ends-the-process": Mutation(
        "R9: the guard ends a process whose task catches all interruptions",
        _edited(GUARD.Guard._stop, ("end_process()", "pass")),
        seed=119,
    ),
    "guard-stops-at-the-end": Mutation(
        "R9: the guard begins to stop a task before its lease ends",
        _edited(
            GUARD.Guard._keep_alive,
            ("safe_time=_safe_time(entered)", "safe_time=0.01"),
        ),
        seed=174,
    ),
    "guard-starts-what-it-must-stop": Mutation(
        "R9: a task starts only if enough of its grace is left to stop it in time",
        _edited(GUARD.Guard.enter, ("while entered.remaining() <= _safe_time(entered):", "while False:")),
        test="tests/simulator/test_guards.py::test_a_guard_that_would_have_to_stop_the_task_at_once_enters_again",
    ),
    # -- deadlocks ------------------------------------------------------------------------------------------
    "cycle-of-ended-waits": Mutation(
        "R14: a member ends only after all others have noted that they see the cycle",
        _edited(
            WaitGraph.proven,
            ("or mine in self.waits[each].seen", "or True"),
            ("while unaware :=", "if False and"),
        ),
        test="tests/core/test_deadlock.py::test_a_cycle_that_cannot_be_noted_for_a_moment_does_not_end_the_wait",
    ),
    "cycle-not-noted": Mutation(
        "R14: each member of a cycle notes that it sees the cycle",
        _edited(NestedWait._look, ("if behind and", "if False and")),
        seed=95,
    ),
    "denied-note-forgotten": Mutation(
        "R14: a wait note that is denied is written later",
        _edited(NestedWait._note, ("except LockAccessError", "except LockDeadlockError")),
        test="tests/core/test_deadlock.py::test_a_wait_note_that_is_denied_or_whose_reply_is_lost_hides_no_cycle",
    ),
    "denied-lock-never-read": Mutation(
        "R14: a lock whose read was denied is read again later",
        _edited(NestedWait._look, ("self._denied.clear()", "pass")),
        test="tests/core/test_deadlock.py::test_a_lock_whose_read_was_denied_once_is_read_again_later",
    ),
    "cycle-of-three-missed": Mutation(
        "R14: a waiter follows the chain beyond the locks of the holders that block it",
        _edited(
            NestedWait._follow,
            ("while wanted and len(asked) < _MAX_LOCKS:", "for _ in range(2):"),
            (", *self._further", ""),
        ),
        seed=6395,
    ),
    "holders-that-release-ignored": Mutation(
        "R14: a holder blocks only if its slots are needed after all others have released",
        _edited(
            cycle.is_blocked_by, ("sum(each.slots for each in holders) < slots", "record.capacity < slots")
        ),
        test="tests/core/test_deadlock.py::test_a_semaphore_is_blocked_only_if_no_slot_can_become_free",
    ),
    "dead-member": Mutation(
        "R14: the lease of a holder that is proven dead blocks nothing",
        _edited(WaitGraph.__init__, ("and (record.key, holder.lease_id) not in dead", "")),
        test="tests/core/test_deadlock.py::test_a_member_that_has_died_since_it_saw_the_cycle_blocks_nothing",
    ),
    "own-lock-waited-for": Mutation(
        "R14: a waiter for a lock that it holds itself ends at once",
        _patched(NestedWait, "check_own", lambda *_: None),
        test="tests/core/test_deadlock.py::test_a_wait_for_an_own_lock_is_an_error_at_once",
    ),
    "slow-answer-moves-the-clock": Mutation(
        "server time: a slow answer moves the estimate no further ahead than clocks may drift",
        _edited(ServerClock.note, ("min(latest_ms, self._ahead_ms + drift_ms)", "latest_ms")),
        test="tests/core/test_clocks.py"
        "::test_a_pause_before_a_request_is_sent_does_not_move_the_estimate_ahead",
    ),
    "removed-waiter-granted": Mutation(
        "R15: a grant requires that no person has removed the claim",
        _patched(grant_writes, "_NOT_REMOVED", ""),
        test="tests/core/test_decisions.py::test_a_waiter_that_is_removed_while_it_takes_the_lock_does_not_get_it",
    ),
    "holder-removed": Mutation(
        "R15: a waiter that has been granted the lock is not removed",
        _edited(NativeFormat.note_removal, (" AND attribute_not_exists(#holders.#me)", "")),
        test="tests/core/test_decisions.py::test_a_waiter_that_has_just_been_granted_the_lock_is_not_removed",
    ),
    "removal-unread": Mutation(
        "R15: a waiter ends when it reads that it was removed",
        _patched(attempt, "_check_not_removed", lambda *_: None),
        test="tests/core/test_decisions.py::test_a_removed_waiter_ends_with_the_reason",
    ),
    "removed-waiter-sleeps": Mutation(
        "R15: the poller wakes a waiter that was removed",
        _edited(Poller._notify, ("if waiter.wants.lease_id in record.removals:", "if False:")),
        test="tests/core/test_poller.py::test_a_removed_waiter_is_woken_although_the_lock_is_held",
    ),
    "cancelled-waiter-stays": Mutation(
        "queue: a waiter that is cancelled leaves the queue before it ends",
        _edited(
            acquire.Acquiring.acquire_all,
            ("not isinstance(failure, GeneratorExit)", "isinstance(failure, KeyboardInterrupt)"),
        ),
        test="tests/core/test_queue.py::test_an_interrupted_waiter_leaves_the_queue_before_it_ends",
    ),
    "newer-version-overwritten": Mutation(
        "R13: a record of a newer format version is not written to",
        _patched(
            version,
            "IS_KNOWN",
            "(attribute_not_exists(#format_version) OR #format_version >= :known_version)",
        ),
        test="tests/core/test_versions.py"
        "::test_a_write_that_was_built_before_the_upgrade_is_refused_after_it",
    ),
    "nothing-left-for-others": Mutation(
        "queue: a grant beside living waiters leaves enough slots for those ahead",
        _edited(NativeFormat.acquire_slots, ("claim.slots + reserved", "claim.slots")),
        test="tests/core/test_proof.py::test_a_claim_leaves_slots_for_the_waiters_ahead_of_it",
    ),
}


@contextmanager
def spoilt(mutation: str | None) -> Iterator[None]:
    """Apply a mutation, by its name, within the block; None applies none."""
    with ExitStack() as stack:
        if mutation is not None:
            for each in MUTATIONS[mutation].patches():
                stack.enter_context(each)
        yield
