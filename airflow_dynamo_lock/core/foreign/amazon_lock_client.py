"""The format of AmazonDynamoDBLockClient, the lock library for Java, up to version 1.4.

An item has a version that changes with each heartbeat, the length of the lease, and the name of the owner.
There is neither a time nor a fencing token. A client that wants a lock watches it for the length of the lease
that the item shows, and takes the lock if the version has not changed.

- **Holders of that library** are dead when this process has seen the same version for the length of the lease
  (R3).
- **Holders of this package** store the server time of their last heartbeat as well, so clients of this
  package also prove their death by server time, in one attempt.

Nothing expires: the item of a lock that was not released stays until the next client takes the lock.
`LockRecord.data` is a map with the one key ``data``: the bytes that the library's clients store with a lock.

Clients of that library can be configured to update an item instead of replacing it, which keeps the attribute
of this package. It does not count any more, because the copy of the mark in it differs from the item's
version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from airflow_dynamo_lock.core.effects import Stamp
from airflow_dynamo_lock.core.foreign.dynamodb import ForeignTable
from airflow_dynamo_lock.core.foreign.values import checked_ms, text, their_holder
from airflow_dynamo_lock.core.model.errors import LockValueError
from airflow_dynamo_lock.core.model.record import Holder
from airflow_dynamo_lock.core.table.features import Feature

# Value of `isReleased` in the item of a released lock.
_RELEASED = "1"


class AmazonLockClient(ForeignTable):
    """The items of AmazonDynamoDBLockClient, by default without a sort key. The mark is their version."""

    name = "amazon-lock-client"
    mark_attribute = "recordVersionNumber"
    default_partition_key = "key"
    free_condition = (
        "attribute_not_exists(#pk) OR #isReleased = :released",
        {":released": _RELEASED},
    )
    removed_on_grant: ClassVar[Sequence[str]] = ("isReleased",)
    features: ClassVar[frozenset[Feature]] = frozenset({Feature.DATA, Feature.FORGET, Feature.WAITS})

    def foreign_holder(self, values: Mapping[str, Any]) -> Holder | None:
        """The holder that the item names; None if the lock is released. Its owner is its lease id as well."""
        if values.get("isReleased") == _RELEASED:
            return None
        # The length of the lease is a number of milliseconds, stored as text.
        lease_ms = max(1, checked_ms("leaseDuration", int(text(values, "leaseDuration"))))
        owner, version = text(values, "ownerName"), text(values, "recordVersionNumber")
        return their_holder(owner, lease_ms, version)

    def new_mark(self, owner: str, lease_id: str, stamp: Stamp) -> str:
        """The version of the stamp: like the library, this package writes a new one with each heartbeat."""
        return stamp.version

    def owner_attributes(self, owner: str) -> Mapping[str, Any]:
        """The name of the owner."""
        return {"ownerName": owner}

    def lease_attributes(self, lease_ms: int) -> Mapping[str, Any]:
        """The length of the lease in milliseconds, as text."""
        return {"leaseDuration": str(lease_ms)}

    def released_attributes(self, stamp: Stamp) -> Mapping[str, Any]:
        """Mark the item as released and keep its other attributes, as a client does that is configured to
        keep items.

        The version is new, so that each write fails that is conditional on the old one: a heartbeat of a
        holder whose lock was broken, or a reclaim by a client that found this package's holder dead just
        before the release.
        """
        return {"isReleased": _RELEASED, "recordVersionNumber": stamp.version}

    def check_data(self, data: Mapping[str, Any]) -> None:
        """Return if the data are ``{"data": b"…"}``, or empty.

        :raises LockValueError: they are not.
        """
        self.data_attributes(data)

    def data_attributes(self, data: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """The attribute `data` with the bytes; none if the data are kept or removed.

        :raises LockValueError: the data are not ``{"data": b"…"}``.
        """
        if not data:
            return {}
        if data.keys() != {"data"} or not isinstance(data["data"], bytes):
            raise LockValueError(
                f"The format {self.name!r} keeps bytes with a lock, and no other data: "
                "give data={'data': b'…'}."
            )
        return {"data": data["data"]}

    def removed_data(self, data: Mapping[str, Any] | None) -> list[str]:
        """The attribute `data`, if the data are an empty map."""
        return ["data"] if data is not None and not data else []

    def read_data(self, values: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The bytes as ``{"data": b"…"}``; None if there are none."""
        return {"data": values["data"]} if "data" in values else None
