"""What Airflow asks an installed provider about itself. Importable without any configuration."""

from __future__ import annotations

from typing import Any

from airflow_dynamo_lock import __version__

_NAME = "DynamoDB Lock"

#: The fields of a connection, and the options of the configuration section: name → label, type, description.
FIELDS: dict[str, tuple[str, str, str]] = {
    "table": ("Lock table", "string", "The DynamoDB table that holds the locks. Default airflow_locks."),
    "aws_conn_id": (
        "AWS connection",
        "string",
        "The connection with the AWS credentials. Default aws_default.",
    ),
    "region_name": ("Region", "string", "The table's AWS region. Default: the AWS connection's."),
    "endpoint_url": ("Endpoint URL", "string", "Another DynamoDB endpoint than AWS's own, e.g. a local one."),
    "lease": (
        "Default lease",
        "number",
        "How long a lease lasts after its last heartbeat, seconds. Default 120.",
    ),
    "deployment": (
        "Deployment name",
        "string",
        "This deployment's name, shown to those who wait for its locks.",
    ),
    "botocore_config": (
        "SDK settings",
        "string",
        "Settings of the botocore client that replace ours, as JSON.",
    ),
    "streams": (
        "Use the table's stream",
        "boolean",
        "Let triggerers read the table's DynamoDB stream, so that locks are handed over sooner. Default false.",
    ),
    "format": (
        "Format",
        "string",
        "The table's format, to share it with another lock library: native (the default), amazon-lock-client, "
        "python-dynamodb-lock, dyndbmutex, awsflock or s3 (then the lock table is a bucket).",
    ),
    "partition_key": (
        "Partition key",
        "string",
        "How another library's table names its partition key. Default: as the library does.",
    ),
    "sort_key": ("Sort key", "string", "The same for its sort key."),
}

#: The standard fields of a connection that its form does not show.
HIDDEN_FIELDS = ["host", "port", "login", "password", "schema", "extra"]


def get_provider_info() -> dict[str, Any]:
    """The provider's description."""
    return {
        "package-name": "airflow-dynamo-lock",
        "name": _NAME,
        "description": "Locks on DynamoDB that DAGs in any number of Airflow deployments share.",
        "versions": [__version__],
        "integrations": [
            {
                "integration-name": _NAME,
                "external-doc-url": "https://aws.amazon.com/dynamodb/",
                "tags": ["service"],
            }
        ],
        "operators": [
            {"integration-name": _NAME, "python-modules": ["airflow_dynamo_lock.airflow.operators"]}
        ],
        "sensors": [{"integration-name": _NAME, "python-modules": ["airflow_dynamo_lock.airflow.sensors"]}],
        "hooks": [{"integration-name": _NAME, "python-modules": ["airflow_dynamo_lock.airflow.hooks"]}],
        "triggers": [{"integration-name": _NAME, "python-modules": ["airflow_dynamo_lock.airflow.triggers"]}],
        "task-decorators": [
            {"name": "dynamo_lock", "class-name": "airflow_dynamo_lock.airflow.decorators.dynamo_lock_task"}
        ],
        "connection-types": [
            {
                "connection-type": "dynamo_lock",
                "hook-class-name": "airflow_dynamo_lock.airflow.hooks.DynamoLockHook",
                "hook-name": _NAME,
                "ui-field-behaviour": {
                    "hidden-fields": HIDDEN_FIELDS,
                    "relabeling": {},
                    "placeholders": {},
                },
                "conn-fields": {
                    name: {"label": label, "description": description, "schema": {"type": [kind, "null"]}}
                    for name, (label, kind, description) in FIELDS.items()
                },
            }
        ],
        "cli": ["airflow_dynamo_lock.cli.airflow.commands"],
        "config": {
            "dynamo_lock": {
                "description": "The lock table, where there is no connection dynamo_lock_default.",
                "options": {
                    name: {
                        "description": description,
                        "version_added": "0.1.0",
                        "type": "float" if kind == "number" else kind,
                        "example": None,
                        "default": None,
                    }
                    for name, (_, kind, description) in FIELDS.items()
                },
            }
        },
    }
