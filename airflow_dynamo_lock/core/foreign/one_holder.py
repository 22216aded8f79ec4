"""Base of the formats of other lock libraries, whose locks have one holder, and no sets and queues."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn

from airflow_dynamo_lock.core.table.features import Feature


class OneHolder:
    """The requests that are never made, because the format does not have the feature."""

    name: ClassVar[str]
    features: ClassVar[frozenset[Feature]] = frozenset({Feature.FORGET})

    def check_data(self, data: Mapping[str, Any]) -> None:
        """Overridden by the format that stores data."""

    def _unsupported(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"The format {self.name!r} has no such request.")

    acquire_slots = remove_dead = set_capacity = create = transaction = _unsupported
    take_ticket = take_exact_ticket = lower_head = clear_head = advance_head = _unsupported
    put_entry = hand_over_entry = delete_entry = read_queue = lock_in = waiters = _unsupported
