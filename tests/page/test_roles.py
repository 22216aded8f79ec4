"""The permissions of the Locks page in a real API server, with each auth manager of Airflow.

The users log in with their passwords. The expected status of each request is in docs/locks-page.md. The cases of
the FAB auth manager exist only in the environment `production` of the matrix, which has its provider.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import httpx
import pytest

from airflow_dynamo_lock import LockClient
from deployments.patience import wait_until
from proof.airflow.auth_managers import (
    AUTH_MANAGERS,
    DAGS,
    ROLES,
    FabDeployment,
    SimpleAuthDeployment,
    start_auth_manager,
)
from proof.airflow.testbed import IN_PRODUCTION
from tests.page.actions import OWN, actions
from tests.pages import ROOT, table

pytestmark = pytest.mark.proof

MANAGERS = tuple(AUTH_MANAGERS) if IN_PRODUCTION else ("simple",)
PREFIX = "/dynamo-lock"
CONN = "dynamo_lock_default"
VISITORS = ("anonymous", *ROLES)
EVENTS = tuple(f"dynamo_lock{path.replace('/', '.')}" for path in actions(""))
#: The table of the documentation: request → visitor → expected status.
EXPECTED = {
    request.strip("`"): dict(zip(VISITORS, map(int, statuses), strict=True))
    for request, *statuses in table(ROOT / "docs" / "locks-page.md", "Status of each request")
}


@dataclass
class Site:
    """A running API server, and a client of its lock table."""

    airflow: SimpleAuthDeployment
    locks: LockClient

    @cached_property
    def tokens(self) -> dict[str, str]:
        return {name: self.airflow.log_in(name) for name in self.airflow.passwords}

    def audited(self, key: str) -> list[tuple[str, str, str]]:
        """Return event, user and reason of each entry for a lock in Airflow's audit log."""
        entries = [each for event in EVENTS for each in self.airflow.audit_log(event)]
        about = [(each["event"], each["owner"], json.loads(each["extra"])) for each in entries]
        return [(event, owner, extra["reason"]) for event, owner, extra in about if extra.get("key") == key]


@pytest.fixture(scope="module", params=MANAGERS)
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Start the API server, with a lock that a task of each DAG holds."""
    with start_auth_manager(request.param, tmp_path_factory.mktemp("roles")) as (airflow, locks):
        for dag_id in DAGS:
            locks.acquire(
                dag_id, about={"deployment": "north", "dag_id": dag_id, "run_id": "r", "task_id": "t"}
            )
        yield Site(airflow, locks)


@pytest.fixture
def visit(site: Site) -> Iterator[Callable[..., httpx.Client]]:
    """Creates an HTTP client for a user, with a bearer token or with the cookie of the web interface."""
    with ExitStack() as stack:

        def as_user(name: str, *, cookie: bool = False) -> httpx.Client:
            client = httpx.Client(base_url=site.airflow.url, timeout=60.0, trust_env=False)
            if cookie:
                client.cookies.set("_token", site.tokens[name])
            elif name != "anonymous":
                client.headers["Authorization"] = f"Bearer {site.tokens[name]}"
            return stack.enter_context(client)

        yield as_user


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


@pytest.fixture
def contended(site: Site, key: str) -> Iterator[dict[str, dict[str, Any]]]:
    """A lock with a holder and a waiter: the path and the body of each action on them, in an order that works."""
    lease = site.locks.acquire(key)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(site.locks.acquire, key)
        wait_until(lambda: site.locks.waiters(key))
        (waiter,) = site.locks.waiters(key)
        yield {
            "/remove": actions(key, waiter.lease_id)["/remove"],
            "/break": actions(key, lease.lease_id)["/break"],
            # The capacity of a lock that is held as a plain lock cannot be set.
            "/capacity": actions(f"{key}/slots")["/capacity"],
        }
        site.locks.release(lease)
        if waiting.exception() is None:
            site.locks.release(waiting.result())


def is_untouched(site: Site, contended: dict[str, dict[str, Any]]) -> bool:
    """Return whether no action has changed the locks."""
    on_lock, on_slots = contended["/break"], contended["/capacity"]
    record = site.locks.get(on_lock["key"])
    return (
        record is not None
        and list(record.holders) == [on_lock["lease_id"]]
        and [each.lease_id for each in site.locks.waiters(on_lock["key"])]
        == [contended["/remove"]["lease_id"]]
        and site.locks.get(on_slots["key"]) is None
    )


@pytest.mark.parametrize("name", VISITORS)
def test_each_request_has_the_documented_status(
    site: Site,
    visit: Callable[..., httpx.Client],
    contended: dict[str, dict[str, Any]],
    key: str,
    name: str,
    record_property: Callable[[str, object], None],
) -> None:
    client = visit(name)
    statuses = {}
    for path in ("/locks", "/queue", "/history", "/metrics", "/locks.js"):
        params = {"conn": CONN, "key": DAGS[0]} if path in ("/queue", "/history") else {}
        statuses[f"GET {PREFIX}{path}"] = client.get(PREFIX + path, params=params).status_code
    for path, body in contended.items():
        statuses[f"POST {PREFIX}{path}"] = client.post(PREFIX + path, json=body, headers=OWN).status_code
    record_property("statuses", json.dumps(statuses))

    assert statuses == {request: expected[name] for request, expected in EXPECTED.items()}
    may_act = statuses[f"POST {PREFIX}/break"] == 200
    assert is_untouched(site, contended) is not may_act
    if statuses[f"GET {PREFIX}/locks"] == 200:
        assert client.get(f"{PREFIX}/locks").json()["may_act"] is may_act

    done = [(event, name, "a drill") for event in EVENTS] if may_act else []
    assert site.audited(key) + site.audited(f"{key}/slots") == done
    record = site.locks.get(key)
    assert record is not None
    if may_act:
        assert record.last_loss is not None
        assert record.last_loss.decision is not None
        assert (record.last_loss.decision.by, record.last_loss.decision.reason) == (
            f"{name}@north",
            "a drill",
        )


@pytest.mark.parametrize("name", ROLES)
def test_the_cookie_of_the_web_interface_is_enough(
    visit: Callable[..., httpx.Client], contended: dict[str, dict[str, Any]], name: str
) -> None:
    client = visit(name, cookie=True)
    assert client.get(f"{PREFIX}/locks").status_code == 200
    answer = client.post(f"{PREFIX}/break", json=contended["/break"], headers=OWN)
    assert answer.status_code == EXPECTED[f"POST {PREFIX}/break"][name]


def test_a_form_on_another_site_changes_nothing(
    site: Site, visit: Callable[..., httpx.Client], contended: dict[str, dict[str, Any]], key: str
) -> None:
    """The browser sends the cookie of an administrator, but cannot send the header of the page's script."""
    client = visit("admin", cookie=True)
    for path, body in contended.items():
        assert client.post(PREFIX + path, data=body).status_code == 403
        assert client.post(PREFIX + path, json=body).status_code == 403
        plain = {"Content-Type": "text/plain"}
        assert client.post(PREFIX + path, content=json.dumps(body), headers=plain).status_code == 403
        assert client.post(PREFIX + path, data=body, headers=OWN).status_code == 422
        assert client.get(PREFIX + path).status_code == 405
    assert is_untouched(site, contended)
    assert site.audited(key) + site.audited(f"{key}/slots") == []


@pytest.mark.parametrize("name", ["viewer", "admin"])
def test_no_request_can_probe_for_connections(
    visit: Callable[..., httpx.Client], contended: dict[str, dict[str, Any]], name: str
) -> None:
    client = visit(name)
    for conn in ("aws_default", "not_configured"):
        for path in ("/locks", "/queue", "/history"):
            assert client.get(PREFIX + path, params={"conn": conn, "key": DAGS[0]}).status_code == 404
        for path, body in contended.items():
            answer = client.post(PREFIX + path, json=body | {"conn": conn}, headers=OWN)
            assert answer.status_code == (404 if name == "admin" else 403)


@pytest.mark.parametrize("name", ROLES)
def test_the_web_interface_shows_the_page_to_roles_that_can_read_plugins(
    site: Site, visit: Callable[..., httpx.Client], name: str
) -> None:
    """The FAB auth manager's roles Viewer and User cannot."""
    shown = name in ("op", "admin") if isinstance(site.airflow, FabDeployment) else True
    answer = visit(name).get("/api/v2/plugins")
    assert answer.status_code == (200 if shown else 403)
    if shown:
        (plugin,) = (each for each in answer.json()["plugins"] if each["name"] == "dynamo_lock")
        assert [each["url_route"] for each in plugin["react_apps"]] == ["locks", "dag-locks"]


def links(client: httpx.Client) -> dict[str, str | None]:
    """Return the link of the holder of each DAG's lock, as the page shows it."""
    rows = client.get(f"{PREFIX}/locks").json()["rows"]
    return {row["key"]: row["holders"][0]["link"] for row in rows if row["key"] in DAGS}


@pytest.mark.parametrize("name", ROLES)
def test_each_role_has_links_to_the_dags_that_it_may_read(
    visit: Callable[..., httpx.Client], name: str
) -> None:
    assert links(visit(name)) == {dag_id: f"dags/{dag_id}/runs/r/tasks/t" for dag_id in DAGS}


@pytest.mark.parametrize("site", ["fab"], indirect=True)
class TestFab:
    """The login form and the custom roles, which only the FAB auth manager has."""

    __test__ = "fab" in MANAGERS

    def test_the_login_form_sets_a_cookie_that_is_enough(
        self, site: Site, visit: Callable[..., httpx.Client], contended: dict[str, dict[str, Any]]
    ) -> None:
        client = visit("anonymous")
        form = re.search(r'name="csrf_token"[^>]* value="([^"]+)"', client.get("/auth/login/").text)
        assert form
        login = {"username": "op", "password": site.airflow.passwords["op"], "csrf_token": form[1]}
        assert client.post("/auth/login/", data=login).status_code == 302
        assert "_token" in client.cookies
        assert client.get(f"{PREFIX}/locks").status_code == 200
        assert client.post(f"{PREFIX}/break", data=contended["/break"]).status_code == 403
        assert client.post(f"{PREFIX}/break", json=contended["/break"], headers=OWN).status_code == 200

    def test_a_role_without_access_to_a_dag_has_no_link_to_it(
        self, site: Site, visit: Callable[..., httpx.Client]
    ) -> None:
        fab = site.airflow
        assert isinstance(fab, FabDeployment)
        fab.add_role("Warehouse", [("can_read", "Pools"), ("can_read", "DAG:warehouse")])
        fab.add_user("clerk", "Warehouse")
        site.tokens["clerk"] = fab.log_in("clerk")

        client = visit("clerk")

        assert links(client) == {"payroll": None, "warehouse": "dags/warehouse/runs/r/tasks/t"}
        assert client.get("/api/v2/dags/payroll").status_code == 403
        body = actions("payroll")["/break"]
        assert client.post(f"{PREFIX}/break", json=body, headers=OWN).status_code == 403

    @pytest.mark.parametrize(
        ("name", "permissions", "looks", "acts"),
        [
            ("reader", [("can_read", "Pools")], 200, 403),
            ("editor", [("can_read", "Pools"), ("can_edit", "Pools")], 200, 200),
            ("blind", [("can_edit", "Pools")], 403, 200),
            ("author", [("can_read", "DAGs"), ("can_edit", "DAGs"), ("can_read", "Plugins")], 403, 403),
        ],
    )
    def test_only_permissions_on_pools_count(
        self,
        site: Site,
        visit: Callable[..., httpx.Client],
        contended: dict[str, dict[str, Any]],
        name: str,
        permissions: list[tuple[str, str]],
        looks: int,
        acts: int,
    ) -> None:
        fab = site.airflow
        assert isinstance(fab, FabDeployment)
        fab.add_role(name, permissions)
        fab.add_user(name, name)
        site.tokens[name] = fab.log_in(name)
        client = visit(name)
        assert client.get(f"{PREFIX}/locks").status_code == looks
        assert client.post(f"{PREFIX}/break", json=contended["/break"], headers=OWN).status_code == acts
