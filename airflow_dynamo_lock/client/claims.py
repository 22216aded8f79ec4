"""Claims from the options of a call, and the re-entrant leases of a client."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from airflow_dynamo_lock.client.options import ClaimOptions, Keys
from airflow_dynamo_lock.core.model import arguments
from airflow_dynamo_lock.core.model.claim import Claim, LockSpec
from airflow_dynamo_lock.core.model.errors import LockValueError
from airflow_dynamo_lock.core.model.lease import Lease
from airflow_dynamo_lock.core.model.outcomes import StillHeld
from airflow_dynamo_lock.core.table.features import Feature, checked_claim, require
from airflow_dynamo_lock.core.table.format import Format


@dataclass(frozen=True)
class Claims:
    """Makes claims from options, with a client's defaults.

    :ivar owner: the holder's name.
    :ivar lease: how long a lease lasts after a heartbeat, in seconds.
    :ivar heartbeat: seconds between heartbeats; None for a sixth of the lease.
    :ivar grace: how long a draining lease lasts, in seconds.
    """

    format: Format
    owner: str
    lease: float
    heartbeat: float | None
    grace: float

    def of(self, key: Keys, options: ClaimOptions, known: type[ClaimOptions] = ClaimOptions) -> list[Claim]:
        """The claims of a call: one, or one for each key of a set.

        :param known: the options of the method, for the error of one that it does not have.
        :raises LockValueError: an option can never work.
        """
        checked_options(options, known)
        if isinstance(key, str):
            return [self._one(key, options)]
        keys = arguments.checked_keys(key)
        if arguments.checked_flag("reentrant", options.get("reentrant", False)):
            raise LockValueError("A set of locks cannot be acquired again: reentrant is for one key.")
        if len(keys) > 1:
            require(self.format, Feature.SETS)
        first = self._one(keys[0], options)
        return [replace(first, key=each) for each in keys]

    def _one(self, key: str, options: ClaimOptions) -> Claim:
        lease_id = options.get("lease_id")
        lease_id = str(uuid.uuid4()) if lease_id is None else arguments.checked_id("A lease id", lease_id)
        data, about, attempt_of = options.get("data"), options.get("about") or {}, options.get("attempt_of")
        for name, value in (("data", data), ("about", about)):
            arguments.checked_map(name, value)
        for text in about.values():
            arguments.checked_text("A value in about", text)
        if attempt_of is not None:
            arguments.checked_text("attempt_of", attempt_of)
        arguments.checked_flag("reentrant", options.get("reentrant", False))
        owner = options.get("owner")
        claim = Claim.of(
            LockSpec.of(options),
            lease=self.lease,
            release_grace=self.grace,
            key=self.format.checked_key(key),
            lease_id=lease_id,
            owner=self.owner if owner is None else arguments.checked_id("The owner", owner),
            data=data,
            about=about,
            attempt_of=attempt_of,
            only_existing=arguments.checked_flag("only_existing", options.get("only_existing", False)),
        )
        if self.heartbeat is not None:
            arguments.checked_heartbeat(self.heartbeat, claim.lease_ms / 1000)
        return checked_claim(self.format, claim)


def checked_options(options: Mapping[str, Any], known: type[ClaimOptions]) -> None:
    """Return if all options are among the known ones.

    :raises LockValueError: one is not.
    """
    if unknown := options.keys() - known.__annotations__.keys():
        names = ", ".join(known.__annotations__)
        raise LockValueError(f"There is no option {sorted(unknown)[0]!r} for a lock; there are {names}.")


@dataclass
class _Held:
    """A re-entrant lease, and how often its owner has acquired it."""

    lease: Lease
    times: int = 1


class ReentrantLeases:
    """The re-entrant leases of one client. Threads of one owner share them."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], _Held] = {}
        self._lock = threading.Lock()

    def add(self, lease: Lease) -> None:
        """Make a lease re-entrant."""
        with self._lock:
            self._held[lease.key, lease.owner] = _Held(lease)

    def again(self, claim: Claim) -> Lease | None:
        """Acquire again the lease that the owner of the claim holds; None if it holds none.

        :raises LockValueError: the claim is for other slots than the lease has.
        """
        with self._lock:
            held = self._held.get((claim.key, claim.owner))
            if held is None or not held.lease.remaining():
                return None
            lease = held.lease
            if (lease.slots, lease.capacity) != (claim.slots, claim.capacity):
                raise LockValueError(
                    f"{claim.owner} holds the lock {claim.key!r} already, with {lease.slots} of {lease.capacity} "
                    f"slots; it cannot be acquired again with {claim.slots} of {claim.capacity}: ask for the same."
                )
            held.times += 1
            return lease

    def count_release(self, lease: Lease) -> StillHeld | None:
        """Release the lease once. Returns None if that was the last time, or the lease is not re-entrant."""
        with self._lock:
            held = self._held.get((lease.key, lease.owner))
            if held is None or held.lease.lease_id != lease.lease_id:
                return None
            held.times -= 1
            if held.times:
                return StillHeld(held.times)
            del self._held[lease.key, lease.owner]
            return None
