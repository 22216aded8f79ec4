"""Edits: what a renewal changes in addition to the version and the time of the last heartbeat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Heartbeat:
    """No edit. Renews a draining lease too."""


@dataclass(frozen=True)
class Change:
    """The length of the lease or the lock's data. Without either, a heartbeat that does not renew a draining lease.

    :ivar longer: the lease gets the length of the renewal. Never shorter than before, because the holder may rely on
        the old length.
    :ivar data: the lock's new data; None keeps them, an empty map removes them.
    """

    longer: bool = False
    data: Mapping[str, Any] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Enter:
    """A guarded process enters (R8).

    :ivar process: id of the process.
    """

    process: str


@dataclass(frozen=True)
class Drain:
    """The lease is shortened to the length of the renewal, and no process may enter (R8)."""


@dataclass(frozen=True)
class CoolDown:
    """The lease is released, and lasts for the length of the renewal because of `min_hold`.

    :ivar usual_ms: how long leases are usually held, milliseconds; None keeps what the record says.
    """

    usual_ms: int | None = None


Edit = Heartbeat | Change | Enter | Drain | CoolDown
