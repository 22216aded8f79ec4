"""Base of the formats of other lock libraries, whose locks have one holder, and neither sets nor queues."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn

from airflow_dynamo_lock.core.table.features import Feature


class OneHolder:
    """The part of `Format` that such a format does not support.

    `core.table.features.require` refuses these features before a request is built, so a call of one of these
    methods is an error in this package.
    """

    name: ClassVar[str]
    features: ClassVar[frozenset[Feature]] = frozenset({Feature.FORGET, Feature.WAITS})

    def check_data(self, data: Mapping[str, Any]) -> None:
        """Accept all data: a format without `Feature.DATA` never receives any. One with it overrides this."""

    def lock_items(self, output: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The items of locks in the response to `scan`: all of them."""
        return list(output.get("Items", ()))

    def _unsupported(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            f"The format {self.name!r} does not support this request: check `features` first."
        )

    acquire_slots = remove_dead = set_capacity = create = transaction = _unsupported
    take_ticket = take_exact_ticket = lower_head = clear_head = advance_head = note_removal = _unsupported
    put_entry = hand_over_entry = delete_entry = read_queue = lock_in = waiters = _unsupported
