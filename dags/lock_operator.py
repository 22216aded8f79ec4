"""One Python function under a lock, in a task of its own: the operator waits, runs it, and releases the lock.

The key is a template, so that two runs for different customers do not wait for each other.
"""

from __future__ import annotations

from typing import Any

from airflow.sdk import DAG, Param

from airflow_dynamo_lock import DynamoLockOperator


def send_invoice(customer: str, **context: Any) -> str:
    lease = context["dynamo_lock"]
    print(f"Nobody else invoices {customer} now: this is grant {lease.token} of {lease.key!r}.")
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
