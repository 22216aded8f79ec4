"""The two writes on which all others on a lease build: renew it (R3), and remove it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from airflow_dynamo_lock.core.effects import Request, Stamp
from airflow_dynamo_lock.core.model.record import Holder
from airflow_dynamo_lock.core.table.expressions import TableWrites, expiry, remove_clause


def renewed_at(stamp: Stamp, last: Holder | None) -> int | None:
    """The time that a renewal writes: epoch milliseconds, never earlier than the one that it replaces; None if it
    removes that one, or if there is none to compare with.

    :param last: the holder as its last heartbeat left it; None if it is unknown, or there was none.
    """
    if stamp.server_ms is None or last is None:
        return stamp.server_ms
    return None if last.renewed_at_ms is None else max(stamp.server_ms, last.renewed_at_ms)


class RenewalWrites(TableWrites):
    """Builds renewals and removals."""

    def _renewal(
        self,
        key: str,
        lease_id: str,
        lease_ms: int,
        stamp: Stamp,
        renewed_at_ms: int | None,
        seen: Holder | None,
        update: str = "",
        condition: str = "",
        values: Mapping[str, Any] | None = None,
        remove: Sequence[str] = (),
        only_seen: bool = False,
        **names: str,
    ) -> Request:
        """Give the lease a new version, and make further changes.

        The write may arrive late or twice, after newer renewals of the lease. It must never restore its version: an
        observer that has seen it before would take it for a whole lease without a heartbeat. So it requires that the
        time in the record is earlier than the one that it writes, or that the version there is still that of `seen`.
        And no renewal lowers the time, or writes one again where it is missing.

        A writer without server time *removes* the earlier `renewed_at`, which would make the new version look old, and
        leaves `expires_at` as it is. It must know the holder.

        :param renewed_at_ms: the time that it writes (`renewed_at`), epoch milliseconds; None removes it.
        :param seen: the holder as the sender last saw it; None if it has not.
        :param only_seen: the holder must not have changed since, not even by earlier heartbeats.
        """
        dated = stamp.server_ms is not None
        stamped = renewed_at_ms is not None
        assert stamped or seen is not None, "without a time, only the version shows that a renewal is late"
        in_order = ["#holders.#me.#version = :seen"] if seen is not None else []
        if stamped and not only_seen:
            in_order.append("#holders.#me.#renewed_at < :renewed_at")
        order = " OR ".join(in_order)
        return self._write(
            key,
            "SET #holders.#me.#version = :version"
            + (", #expires_at = :expires_at" if dated else "")
            + (", #holders.#me.#renewed_at = :renewed_at" if stamped else "")
            + update
            + remove_clause([*([] if stamped else ["#holders.#me.#renewed_at"]), *remove]),
            f"attribute_exists(#holders.#me) AND ({order}){condition}",
            {
                ":version": stamp.version,
                ":expires_at": expiry(stamp, lease_ms),
                ":renewed_at": renewed_at_ms,
                ":seen": seen.version if seen is not None else None,
                **(values or {}),
            },
            me=lease_id,
            **names,
        )

    def _remove(
        self,
        key: str,
        lease_id: str,
        slots: int,
        stamp: Stamp,
        update: str = "",
        condition: str = "",
        values: Mapping[str, Any] | None = None,
        **names: str,
    ) -> Request:
        """Remove the lease and free its slots."""
        expires_at = ", #expires_at = :expires_at" if stamp.server_ms is not None else ""
        return self._write(
            key,
            f"SET #available = #available + :slots, #last_freed_at = :last_freed_at{update}{expires_at} "
            "REMOVE #holders.#me",
            # The number of slots must match: exactly the slots that were taken become free.
            "attribute_exists(#holders.#me) AND #holders.#me.#slots = :slots" + condition,
            {
                ":slots": slots,
                ":last_freed_at": stamp.best_ms,
                ":expires_at": expiry(stamp, 0),
                **(values or {}),
            },
            me=lease_id,
            **names,
        )
