"""What a format without slots, sets and queues refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, NoReturn

from airflow_dynamo_lock.core.model.claim import Claim
from airflow_dynamo_lock.core.model.errors import LockValueError


class OneHolder:
    """A format without slots, sets or lines."""

    name: ClassVar[str]
    has_queue: ClassVar[bool] = False

    def checked_claim(self, claim: Claim) -> Claim:
        """See `Format`. Nobody waits in line here, so that nobody is asked to."""
        for wanted, what in (
            (claim.capacity != 1, "be shared, or have more than one slot"),
            (claim.min_hold_ms, "be held for a least time"),
            (claim.priority, "have a line for those who wait, nor priorities in it"),
        ):
            if wanted:
                self._cannot(what)
        return replace(claim, fair=False)

    def checked_set(self) -> None:
        """See `Format`."""
        self._no_sets()

    def checked_capacity(self) -> None:
        """See `Format`."""
        self._no_slots()

    def _cannot(self, what: str) -> NoReturn:
        raise LockValueError(
            f"In the format {self.name!r} a lock cannot {what}: use a table of the format 'native' for that."
        )

    def _no_slots(self, *_: Any, **__: Any) -> NoReturn:
        self._cannot("be shared, or have more than one slot")

    def _no_queue(self, *_: Any, **__: Any) -> NoReturn:
        self._cannot("have a line for those who wait, nor priorities in it")

    def _no_sets(self, *_: Any, **__: Any) -> NoReturn:
        self._cannot("be taken together with others")

    def _no_min_hold(self, *_: Any, **__: Any) -> NoReturn:
        self._cannot("be held for a least time")

    acquire_slots = remove_dead = set_capacity = create = _no_slots
    take_ticket = take_exact_ticket = lower_head = clear_head = advance_head = _no_queue
    put_entry = hand_over_entry = delete_entry = read_queue = lock_in = waiters = _no_queue
    transaction = _no_sets
    cool_down = _no_min_hold
