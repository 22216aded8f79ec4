"""The web service of the Locks page. Airflow's API server serves it under ``/dynamo-lock``.

Users who may read pools may see the page, and those who may edit pools may act. No GET request changes anything, and
each action that succeeds is in Airflow's audit log.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.common.db.common import SessionDep
from airflow.api_fastapi.core_api.security import GetUserDep, requires_access_pool
from airflow.api_fastapi.logging.decorators import action_logging
from fastapi import Depends, FastAPI, Header, HTTPException, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from airflow_dynamo_lock.airflow.hooks import DynamoLockHook
from airflow_dynamo_lock.airflow.page import history, rows
from airflow_dynamo_lock.airflow.page.snapshots import Snapshots
from airflow_dynamo_lock.airflow.versions import conf
from airflow_dynamo_lock.client.sync_client import LockClient
from airflow_dynamo_lock.core.model.errors import (
    CapacityMismatchError,
    LockAccessError,
    LockError,
    LockNotHeldError,
    LockNotWaitingError,
    LockValueError,
)
from airflow_dynamo_lock.core.model.state import LockState
from airflow_dynamo_lock.core.model.text import iso, utc
from airflow_dynamo_lock.defaults import DEFAULT_CONN_ID
from airflow_dynamo_lock.monitoring import openmetrics

# Maximum number of rows, and of waiters, in one answer.
_MAX_ROWS, _MAX_WAITERS = 200, 500
# What a page that cannot read the table says to do.
_HELP = {
    LockAccessError: "Give the API server's role the reader's policy of docs/permissions.md.",
    LockValueError: "Correct the connection.",
}

# The page of each user reads every few seconds.
_DAGS_SECONDS = 30.0
# Id of a user → when that was asked, in monotonic seconds, and the DAGs that the user may read.
_dags_of_users: dict[str, tuple[float, frozenset[str]]] = {}

look = Depends(requires_access_pool("GET"))
act = Depends(requires_access_pool("PUT"))


def _connect(conn_id: str) -> LockClient:
    return DynamoLockHook(conn_id).get_conn()


snapshots = Snapshots(_connect)


def connection_ids() -> list[str]:
    """The connections whose tables the page shows: the option ``page_connections`` of ``[dynamo_lock]``."""
    listed = conf.get("dynamo_lock", "page_connections", fallback="") or DEFAULT_CONN_ID
    return [each.strip() for each in listed.split(",") if each.strip()]


def _checked(conn_id: str) -> str:
    """Return the id if the page shows this connection. No request can probe for others."""
    if conn_id not in connection_ids():
        raise HTTPException(404, f"The page does not show the connection {conn_id!r}: see page_connections.")
    return conn_id


def _own(request_header: Annotated[str | None, Header(alias="X-Dynamo-Lock")] = None) -> None:
    """Return if the page's script has sent the request. A form on another site cannot set the header."""
    if request_header is None:
        raise HTTPException(403, "The header X-Dynamo-Lock is missing.")


def _viewer(conn_id: str, user: Any) -> rows.Viewer:
    return rows.Viewer(_deployment(conn_id), _readable_dags(user))


def _readable_dags(user: Any) -> frozenset[str]:
    """The DAGs that a user may read, at most `_DAGS_SECONDS` ago: an auth manager may have to look at all DAGs."""
    now, user_id = time.monotonic(), user.get_id()
    asked_at, found = _dags_of_users.get(user_id, (-_DAGS_SECONDS, frozenset()))
    if now - asked_at >= _DAGS_SECONDS:
        found = frozenset(get_auth_manager().get_authorized_dag_ids(user=user))
        for other, (at, _) in list(_dags_of_users.items()):
            if now - at >= _DAGS_SECONDS:
                _dags_of_users.pop(other, None)
        _dags_of_users[user_id] = now, found
    return found


@cache
def _deployment(conn_id: str) -> str:
    return DynamoLockHook(conn_id).settings.deployment


app = FastAPI(title="Locks", openapi_url=None, docs_url=None, redoc_url=None)


@app.get("/locks.js", dependencies=[look])
def script() -> Response:
    """The script of the page."""
    text = (Path(__file__).parent / "locks.js").read_text()
    return Response(text, media_type="text/javascript", headers={"Cache-Control": "no-cache"})


@app.get("/locks", dependencies=[look])
def locks(
    request: Request,
    user: GetUserDep,
    conn: str = "",
    search: str = "",
    state: Annotated[str, Query(pattern=f"^({'|'.join(rows.FILTERS)})$")] = "all",
    deployment: str = "",
    dag_id: str = "",
    sort: Annotated[str, Query(pattern=f"^({'|'.join(rows.SORTS)})$")] = "key",
    descending: bool = False,
    offset: Annotated[int, Query(ge=0)] = 0,
    limit: Annotated[int, Query(ge=1, le=_MAX_ROWS)] = 100,
) -> Response:
    """The locks of a table."""
    conn_id = _checked(conn or connection_ids()[0])
    snapshot = snapshots.latest(conn_id)
    answer: dict[str, Any] = {
        "connections": connection_ids(),
        "connection": conn_id,
        "next_seconds": snapshot.fresh_seconds,
        "may_act": _may_act(user),
        "error": None if snapshot.error is None else _failure(snapshot.error),
        "damaged": snapshot.damaged[:20],
    }
    if snapshot.error is None:
        shown = rows.selected(snapshot.states, search, state, deployment, dag_id, sort, descending=descending)
        viewer, totals = _viewer(conn_id, user), snapshot.totals
        now_ms = max((each.now_ms for each in snapshot.states), default=None)
        answer |= {
            "table": snapshots.client(conn_id).table,
            "deployments": rows.deployments(snapshot.states),
            "now": None if now_ms is None else iso(utc(now_ms)),
            "total": totals.locks,
            "held": totals.held,
            "waiting": totals.waiting,
            "matching": len(shown),
            "rows": [rows.row(each, viewer) for each in shown[offset : offset + limit]],
        }
    return _with_tag(request, answer)


@app.get("/queue", dependencies=[look])
def queue(request: Request, user: GetUserDep, conn: str, key: str) -> Response:
    """A lock with its queue."""
    state = _state(conn, key)
    viewer = _viewer(conn, user)
    waiters = rows.queue(state, viewer, _MAX_WAITERS)
    return _with_tag(
        request, {"lock": rows.row(state, viewer), "waiters": waiters, "now": iso(utc(state.now_ms))}
    )


@app.get("/metrics", dependencies=[look])
def metrics(keys: Annotated[int, Query(ge=0, le=1000)] = 0) -> Response:
    """The locks of all tables that the page shows, as metrics in the text format of OpenMetrics.

    Tables of several connections that have the same name, as in two regions, are told apart by their connections.
    """
    looks = {conn_id: snapshots.latest(conn_id) for conn_id in connection_ids()}
    names = {conn_id: _table(conn_id) for conn_id in looks}
    uses = Counter(names.values())
    tables = {
        name if uses[name] == 1 else f"{name} ({conn_id})": looks[conn_id] for conn_id, name in names.items()
    }
    text = openmetrics.exposition(
        {table: None if each.error else each.states for table, each in tables.items()},
        keys,
        {table: len(each.damaged) for table, each in tables.items()},
    )
    return Response(text, media_type=openmetrics.CONTENT_TYPE)


def _table(conn_id: str) -> str:
    """The name of the table of a connection, or the connection's id if it cannot be looked up."""
    try:
        return snapshots.client(conn_id).table
    except LockError:
        return conn_id


@app.get("/history", dependencies=[look])
def last_hour(user: GetUserDep, session: SessionDep, conn: str, key: str) -> dict[str, Any]:
    """Who held a lock in the last hour, and who waited for it."""
    state = _state(conn, key)
    turns = history.last_hour(session, state, _viewer(conn, user))
    return {
        "turns": [each.as_dict() for each in turns[-_MAX_ROWS:]],
        "now": iso(utc(state.now_ms)),
        "seconds": history.SHOWN.total_seconds(),
    }


class _Action(BaseModel):
    """What a person wants to change, and why."""

    model_config = ConfigDict(extra="forbid")

    conn: str
    key: str
    reason: str = Field(min_length=1, max_length=200)


class _OnLease(_Action):
    lease_id: str


class _OnCapacity(_Action):
    capacity: int | None


@app.post("/break", dependencies=[act, Depends(_own), Depends(action_logging("dynamo_lock.break"))])
def break_(body: _OnLease, user: GetUserDep) -> dict[str, str]:
    """Take a lease away from its holder."""
    with _acting(body.conn) as client:
        holder = client.break_lock(body.key, body.lease_id, by=_who(body.conn, user), reason=body.reason)
    return {"outcome": f"The lease of {holder.owner} is broken. It stops at its next heartbeat."}


@app.post("/remove", dependencies=[act, Depends(_own), Depends(action_logging("dynamo_lock.remove"))])
def remove(body: _OnLease, user: GetUserDep) -> dict[str, str]:
    """Remove a waiter from the queue."""
    with _acting(body.conn) as client:
        waiter = client.remove_waiter(body.key, body.lease_id, by=_who(body.conn, user), reason=body.reason)
    return {"outcome": f"{waiter.owner} is removed from the queue. Its task fails."}


@app.post("/capacity", dependencies=[act, Depends(_own), Depends(action_logging("dynamo_lock.capacity"))])
def capacity(body: _OnCapacity) -> dict[str, str]:
    """Set the capacity of a semaphore, or let claims decide again."""
    with _acting(body.conn) as client:
        record = client.set_capacity(body.key, body.capacity)
    if body.capacity is None:
        return {"outcome": "Claims decide the capacity again."}
    return {"outcome": f"The capacity is {record.capacity}, of which {max(0, record.available)} are free."}


# -- parts ------------------------------------------------------------------------------------------------------------


def _may_act(user: Any) -> bool:
    return bool(get_auth_manager().is_authorized_pool(method="PUT", user=user))


def _who(conn_id: str, user: Any) -> str:
    return f"{user.get_name()}@{_deployment(conn_id)}"


@contextmanager
def _acting(conn_id: str) -> Iterator[LockClient]:
    """The client for an action. If the action fails, its error is the answer. If it succeeds, the page takes a new
    snapshot."""
    try:
        yield snapshots.client(_checked(conn_id))
    except LockError as failure:
        raise _refused(failure) from failure
    snapshots.forget(conn_id)


def _states(conn_id: str) -> tuple[LockState, ...]:
    snapshot = snapshots.latest(conn_id)
    if snapshot.error is not None:
        raise HTTPException(503, str(snapshot.error))
    return snapshot.states


def _state(conn_id: str, key: str) -> LockState:
    found = next((each for each in _states(_checked(conn_id)) if each.record.key == key), None)
    if found is None:
        raise HTTPException(404, f"There is no record of the lock {key!r}.")
    return found


def _failure(failure: LockError) -> dict[str, str]:
    """An error as the page shows it, with what to do."""
    what = next((text for kind, text in _HELP.items() if isinstance(failure, kind)), "")
    return {"text": str(failure), "help": what}


def _refused(failure: LockError) -> HTTPException:
    """The answer to an action that was not done."""
    match failure:
        case LockNotHeldError() | LockNotWaitingError() | CapacityMismatchError():
            return HTTPException(409, str(failure))
        case LockValueError():
            return HTTPException(422, str(failure))
        case LockAccessError():
            return HTTPException(502, str(failure))
    return HTTPException(503, str(failure))


def _with_tag(request: Request, answer: dict[str, Any]) -> Response:
    """The answer as JSON; without a body if the browser has the same one already."""
    body = json.dumps(answer).encode()
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {"ETag": tag, "Cache-Control": "no-cache, private"}
    if request.headers.get("If-None-Match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(body, media_type="application/json", headers=headers)
