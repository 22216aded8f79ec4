"""The Airflow plugin: the operators' links."""

from __future__ import annotations

from airflow.providers.common.compat.sdk import AirflowPlugin


class DynamoLockPlugin(AirflowPlugin):
    """Loaded by its entry point."""

    name = "dynamo_lock"
