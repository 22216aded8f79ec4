"""Requests of the page's script to its service."""

from __future__ import annotations

from typing import Any

#: The header with which the script marks its requests.
OWN = {"X-Dynamo-Lock": "1"}


def actions(key: str, lease_id: str = "l") -> dict[str, dict[str, Any]]:
    """Return the path and the body of each action on a lock."""
    body = {"conn": "dynamo_lock_default", "key": key, "reason": "a drill"}
    on_lease = body | {"lease_id": lease_id}
    return {"/break": on_lease, "/remove": on_lease, "/capacity": body | {"capacity": 3}}
