"""Places in a queue, as text that sorts in the order of the queue: ``priority/ticket/unique``.

A higher priority sorts first, then a lower ticket. The last part makes each place unique, also when tickets begin anew
because the record was forgotten. A *head* is a place without the last part: it sorts before all places of its ticket.
"""

from __future__ import annotations

from airflow_dynamo_lock.core.effects import Stamp
from airflow_dynamo_lock.core.model.limits import MAX_PRIORITY
from airflow_dynamo_lock.core.model.record import LockRecord


def place_of(priority: int, ticket: int, unique: str) -> str:
    """The place of a waiter."""
    return f"{head_of(priority, ticket)}/{unique}"


def next_ticket(seen: LockRecord | None, stamp: Stamp) -> int:
    """The next ticket of a queue. The first one is the time, so that tickets continue to grow when a record was
    forgotten while it had waiters."""
    return (seen.last_ticket if seen is not None and seen.last_ticket else stamp.best_ms) + 1


def head_of(priority: int, ticket: int) -> str:
    """The head of a queue whose first waiter has this priority and ticket."""
    return _head(f"{MAX_PRIORITY - priority:04d}", ticket)


def head_at(place: str) -> str:
    """The head of a queue whose first waiter has this place."""
    return _head(class_of(place), ticket_of(place))


def head_after(place: str) -> str:
    """The head of a queue whose waiters all come after this place."""
    return _head(class_of(place), ticket_of(place) + 1)


def class_of(place: str) -> str:
    """The first part of a place or a head: all waiters of one priority have the same. Smaller goes first."""
    return place.split("/")[0]


def ticket_of(place: str) -> int:
    """The ticket of a place or a head."""
    ticket = [*place.split("/"), "", ""][1]
    return int(ticket) if ticket.isdecimal() else 0


def _head(priority_class: str, ticket: int) -> str:
    return f"{priority_class}/{ticket:015d}"
