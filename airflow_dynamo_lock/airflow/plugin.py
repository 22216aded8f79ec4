"""The Airflow plugin: lets Airflow's web interface show the operators' link."""

from __future__ import annotations

from airflow_dynamo_lock.airflow.links import LockRecordLink
from airflow_dynamo_lock.airflow.versions import AirflowPlugin


class DynamoLockPlugin(AirflowPlugin):
    """Loaded by its entry point."""

    name = "dynamo_lock"
    operator_extra_links = [LockRecordLink()]  # noqa: RUF012 - as Airflow declares it
