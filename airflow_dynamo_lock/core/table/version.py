"""The version of the table's format (R13): which versions this package reads, and which it writes.

A new version is introduced in two releases, because the deployments that share a table are not upgraded at the same
time: the first release knows the new version and still writes the old one, the second writes it (docs/upgrading.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow_dynamo_lock.core.model.errors import LockVersionError
from airflow_dynamo_lock.core.model.text import shown

#: The newest version that this package can read and change.
KNOWN = 1
#: The version that this package writes into a record that it creates or finds idle.
WRITTEN = 1

#: The condition of every write to a lock's record: no newer version of this package has written it.
IS_KNOWN = "(attribute_not_exists(#format_version) OR #format_version <= :known_version)"


def check(values: Mapping[str, Any], name: str, table: str) -> None:
    """Return if this package knows the version of an item's format. An item without a version counts as the first.

    :param values: the item's decoded attributes.
    :raises LockVersionError: a newer version of this package has written the item.
    """
    found = values.get("format_version", 1)
    if isinstance(found, int) and found > KNOWN:
        raise LockVersionError(
            f"The record of the lock {name!r} in table {table!r} has the format version {shown(found)}, and this "
            f"airflow-dynamo-lock knows versions up to {KNOWN}: upgrade this deployment; nothing was written."
        )
