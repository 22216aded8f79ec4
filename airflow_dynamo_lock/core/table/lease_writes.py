"""The writes on a lease: renew, enter, leave, release, drain, cool down, break; and deleting an idle record."""

from __future__ import annotations

from airflow_dynamo_lock.core.effects import Request, Stamp
from airflow_dynamo_lock.core.model.claim import Change
from airflow_dynamo_lock.core.model.record import Holder
from airflow_dynamo_lock.core.table.expressions import expiry, removed_data, set_data
from airflow_dynamo_lock.core.table.items import VERIFIED
from airflow_dynamo_lock.core.table.renewal_writes import RenewalWrites

#: How far behind a server's clock a process may estimate it, milliseconds. A record may be deleted when its last token
#: is older than this and `max_clock_skew` together: the next token is taken from somebody else's estimate of the time.
ESTIMATE_BEHIND_MS = 3_000


# A holder that asked for it is not removed before its time (`Claim.min_hold_ms`). A process that has had no answer yet
# knows only its host's clock, which may be ahead: the refusal tells it the server's time.
_NOT_HELD_FOR_A_WHILE = "attribute_not_exists(#holders.#me.#hold_until)"


_HELD_LONG_ENOUGH = f"({_NOT_HELD_FOR_A_WHILE} OR #holders.#me.#hold_until <= :now)"


_NOT_DRAINING = " AND attribute_not_exists(#holders.#me.#draining)"


_NONE = Change()


class LeaseWrites(RenewalWrites):
    """Writes on one lease."""

    def heartbeat(
        self, key: str, lease_id: str, lease_ms: int, stamp: Stamp, seen: str | None = None
    ) -> Request:
        """Show that the holder lives."""
        return self._renewal(key, lease_id, lease_ms, stamp, seen)

    def heartbeat_unless_draining(
        self,
        key: str,
        lease_id: str,
        lease_ms: int,
        stamp: Stamp,
        seen: str | None = None,
        change: Change = _NONE,
    ) -> Request:
        """Show that the holder lives, while the lease has not been abandoned."""
        longer = change.lease_ms is not None
        return self._renewal(
            key,
            lease_id,
            lease_ms,
            stamp,
            seen,
            (", #holders.#me.#lease_ms = :lease_ms" if longer else "") + set_data(change.data),
            _NOT_DRAINING + (" AND #holders.#me.#lease_ms <= :lease_ms" if longer else ""),
            values={":lease_ms": change.lease_ms, ":data": change.data},
            remove=removed_data(change.data),
        )

    def enter(
        self, key: str, lease_id: str, process: str, lease_ms: int, stamp: Stamp, seen: str | None = None
    ) -> Request:
        """Note that a guarded process is inside, and beat."""
        return self._renewal(
            key,
            lease_id,
            lease_ms,
            stamp,
            seen,
            ", #holders.#me.#processes.#process = :entered",
            _NOT_DRAINING,
            values={":entered": stamp.best_ms},
            process=process,
        )

    def leave(self, key: str, lease_id: str, process: str, lease_ms: int, stamp: Stamp) -> Request:
        """Note that a guarded process has left."""
        expires_at = "SET #expires_at = :expires_at " if stamp.server_ms is not None else ""
        return self._write(
            key,
            f"{expires_at}REMOVE #holders.#me.#processes.#process",
            "attribute_exists(#holders.#me)",
            {":expires_at": expiry(stamp, lease_ms)},
            me=lease_id,
            process=process,
        )

    def release(self, key: str, lease_id: str, slots: int, stamp: Stamp, *, confirmed: bool) -> Request:
        """Give the slots back, if nobody is inside any more (rule R8).

        :param confirmed: its holder was told of the grant, so its token has been compared with the server's time.
        """
        proven = ", #token_base = :checked" if confirmed and stamp.server_ms is not None else ""
        held = _HELD_LONG_ENOUGH if stamp.answered else _NOT_HELD_FOR_A_WHILE
        return self._remove(
            key,
            lease_id,
            slots,
            stamp,
            proven,
            f" AND size(#holders.#me.#processes) = :zero AND {held}",
            {":zero": 0, ":checked": VERIFIED, ":now": stamp.best_ms},
        )

    def break_(self, key: str, holder: Holder, stamp: Stamp) -> Request:
        """Take a lease away from its holder, whoever is inside. For people."""
        return self._remove(key, holder.lease_id, holder.slots, stamp)

    def drain(self, key: str, lease_id: str, grace_ms: int, stamp: Stamp, seen: str | None = None) -> Request:
        """Shorten a lease to a grace and let nobody enter any more (rule R8). Only once: a second write would
        lengthen what the first one has shortened."""
        return self._renewal(
            key,
            lease_id,
            grace_ms,
            stamp,
            seen,
            ", #holders.#me.#draining = :draining, #holders.#me.#lease_ms = :lease_ms",
            _NOT_DRAINING,
            values={":draining": True, ":lease_ms": grace_ms},
        )

    def forget(self, key: str, latest_token: int | None) -> Request:
        """Delete the record of a lock without holders and waiters.

        :param latest_token: delete it only if its last token is at most this; None deletes it with any token.
        """
        alone = "#available = #capacity AND size(#holders) = :zero AND attribute_not_exists(#queue_head)"
        if latest_token is not None:
            alone += " AND #token <= :latest"
        write = self._write(key, "", alone, {":zero": 0, ":latest": latest_token})
        left_out = ("UpdateExpression", "ReturnValues")
        return Request(
            "DeleteItem", {name: value for name, value in write.params.items() if name not in left_out}
        )

    def cool_down(self, key: str, holder: Holder, rest_ms: int, stamp: Stamp) -> Request:
        """End a lease that is to be held for a while yet (`Claim.min_hold_ms`): it runs out when that is over."""
        return self._renewal(
            key,
            holder.lease_id,
            rest_ms,
            stamp,
            holder.version,
            ", #holders.#me.#draining = :true, #holders.#me.#cooling_down = :true, #holders.#me.#lease_ms = :lease_ms",
            " AND size(#holders.#me.#processes) = :zero",
            values={":true": True, ":lease_ms": rest_ms, ":zero": 0},
        )
