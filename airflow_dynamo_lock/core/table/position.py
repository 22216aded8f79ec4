"""Places in line: how urgent, which number, and what makes it unique; in the order of their text."""

from __future__ import annotations

from airflow_dynamo_lock.core.effects import Stamp
from airflow_dynamo_lock.core.model.limits import MAX_PRIORITY
from airflow_dynamo_lock.core.model.record import LockRecord


# The most urgent sort first. The number makes the order in which they came, the rest makes each place unique, also
# where the numbers begin anew because the record was forgotten.
def place_of(priority: int, number: int, unique: str) -> str:
    """A place in line."""
    return f"{front_of(priority, number)}/{unique}"


def next_number(seen: LockRecord | None, stamp: Stamp) -> int:
    """The number that is drawn next. The first one is the time, so that they go on growing where a record was forgotten
    while there was somebody in line."""
    return (seen.last_ticket if seen is not None and seen.last_ticket else stamp.best_ms) + 1


def front_of(priority: int, number: int) -> str:
    """The mark that says that nobody stands before who drew that number."""
    return _mark(f"{MAX_PRIORITY - priority:04d}", number)


def mark_at(place: str) -> str:
    """The mark that says that nobody stands before that place."""
    return _mark(in_class(place), number_of(place))


def mark_after(place: str) -> str:
    """The mark that says that nobody stands before that place, or in it."""
    return _mark(in_class(place), number_of(place) + 1)


def in_class(place: str) -> str:
    """How urgent, of a place or a mark between places: the smaller the sooner."""
    return place.split("/")[0]


def number_of(place: str) -> int:
    """Which number was drawn for a place, or for a mark between places."""
    number = [*place.split("/"), "", ""][1]
    return int(number) if number.isdecimal() else 0


def _mark(urgency: str, number: int) -> str:
    return f"{urgency}/{number:015d}"
