"""The kinds of a lock. A lock's capacity decides its kind."""

from __future__ import annotations

from enum import Enum

from airflow_dynamo_lock.core.model.limits import SHARED


class Kind(Enum):
    """The kind of a lock, and of a claim for it. The value names it in errors."""

    #: Capacity 1: one holder at a time.
    PLAIN = "a plain lock"
    #: Capacity `limits.SHARED`: each reader takes one slot.
    SHARED = "a shared lock"
    #: Any other capacity: holders take the slots that they ask for.
    SEMAPHORE = "a semaphore"

    @classmethod
    def of(cls, capacity: int) -> Kind:
        """The kind of a lock with this capacity."""
        return {1: cls.PLAIN, SHARED: cls.SHARED}.get(capacity, cls.SEMAPHORE)

    @property
    def mode(self) -> str:
        """``"shared"`` or ``"exclusive"``."""
        return "shared" if self is Kind.SHARED else "exclusive"

    def describe(self, capacity: int) -> str:
        """The kind and, for a semaphore, its capacity."""
        return f"{self.value} with a capacity of {capacity}" if self is Kind.SEMAPHORE else self.value


def compatible(capacity: int, other: int) -> bool:
    """Whether holders with these capacities can hold a lock at the same time, given enough free slots."""
    return capacity == other or Kind.of(capacity) is Kind.of(other) is Kind.SEMAPHORE
