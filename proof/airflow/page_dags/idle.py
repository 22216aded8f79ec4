"""Two DAGs that never run, for the tests of the Locks page's permissions."""

from __future__ import annotations

from airflow.sdk import DAG

payroll = DAG("payroll", schedule=None)
warehouse = DAG("warehouse", schedule=None)
