"""The two writes on which all others on a lease build: renew it (R3), and remove it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from airflow_dynamo_lock.core.effects import Request, Stamp
from airflow_dynamo_lock.core.model.limits import ESTIMATES_DIFFER_MS
from airflow_dynamo_lock.core.table.expressions import TableWrites, expiry, remove_clause


class RenewalWrites(TableWrites):
    """Builds renewals and removals."""

    def _renewal(
        self,
        key: str,
        lease_id: str,
        lease_ms: int,
        stamp: Stamp,
        seen: str | None,
        update: str = "",
        condition: str = "",
        values: Mapping[str, Any] | None = None,
        remove: Sequence[str] = (),
        **names: str,
    ) -> Request:
        """Give the lease a new version, and make further changes.

        The write may arrive late, after newer renewals of the lease. It must not replace a newer stamp by its old one,
        or a live holder would look dead. So it succeeds only if the stamp in the record is no newer than its own (to
        within `ESTIMATES_DIFFER_MS`), or if the version in the record is still `seen`.

        A writer without server time *removes* the earlier `renewed_at`, which would make the new version look old, and
        leaves `expires_at` as it is.
        """
        stamped = stamp.server_ms is not None
        if seen is not None:
            order = " AND #holders.#me.#version = :seen"
        else:
            order = " AND #holders.#me.#renewed_at <= :no_newer" if stamped else ""
        return self._write(
            key,
            "SET #holders.#me.#version = :version"
            + (", #expires_at = :expires_at, #holders.#me.#renewed_at = :renewed_at" if stamped else "")
            + update
            + remove_clause([*([] if stamped else ["#holders.#me.#renewed_at"]), *remove]),
            "attribute_exists(#holders.#me)" + order + condition,
            {
                ":version": stamp.version,
                ":expires_at": expiry(stamp, lease_ms),
                ":renewed_at": stamp.server_ms,
                ":no_newer": stamp.best_ms + ESTIMATES_DIFFER_MS,
                ":seen": seen,
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
