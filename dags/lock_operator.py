"""An operator that waits for a lock, runs a Python function while it holds the lock, and releases it.

The key is a template. Runs for different customers use different locks, and do not wait for each other.
"""

from __future__ import annotations

from typing import Any

from airflow.sdk import DAG, Param

from airflow_dynamo_lock import DynamoLockOperator


def send_invoice(customer: str, **context: Any) -> str:
    lease = context["dynamo_lock"]
    print(f"Only this run invoices {customer} now. It holds {lease.key!r} with the token {lease.token}.")
    return customer


with DAG(
    "dynamo_lock_operator",
    schedule=None,
    params={"customer": Param("acme", type="string")},
    doc_md=__doc__,
):
    DynamoLockOperator(
        task_id="send_invoice",
        key="invoices/{{ params.customer }}",
        python_callable=send_invoice,
        op_kwargs={"customer": "{{ params.customer }}"},
    )
