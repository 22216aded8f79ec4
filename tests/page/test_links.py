"""The links of tasks to their lock, as the API server computes them from a serialized DAG."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from airflow import plugins_manager
from airflow.sdk import DAG, task
from airflow.serialization.serialized_objects import DagSerialization

from airflow_dynamo_lock import DynamoLockAcquireOperator, DynamoLockOperator, DynamoLockSensor
from airflow_dynamo_lock.airflow import operators
from airflow_dynamo_lock.airflow.decorators import _DynamoLockDecoratedOperator
from airflow_dynamo_lock.airflow.links import LocksPageLink
from airflow_dynamo_lock.airflow.plugin import DynamoLockPlugin

RUN = SimpleNamespace(dag_id="d", run_id="manual__2026-11-20T22:36:45+00:00", task_id="t", map_index=-1)


def links_of(dag: DAG, monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """Return the address of each task's link *Lock*, after the API server has read the serialized DAG."""
    monkeypatch.setattr(
        plugins_manager, "get_operator_extra_links", lambda: DynamoLockPlugin.operator_extra_links
    )
    read = DagSerialization.from_dict(DagSerialization.to_dict(dag))
    found: dict[str, str | None] = {}
    for each in read.task_dict.values():
        link = each.operator_extra_link_dict.get("Lock")
        found[each.task_id] = None if link is None else link.get_link(each, ti_key=RUN)  # type: ignore[arg-type]
    return found


def test_each_task_that_acquires_a_lock_has_a_link_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with DAG("d") as dag:
        DynamoLockAcquireOperator(task_id="one", key="warehouse/orders")
        DynamoLockOperator(task_id="several", key=["a b", "c"], python_callable=print)
        DynamoLockAcquireOperator(task_id="templated", key="{{ params.key }}")
        DynamoLockSensor(task_id="sensor", key="k")
        DynamoLockAcquireOperator(task_id="elsewhere", key="k", dynamo_lock_conn_id="locks_eu")
        DynamoLockAcquireOperator(task_id="somewhere", key="k", dynamo_lock_conn_id="{{ params.conn }}")

        @task.dynamo_lock(key="decorated&more")
        def decorated() -> None: ...

        decorated()

    page = "/plugin/locks?conn=dynamo_lock_default"
    assert links_of(dag, monkeypatch) == {
        "one": f"{page}&key=warehouse%2Forders",
        "several": f"{page}&key=a+b",
        "templated": f"{page}&search=manual__2026-11-20T22%3A36%3A45%2B00%3A00",
        "decorated": f"{page}&key=decorated%26more",
        "sensor": None,
        "elsewhere": "/plugin/locks?conn=locks_eu&key=k",
        "somewhere": "/plugin/locks?key=k",
    }


def test_the_address_begins_with_the_path_of_the_web_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", "https://example.org/team/airflow/")
    operator: Any = SimpleNamespace(key="k", dynamo_lock_conn_id="c")
    assert LocksPageLink().get_link(operator, ti_key=RUN) == "/team/airflow/plugin/locks?conn=c&key=k"


def test_the_link_names_the_classes_of_the_operators() -> None:
    classes = [operators.DynamoLockAcquireOperator, DynamoLockOperator, _DynamoLockDecoratedOperator]
    named = [(each.__module__, each.__name__) for each in LocksPageLink.operators]
    assert named == [(each.__module__, each.__name__) for each in classes]
