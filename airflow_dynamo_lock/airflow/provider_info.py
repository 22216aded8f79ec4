"""The provider's description, which Airflow reads by the entry point ``apache_airflow_provider``.

Airflow reads it while it loads its own configuration, so this module imports nothing from Airflow.
"""

from __future__ import annotations

from typing import Any

from airflow_dynamo_lock import __version__

_NAME = "DynamoDB Lock"

#: Type of the connections that have the settings of a lock table.
CONN_TYPE = "dynamo_lock"

#: Fields of a connection, which are also the options of the section ``[dynamo_lock]`` in Airflow's
#: configuration: name → label, type, description.
FIELDS: dict[str, tuple[str, str, str]] = {
    "table": ("Lock table", "string", "The DynamoDB table that contains the locks. Default: airflow_locks."),
    "aws_conn_id": (
        "AWS connection",
        "string",
        "The connection that contains the AWS credentials. Default: aws_default.",
    ),
    "region_name": ("Region", "string", "The table's AWS region. Default: the region of the AWS connection."),
    "endpoint_url": (
        "Endpoint URL",
        "string",
        "URL of another DynamoDB endpoint, for example a local one. Default: AWS's endpoint for the region.",
    ),
    "lease": (
        "Default lease",
        "number",
        "Time for which a lease lasts after its last heartbeat, in seconds. Default: 120.",
    ),
    "deployment": (
        "Deployment name",
        "string",
        "Name of this Airflow deployment. Logs of other deployments show it while they wait for its locks.",
    ),
    "botocore_config": (
        "SDK settings",
        "string",
        "Settings of the botocore client, as JSON. They override the settings that this package makes.",
    ),
    "streams": (
        "Use the table's stream",
        "boolean",
        "Let triggerers read the table's DynamoDB stream, for faster hand-over of locks. Default: false.",
    ),
    "format": (
        "Format",
        "string",
        "The table's format: native (the default), or that of another lock library that uses the same table: "
        "amazon-lock-client, python-dynamodb-lock, dyndbmutex, awsflock or s3. With s3, enter the name of a "
        "bucket as the lock table.",
    ),
    "partition_key": (
        "Partition key",
        "string",
        "Name of the table's partition key, if the format is another library's. Default: as in that library.",
    ),
    "sort_key": (
        "Sort key",
        "string",
        "Name of the table's sort key, if the format is another library's. Default: as in that library.",
    ),
}

#: Further options of that section: name → label, type, description.
PAGE_OPTIONS: dict[str, tuple[str, str, str]] = {
    "page_connections": (
        "Connections of the Locks page",
        "string",
        "The connections whose tables the Locks page shows, separated by commas. Default: dynamo_lock_default.",
    ),
}

# Options that Airflow hides where it shows its configuration: the URL of a proxy may contain a password.
_SENSITIVE = {"botocore_config"}

#: Standard fields of Airflow's connections that the form does not show.
HIDDEN_FIELDS = ["host", "port", "login", "password", "schema", "extra"]


def get_provider_info() -> dict[str, Any]:
    """Return the provider's description, in the layout of Airflow's ``provider_info.schema.json``."""
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
            {
                "integration-name": _NAME,
                "python-modules": [
                    "airflow_dynamo_lock.airflow.operators",
                    "airflow_dynamo_lock.airflow.locked_function",
                ],
            }
        ],
        "sensors": [{"integration-name": _NAME, "python-modules": ["airflow_dynamo_lock.airflow.sensors"]}],
        "hooks": [{"integration-name": _NAME, "python-modules": ["airflow_dynamo_lock.airflow.hooks"]}],
        "triggers": [{"integration-name": _NAME, "python-modules": ["airflow_dynamo_lock.airflow.triggers"]}],
        "task-decorators": [
            {"name": "dynamo_lock", "class-name": "airflow_dynamo_lock.airflow.decorators.dynamo_lock_task"}
        ],
        "connection-types": [
            {
                "connection-type": CONN_TYPE,
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
        "cli": ["airflow_dynamo_lock.airflow.commands.commands"],
        "config": {
            "dynamo_lock": {
                "description": "Settings for locks, used if there is no connection dynamo_lock_default, and of "
                "the Locks page.",
                "options": {
                    name: {
                        "description": description,
                        "version_added": "0.1.0",
                        "type": "float" if kind == "number" else kind,
                        "example": None,
                        "default": None,
                        "sensitive": name in _SENSITIVE,
                    }
                    for name, (_, kind, description) in {**FIELDS, **PAGE_OPTIONS}.items()
                },
            }
        },
    }
