"""The Airflow plugin, which registers the operators' link to the lock record."""

from __future__ import annotations

from airflow_dynamo_lock.airflow.links import LockRecordLink
from airflow_dynamo_lock.airflow.versions import AirflowPlugin


class DynamoLockPlugin(AirflowPlugin):
    """Registers `LockRecordLink`. Airflow finds this class by the entry point ``airflow.plugins``."""

    name = "dynamo_lock"
    operator_extra_links = [LockRecordLink()]  # noqa: RUF012 - Airflow's declaration
