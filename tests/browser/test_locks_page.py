"""The Locks page in a browser, in two real Airflow deployments that take turns."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, unquote

import pytest
from playwright.sync_api import Locator, Page, expect

from proof.airflow.testbed import Testbed, wait_for
from tests.browser.conftest import BASE_PATH, Visit, Visitor

pytestmark = pytest.mark.proof

#: Milliseconds within which a window shows what happened, on a slow machine.
expect.set_options(timeout=60_000)

#: A text that a program may write into a table. A page that shows it as HTML runs it.
HOSTILE = "<img src=x onerror=\"document.title='run'\">"


def row(page: Page, key: str) -> Locator:
    """Return the row of a lock."""
    return page.locator("tr", has=page.get_by_role("button", name=key, exact=True))


def details(page: Page, key: str) -> Locator:
    """Return the part of the page that shows one lock."""
    return page.get_by_role("region", name=key)


def shown(page: Page) -> list[str]:
    """Return the locks in the table, from top to bottom."""
    return page.locator("table").first.locator("tbody tr td:first-child").all_inner_texts()


class Runs:
    """Runs of both deployments that hold a lock and wait for it.

    :ivar holder: id of the run of north that holds the lock.
    :ivar waiter: id of the run of south that waits for it.
    """

    def __init__(self, testbed: Testbed, key: str) -> None:
        self.testbed = testbed
        self.key = key
        self.north, self.south = testbed.deployments
        self.holder = self.north.trigger("guarded", {"key": key})
        testbed.wait_inside(key, self.holder)
        self.waiter = self.south.trigger("guarded", {"key": key})
        testbed.wait_for_record(key, lambda _: testbed.locks.waiters(key))

    def end(self) -> None:
        """Let both runs end, and wait until they have ended."""
        for run_id in (self.holder, self.waiter):
            self.testbed.end_task(run_id, "finish")
        self.north.wait("guarded", self.holder)
        self.south.wait("guarded", self.waiter)


@pytest.fixture
def runs(testbed: Testbed, key: str) -> Iterator[Runs]:
    """Runs for tests that end them or change their lock."""
    runs = Runs(testbed, key)
    yield runs
    runs.end()


@pytest.fixture(scope="module")
def watched(testbed: Testbed) -> Iterator[Runs]:
    """Runs for tests that change nothing. Two other runs have held the lock before."""
    key = "warehouse/orders"
    for deployment in testbed.deployments:
        deployment.wait("guarded", deployment.trigger("guarded", {"key": key, "seconds": 3}))
    runs = Runs(testbed, key)
    yield runs
    runs.end()


def test_a_row_of_an_open_page_changes(runs: Runs, visit: Visit) -> None:
    visitor = visit()
    page = visitor.open()
    line = row(page, runs.key)
    expect(line).to_contain_text(f"north/guarded/{runs.holder}/lock.acquire (1 inside)")
    expect(line.locator("td").nth(1)).to_have_text("held")
    expect(line.locator("td").nth(5)).to_have_text("1")
    assert visitor.findings() == []
    # The same element changes. A page that draws all rows anew flickers, and loses the focus.
    line.evaluate("element => { element.marked = true }")

    runs.testbed.end_task(runs.holder, "finish")
    expect(line).to_contain_text(f"south/guarded/{runs.waiter}/lock.acquire")
    runs.testbed.end_task(runs.waiter, "finish")
    expect(line).to_contain_text(f"last held by south/guarded/{runs.waiter}/lock.acquire")
    expect(line.locator("td").nth(1)).to_have_text("free")
    assert line.evaluate("element => element.marked")


def test_a_lock_shows_its_holder_and_its_queue_with_links_to_the_runs_of_this_deployment(
    watched: Runs, visit: Visit
) -> None:
    page = visit().open()
    row(page, watched.key).get_by_role("button", name=watched.key).click()
    region = details(page, watched.key)
    record = watched.testbed.locks.get(watched.key)
    assert record is not None
    expect(region).to_contain_text(f"The last grant has the fencing token {record.token}.")
    expect(region).to_contain_text(f"south/guarded/{watched.waiter}/lock.acquire")
    expect(region.get_by_role("table", name="Queue").get_by_role("link")).to_have_count(0)
    region.get_by_role("table", name="Holders").get_by_role("link", name=watched.holder).click()
    page.wait_for_url(lambda url: f"/runs/{watched.holder}/tasks/lock.acquire" in unquote(url))


def next_second() -> None:
    """Wait for the next second: server times are whole seconds, and two in the same second have no order."""
    now = int(time.time())
    wait_for(lambda: int(time.time()) > now or None, "the next second", 60)


def test_search_filters_and_order(testbed: Testbed, visit: Visit, key: str) -> None:
    for name in ("a", "b", "c"):
        testbed.locks.acquire(f"{key}/{name}", owner=f"owner of {name}", lease=300)
        next_second()
    testbed.locks.break_lock(f"{key}/b", next(iter(testbed.locks.get(f"{key}/b").holders)))  # type: ignore[union-attr]
    page = visit().open()
    page.get_by_label("Search").fill(key)
    expect(page.locator("tbody tr")).to_have_count(3)
    assert shown(page) == [f"{key}/a", f"{key}/b", f"{key}/c"]

    page.get_by_label("State").select_option("Held")
    expect(page.get_by_text("2 match")).to_be_visible()
    assert shown(page) == [f"{key}/a", f"{key}/c"]
    page.get_by_label("State").select_option("Lease lost before")
    expect(page.get_by_text("1 match")).to_be_visible()
    assert shown(page) == [f"{key}/b"]

    page.get_by_label("State").select_option("Held")
    page.get_by_role("button", name="Held for").click()
    expect(page.get_by_role("columnheader", name="Held for")).to_have_attribute("aria-sort", "descending")
    expect(page.locator("tbody tr").first).to_contain_text(f"{key}/a")
    page.get_by_role("button", name="Held for").click()
    expect(page.locator("tbody tr").first).to_contain_text(f"{key}/c")

    page.get_by_label("Search").fill("OWNER OF C")
    expect(page.get_by_text("1 match")).to_be_visible()
    page.get_by_label("Search").fill("nobody has this name")
    expect(page.get_by_text("No lock matches.")).to_be_visible()


def test_the_filter_for_a_deployment_and_the_tab_of_a_dag(watched: Runs, visit: Visit, key: str) -> None:
    watched.testbed.locks.acquire(f"{key}/of a shell", lease=300)
    visitor = visit()
    page = visitor.open()
    expect(row(page, f"{key}/of a shell")).to_be_visible()
    page.get_by_label("Deployment").select_option("south")
    expect(row(page, f"{key}/of a shell")).to_have_count(0)
    expect(row(page, watched.key)).to_be_visible()

    visitor.open("dags/guarded/plugin/dag-locks")
    expect(row(page, watched.key)).to_be_visible()
    expect(row(page, f"{key}/of a shell")).to_have_count(0)


def test_the_last_hour_shows_earlier_runs_and_the_holders_of_the_record(watched: Runs, visit: Visit) -> None:
    page = visit().open(key=watched.key)
    table = details(page, watched.key).get_by_role("table", name="The last hour")
    lines = table.locator("tbody tr")
    expect(lines).to_have_count(4)
    earlier, previous, holder, waiter = lines.all()
    expect(earlier).to_contain_text("north/guarded")
    expect(earlier.locator("td").nth(3)).to_have_text(re.compile(r"^\d+ s$"))
    # Of the previous holder, a run of another deployment, only the end is known.
    expect(previous).to_contain_text("south/guarded")
    expect(previous.locator("td").nth(3)).to_have_text("")
    expect(holder).to_contain_text(watched.holder)
    expect(holder.locator("td").nth(4)).to_have_text("now")
    expect(waiter).to_contain_text(watched.waiter)
    for line, bars in ((earlier, 2), (previous, 1), (holder, 2), (waiter, 1)):
        expect(line.locator(".track span")).to_have_count(bars)


def test_the_pictures_of_the_docs(watched: Runs, visit: Visit) -> None:
    """`make pictures` copies them to the docs. They are not compared."""
    visitor = visit()
    page = visitor.open(key=watched.key)
    expect(details(page, watched.key).get_by_role("table", name="The last hour")).to_be_visible()
    page.evaluate("() => document.activeElement.blur()")
    visitor.picture("queue")
    details(page, watched.key).get_by_role("button", name="Remove south/guarded/").click()
    page.get_by_label("Reason").fill("superseded by the repair")
    visitor.picture("remove")


def test_a_break_hands_the_lock_over(runs: Runs, visit: Visit) -> None:
    visitor = visit()
    page = visitor.open(key=runs.key)
    expect(details(page, runs.key)).to_contain_text("Queue: 1 waiting")
    details(page, runs.key).get_by_role("button", name="Break the lease of").click()
    dialog = page.get_by_role("dialog", name=f"Break the lease of north/guarded/{runs.holder}/lock.acquire")
    expect(dialog.get_by_role("button", name="Break")).to_be_disabled()
    dialog.get_by_label("Reason").fill("the warehouse is down")
    assert visitor.findings() == []
    dialog.get_by_role("button", name="Break").click()
    expect(dialog.get_by_role("status")).to_contain_text("is broken")
    dialog.get_by_role("button", name="Close").click()
    expect(row(page, runs.key)).to_contain_text(f"south/guarded/{runs.waiter}/lock.acquire")
    expect(details(page, runs.key)).to_contain_text("broken by admin@north (the warehouse is down)")


def test_a_waiter_is_removed_and_its_task_logs_by_whom_and_why(runs: Runs, visit: Visit) -> None:
    visitor = visit()
    page = visitor.open(key=runs.key)
    details(page, runs.key).get_by_role("button", name="Remove south/guarded/").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Reason").fill("superseded by the repair")
    dialog.get_by_role("button", name="Remove").click()
    expect(dialog.get_by_role("status")).to_contain_text("is removed from the queue")
    dialog.get_by_role("button", name="Close").click()
    expect(details(page, runs.key)).to_contain_text("Nobody waits.")
    runs.south.wait_for_task("guarded", runs.waiter, "lock.acquire", {"failed"})
    log = runs.south.task_log("guarded", runs.waiter, "lock.acquire")
    assert "admin@north (superseded by the repair)" in log


def test_the_capacity_of_a_semaphore_is_set(testbed: Testbed, visit: Visit, key: str) -> None:
    testbed.locks.acquire(key, slots=2, capacity=3, lease=300)
    page = visit().open(key=key)
    expect(row(page, key)).to_contain_text("2 of 3 slots")
    details(page, key).get_by_role("button", name="Set capacity").click()
    dialog = page.get_by_role("dialog", name=f"Set the capacity of {key}")
    dialog.get_by_label("Number of slots").fill("5")
    dialog.get_by_label("Reason").fill("a second licence")
    dialog.get_by_role("button", name="Set", exact=True).click()
    expect(dialog.get_by_role("status")).to_have_text("The capacity is 5, of which 3 are free.")
    dialog.get_by_role("button", name="Close").click()
    expect(row(page, key)).to_contain_text("2 of 5 slots, set by hand")


def test_the_page_works_by_keyboard_only(runs: Runs, visit: Visit) -> None:
    page = visit().open()
    expect(row(page, runs.key)).to_be_visible()

    def tab_to(wanted: str) -> None:
        """Press Tab until the element with that name has the focus."""
        for _ in range(100):
            page.keyboard.press("Tab")
            focused = page.evaluate(
                "() => document.activeElement.ariaLabel || document.activeElement.innerText"
            )
            if focused == wanted:
                return
        raise AssertionError(f"{wanted} cannot be reached by the Tab key")

    tab_to(runs.key)
    page.keyboard.press("Enter")
    expect(details(page, runs.key).get_by_role("heading", name=runs.key)).to_be_focused()
    expect(details(page, runs.key)).to_contain_text("Queue: 1 waiting")
    button = f"Remove south/guarded/{runs.waiter}/lock.acquire from the queue"
    tab_to(button)
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(details(page, runs.key).get_by_role("button", name=button)).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_label("Reason")).to_be_focused()
    page.keyboard.type("by keyboard")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog").get_by_role("status")).to_contain_text("is removed from the queue")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_a_viewer_sees_all_and_may_not_act(watched: Runs, visit: Visit) -> None:
    page = visit("viewer").open(key=watched.key)
    expect(details(page, watched.key)).to_contain_text(f"south/guarded/{watched.waiter}/lock.acquire")
    expect(details(page, watched.key).get_by_role("button")).to_have_text(["Close"])
    status = page.evaluate(
        """async (body) => (await fetch("/dynamo-lock/break", {
            method: "POST", body: JSON.stringify(body),
            headers: {"Content-Type": "application/json", "X-Dynamo-Lock": "1"}})).status""",
        {"conn": "dynamo_lock_default", "key": watched.key, "lease_id": "any", "reason": "none"},
    )
    assert status == 403


def test_the_page_has_a_dark_mode(watched: Runs, visit: Visit) -> None:
    visitor = visit(dark=True)
    page = visitor.open(key=watched.key)
    expect(details(page, watched.key)).to_contain_text("Queue: 1 waiting")
    assert visitor.findings() == []
    details(page, watched.key).get_by_role("button", name="Break the lease of").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    assert visitor.findings() == []
    # A browser may write a colour in many ways. A canvas has it as red, green and blue.
    colours = page.evaluate(
        """() => {
            const drawing = document.createElement("canvas").getContext("2d");
            drawing.fillStyle = getComputedStyle(document.querySelector("dialog")).backgroundColor;
            drawing.fillRect(0, 0, 1, 1);
            return [...drawing.getImageData(0, 0, 1, 1).data].slice(0, 3);
        }"""
    )
    assert sum(colours) < 3 * 64


def test_the_page_works_under_a_base_path(watched: Runs, visit: Visit) -> None:
    visitor = visit(deployment=watched.south)
    page = visitor.open()
    row(page, watched.key).get_by_role("button", name=watched.key).click()
    details(page, watched.key).get_by_role("table", name="Queue").get_by_role(
        "link", name=watched.waiter
    ).click()
    page.wait_for_url(lambda url: f"{BASE_PATH}/dags/guarded/runs/" in url)
    requested = [url for url in visitor.requested if "/dynamo-lock/" in url]
    assert requested
    assert all(url.startswith(f"{watched.south.url}/dynamo-lock/") for url in requested)


def test_the_link_of_a_task_leads_to_its_lock_while_it_waits(watched: Runs, visit: Visit) -> None:
    visitor = visit(deployment=watched.south)
    page = visitor.open(f"dags/guarded/runs/{quote(watched.waiter)}/tasks/lock.acquire/details")
    link = page.get_by_role("link", name="Lock", exact=True)
    link.evaluate("element => element.removeAttribute('target')")  # Airflow 3.1 opens another window
    link.click()
    expect(row(page, watched.key)).to_be_visible()


def test_nothing_is_read_while_the_window_is_hidden(watched: Runs, visit: Visit) -> None:
    visitor = visit()
    visitor.page.clock.install()
    page = visitor.open()
    expect(row(page, watched.key)).to_be_visible()

    def hide(hidden: bool) -> None:
        page.evaluate(
            """hidden => {
                Object.defineProperty(document, "hidden", {value: hidden, configurable: true});
                document.dispatchEvent(new Event("visibilitychange"));
            }""",
            hidden,
        )

    with page.expect_response("**/dynamo-lock/locks?*"):
        page.clock.run_for(10_000)
    hide(True)
    visitor.requested.clear()
    page.clock.run_for(60_000)
    assert [url for url in visitor.requested if "/dynamo-lock/" in url] == []
    with page.expect_response("**/dynamo-lock/locks?*"):
        hide(False)


@pytest.mark.parametrize(
    ("connection", "says"),
    [
        ("empty", "The table empty has no lock yet."),
        ("missing", "The lock table 'missing' does not exist in this account and region: create it with"),
        ("invalid", "Correct the connection."),
    ],
)
def test_a_page_without_locks_says_what_to_do(visit: Visit, connection: str, says: str) -> None:
    visitor = visit()
    page = visitor.open(conn=connection)
    expect(page.locator(".message")).to_contain_text(says)
    assert visitor.findings() == []


def test_texts_of_the_table_are_not_shown_as_html(testbed: Testbed, visit: Visit, key: str) -> None:
    lock: dict[str, Any] = {"owner": HOSTILE, "about": {"deployment": HOSTILE, "dag_id": HOSTILE}}
    hostile = f"{key}/{HOSTILE}"
    lease = testbed.locks.acquire(hostile, lease=300, **lock)
    testbed.locks.break_lock(hostile, lease.lease_id, by=HOSTILE, reason=HOSTILE)
    testbed.locks.acquire(hostile, lease=300, **lock)
    page = visit().open()
    expect(row(page, hostile)).to_contain_text(HOSTILE)
    row(page, hostile).get_by_role("button").click()
    expect(details(page, hostile)).to_contain_text(f"by {HOSTILE}")
    assert page.title() != "run"
    assert page.locator(".dynamo-lock img").count() == 0


def test_hundreds_of_locks_are_read_page_by_page(testbed: Testbed, visit: Visit, key: str) -> None:
    for number in range(130):
        testbed.locks.acquire(f"{key}/{number:03}", lease=300)
    visitor: Visitor = visit()
    page = visitor.open()
    page.get_by_label("Search").fill(key)
    expect(page.get_by_text("1 to 100 of 130")).to_be_visible()
    page.get_by_role("button", name="Next").click()
    expect(page.get_by_text("101 to 130 of 130")).to_be_visible()
    expect(row(page, f"{key}/129")).to_be_visible()
    assert visitor.findings() == []
    expect(page.get_by_role("button", name="Next")).to_be_disabled()
    page.get_by_role("button", name="Previous").click()
    expect(row(page, f"{key}/000")).to_be_visible()
