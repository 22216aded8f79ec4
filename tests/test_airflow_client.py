"""The REST client of the demo and of the tests: retries, errors and logs."""

from __future__ import annotations

from datetime import UTC, datetime

import httpx
import pytest

from deployments.airflow_client import AUDITS, AirflowClient, AirflowError

UNAUDITED = {
    "detail": {"reason": "Database error", "statement": "INSERT INTO log (dttm, dag_id) VALUES (?, ?)"}
}
BROKEN = {"detail": {"reason": "Database error", "statement": "INSERT INTO dag_run (dag_id) VALUES (?)"}}


def client_with_answers(answers: list[httpx.Response]) -> tuple[AirflowClient, list[str]]:
    """Return a client that receives these answers, the last one repeatedly, and the methods of its requests."""
    client, seen = AirflowClient("http://127.0.0.1:1", "admin", "secret"), list[str]()

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/auth/token":
            return httpx.Response(201, json={"access_token": "token"})
        seen.append(request.method)
        return answers.pop(0) if len(answers) > 1 else answers[0]

    client.__dict__["_http"] = httpx.Client(base_url=client.url, transport=httpx.MockTransport(answer))
    return client, seen


def test_a_request_is_retried_if_airflow_could_not_audit_it() -> None:
    done = httpx.Response(200, json={"dag_run_id": "run"})
    client, seen = client_with_answers(
        [httpx.Response(500, json=UNAUDITED), httpx.Response(500, json=UNAUDITED), done]
    )

    assert client.trigger("dag") == "run"
    assert seen == ["POST"] * 3


@pytest.mark.parametrize(("answer", "times"), [(UNAUDITED, AUDITS), (BROKEN, 1)])
def test_other_errors_and_a_lasting_audit_error_are_raised(answer: object, times: int) -> None:
    client, seen = client_with_answers([httpx.Response(500, json=answer)])

    with pytest.raises(AirflowError, match=r"500 .*Database error"):
        client.trigger("dag")
    assert len(seen) == times


def test_a_timed_log_has_the_times_of_its_messages() -> None:
    names = ("id", "dag_id", "dag_run_id", "task_id", "map_index", "state", "pid", "hostname")
    times = ("queued_when", "start_date", "end_date", "rendered_fields")
    instance = dict.fromkeys((*names, *times)) | {"try_number": 1}
    content = [
        {"event": "::group::Log message source details"},
        {"event": "Acquired", "timestamp": "2026-11-25T07:50:24.878000Z"},
    ]
    client, _ = client_with_answers(
        [httpx.Response(200, json=instance), httpx.Response(200, json={"content": content})]
    )

    assert client.timed_log("dag", "run", "task") == [
        (datetime(2026, 11, 25, 7, 50, 24, 878000, UTC), "Acquired")
    ]
