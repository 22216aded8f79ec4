"""The Airflow plugin: the operators' links, and the Locks page."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from airflow_dynamo_lock.airflow.links import LockRecordLink, LocksPageLink, base_path
from airflow_dynamo_lock.airflow.versions import HAS_PAGES, AirflowPlugin


async def _service(scope: Any, receive: Any, send: Any) -> None:
    """The web service, as an ASGI application that is loaded at its first request: only the API server needs it."""
    service = import_module("airflow_dynamo_lock.airflow.page.service")
    await service.app(scope, receive, send)


def _view(name: str, url_route: str, destination: str) -> dict[str, str]:
    return {
        "name": name,
        "bundle_url": f"{base_path()}/dynamo-lock/locks.js",
        "destination": destination,
        "url_route": url_route,
        **({"category": "browse"} if destination == "nav" else {}),
    }


class DynamoLockPlugin(AirflowPlugin):
    """Registers the links and the page. Airflow finds this class by the entry point ``airflow.plugins``."""

    name = "dynamo_lock"
    operator_extra_links = [LockRecordLink(), *([LocksPageLink()] if HAS_PAGES else [])]  # noqa: RUF012 - Airflow's declaration
    fastapi_apps = [{"name": "Locks", "app": _service, "url_prefix": "/dynamo-lock"}]  # noqa: RUF012
    react_apps = [  # noqa: RUF012
        _view("Locks", "locks", "nav"),
        _view("DAG's locks", "dag-locks", "dag"),
    ]
