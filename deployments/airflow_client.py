"""A client of Airflow's public REST API (v2), for what a user can do in the web interface."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Self

import httpx

FINISHED = ("success", "failed")  # final states of a run
POLL = 0.5  # seconds between two requests while waiting
AUDITS = 6  # maximum number of tries of a request that fails as `_is_unaudited` describes


class AirflowError(Exception):
    """Airflow answered with an error or not at all, did not start, or could not parse a DAG."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a DAG."""

    dag_id: str
    run_id: str
    state: str
    conf: Mapping[str, Any]
    queued_at: datetime | None
    start: datetime | None
    end: datetime | None

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Create an instance from an answer of the API."""
        return cls(
            dag_id=body["dag_id"],
            run_id=body["dag_run_id"],
            state=body["state"],
            conf=body["conf"] or {},
            queued_at=_moment(body["queued_at"]),
            start=_moment(body["start_date"]),
            end=_moment(body["end_date"]),
        )


@dataclass(frozen=True, slots=True)
class TaskInstance:
    """A task of a run. `pid` is the process of its last try on a worker; None if no try ran on a worker."""

    id: str
    dag_id: str
    run_id: str
    task_id: str
    map_index: int
    state: str | None
    try_number: int
    pid: int | None
    hostname: str | None
    queued: datetime | None
    start: datetime | None
    end: datetime | None
    rendered: Mapping[str, Any]

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Create an instance from an answer of the API."""
        return cls(
            id=body["id"],
            dag_id=body["dag_id"],
            run_id=body["dag_run_id"],
            task_id=body["task_id"],
            map_index=body["map_index"],
            state=body["state"],
            try_number=body["try_number"],
            pid=body["pid"],
            hostname=body["hostname"] or None,
            queued=_moment(body["queued_when"]),
            start=_moment(body["start_date"]),
            end=_moment(body["end_date"]),
            rendered=body["rendered_fields"],
        )


class AirflowClient:
    """A client of one deployment, logged in with the password of a user."""

    def __init__(self, url: str, username: str, password: str) -> None:
        self.url = url
        self.username = username
        self.password = password

    # --- DAGs

    def dag_ids(self) -> set[str]:
        """Return the ids of the DAGs that Airflow has parsed."""
        return {dag["dag_id"] for dag in self._list("/dags", "dags")}

    def import_errors(self) -> dict[str, str]:
        """Return the DAG files that Airflow could not parse, each with its stack trace."""
        errors = self._list("/importErrors", "import_errors")
        return {error["filename"]: error["stack_trace"] for error in errors}

    def wait_for_dags(self, dag_ids: Collection[str], timeout: float = 180.0) -> None:
        """Wait until Airflow has parsed all these DAGs.

        :raises AirflowError: Airflow could not parse a DAG file.
        :raises TimeoutError: a DAG is missing after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while missing := set(dag_ids) - self.dag_ids():
            if errors := self.import_errors():
                raise AirflowError("\n".join(f"{file}:\n{why}" for file, why in errors.items()))
            if time.monotonic() > deadline:
                raise TimeoutError(f"Airflow has not parsed {', '.join(sorted(missing))} after {timeout:g} s")
            time.sleep(POLL)

    def unpause(self, dag_id: str) -> None:
        """Unpause a DAG."""
        self._request("PATCH", f"/dags/{dag_id}", json={"is_paused": False})

    # --- runs

    def trigger(self, dag_id: str, conf: Mapping[str, Any] | None = None) -> str:
        """Trigger a run and return its id."""
        body = {"logical_date": None, "conf": dict(conf or {})}
        return str(self._request("POST", f"/dags/{dag_id}/dagRuns", json=body).json()["dag_run_id"])

    def run(self, dag_id: str, run_id: str) -> Run:
        """Return the current state of a run."""
        return Run.parse(self._request("GET", _run_path(dag_id, run_id)).json())

    def runs(self, dag_id: str) -> list[Run]:
        """Return all runs of a DAG, oldest first."""
        return [Run.parse(run) for run in self._list(f"/dags/{dag_id}/dagRuns", "dag_runs", order_by="id")]

    def wait(
        self, dag_id: str, run_id: str, states: Collection[str] = FINISHED, timeout: float = 300.0
    ) -> Run:
        """Wait until a run is in one of `states`.

        :raises TimeoutError: it is in another state after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while (run := self.run(dag_id, run_id)).state not in states:
            if time.monotonic() > deadline:
                tasks = "".join(f"\n  {_name(ti)}: {ti.state}" for ti in self.task_instances(dag_id, run_id))
                raise TimeoutError(f"{dag_id} {run_id} is {run.state} after {timeout:g} s{tasks}")
            time.sleep(POLL)
        return run

    def set_run_state(self, dag_id: str, run_id: str, state: str) -> None:
        """Mark a run "success" or "failed", or queue it again ("queued")."""
        self._request("PATCH", _run_path(dag_id, run_id), json={"state": state})

    # --- task instances

    def task_instances(self, dag_id: str, run_id: str = "~") -> list[TaskInstance]:
        """Return the task instances of a run, or without `run_id` those of all runs of the DAG."""
        instances = self._list(f"{_run_path(dag_id, run_id)}/taskInstances", "task_instances", order_by="id")
        return [TaskInstance.parse(instance) for instance in instances]

    def task_instance(self, dag_id: str, run_id: str, task_id: str, map_index: int = -1) -> TaskInstance:
        """Return the current state of a task instance."""
        path = _task_path(dag_id, run_id, task_id, map_index)
        return TaskInstance.parse(self._request("GET", path).json())

    def wait_for_task(
        self,
        dag_id: str,
        run_id: str,
        task_id: str,
        states: Collection[str | None],
        map_index: int = -1,
        timeout: float = 180.0,
    ) -> TaskInstance:
        """Wait until a task instance is in one of `states`.

        :raises TimeoutError: it is in another state after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while (ti := self.task_instance(dag_id, run_id, task_id, map_index)).state not in states:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{dag_id} {run_id} {_name(ti)} is {ti.state} after {timeout:g} s")
            time.sleep(POLL)
        return ti

    def set_task_state(self, dag_id: str, run_id: str, task_id: str, state: str, map_index: int = -1) -> None:
        """Mark a task "success", "failed" or "skipped"."""
        self._request("PATCH", _task_path(dag_id, run_id, task_id, map_index), json={"new_state": state})

    def clear(
        self,
        dag_id: str,
        run_id: str,
        task_ids: Iterable[str | tuple[str, int]],
        *,
        downstream: bool = True,
        upstream: bool = False,
        only_failed: bool = False,
    ) -> set[str]:
        """Clear tasks of a run with the web interface's defaults, and return the ids of all cleared tasks.

        :param task_ids: task ids; for one map index of a mapped task, `(task id, map index)`.
        """
        body = {
            "dry_run": False,
            "dag_run_id": run_id,
            "task_ids": list(task_ids),
            "include_downstream": downstream,
            "include_upstream": upstream,
            "only_failed": only_failed,
        }
        cleared = self._request("POST", f"/dags/{dag_id}/clearTaskInstances", json=body).json()
        return {instance["task_id"] for instance in cleared["task_instances"]}

    def xcom(
        self, dag_id: str, run_id: str, task_id: str, key: str = "return_value", map_index: int = -1
    ) -> Any:
        """Return one XCom value of a task."""
        path = f"{_run_path(dag_id, run_id)}/taskInstances/{task_id}/xcomEntries/{key}"
        return self._request("GET", path, params={"map_index": map_index}).json()["value"]

    def xcoms(self, dag_id: str, run_id: str, task_id: str) -> dict[str, Any]:
        """Return all XCom values of a task, by key."""
        path = f"{_run_path(dag_id, run_id)}/taskInstances/{task_id}/xcomEntries"
        keys = [entry["key"] for entry in self._list(path, "xcom_entries")]
        return {key: self.xcom(dag_id, run_id, task_id, key) for key in keys}

    def task_log(
        self, dag_id: str, run_id: str, task_id: str, try_number: int | None = None, map_index: int = -1
    ) -> str:
        """Return the log of one try of a task, by default the last one, with one line per message."""
        messages = self._log_messages(dag_id, run_id, task_id, try_number, map_index)
        return "\n".join(_log_line(message) for message in messages)

    def timed_log(
        self, dag_id: str, run_id: str, task_id: str, map_index: int = -1
    ) -> list[tuple[datetime, str]]:
        """Return the messages of the last try of a task that have a time, each with that time."""
        messages = self._log_messages(dag_id, run_id, task_id, None, map_index)
        return [
            (moment, message["event"])
            for message in messages
            if (moment := _moment(message.get("timestamp"))) is not None
        ]

    def _log_messages(
        self, dag_id: str, run_id: str, task_id: str, try_number: int | None, map_index: int
    ) -> list[dict[str, Any]]:
        if try_number is None:
            try_number = self.task_instance(dag_id, run_id, task_id, map_index).try_number
        path = f"{_run_path(dag_id, run_id)}/taskInstances/{task_id}/logs/{try_number}"
        answer = self._request(
            "GET",
            path,
            params={"map_index": map_index, "full_content": True},
            headers={"Accept": "application/json"},
        )
        messages: list[dict[str, Any]] = answer.json()["content"]
        return messages

    # --- connections

    def add_connection(
        self, connection_id: str, conn_type: str, *, extra: Mapping[str, Any] | None = None, **fields: Any
    ) -> None:
        """Create a connection; `fields` are host, login, password, schema, port, description."""
        body = {"connection_id": connection_id, "conn_type": conn_type, **fields}
        if extra is not None:
            body["extra"] = json.dumps(extra)
        self._request("POST", "/connections", json=body)

    def test_connection(
        self, connection_id: str, conn_type: str, *, extra: Mapping[str, Any]
    ) -> tuple[bool, str]:
        """Test a connection as the connection form's button does. Returns whether it works, and a message.

        The configuration must allow tests of connections.
        """
        body = {"connection_id": connection_id, "conn_type": conn_type, "extra": json.dumps(extra)}
        answer = self._request("POST", "/connections/test", json=body).json()
        return bool(answer["status"]), str(answer["message"])

    def connection_form(self, conn_type: str) -> dict[str, Any]:
        """Return the fields of a connection type's form, and which standard fields it hides."""
        answer = self._request("GET", "/connections/hook_meta", api="/ui")
        (form,) = (each for each in answer.json() if each["connection_type"] == conn_type)
        return dict(form)

    # --- pools

    def add_pool(self, name: str, slots: int) -> None:
        """Create a pool."""
        self._request("POST", "/pools", json={"name": name, "slots": slots})

    # --- audit log

    def audit_log(self, event: str) -> list[dict[str, Any]]:
        """Return the entries of one event, such as ``dynamo_lock.break``, oldest first."""
        return self._list("/eventLogs", "event_logs", event=event, order_by="event_log_id")

    # --- this package's page

    def act_on_lock(self, action: str, **body: Any) -> str:
        """Do what a button of the Locks page does: "break", "remove" or "capacity". Returns the page's message.

        :param body: the fields of the request, without the connection.
        """
        answer = self._http.post(
            f"/dynamo-lock/{action}",
            json={"conn": "dynamo_lock_default", **body},
            headers={"Authorization": f"Bearer {self.token}", "X-Dynamo-Lock": "1"},
        )
        return str(_checked(answer).json()["outcome"])

    # --- requests

    @cached_property
    def token(self) -> str:
        """The access token of this user."""
        credentials = {"username": self.username, "password": self.password}
        return str(_checked(self._http.post("/auth/token", json=credentials)).json()["access_token"])

    def health(self) -> dict[str, Any]:
        """Return the state of Airflow's components.

        :raises httpx.TransportError: the API server does not answer.
        """
        return dict(self._http.get("/api/v2/monitor/health").json())

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    @cached_property
    def _http(self) -> httpx.Client:
        # trust_env=False: a proxy that the environment names cannot reach 127.0.0.1.
        return httpx.Client(base_url=self.url, timeout=60.0, trust_env=False)

    def _request(
        self,
        method: str,
        path: str,
        *,
        api: str = "/api/v2",
        headers: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.token}", **(headers or {})}
        try:
            for _ in range(AUDITS):
                answer = self._http.request(method, f"{api}{path}", headers=headers, **kwargs)
                if not _is_unaudited(answer):
                    break
            return _checked(answer)
        except httpx.TransportError as error:
            raise AirflowError(f"{method} {self.url}{api}{path}: {error!r}") from error

    def _list(self, path: str, key: str, **params: Any) -> list[dict[str, Any]]:
        """Return all entries of a list, which Airflow sends page by page."""
        entries: list[dict[str, Any]] = []
        while True:
            params |= {"limit": 100, "offset": len(entries)}
            page = self._request("GET", path, params=params).json()
            entries += page[key]
            if not page[key] or len(entries) >= page["total_entries"]:
                return entries


def _is_unaudited(answer: httpx.Response) -> bool:
    """Whether Airflow failed to write its audit log. It then did nothing, and the request can be sent again.

    The API server writes the audit log in its event loop. SQLite can make this write wait for the transaction
    of a worker's request, which in turn waits for the event loop to commit. After five seconds SQLite reports
    an error.
    """
    # Airflow 3.2 answers without details.
    shown = "INSERT INTO log " in answer.text or answer.text == "Internal Server Error"
    return answer.status_code == httpx.codes.INTERNAL_SERVER_ERROR and shown


def _checked(answer: httpx.Response) -> httpx.Response:
    if answer.is_error:
        request = answer.request
        raise AirflowError(f"{request.method} {request.url}: {answer.status_code} {answer.text}")
    return answer


def _run_path(dag_id: str, run_id: str) -> str:
    return f"/dags/{dag_id}/dagRuns/{run_id}"


def _task_path(dag_id: str, run_id: str, task_id: str, map_index: int) -> str:
    path = f"{_run_path(dag_id, run_id)}/taskInstances/{task_id}"
    return path if map_index < 0 else f"{path}/{map_index}"


def _name(ti: TaskInstance) -> str:
    return ti.task_id if ti.map_index < 0 else f"{ti.task_id}[{ti.map_index}]"


def _moment(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


def _log_line(message: Mapping[str, Any]) -> str:
    errors = "".join(
        f"\n{error['exc_type']}: {error['exc_value']}" for error in message.get("error_detail") or []
    )
    return f"{message['event']}{errors}"
