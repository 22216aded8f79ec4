"""The web service of the Locks page: what each role may read and do, and how actions are recorded.

The requests go through Airflow's own authorization with its simple auth manager; only its database is replaced.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.api_fastapi.auth.managers.simple.simple_auth_manager import SimpleAuthManager
from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser
from airflow.api_fastapi.common.db.common import _get_session
from airflow.api_fastapi.core_api import security
from fastapi import HTTPException
from fastapi.testclient import TestClient
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from airflow_dynamo_lock import LockClient
from airflow_dynamo_lock.airflow.hooks import DynamoLockHook
from airflow_dynamo_lock.airflow.page import rows, service
from airflow_dynamo_lock.airflow.page.snapshots import Snapshots
from airflow_dynamo_lock.core.model.errors import LockAccessError, LockError
from deployments.patience import PATIENCE, wait_until
from tests.monitoring.test_checks import MIN, NOW, a_state, a_waiter, held
from tests.page.actions import OWN, actions

pytestmark = pytest.mark.usefixtures("connection")

ROLES = ("anonymous", "VIEWER", "USER", "OP", "ADMIN")


class Manager(SimpleAuthManager):
    """Airflow's simple auth manager, which knows one DAG without a database."""

    calls = 0

    def get_authorized_dag_ids(self, *, user: Any, method: Any = "GET", session: Any = None) -> set[str]:
        Manager.calls += 1
        return {"warehouse"} if user.role != "USER" else set()


@pytest.fixture
def audited() -> list[Any]:
    return []


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch, audited: list[Any]) -> Iterator[Callable[[str], TestClient]]:
    """Creates an HTTP client of the service, for a user with a role."""
    manager = Manager()  # type: ignore[no-untyped-call]
    for module in (service, security):
        monkeypatch.setattr(module, "get_auth_manager", lambda: manager)
    monkeypatch.setattr(service, "snapshots", Snapshots(service._connect))
    service._deployment.cache_clear()

    def session() -> Iterator[Any]:
        """Like Airflow's session, it is rolled back if the request fails."""
        added: list[Any] = []
        yield SimpleNamespace(execute=lambda _: [], add=added.append, commit=lambda: None, flush=lambda: None)
        audited.extend(added)

    service.app.dependency_overrides[_get_session] = session

    def as_user(role: str) -> TestClient:
        service._dags_of_users.clear()

        def user() -> SimpleAuthManagerUser:
            if role == "anonymous":
                raise HTTPException(401, "Not authenticated")
            return SimpleAuthManagerUser(username="anna", role=role)

        service.app.dependency_overrides[security.get_user] = user
        return TestClient(service.app)

    yield as_user
    service.app.dependency_overrides.clear()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


def row_of(client: TestClient, key: str, **query: Any) -> dict[str, Any]:
    found = client.get("/locks", params={"search": key, **query}).json()["rows"]
    return next(each for each in found if each["key"] == key)


# -- permissions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
def test_which_roles_may_read(
    page: Callable[[str], TestClient], locks: LockClient, key: str, role: str
) -> None:
    locks.acquire(key)
    client = page(role)
    wanted = {"anonymous": 401}.get(role, 200)
    on_lock = f"conn=dynamo_lock_default&key={key}"
    for path in ("/locks", "/locks.js", "/metrics", f"/queue?{on_lock}", f"/history?{on_lock}"):
        assert client.get(path).status_code == wanted, path


@pytest.mark.parametrize("role", ROLES)
def test_which_roles_may_act(
    page: Callable[[str], TestClient], key: str, role: str, audited: list[Any]
) -> None:
    client = page(role)
    wanted = {"anonymous": 401, "VIEWER": 403, "USER": 403}.get(role)
    for path, body in actions(key).items():
        status = client.post(path, json=body, headers=OWN).status_code
        assert status == wanted if wanted else status in (200, 409), path
    assert bool(audited) is (wanted is None)


@pytest.mark.parametrize("path", ["/break", "/remove", "/capacity"])
def test_nothing_changes_by_get_or_by_a_form_of_another_site(
    page: Callable[[str], TestClient], key: str, path: str
) -> None:
    client, body = page("ADMIN"), actions(key)[path]
    assert client.get(path).status_code == 405
    assert client.post(path, json=body).status_code == 403, "without the header of the page's script"
    assert client.post(path, data=body, headers=OWN).status_code == 422
    assert (
        client.post(path, content=json.dumps(body), headers={"Content-Type": "text/plain"}).status_code == 403
    )


@pytest.mark.parametrize("role", ["VIEWER", "ADMIN"])
def test_a_connection_that_is_not_configured_cannot_be_probed(
    page: Callable[[str], TestClient], role: str
) -> None:
    client = page(role)
    for path in (
        "/locks?conn=aws_default",
        "/queue?conn=aws_default&key=k",
        "/history?conn=aws_default&key=k",
    ):
        assert client.get(path).status_code == 404
    if role == "ADMIN":
        for path, body in actions("k").items():
            refused = client.post(path, json=body | {"conn": "aws_default"}, headers=OWN)
            assert refused.status_code == 404
            assert "page_connections" in refused.json()["detail"]


def test_the_page_says_whether_its_user_may_act(page: Callable[[str], TestClient]) -> None:
    assert page("VIEWER").get("/locks").json()["may_act"] is False
    assert page("OP").get("/locks").json()["may_act"] is True


# -- answers -----------------------------------------------------------------------------------------------------------


def test_a_lock_is_shown_with_its_holder_and_its_queue(
    page: Callable[[str], TestClient], locks: LockClient, key: str, threads: ThreadPoolExecutor
) -> None:
    about = {"deployment": "airflow", "dag_id": "warehouse", "run_id": "r/1", "task_id": "lock.acquire"}
    lease = locks.acquire(key, about=about)
    waiting = threads.submit(locks.acquire, key)
    wait_until(lambda: locks.waiters(key))

    row = row_of(page("VIEWER"), key)
    assert (row["kind"], row["waiting"], row["token"]) == ("plain", 1, lease.token)
    (holder,) = row["holders"]
    assert (holder["owner"], holder["lease_id"]) == ("the tests", lease.lease_id)
    assert holder["link"] == "dags/warehouse/runs/r%2F1/tasks/lock.acquire"
    assert row_of(page("USER"), key)["holders"][0]["link"] is None, "this user may not read the DAG"

    answer = page("VIEWER").get("/queue", params={"conn": "dynamo_lock_default", "key": key}).json()
    assert [(each["position"], each["owner"]) for each in answer["waiters"]] == [(1, "the tests")]
    locks.release(lease)
    locks.release(waiting.result())


def test_a_free_lock_shows_its_previous_holder(
    page: Callable[[str], TestClient], locks: LockClient, key: str
) -> None:
    locks.release(locks.acquire(key))
    row = row_of(page("VIEWER"), key)
    assert row["holders"] == []
    assert row["previous"]["owner"] == "the tests"
    assert row["previous"]["until"].startswith("20")


def test_a_lock_without_a_record_has_no_queue(page: Callable[[str], TestClient]) -> None:
    answer = page("VIEWER").get("/queue", params={"conn": "dynamo_lock_default", "key": "never/used"})
    assert answer.status_code == 404
    assert answer.json()["detail"] == "There is no record of the lock 'never/used'."


def test_an_unchanged_answer_is_not_sent_again(page: Callable[[str], TestClient]) -> None:
    client = page("VIEWER")
    first = client.get("/locks")
    again = client.get("/locks", headers={"If-None-Match": first.headers["ETag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_the_dags_of_a_user_are_not_read_at_each_poll(
    page: Callable[[str], TestClient], locks: LockClient, key: str
) -> None:
    locks.acquire(key)
    client, calls = page("VIEWER"), Manager.calls
    for _ in range(5):
        client.get("/locks")
        client.get(f"/queue?conn=dynamo_lock_default&key={key}")
    assert Manager.calls == calls + 1


@pytest.mark.parametrize(
    ("extra", "text", "what_to_do"),
    [
        ({"table": "nowhere"}, "'nowhere' does not exist .* `dynamo-lock table create`", ""),
        ({"table": "locks", "lease": "soon"}, "must be a number of seconds", "Correct the connection."),
    ],
)
def test_a_table_that_cannot_be_read_is_reported_with_advice(
    page: Callable[[str], TestClient],
    monkeypatch: pytest.MonkeyPatch,
    extra: dict[str, str],
    text: str,
    what_to_do: str,
) -> None:
    monkeypatch.setenv(
        "AIRFLOW_CONN_DYNAMO_LOCK_DEFAULT", json.dumps({"conn_type": "dynamo_lock", "extra": extra})
    )
    answer = page("VIEWER").get("/locks").json()
    assert re.search(text, answer["error"]["text"])
    assert answer["error"]["help"] == what_to_do
    name = "nowhere" if extra["table"] == "nowhere" else "dynamo_lock_default"
    text = page("VIEWER").get("/metrics").text
    assert f'dynamo_lock_up{{table="{name}"}} 0\n' in text
    assert "dynamo_lock_locks" not in text


def test_the_service_has_metrics_of_the_tables(
    page: Callable[[str], TestClient], locks: LockClient, key: str
) -> None:
    locks.acquire(key)
    text = page("VIEWER").get("/metrics", params={"keys": 1000}).text
    found = {family.name for family in text_string_to_metric_families(text)}  # type: ignore[no-untyped-call]
    assert {"dynamo_lock_held", "dynamo_lock_key_holders"} <= found


def test_a_table_that_cannot_be_read_does_not_hide_the_metrics_of_others(
    page: Callable[[str], TestClient], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A table of its own: other tests leave damaged records in the table that they share.
    for name, table in (("OWN", "own"), ("WEST", "nowhere")):
        extra = {"table": table, "region_name": "us-west-2"}
        monkeypatch.setenv(f"AIRFLOW_CONN_{name}", json.dumps({"conn_type": "dynamo_lock", "extra": extra}))
    monkeypatch.setenv("AIRFLOW__DYNAMO_LOCK__PAGE_CONNECTIONS", "own,west")
    locks = DynamoLockHook("own").get_conn()
    locks.create_table()
    locks.acquire(key)

    text = page("VIEWER").get("/metrics").text

    for line in ('up{table="own"} 1', 'up{table="nowhere"} 0', 'damaged{table="own"} 0'):
        assert f"dynamo_lock_{line}\n" in text
    assert re.search(r'dynamo_lock_holders{table="own"} [1-9]', text)


def test_what_another_program_has_written_about_a_holder_does_no_harm(
    page: Callable[[str], TestClient], locks: LockClient, key: str
) -> None:
    lease = locks.acquire(key)
    about = {"deployment": {"S": "airflow"}, "dag_id": {"L": [{"S": "warehouse"}]}, "run_id": {"S": "r"}}
    locks._client.update_item(
        TableName=locks.table,
        Key={"key": {"S": key}, "entry": {"S": "lock"}},
        UpdateExpression="SET holders.#id.about = :about",
        ExpressionAttributeNames={"#id": lease.lease_id},
        ExpressionAttributeValues={":about": {"M": about}},
    )
    client = page("VIEWER")
    (holder,) = row_of(client, key)["holders"]
    assert (holder["lease_id"], holder["link"]) == (lease.lease_id, None)
    assert client.get(f"/queue?conn=dynamo_lock_default&key={key}").status_code == 200


def test_tables_of_the_same_name_have_metrics_of_their_own(
    page: Callable[[str], TestClient], locks: LockClient, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks.acquire(key)
    extra = {"table": locks.table, "region_name": "us-west-2"}
    monkeypatch.setenv("AIRFLOW_CONN_WEST", json.dumps({"conn_type": "dynamo_lock", "extra": extra}))
    monkeypatch.setenv("AIRFLOW__DYNAMO_LOCK__PAGE_CONNECTIONS", "dynamo_lock_default,west")
    DynamoLockHook("west").get_conn().create_table()

    text = page("VIEWER").get("/metrics").text

    assert 'dynamo_lock_holders{table="locks (west)"} 0\n' in text
    assert re.search(r'dynamo_lock_holders{table="locks \(dynamo_lock_default\)"} [1-9]', text)


# -- actions -----------------------------------------------------------------------------------------------------------


def test_a_lease_is_broken_with_name_and_reason(
    page: Callable[[str], TestClient], locks: LockClient, key: str, audited: list[Any]
) -> None:
    lease = locks.acquire(key)
    client = page("OP")
    assert row_of(client, key)["holders"]
    done = client.post("/break", json=actions(key, lease.lease_id)["/break"], headers=OWN)

    assert done.json() == {"outcome": "The lease of the tests is broken. It stops at its next heartbeat."}
    record = locks.get(key)
    assert record is not None
    assert record.last_loss is not None
    assert (record.last_loss.decision.by, record.last_loss.decision.reason) == ("anna@airflow", "a drill")
    assert row_of(client, key)["holders"] == [], "the service reads the table again at once"
    (entry,) = audited
    assert entry.event == "dynamo_lock.break"
    assert json.loads(entry.extra) == {**actions(key, lease.lease_id)["/break"], "method": "POST"}

    again = client.post("/break", json=actions(key, lease.lease_id)["/break"], headers=OWN)
    assert again.status_code == 409
    assert "does not hold the lock" in again.json()["detail"]


def test_a_waiter_is_removed_with_name_and_reason(
    page: Callable[[str], TestClient], locks: LockClient, key: str, threads: ThreadPoolExecutor
) -> None:
    locks.acquire(key)
    waiting = threads.submit(locks.acquire, key)
    wait_until(lambda: locks.waiters(key))
    lease_id = locks.waiters(key)[0].lease_id

    done = page("OP").post("/remove", json=actions(key, lease_id)["/remove"], headers=OWN)

    assert done.json() == {"outcome": "the tests is removed from the queue. Its task fails."}
    assert "was ended by anna@airflow (a drill)" in str(waiting.exception())


def test_a_capacity_is_set_and_unset(page: Callable[[str], TestClient], locks: LockClient, key: str) -> None:
    client, body = page("OP"), actions(key)["/capacity"]
    assert client.post("/capacity", json=body, headers=OWN).json() == {
        "outcome": "The capacity is 3, of which 3 are free."
    }
    assert row_of(client, key)["pinned"] is True
    unset = client.post("/capacity", json=body | {"capacity": None}, headers=OWN)
    assert unset.json() == {"outcome": "Claims decide the capacity again."}
    locks.acquire(key)
    refused = client.post("/capacity", json=body, headers=OWN)
    assert refused.status_code == 409
    assert "is in use as a plain lock" in refused.json()["detail"]


@pytest.mark.parametrize(
    ("wrong", "status"),
    [
        ({}, 409),
        ({"lease_id": ""}, 422),
        ({"reason": ""}, 422),
        ({"conn": "aws_default"}, 404),
    ],
    ids=str,
)
def test_a_refused_action_is_not_in_the_audit_log(
    page: Callable[[str], TestClient],
    locks: LockClient,
    key: str,
    audited: list[Any],
    wrong: dict[str, Any],
    status: int,
) -> None:
    locks.acquire(key)
    body = actions(key, "another lease")["/break"] | wrong
    assert page("ADMIN").post("/break", json=body, headers=OWN).status_code == status
    assert audited == []


@pytest.mark.parametrize(
    "wrong", [{"reason": ""}, {"reason": "x" * 201}, {"lease_id": None}, {"more": 1}], ids=str
)
def test_an_invalid_request_changes_nothing(
    page: Callable[[str], TestClient], locks: LockClient, key: str, wrong: dict[str, Any]
) -> None:
    lease = locks.acquire(key)
    body = actions(key, lease.lease_id)["/break"] | wrong
    assert page("ADMIN").post("/break", json=body, headers=OWN).status_code == 422
    assert locks.renew(lease)


def test_a_permission_that_the_service_lacks_is_its_own_error(
    page: Callable[[str], TestClient], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: Any, **__: Any) -> None:
        raise LockAccessError("Not allowed.")

    monkeypatch.setattr(LockClient, "break_lock", denied)
    answer = page("ADMIN").post("/break", json=actions(key)["/break"], headers=OWN)
    assert (answer.status_code, answer.json()["detail"]) == (502, "Not allowed.")


# -- shared reads ------------------------------------------------------------------------------------------------------


class Table:
    """A client that counts how often it reads its table."""

    table = "t"

    def __init__(self) -> None:
        self.reads, self.fails = 0, False

    def survey(self, **_: Any) -> list[Any]:
        self.reads += 1
        if self.fails:
            raise LockError("No.")
        return [a_state()]


def test_twenty_open_pages_read_no_more_often_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    table, now = Table(), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    snapshots = Snapshots(lambda _: table)  # type: ignore[arg-type,return-value]

    for second in range(60):
        now[0] = 100.0 + second
        for _ in range(20):
            snapshots.latest("c")
    assert table.reads == 30


def test_a_large_table_is_read_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    class Large(Table):
        def survey(self, **query: Any) -> list[Any]:
            now[0] += 3.0
            return super().survey(**query)

    assert Snapshots(lambda _: Large()).latest("c").fresh_seconds == 30.0  # type: ignore[arg-type,return-value]


def test_after_an_error_the_connection_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now, made = [100.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def connect(_: str) -> Any:
        made.append(Table())
        made[-1].fails = len(made) == 1
        return made[-1]

    snapshots = Snapshots(connect)
    assert str(snapshots.latest("c").error) == "No."
    now[0] += 2.0
    assert snapshots.latest("c").error is None
    assert len(made) == 2


def test_while_a_table_is_read_again_the_previous_answer_is_given(threads: ThreadPoolExecutor) -> None:
    reading, answered = threading.Event(), threading.Event()

    class Stuck(Table):
        def survey(self, **query: Any) -> list[Any]:
            if self.reads:
                reading.set()
                assert answered.wait(PATIENCE)
            return super().survey(**query)

    snapshots = Snapshots(lambda _: Stuck.only)  # type: ignore[attr-defined]
    Stuck.only = Stuck()  # type: ignore[attr-defined]
    first = snapshots.latest("c")
    snapshots._latest["c"] = 0.0, first  # no longer fresh
    second = threads.submit(snapshots.latest, "c")
    assert reading.wait(PATIENCE)
    assert snapshots.latest("c") is first
    answered.set()
    assert second.result() is not first


def test_an_action_during_a_read_causes_another_read(threads: ThreadPoolExecutor) -> None:
    reading, acted = threading.Event(), threading.Event()

    class Slow(Table):
        def survey(self, **query: Any) -> list[Any]:
            states = super().survey(**query)
            reading.set()
            assert acted.wait(PATIENCE)
            return states

    table = Slow()
    snapshots = Snapshots(lambda _: table)  # type: ignore[arg-type,return-value]
    first_read = threads.submit(snapshots.latest, "c")
    assert reading.wait(PATIENCE)
    forgetting = threads.submit(snapshots.forget, "c")
    wait([forgetting], 0.2)
    acted.set()
    first_read.result()
    forgetting.result()
    snapshots.latest("c")
    assert table.reads == 2


# -- rows --------------------------------------------------------------------------------------------------------------


def chosen(*states: Any, **query: Any) -> list[str]:
    defaults: dict[str, Any] = {"search": "", "state": "all", "deployment": "", "dag_id": "", "sort": "key"}
    descending = query.pop("descending", False)
    return [each.record.key for each in rows.selected(states, **(defaults | query), descending=descending)]


NORTH = {"deployment": "north", "dag_id": "etl"}
STATES = (
    a_state(key="free"),
    a_state(key="held", holders=held(NOW - MIN, about=NORTH)),
    a_state(
        a_waiter("South/x", NOW - MIN, about={"deployment": "south", "dag_id": "export"}),
        key="busy",
        holders=held(NOW - 5 * MIN, renewed_at_ms=NOW - 1000),
    ),
)


@pytest.mark.parametrize(
    ("query", "keys"),
    [
        ({}, ["busy", "free", "held"]),
        ({"state": "held"}, ["busy", "held"]),
        ({"state": "free"}, ["free"]),
        ({"state": "waiting"}, ["busy"]),
        ({"state": "lost"}, []),
        ({"search": "SOUTH"}, ["busy"]),
        ({"search": "fre"}, ["free"]),
        ({"search": "north"}, ["busy", "held"]),
        ({"deployment": "north"}, ["held"]),
        ({"deployment": "south"}, ["busy"]),
        ({"dag_id": "export"}, ["busy"]),
        ({"sort": "held", "descending": True}, ["busy", "held", "free"]),
        ({"sort": "waited"}, ["free", "held", "busy"]),
        ({"sort": "heartbeat", "descending": True}, ["busy", "held", "free"]),
    ],
    ids=str,
)
def test_rows_are_chosen_and_sorted(query: dict[str, Any], keys: list[str]) -> None:
    assert chosen(*STATES, **query) == keys


def test_the_deployments_are_those_that_hold_or_wait() -> None:
    assert rows.deployments(STATES) == ["north", "south"]


@pytest.mark.parametrize(
    ("about", "link"),
    [
        ({"dag_id": "etl", "run_id": "r", "task_id": "t"}, "dags/etl/runs/r/tasks/t"),
        (
            {"dag_id": "etl", "run_id": "r", "task_id": "t", "map_index": "3"},
            "dags/etl/runs/r/tasks/t/mapped/3",
        ),
        (
            {"dag_id": "etl", "run_id": "../x?y#z", "task_id": "a/b"},
            "dags/etl/runs/..%2Fx%3Fy%23z/tasks/a%2Fb",
        ),
        ({"dag_id": "etl", "run_id": "r"}, "dags/etl/runs/r"),
        ({"dag_id": "secret", "run_id": "r"}, None),
        ({"dag_id": "etl"}, None),
        ({"dag_id": "etl", "run_id": "r", "deployment": "south"}, None),
        ({}, None),
    ],
)
def test_links_lead_to_runs_of_this_deployment_that_the_viewer_may_read(
    about: dict[str, str], link: str
) -> None:
    viewer = rows.Viewer("north", {"etl"})
    assert viewer.link({"deployment": "north"} | about) == link


def test_rows_show_the_kind_of_a_lock() -> None:
    viewer = rows.Viewer("north", set())
    record = a_state(holders=held(NOW)).record
    shared = replace(a_state(), record=replace(record, capacity=10**9, available=10**9 - 1))
    slots = replace(a_state(), record=replace(record, capacity=3, available=2))
    assert (rows.row(shared, viewer)["kind"], rows.row(shared, viewer)["capacity"]) == ("readers", None)
    assert (rows.row(slots, viewer)["kind"], rows.row(slots, viewer)["available"]) == ("slots", 2)


def test_a_long_queue_is_cut() -> None:
    state = a_state(*(a_waiter(f"w{number}", place=str(number)) for number in range(600)))
    assert len(rows.queue(state, rows.Viewer("north", set()), 500)) == 500
