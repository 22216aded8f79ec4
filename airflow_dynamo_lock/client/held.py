"""``DYNAMO_LOCK_HELD``: which leases the processes around this one hold.

`dynamo-lock run`, the guard of an Airflow task, and a locked notebook cell set it for their child processes. With it,
nested commands find deadlocks (R14), and a notebook joins the lease under which it was started.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from airflow_dynamo_lock.core.model.errors import LockValueError
from airflow_dynamo_lock.core.model.lease import Lease

if TYPE_CHECKING:
    from airflow_dynamo_lock.client.sync_client import LockClient

#: The variable: a JSON list of maps with a table, its region, and a lease. They are no secrets.
VARIABLE = "DYNAMO_LOCK_HELD"


def held_around(locks: LockClient) -> list[Lease]:
    """The leases in the client's table that the processes around this one hold, the innermost last."""
    leases = []
    for each in _entries():
        try:
            # A version that did not write the region may have made the entry.
            if each["table"] == locks.table and each.get("region", locks.region_name) == locks.region_name:
                leases.append(Lease.from_dict(each["lease"]))
        except (AttributeError, KeyError, TypeError, LockValueError):
            continue  # another version wrote it: without it a deadlock is not found, and nothing else
    return leases


def with_leases(locks: LockClient, leases: Sequence[Lease]) -> str:
    """The value of the variable for a child process that runs under these leases as well."""
    table = {"table": locks.table, "region": locks.region_name}
    return json.dumps([*_entries(), *({**table, "lease": lease.as_dict()} for lease in leases)])


def forget(leases: Iterable[Lease]) -> None:
    """Remove leases from this process's own environment, if it has set them there."""
    if VARIABLE in os.environ:
        ids = {lease.lease_id for lease in leases}
        os.environ[VARIABLE] = json.dumps([each for each in _entries() if _lease_id(each) not in ids])


def _entries() -> list[Any]:
    try:
        entries = json.loads(os.environ.get(VARIABLE) or "[]")
    except ValueError:
        return []
    return entries if isinstance(entries, list) else []


def _lease_id(entry: Any) -> Any:
    try:
        return entry["lease"]["lease_id"]
    except (KeyError, TypeError):
        return None
