"""The rows of the Locks page: which locks it shows, in which order, and what it says of each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from airflow_dynamo_lock.core.model.kind import Kind
from airflow_dynamo_lock.core.model.record import LockRecord
from airflow_dynamo_lock.core.model.state import LockState
from airflow_dynamo_lock.core.model.text import iso, utc

#: How rows may be sorted: name → key.
SORTS: Mapping[str, Callable[[LockState], Any]] = {
    "key": lambda state: state.record.key,
    "held": lambda state: state.held_ms,
    "waiting": lambda state: len(state.waiters),
    "waited": lambda state: state.waited_ms,
    "heartbeat": lambda state: state.silent_ms,
}

#: Which rows may be shown: name → test.
FILTERS: Mapping[str, Callable[[LockState], bool]] = {
    "all": lambda state: True,
    "held": lambda state: bool(state.record.holders),
    "free": lambda state: not state.record.holders,
    "waiting": lambda state: bool(state.waiters),
    "lost": lambda state: state.record.last_loss is not None,
}


@dataclass(frozen=True)
class Viewer:
    """The user to whom the page is shown.

    :ivar deployment: name of this deployment; only its runs have links.
    :ivar dag_ids: DAGs that the viewer may read. Other DAGs have no links.
    """

    deployment: str
    dag_ids: Collection[str]

    def link(self, about: Mapping[str, Any]) -> str | None:
        """The path of a task in the web interface, without the base path; None if the viewer may not follow it."""
        dag_id, run_id, task_id = (about.get(name) for name in ("dag_id", "run_id", "task_id"))
        # Another program may have written anything.
        is_ours = isinstance(dag_id, str) and about.get("deployment") == self.deployment
        if not is_ours or dag_id not in self.dag_ids or not run_id:
            return None
        path = f"dags/{quote(str(dag_id), safe='')}/runs/{quote(str(run_id), safe='')}"
        if task_id:
            path += f"/tasks/{quote(str(task_id), safe='')}"
            if str(about.get("map_index", "-1")) != "-1":
                path += f"/mapped/{quote(str(about['map_index']), safe='')}"
        return path


def selected(
    states: Iterable[LockState],
    search: str,
    state: str,
    deployment: str,
    dag_id: str,
    sort: str,
    *,
    descending: bool,
) -> list[LockState]:
    """The locks to show, in their order.

    :param search: part of the name of a lock, a holder or a waiter, in any case.
    :param state: a name in `FILTERS`.
    :param deployment: only locks that this deployment holds or waits for; empty for all.
    :param dag_id: only locks that this DAG holds or waits for; empty for all.
    :param sort: a name in `SORTS`.
    """
    needle = search.casefold()
    found = [
        each
        for each in states
        if FILTERS[state](each)
        and (not needle or any(needle in text.casefold() for text in _texts(each)))
        and (not deployment or any(about.get("deployment") == deployment for about in _abouts(each)))
        and (not dag_id or any(about.get("dag_id") == dag_id for about in _abouts(each)))
    ]
    return sorted(found, key=lambda each: (SORTS[sort](each), each.record.key), reverse=descending)


def deployments(states: Iterable[LockState]) -> list[str]:
    """The deployments that hold a lock or wait for one."""
    return sorted(
        {str(about["deployment"]) for each in states for about in _abouts(each) if "deployment" in about}
    )


def row(state: LockState, viewer: Viewer) -> dict[str, Any]:
    """What the table shows of a lock."""
    record = state.record
    shared = record.kind is Kind.SHARED
    return {
        "key": record.key,
        "kind": _kind(record),
        "state": record.state,
        "capacity": None if shared else record.capacity,
        "pinned": record.capacity_pinned,
        "available": None if shared else record.available,
        "token": record.token or None,
        "held_seconds": state.held_ms / 1000,
        "waited_seconds": state.waited_ms / 1000,
        "waiting": len(state.waiters),
        "holders": [
            {
                "owner": each.owner,
                "lease_id": each.lease_id,
                "slots": each.slots,
                "since": iso(each.acquired_at),
                "heartbeat": iso(each.renewed_at),
                "inside": len(each.processes),
                "state": "cooling down" if each.cooling_down else "draining" if each.draining else "",
                "took_over": each.took_over,
                "ours": each.ours,
                "link": viewer.link(each.about),
            }
            for each in record.holders.values()
        ],
        "previous": None
        if record.holders or record.previous_owner is None
        else {
            "owner": record.previous_owner,
            "until": None if record.last_freed_at_ms is None else iso(utc(record.last_freed_at_ms)),
        },
        "loss": None
        if record.last_loss is None
        else {**record.last_loss.as_dict(), "text": record.last_loss.describe()},
    }


def queue(state: LockState, viewer: Viewer, most: int) -> list[dict[str, Any]]:
    """What the page shows of a queue, the next waiter first."""
    return [
        {
            "position": number,
            **{name: value for name, value in each.as_dict().items() if name != "about"},
            "link": viewer.link(each.about),
        }
        for number, each in enumerate(state.waiters[:most], 1)
    ]


def _kind(record: LockRecord) -> str:
    """Which actions make sense: those of a lock for readers, of a semaphore, or of a plain lock."""
    if record.kind is Kind.SHARED:
        return "readers"
    return "plain" if record.kind is Kind.PLAIN and not record.capacity_pinned else "slots"


def _texts(state: LockState) -> list[str]:
    holders, waiters = state.record.holders.values(), state.waiters
    return [state.record.key, *(each.owner for each in holders), *(each.owner for each in waiters)]


def _abouts(state: LockState) -> list[Mapping[str, str]]:
    holders, waiters = state.record.holders.values(), state.waiters
    return [*(each.about for each in holders), *(each.about for each in waiters)]
