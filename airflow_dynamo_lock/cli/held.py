"""``DYNAMO_LOCK_HELD``: which leases the commands around a command hold, so that nested ones find deadlocks (R14)."""

from __future__ import annotations

import json
import os
from typing import Any

from airflow_dynamo_lock.cli.options import Settings
from airflow_dynamo_lock.core.model.errors import LockValueError
from airflow_dynamo_lock.core.model.lease import Lease

#: The variable: a JSON list of maps with a table and a lease. They are no secrets.
VARIABLE = "DYNAMO_LOCK_HELD"


def held(where: Settings) -> list[Lease]:
    """The leases in the same table that the commands around this one hold."""
    leases = []
    for each in _entries():
        try:
            if each["table"] == where.table:
                leases.append(Lease.from_dict(each["lease"]))
        except (KeyError, TypeError, LockValueError):
            continue  # another version wrote it: without it a deadlock is not found, and nothing else
    return leases


def with_lease(where: Settings, lease: Lease) -> str:
    """The value of the variable for a command that runs under this lease as well."""
    return json.dumps([*_entries(), {"table": where.table, "lease": lease.as_dict()}])


def _entries() -> list[Any]:
    try:
        entries = json.loads(os.environ.get(VARIABLE) or "[]")
    except ValueError:
        return []
    return entries if isinstance(entries, list) else []
