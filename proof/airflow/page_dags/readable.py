"""Two DAGs for the tests of the Locks page's permissions. They never run."""

from __future__ import annotations

from airflow.sdk import DAG

for _dag_id in ("warehouse", "payroll"):
    globals()[_dag_id] = DAG(_dag_id, schedule=None)
