"""The write that every renewal is (R3), and the write that removes a lease."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from airflow_dynamo_lock.core.effects import Request, Stamp
from airflow_dynamo_lock.core.table.expressions import OVERTAKEN_MS, TableWrites, expiry, remove_clause


class RenewalWrites(TableWrites):
    """Writes that give a lease a new version, or remove it."""

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
        """A write that gives the lease a new version.

        It may arrive long after its sender has given it up, when the lease has been renewed since. It must not put its
        old stamp in the place of a newer one, or a live holder would look dead: it succeeds only if the stamp there is
        no newer than its own, to within `OVERTAKEN_MS`, by which two writers' estimates may differ; or, where that
        cannot be told, if the version is still the one `seen`.

        A writer that does not know the server's time, because no answer tells it, *removes* the stamp of the one
        before, which would make the new version look old; nor does it tell when the record expires.
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
                ":no_newer": stamp.best_ms + OVERTAKEN_MS,
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
    ) -> Request:
        expires_at = ", #expires_at = :expires_at" if stamp.server_ms is not None else ""
        return self._write(
            key,
            f"SET #available = #available + :slots, #last_freed_at = :last_freed_at{update}{expires_at} "
            "REMOVE #holders.#me",
            # So many, and no other number: what is given back is what was taken.
            "attribute_exists(#holders.#me) AND #holders.#me.#slots = :slots" + condition,
            {
                ":slots": slots,
                ":last_freed_at": stamp.best_ms,
                ":expires_at": expiry(stamp, 0),
                **(values or {}),
            },
            me=lease_id,
        )
