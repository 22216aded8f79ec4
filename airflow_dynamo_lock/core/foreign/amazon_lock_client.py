"""The format of AmazonDynamoDBLockClient, the lock library for Java (read up to its version 1.4).

It has: a version that each heartbeat changes, the length of the lease, an owner's name, a released lock's data. It
goes by silence and by no clock: who wants a lock watches it for the lease that it shows, and takes it when the version
has stayed. So do we, for a holder of theirs; one that is ours shows when it was last heard of as well, and is taken at
once.

It has no time and no fencing token, and nothing expires: the item of a lock that is not released stays until somebody
takes it. `LockRecord.data` is a map with the one key ``data``, the bytes that their clients keep.

Their clients may be told to update an item in place, which leaves our attribute in it; its mark tells that by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from airflow_dynamo_lock.core.effects import Stamp
from airflow_dynamo_lock.core.foreign.dynamodb import ForeignTable
from airflow_dynamo_lock.core.foreign.values import checked_ms, text
from airflow_dynamo_lock.core.model.errors import LockValueError
from airflow_dynamo_lock.core.model.record import Holder
from airflow_dynamo_lock.core.table.features import Feature

_RELEASED = "1"


class AmazonLockClient(ForeignTable):
    """See above. A sort key is theirs to name: there is none by default."""

    name = "amazon-lock-client"
    mark = "recordVersionNumber"
    default_partition_key = "key"
    free = (
        "attribute_not_exists(#pk) OR #isReleased = :released",
        {":released": _RELEASED},
    )
    cleared: ClassVar[Sequence[str]] = ("isReleased",)
    features: ClassVar[frozenset[Feature]] = frozenset({Feature.DATA, Feature.FORGET})

    def foreign(self, values: Mapping[str, Any]) -> Holder | None:
        """See `ForeignTable`."""
        if values.get("isReleased") == _RELEASED:
            return None
        lease_ms = max(1, checked_ms("leaseDuration", int(text(values, "leaseDuration"))))
        owner, version = text(values, "ownerName"), text(values, "recordVersionNumber")
        return Holder(owner, owner, 1, lease_ms, lease_ms, version, acquired_at_ms=None, ours=False)

    def marked(self, owner: str, lease_id: str, stamp: Stamp) -> str:
        """See `ForeignTable`."""
        return stamp.version

    def taken(self, owner: str, lease_ms: int) -> Mapping[str, Any]:
        """See `ForeignTable`."""
        return {"ownerName": owner}

    def lasting(self, lease_ms: int) -> Mapping[str, Any]:
        """See `ForeignTable`."""
        return {"leaseDuration": str(lease_ms)}

    def emptied(self, stamp: Stamp) -> Mapping[str, Any]:
        """See `ForeignTable`. As their clients do it that are told to keep the item: what else it has is theirs. But
        the version is new, so that nothing succeeds any more that goes by the old one: a heartbeat of a holder of
        theirs whose lock was broken, or the write of one who took our holder for dead just before it was released."""
        return {"isReleased": _RELEASED, "recordVersionNumber": stamp.version}

    def check_data(self, data: Mapping[str, Any]) -> None:
        """Return if these are bytes."""
        self.kept(data)

    def kept(self, data: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """See `ForeignTable`."""
        if not data:
            return {}
        if data.keys() != {"data"} or not isinstance(data["data"], bytes):
            raise LockValueError(
                f"The format {self.name!r} keeps bytes with a lock, and nothing else: give data={{'data': b'…'}}."
            )
        return {"data": data["data"]}

    def no_data(self, data: Mapping[str, Any] | None) -> list[str]:
        """See `ForeignTable`."""
        return ["data"] if data is not None and not data else []

    def data_of(self, values: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """See `ForeignTable`."""
        return {"data": values["data"]} if "data" in values else None
