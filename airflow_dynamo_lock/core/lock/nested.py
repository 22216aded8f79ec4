"""R14 (deadlocks end): a waiter that holds leases notes its wait in their records, and looks for a cycle of such waits.

A waiter follows the chain from record to record: the locks that it waits for, the waits of their holders, the locks
that those are for. If the chain leads back to its own wait, it writes the ids of all waits of the cycle into its own
note. The last one of them that began to wait ends, once it has read that all others have seen the same cycle.

A note is written when a claimant that holds leases begins to wait, and removed when the wait ends. A note that is left
behind does no harm, because its waiter sees no cycle any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from airflow_dynamo_lock.core.effects import Operation, Reply, WaitForSlots, with_timeout
from airflow_dynamo_lock.core.liveness import Observer
from airflow_dynamo_lock.core.lock.requests import Requests
from airflow_dynamo_lock.core.model.capacity import should_wake
from airflow_dynamo_lock.core.model.claim import Claim
from airflow_dynamo_lock.core.model.cycle import NO_WAITS, WaitGraph, is_blocked_by
from airflow_dynamo_lock.core.model.errors import (
    CycleMember,
    LockAccessError,
    LockConflictError,
    LockDeadlockError,
    LockError,
    LockUnavailableError,
    LockValueError,
)
from airflow_dynamo_lock.core.model.lease import Lease
from airflow_dynamo_lock.core.model.record import Holder, LockRecord
from airflow_dynamo_lock.core.model.waits import Wait
from airflow_dynamo_lock.core.table.features import Feature
from airflow_dynamo_lock.log import log

#: Seconds between two looks for a cycle.
LOOK_EVERY = 1.0
# Seconds between two looks while they show a cycle, for this many looks at most.
_LOOK_SOON, _SOON = 0.5, 20
# Number of looks after which locks are read again whose read was denied: it may have been denied for a moment only.
_DENIED_FOR = 10
# Maximum number of locks that a waiter reads to follow the chain, and of locks of one wait that its note names.
_MAX_LOCKS, _MAX_NOTED = 200, 20
# Timeout of the requests that follow the chain, and of those that remove a note, in seconds.
_READ_WITHIN = 3.0


class NestedWait:
    """One wait of a claimant that holds leases.

    :param claims: what it waits for.
    :param holding: the leases that it holds.
    """

    def __init__(
        self, requests: Requests, observer: Observer, claims: Sequence[Claim], holding: Sequence[Lease]
    ) -> None:
        self._requests, self._observer = requests, observer
        first = claims[0]
        self._claims = {each.key: each for each in claims}
        self._wait = Wait(
            first.lease_id,
            requests.stamp().best_ms,
            tuple(each.key for each in claims[:_MAX_NOTED]),
            first.slots,
            first.capacity,
        )
        self._holding = list(holding)
        self._noted: list[Lease] = []
        self._maybe_noted: list[Lease] = []
        self._notes = Feature.WAITS in requests.format.features
        self._denied: set[str] = set()
        self._looks = 0
        self._suspicious = 0  # looks in a row that showed a cycle
        self._further: frozenset[str] = frozenset()  # locks that the chain led to when it was last followed

    def check_own(self, record: LockRecord) -> None:
        """Check that the claimant does not wait for slots that it holds itself.

        :param record: a lock of the claims, as an attempt has just shown it.
        :raises LockDeadlockError: it does, so the lock can never be granted.
        """
        claim, own = self._claims[record.key], {(each.key, each.lease_id) for each in self._holding}
        holders = [
            each for name, each in record.holders.items() if (record.key, name) in own and not each.draining
        ]
        if is_blocked_by(record, holders, claim.slots, claim.capacity):
            member = CycleMember(self._wait.id, holders[0].owner, (record.key,), (record.key,))
            raise LockDeadlockError.of((member,))

    def wait(self, wants: WaitForSlots, now: float) -> Operation[float]:
        """Wait as for `wants`, and look for a cycle meanwhile.

        :param now: monotonic seconds.
        :raises LockDeadlockError: the wait is the last one of a cycle.
        """
        deadline = None if wants.seconds is None else now + wants.seconds
        if not self._notes:
            now = yield wants
            return now
        yield from self._look()
        while True:
            began = self._requests.stamp().at
            left = None if deadline is None else max(0.0, deadline - began)
            pause = _LOOK_SOON if 0 < self._suspicious <= _SOON else LOOK_EVERY
            pause = pause if left is None else min(left, pause)
            now = yield replace(wants, seconds=pause)
            if now - began < pause or pause == left:
                return now  # the poller has woken it, or it has to give up
            if (yield from self._look()):
                return self._requests.stamp().at

    def end(self) -> Operation[None]:
        """Remove the notes, because the wait has ended. A note that stays does no harm."""
        for lease in self._maybe_noted:
            try:
                yield from self._erase(lease)
            except LockError as failure:
                log.debug("Could not remove the note of a wait from the lock %r: %s", lease.key, failure)
                if isinstance(failure, LockUnavailableError) and not isinstance(failure, LockConflictError):
                    return  # in an outage, each of the others would take as long

    def _look(self) -> Operation[bool]:
        """Follow the chain. Returns whether the locks seem to be free."""
        self._looks += 1
        if self._looks % _DENIED_FOR == 0:
            self._denied.clear()
        try:
            yield from self._note()
            if not self._noted:
                return False
            records, dead = yield from self._follow()
            graph = WaitGraph(records, {(key, each.lease_id) for key, some in dead.items() for each in some})
            suspects = graph.suspects(self._wait.id)
            self._suspicious = self._suspicious + 1 if suspects else 0
            proven = graph.proven(self._wait.id)
            if proven and graph.last(proven) == self._wait.id:
                raise LockDeadlockError.of(graph.members(self._wait.id, proven))
            behind = bool(suspects) and graph.last(suspects) != self._wait.id
            if behind and not suspects <= graph.waits[self._wait.id].seen:
                yield from self._confirm(suspects)
        except LockUnavailableError as unavailable:
            log.debug("Cannot look for a deadlock, trying again: %s", unavailable)
            return False
        return all(
            key not in records
            or should_wake(records[key], dead[key], claim.slots, claim.capacity, takes=True)
            for key, claim in self._claims.items()
        )

    def _note(self) -> Operation[None]:
        """Note the wait in the records of the leases that have no note yet."""
        for lease in [each for each in self._holding if each not in self._noted]:
            if lease not in self._maybe_noted:
                self._maybe_noted.append(lease)
            try:
                reply = yield from self._write(lease, NO_WAITS)
                if reply.refused:
                    record, _ = yield from self._requests.record_after(lease.key, reply, _READ_WITHIN)
                    holder = record.holders.get(lease.lease_id) if record is not None else None
                    if holder is None or self._wait.id not in holder.waits:
                        self._forget(lease, "it is not among the holders")
                        continue
                    # An earlier attempt was applied, or another process continues the same wait.
                    self._wait = holder.waits[self._wait.id]
            except LockUnavailableError:
                raise
            except LockAccessError as denied:  # not for good, because the claimant has acquired this lock
                log.debug("Cannot note a wait in the lock %r, trying again: %s", lease.key, denied)
                continue
            except LockError as failure:  # such as a lease of another table
                self._forget(lease, str(failure))
                continue
            self._noted.append(lease)

    def _forget(self, lease: Lease, why: str) -> None:
        """Leave a lease out of the search, because it cannot have a note."""
        log.debug("No deadlock through the lock %r (lease %s) is found: %s", lease.key, lease.lease_id, why)
        self._holding.remove(lease)
        self._maybe_noted.remove(lease)

    def _confirm(self, suspects: frozenset[str]) -> Operation[None]:
        """Note that this wait still lasts while a cycle shows around it."""
        for lease in self._noted:
            try:
                yield from self._write(lease, suspects)
            except LockUnavailableError:
                raise
            except LockError as failure:  # as for the first note, it may be denied for a moment only
                log.debug("Cannot note a cycle in the lock %r, trying again: %s", lease.key, failure)

    def _write(self, lease: Lease, seen: frozenset[str]) -> Operation[Reply]:
        wait = replace(self._wait, seen=seen)
        note = partial(self._requests.format.note_wait, lease.key, lease.lease_id, wait)
        return (yield from self._requests.write(lambda _: with_timeout(note(), _READ_WITHIN)))

    def _erase(self, lease: Lease) -> Operation[Reply]:
        erase = partial(self._requests.format.erase_wait, lease.key, lease.lease_id, self._wait.id)
        return (yield from self._requests.write(lambda _: with_timeout(erase(), _READ_WITHIN)))

    def _follow(self) -> Operation[tuple[dict[str, LockRecord], dict[str, list[Holder]]]]:
        """Read the locks that the chain leads to. Returns them, and their dead holders."""
        records: dict[str, LockRecord] = {}
        dead: dict[str, list[Holder]] = {}
        asked: set[str] = set()
        wanted = {*self._claims, *self._further}
        # First of all, so that no long list of others hides a short cycle.
        own = {*self._claims, *(each.key for each in self._holding)}
        while wanted and len(asked) < _MAX_LOCKS:
            wanted = set(sorted(wanted, key=lambda key: (key not in own, key))[: _MAX_LOCKS - len(asked)])
            asked |= wanted
            found = yield from self._read(wanted)
            for record, reply in found:
                records[record.key] = record
                dead[record.key] = self._observer.see(record, reply)
            wanted = {key for each, _ in found for key in self._keys_behind(each)} - asked
        # The next look reads them all in one request.
        self._further = frozenset(key for each in records.values() for key in self._keys_behind(each))
        return records, dead

    def _read(self, keys: Iterable[str]) -> Operation[list[tuple[LockRecord, Reply]]]:
        """Read locks consistently. The chain ends for a while at those that this client may not read."""
        found: list[tuple[LockRecord, Reply]] = []
        for request in self._requests.format.batch_get(sorted(keys), consistent=True):
            try:
                reply: Reply = yield with_timeout(request, _READ_WITHIN)
            except LockAccessError:
                asked = self._requests.format.asked_for(request)
                if len(asked) == 1:
                    self._denied |= asked
                for key in sorted(asked) if len(asked) > 1 else ():
                    found += yield from self._read([key])
                continue
            records = self._requests.format.batch_records(reply.output, reply.server_ms)
            found += [(record, reply) for record in records]
        return found

    def _keys_behind(self, record: LockRecord) -> set[str]:
        """The locks that the holders of a lock wait for, without those that cannot be read."""
        waits = [wait for holder in record.holders.values() for wait in holder.waits.values()]
        return {key for wait in waits for key in wait.keys if self._is_readable(key)}

    def _is_readable(self, key: str) -> bool:
        """Whether this client may read the lock, and its name is valid: another client has written it."""
        try:
            self._requests.format.checked_key(key)
        except LockValueError:
            return False
        return key not in self._denied
