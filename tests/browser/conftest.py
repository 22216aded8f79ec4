"""A browser, and two Airflow deployments that share a lock table. The second one is served under a path."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from airflow_dynamo_lock import LockClient
from deployments.deployment import Deployment
from proof.airflow.testbed import Testbed, connection, start_testbed

ROOT = Path(__file__).parents[2]
FETCHED = ROOT / ".cache" / "browser"
#: Pictures of the page, for people to look at. `make pictures` copies them to docs/locks-page.
PICTURES = ROOT / ".cache" / "locks-page"

#: The second deployment is served under this path.
BASE_PATH = "/teams/data"

#: Without these, Chromium requests updates from the hosts of its vendor.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


@dataclass
class Visitor:
    """A user with a browser window on the Locks page.

    :ivar page: the window.
    :ivar base: address of the deployment's web interface.
    :ivar requested: the addresses that the window has requested.
    :ivar errors: the errors of scripts, with their stacks.
    """

    page: Page
    base: str
    requested: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def open(self, path: str = "plugin/locks", **query: str) -> Page:
        """Open a page of the web interface, and return the window."""
        text = "&".join(f"{name}={value}" for name, value in query.items())
        self.page.goto(f"{self.base}/{path}?{text}")
        return self.page

    def findings(self) -> list[str]:
        """Return what axe-core finds wrong in the Locks page, without the web interface around it."""
        self.page.evaluate((FETCHED / "axe.min.js").read_text())
        found = self.page.evaluate("() => axe.run('.dynamo-lock')")
        return [f"{each['id']}: {each['nodes'][0]['html']}" for each in found["violations"]]

    def picture(self, name: str) -> None:
        """Take a picture of the window."""
        PICTURES.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=PICTURES / f"{name}.png")


#: Opens a window: `visit(user, deployment, dark=False)`.
Visit = Callable[..., Visitor]


@pytest.fixture(scope="package")
def testbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Testbed]:
    """Two deployments, each with an administrator and a viewer."""
    env = {
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": "admin:admin,viewer:viewer",
        "AIRFLOW__DYNAMO_LOCK__PAGE_CONNECTIONS": "dynamo_lock_default,empty,missing,invalid",
        "AIRFLOW_CONN_EMPTY": connection("north", table="empty"),
        "AIRFLOW_CONN_MISSING": connection("north", table="missing"),
        "AIRFLOW_CONN_INVALID": connection("north", lease="soon"),
    }
    folder = tmp_path_factory.mktemp("browser")
    with start_testbed(folder, "north", "south", env=env, base_paths={"south": BASE_PATH}) as testbed:
        LockClient(testbed.engine.client(), table="empty").create_table()
        yield testbed


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium: the one that `scripts/fetch_browser.py` has fetched, or the one that CHROMIUM names."""
    chromium = Path(os.environ.get("CHROMIUM", FETCHED / "chromium"))
    assert chromium.exists(), (
        f"There is no {chromium}: set CHROMIUM to the path of a Chromium on this machine."
    )
    env: dict[str, Any] = {
        **os.environ,
        "LD_LIBRARY_PATH": str(FETCHED / "lib"),
        "FONTCONFIG_PATH": str(FETCHED),
    }
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=chromium, args=FLAGS, env=env) as browser,
    ):
        yield browser


@pytest.fixture
def visit(browser: Browser, testbed: Testbed) -> Iterator[Visit]:
    """Opens windows. A test fails if one of them has sent a request to another host, or if the page's script failed."""
    visitors: list[Visitor] = []

    def visit(user: str = "admin", deployment: Deployment | None = None, *, dark: bool = False) -> Visitor:
        to = deployment or testbed.airflow
        context = browser.new_context(
            viewport={"width": 1280, "height": 800}, color_scheme="dark" if dark else "light"
        )
        visitor = Visitor(context.new_page(), to.url)
        visitors.append(visitor)
        visitor.page.on("request", lambda request: visitor.requested.append(request.url))
        visitor.page.on("pageerror", lambda error: visitor.errors.append(f"{error}\n{error.stack}"))
        log_in(visitor.page, to, user)
        return visitor

    yield visit
    for each in visitors:
        each.page.context.close()
    requested = [urlsplit(url) for each in visitors for url in each.requested]
    assert {url.hostname for url in requested if url.scheme.startswith("http")} <= {"127.0.0.1"}
    # Airflow's own scripts fail too, for example if a window is closed while they read.
    assert [error for each in visitors for error in each.errors if "locks.js" in error] == []


def log_in(page: Page, deployment: Deployment, user: str) -> None:
    """Log in by the form of the simple auth manager, which generates a password if a user has none."""
    passwords = json.loads((deployment.home / "simple_auth_manager_passwords.json.generated").read_text())
    page.goto(deployment.url)
    page.get_by_label("Username").fill(user)
    page.locator("input[type=password]").fill(passwords[user])
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url(lambda url: "/login" not in url)


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    """Return a key that no other test uses."""
    name = request.node.name.removeprefix("test_").partition("[")[0]
    return f"{name}/{uuid.uuid4().hex[:6]}"
