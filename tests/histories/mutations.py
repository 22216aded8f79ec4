"""Ways to spoil the protocol, each of which the histories must bring to light: what cannot tell a good protocol from a
bad one proves nothing.

Each is a rule broken on purpose, most often one that a quick hand might break: a condition left out, a clock read a
moment later. They are made by patching the real code, not a copy of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from airflow_dynamo_lock.client.core import ClientCore
from airflow_dynamo_lock.protocol import holding, model, native, taking
from airflow_dynamo_lock.protocol.effects import Reply, Request, Stamp
from airflow_dynamo_lock.protocol.errors import LockUnavailableError
from airflow_dynamo_lock.protocol.line import Line
from airflow_dynamo_lock.protocol.native import NativeFormat
from airflow_dynamo_lock.protocol.operations import Operations
from airflow_dynamo_lock.protocol.staleness import Observer


@dataclass(frozen=True)
class Mutation:
    """One way.

    :ivar rule: what it breaks.
    :ivar seed: of a history that shows it. The next change of the simulation may need another.
    """

    rule: str
    patches: Callable[[], list[Any]]
    seed: int = 0


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
_see, _granted, _beat = Observer.see, Operations._granted, Operations._beat
_step_out = NativeFormat.step_out
_look, _draw_all, _living = Line.look, Line._draw_all, Line._living


def _stamp_by_host(self: ClientCore) -> Stamp:
    """The host's wall clock passes for the server's."""
    stamp = _stamp(self)
    return replace(stamp, server_ms=stamp.host_ms)


def _see_too_soon(self: Observer, record: Any, reply: Reply) -> Any:
    """Counts silence up to three seconds after the answer came."""
    return _see(self, record, replace(reply, sent_at=reply.received_at + 3.0))


def _see_impatiently(self: Observer, record: Any, reply: Reply) -> Any:
    """Half a lease of silence is proof enough."""
    hasty = {name: replace(holder, lease_ms=holder.lease_ms // 2) for name, holder in record.holders.items()}
    dead = _see(self, replace(record, holders=hasty), reply)
    return [record.holders[each.lease_id] for each in dead]


def _enter_for_long(self: ClientCore, lease: Any, process: str) -> Any:
    """A guarded process counts on the whole lease, not on the grace."""
    return _enter(self, replace(lease, grace_ms=lease.lease_ms), process)


def _patched(target: Any, name: str, wrong: Any) -> Callable[[], list[Any]]:
    return lambda: [patch.object(target, name, wrong)]


def _granted_unconfirmed(self: Operations, write: Any, record: Any, reply: Reply, within: Any) -> Any:
    """The grant counts, whatever the `Date` of the answer says."""
    return (yield from _granted(self, write, record, replace(reply, server_ms=None), within))


def _renewed_at_reply(self: Operations, key: str, lease_id: str, *args: Any, **options: Any) -> Any:
    """The lease counts from when the answer came."""
    outcome = yield from _beat(self, key, lease_id, *args, **options)
    if isinstance(outcome, model.Renewed):
        return replace(outcome, sent_at=self.stamp().at)
    return outcome


def _never_lost(self: Operations, key: str, lease_id: str, *args: Any, **options: Any) -> Any:
    """A heartbeat whose fate is not known counts as one that was carried out."""
    try:
        return (yield from _beat(self, key, lease_id, *args, **options))
    except LockUnavailableError:
        holder = model.Holder(lease_id, "?", 1, 10**9, 10**9, "?", 0)
        return model.Renewed(holder, self.stamp().at)


def _look_away(self: Line, claim: Any, mine: Any, seconds: Any) -> Any:
    """Who looks at the line sees nobody in it but himself."""
    view = yield from _look(self, claim, mine, seconds)
    return replace(view, ahead=())


def _draw_one_by_one(self: Line, claims: Any, seconds: Any) -> Any:
    """Who wants several locks draws a number in one line after the other."""
    numbers: dict[str, int] = {}
    for claim in claims:
        stamp, drawn = yield from _draw_all(self, [claim], seconds)
        numbers |= drawn
    return stamp, numbers


def _nobody_is_dead(self: Line, waiters: Any, reply: Any, seconds: Any) -> Any:
    """All who stand in line count as alive."""
    yield from _living(self, waiters, reply, seconds)
    return waiters


def _blind_room(record: Any, dead: Any) -> int:
    """The poller does not see the dead."""
    return int(record.available)


def _same_id(claim: Any, **changes: Any) -> Any:
    """The next attempt of a caller goes by the lease id of the last one."""
    changes.pop("lease_id", None)
    return replace(claim, **changes)


MUTATIONS = {
    "overwrite": Mutation(
        "R1: a held lock is not overwritten",
        _rewritten("take_idle", (r"#available = #capacity AND size\(#holders\) = :zero AND ", "")),
        seed=0,
    ),
    "reclaim-unseen": Mutation(
        "R3: a reclaim is conditional on the version that was silent",
        _rewritten(
            "reclaim", (r"#holders\.#dead(\d)\.#version = :version\d", r"attribute_exists(#holders.#dead\1)")
        ),
        seed=372,
    ),
    "release-unconditional": Mutation(
        "R1: a release is conditional on the lease being there",
        _rewritten(
            "release",
            (r"attribute_exists\(#holders\.#me\)", "attribute_exists(#holders)"),
            (r" AND size.*$", ""),
        ),
        seed=8,
    ),
    "release-with-processes-inside": Mutation(
        "R8: nothing is released while processes are inside",
        _rewritten("release", (r" AND size\(#holders\.#me\.#inside\) = :zero", "")),
        seed=8,
    ),
    "no-margin": Mutation(
        "R4: a holder does without a tenth of its lease", _patched(model, "MARGIN", 0.0), seed=1942
    ),
    "count-from-reply": Mutation(
        "R4: a lease counts from before its heartbeat was sent",
        _patched(Operations, "_beat", _renewed_at_reply),
        seed=562,
    ),
    "unknown-is-success": Mutation(
        "R6: a heartbeat whose fate is not known is none",
        _patched(Operations, "_beat", _never_lost),
        seed=21,
    ),
    "impatient": Mutation(
        "R3: silence is proven by a whole lease of it", _patched(Observer, "see", _see_impatiently), seed=25
    ),
    "observe-to-reply": Mutation(
        "R3: silence is counted up to when the question was sent, and no longer",
        _patched(Observer, "see", _see_too_soon),
        seed=22,
    ),
    "no-skew": Mutation(
        "R3: servers' clocks may differ",
        _patched(
            Observer,
            "_outlived",
            lambda self, holder, server_ms: (
                server_ms is not None
                and holder.renewed_at_ms is not None
                and server_ms > holder.renewed_at_ms + holder.lease_ms
            ),
        ),
        seed=357,
    ),
    "host-clock": Mutation(
        "R3: no host's wall clock is trusted", _patched(ClientCore, "stamp", _stamp_by_host), seed=0
    ),
    "first-stamp-unconfirmed": Mutation(
        "R3, R10: a first write counts after its clock was confirmed",
        _patched(Operations, "_granted", _granted_unconfirmed),
        seed=0,
    ),
    "late-heartbeat": Mutation(
        "R3: a heartbeat that arrives late does not put its stamp in the place of a newer one",
        lambda: [
            patch_each
            for method in ("heartbeat", "enter", "abandon", "heartbeat_unless_ending")
            for patch_each in _rewritten(method, (r" AND #holders\.#me\.#renewed_at <= :no_newer", ""))()
        ],
        seed=482,
    ),
    "late-acquire": Mutation(
        "R5: an acquire that arrives after the release does not take the lock again",
        _patched(native, "_NOT_OVERTAKEN", "attribute_exists(#holders)"),
        seed=99,
    ),
    "token-not-seeded": Mutation(
        "R10: the first token of a record is the time",
        lambda: [
            *_rewritten("take_idle", (r"if_not_exists\(#token, :now\)", "if_not_exists(#token, :zero)"))(),
            patch.object(native, "GUESSED", native.CHECKED),
        ],
        seed=5,
    ),
    "token-kept-by-reclaim": Mutation(
        "R10: every grant adds one", _rewritten("reclaim", (r"#token = #token \+ :one, ", "")), seed=2
    ),
    "token-seeded-by-host": Mutation(
        "R10: a token that a wrong clock has seeded is handed to nobody",
        _patched(native, "GUESSED", native.CHECKED),
        seed=129,
    ),
    "record-expires-in-use": Mutation(
        "R10: every write keeps DynamoDB from deleting the record",
        _patched(native, "RETENTION_MS", -5_000),
        seed=143,
    ),
    "guard-counts-on-lease": Mutation(
        "R8: who is inside counts on no more than the grace",
        _patched(ClientCore, "enter", _enter_for_long),
        seed=90,
    ),
    "keeper-keeps-abandoned": Mutation(
        "R8: nobody keeps a lease alive that was abandoned, but the processes inside",
        lambda: [
            *_rewritten(
                "heartbeat_unless_ending", (r" AND attribute_not_exists\(#holders\.#me\.#ending\)", "")
            )(),
            patch.object(holding, "Ending", type("Nothing", (), {})),
        ],
        seed=40,
    ),
    "dead-unseen-by-poller": Mutation(
        "R11: waiters are woken for the slots of the dead",
        lambda: [patch("airflow_dynamo_lock.protocol.watch.room", _blind_room)],
        seed=2,
    ),
    "newcomer-overtakes": Mutation(
        "the line: who comes new does not overtake",
        _patched(taking, "NO_LINE", native.ANY_LINE),
        seed=27,
    ),
    "line-unseen": Mutation(
        "the line: who stands in it lets those before him go first",
        _patched(Line, "look", _look_away),
        seed=1,
    ),
    "dead-hold-up-the-line": Mutation(
        "the line: the dead are passed over", _patched(Line, "_living", _nobody_is_dead), seed=2
    ),
    "gone-hold-up-the-line": Mutation(
        "the line: who has gone leaves it",
        _patched(NativeFormat, "step_out", lambda self, key, place: _step_out(self, key, f"{place} or so")),
        seed=55,
    ),
    "numbers-drawn-one-by-one": Mutation(
        "sets: who waits for several locks draws all numbers at the same moment",
        _patched(Line, "_draw_all", _draw_one_by_one),
        seed=14100,
    ),
    "rest-by-wrong-clock": Mutation(
        "how long a lock is held at least is put right with the clock",
        _patched(native, "_hold", lambda claim: ""),
        seed=275,
    ),
    "same-lease-id": Mutation(
        "R7: each attempt has a lease id of its own", _patched(taking, "replace", _same_id), seed=13928
    ),
    "lost-acquire-is-busy": Mutation(
        "R5: an acquire whose answer was lost finds its own lease",
        _patched(NativeFormat, "take_again", lambda self, claim, mine, stamp: self.take_idle(claim, stamp)),
        seed=6,
    ),
}


@contextmanager
def spoilt(mutation: str | None) -> Iterator[None]:
    """The protocol is spoilt in that way for the length of the block; None leaves it as it is."""
    with ExitStack() as stack:
        for each in MUTATIONS[mutation].patches() if mutation else ():
            stack.enter_context(each)
        yield
