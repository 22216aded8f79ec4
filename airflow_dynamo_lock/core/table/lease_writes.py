"""The writes on one lease: renew, leave, release, break. And the deletion of an idle record."""

from __future__ import annotations

from typing import assert_never

from airflow_dynamo_lock.core.effects import Request, Stamp
from airflow_dynamo_lock.core.model.decisions import Decision, Loss
from airflow_dynamo_lock.core.model.edits import Change, CoolDown, Drain, Edit, Enter, Heartbeat
from airflow_dynamo_lock.core.model.hold import Hold
from airflow_dynamo_lock.core.model.record import Holder
from airflow_dynamo_lock.core.model.waits import Wait
from airflow_dynamo_lock.core.table.expressions import expiry, removed_data, set_data
from airflow_dynamo_lock.core.table.items import VERIFIED, WAIT_PREFIX, loss_values, wait_values
from airflow_dynamo_lock.core.table.renewal_writes import RenewalWrites, renewed_at

#: How far a process's estimate may be behind a server's clock, milliseconds. `forget` keeps a record whose last token
#: is younger than this plus `max_clock_skew`, because the next record's first token is another process's estimate.
ESTIMATE_BEHIND_MS = 3_000


# The slots stay taken for `Claim.min_hold_ms`. A process without a response so far knows only its host's clock, which
# may be ahead: it uses the first condition, and the refusal shows it the server's time.
_NO_MIN_HOLD = "attribute_not_exists(#holders.#me.#hold_until)"


_MIN_HOLD_OVER = f"({_NO_MIN_HOLD} OR #holders.#me.#hold_until <= :now)"


_NOT_DRAINING = " AND attribute_not_exists(#holders.#me.#draining)"
_NOT_COOLING_DOWN = " AND attribute_not_exists(#holders.#me.#cooling_down)"


_NONE_INSIDE = " AND size(#holders.#me.#processes) = :zero"
_ONLY_ME_INSIDE = (
    " AND attribute_exists(#holders.#me.#processes.#process) AND size(#holders.#me.#processes) = :one"
)


def _set_usual(usual_ms: int | None) -> str:
    """The assignment of the usual hold time; empty if it is kept. No condition ever depends on it."""
    return ", #usual_ms = :usual_ms" if usual_ms is not None else ""


class LeaseWrites(RenewalWrites):
    """Writes on one lease."""

    def renew(
        self, key: str, lease_id: str, lease_ms: int, stamp: Stamp, edit: Edit, seen: Holder | None = None
    ) -> Request:
        """Write a heartbeat: it proves that the holder is alive, and makes an edit.

        :param lease_ms: how long the lease lasts after it, milliseconds.
        :param seen: the holder as the sender last saw it, which `CoolDown` needs; None if it has not.
        """
        update, condition = "", ""
        remove: list[str] = []
        match edit:
            case Heartbeat():
                condition = _NOT_COOLING_DOWN
            case Change():
                update = (", #holders.#me.#lease_ms = :lease_ms" if edit.longer else "") + set_data(edit.data)
                condition = _NOT_DRAINING + (
                    " AND #holders.#me.#lease_ms <= :lease_ms" if edit.longer else ""
                )
                remove = removed_data(edit.data)
            case Enter():
                update = ", #holders.#me.#processes.#process = :now"
                condition = _NOT_DRAINING
            case Drain():
                # Once only: a second drain would lengthen the lease that the first one has shortened.
                update = ", #holders.#me.#draining = :true, #holders.#me.#lease_ms = :lease_ms"
                condition = _NOT_DRAINING
            case CoolDown():
                update = (
                    ", #holders.#me.#draining = :true, #holders.#me.#cooling_down = :true, "
                    "#holders.#me.#lease_ms = :lease_ms" + _set_usual(edit.usual_ms)
                )
                condition = _NONE_INSIDE
            case _:
                assert_never(edit)
        return self._renewal(
            key,
            lease_id,
            lease_ms,
            stamp,
            # Nothing renews a lease that cools down, so its time may be earlier.
            stamp.server_ms if isinstance(edit, CoolDown) else renewed_at(stamp, seen),
            seen,
            update,
            condition,
            values={
                ":data": edit.data if isinstance(edit, Change) else None,
                ":lease_ms": lease_ms,
                ":now": stamp.best_ms,
                ":usual_ms": edit.usual_ms if isinstance(edit, CoolDown) else None,
                ":true": True,
                ":zero": 0,
            },
            remove=remove,
            only_seen=isinstance(edit, CoolDown),
            **({"process": edit.process} if isinstance(edit, Enter) else {}),
        )

    def leave(self, key: str, lease_id: str, process: str, lease_ms: int, stamp: Stamp) -> Request:
        """Remove a guarded process that has left."""
        expires_at = "SET #expires_at = :expires_at " if stamp.server_ms is not None else ""
        return self._write(
            key,
            f"{expires_at}REMOVE #holders.#me.#processes.#process",
            "attribute_exists(#holders.#me)",
            {":expires_at": expiry(stamp, lease_ms)},
            me=lease_id,
            process=process,
        )

    def release(
        self,
        key: str,
        lease_id: str,
        slots: int,
        stamp: Stamp,
        *,
        confirmed: bool,
        hold: Hold | None = None,
        leaving: str | None = None,
    ) -> Request:
        """Free the slots, if no process is inside (R8).

        :param confirmed: the caller received the grant, so its token has been compared with the server's time (R10).
        :param hold: what the release leaves in the record; None leaves nothing.
        :param leaving: the process that leaves with this write, and must be the only one inside.
        """
        usual_ms = None if hold is None else hold.mean(stamp.best_ms)
        set_owner = "" if hold is None else ", #previous_owner = :owner"
        proven = ", #token_base = :verified" if confirmed and stamp.server_ms is not None else ""
        min_hold = _MIN_HOLD_OVER if stamp.answered else _NO_MIN_HOLD
        inside = _NONE_INSIDE if leaving is None else _ONLY_ME_INSIDE
        return self._remove(
            key,
            lease_id,
            slots,
            stamp,
            proven + _set_usual(usual_ms) + set_owner,
            f"{inside} AND {min_hold}",
            {
                ":zero": 0,
                ":one": 1,
                ":verified": VERIFIED,
                ":now": stamp.best_ms,
                ":usual_ms": usual_ms,
                ":owner": None if hold is None else hold.owner,
            },
            **({"process": leaving} if leaving is not None else {}),
        )

    def note_wait(self, key: str, lease_id: str, wait: Wait) -> Request:
        """Note what the holder waits for (R14). A note with `seen` replaces the one that is there; another one is added
        if there is none. Neither renews the lease."""
        exists = "attribute_exists" if wait.seen else "attribute_not_exists"
        return self._write(
            key,
            "SET #holders.#me.#wait = :wait",
            f"attribute_exists(#holders.#me) AND {exists}(#holders.#me.#wait)",
            {":wait": wait_values(wait)},
            me=lease_id,
            wait=WAIT_PREFIX + wait.id,
        )

    def erase_wait(self, key: str, lease_id: str, wait_id: str) -> Request:
        """Remove the note of a wait that has ended."""
        return self._write(
            key,
            "REMOVE #holders.#me.#wait",
            "attribute_exists(#holders.#me)",
            {},
            me=lease_id,
            wait=WAIT_PREFIX + wait_id,
        )

    def break_(self, key: str, holder: Holder, stamp: Stamp, decision: Decision | None = None) -> Request:
        """Remove a lease, even with processes inside. Only people decide that.

        :param decision: who decided it, and why, for the record; None if no caller has received the lease.
        """
        if decision is None:
            return self._remove(key, holder.lease_id, holder.slots, stamp)
        loss = Loss(holder.lease_id, holder.owner, stamp.best_ms, broken=True, decision=decision)
        return self._remove(
            key,
            holder.lease_id,
            holder.slots,
            stamp,
            ", #previous_owner = :owner, #last_loss = :loss",
            values={":owner": holder.owner, ":loss": loss_values(loss)},
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
